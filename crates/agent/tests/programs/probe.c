/* Calls the fork API and prints what it got; probe.py prints the same. */
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
#include <vmfork.h>

static void each(int vmid, const char *why, void *context)
{
	(void)context;
	printf("worker %d: %s\n", vmid, why ? why : "done");
}

/* Ask for a ticket, clone, and do as told by what comes back. @bytes: of each message. */
static int whole(int n, int hierarchical, size_t bytes, int dying)
{
	sf_ticket ticket = sf_request_ticket(n, hierarchical);
	int vmid, from, rc;
	size_t length, i;
	void *message;

	printf("granted %d\n", ticket.granted);
	if (ticket.granted < 0)
		return 1;
	vmid = sf_clone(ticket);
	if (vmid < 0)
		return printf("clone %d\n", vmid), 1;
	if (vmid > 0) {
		char *data = malloc(bytes + 1);

		if (vmid == dying)
			_exit(3);
		memset(data, 'a' + vmid, bytes);
		printf("worker %d of %d sends %d\n", vmid, sf_vmid(), sf_send(data, bytes));
		sf_exit();
	}
	while ((rc = sf_recv(ticket, SF_ANY, &message, &length, &from)) == 0) {
		unsigned long sum = 0;

		for (i = 0; i < length; i++)
			sum += ((unsigned char *)message)[i];
		printf("from %d: %zu bytes, sum %lu\n", from, length, sum);
		free(message);
	}
	printf("recv %d\n", rc);
	rc = sf_join_each(ticket, each, NULL);
	printf("%d failed\n", rc);
	return 0;
}

int main(int argc, char **argv)
{
	sf_ticket ticket = { 77, 1, 0 };
	const char *what = argc > 1 ? argv[1] : "";
	void *message;
	size_t length;

	setvbuf(stdout, NULL, _IOLBF, 0);
	if (!strcmp(what, "whole"))
		return whole(atoi(argv[2]), atoi(argv[3]), strtoul(argv[4], NULL, 10), atoi(argv[5]));
	if (!strcmp(what, "join"))
		printf("join %d\n", sf_join(ticket));
	if (!strcmp(what, "kill"))
		printf("kill %d\n", sf_kill(ticket));
	if (!strcmp(what, "recv"))
		printf("recv %d\n", sf_recv(ticket, 3, &message, &length, NULL));
	if (!strcmp(what, "exit"))
		printf("exit %d\n", sf_exit());
	if (!strcmp(what, "send")) {
		char *data = calloc(1, 3000000);

		printf("send %d\n", sf_send(data, 3000000));
	}
	if (!strcmp(what, "ticket"))
		printf("ticket %d\n", sf_request_ticket(atoi(argv[2]), 0).granted);
	return 0;
}

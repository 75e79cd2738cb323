/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Sandboxing: fork, run the untrusted part in the clone, keep the answer, drop the clone.
 *
 *	sandbox
 *
 * One guest of the sandbox answers and wrecks what it can reach, memory and files; another never
 * comes back. The parent checks that it has the answer and nothing of the wreck.
 */
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
#include <vmfork.h>

static char secret[1 << 16];
static char precious[256];

static int fail(const char *what, int error)
{
	fprintf(stderr, "sandbox: %s: %s\n", what, strerror(-error));
	return 1;
}

/* The untrusted code. */
static void untrusted(int hangs)
{
	const char *answer = hangs ? "working on it" : "42";

	sf_send(answer, strlen(answer));
	memset(secret, 'X', sizeof(secret));
	unlink(precious);
	if (!hangs)
		sf_exit();
	for (;;)
		pause();
}

/* Run it in a clone; its first message goes to @answer. 0, or 1 with a word on stderr. */
static int run(int hangs, char *answer, size_t room)
{
	sf_ticket ticket = sf_request_ticket(1, 0);
	size_t bytes;
	void *message;
	int vmid, rc;

	if (ticket.granted < 0)
		return fail("sf_request_ticket", ticket.granted);
	vmid = sf_clone(ticket);
	if (vmid < 0)
		return fail("sf_clone", vmid);
	if (vmid > 0)
		untrusted(hangs);
	rc = sf_recv(ticket, 1, &message, &bytes, NULL);
	if (rc < 0)
		return fail("sf_recv", rc);
	snprintf(answer, room, "%.*s", (int)bytes, (char *)message);
	free(message);
	/* Whether it would ever end by itself is of no interest. */
	rc = sf_kill(ticket);
	return rc < 0 ? fail("sf_kill", rc) : 0;
}

int main(void)
{
	char answer[32];
	const char *folder = getenv("TMPDIR");
	FILE *file;
	size_t i;
	int hangs;

	snprintf(precious, sizeof(precious), "%s/vmfork-sandbox-precious", folder ? folder : "/tmp");
	file = fopen(precious, "w");
	if (!file || fclose(file) != 0)
		return fail(precious, -errno);
	memset(secret, 's', sizeof(secret));
	for (hangs = 0; hangs <= 1; hangs++) {
		if (run(hangs, answer, sizeof(answer)) != 0)
			return 1;
		printf("the sandbox said: %s\n", answer);
		if (strcmp(answer, hangs ? "working on it" : "42") != 0)
			return fail("the wrong answer", -EIO);
	}
	for (i = 0; i < sizeof(secret); i++)
		if (secret[i] != 's')
			return fail("our memory was changed", -EIO);
	if (unlink(precious) != 0)
		return fail("our file is gone", -errno);
	printf("our memory and our file are as they were\n");
	return 0;
}

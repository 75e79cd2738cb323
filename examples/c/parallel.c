/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Parallel computation: load the data once, fork n workers, join.
 *
 *	parallel [WORKERS [NUMBERS]]
 *
 * A table of numbers is loaded into memory; every worker finds the table there, looks at its share
 * and sends what it found. The parent adds up, and checks the sum against its own.
 */
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <vmfork.h>

static uint64_t steps_to_one(uint64_t n)
{
	uint64_t steps = 0;

	for (; n > 1; steps++)
		n = n % 2 ? 3 * n + 1 : n / 2;
	return steps;
}

static uint64_t share(const uint32_t *table, size_t numbers, size_t first, size_t stride)
{
	uint64_t sum = 0;
	size_t i;

	for (i = first; i < numbers; i += stride)
		sum += steps_to_one(table[i]);
	return sum;
}

static int fail(const char *what, int error)
{
	fprintf(stderr, "parallel: %s: %s\n", what, strerror(-error));
	return 1;
}

int main(int argc, char **argv)
{
	int workers = argc > 1 ? atoi(argv[1]) : 4;
	size_t numbers = argc > 2 ? strtoull(argv[2], NULL, 10) : 200000, bytes, i;
	uint32_t *table = malloc(numbers * sizeof(*table)), state = 1;
	uint64_t sum = 0, alone;
	int vmid, from, rc, answers = 0;
	sf_ticket ticket;
	void *message;

	if (!table)
		return fail("the table", -ENOMEM);
	for (i = 0; i < numbers; i++) {
		state = state * 1664525 + 1013904223;
		table[i] = state >> 8;
	}
	ticket = sf_request_ticket(workers, 1);
	if (ticket.granted < 0)
		return fail("sf_request_ticket", ticket.granted);
	vmid = sf_clone(ticket);
	if (vmid < 0)
		return fail("sf_clone", vmid);
	if (vmid > 0) {
		sum = share(table, numbers, (size_t)vmid - 1, (size_t)ticket.granted);
		rc = sf_send(&sum, sizeof(sum));
		if (rc < 0)
			return fail("sf_send", rc);
		sf_exit();
	}
	while ((rc = sf_recv(ticket, SF_ANY, &message, &bytes, &from)) == 0) {
		uint64_t part;

		if (bytes != sizeof(part))
			return fail("a message of another length", -EIO);
		memcpy(&part, message, sizeof(part));
		free(message);
		printf("worker %d: %llu\n", from, (unsigned long long)part);
		sum += part;
		answers++;
	}
	if (rc != -EPIPE) /* all have ended */
		return fail("sf_recv", rc);
	rc = sf_join(ticket);
	if (rc != 0)
		return rc < 0 ? fail("sf_join", rc) : fail("workers failed", -EIO);
	alone = share(table, numbers, 0, 1);
	printf("%d workers: %llu; alone: %llu\n", answers, (unsigned long long)sum,
	       (unsigned long long)alone);
	return sum == alone && answers == ticket.granted ? 0 : 1;
}

/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Load handling: fork a warm server when load rises, drop the copies when it falls.
 *
 *	load
 *
 * The server has a table in memory that took time to build. Requests come in waves; what one server
 * can't answer in a round goes to clones, which have the warm table from their first instruction.
 */
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <vmfork.h>

#define TABLE 65536
#define PER_SERVER 8
#define WAVES 5
#define REQUESTS_MAX 32

static uint32_t table[TABLE];

static int fail(const char *what, int error)
{
	fprintf(stderr, "load: %s: %s\n", what, strerror(-error));
	return 1;
}

static void warm_up(void)
{
	uint32_t i, divisor;

	/* How many divisors each number has. */
	for (divisor = 1; divisor < TABLE; divisor++)
		for (i = divisor; i < TABLE; i += divisor)
			table[i]++;
}

static uint32_t answer_to(int wave, int request)
{
	return table[(uint32_t)(wave * 9973 + request * 631) % TABLE];
}

/* Answer the requests of one server: @server 0 is the parent. */
static void serve(int wave, int server, int requests, uint32_t *answers)
{
	int request;

	for (request = server * PER_SERVER; request < requests; request++)
		if (request < (server + 1) * PER_SERVER)
			answers[request] = answer_to(wave, request);
}

/* One round; returns 0 once every request is answered. */
static int round_of(int wave, int requests, uint32_t *answers)
{
	int more = (requests - 1) / PER_SERVER, vmid, from, rc;
	sf_ticket ticket;
	size_t bytes;
	void *message;

	if (more == 0) {
		serve(wave, 0, requests, answers);
		return 0;
	}
	ticket = sf_request_ticket(more, 0);
	if (ticket.granted < 0)
		return fail("sf_request_ticket", ticket.granted);
	vmid = sf_clone(ticket);
	if (vmid < 0)
		return fail("sf_clone", vmid);
	serve(wave, vmid, requests, answers);
	if (vmid > 0) {
		rc = sf_send(answers + vmid * PER_SERVER, PER_SERVER * sizeof(*answers));
		if (rc < 0)
			exit(fail("sf_send", rc));
		sf_exit();
	}
	while ((rc = sf_recv(ticket, SF_ANY, &message, &bytes, &from)) == 0) {
		if (bytes != PER_SERVER * sizeof(*answers) || from < 1 || from > more)
			return fail("a strange message", -EIO);
		memcpy(answers + from * PER_SERVER, message, bytes);
		free(message);
	}
	if (rc != -EPIPE)
		return fail("sf_recv", rc);
	rc = sf_kill(ticket);
	if (rc < 0)
		return fail("sf_kill", rc);
	/* Fewer were granted than the wave wanted: their requests waited for us. */
	for (from = ticket.granted + 1; from <= more; from++)
		serve(wave, from, requests, answers);
	printf("wave %d: %d requests, %d extra servers\n", wave, requests, ticket.granted);
	return 0;
}

int main(void)
{
	static const int waves[WAVES] = { 3, 20, REQUESTS_MAX, 12, 1 };
	int wave, request;

	warm_up();
	for (wave = 0; wave < WAVES; wave++) {
		uint32_t answers[REQUESTS_MAX + PER_SERVER] = { 0 };

		if (round_of(wave, waves[wave], answers) != 0)
			return 1;
		for (request = 0; request < waves[wave]; request++)
			if (answers[request] != answer_to(wave, request))
				return fail("a wrong answer", -EIO);
	}
	printf("all requests of %d waves answered\n", WAVES);
	return 0;
}

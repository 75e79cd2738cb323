/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Opportunistic work: fork onto idle slots, work a little, leave.
 *
 *	opportunistic [SLOTS]
 *
 * A long search is cut into pieces. Whatever number of clones there is room for, also none, each
 * takes one piece and leaves; the parent takes one meanwhile. A piece whose clone was lost goes
 * back on the heap.
 */
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <vmfork.h>

#define PIECES 24
#define PIECE_NUMBERS 20000

enum { OPEN, DONE };

static int state[PIECES];
static uint32_t found[PIECES];

static int fail(const char *what, int error)
{
	fprintf(stderr, "opportunistic: %s: %s\n", what, strerror(-error));
	return 1;
}

/* Primes of one piece. */
static uint32_t search(int piece)
{
	uint32_t n, divisor, primes = 0;

	for (n = (uint32_t)piece * PIECE_NUMBERS; n < (uint32_t)(piece + 1) * PIECE_NUMBERS; n++) {
		for (divisor = 2; divisor * divisor <= n && n % divisor; divisor++)
			;
		primes += n > 1 && divisor * divisor > n;
	}
	return primes;
}

/* The @nth piece that no worker has, or -1. */
static int open_piece(int nth)
{
	int piece;

	for (piece = 0; piece < PIECES; piece++)
		if (state[piece] == OPEN && nth-- == 0)
			return piece;
	return -1;
}

/* Use the idle slots once. Returns how many pieces clones did, or a negative errno. */
static int use_slots(int slots)
{
	int mine = open_piece(0), vmid, piece, from, rc, done = 0, given[PIECES + 1];
	sf_ticket ticket = sf_request_ticket(slots, 0);
	size_t bytes;
	void *message;

	if (ticket.granted < 0)
		return ticket.granted;
	for (vmid = 1; vmid <= ticket.granted && vmid <= PIECES; vmid++)
		given[vmid] = open_piece(vmid);
	vmid = sf_clone(ticket);
	if (vmid < 0)
		return vmid;
	if (vmid > 0) {
		piece = vmid <= PIECES ? given[vmid] : -1;
		if (piece >= 0) {
			uint32_t primes = search(piece);

			sf_send(&primes, sizeof(primes));
		}
		sf_exit();
	}
	found[mine] = search(mine);
	state[mine] = DONE;
	while ((rc = sf_recv(ticket, SF_ANY, &message, &bytes, &from)) == 0) {
		if (bytes == sizeof(uint32_t) && from <= PIECES && given[from] >= 0) {
			memcpy(&found[given[from]], message, bytes);
			state[given[from]] = DONE;
			done++;
		}
		free(message);
	}
	/* The slots are somebody else's again. What was not answered is still open. */
	sf_kill(ticket);
	return done;
}

int main(int argc, char **argv)
{
	int slots = argc > 1 ? atoi(argv[1]) : 4, by_clones = 0, piece;
	uint32_t total = 0, alone = 0;

	while ((piece = open_piece(0)) >= 0) {
		int done = use_slots(slots);

		if (done == -ENOENT || done == -ECONNREFUSED)
			return fail("sf_request_ticket", done);
		if (done < 0) {
			/* No room now: go on alone, and look again after a piece. */
			found[piece] = search(piece);
			state[piece] = DONE;
			continue;
		}
		by_clones += done;
	}
	for (piece = 0; piece < PIECES; piece++) {
		total += found[piece];
		alone += search(piece);
	}
	printf("%u primes, %d of %d pieces done by clones\n", total, by_clones, PIECES);
	return total == alone && by_clones > 0 ? 0 : 1;
}

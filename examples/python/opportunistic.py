#!/usr/bin/python3
# SPDX-License-Identifier: Apache-2.0
"""Opportunistic work: fork onto idle slots, work a little, leave.

    opportunistic.py [SLOTS]

A long search is cut into pieces. Whatever number of clones there is room for, also none, each takes
one piece and leaves; the parent takes one meanwhile. A piece whose clone was lost goes back on the
heap.
"""

import sys

from vmfork import NoAgent, VmforkError
from vmfork import sf_clone, sf_exit, sf_kill, sf_messages, sf_request_ticket, sf_send

PIECES = 24
PIECE_NUMBERS = 500


def search(piece):
    """Primes of one piece."""
    numbers = range(piece * PIECE_NUMBERS, (piece + 1) * PIECE_NUMBERS)
    return sum(n > 1 and all(n % d for d in range(2, int(n**0.5) + 1)) for n in numbers)


def use_slots(slots, todo):
    """Use the idle slots once: what clones found, by piece."""
    ticket = sf_request_ticket(slots)
    given = dict(enumerate(todo[1 : ticket.granted + 1], start=1))
    vmid = sf_clone(ticket)
    if vmid > 0:
        try:
            if vmid in given:
                sf_send(str(search(given[vmid])).encode())
        finally:
            sf_exit()  # Also if the message failed: what follows is the parent's.
    found = {todo[0]: search(todo[0])}
    found.update((given[sender], int(message)) for sender, message in sf_messages(ticket))
    sf_kill(ticket)  # The slots are somebody else's again.
    return found


def main():
    slots = int(sys.argv[1]) if len(sys.argv) > 1 else 4
    found, by_clones = {}, 0
    while todo := [piece for piece in range(PIECES) if piece not in found]:
        try:
            news = use_slots(slots, todo)
            by_clones += len(news) - 1
        except NoAgent:
            raise
        except VmforkError as error:
            # No room now: go on alone, and look again after a piece.
            print(f"alone for a piece: {error}")
            news = {todo[0]: search(todo[0])}
        found.update(news)
    total, alone = sum(found.values()), sum(map(search, range(PIECES)))
    print(f"{total} primes, {by_clones} of {PIECES} pieces done by clones")
    return 0 if total == alone and by_clones > 0 else 1


if __name__ == "__main__":
    sys.exit(main())

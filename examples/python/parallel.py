#!/usr/bin/python3
# SPDX-License-Identifier: Apache-2.0
"""Parallel computation: load the data once, fork n workers, join.

    parallel.py [WORKERS [NUMBERS]]

A table of numbers is loaded into memory; every worker finds the table there, looks at its share and
sends what it found. The parent adds up, and checks the sum against its own.
"""

import sys

from vmfork import sf_clone, sf_exit, sf_join, sf_messages, sf_request_ticket, sf_send


def steps_to_one(n):
    steps = 0
    while n > 1:
        n = 3 * n + 1 if n % 2 else n // 2
        steps += 1
    return steps


def main():
    workers = int(sys.argv[1]) if len(sys.argv) > 1 else 4
    numbers = int(sys.argv[2]) if len(sys.argv) > 2 else 10_000
    table, state = [], 1
    for _ in range(numbers):
        state = (state * 1664525 + 1013904223) % 2**32
        table.append(state >> 8)

    ticket = sf_request_ticket(workers, hierarchical=True)
    vmid = sf_clone(ticket)
    if vmid > 0:
        share = table[vmid - 1 :: ticket.granted]
        sf_send(str(sum(map(steps_to_one, share))).encode())
        sf_exit()

    parts = {}
    for vmid, message in sf_messages(ticket):
        parts[vmid] = int(message)
        print(f"worker {vmid}: {parts[vmid]}")
    failed = [worker for worker in sf_join(ticket) if worker.error]
    for worker in failed:
        print(f"worker {worker.vmid} failed: {worker.error}", file=sys.stderr)
    total, alone = sum(parts.values()), sum(map(steps_to_one, table))
    print(f"{len(parts)} workers: {total}; alone: {alone}")
    return 0 if total == alone and len(parts) == ticket.granted and not failed else 1


if __name__ == "__main__":
    sys.exit(main())

#!/usr/bin/python3
# SPDX-License-Identifier: Apache-2.0
"""Load handling: fork a warm server when load rises, drop the copies when it falls.

    load.py

The server has a table in memory that took time to build. Requests come in waves; what one server
can't answer in a round goes to clones, which have the warm table from their first instruction.
"""

import sys

from vmfork import sf_clone, sf_exit, sf_kill, sf_messages, sf_request_ticket, sf_send

TABLE = 20_000
PER_SERVER = 8
WAVES = (3, 20, 32, 12, 1)


def warm_up():
    table = [0] * TABLE
    for divisor in range(1, TABLE):
        for multiple in range(divisor, TABLE, divisor):
            table[multiple] += 1
    return table


def answer(table, wave, request):
    return table[(wave * 9973 + request * 631) % TABLE]


def serve(table, wave, server, requests):
    """Answer the requests of one server; number 0 is the parent."""
    mine = range(requests)[server * PER_SERVER : (server + 1) * PER_SERVER]
    return {request: answer(table, wave, request) for request in mine}


def handle(table, wave, requests):
    """One wave: answers to all of its requests."""
    more = (requests - 1) // PER_SERVER
    if more == 0:
        return serve(table, wave, 0, requests)
    ticket = sf_request_ticket(more)
    vmid = sf_clone(ticket)
    answers = serve(table, wave, vmid, requests)
    if vmid > 0:
        sf_send(",".join(f"{request}={value}" for request, value in answers.items()).encode())
        sf_exit()
    for _, message in sf_messages(ticket):
        pairs = (pair.split("=") for pair in message.decode().split(","))
        answers.update((int(request), int(value)) for request, value in pairs)
    sf_kill(ticket)
    # Fewer were granted than the wave wanted: their requests waited for us.
    for server in range(ticket.granted + 1, more + 1):
        answers.update(serve(table, wave, server, requests))
    print(f"wave {wave}: {requests} requests, {ticket.granted} extra servers")
    return answers


def main():
    table = warm_up()
    for wave, requests in enumerate(WAVES):
        wanted = {request: answer(table, wave, request) for request in range(requests)}
        if handle(table, wave, requests) != wanted:
            return f"wave {wave}: a wrong answer, or one too few"
    print(f"all requests of {len(WAVES)} waves answered")
    return 0


if __name__ == "__main__":
    sys.exit(main())

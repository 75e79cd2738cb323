"""Calls the fork API and prints what it got; probe.c prints the same."""

import os
import sys

import vmfork
from vmfork import *


def attempt(name, call):
    try:
        result = call()
        print(name, len([w for w in result if w.error]) if isinstance(result, list) else result or 0)
    except VmforkError as error:
        print(name, -error.errno)


def whole(n, hierarchical, size, dying):
    try:
        ticket = sf_request_ticket(n, bool(hierarchical))
    except VmforkError as error:
        print("granted", -error.errno)
        return 1
    print("granted", ticket.granted)
    try:
        vmid = sf_clone(ticket)
    except VmforkError as error:
        print("clone", -error.errno)
        return 1
    if vmid > 0:
        if vmid == dying:
            os._exit(3)
        sf_send(bytes([ord("a") + vmid]) * size)
        print("worker", vmid, "of", sf_vmid(), "sends 0")
        sf_exit()
    for sender, message in sf_messages(ticket):
        print(f"from {sender}: {len(message)} bytes, sum {sum(message)}")
    print("recv", -32)
    workers = sf_join(ticket)
    for worker in workers:
        print(f"worker {worker.vmid}: {worker.error or 'done'}")
    print(len([w for w in workers if w.error]), "failed")
    return 0


ticket = Ticket(77, 1)
what, rest = sys.argv[1], [int(word) for word in sys.argv[2:]]
# A line at a time, also with PYTHONUNBUFFERED: workers write to one pipe.
sys.stdout.reconfigure(line_buffering=True, write_through=False)
calls = {
    "join": lambda: sf_join(ticket),
    "kill": lambda: sf_kill(ticket),
    "recv": lambda: sf_recv(ticket, 3),
    "exit": sf_exit,
    "send": lambda: sf_send(bytes(3000000)),
    "ticket": lambda: sf_request_ticket(*rest).granted,
}
if what == "whole":
    sys.exit(whole(*rest))
attempt(what, calls[what])

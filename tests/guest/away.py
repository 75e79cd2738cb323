"""Tickets whose clones run on several hosts, from inside: `away.py MODE`. What it prints at the end is for the test."""

import errno
import json
import os
import sys
import time

import vmfork as vf

COUNT = int(os.environ.get("COUNT", "4"))


def work(vmid):
    """What no other worker answers, and longer than a letter between hosts."""
    return bytes((i * 7 + vmid * 31) % 256 for i in range(256)) * (20_000 + vmid)


def answers():
    """Each worker sends three messages and ends in one of three ways; the parent asks for those of the last worker first."""
    ticket = vf.sf_request_ticket(COUNT)
    vmid = vf.sf_clone(ticket)
    if vmid:
        for message in (b"begin", work(vmid), b"%d" % sum(work(vmid))):
            vf.sf_send(message)
        if vmid == COUNT:
            os._exit(7)
        vf.sf_exit()
    seen = {}
    for vmid in range(ticket.granted, 0, -1):
        seen[vmid] = [vf.sf_recv(ticket, vmid)[1] for _ in range(3)]
        try:
            vf.sf_recv(ticket, vmid)
        except vf.VmforkError as error:
            assert error.errno == errno.EPIPE, error
    for vmid, (begin, middle, end) in seen.items():
        assert begin == b"begin" and middle == work(vmid) and end == b"%d" % sum(work(vmid)), vmid
    tell(ticket)


def kill():
    """The parent has enough, and ends them all."""
    ticket = vf.sf_request_ticket(COUNT)
    vmid = vf.sf_clone(ticket)
    if vmid:
        vf.sf_send(b"here")
        time.sleep(1000)
    assert sorted(vf.sf_recv(ticket)[0] for _ in range(ticket.granted)) == list(range(1, ticket.granted + 1))
    workers = vf.sf_kill(ticket)
    assert all(worker.error for worker in workers), workers
    print("killed", flush=True)


def lost():
    """Each worker answers and waits to be told to go on, by a file of its VM."""
    ticket = vf.sf_request_ticket(COUNT)
    vmid = vf.sf_clone(ticket)
    if vmid:
        vf.sf_send(b"first")
        while not os.path.exists("/run/go"):
            time.sleep(0.05)
        vf.sf_send(b"second")
        vf.sf_exit()
    print("cloned", flush=True)
    seen = {}
    for vmid, message in vf.sf_messages(ticket):
        seen.setdefault(vmid, []).append(message.decode())
    print(json.dumps(seen), flush=True)
    tell(ticket)


def promised():
    """The parent has its ticket, and waits for a file of its VM before it clones."""
    ticket = vf.sf_request_ticket(COUNT)
    print("granted", ticket.granted, flush=True)
    while not os.path.exists("/run/go"):
        time.sleep(0.05)
    if vf.sf_clone(ticket):
        vf.sf_exit()
    tell(ticket)


def tell(ticket):
    workers = vf.sf_join(ticket)
    print(json.dumps({worker.vmid: worker.error for worker in workers}), flush=True)


if __name__ == "__main__":
    {"answers": answers, "kill": kill, "lost": lost, "promised": promised}[sys.argv[1]]()

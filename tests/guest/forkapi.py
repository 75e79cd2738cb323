"""The Python fork API, checked from inside: `forkapi.py MODE`, as `forkapi.c`. Prints "ok" at the end."""

import errno
import os
import sys
import time

import vmfork as vf

SIZES = [0, 1, 5 << 20]


def pattern(vmid, message, size):
    block = bytes((i * 7 + vmid * 31 + message) % 256 for i in range(256))
    return (block * (size // 256 + 1))[:size]


def refused(number, call, *arguments):
    try:
        call(*arguments)
    except vf.VmforkError as error:
        assert error.errno == number, (call, error)
    else:
        raise AssertionError(f"{call} was not refused")


def messages():
    ticket = vf.sf_request_ticket(4)
    assert ticket.granted == 4, ticket
    vmid = vf.sf_clone(ticket)
    if vmid:
        for number, size in enumerate(SIZES):
            vf.sf_send(pattern(vmid, number, size))
        vf.sf_exit()
    seen = {}
    for vmid, message in vf.sf_messages(ticket):
        number = len(seen.setdefault(vmid, []))
        assert message == pattern(vmid, number, SIZES[number]), (vmid, number, len(message))
        seen[vmid].append(len(message))
    assert seen == {vmid: SIZES for vmid in (1, 2, 3, 4)}, seen
    workers = vf.sf_join(ticket)
    assert [(worker.vmid, worker.error) for worker in workers] == [(i, None) for i in (1, 2, 3, 4)], workers


def one_worker():
    """The messages of one worker alone, while others have sent too."""
    ticket = vf.sf_request_ticket(3)
    vmid = vf.sf_clone(ticket)
    if vmid:
        for number in range(5):
            vf.sf_send(b"%d-%d" % (vmid, number))
        vf.sf_exit()
    for vmid in (3, 1, 2):
        for number in range(5):
            assert vf.sf_recv(ticket, vmid) == (vmid, b"%d-%d" % (vmid, number))
        refused(errno.EPIPE, vf.sf_recv, ticket, vmid)
    vf.sf_join(ticket)


def hierarchical():
    ticket = vf.sf_request_ticket(4, hierarchical=True)
    assert ticket.granted == 4, ticket
    vmid = vf.sf_clone(ticket)
    if vmid:
        assert vf.sf_vmid() == vmid
        with open("/etc/machine-id") as file:
            vf.sf_send(f"{vmid} {os.getpid()} {file.read().strip()}".encode())
        vf.sf_exit()
    for _vmid, message in vf.sf_messages(ticket):
        print(message.decode())
    assert all(worker.error is None for worker in vf.sf_join(ticket))


def kill():
    ticket = vf.sf_request_ticket(3)
    if vf.sf_clone(ticket):
        while True:
            time.sleep(1000)
    workers = vf.sf_kill(ticket)
    assert len(workers) == 3 and all(worker.error for worker in workers), workers


def errors():
    refused(errno.EINVAL, vf.sf_request_ticket, 0)
    none = vf.Ticket(1 << 62, 1)
    for call in (vf.sf_clone, vf.sf_join, vf.sf_kill, vf.sf_recv):
        refused(errno.EINVAL, call, none)
    ticket = vf.sf_request_ticket(1)
    refused(errno.EINVAL, vf.sf_join, ticket)
    if vf.sf_clone(ticket):
        vf.sf_exit()
    refused(errno.EINVAL, vf.sf_clone, ticket)
    refused(errno.EPIPE, vf.sf_recv, ticket)
    vf.sf_join(ticket)
    refused(errno.ESTALE, vf.sf_join, ticket)


def nested():
    outer = vf.sf_request_ticket(2)
    vmid = vf.sf_clone(outer)
    if vmid:
        inner = vf.sf_request_ticket(2)
        child = vf.sf_clone(inner)
        if child:
            vf.sf_send(b"%d" % (vmid * 10 + child))
            vf.sf_exit()
        total = sum(int(message) for _, message in vf.sf_messages(inner))
        vf.sf_join(inner)
        vf.sf_send(b"%d" % total)
        vf.sf_exit()
    total = sum(int(message) for _, message in vf.sf_messages(outer))
    assert total == 11 + 12 + 21 + 22, total
    assert all(worker.error is None for worker in vf.sf_join(outer))


def abandon():
    ticket = vf.sf_request_ticket(2)
    vmid = vf.sf_clone(ticket)
    if vmid == 2:
        os._exit(0)
    if vmid:
        vf.sf_exit()
    workers = vf.sf_join(ticket)
    assert [bool(worker.error) for worker in workers] == [False, True], workers


def outside():
    """Waits in sf_join while somebody outside kills a clone."""
    ticket = vf.sf_request_ticket(2)
    if vf.sf_clone(ticket):
        while True:
            time.sleep(1000)
    print("waiting", flush=True)
    workers = vf.sf_join(ticket)
    print([worker.error for worker in workers])


if __name__ == "__main__":
    globals()[sys.argv[1]]()
    print("ok")

# SPDX-License-Identifier: Apache-2.0
"""Fork the virtual machine that this program runs in.

The calls of SnowFlock (EuroSys 2009) with their meaning, and two for messages::

    ticket = sf_request_ticket(8)
    vmid = sf_clone(ticket)
    if vmid > 0:                      # one of ticket.granted clones
        sf_send(work(vmid, ticket.granted))
        sf_exit()
    for vmid, message in sf_messages(ticket):
        ...                           # the parent
    sf_join(ticket)

Failures are exceptions with an ``errno``::

    OSError
    └── VmforkError                   the agent or the host said no
        ├── NoAgent                   this is no VM of vmfork's
        ├── NotAWorker                sf_exit or sf_send where this process is no worker
        ├── Cancelled                 the VM was forked while the call waited; this is the clone
        └── NoMoreMessages            sf_recv: all have ended and all was received

Needs nothing beyond what Debian's python3-minimal has. The protocol is described in
crates/agent/src/wire.rs.
"""

import array
import errno
import os
import socket
import struct
import sys
import threading
from typing import Iterator, List, NamedTuple, NoReturn, Optional, Tuple, Union

__all__ = [
    "Cancelled",
    "NoAgent",
    "NoMoreMessages",
    "NotAWorker",
    "Ticket",
    "VmforkError",
    "Worker",
    "sf_clone",
    "sf_exit",
    "sf_join",
    "sf_kill",
    "sf_messages",
    "sf_recv",
    "sf_request_ticket",
    "sf_send",
    "sf_vmid",
]

_PROTOCOL = 1
_RUN_DIR = "/run/vmfork"
_REQUEST_TICKET, _CLONE, _EXIT, _JOIN, _KILL, _SEND, _RECV = range(1, 8)
_REQUEST = struct.Struct("=HHIQQ")  # version, op, a32, a64, bytes
_REPLY = struct.Struct("=iIQQ")  # status, a32, a64, bytes
_WORKER = struct.Struct("=II")  # number, length of the reason
_SOCKETS_MAX = 253
_EXIT_SECONDS = 10.0


class VmforkError(OSError):
    """The agent or the host said no; ``errno`` says why."""


class NoAgent(VmforkError):
    """There is no agent to ask: this is no VM of vmfork's."""


class NotAWorker(VmforkError):
    """This process is no worker of a clone."""


class Cancelled(VmforkError):
    """The VM was forked while the call waited, and this is the clone."""


class NoMoreMessages(VmforkError):
    """That worker, or all, have ended and all they sent was received."""


_CLASSES = {
    errno.ENOENT: NoAgent,
    errno.ECONNREFUSED: NoAgent,
    errno.EPERM: NotAWorker,
    errno.ECANCELED: Cancelled,
}


class Ticket(NamedTuple):
    """A reservation for ``granted`` clones."""

    id: int
    granted: int


class Worker(NamedTuple):
    """How a worker ended; ``error`` is None if by `sf_exit`."""

    vmid: int
    error: Optional[str]


class _State:
    """This process as a worker; the lock serialises requests on its connection."""

    lock = threading.RLock()
    connection: Optional[socket.socket] = None
    vmid = 0


class _Reply(NamedTuple):
    a32: int
    a64: int
    length: int


def _error(number: int, what: str) -> VmforkError:
    return _CLASSES.get(number, VmforkError)(number, f"{what}: {os.strerror(number)}")


def _run_dir() -> str:
    return os.environ.get("VMFORK_RUN_DIR", _RUN_DIR)


def _connect(what: str) -> socket.socket:
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        connection.connect(_run_dir() + "/fork.sock")
    except OSError as error:
        connection.close()
        raise _error(error.errno or errno.EIO, what) from None
    return connection


def _read(connection: socket.socket, length: int, what: str) -> bytes:
    parts = bytearray(length)
    view = memoryview(parts)
    while view:
        try:
            n = connection.recv_into(view)
        except OSError as error:
            raise _error(error.errno or errno.ETIMEDOUT, what) from None
        if n == 0:
            raise _error(errno.ECONNRESET, what)
        view = view[n:]
    return bytes(parts)


def _parse(head: bytes, what: str) -> _Reply:
    status, a32, a64, length = _REPLY.unpack(head)
    if status < 0:
        raise _error(-status, what)
    return _Reply(a32, a64, length)


def _ask(
    connection: socket.socket,
    what: str,
    op: int,
    a32: int = 0,
    a64: int = 0,
    data: Union[bytes, bytearray, memoryview] = b"",
) -> _Reply:
    view = memoryview(data).cast("B")
    failed = None
    try:
        connection.sendall(_REQUEST.pack(_PROTOCOL, op, a32, a64, len(view)))
        connection.sendall(view)
    except OSError as error:
        # An agent that hung up may have said why before.
        failed = _error(error.errno or errno.EIO, what)
    try:
        return _parse(_read(connection, _REPLY.size, what), what)
    except VmforkError as error:
        if failed is not None and error.errno == errno.ECONNRESET:
            raise failed from None
        raise


def sf_request_ticket(n: int, hierarchical: bool = False) -> Ticket:
    """Reserve up to ``n`` clones of this VM.

    With ``hierarchical``, clones with several CPUs hold as many workers each (process fork follows
    VM fork) and ``n`` counts workers.
    """
    if not 1 <= n < 1 << 31:
        raise _error(errno.EINVAL, "sf_request_ticket")
    with _connect("sf_request_ticket") as connection:
        reply = _ask(connection, "sf_request_ticket", _REQUEST_TICKET, n, int(hierarchical))
    return Ticket(reply.a64, reply.a32)


def _become_worker(connection: socket.socket, vmid: int) -> None:
    with _State.lock:
        if _State.connection is not None:
            _State.connection.close()
        _State.connection = connection
        _State.vmid = vmid


def sf_clone(ticket: Ticket) -> int:
    """Fork this VM, once per ticket: 0 in the parent, a number from 1 to ``granted`` in each
    worker.

    Standard output and error are flushed before. With a hierarchical ticket the other workers of a
    clone are children of this process, by `os.fork`.
    """
    what = "sf_clone"
    _flush()
    connection = _connect(what)
    sockets: List[socket.socket] = []
    try:
        connection.sendall(_REQUEST.pack(_PROTOCOL, _CLONE, 0, ticket.id, 0))
        space = socket.CMSG_SPACE(_SOCKETS_MAX * array.array("i").itemsize)
        head, control, _, _ = connection.recvmsg(
            _REPLY.size, space, socket.MSG_CMSG_CLOEXEC
        )
        for level, kind, data in control:
            if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                numbers = array.array("i")
                numbers.frombytes(data[: len(data) - len(data) % numbers.itemsize])
                sockets += [socket.socket(fileno=number) for number in numbers]
        if not head:
            raise _error(errno.ECONNRESET, what)
        head += _read(connection, _REPLY.size - len(head), what)
        vmid = _parse(head, what).a32
    except OSError as error:
        for other in [connection, *sockets]:
            other.close()
        if isinstance(error, VmforkError):
            raise
        raise _error(error.errno or errno.EIO, what) from None
    if vmid == 0:
        connection.close()
        return 0
    _become_worker(connection, vmid)
    while sockets:
        mine = sockets.pop(0)
        vmid_of_mine = vmid + 1
        vmid += 1
        try:
            in_child = os.fork() == 0
        except OSError:
            # Closing its socket tells the agent that this worker never was.
            in_child = False
        if in_child:
            for other in sockets:
                other.close()
            _State.lock = threading.RLock()  # Another thread, which is not here, may have held it.
            _become_worker(mine, vmid_of_mine)
            return vmid_of_mine
        mine.close()
    return _State.vmid


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        try:
            if stream is not None:
                stream.flush()
        except (OSError, ValueError):
            pass  # Closed, or without a reader: no reason not to fork or to exit.


def sf_exit() -> NoReturn:
    """End this worker of a clone, and the clone with its last worker.

    Returns in no worker; raises `NotAWorker` elsewhere. Standard output and error are flushed,
    ``atexit`` handlers and ``finally`` blocks don't run.
    """
    _flush()
    code = 0
    try:
        with _State.lock:
            own = _State.connection
            connection = own if own is not None else _connect("sf_exit")
            try:
                connection.settimeout(_EXIT_SECONDS)
                _ask(connection, "sf_exit", _EXIT)
            finally:
                if own is None:
                    connection.close()
    except VmforkError:
        if _State.vmid == 0:
            raise
        code = 1
    os._exit(code)


def _end(op: int, what: str, ticket: Ticket) -> List[Worker]:
    workers = []
    with _connect(what) as connection:
        reply = _ask(connection, what, op, a64=ticket.id)
        for _ in range(reply.a32):
            vmid, length = _WORKER.unpack(_read(connection, _WORKER.size, what))
            why = _read(connection, length, what).decode(errors="replace")
            workers.append(Worker(vmid, why or None))
    return workers


def sf_join(ticket: Ticket) -> List[Worker]:
    """Wait until all workers have ended, discard the ticket, and say how each ended."""
    return _end(_JOIN, "sf_join", ticket)


def sf_kill(ticket: Ticket) -> List[Worker]:
    """End all clones of a ticket now, discard it, and say how each ended."""
    return _end(_KILL, "sf_kill", ticket)


def sf_send(data: Union[bytes, bytearray, memoryview]) -> None:
    """In a clone: send a message to the parent, 256 MiB at most. It is stored on the host when this
    returns.

    Waits while much that was sent has not been received: 64 MiB of this worker, 256 MiB of all.
    """
    with _State.lock:
        if _State.connection is not None:
            _ask(_State.connection, "sf_send", _SEND, data=data)
            return
    with _connect("sf_send") as connection:
        _ask(connection, "sf_send", _SEND, data=data)


def sf_recv(ticket: Ticket, vmid: Optional[int] = None) -> Tuple[int, bytes]:
    """In the parent: the next message of worker ``vmid``, or of any, with its sender's number.

    Waits until there is one; raises `NoMoreMessages` when there will be none.
    """
    with _connect("sf_recv") as connection:
        try:
            reply = _ask(connection, "sf_recv", _RECV, vmid or 0, ticket.id)
        except VmforkError as error:
            if error.errno == errno.EPIPE:
                raise NoMoreMessages(*error.args) from None
            raise
        return reply.a32, _read(connection, reply.length, "sf_recv")


def sf_messages(ticket: Ticket) -> Iterator[Tuple[int, bytes]]:
    """All messages of a ticket's workers, as they come, until all have ended."""
    while True:
        try:
            yield sf_recv(ticket)
        except NoMoreMessages:
            return


def sf_vmid() -> int:
    """This process's worker number; 0 where the VM was not forked."""
    if _State.vmid > 0:
        return _State.vmid
    try:
        with open(_run_dir() + "/vmid", encoding="ascii") as file:
            return int(file.read())
    except OSError as error:
        raise _error(error.errno or errno.EIO, "sf_vmid") from None

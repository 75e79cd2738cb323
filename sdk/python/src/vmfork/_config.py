"""Where the daemon is, and how long to wait for it.

The daemon is looked for in this order: what the client was given (``socket``, ``state`` or
``host``), then ``VMFORK_HOST``, ``VMFORK_SOCKET``, ``VMFORK_STATE``. If none is set, it
is the place where a daemon listens by default. Nothing is ever started from here.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path

__all__ = ["Endpoint", "Timeout", "find_endpoint"]

#: The daemon's state folder, if no other is named.
STATE_DEFAULT = "/var/lib/vmfork"

#: Where a daemon listens that was not told otherwise.
SOCKET_DEFAULT = "/run/vmfork/vmforkd.sock"

#: The socket in a state folder that was given.
SOCKET_NAME = "vmforkd.sock"

#: What ``sockaddr_un`` can hold, without the final zero.
SOCKET_PATH_BYTES_MAX = 107


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeout:
    """Bounds on every wait, in seconds. None of them is endless."""

    connect_s: float = 5.0
    request_s: float = 30.0
    """An answer to what should be quick: lists, inspect, kill, remove."""
    boot_s: float = 120.0
    """``run``: until the guest's agent has answered and the image's first-boot command has ended."""
    fork_s: float = 60.0
    """``fork`` and ``snapshots.start``: until the last VM is ready; slower ones come as errors."""
    exec_s: float = 600.0
    """``exec``: then the program is killed and ``timed_out`` set."""
    store_s: float = 3600.0
    """Snapshots: what reads or writes a whole one."""
    idle_s: float = 60.0
    """Files, exports and logs: from one piece of the stream to the next."""
    slack_s: float = 10.0
    """How much longer the client waits than it told the daemon to take."""

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if not 0 < value < float("inf"):
                raise ValueError(f"Timeout.{field.name} is {value}, but must be finite and above 0")


@dataclass(frozen=True, slots=True, kw_only=True)
class Endpoint:
    """A daemon's address: a unix socket, or a URL with a token."""

    socket: str | None
    base_url: str
    token: str | None

    def __str__(self) -> str:
        return self.socket if self.socket is not None else self.base_url


def find_endpoint(
    *,
    socket: str | os.PathLike[str] | None = None,
    state: str | os.PathLike[str] | None = None,
    host: str | None = None,
    token: str | None = None,
    environ: Mapping[str, str] | None = None,
) -> Endpoint:
    """Settle on one address; raises ValueError for ones that can't be meant."""
    env = os.environ if environ is None else environ
    if sum(given is not None for given in (socket, state, host)) > 1:
        raise ValueError("give one of socket, state and host, not several")
    if socket is None and state is None and host is None:
        host = env.get("VMFORK_HOST") or None
        if host is None:
            socket = env.get("VMFORK_SOCKET") or None
        if host is None and socket is None:
            state = env.get("VMFORK_STATE") or None
    if host is not None and host.startswith("unix://"):
        socket, host = host.removeprefix("unix://"), None
    if host is not None:
        return Endpoint(
            socket=None,
            base_url=_base_url(host),
            token=token if token is not None else env.get("VMFORK_TOKEN") or None,
        )
    path = socket if socket is not None else SOCKET_DEFAULT
    if socket is None and state is not None:
        path = Path(state) / SOCKET_NAME
    text = os.fspath(path)
    if len(os.fsencode(text)) > SOCKET_PATH_BYTES_MAX:
        raise ValueError(
            f"the socket's path {text!r} is longer than the {SOCKET_PATH_BYTES_MAX} bytes "
            "that a unix socket may have"
        )
    return Endpoint(socket=text, base_url="http://vmforkd", token=token)


def _base_url(host: str) -> str:
    # https:// is for a daemon behind a proxy that speaks TLS.
    if host.startswith(("http://", "https://")):
        return host.rstrip("/")
    address = host.removeprefix("tcp://")
    name, colon, port = address.rpartition(":")
    if not (name and colon and port.isascii() and port.isdigit() and 0 < int(port) < 65536):
        raise ValueError(f"host {host!r}: write it like tcp://127.0.0.1:7070 or unix:///PATH")
    return f"http://{address}"

"""The protocol of ``GET /v1/events``, with no I/O: where to continue, and when to give up.

::

    EventReader.call ──► a stream ──► feed(piece) ──► events
          ▲                                │ it ends or breaks
          └───────── pause_after(error) ◄──┘
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Sequence

from ._decode import decode
from ._errors import ConnectionFailed, ProtocolError, VmforkError
from ._event_models import Event
from ._protocol import API, Call

#: Without a byte for this long the connection is lost: three heartbeats of the daemon.
SILENCE_S = 45.0
#: Pauses between two connections, doubled from the first to the last.
PAUSE_FIRST_S = 0.25
PAUSE_LAST_S = 5.0
#: How long no daemon may answer. A restart takes a second.
RECONNECT_S = 60.0
#: Largest event.
BLOCK_BYTES_MAX = 16 * 1024 * 1024


class EventReader:
    """One reader of events, over any number of connections."""

    def __init__(
        self,
        *,
        after: str | None,
        kinds: Sequence[str],
        vm: str | None,
        follow: bool,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._after = after
        self._query: dict[str, str] = {}
        if kinds:
            self._query["kind"] = ",".join(kinds)
        if vm is not None:
            self._query["vm"] = vm
        if not follow:
            self._query["follow"] = "false"
        self._follow = follow
        self._clock = clock
        self._bytes = b""
        self._has_heard = False
        #: When a connection was lost since the daemon was last heard.
        self._lost_since: float | None = None
        self._pause = PAUSE_FIRST_S

    def call(self) -> Call[None]:
        """The request for what comes next."""
        self._bytes = b""
        query = dict(self._query) if self._after is None else {**self._query, "after": self._after}
        return Call("events", "GET", f"{API}/events", lambda _: None, SILENCE_S, query)

    def feed(self, piece: bytes) -> Iterator[Event]:
        """The events that are whole with this piece."""
        self._has_heard = True
        self._lost_since = None
        self._pause = PAUSE_FIRST_S
        *blocks, self._bytes = (self._bytes + piece).split(b"\n\n")
        if len(self._bytes) > BLOCK_BYTES_MAX:
            raise ProtocolError(f"events: an event of more than {BLOCK_BYTES_MAX} bytes")
        for block in blocks:
            fields: dict[bytes, bytes] = {}
            for line in block.split(b"\n"):
                name, _, value = line.partition(b": ")
                fields[name] = value
            if b"id" in fields:
                self._after = fields[b"id"].decode("ascii", "replace")
            if b"data" in fields:
                try:
                    document = json.loads(fields[b"data"])
                except ValueError as error:
                    raise ProtocolError(f"events: an event is not JSON: {error}") from error
                yield decode(Event, document, "event")

    def pause_after(self, error: VmforkError | None) -> float | None:
        """How long to wait before the next call; ``None``: that was all.

        Raises ``error`` if no daemon has answered at all, or not for a minute.
        """
        if error is None and not self._follow:
            return None
        now = self._clock()
        # Not since the last byte: a consumer may have taken long over the events before the loss.
        if self._lost_since is None:
            self._lost_since = now
        if not self._has_heard or now - self._lost_since > RECONNECT_S:
            raise error or ConnectionFailed("events: the daemon ends each stream at once")
        pause, self._pause = self._pause, min(2 * self._pause, PAUSE_LAST_S)
        return pause

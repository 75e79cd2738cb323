"""Events: connections that break, what is lost, and where a reader continues."""

from __future__ import annotations

import asyncio
import itertools
import json
from pathlib import Path
from typing import Any

import httpx
import pytest
import vmfork
from conftest import FakeDaemon, error
from vmfork import _event_protocol
from vmfork._event_protocol import EventReader

EPOCH = "0000000000000abc"


def event(seq: int, kind: str, **fields: Any) -> bytes:
    cursor = f"{EPOCH}-{seq}"
    document = {"cursor": cursor, "time_unix_ms": 5, "kind": kind, **fields}
    return f"id: {cursor}\ndata: {json.dumps(document)}\n\n".encode()


def started(seq: int, name: str) -> bytes:
    vm = {"id": f"id-{name}", "name": name, "family": "f", "a_field_from_the_future": 1}
    return event(seq, "vm.started", vm=vm)


def stream(*blocks: bytes) -> tuple[int, dict[str, str], bytes]:
    return 200, {"content-type": "text/event-stream"}, b"retry: 1000\n\n" + b"".join(blocks)


@pytest.fixture(autouse=True)
def quickly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_event_protocol, "PAUSE_FIRST_S", 0.001)


#: A torn event, then a connection that has lost five. The heartbeat is behind what a filter left
#: out.
BROKEN = [
    stream(started(1, "a"), f": heartbeat\nid: {EPOCH}-2\n\n".encode(), started(3, "torn")[:50]),
    stream(event(7, "gap", cause="overflow", lost=5), started(8, "c")),
]


def check(events: list[vmfork.Event], daemon: FakeDaemon) -> None:
    kinds = [one.kind for one in events]
    assert kinds == [vmfork.EventKind.VM_STARTED, vmfork.EventKind.GAP, vmfork.EventKind.VM_STARTED]
    assert [one.vm.name for one in events if one.vm is not None] == ["a", "c"]
    assert (events[1].lost, events[1].cause, events[2].cursor) == (5, "overflow", f"{EPOCH}-8")
    queries = [query for _, path, query, _ in daemon.asked if path == "/v1/events"]
    filters = {"kind": "vm.started,vm.ended", "vm": "web"}
    assert queries[:2] == [filters, {**filters, "after": f"{EPOCH}-2"}]


def test_a_reader_continues_with_the_last_cursor(socket_path: Path, daemon: FakeDaemon) -> None:
    daemon.canned = list(BROKEN)
    with vmfork.Client(socket=socket_path) as client:
        kinds = [vmfork.EventKind.VM_STARTED, vmfork.EventKind.VM_ENDED]
        check(list(itertools.islice(client.events(kinds=kinds, vm="web"), 3)), daemon)


def test_so_does_the_asyncio_client(socket_path: Path, daemon: FakeDaemon) -> None:
    daemon.canned = list(BROKEN)

    async def read() -> list[vmfork.Event]:
        found: list[vmfork.Event] = []
        async with vmfork.AsyncClient(socket=socket_path) as client:
            async for one in client.events(kinds=["vm.started", "vm.ended"], vm="web"):
                found.append(one)
                if len(found) == 3:
                    break
        return found

    check(asyncio.run(asyncio.wait_for(read(), 30)), daemon)


def test_without_follow_it_ends_and_a_kind_of_the_future_is_no_error(
    transport: httpx.MockTransport, daemon: FakeDaemon
) -> None:
    daemon.canned = [stream(started(1, "a"), event(2, "vm.teleported", where="away"))]
    with vmfork.Client(transport=transport) as client:
        events = list(client.events(after="0", follow=False))
    assert [one.kind for one in events] == [vmfork.EventKind.VM_STARTED, vmfork.EventKind.UNKNOWN]
    assert daemon.asked[0][2] == {"follow": "false", "after": "0"}


def test_what_the_daemon_refuses_is_raised(
    transport: httpx.MockTransport, daemon: FakeDaemon
) -> None:
    daemon.canned = [error(400, "bad_request", "read the events", cause="`x` is not a cursor")]
    with vmfork.Client(transport=transport) as client, pytest.raises(vmfork.BadRequest):
        next(iter(client.events(after="x")))


def test_a_reader_that_had_a_place_waits_for_one(
    transport: httpx.MockTransport, daemon: FakeDaemon
) -> None:
    full = error(507, "no_capacity", "read the events", cause="256 streams of events are open")
    daemon.canned = [full]
    with vmfork.Client(transport=transport) as client, pytest.raises(vmfork.NoCapacity):
        next(iter(client.events()))
    daemon.canned = [stream(started(1, "a")), full, full, stream(started(2, "b"))]
    with vmfork.Client(transport=transport) as client:
        events = itertools.islice(client.events(), 2)
        assert [one.vm.name for one in events if one.vm is not None] == ["a", "b"]


def test_no_daemon_is_told_at_once(tmp_path: Path) -> None:
    with vmfork.Client(socket=tmp_path / "none") as client:
        with pytest.raises(vmfork.ConnectionFailed):
            next(iter(client.events()))


def test_a_daemon_that_stays_away_is_told_after_a_minute() -> None:
    now = 0.0
    reader = EventReader(after=None, kinds=(), vm=None, follow=True, clock=lambda: now)
    assert [one.kind for one in reader.feed(started(1, "a"))] == [vmfork.EventKind.VM_STARTED]
    lost = vmfork.ConnectionFailed("events: no daemon answers")
    pauses = []
    with pytest.raises(vmfork.ConnectionFailed):
        while True:
            pause = reader.pause_after(lost)
            assert pause is not None
            pauses.append(pause)
            now += pause
    assert 60 < now < 70
    assert pauses[1] == 2 * pauses[0]
    assert max(pauses) == _event_protocol.PAUSE_LAST_S


def test_a_consumer_that_takes_long_over_an_event_does_not_count_as_a_daemon_that_stays_away() -> (
    None
):
    now = 0.0
    reader = EventReader(after=None, kinds=(), vm=None, follow=True, clock=lambda: now)
    lost = vmfork.ConnectionFailed("events: no daemon answers")
    for seq in (1, 2):
        for _ in reader.feed(started(seq, "a")):
            now += 90
        # Meanwhile the daemon has closed the stream, and is then started again.
        for _ in range(3):
            pause = reader.pause_after(lost)
            assert pause is not None
            now += pause + 15

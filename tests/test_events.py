"""Events from outside: the whole sequence, no loss and no repetition, and what a restart loses."""

from __future__ import annotations

import contextlib
import itertools
import json
import subprocess
import threading
import time
from collections.abc import Callable, Iterator

import pytest
import vmfork

from harness import guests
from harness.cli import Cli
from harness.cluster import Cluster
from harness.daemon import Daemon
from harness.hosts import hosts
from harness.waits import eventually

K = vmfork.EventKind


def so_far(client: vmfork.Client, after: str = "0", **filters: object) -> list[vmfork.Event]:
    return list(client.events(after=after, follow=False, **filters))  # type: ignore[arg-type]


def newest(client: vmfork.Client) -> str:
    """The place behind all that has happened."""
    events = so_far(client)
    return events[-1].cursor if events else "0"


def of(events: list[vmfork.Event]) -> list[tuple[vmfork.EventKind, str]]:
    """Kind and name of each."""
    found = []
    for event in events:
        subject = event.vm if event.kind.startswith("vm.") else event.snapshot or event.host
        found.append((event.kind, subject.name if subject else ""))
    return found


@pytest.fixture
def web(client: vmfork.Client, image: str) -> vmfork.VM:
    """Not a clone: its start is an event of its own."""
    return guests.warm(client, image, name="web", memory_mib=256)


@pytest.mark.limit(240)
def test_each_thing_that_happens_is_told_once_and_in_order(
    client: vmfork.Client, image: str
) -> None:
    guests.warm(client, image, name="first", memory_mib=256).remove(force=True)
    start = newest(client)
    web = guests.warm(client, image, name="web", memory_mib=256)
    # What harness and store do to bring its snapshot here is no part of this.
    begun = [event for event in so_far(client, start) if event.vm and event.kind.startswith("vm.")]
    assert of(begun) == [(K.VM_STARTED, "web"), (K.VM_READY, "web")]
    assert begun[0].vm is not None and begun[0].vm.id == web.id
    assert begun[0].vm.snapshot is not None
    assert begun[1].ready_ms is not None and begun[1].ready_ms > 0

    after = newest(client)
    fork = web.fork(2, names=["one", "two"]).raise_for_errors()
    forked = so_far(client, after)
    assert of(forked[-1:]) == [(K.VM_FORKED, "web")]
    assert (forked[-1].requested, forked[-1].granted) == (2, 2)
    assert forked[-1].pause_ms == pytest.approx(fork.pause_ms)
    assert [(clone.name, clone.id) for clone in forked[-1].clones] == [(vm.name, vm.id) for vm in fork]
    for name in ("one", "two"):
        own = [event for event in forked if event.vm is not None and event.vm.name == name]
        assert of(own) == [(K.VM_STARTED, name), (K.VM_READY, name)]
        assert own[0].vm is not None and own[0].vm.parent == web.id
    assert len(forked) == 5

    after = newest(client)
    web.pause()
    web.pause()
    web.resume()
    assert of(so_far(client, after)) == [(K.VM_PAUSED, "web"), (K.VM_RESUMED, "web")]

    after = newest(client)
    fork[0].kill()
    fork[1].kill(grace_s=30)
    ended = so_far(client, after)
    assert of(ended) == [(K.VM_ENDED, "one"), (K.VM_ENDED, "two")]
    assert [event.end for event in ended] == [vmfork.VmEnd.KILLED, vmfork.VmEnd.EXITED]
    assert {event.state for event in ended} == {vmfork.VmState.EXITED}
    assert ended[0].reason == "killed on request"

    after = newest(client)
    client.snapshots.create(web, "kept", wait=True)
    client.snapshots.remove("kept")
    kept = so_far(client, after)
    assert of(kept) == [(K.SNAPSHOT_STORED, "kept"), (K.SNAPSHOT_REMOVED, "kept")]
    assert kept[0].snapshot is not None and kept[0].snapshot.vm is not None
    assert kept[0].snapshot.vm.id == web.id

    after = newest(client)
    web.remove(force=True)
    assert of(so_far(client, after)) == [(K.VM_ENDED, "web")]

    numbers = [int(event.cursor.split("-")[1]) for event in so_far(client)]
    assert numbers == list(range(1, len(numbers) + 1)), "no number is left out"


@pytest.mark.limit(240)
def test_readers_that_lose_their_connections_lose_no_event(
    client: vmfork.Client, daemon: Daemon, web: vmfork.VM
) -> None:
    start = newest(client)
    steady: list[vmfork.Event] = []
    with daemon.client() as other:
        reading = threading.Thread(target=lambda: steady.extend(itertools.islice(other.events(after=start), 40)))
        reading.start()
        forker = threading.Thread(target=lambda: _fork_and_kill(web, 4))
        forker.start()
        restless: list[vmfork.Event] = []
        after = start
        # A connection for every two events.
        while len(restless) < 40:
            part = list(itertools.islice(client.events(after=after), 2))
            restless += part
            after = part[-1].cursor
        forker.join(60)
        reading.join(60)
    assert restless == steady and len(steady) == 40
    kinds = [event.kind for event in steady]
    counts = {kind: kinds.count(kind) for kind in K}
    # 4 forks into 3 clones each. The last is the end of the last.
    assert (counts[K.VM_STARTED], counts[K.VM_READY], counts[K.VM_FORKED], counts[K.VM_ENDED]) == (12, 12, 4, 12)
    assert restless[0].vm is not None
    by_vm = so_far(client, start, vm=restless[0].vm.id)
    assert [event.kind for event in by_vm] == [K.VM_STARTED, K.VM_READY, K.VM_ENDED]
    assert so_far(client, start, kinds=[K.VM_FORKED]) == [one for one in steady if one.kind == K.VM_FORKED]


def _fork_and_kill(vm: vmfork.VM, times: int) -> None:
    for _ in range(times):
        with vm.fork(3).raise_for_errors():
            pass


@pytest.mark.limit(180)
def test_a_restart_is_told_and_readers_go_on_by_themselves(
    make_daemon: Callable[..., Daemon], image: str
) -> None:
    daemon = make_daemon()
    daemon.start()
    daemon.add_image(image)
    cli = Cli(daemon)
    with daemon.client() as client, follower(cli, "--after", "0", "--kind", "vm.started") as lines:
        guests.warm(client, image, name="web", memory_mib=256)
        eventually(lambda: len(lines()) == 1, 30, "the first event")
        earlier = newest(client)
        cli("daemon", "stop", "--force")
        daemon.start()
        guests.warm(client, image, name="again", memory_mib=256)
        # Which it only knows if it connected again, with the cursor of the daemon before.
        eventually(lambda: len(lines()) == 3, 60, "a gap and the second event")
        first, gap, second = lines()
        assert (first["kind"], first["vm"]["name"]) == ("vm.started", "web")
        assert (gap["kind"], gap["cause"], gap["lost"]) == ("gap", "restarted", 0)
        assert (second["kind"], second["vm"]["name"]) == ("vm.started", "again")
        events = so_far(client, earlier)
        assert (events[0].kind, events[0].cause) == (K.GAP, "restarted")
        assert events[1:] == so_far(client), "what the new daemon has is told whole"


@contextlib.contextmanager
def follower(cli: Cli, *args: str) -> Iterator[Callable[[], list[dict[str, object]]]]:
    """`vmfork events --json`, and what it has printed so far."""
    process = cli.spawn("events", "--json", *args, stdout=subprocess.PIPE)
    found: list[dict[str, object]] = []

    def read() -> None:
        assert process.stdout is not None
        for line in process.stdout:
            found.append(json.loads(line))

    reader = threading.Thread(target=read)
    reader.start()
    try:
        yield lambda: list(found)
    finally:
        process.terminate()
        process.wait(10)
        reader.join(10)
        if process.stdout is not None:
            process.stdout.close()


@pytest.mark.slow
@pytest.mark.limit(180)
def test_hosts_join_fall_silent_are_gone_and_return(image: str) -> None:
    with hosts(2) as net, contextlib.ExitStack() as stack:
        cluster = Cluster(net, image, stack)
        client = cluster.clients[0]
        cluster.join()
        joined = of(so_far(client, kinds=[K.HOST_JOINED]))
        assert joined == [(K.HOST_JOINED, "h0"), (K.HOST_JOINED, "h1")]
        assert {name for _, name in of(so_far(cluster.clients[1], kinds=[K.HOST_JOINED]))} == {"h0", "h1"}
        after = newest(client)
        cluster.daemons[1].kill()
        killed = time.monotonic()
        seen = list(itertools.islice(client.events(after=after), 2))
        assert of(seen) == [(K.HOST_SILENT, "h1"), (K.HOST_GONE, "h1")]
        assert seen[1].cause == "silent"
        assert time.monotonic() - killed > 10, "it was waited for"
        cluster.daemons[1].start()
        (back,) = itertools.islice(client.events(after=seen[-1].cursor), 1)
        assert of([back]) == [(K.HOST_RETURNED, "h1")]
        # To the host itself, the members of before are no news.
        assert of(so_far(cluster.clients[1], kinds=[K.HOST_JOINED])) == []
        cluster.settle()
        cluster.clis[1]("cluster", "leave")
        (left,) = itertools.islice(client.events(after=back.cursor), 1)
        assert (of([left]), left.cause) == ([(K.HOST_GONE, "h1")], "left")
        own = so_far(cluster.clients[1], kinds=[K.HOST_GONE])
        assert [(event.host.name, event.cause) for event in own if event.host] == [("h1", "left")]

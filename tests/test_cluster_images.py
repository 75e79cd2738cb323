"""Guest images are taken to hosts that lack the one that a VM booted from."""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import vmfork

from harness.cluster import Cluster
from harness.daemon import Daemon
from harness.hosts import hosts
from harness.waits import eventually

PROGRAM = Path(__file__).parent / "guest" / "away.py"
#: Reads a good part of the root disk.
_READ = "cat /usr/bin/* /usr/lib/x86_64-linux-gnu/*.so* 2>/dev/null | sha256sum"


@pytest.fixture
def cluster(image: str) -> Iterator[Cluster]:
    """Two hosts, of which the second has no image."""
    with hosts(2) as net, contextlib.ExitStack() as stack:
        made = Cluster(net, image, stack)
        made.clis[1]("image", "rm", image)
        made.join()
        yield made


@pytest.fixture
def parent(cluster: Cluster) -> vmfork.VM:
    return cluster.warm(0, name="web", memory_mib=256)


def store(daemon: Daemon) -> Path:
    return daemon.state / "images"


def described(daemon: Daemon, name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((store(daemon) / name / "image.json").read_text())
    return found


def entries(daemon: Daemon) -> set[str]:
    return {path.name for path in store(daemon).iterdir()} - {".lock"}


def arrivals(daemon: Daemon) -> list[str]:
    text = daemon.log.read_text(errors="replace")
    return [line for line in text.splitlines() if "a guest image has come" in line]


@contextlib.contextmanager
def full_disk(daemon: Daemon) -> Iterator[None]:
    """Meanwhile no guest image fits into the store of a daemon that has none."""
    folder = store(daemon)
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=32m", "vmfork-test", folder], timeout=30, check=True)
    try:
        yield
    finally:
        subprocess.run(["umount", folder], timeout=30, check=True)


@pytest.mark.slow
@pytest.mark.limit(300)
def test_a_host_takes_the_image_once_and_before_the_pause(cluster: Cluster, parent: vmfork.VM, image: str) -> None:
    expected = parent.exec(_READ, check=True).stdout
    there = cluster.daemons[1]
    assert cluster.clients[1].images() == []
    fork = parent.fork(4).raise_for_errors()
    assert {result.host for result in fork.results} == {"h0", "h1"}
    (arrival,) = arrivals(there)
    took = re.search(r"\bms=(\d+)", arrival)
    assert took and fork.reply.stages.prepare_ms >= int(took[1]), (arrival, fork.reply.stages)
    for clone in fork:
        assert clone.exec(_READ, check=True).stdout == expected
        assert clone.inspect().image == image
    assert entries(there) == {image}
    assert described(there, image) == described(cluster.daemons[0], image)
    assert "runs from it" in cluster.clis[1]("image", "rm", image, code=1).stderr.decode()
    with parent.fork(2, hosts=["h1"]).raise_for_errors():
        assert len(arrivals(there)) == 1
    # One that was removed there meanwhile comes with the clones.
    for clone in fork:
        clone.remove(force=True)
    cluster.clis[1]("image", "rm", image)
    with parent.fork(1, hosts=["h1"]).raise_for_errors() as (clone,):
        assert clone.exec(_READ, check=True).stdout == expected
        assert len(arrivals(there)) == 2


@pytest.mark.limit(240)
def test_another_image_of_that_name_stays(cluster: Cluster, parent: vmfork.VM, image: str, tmp_path: Path) -> None:
    disk = bytearray(1 << 20)
    disk[510:512] = b"\x55\xaa"
    (tmp_path / "disk").write_bytes(disk)
    cluster.clis[1]("image", "import", image, "--boot-disk", str(tmp_path / "disk"))
    before = described(cluster.daemons[1], image)
    digest = described(cluster.daemons[0], image)["files"]["root.img"]["blake3"]
    with parent.fork(1, hosts=["h1"]).raise_for_errors() as (clone,):
        assert clone.exec("cat /etc/hostname", check=True).exit_code == 0
        name = clone.inspect().image
        assert name == f"{image}-{digest[:12]}"
        assert {one.name: one.vms for one in cluster.clients[1].images()} == {image: 0, name: 1}
        assert described(cluster.daemons[1], image) == before
        root = (store(cluster.daemons[1]) / image / "root.img").read_bytes()
        assert hashlib.sha256(root).digest() == hashlib.sha256(disk).digest()
        with clone.fork(1, hosts=["h0"]).raise_for_errors() as (back,):
            assert back.inspect().image == image
            back.exec("true", check=True)
    assert arrivals(cluster.daemons[0]) == []


@pytest.mark.limit(240)
def test_a_host_whose_disk_is_full_gets_no_clones(cluster: Cluster, parent: vmfork.VM, image: str) -> None:
    with full_disk(cluster.daemons[1]):
        with pytest.raises(vmfork.VmforkError, match="No space left on device") as refused:
            parent.fork(1, hosts=["h1"])
        assert "`h1`" in str(refused.value), refused.value
        assert entries(cluster.daemons[1]) == set()
        with parent.fork(2).raise_for_errors() as both:
            assert {result.host for result in both.results} == {"h0"}
        assert entries(cluster.daemons[1]) == set()
    with parent.fork(1, hosts=["h1"]).raise_for_errors() as (clone,):
        clone.exec("true", check=True)


@pytest.mark.slow
@pytest.mark.limit(300)
def test_a_ticket_promises_places_only_where_the_image_is(cluster: Cluster, parent: vmfork.VM, image: str) -> None:
    there = cluster.daemons[1]
    parent.copy_in(PROGRAM, "/run/away.py")

    def said() -> list[str]:
        return parent.read_file("/run/said").decode().splitlines()

    def promised() -> None:
        parent.exec("rm -f /run/go; python3 /run/away.py promised > /run/said 2>&1 < /dev/null &", check=True)
        eventually(said, 120, "there is a ticket")
        assert said() == ["granted 4"]
        assert cluster.vms() == {"h0": ["web"], "h1": []}

    def cloned() -> list[str]:
        parent.write_file("/run/go", "")
        eventually(lambda: len(said()) == 2, 90, "the clones have ended")
        assert json.loads(said()[1]) == dict.fromkeys("1234"), said()
        fork = parent.inspect().last_fork
        assert fork is not None
        return sorted(clone.host or "" for clone in fork.clones)

    with full_disk(there):
        promised()
        assert cloned() == ["h0", "h0", "h0", "h0"]
    promised()
    assert len(arrivals(there)) == 1 and entries(there) == {image}
    assert cloned() == ["h0", "h0", "h1", "h1"]
    assert len(arrivals(there)) == 1


def test_what_a_daemon_left_that_died_is_removed_when_the_next_one_starts(make_daemon: Callable[..., Daemon]) -> None:
    daemon = make_daemon()
    left = store(daemon) / ".tmp-web-99999-0"
    left.mkdir(parents=True)
    (left / "root.img").write_bytes(b"half")
    daemon.start()
    eventually(lambda: not left.exists(), 20, "it is gone")

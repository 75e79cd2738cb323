"""Guest images that hosts pull from each other: `vmfork image seed`, `image pull`."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import vmfork

from harness import metrics
from harness.cli import Cli
from harness.cluster import Cluster
from harness.daemon import Daemon
from harness.hosts import hosts
from harness.waits import eventually

HOSTS = 4
#: Longer than hosts wait for a chunk of another.
AWAY_S = 12.0
#: Reads a part of the root, cold.
READ = "echo 3 > /proc/sys/vm/drop_caches; cat /usr/bin/* | sha256sum"


@pytest.fixture(scope="module")
def cluster(image: str) -> Iterator[Cluster]:
    """Hosts of which only the first has the image."""
    with hosts(HOSTS) as net, contextlib.ExitStack() as stack:
        made = Cluster(net, image, stack)
        for cli in made.clis[1:]:
            cli("image", "rm", image)
        made.join()
        yield made


@pytest.fixture
def seeded(cluster: Cluster, image: str) -> Iterator[Cluster]:
    """The same, and the first one seeds it. The others have nothing of it again afterwards."""
    cluster.clis[0]("image", "seed", image)
    yield cluster
    cluster.clear()
    for client in cluster.clients[1:]:
        for one in client.images():
            client.remove_image(one.name)
    cluster.clients[0].unseed_image(image)
    for daemon in cluster.daemons:
        eventually(lambda daemon=daemon: not _stored(daemon), 20, "no store has anything of it")


def _stored(daemon: Daemon) -> list[str]:
    folder = daemon.state / "snapshots" / "snapshots"
    return [path.name for path in folder.iterdir()] if folder.is_dir() else []


def _chunks(daemon: Daemon) -> dict[str, Path]:
    # Not by `glob`, which fails where a folder goes meanwhile.
    found = os.walk(daemon.state / "snapshots" / "chunks")
    return {name: Path(folder, name) for folder, _, names in found for name in names}


def _moved(daemon: Daemon) -> dict[str, float]:
    read = metrics.read(daemon)
    return {what: read.value("vmfork_image_chunks_total", what=what) for what in ("came", "given", "relayed")}


def _is_whole(client: vmfork.Client) -> bool:
    return all(one.remote is None for one in client.images())


@pytest.mark.limit(300)
def test_hosts_that_pull_at_once_get_most_of_it_from_each_other(seeded: Cluster, image: str) -> None:
    (listed,) = seeded.clients[0].images()
    assert listed.seeded and listed.remote is None
    wanted = len(_chunks(seeded.daemons[0]))
    assert wanted > 100
    before = [_moved(daemon) for daemon in seeded.daemons]
    others = list(zip(seeded.clis[1:], seeded.clients[1:], strict=True))

    def pull_and_boot(one: tuple[Cli, vmfork.Client]) -> str:
        cli, client = one
        told = cli("image", "pull", image).stderr.decode()
        assert "from cluster://" in told or "is ready" in told, told
        vm = client.run(image, name=f"vm{id(client)}", memory_mib=256)
        return vm.exec(READ, check=True, timeout_s=120).stdout_text

    with ThreadPoolExecutor(HOSTS - 1) as pool:
        sums = set(pool.map(pull_and_boot, others))
    own = seeded.clients[0].run(image, name="own", memory_mib=256)
    assert sums == {own.exec(READ, check=True, timeout_s=120).stdout_text}
    for _, client in others:
        eventually(lambda client=client: _is_whole(client), 120, "all of it has come")
    assert all(set(_chunks(daemon)) == set(_chunks(seeded.daemons[0])) for daemon in seeded.daemons)
    after = [_moved(daemon) for daemon in seeded.daemons]
    grown = [{what: now[what] - was[what] for what in now} for was, now in zip(before, after, strict=True)]
    print(f"{wanted} chunks: {grown}")
    # From the one that has it each chunk goes out about once, though three hosts need it.
    assert grown[0]["came"] == 0 and wanted <= grown[0]["given"] < 1.2 * wanted
    for host in grown[1:]:
        assert host["came"] >= wanted
        assert host["given"] > 0.1 * wanted and host["relayed"] > 0


@pytest.mark.slow
@pytest.mark.limit(300)
def test_an_image_outlives_the_host_that_seeded_it_and_damage_on_another_does_no_harm(
    seeded: Cluster, image: str
) -> None:
    first, second, third = seeded.clients[1:]
    first.pull_image(image)
    eventually(lambda: _is_whole(first), 120, "the first one has all of it")
    seeded.clients[0].unseed_image(image)
    assert not seeded.clients[0].images()[0].seeded and not _stored(seeded.daemons[0])
    # Who pulled it has it for others, and says so.
    assert first.images()[0].seeded
    assert second.pull_image(image, wait=True).remote is None
    root = seeded.daemons[2].state / "images" / image / "root.img"
    original = seeded.daemons[0].state / "images" / image / "root.img"
    assert root.read_bytes() == original.read_bytes()
    # What it read is a file now, which other hosts do not pull.
    assert not _stored(seeded.daemons[2])
    # Copies of one image are the same on all hosts.
    second.seed_image(image)
    assert _id(seeded.daemons[2]) == _id(seeded.daemons[1])
    damaged = sorted(_chunks(seeded.daemons[1]).values())[::3]
    for path in damaged:
        content = path.read_bytes()
        path.unlink()
        path.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    # From two hosts: the copy of one is damaged in part.
    third.pull_image(image, wait=True)
    assert (seeded.daemons[3].state / "images" / image / "root.img").read_bytes() == original.read_bytes()
    # From that one alone: the error names it.
    third.remove_image(image)
    second.unseed_image(image)
    with pytest.raises(vmfork.VmforkError) as refused:
        third.pull_image(image, wait=True)
    assert "damaged on `h1`" in (refused.value.cause or "") and "sound copy" in (refused.value.remedy or "")


def _id(daemon: Daemon) -> str:
    (path,) = (daemon.state / "snapshots" / "snapshots").glob("*/descriptor.json")
    return str(json.loads(path.read_text())["id"])


@pytest.mark.slow
@pytest.mark.limit(200)
def test_a_pull_goes_on_without_a_host_that_dies_and_after_a_restart(seeded: Cluster, image: str) -> None:
    first, second, _ = seeded.clients[1:]
    first.pull_image(image)
    second.pull_image(image)
    with second.run(image, name="reader", memory_mib=256) as vm:
        seeded.daemons[1].kill()
        assert vm.exec(READ, check=True, timeout_s=150).exit_code == 0
        eventually(lambda: _is_whole(second), 150, "the rest comes from the one that seeds")
    seeded.daemons[1].start()
    eventually(lambda: seeded.alive(seeded.clis[0]) == HOSTS, 60, "it is back")
    with seeded.daemons[1].client() as client:
        (listed,) = client.images()
        assert listed.name == image
        with client.run(image, name="again", memory_mib=256) as vm:
            assert vm.exec(READ, check=True, timeout_s=150).exit_code == 0
        assert client.pull_image(image, wait=True).remote is None


@pytest.mark.slow
@pytest.mark.limit(200)
def test_a_pull_goes_on_when_the_host_that_seeds_comes_back(seeded: Cluster, image: str) -> None:
    client = seeded.clients[1]
    seeded.net.limit(0, 60)
    try:
        client.pull_image(image)
        seeded.daemons[0].kill()
        # Its holder keeps its sockets, so hosts wait through a short restart. This one takes longer
        # than they wait for a chunk.
        time.sleep(AWAY_S)
        assert not _is_whole(client), "it is away before all has come"
        seeded.daemons[0].start()
        # No client asks for it again.
        eventually(lambda: _is_whole(client), 90, "the rest comes")
    finally:
        seeded.net.unlimit(0)
    assert set(_chunks(seeded.daemons[1])) == set(_chunks(seeded.daemons[0]))


@pytest.mark.slow
@pytest.mark.limit(200)
def test_a_client_that_goes_ends_its_own_pull_and_its_own_seed_alone(seeded: Cluster, image: str) -> None:
    daemon, client, cli = seeded.daemons[1], seeded.clients[1], seeded.clis[1]
    seeded.net.limit(0, 60)
    try:
        with ThreadPoolExecutor(1) as pool:
            stays = pool.submit(client.pull_image, image, wait=True)
            eventually(lambda: len(_chunks(daemon)) > 10, 30, "it comes")
            with cli.spawn("image", "pull", image, "--wait") as goes:
                time.sleep(0.5)
                goes.send_signal(signal.SIGINT)
                assert goes.wait(20) != 0
            assert stays.result(120).remote is None
        client.remove_image(image)
        # The only one: nothing of it stays.
        with cli.spawn("image", "pull", image, "--wait") as goes:
            eventually(lambda: len(_chunks(daemon)) > 10, 30, "it comes")
            goes.send_signal(signal.SIGINT)
            assert goes.wait(20) != 0
        eventually(lambda: not _stored(daemon) and not _chunks(daemon), 30, "nothing stays")
    finally:
        seeded.net.unlimit(0)
    # A seed that is given up leaves nothing, and another one may begin.
    seeded.clients[0].unseed_image(image)
    with seeded.clis[0].spawn("image", "seed", image) as goes:
        eventually(lambda: len(_chunks(seeded.daemons[0])) > 10, 30, "it is stored")
        goes.send_signal(signal.SIGINT)
        assert goes.wait(20) != 0
    eventually(lambda: not _stored(seeded.daemons[0]) and not _chunks(seeded.daemons[0]), 30, "nothing stays")
    assert seeded.clients[0].seed_image(image).seeded


def test_what_cannot_be_pulled_or_seeded_is_told(cluster: Cluster, image: str, make_daemon: Callable[..., Daemon]) -> None:
    here, other = cluster.clients[:2]
    with pytest.raises(vmfork.NotFound, match="no other host offers") as refused:
        other.pull_image(image)
    assert f"vmfork image seed {image}" in (refused.value.remedy or "")
    with pytest.raises(vmfork.NotFound, match="host `h2` offers no image"):
        other.pull_image(image, "cluster://h2")
    with pytest.raises(vmfork.BadRequest) as refused:
        other.pull_image(image, "cluster://h1")
    assert "is this one" in (refused.value.cause or "")
    with pytest.raises(vmfork.VmforkError, match="h9"):
        other.pull_image(image, "cluster://h9")
    with pytest.raises(vmfork.BadRequest):
        other.pull_image(image, "cluster://h1/x")
    with pytest.raises(vmfork.BadRequest, match="only images"):
        other.snapshots.pull("web", "cluster://")
    with pytest.raises(vmfork.BadRequest, match="vmfork image seed"):
        here.push_image(image, "cluster://")
    for call in (here.seed_image, here.unseed_image):
        with pytest.raises(vmfork.NotFound):
            call("absent")
    # Twice is as once.
    for _ in range(2):
        assert here.seed_image(image).seeded
    for _ in range(2):
        here.unseed_image(image)
        assert not here.images()[0].seeded
    alone = make_daemon().start()
    with alone.client() as client, pytest.raises(vmfork.VmforkError, match="cluster"):
        client.pull_image(image)
    alone.stop()

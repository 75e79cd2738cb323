"""Stored snapshots, by both clients."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable
from pathlib import Path

import httpx
import pytest
import vmfork
from conftest import EXPORT, FakeDaemon


@pytest.fixture()
def client(transport: httpx.MockTransport) -> vmfork.Client:
    return vmfork.Client(transport=transport)


def test_a_snapshot_is_taken_listed_inspected_and_removed(
    client: vmfork.Client, daemon: FakeDaemon
) -> None:
    vm = client.run("debian", name="web")
    taken = client.snapshots.create(vm, "warm")
    assert (taken.state, taken.progress.total_bytes) == (vmfork.SnapshotState.WRITING, 2)
    assert daemon.asked[-1][3] == {
        "vm": vm.id, "name": "warm", "wait": False, "full": False, "keep_zero_pages": False,
    }
    waited = client.snapshots.create(
        "web", "cold", wait=True, compression=vmfork.Compression.NONE, full=True,
        keep_zero_pages=True, record_s=1.5,
    )
    assert waited.state is vmfork.SnapshotState.READY
    assert daemon.asked[-1][3] == {
        "vm": "web", "name": "cold", "wait": True, "compression": "none", "full": True,
        "keep_zero_pages": True, "record_ms": 1500,
    }
    client.snapshots.create("web", "disks", disk_only=True)
    assert daemon.asked[-1][3]["disk_only"] is True
    with pytest.raises(vmfork.Conflict):
        client.snapshots.create("web", "warm")
    assert [one.name for one in client.snapshots.list()] == ["warm", "cold", "disks"]
    detail = client.snapshots.get("warm")
    memory, disk = detail.images
    assert (memory.role, memory.device, memory.bytes) == (vmfork.ImageRole.MEMORY, None, 1 << 29)
    assert (disk.role, disk.device, disk.base) == (vmfork.ImageRole.DISK, "data", "debian")
    assert (detail.pause_ms, detail.chunk_pages, detail.dependants) == (3.0, 64, ("hot",))
    assert detail.profile.clusters[0].frequency == 1.0
    assert client.snapshots.remove("cold").freed_bytes == 7
    with pytest.raises(vmfork.NotFound, match="no snapshot named `cold`"):
        client.snapshots.get("cold")


def test_a_base_goes_with_its_deltas_if_asked(client: vmfork.Client, daemon: FakeDaemon) -> None:
    daemon.keep("warm")
    daemon.keep("hot", base="warm")
    with pytest.raises(vmfork.Conflict, match="hot"):
        client.snapshots.remove("warm")
    assert client.snapshots.remove("warm", cascade=True).names == ("warm", "hot")
    assert client.snapshots.list() == []


def test_a_start_is_a_sequence_of_vms_and_an_error_for_each_other(
    client: vmfork.Client, daemon: FakeDaemon
) -> None:
    daemon.keep("warm")
    daemon.room = 2
    started = client.snapshots.start("warm", 3, prefetch=vmfork.Prefetch.WORKING_SET)
    assert daemon.asked[-1][3] == {
        "count": 3, "all_or_nothing": False, "force": False, "prefetch": "working_set",
        "hydrate_mib_per_s": 0, "timeout_ms": 60000,
    }
    assert [vm.name for vm in started] == ["warm.1", "warm.2"]
    assert (started.snapshot, started.requested, started.granted) == ("warm", 3, 2)
    assert (started.open_ms, started.total_ms, started.results[0].running_ms) == (4.2, 31.0, 9.0)
    (failure,) = started.errors
    assert isinstance(failure, vmfork.NoCapacity)
    assert failure.vm == "warm.3"
    with pytest.raises(vmfork.NoCapacity):
        started.raise_for_errors()
    info = started.vms[1].inspect()
    assert (info.snapshot, info.parent, info.vmid) == ("warm", None, 2)
    assert repr(started) == "<vmfork.StartResult 2 of 3 from warm>"


def test_started_vms_end_with_their_block(client: vmfork.Client, daemon: FakeDaemon) -> None:
    daemon.keep("warm")
    with client.snapshots.start(
        "warm", 2, names=["a", "b"], all_or_nothing=True, force=True, hydrate_mib_per_s=5,
        timeout_s=2,
    ) as vms:
        assert daemon.asked[-1][3] == {
            "count": 2, "names": ["a", "b"], "all_or_nothing": True, "force": True,
            "hydrate_mib_per_s": 5, "timeout_ms": 2000,
        }
        assert [vm.exec("x").ok for vm in vms] == [True, True]
    assert client.vms() == []


def test_damage_is_told_and_a_delta_made_whole(client: vmfork.Client, daemon: FakeDaemon) -> None:
    daemon.keep("warm")
    assert client.snapshots.verify("warm").ok
    body = {"code": "host", "message": "snapshot `torn` is damaged", "cause": "chunk 7"}
    daemon.keep("torn", damage=[body])
    verified = client.snapshots.verify("torn")
    assert not verified.ok
    assert verified.damage[0].cause == "chunk 7"
    daemon.keep("hot", base="warm")
    assert client.snapshots.flatten("hot").base is None


def test_an_export_is_its_owners_alone_and_can_be_imported(
    client: vmfork.Client, daemon: FakeDaemon, tmp_path: Path
) -> None:
    daemon.keep("warm")
    target = tmp_path / "warm.snapshot"
    target.write_text("old")
    with pytest.raises(vmfork.NotFound):
        client.snapshots.export("nope", target)
    assert target.read_text() == "old"
    assert client.snapshots.export("warm", target) == len(EXPORT)
    assert target.read_bytes() == EXPORT
    assert target.stat().st_mode & 0o777 == 0o600
    assert list(tmp_path.iterdir()) == [target]
    assert [one.name for one in client.snapshots.import_(target)] == ["warm", "hot"]
    stored = client.snapshots.import_(target, name="mine")
    assert (stored[1].name, stored[1].base) == ("mine", "warm")
    assert daemon.asked[-1][:3] == ("POST", "/v1/import", {"name": "mine"})
    assert daemon.headers[-1]["content-type"] == "application/octet-stream"
    target.write_text("other")
    with pytest.raises(vmfork.BadRequest, match="it is something else"):
        client.snapshots.import_(target)


def test_stores_are_named_by_url_or_from_the_root(
    client: vmfork.Client, daemon: FakeDaemon, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    daemon.keep("warm")
    monkeypatch.chdir(tmp_path)
    assert client.snapshots.push("warm", "s3://bucket/prefix").sent_bytes == 5
    assert daemon.asked[-1][3] == {"location": "s3://bucket/prefix"}
    client.snapshots.push("warm", Path("store"))
    assert daemon.asked[-1][3] == {"location": str(tmp_path / "store")}
    pulled = client.snapshots.pull("warm", "store")
    assert pulled.state is vmfork.SnapshotState.PULLING
    assert pulled.remote == os.path.join(tmp_path, "store")
    assert client.snapshots.pull("warm", "/srv", wait=True).state is vmfork.SnapshotState.READY
    assert daemon.asked[-1][3] == {"location": "/srv", "wait": True}


def test_a_relative_folder_means_nothing_to_a_daemon_elsewhere(
    transport: httpx.MockTransport, daemon: FakeDaemon
) -> None:
    there = vmfork.Client(host="tcp://h:1", token="t", transport=transport)
    daemon.keep("warm")
    for location in ("store", ""):
        with pytest.raises(ValueError, match="from the root"):
            there.snapshots.push("warm", location)
    there.snapshots.push("warm", "/srv/store")
    assert len(daemon.asked) == 1


def test_a_profile_is_read_and_forgotten(client: vmfork.Client, daemon: FakeDaemon) -> None:
    daemon.keep("warm")
    profile = client.snapshots.profile("warm")
    assert (profile.runs, profile.recording, profile.clusters[0].pages) == (2, True, 512)
    client.snapshots.reset_profile("warm")
    assert daemon.asked[-1][:2] == ("DELETE", "/v1/snapshots/warm/profile")


def test_names_that_would_be_another_route_are_refused(client: vmfork.Client) -> None:
    for name in ("", ".", ".."):
        with pytest.raises(vmfork.BadRequest, match="can't name a snapshot"):
            client.snapshots.get(name)


def test_words_of_a_newer_daemon_become_unknown(client: vmfork.Client, daemon: FakeDaemon) -> None:
    daemon.keep("warm", state="hovering", accel="warp")
    (snapshot,) = client.snapshots.list()
    assert snapshot.state is vmfork.SnapshotState.UNKNOWN


def run(socket_path: Path, body: Callable[[vmfork.AsyncClient], Awaitable[None]]) -> None:
    async def main() -> None:
        async with vmfork.AsyncClient(socket=socket_path) as client:
            await body(client)

    asyncio.run(asyncio.wait_for(main(), 30))


def test_the_same_for_asyncio(socket_path: Path, daemon: FakeDaemon, tmp_path: Path) -> None:
    async def body(client: vmfork.AsyncClient) -> None:
        vm = await client.run("debian", name="web")
        taken = await client.snapshots.create(vm, "warm", wait=True)
        assert taken.state is vmfork.SnapshotState.READY
        assert (await client.snapshots.get("warm")).machine == "pc-q35-7.2"
        async with await client.snapshots.start("warm", 3) as vms:
            runs = await asyncio.gather(*(one.exec(["hi", one.name]) for one in vms))
            assert [one.stdout_text for one in runs] == ["hi warm.1", "hi warm.2", "hi warm.3"]
        assert [one.name for one in await client.vms()] == ["web"]
        assert (await client.snapshots.verify("warm")).ok
        target = tmp_path / "warm.snapshot"
        assert await client.snapshots.export("warm", target) == len(EXPORT)
        assert target.read_bytes() == EXPORT
        assert target.stat().st_mode & 0o777 == 0o600
        stored = await client.snapshots.import_(target, name="mine")
        assert [one.name for one in stored] == ["warm", "mine"]
        assert (await client.snapshots.flatten("mine")).base is None
        assert (await client.snapshots.push("warm", "s3://b/p")).names == ("warm",)
        assert (await client.snapshots.pull("warm", "s3://b/p")).remote == "s3://b/p"
        assert (await client.snapshots.profile("warm")).runs == 2
        await client.snapshots.reset_profile("warm")
        assert (await client.snapshots.remove("mine")).names == ("mine",)
        assert [one.name for one in await client.snapshots.list()] == ["warm"]

    run(socket_path, body)

"""Volumes, by both clients."""

from __future__ import annotations

import asyncio

import httpx
import pytest
import vmfork
from conftest import FakeDaemon


@pytest.fixture()
def client(transport: httpx.MockTransport) -> vmfork.Client:
    return vmfork.Client(transport=transport)


def test_a_volume_is_made_listed_changed_and_removed(
    client: vmfork.Client, daemon: FakeDaemon
) -> None:
    made = client.volumes.create("db", size_bytes=1 << 30)
    assert daemon.asked[-1][3] == {
        "name": "db", "source": {"type": "blank", "size_bytes": 1 << 30},
    }
    assert (made.name, made.size_bytes, made.on_fork) == ("db", 1 << 30, vmfork.OnFork.FORK)
    assert (made.vms, made.reason) == ((), None)
    client.volumes.create(
        "set", image="debian", on_fork=vmfork.OnFork.READ_ONLY, labels={"team": "a"}
    )
    assert daemon.asked[-1][3] == {
        "name": "set", "source": {"type": "image", "image": "debian"}, "on_fork": "read_only",
        "labels": {"team": "a"},
    }
    client.volumes.create("old", file="/srv/old.raw")
    assert daemon.asked[-1][3]["source"] == {"type": "file", "path": "/srv/old.raw"}
    client.volumes.create("warm", snapshot=("web", "data"))
    stored = {"type": "snapshot", "snapshot": "web", "disk": "data"}
    assert daemon.asked[-1][3]["source"] == stored
    client.volumes.create("far", s3="s3://bases/data.raw")
    assert daemon.asked[-1][3]["source"] == {"type": "object", "location": "s3://bases/data.raw"}
    for name in ("warm", "far"):
        client.volumes.remove(name)
    assert [one.name for one in client.volumes.list()] == ["db", "set", "old"]
    assert client.volumes.set_on_fork("db", vmfork.OnFork.REFUSE).on_fork == "refuse"
    assert client.volumes.get("db").on_fork is vmfork.OnFork.REFUSE
    client.volumes.remove("db")
    with pytest.raises(vmfork.NotFound, match="no volume named `db`"):
        client.volumes.get("db")
    with pytest.raises(vmfork.Conflict):
        client.volumes.create("set", size_bytes=1 << 30)


def test_a_volume_has_one_source_and_a_plain_name(
    client: vmfork.Client, daemon: FakeDaemon
) -> None:
    asked = len(daemon.asked)
    with pytest.raises(ValueError, match="give one of"):
        client.volumes.create("db")
    with pytest.raises(ValueError, match="give one of"):
        client.volumes.create("db", size_bytes=1, file="/x")
    with pytest.raises(vmfork.BadRequest):
        client.volumes.get("..")
    assert len(daemon.asked) == asked


def test_a_vm_is_given_a_volume(client: vmfork.Client, daemon: FakeDaemon) -> None:
    client.run("debian", name="web", disks=[vmfork.NewDisk.volume("data", "db")])
    assert daemon.asked[-1][3]["disks"] == [
        {"name": "data", "source": {"type": "volume", "volume": "db"}},
    ]


def test_a_running_vm_gets_a_volume_and_gives_it_back(
    client: vmfork.Client, daemon: FakeDaemon
) -> None:
    vm = client.run("debian", name="web", disks=[vmfork.NewDisk.empty("data")])
    assert daemon.asked[-1][3]["disks"] == [{"name": "data", "source": {"type": "empty"}}]
    client.volumes.create("db", size_bytes=1 << 30)
    disk = client.volumes.attach("db", vm)
    assert (disk.device, disk.volume, disk.empty) == ("/dev/vdb", "db", False)
    assert daemon.asked[-1][3] == {"vm": vm.id}
    client.volumes.attach("db", "web", disk="data")
    assert daemon.asked[-1][3] == {"vm": "web", "disk": "data"}
    assert client.volumes.detach("db", vm).name == "db"
    assert daemon.asked[-1][3] == {"vm": vm.id, "force": False}
    client.volumes.detach("db", "web", force=True)
    assert daemon.asked[-1][3] == {"vm": "web", "force": True}


def test_a_volume_grows_and_does_not_shrink(client: vmfork.Client, daemon: FakeDaemon) -> None:
    client.volumes.create("db", size_bytes=1 << 30)
    assert client.volumes.resize("db", 4 << 30).size_bytes == 4 << 30
    assert daemon.asked[-1][1:] == ("/v1/volumes/db/resize", {}, {"size_bytes": 4 << 30})
    with pytest.raises(vmfork.Conflict):
        client.volumes.resize("db", 1 << 30)


def test_asyncio_asks_the_same(transport: httpx.MockTransport, daemon: FakeDaemon) -> None:
    async def go() -> None:
        async with vmfork.AsyncClient(transport=transport) as client:
            await client.volumes.create("db", size_bytes=1 << 30)
            assert (await client.volumes.resize("db", 2 << 30)).size_bytes == 2 << 30
            assert [one.name for one in await client.volumes.list()] == ["db"]
            await client.volumes.remove("db")

    asyncio.run(go())
    assert daemon.volumes == {}

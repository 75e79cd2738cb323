"""The asyncio client: the same answers, and clones driven at once."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
import vmfork
from conftest import FakeDaemon


def run(socket_path: Path, body: Callable[[vmfork.AsyncClient], Awaitable[None]]) -> None:
    async def main() -> None:
        async with vmfork.AsyncClient(socket=socket_path) as client:
            await body(client)

    asyncio.run(asyncio.wait_for(main(), 30))


def test_a_whole_life(socket_path: Path, daemon: FakeDaemon, tmp_path: Path) -> None:
    async def body(client: vmfork.AsyncClient) -> None:
        async with await client.run("debian", name="web") as vm:
            async with await vm.fork(4) as clones:
                runs = [clone.exec(["hi", clone.name]) for clone in clones]
                texts = [result.stdout_text for result in await asyncio.gather(*runs)]
                assert texts == ["hi web.1", "hi web.2", "hi web.3", "hi web.4"]
                assert (await clones[0].inspect()).parent == "web"
            assert [other.name for other in await client.vms()] == ["web"]
            with pytest.raises(vmfork.ExecFailed):
                await vm.exec(["false"], check=True)
            assert "".join([text async for text in vm.follow_logs()]) == "boot\nlögin\n"
        assert await client.vms() == []

    run(socket_path, body)
    assert all(vm["state"] == "exited" for vm in daemon.vms.values())


def test_files_stream_both_ways(socket_path: Path, daemon: FakeDaemon, tmp_path: Path) -> None:
    source = tmp_path / "in"
    source.write_bytes(b"0123456789abcdef" * 100_000)

    async def body(client: vmfork.AsyncClient) -> None:
        vm = await client.run("debian")
        await vm.copy_in(source, "/x", mode=0o600)
        assert await vm.copy_out("/x", tmp_path / "out") == 1_600_000
        await vm.write_file("/y", source.read_bytes())
        assert await vm.read_file("/y") == source.read_bytes()
        big = await vm.exec(["cat"], stdin=source.read_bytes())
        assert big.stdout == source.read_bytes()

    run(socket_path, body)
    assert (tmp_path / "out").read_bytes() == source.read_bytes()
    assert (tmp_path / "out").stat().st_mode & 0o777 == 0o600


def test_errors_are_the_same(socket_path: Path) -> None:
    async def body(client: vmfork.AsyncClient) -> None:
        with pytest.raises(vmfork.NotFound, match="no VM named `nope` on this host"):
            await client.vm("nope")

    run(socket_path, body)


def test_no_daemon(tmp_path: Path) -> None:
    async def body(client: vmfork.AsyncClient) -> None:
        with pytest.raises(vmfork.ConnectionFailed, match="vmfork daemon start"):
            await client.version()

    run(tmp_path / "missing.sock", body)

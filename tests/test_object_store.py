"""Stored snapshots in an object store: a real S3 server, near, far, gone, and one that does not know us."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from contextlib import ExitStack

import pytest
import vmfork

from harness import guests, s3
from harness.daemon import Daemon
from harness.waits import eventually

MakeDaemon = Callable[..., Daemon]

#: 12 MiB that do not compress, so that they are many chunks.
DATA = b"".join(hashlib.sha256(f"{n}".encode()).digest() for n in range(393_216))
DIGEST = hashlib.sha256(DATA).hexdigest()


@pytest.fixture
def server(need: Callable[[object, str], None]) -> Iterator[s3.Server]:
    need(s3.program(), "versitygw, an S3 server (mk/versitygw.sh builds it)")
    with s3.server() as server:
        yield server


@pytest.fixture
def start_daemon(make_daemon: MakeDaemon, image: str) -> Callable[[dict[str, str]], Daemon]:
    """Daemons that know an object store, or think so."""

    def start(env: dict[str, str]) -> Daemon:
        daemon = make_daemon(env=env)
        daemon.add_image(image)
        return daemon.start()

    return start


def pushed(daemon: Daemon, image: str, server: s3.Server) -> None:
    """A snapshot `warm` with `DATA` in a file, taken there and pushed."""
    with daemon.client() as client:
        vm = guests.warm(client, image, name="web", memory_mib=256, whole=True)
        vm.write_file("/run/data", DATA)
        client.snapshots.create("web", "warm", wait=True, record_s=0)
        vm.remove(force=True)
        assert client.snapshots.push("warm", server.location).names == ("warm",)


def digest(vm: vmfork.VM) -> str:
    return vm.exec("sha256sum /run/data", check=True).stdout_text.split()[0]


def start(client: vmfork.Client, name: str = "warm", **options: object) -> vmfork.VM:
    [vm] = client.snapshots.start(name, **options).raise_for_errors()  # type: ignore[arg-type]
    return vm


@pytest.mark.soak
@pytest.mark.limit(300)
def test_a_pulled_snapshot_starts_before_it_is_here_and_needs_no_server_when_it_is(
    start_daemon: Callable[[dict[str, str]], Daemon], image: str, server: s3.Server
) -> None:
    pushed(start_daemon(server.environment()), image, server)
    with ExitStack() as stack:
        with s3.relay(server.port, 0.2) as port:
            there = stack.enter_context(start_daemon(server.environment(port)).client())
            bystander = guests.warm(there, image, name="bystander", memory_mib=256)
            there.snapshots.pull("warm", server.location)
        # The way to the server is gone before much has come.
        with pytest.raises(vmfork.VmforkError, match="s3://snapshots") as lost:
            start(there, prefetch="none", timeout_s=240)
        assert "warm" in str(lost.value)
        assert bystander.exec("echo here", check=True).stdout_text == "here\n"
        with s3.relay(server.port, 0.0, port):
            vm = start(there)
            assert digest(vm) == DIGEST
            assert there.snapshots.get("warm").state is vmfork.SnapshotState.PULLING, "only what was touched has come"
            assert there.snapshots.pull("warm", server.location, wait=True).state is vmfork.SnapshotState.READY
        server.stop()
        assert there.snapshots.verify("warm").ok
        assert digest(vm) == DIGEST
        vm.remove(force=True)
        bystander.remove(force=True)
        eventually(lambda: there.host().cache_bytes == 0, 60, "nothing of it is in memory")
        assert digest(start(there)) == DIGEST


def test_who_is_not_let_in_is_told_so_without_the_secret(
    start_daemon: Callable[[dict[str, str]], Daemon], image: str, server: s3.Server
) -> None:
    env = {**server.environment(), "AWS_SECRET_ACCESS_KEY": "not the secret of the tests"}
    daemon = start_daemon(env)
    with daemon.client() as client:
        vm = guests.warm(client, image, name="web", memory_mib=256)
        client.snapshots.create("web", "warm", wait=True, record_s=0)
        with pytest.raises(vmfork.VmforkError) as refused:
            client.snapshots.push("warm", server.location)
        assert "403" in str(refused.value) or "denied" in str(refused.value).lower() or "match" in str(refused.value)
        assert env["AWS_SECRET_ACCESS_KEY"] not in str(refused.value) + daemon.log.read_text()
        with pytest.raises(vmfork.VmforkError, match="nobucket"):
            client.snapshots.pull("warm", "s3://nobucket/")
        assert list(server.folder.iterdir()) == []
        assert vm.exec("echo still", check=True).stdout_text == "still\n"

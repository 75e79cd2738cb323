"""The API's sockets outlive the daemon: a client waits meanwhile, and the next daemon answers."""

from __future__ import annotations

import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import vmfork

from harness import leftovers, processes
from harness.cli import Cli
from harness.daemon import Daemon
from harness.waits import eventually

MakeDaemon = Callable[..., Daemon]

TOKEN = "a-token-of-some-length-0123456789"
REQUEST = f"GET /v1/version HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {TOKEN}\r\nconnection: close\r\n\r\n".encode()
#: Far more than any answer takes.
ANSWER_S = 60.0


def ask(address: Path | int) -> bytes:
    """The status line of an answer on its own connection, to a unix socket or a TCP port."""
    with socket.socket(socket.AF_INET if isinstance(address, int) else socket.AF_UNIX) as connection:
        connection.settimeout(ANSWER_S)
        connection.connect(("127.0.0.1", address) if isinstance(address, int) else str(address))
        connection.sendall(REQUEST)
        answer = b""
        while part := connection.recv(4096):
            answer += part
        if not answer:
            raise ConnectionResetError("no answer")
        return answer.split(b"\r\n", 1)[0]


def checked(daemon: Daemon) -> str:
    """What `doctor` reports of the holder."""
    with daemon.client() as client:
        (check,) = [check for check in client.doctor().checks if check.name == "holder"]
    return check.detail


class Clients:
    """Each asks again and again, on a new connection."""

    def __init__(self, *addresses: Path | int) -> None:
        self.answered = 0
        self.begun = 0
        #: When the daemon was killed. What it had accepted by then, it took along.
        self.killed_at = float("inf")
        self.failures: list[str] = []
        self._over = threading.Event()
        self._threads = [threading.Thread(target=self._ask, args=(address,)) for address in addresses]

    def _ask(self, address: Path | int) -> None:
        while not self._over.is_set():
            begun_at = time.monotonic()
            self.begun += 1
            try:
                status = ask(address)
            except (ConnectionResetError, BrokenPipeError) as error:
                if begun_at > self.killed_at:
                    self.failures.append(f"{address}: {error!r}")
            except OSError as error:
                self.failures.append(f"{address}: {error!r}")
            else:
                self.answered += 1
                if status != b"HTTP/1.1 200 OK":
                    self.failures.append(f"{address}: {status!r}")

    def go_on(self) -> None:
        """Until each has been answered a few times from now on."""
        target = self.answered + 5 * len(self._threads)
        eventually(lambda: self.answered >= target or self.failures, ANSWER_S, "clients are answered")
        assert self.failures == []

    def wait_for(self, count: int) -> None:
        """Until nothing but waiting clients is left."""
        time.sleep(0.5)
        begun, answered = self.begun, self.answered
        time.sleep(0.5)
        assert (self.begun, self.answered) == (begun, answered), "a client was answered, or refused"
        assert self.failures == []
        assert len(self._threads) == count

    @contextmanager
    def running(self) -> Iterator[Clients]:
        for thread in self._threads:
            thread.start()
        try:
            yield self
        finally:
            self._over.set()
            for thread in self._threads:
                thread.join(ANSWER_S)


@pytest.fixture
def token_file(tmp_path: Path) -> Path:
    file = tmp_path / "token"
    file.write_text(f"{TOKEN}\n")
    file.chmod(0o600)
    return file


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def holder(daemon: Daemon) -> processes.Process:
    found = daemon.holder()
    assert found is not None, "there is no holder"
    return found


def kill(daemon: Daemon, clients: Clients) -> None:
    clients.killed_at = time.monotonic() + 0.1
    daemon.kill()
    time.sleep(max(0.0, clients.killed_at - time.monotonic()))


@pytest.mark.limit(120)
def test_no_client_is_refused_until_a_killed_daemon_has_a_successor(make_daemon: MakeDaemon, token_file: Path) -> None:
    port = free_port()
    daemon = make_daemon("--listen", f"127.0.0.1:{port}", "--token-file", str(token_file)).start()
    mode = daemon.socket.stat()
    with Clients(daemon.socket, daemon.socket, port, port).running() as clients:
        for _ in range(3):
            clients.go_on()
            keeper = holder(daemon).pid
            kill(daemon, clients)
            clients.wait_for(4)
            daemon.start()
            assert holder(daemon).pid == keeper
            clients.go_on()
    assert clients.failures == []
    assert (daemon.socket.stat().st_ino, daemon.socket.stat().st_mode) == (mode.st_ino, mode.st_mode)


@pytest.mark.limit(60)
def test_a_daemon_that_ends_in_good_order_takes_its_holder_along(make_daemon: MakeDaemon) -> None:
    daemon = make_daemon().start()
    keeper = holder(daemon)
    assert daemon.stop() == 0
    assert daemon.left_behind(5) == []
    assert not keeper.is_alive()
    assert not daemon.socket.exists()
    assert not (daemon.state / "holder.sock").exists()


@pytest.mark.limit(60)
def test_without_a_next_daemon_the_holder_ends_and_clients_are_refused(make_daemon: MakeDaemon) -> None:
    daemon = make_daemon("--holder-linger-s", "1").start()
    keeper = holder(daemon)
    daemon.kill()
    assert keeper.is_alive()
    eventually(lambda: not keeper.is_alive(), 20, "the holder ends after a second")
    with pytest.raises(ConnectionRefusedError):
        ask(daemon.socket)
    # What it left is no hindrance.
    daemon.start()
    assert ask(daemon.socket) == b"HTTP/1.1 200 OK"


@pytest.mark.limit(60)
def test_no_holder_if_none_is_wanted(make_daemon: MakeDaemon) -> None:
    daemon = make_daemon().start()
    keeper = holder(daemon)
    daemon.kill()
    daemon.flags = ["--holder-linger-s", "0"]
    daemon.start()
    assert daemon.holder() is None and not keeper.is_alive()
    assert checked(daemon).startswith("off")
    daemon.kill()
    with pytest.raises(ConnectionRefusedError):
        ask(daemon.socket)


@pytest.mark.limit(60)
def test_a_changed_address_is_a_new_socket_and_the_old_one_is_closed(make_daemon: MakeDaemon, token_file: Path) -> None:
    one, two = free_port(), free_port()
    flags = ["--token-file", str(token_file), "--listen"]
    daemon = make_daemon(*flags, f"127.0.0.1:{one}").start()
    daemon.kill()
    # The same port, but for all addresses: the old socket would be in the way.
    daemon.flags = [*flags, f"0.0.0.0:{one}"]
    daemon.start()
    assert ask(one) == b"HTTP/1.1 200 OK"
    daemon.kill()
    daemon.flags = [*flags, f"127.0.0.1:{two}"]
    old, daemon.socket = daemon.socket, daemon.folder / "other.sock"
    daemon.start()
    assert (ask(two), ask(daemon.socket)) == (b"HTTP/1.1 200 OK", b"HTTP/1.1 200 OK")
    assert not old.exists()
    with pytest.raises(ConnectionRefusedError):
        ask(one)
    daemon.kill()
    daemon.flags = []
    daemon.start()
    with pytest.raises(ConnectionRefusedError):
        ask(two)


@pytest.mark.limit(60)
def test_a_socket_whose_file_was_removed_is_made_anew(make_daemon: MakeDaemon) -> None:
    daemon = make_daemon().start()
    daemon.kill()
    daemon.socket.unlink()
    daemon.start()
    assert ask(daemon.socket) == b"HTTP/1.1 200 OK"


@pytest.mark.limit(90)
def test_another_holder_takes_the_place_of_one_that_died(make_daemon: MakeDaemon) -> None:
    daemon = make_daemon().start()
    with Clients(daemon.socket, daemon.socket).running() as clients:
        clients.go_on()
        first = holder(daemon)
        first.kill()
        eventually(lambda: (now := daemon.holder()) and now.pid != first.pid, 20, "another holder")
        eventually(lambda: "another keeps the sockets now" in daemon.log_tail(), 20, "it has the sockets")
        assert checked(daemon).startswith("keeps 1 of")
        clients.go_on()
        kill(daemon, clients)
        clients.wait_for(2)
        daemon.start()
        clients.go_on()


@pytest.mark.limit(90)
def test_a_holder_that_hangs_keeps_no_daemon_from_starting(make_daemon: MakeDaemon) -> None:
    daemon = make_daemon().start()
    hung = holder(daemon)
    os.kill(hung.pid, signal.SIGSTOP)
    daemon.kill()
    daemon.start()
    assert not hung.is_alive()
    assert ask(daemon.socket) == b"HTTP/1.1 200 OK"
    # Nor from ending.
    os.kill(holder(daemon).pid, signal.SIGSTOP)
    assert daemon.stop() == 0
    assert daemon.left_behind(5) == []


@pytest.mark.limit(60)
def test_a_start_that_fails_leaves_a_predecessors_sockets_and_no_holder_of_its_own(
    make_daemon: MakeDaemon, token_file: Path
) -> None:
    daemon = make_daemon().start()
    token_file.chmod(0o644)
    bad = ["--listen", f"127.0.0.1:{free_port()}", "--token-file", str(token_file)]
    good, daemon.flags = daemon.flags, bad
    with Clients(daemon.socket).running() as clients:
        clients.go_on()
        kill(daemon, clients)
        assert daemon.spawn().wait(20) == 1
        clients.wait_for(1)
        daemon.flags = good
        daemon.start()
        clients.go_on()
    fresh = make_daemon(*bad)
    assert fresh.spawn().wait(20) == 1
    assert fresh.holder() is None
    assert not fresh.socket.exists()


@pytest.mark.limit(120)
def test_restart_keeps_flags_environment_and_waiting_clients(make_daemon: MakeDaemon) -> None:
    daemon = make_daemon("--pool", "3", env={"VMFORK_FILL_UNIT_PAGES": "32", "AWS_REGION": "mars"}).start()
    cli = Cli(daemon)
    assert daemon.process is not None
    old = processes.read(daemon.process.pid)
    assert old is not None
    with Clients(daemon.socket, daemon.socket).running() as clients:
        clients.go_on()
        done = cli("daemon", "restart")
        clients.go_on()
    # Those whom the old one had accepted were answered, too.
    assert clients.failures == []
    assert "Restarted vmforkd" in done.stderr.decode()
    assert daemon.process.wait(10) == 0
    new = processes.read(cli.json("daemon", "status")["pid"])
    assert new is not None and new.pid != old.pid
    assert new.command.split("\0")[1:] == old.command.split("\0")[1:]
    environ = Path(f"/proc/{new.pid}/environ").read_bytes().split(b"\0")
    assert {b"VMFORK_FILL_UNIT_PAGES=32", b"AWS_REGION=mars"} <= set(environ)
    assert os.readlink(f"/proc/{new.pid}/fd/2") == str(daemon.log)
    cli("daemon", "stop")
    assert not new.is_alive()


@pytest.mark.limit(60)
def test_restart_starts_a_daemon_where_none_is(make_daemon: MakeDaemon) -> None:
    daemon = make_daemon()
    cli = Cli(daemon)
    cli("daemon", "restart")
    assert cli.json("daemon", "status")["running"]
    cli("daemon", "stop")
    eventually(lambda: leftovers.orphans() == [] and daemon.holder() is None, 10, "both have ended")


@pytest.mark.limit(90)
def test_the_command_line_tells_a_dead_daemon_from_its_socket(make_daemon: MakeDaemon) -> None:
    daemon = make_daemon().start()
    cli = Cli(daemon)
    daemon.kill()
    assert daemon.holder() is not None
    assert b"no daemon answers" in cli("ps", "--no-start", code=1).stderr
    # It starts the next one, as it does where there is no socket.
    assert b"Started vmforkd" in cli("ps").stderr
    assert ask(daemon.socket) == b"HTTP/1.1 200 OK"
    cli("daemon", "stop")
    assert daemon.holder() is None


@pytest.mark.limit(60)
def test_a_second_daemon_on_the_same_socket_is_refused_while_it_waits_for_its_own(make_daemon: MakeDaemon) -> None:
    daemon, other = make_daemon().start(), make_daemon()
    daemon.kill()
    other.socket = daemon.socket
    assert other.spawn().wait(20) == 1
    assert "another vmforkd answers" in other.log_tail()
    daemon.start()
    with daemon.client() as client:
        assert client.version().vmforkd
        with pytest.raises(vmfork.NotFound):
            client.vm("none")

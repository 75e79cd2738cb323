"""Over a real unix socket: addresses, connections that fail, waits that end."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import vmfork
from conftest import FakeDaemon
from vmfork._config import find_endpoint


def test_a_whole_life_over_the_socket(socket_path: Path, tmp_path: Path) -> None:
    big = tmp_path / "big"
    big.write_bytes(b"x" * 3_000_001)
    with vmfork.Client(socket=socket_path) as client, client.run("debian", name="web") as vm:
        vm.copy_in(big, "/big")
        assert vm.copy_out("/big", tmp_path / "back") == 3_000_001
        assert [clone.exec(["hi"]).stdout for clone in vm.fork(3)] == [b"hi"] * 3


def test_one_client_serves_many_threads(socket_path: Path) -> None:
    with vmfork.Client(socket=socket_path) as client:
        vm = client.run("debian")
        seen: list[str] = []
        threads = [
            threading.Thread(target=lambda i=i: seen.append(vm.exec([f"n{i}"]).stdout_text))
            for i in range(16)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(20)
        assert sorted(seen) == sorted(f"n{i}" for i in range(16))


def test_no_daemon_is_told_with_the_remedy(tmp_path: Path) -> None:
    path = tmp_path / "missing.sock"
    with vmfork.Client(socket=path) as client, pytest.raises(vmfork.ConnectionFailed) as info:
        client.version()
    assert f"version: no daemon answers at {path}" in str(info.value)
    assert "`vmfork daemon start`" in str(info.value)


@contextmanager
def server_that(path: Path, answer: bytes, *, hang: bool) -> Iterator[None]:
    """Takes one connection, reads a little, says ``answer`` and hangs or hangs up."""
    done = threading.Event()
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        listener.listen()
        listener.settimeout(10)

        def serve() -> None:
            connection, _ = listener.accept()
            with connection:
                connection.recv(4096)
                connection.sendall(answer)
                if hang:
                    done.wait(10)

        thread = threading.Thread(target=serve)
        thread.start()
        try:
            yield
        finally:
            done.set()
            thread.join(10)


def test_a_silent_daemon_is_not_waited_for_for_ever(tmp_path: Path) -> None:
    path = tmp_path / "d.sock"
    timeout = vmfork.Timeout(request_s=0.2)
    with (
        server_that(path, b"", hang=True),
        vmfork.Client(socket=path, timeout=timeout) as client,
        pytest.raises(vmfork.TimeoutExceeded, match=r"sent nothing for 0\.2 s") as info,
    ):
        client.vm("web")
    assert (info.value.code, info.value.vm) == ("timeout", "web")


def test_a_daemon_that_dies_in_the_middle(tmp_path: Path) -> None:
    path = tmp_path / "d.sock"
    answer = b"HTTP/1.1 200 OK\r\ncontent-length: 100\r\n\r\nhalf"
    target = tmp_path / "out"
    with (
        server_that(path, answer, hang=False),
        vmfork.Client(socket=path) as client,
        pytest.raises(vmfork.ConnectionFailed, match="broke"),
    ):
        vmfork.VM(client, name="web", vmid=0).copy_out("/f", target)
    assert list(tmp_path.iterdir()) == [path]


def test_the_environment_names_the_daemon() -> None:
    def at(**environ: str) -> str:
        return str(find_endpoint(environ=environ))

    assert at() == "/run/vmfork/vmforkd.sock"
    assert at(VMFORK_STATE="/s") == "/s/vmforkd.sock"
    assert at(VMFORK_STATE="/s", VMFORK_SOCKET="/x.sock") == "/x.sock"
    assert at(VMFORK_HOST="tcp://10.0.0.5:7070", VMFORK_SOCKET="/x.sock") == "http://10.0.0.5:7070"
    assert at(VMFORK_HOST="unix:///y.sock") == "/y.sock"
    given = find_endpoint(socket="/mine.sock", environ={"VMFORK_HOST": "h:1"})
    assert str(given) == "/mine.sock"


def test_the_token_goes_to_tcp_hosts_alone(daemon: FakeDaemon) -> None:
    environ = {"VMFORK_TOKEN": "secret"}
    assert find_endpoint(host="h:1", environ=environ).token == "secret"
    assert find_endpoint(host="h:1", token="mine", environ=environ).token == "mine"
    assert find_endpoint(socket="/x.sock", environ=environ).token is None


def test_a_token_is_sent_as_a_bearer(socket_path: Path, daemon: FakeDaemon) -> None:
    with vmfork.Client(socket=socket_path, token="t0k") as client:
        client.vms()
    assert daemon.headers[0]["authorization"] == "Bearer t0k"


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"socket": "/a", "host": "h:1"}, "one of"),
        ({"socket": "/" + "a" * 107}, "longer than the 107 bytes"),
        ({"host": "ftp://h"}, "tcp://127"),
        ({"host": "tcp://h"}, "tcp://127"),
        ({"host": "tcp://h:99999"}, "tcp://127"),
        ({"host": "tcp://:9"}, "tcp://127"),
    ],
)
def test_addresses_that_cannot_be_meant(arguments: dict[str, str], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        vmfork.Client(**arguments)  # type: ignore[arg-type]


@pytest.mark.parametrize("seconds", [0, -1, float("inf"), float("nan")])
def test_no_wait_is_endless(seconds: float) -> None:
    with pytest.raises(ValueError, match="must be finite and above 0"):
        vmfork.Timeout(exec_s=seconds)

"""The daemon as a service: who may reach it, what it serves besides VMs, what it refuses to start with."""

from __future__ import annotations

import json
import socket
import stat
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest
import vmfork

from harness import places
from harness.daemon import Daemon

MakeDaemon = Callable[..., Daemon]


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def _http(daemon: Daemon) -> httpx.Client:
    return httpx.Client(transport=httpx.HTTPTransport(uds=str(daemon.socket)), base_url="http://vmforkd", timeout=30)


def _get(http: httpx.Client, path: str) -> httpx.Response:
    answer = http.get(path)
    assert answer.status_code == 200, answer.text
    return answer


def test_the_socket_is_its_owners(daemon: Daemon) -> None:
    mode = daemon.socket.stat().st_mode
    assert stat.S_ISSOCK(mode)
    assert mode & 0o007 == 0
    assert daemon.socket.stat().st_uid == 0


@pytest.mark.limit(60)
def test_tcp_wants_the_token(make_daemon: MakeDaemon, tmp_path: Path) -> None:
    token_file = tmp_path / "token"
    token_file.write_text("a-token-of-some-length-0123456789\n")
    token_file.chmod(0o600)
    address = f"127.0.0.1:{_free_port()}"
    daemon = make_daemon("--listen", address, "--token-file", str(token_file)).start()
    with vmfork.Client(host=f"tcp://{address}", token=token_file.read_text().strip()) as client:
        assert client.vms() == []
    for token in (None, "wrong", "a-token-of-some-length-012345678"):
        with vmfork.Client(host=f"tcp://{address}", token=token) as client, pytest.raises(vmfork.Unauthorized):
            client.vms()
    # The socket takes no token.
    with daemon.client() as client:
        assert client.vms() == []


@pytest.mark.limit(60)
def test_tcp_without_a_token_is_refused_at_the_start(make_daemon: MakeDaemon) -> None:
    daemon = make_daemon("--listen", f"127.0.0.1:{_free_port()}")
    assert daemon.spawn().wait(15) != 0
    assert "--token-file" in daemon.log_tail()


@pytest.mark.limit(60)
def test_a_token_that_everybody_can_read_is_refused(make_daemon: MakeDaemon, tmp_path: Path) -> None:
    token_file = tmp_path / "token"
    token_file.write_text("a-token-of-some-length-0123456789\n")
    token_file.chmod(0o644)
    daemon = make_daemon("--listen", f"127.0.0.1:{_free_port()}", "--token-file", str(token_file))
    assert daemon.spawn().wait(15) != 0
    assert str(token_file) in daemon.log_tail()


def test_the_openapi_document_is_served_and_names_every_route(daemon: Daemon) -> None:
    with _http(daemon) as http:
        document = _get(http, "/v1/openapi.json").json()
    assert document["openapi"].startswith("3.")
    paths = set(document["paths"])
    assert {"/v1/vms", "/v1/vms/{vm}", "/v1/vms/{vm}/fork", "/v1/vms/{vm}/exec", "/v1/tree", "/v1/host"} <= paths


def test_the_openapi_document_that_is_checked_in_is_the_one_that_is_served(
    daemon: Daemon, need: Callable[[object, str], None]
) -> None:
    found = [path for path in places.ROOT.glob("docs/**/openapi.json")]
    need(found, "docs/openapi.json")
    with _http(daemon) as http:
        served = _get(http, "/v1/openapi.json").json()
    assert json.loads(found[0].read_text()) == served


def test_metrics_have_a_histogram_for_each_stage_of_a_fork(daemon: Daemon, vm: vmfork.VM) -> None:
    vm.fork(1).raise_for_errors()
    with _http(daemon) as http:
        text = _get(http, "/metrics").text
    for stage in ("quiesce", "stop", "freeze", "state", "cont"):
        assert f'stage="{stage}"' in text, stage
    assert "_bucket{" in text
    assert text.rstrip().endswith("# EOF") or "# HELP" in text


@pytest.mark.parametrize(
    ("method", "path", "body", "status"),
    [
        ("POST", "/v1/vms", b"{", 400),
        ("POST", "/v1/vms", b'{"image": "x", "nonsense": 1}', 400),
        ("POST", "/v1/vms", b'{"image": 5}', 400),
        ("POST", "/v1/vms/nope/fork", b'{"count": -1}', 400),
        ("GET", "/v1/vms/nope", b"", 404),
        ("GET", "/v1/vms/%2e%2e", b"", 400),
        ("GET", "/v1/nothing", b"", 404),
        ("DELETE", "/v1/images/nope", b"", 404),
        ("POST", "/v1/vms/nope/exec", b'{"argv": []}', 400),
    ],
)
def test_bad_requests_are_told_what_is_wrong(daemon: Daemon, method: str, path: str, body: bytes, status: int) -> None:
    headers = {"content-type": "application/json"}
    with _http(daemon) as http:
        answer = http.request(method, path, content=body, headers=headers)
    assert answer.status_code in (status, 404) if "nope" in path else answer.status_code == status, answer.text
    document = answer.json()
    assert document["code"] in ("bad_request", "not_found")
    assert document["message"]


def test_a_body_without_end_is_refused(daemon: Daemon) -> None:
    """A JSON body has a bound; the daemon does not read on for ever."""

    def endless() -> object:
        for _ in range(2048):
            yield b"x" * 65536

    with _http(daemon) as http:
        try:
            answer = http.post("/v1/vms", content=endless(), headers={"content-type": "application/json"})  # type: ignore[arg-type]
            assert answer.status_code in (400, 413)
        except httpx.WriteError:
            pass  # it hung up on us, which is an answer too
    with daemon.client() as client:
        assert client.version().vmforkd


def test_images_in_use_are_kept(client: vmfork.Client, booted: vmfork.VM, image: str) -> None:
    with pytest.raises(vmfork.Conflict):
        client.remove_image(image)
    assert image in {one.name for one in client.images()}
    (one,) = [one for one in client.images() if one.name == image]
    assert one.agent
    assert one.vms >= 1

"""A daemon that never was: answers the SDK's requests from a small model, over any transport."""

from __future__ import annotations

import base64
import json
import re
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from socketserver import ThreadingMixIn, UnixStreamServer
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

import httpx
import pytest

Answer = tuple[int, dict[str, str], bytes]

#: What an exported snapshot is, here.
EXPORT = b"0123456789abcdef" * 100_000


def _disks(asked: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [
        {
            "name": disk["name"],
            "size_bytes": disk["source"]["size_bytes"],
            "written_bytes": 0,
            "device": f"/dev/vd{letter}",
        }
        for disk, letter in zip(asked, "bcdefgh")
        if disk["source"]["type"] == "blank"
    ]


class FakeDaemon:
    """Keeps VMs, files and what it was asked. ``canned`` answers go before the model's."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, str, dict[str, str], Any]] = []
        self.headers: list[dict[str, str]] = []
        #: The `label` parameters of each request.
        self.filters: list[list[str]] = []
        self.vms: dict[str, dict[str, Any]] = {}
        self.files: dict[str, tuple[int, bytes]] = {}
        self.forks: dict[str, dict[str, Any]] = {}
        self.snapshots: dict[str, dict[str, Any]] = {}
        self.volumes: dict[str, dict[str, Any]] = {}
        self.canned: list[Answer] = []
        self.labels: list[str] = []
        """What the last request filtered by."""
        self.room = 1000
        self._lock = threading.Lock()

    def answer(self, method: str, target: str, headers: dict[str, str], body: bytes) -> Answer:
        with self._lock:
            return self._answer(method, target, headers, body)

    def _answer(self, method: str, target: str, headers: dict[str, str], body: bytes) -> Answer:
        url = urlsplit(target)
        path = unquote(url.path)
        query = {name: values[0] for name, values in parse_qs(url.query).items()}
        self.labels = parse_qs(url.query).get("label", [])
        is_json = headers.get("content-type") == "application/json"
        content: Any = json.loads(body) if is_json else body
        self.asked.append((method, path, query, content))
        self.headers.append(headers)
        self.filters.append(parse_qs(url.query).get("label", []))
        if self.canned:
            return self.canned.pop(0)
        if (method, path) == ("POST", "/v1/vms"):
            vm = self.add(content.get("name") or "vm", content)
            return reply(201, vm)
        if (method, path) == ("GET", "/v1/vms"):
            return reply(200, [vm for vm in self.vms.values() if vm["state"] == "running" or query])
        if found := re.fullmatch(r"/v1/vms/([^/]+)(?:/(\w+))?", path):
            by_id = {vm["id"]: vm for vm in self.vms.values()}
            one = self.vms.get(found[1]) or by_id.get(found[1])
            if one is None:
                return error(404, "not_found", f"no VM named `{found[1]}` on this host")
            return self._on_vm(one, method, found[2], query, content)
        if (method, path) == ("GET", "/v1/tree"):
            return reply(200, [])
        if found := re.fullmatch(r"/v1/volumes(?:/([^/]+)(/on-fork|/attach|/detach|/resize)?)?", path):
            return self._on_volumes(method, found[1], content, found[2])
        if (method, path) == ("GET", "/v1/snapshots"):
            return reply(200, list(self.snapshots.values()))
        if (method, path) == ("POST", "/v1/snapshots"):
            if content["name"] in self.snapshots:
                return error(409, "conflict", f"take snapshot `{content['name']}`")
            state = "ready" if content["wait"] else "writing"
            return reply(201, self.keep(content["name"], state=state))
        if (method, path) == ("POST", "/v1/import"):
            if not content.startswith(EXPORT[:16]):
                return error(400, "bad_request", "import a snapshot", cause="it is something else")
            return reply(201, [self.keep("warm"), self.keep(query.get("name", "hot"), base="warm")])
        if found := re.fullmatch(r"/v1/snapshots/([^/]+)(?:/(\w+))?", path):
            one = self.snapshots.get(found[1])
            if one is None:
                return error(404, "not_found", f"no snapshot named `{found[1]}`")
            return self._on_snapshot(one, method, found[2], query, content)
        return error(404, "not_found", f"no route {method} {path}")

    def _on_volumes(
        self, method: str, name: str | None, content: Any, what: str | None
    ) -> Answer:
        if name is None and method == "GET":
            return reply(200, list(self.volumes.values()))
        if name is None:
            if content["name"] in self.volumes:
                return error(409, "conflict", f"create the volume `{content['name']}`")
            volume = {
                "name": content["name"],
                "disk_id": "00000000000000ab",
                "size_bytes": content["source"].get("size_bytes", 1 << 20),
                "data_bytes": 4096,
                "on_fork": content.get("on_fork", "fork"),
                "vms": [],
                "created_unix_ms": 1_700_000_000_000,
                "labels": content.get("labels", {}),
            }
            self.volumes[content["name"]] = volume
            return reply(201, volume)
        if name not in self.volumes:
            return error(404, "not_found", "a volume", cause=f"no volume named `{name}`")
        match method:
            case "POST" if what == "/attach":
                disk = {"name": "data", "device": "/dev/vdb", "volume": name}
                return reply(200, {**disk, "size_bytes": 1 << 30, "written_bytes": 0})
            case "POST" if what == "/resize":
                if content["size_bytes"] < self.volumes[name]["size_bytes"]:
                    return error(409, "conflict", f"resize the volume `{name}`")
                self.volumes[name].update(content)
            case "PUT":
                self.volumes[name].update(content)
            case "DELETE":
                del self.volumes[name]
                return 204, {}, b""
        return reply(200, self.volumes[name])

    def keep(self, name: str, **more: Any) -> dict[str, Any]:
        snapshot = {
            "name": name,
            "id": "0" * 32,
            "state": "ready",
            "created_unix_ms": 1,
            "image": "debian",
            "memory_mib": 512,
            "cpus": 1,
            "accel": "tcg",
            "own_bytes": 220200960,
            "stored_bytes": 67108864,
            "shared_bytes": 0,
            "progress": {"done_bytes": 1, "total_bytes": 2},
            "vms": 0,
            "a_field_from_the_future": {},
            **more,
        }
        self.snapshots[name] = snapshot
        return snapshot

    def _on_snapshot(
        self,
        snapshot: dict[str, Any],
        method: str,
        verb: str | None,
        query: dict[str, str],
        content: Any,
    ) -> Answer:
        name = snapshot["name"]
        profile = {
            "runs": 2,
            "working_set_pages": 512,
            "working_set_bytes": 1048576,
            "recording": True,
            "clusters": [
                {"first_page": 16, "pages": 512, "frequency": 1, "first_access_ms": 1.5}
            ],
        }
        match method, verb:
            case "GET", None:
                more: dict[str, Any] = {
                    "schema": "vmfork/1",
                    "qemu_version": "7.2",
                    "machine": "pc-q35-7.2",
                    "cpu": "max",
                    "guest_kernel": None,
                    "pause_ms": 3,
                    "compression": "zstd",
                    "chunk_pages": 64,
                    "own_pages": 53760,
                    "zero_pages": 1,
                    "images": [
                        {
                            "role": "memory", "bytes": 1 << 29, "page_bytes": 4096,
                            "own_pages": 53760, "zero_pages": 1, "stored_bytes": 7,
                            "shared_bytes": 0, "root": "0" * 64,
                        },
                        {
                            "role": "disk", "device": "data", "bytes": 1 << 30,
                            "page_bytes": 4096, "own_pages": 0, "zero_pages": 0,
                            "stored_bytes": 0, "shared_bytes": 0, "base": "debian",
                            "root": "1" * 64,
                        },
                    ],
                    "dependants": ["hot"],
                    "vm_names": [],
                    "profile": profile,
                }
                return reply(200, {**snapshot, **more})
            case "DELETE", None:
                deltas = [one for one, that in self.snapshots.items() if that.get("base") == name]
                if deltas and not query:
                    return error(409, "conflict", f"remove snapshot `{name}`", cause=str(deltas))
                for gone in [name, *deltas]:
                    del self.snapshots[gone]
                return reply(200, {"names": [name, *deltas], "freed_bytes": 7})
            case "POST", "start":
                return self._start(name, content)
            case "POST", "verify":
                damage = snapshot.get("damage", [])
                return reply(200, {"snapshot": name, "chunks": 9, "read_bytes": 8, "damage": damage})
            case "POST", "flatten":
                snapshot.pop("base", None)
                return reply(200, snapshot)
            case "GET", "export":
                return 200, {}, EXPORT
            case "POST", "push":
                return reply(200, {"names": [name], "sent_bytes": 5, "total_ms": 1})
            case "POST", "pull":
                state = "ready" if content["wait"] else "pulling"
                return reply(200, {**snapshot, "state": state, "remote": content["location"]})
            case "GET", "profile":
                return reply(200, profile)
            case "DELETE", "profile":
                return 204, {}, b""
        return error(400, "bad_request", "what?")

    def _start(self, snapshot: str, content: Any) -> Answer:
        vms: list[dict[str, Any]] = []
        names = content.get("names") or [f"{snapshot}.{n + 1}" for n in range(content["count"])]
        for vmid, name in enumerate(names, 1):
            if vmid <= self.room:
                vm = self.add(name, {}, vmid=vmid, snapshot=snapshot)
                up = {"state": "running", "running_ms": 9, "ready_ms": 21.0}
                vms.append({"vmid": vmid, "name": name, "id": vm["id"], **up})
            else:
                body = {"code": "no_capacity", "message": f"start `{name}`", "cause": "1 MiB left"}
                vms.append({"vmid": vmid, "name": name, "state": "failed", "error": body})
        document = {
            "schema": "vmfork/1",
            "snapshot": snapshot,
            "requested": content["count"],
            "granted": min(content["count"], self.room),
            "began_unix_ms": 1_700_000_000_000,
            "open_ms": 4.2,
            "total_ms": 31,
            "vms": vms,
        }
        return reply(200, document)

    def add(self, name: str, request: dict[str, Any], **more: Any) -> dict[str, Any]:
        vm = {
            "id": f"{len(self.vms):016x}",
            "name": name,
            "image": request.get("image", "debian"),
            "family": "0" * 16,
            "parent": None,
            "vmid": 0,
            "state": "running",
            "reason": None,
            "accel": "tcg",
            "cpus": request.get("cpus", 1),
            "memory_mib": request.get("memory_mib", 512),
            "created_unix_ms": 1,
            "ready_ms": 12.5,
            "pid": 4242,
            "clones": 0,
            "private_bytes": 0,
            "shared_bytes": 0,
            "faults": 0,
            "a_field_from_the_future": [1, 2],
            **({"labels": request["labels"]} if "labels" in request else {}),
            **({"disks": _disks(request["disks"])} if "disks" in request else {}),
            **more,
        }
        self.vms[name] = vm
        return vm

    def _on_vm(
        self, vm: dict[str, Any], method: str, verb: str | None, query: dict[str, str], content: Any
    ) -> Answer:
        match method, verb:
            case "GET", None:
                memory = {"pages": 131072, "demand_bytes": 65536, "faults": {"fetch": 1}}
                more = {"memory": memory, "qemu_version": "7.2"}
                if vm["name"] in self.forks:
                    more["last_fork"] = self.forks[vm["name"]]
                return reply(200, {**vm, **more})
            case "DELETE", None:
                del self.vms[vm["name"]]
                return 204, {}, b""
            case "POST", "kill":
                if vm["state"] == "exited":
                    return error(409, "conflict", f"`{vm['name']}` has ended")
                vm["state"] = "exited"
                return reply(200, vm)
            case "POST", "fork":
                return self._fork(vm, content)
            case "POST", "exec":
                stdin = base64.b64decode(content.get("stdin_base64", ""))
                code = 3 if "false" in content["argv"] else 0
                out = stdin or " ".join(content["argv"]).encode()
                return reply(200, exec_reply(code, out, b"why" if code else b""))
            case "GET", "files":
                if query["path"] not in self.files:
                    return error(404, "not_found", f"no file `{query['path']}`")
                mode, data = self.files[query["path"]]
                return 200, {"x-vmfork-mode": f"{mode:o}"}, data
            case "PUT", "files":
                self.files[query["path"]] = (int(query["mode"], 8), content)
                return 204, {}, b""
            case "GET", "logs":
                return 200, {"content-type": "text/plain"}, "boot\nlögin\n".encode()
        return error(400, "bad_request", "what?")

    def _fork(self, parent: dict[str, Any], content: Any) -> Answer:
        granted = min(content["count"], self.room)
        if content["all_or_nothing"] and granted < content["count"]:
            return error(507, "no_capacity", f"fork `{parent['name']}`")
        clones: list[dict[str, Any]] = []
        for vmid in range(1, content["count"] + 1):
            name = f"{parent['name']}.{vmid}"
            if vmid <= self.room:
                self.add(name, {}, vmid=vmid, parent=parent["name"])
                clones.append({"vmid": vmid, "name": name, "state": "running", "ready_ms": 21.0})
            else:
                body = {"code": "no_capacity", "message": f"start `{name}`", "cause": "1 MiB left"}
                clones.append({"vmid": vmid, "name": name, "state": "failed", "error": body})
        document = {
            "schema": "vmfork/1",
            "parent": parent["name"],
            "requested": content["count"],
            "granted": granted,
            "began_unix_ms": 1_700_000_000_000,
            "pause_ms": 3.4,
            "total_ms": 31,
            "stages": {"stop_ms": 0.5, "derive_ms": None},
            "clones": clones,
        }
        self.forks[parent["name"]] = document
        return reply(200, document)


def reply(status: int, document: Any) -> Answer:
    return status, {"content-type": "application/json"}, json.dumps(document).encode()


def error(status: int, code: str, message: str, **more: str) -> Answer:
    return reply(status, {"code": code, "message": message, **more})


def exec_reply(code: int, out: bytes, err: bytes) -> dict[str, Any]:
    return {
        "schema": "vmfork/1",
        "exit_code": code,
        "signal": None,
        "timed_out": False,
        "stdout_base64": base64.b64encode(out).decode(),
        "stderr_base64": base64.b64encode(err).decode(),
        "truncated": False,
        "duration_ms": 7,
    }


@pytest.fixture()
def daemon() -> FakeDaemon:
    return FakeDaemon()


@pytest.fixture()
def transport(daemon: FakeDaemon) -> httpx.MockTransport:
    """The fake behind httpx's own seam; serves both kinds of client."""

    def handle(request: httpx.Request) -> httpx.Response:
        target = request.url.raw_path.decode()
        # The body of an async client has been read by MockTransport.
        body = request.read() if not hasattr(request, "_content") else request.content
        answer = daemon.answer(request.method, target, dict(request.headers), body)
        return httpx.Response(answer[0], headers=answer[1], content=answer[2])

    return httpx.MockTransport(handle)


class _Server(ThreadingMixIn, UnixStreamServer):
    daemon_threads = True
    fake: FakeDaemon


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def _go(self) -> None:
        assert isinstance(self.server, _Server)
        headers = {name.lower(): value for name, value in self.headers.items()}
        status, more, content = self.server.fake.answer(
            self.command, self.path, headers, self._body()
        )
        self.send_response(status)
        for name, value in more.items():
            self.send_header(name, value)
        self.send_header("content-length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    do_GET = do_POST = do_PUT = do_DELETE = _go

    def _body(self) -> bytes:
        if self.headers.get("transfer-encoding") != "chunked":
            return self.rfile.read(int(self.headers.get("content-length", 0)))
        pieces = []
        while length := int(self.rfile.readline(), 16):
            pieces.append(self.rfile.read(length))
            self.rfile.readline()
        self.rfile.readline()
        return b"".join(pieces)

    def address_string(self) -> str:
        return "unix"

    def log_message(self, format: str, *args: Any) -> None:
        pass


@pytest.fixture()
def socket_path(daemon: FakeDaemon, tmp_path: Path) -> Iterator[Path]:
    """The fake behind a real unix socket and HTTP."""
    path = tmp_path / "d.sock"
    with _Server(str(path), _Handler) as server:
        server.fake = daemon
        thread = threading.Thread(target=server.serve_forever, args=(0.02,), name="fake-vmforkd")
        thread.start()
        try:
            yield path
        finally:
            server.shutdown()
            thread.join(10)
            assert not thread.is_alive()

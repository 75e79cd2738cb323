"""Pauses and bounds in time, against a transport that keeps what it was asked."""

from __future__ import annotations

import json

import httpx
import pytest
import vmfork

ID = "0123456789abcdef"


class Asked:
    def __init__(self) -> None:
        self.requests: list[tuple[str, str, object]] = []

    def __call__(self, request: httpx.Request) -> httpx.Response:
        body = json.loads(request.content) if request.content else None
        path = request.url.path
        self.requests.append((request.method, path, body))
        state = "paused" if path.endswith("/pause") else "running"
        vm = {
            "id": ID,
            "name": "web",
            "image": "debian",
            "family": ID,
            "parent": None,
            "vmid": 0,
            "state": state,
            "reason": None,
            "accel": "tcg",
            "cpus": 1,
            "memory_mib": 512,
            "created_unix_ms": 1,
            "ready_ms": 2.0,
            "pid": 1,
            "clones": 0,
            "private_bytes": 0,
            "shared_bytes": 0,
            "faults": 0,
        }
        if not path.endswith("/ttl"):
            return httpx.Response(200, json=vm)
        ttl_ms = body["ttl_ms"]
        ttl = None if ttl_ms is None else {"expires_unix_ms": 9, "left_ms": ttl_ms}
        return httpx.Response(200, json={"schema": "vmfork/1", "vm": "web", "ttl": ttl})


@pytest.fixture()
def asked() -> Asked:
    return Asked()


@pytest.fixture()
def vm(asked: Asked) -> vmfork.VM:
    return vmfork.Client(transport=httpx.MockTransport(asked)).run("debian", ttl_s=90)


def test_a_vm_is_paused_and_resumed(vm: vmfork.VM, asked: Asked) -> None:
    assert vm.pause().state is vmfork.VmState.PAUSED
    assert vm.info is not None
    assert vm.info.state is vmfork.VmState.PAUSED
    assert vm.resume().state is vmfork.VmState.RUNNING
    paths = [(method, path) for method, path, _ in asked.requests[1:]]
    assert paths == [("POST", f"/v1/vms/{ID}/pause"), ("POST", f"/v1/vms/{ID}/resume")]


def test_a_bound_is_given_changed_and_removed(vm: vmfork.VM, asked: Asked) -> None:
    body = asked.requests[0][2]
    assert isinstance(body, dict)
    assert body["ttl_ms"] == 90_000
    assert vm.set_ttl(1.5) == vmfork.Ttl(expires_unix_ms=9, left_ms=1500)
    assert vm.set_ttl(None) is None
    assert [body for _, _, body in asked.requests[1:]] == [{"ttl_ms": 1500}, {"ttl_ms": None}]
    assert asked.requests[-1][:2] == ("PUT", f"/v1/vms/{ID}/ttl")

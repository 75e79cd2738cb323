"""The one protocol core: what to ask and how to read the answer, with no I/O.

::

    client method ──► a function here ──► Call ──► httpx ──► Call.finish ──► model

A :class:`Call` says everything about one request: method, path, body, how long the answer may take
and how to read it. Both clients send it and hand the bytes back; neither knows a route or a field.
"""

from __future__ import annotations

import base64
import binascii
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar
from urllib.parse import quote

from ._config import Timeout
from ._decode import decode
from ._errors import ApiError, BadRequest, ProtocolError, Unauthorized
from ._models import (
    DoctorReport,
    ErrorBody,
    ExecResult,
    ForkReply,
    HostDisk,
    HostInfo,
    Image,
    ImageProfile,
    Root,
    RootDevice,
    TreeNode,
    TtlReply,
    Version,
    VmDetail,
    VmInfo,
)
from ._new_disk import NewDisk
from ._snapshot_models import TransferReply
from ._warnings import warn_of_missing

T = TypeVar("T")

API = "/v1"

#: How long the daemon may take for a pause. It waits at most 60 s for a freeze in progress. Then it
#: waits at most 10 s each for the agent, the stop, and the continuation after a failed stop.
PAUSE_S = 105.0

#: How long a disk may take to be attached, detached or resized: a fork in progress, and slow media.
USE_S = 150.0

#: How much of a file is read and sent at a time.
PIECE_BYTES = 256 * 1024

#: Permissions of an exported file: memory and disks hold a guest's secrets.
EXPORT_MODE = 0o600


@dataclass(frozen=True, slots=True)
class Call(Generic[T]):
    """One request to the daemon, and how to read its answer."""

    what: str
    """What fails if it fails, for errors: "fork `web`"."""
    method: str
    path: str
    read: Callable[[bytes], T]
    answer_within_s: float
    query: Mapping[str, str | list[str]] = field(default_factory=dict)
    json_body: Mapping[str, Any] | None = None
    vm: str | None = None

    def body(self) -> bytes | None:
        """The request's body, if it has a JSON one."""
        return None if self.json_body is None else json.dumps(self.json_body).encode()

    def finish(self, status: int, content: bytes, headers: Mapping[str, str]) -> T:
        """Read an answer: the model, or the exception that the daemon's error is."""
        if 200 <= status < 300:
            warn_of_missing(self.what, headers)
            return self.read(content)
        raise self.error(status, content)

    def error(self, status: int, content: bytes) -> Exception:
        """The exception for an answer of failure."""
        try:
            body = decode(ErrorBody, json.loads(content), "error")
        except (ValueError, ProtocolError):
            text = content[:200].decode("utf-8", "replace").strip()
            # A proxy or the HTTP layer below the API answered, in words of its own.
            if status == 401:
                return Unauthorized("unauthorized", self.what, cause=text or "HTTP 401", vm=self.vm)
            if status in (400, 413, 422):
                return BadRequest("bad_request", self.what, cause=text or f"HTTP {status}")
            return ProtocolError(f"{self.what}: HTTP {status} without an error document: {text!r}")
        return ApiError.from_body(body, vm=self.vm)


def version(timeout: Timeout) -> Call[Version]:
    return Call("version", "GET", f"{API}/version", _model(Version), timeout.request_s)


def doctor(timeout: Timeout) -> Call[DoctorReport]:
    return Call("doctor", "GET", f"{API}/doctor", _model(DoctorReport), timeout.request_s)


def host(timeout: Timeout) -> Call[HostInfo]:
    return Call("host", "GET", f"{API}/host", _model(HostInfo), timeout.request_s)


def images(timeout: Timeout) -> Call[list[Image]]:
    return Call("list images", "GET", f"{API}/images", _models(Image), timeout.request_s)


def remove_image(name: str, timeout: Timeout) -> Call[None]:
    path = f"{API}/images/{_segment(name, 'image')}"
    return Call(f"remove image `{name}`", "DELETE", path, _nothing, timeout.request_s)


def push_image(name: str, location: str, timeout: Timeout) -> Call[TransferReply]:
    return Call(
        f"push image `{name}` to {location}",
        "POST",
        f"{API}/images/{_segment(name, 'image')}/push",
        _model(TransferReply),
        timeout.store_s,
        json_body={"location": location},
    )


def pull_image(name: str, location: str, *, wait: bool, timeout: Timeout) -> Call[Image]:
    return Call(
        f"pull image `{name}` from {location}",
        "POST",
        f"{API}/images/{_segment(name, 'image')}/pull",
        _model(Image),
        timeout.store_s,
        json_body={"location": location, "wait": wait},
    )


def seed_image(name: str, timeout: Timeout) -> Call[Image]:
    path = f"{API}/images/{_segment(name, 'image')}/seed"
    return Call(f"seed image `{name}`", "POST", path, _model(Image), timeout.store_s)


def unseed_image(name: str, timeout: Timeout) -> Call[None]:
    path = f"{API}/images/{_segment(name, 'image')}/seed"
    return Call(f"stop seeding image `{name}`", "DELETE", path, _nothing, timeout.request_s)


def image_profile(name: str, timeout: Timeout) -> Call[ImageProfile]:
    path = f"{API}/images/{_segment(name, 'image')}/profile"
    what = f"look at the profile of image `{name}`"
    return Call(what, "GET", path, _model(ImageProfile), timeout.request_s)


def reset_image_profile(name: str, timeout: Timeout) -> Call[None]:
    path = f"{API}/images/{_segment(name, 'image')}/profile"
    what = f"reset the profile of image `{name}`"
    return Call(what, "DELETE", path, _nothing, timeout.request_s)


def disks(timeout: Timeout) -> Call[list[HostDisk]]:
    return Call("list disks", "GET", f"{API}/disks", _models(HostDisk), timeout.request_s)


def inspect_disk(id: str, timeout: Timeout) -> Call[HostDisk]:
    return Call(f"inspect disk {id}", "GET", _disk(id), _model(HostDisk), timeout.request_s)


def remove_disk(id: str, timeout: Timeout) -> Call[None]:
    return Call(f"remove disk {id}", "DELETE", _disk(id), _nothing, timeout.request_s)


def resize_disk(id: str, size_bytes: int, timeout: Timeout) -> Call[HostDisk]:
    return Call(
        f"resize disk {id}",
        "POST",
        f"{_disk(id)}/resize",
        _model(HostDisk),
        USE_S + timeout.slack_s,
        json_body={"size_bytes": size_bytes},
    )


def export_disk(id: str, timeout: Timeout) -> Call[bytes]:
    path = f"{_disk(id)}/content"
    return Call(f"export disk {id}", "GET", path, _bytes, timeout.idle_s)


def _disk(id: str) -> str:
    return f"{API}/disks/{_segment(id, 'disk')}"


def label_query(labels: Mapping[str, str | None] | None) -> dict[str, str | list[str]]:
    """The parameters by which lists are filtered; ``None`` as a value: the key is enough."""
    if not labels:
        return {}
    return {"label": [key if value is None else f"{key}={value}" for key, value in labels.items()]}


def vms(
    *, ended: bool, labels: Mapping[str, str | None] | None, timeout: Timeout
) -> Call[list[VmInfo]]:
    query = label_query(labels)
    if ended:
        query["all"] = "true"
    return Call("list VMs", "GET", f"{API}/vms", _models(VmInfo), timeout.request_s, query)


def tree(labels: Mapping[str, str | None] | None, timeout: Timeout) -> Call[list[TreeNode]]:
    query = label_query(labels)
    return Call("tree", "GET", f"{API}/tree", _models(TreeNode), timeout.request_s, query)


def run(
    image: str,
    *,
    name: str | None,
    memory_mib: int | None,
    cpus: int | None,
    accel: str | None,
    boot_timeout_s: float | None,
    labels: Mapping[str, str] | None,
    ttl_s: float | None,
    disks: Sequence[NewDisk],
    root: Root | None,
    root_bytes: int | None,
    root_device: RootDevice | None,
    timeout: Timeout,
) -> Call[VmInfo]:
    boot_s = timeout.boot_s if boot_timeout_s is None else boot_timeout_s
    body = _without_none(
        image=image,
        name=name,
        memory_mib=memory_mib,
        cpus=cpus,
        accel=accel,
        boot_timeout_ms=_ms(boot_s),
        labels=_labels(labels),
        ttl_ms=None if ttl_s is None else _ms(ttl_s),
        disks=[disk._json() for disk in disks] or None,
        root=None if root is None else root.value,
        root_bytes=root_bytes,
        root_device=None if root_device is None else root_device.value,
    )
    return Call(
        f"run `{image}`",
        "POST",
        f"{API}/vms",
        _model(VmInfo),
        max(boot_s, timeout.request_s) + timeout.slack_s,
        json_body=body,
        vm=name,
    )


def inspect(vm: str, timeout: Timeout) -> Call[VmDetail]:
    return Call(
        f"inspect `{vm}`", "GET", _vm_path(vm), _model(VmDetail), timeout.request_s, vm=vm
    )


def remove(vm: str, *, force: bool, timeout: Timeout) -> Call[None]:
    query = {"force": "true"} if force else {}
    return Call(f"remove `{vm}`", "DELETE", _vm_path(vm), _nothing, timeout.request_s, query, vm=vm)


def kill(vm: str, *, grace_s: float, family: bool, timeout: Timeout) -> Call[VmInfo]:
    return Call(
        f"kill `{vm}`",
        "POST",
        f"{_vm_path(vm)}/kill",
        _model(VmInfo),
        grace_s + timeout.request_s,
        json_body={"grace_ms": _ms(grace_s), "family": family},
        vm=vm,
    )


def pause(vm: str, timeout: Timeout) -> Call[VmInfo]:
    path = f"{_vm_path(vm)}/pause"
    seconds = max(timeout.request_s, PAUSE_S)
    return Call(f"pause `{vm}`", "POST", path, _model(VmInfo), seconds, vm=vm)


def resume(vm: str, timeout: Timeout) -> Call[VmInfo]:
    path = f"{_vm_path(vm)}/resume"
    seconds = max(timeout.request_s, PAUSE_S)
    return Call(f"resume `{vm}`", "POST", path, _model(VmInfo), seconds, vm=vm)


def set_ttl(vm: str, ttl_s: float | None, timeout: Timeout) -> Call[TtlReply]:
    return Call(
        f"bound the life of `{vm}`",
        "PUT",
        f"{_vm_path(vm)}/ttl",
        _model(TtlReply),
        timeout.request_s,
        json_body={"ttl_ms": None if ttl_s is None else _ms(ttl_s)},
        vm=vm,
    )


def fork(
    vm: str,
    count: int,
    *,
    names: Sequence[str] | None,
    all_or_nothing: bool,
    fork_timeout_s: float | None,
    place: str | None,
    hosts: Sequence[str] | None,
    hydrate_mib_per_s: int | None,
    labels: Mapping[str, str] | None,
    ttl_s: float | None,
    timeout: Timeout,
) -> Call[ForkReply]:
    fork_s = timeout.fork_s if fork_timeout_s is None else fork_timeout_s
    body = _without_none(
        count=count,
        names=None if names is None else list(names),
        all_or_nothing=all_or_nothing,
        timeout_ms=_ms(fork_s),
        place=place,
        hosts=None if hosts is None else list(hosts),
        hydrate_mib_per_s=hydrate_mib_per_s,
        labels=_labels(labels),
        ttl_ms=None if ttl_s is None else _ms(ttl_s),
    )
    return Call(
        f"fork `{vm}`",
        "POST",
        f"{_vm_path(vm)}/fork",
        _model(ForkReply),
        fork_s + timeout.slack_s,
        json_body=body,
        vm=vm,
    )


def argv_of(command: str | Sequence[str]) -> tuple[str, ...]:
    """Arguments as they are; a string goes to the guest's shell."""
    return ("/bin/sh", "-c", command) if isinstance(command, str) else tuple(command)


def exec_(
    vm: str,
    argv: tuple[str, ...],
    *,
    stdin: bytes | str | None,
    env: Mapping[str, str] | None,
    cwd: str | None,
    user: str | None,
    exec_timeout_s: float | None,
    timeout: Timeout,
) -> Call[ExecResult]:
    exec_s = timeout.exec_s if exec_timeout_s is None else exec_timeout_s
    stdin_bytes = stdin.encode() if isinstance(stdin, str) else stdin
    body = _without_none(
        argv=list(argv),
        env=None if env is None else dict(env),
        cwd=cwd,
        user=user,
        stdin_base64=None if stdin_bytes is None else base64.b64encode(stdin_bytes).decode(),
        timeout_ms=_ms(exec_s),
    )
    return Call(
        f"exec in `{vm}`",
        "POST",
        f"{_vm_path(vm)}/exec",
        _exec_result,
        exec_s + timeout.slack_s,
        json_body=body,
        vm=vm,
    )


def read_file(vm: str, path: str, timeout: Timeout) -> Call[bytes]:
    return Call(
        f"read `{vm}:{path}`",
        "GET",
        f"{_vm_path(vm)}/files",
        _bytes,
        timeout.idle_s,
        {"path": path},
        vm=vm,
    )


def write_file(vm: str, path: str, mode: int, timeout: Timeout) -> Call[None]:
    if not 0 <= mode <= 0o7777:
        raise ValueError(f"mode {mode:#o} is not of permission bits alone")
    return Call(
        f"write `{vm}:{path}`",
        "PUT",
        f"{_vm_path(vm)}/files",
        _nothing,
        timeout.idle_s,
        {"path": path, "mode": f"{mode:o}"},
        vm=vm,
    )


def logs(vm: str, *, follow: bool, idle_s: float) -> Call[str]:
    query = {"follow": "true"} if follow else {}
    return Call(f"logs of `{vm}`", "GET", f"{_vm_path(vm)}/logs", _text, idle_s, query, vm=vm)


def file_mode(headers: Mapping[str, str]) -> int:
    """The permission bits that came with a file's bytes."""
    text = headers.get("x-vmfork-mode", "644")
    try:
        return int(text, 8) & 0o7777
    except ValueError:
        raise ProtocolError(f"x-vmfork-mode is {text!r}, not an octal number") from None


def _vm_path(vm: str) -> str:
    return f"{API}/vms/{_segment(vm, 'VM')}"


def _segment(name: str, kind: str) -> str:
    # The daemon judges names; here is kept only what would become another route.
    if name in ("", ".", ".."):
        raise BadRequest("bad_request", f"{name!r} can't name a {kind}")
    return quote(name, safe="")


def _ms(seconds: float) -> int:
    if seconds < 0:
        raise ValueError(f"a time limit of {seconds} s")
    return round(seconds * 1000)


def _labels(labels: Mapping[str, str] | None) -> dict[str, str] | None:
    """Labels of a request; none are left out of it."""
    return dict(labels) if labels else None


def _without_none(**fields: Any) -> dict[str, Any]:
    return {name: value for name, value in fields.items() if value is not None}


def _json(content: bytes, where: str) -> Any:
    try:
        return json.loads(content)
    except ValueError as error:
        raise ProtocolError(f"{where} is not JSON: {error}") from None


def _model(kind: type[T]) -> Callable[[bytes], T]:
    return lambda content: decode(kind, _json(content, kind.__name__), kind.__name__)


def _models(kind: type[T]) -> Callable[[bytes], list[T]]:
    def read(content: bytes) -> list[T]:
        value = _json(content, kind.__name__)
        if not isinstance(value, list):
            raise ProtocolError(f"a list of {kind.__name__} should be a list")
        return [decode(kind, item, f"{kind.__name__}[{i}]") for i, item in enumerate(value)]

    return read


def _exec_result(content: bytes) -> ExecResult:
    value = _json(content, "ExecReply")
    if not isinstance(value, dict):
        raise ProtocolError("ExecReply should be an object")
    fields = dict(value)
    for stream in ("stdout", "stderr"):
        try:
            fields[stream] = base64.b64decode(fields.pop(f"{stream}_base64"), validate=True)
        except (KeyError, TypeError, binascii.Error) as error:
            raise ProtocolError(f"ExecReply.{stream}_base64: {error!r}") from None
    return decode(ExecResult, fields, "ExecReply")


def _nothing(_content: bytes) -> None:
    return None


def _bytes(content: bytes) -> bytes:
    return content


def _text(content: bytes) -> str:
    return content.decode("utf-8", "replace")

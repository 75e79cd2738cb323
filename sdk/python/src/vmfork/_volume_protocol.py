"""What to ask about volumes and how to read the answers; see :mod:`._protocol`."""

from __future__ import annotations

from collections.abc import Mapping

from ._config import Timeout
from ._models import Disk
from ._protocol import (
    API,
    USE_S,
    Call,
    _labels,
    _model,
    _models,
    _nothing,
    _segment,
    _without_none,
    label_query,
)
from ._volume_models import VolumeInfo

def volumes(labels: Mapping[str, str | None] | None, timeout: Timeout) -> Call[list[VolumeInfo]]:
    (path, query) = (f"{API}/volumes", label_query(labels))
    return Call("list volumes", "GET", path, _models(VolumeInfo), timeout.request_s, query)


def create(
    name: str,
    *,
    size_bytes: int | None,
    image: str | None,
    file: str | None,
    qcow2: str | None,
    s3: str | None,
    snapshot: tuple[str, str] | None,
    on_fork: str | None,
    labels: Mapping[str, str] | None,
    timeout: Timeout,
) -> Call[VolumeInfo]:
    sources: list[dict[str, str | int]] = [
        {"type": kind, key: value}
        for kind, key, value in (
            ("blank", "size_bytes", size_bytes),
            ("image", "image", image),
            ("file", "path", file),
            ("object", "location", s3),
        )
        if value is not None
    ]
    if qcow2 is not None:
        sources.append({"type": "file", "path": qcow2, "format": "qcow2"})
    if snapshot is not None:
        sources.append({"type": "snapshot", "snapshot": snapshot[0], "disk": snapshot[1]})
    if len(sources) != 1:
        wanted = "size_bytes, image, file, qcow2, s3, snapshot"
        raise ValueError(f"volume {name!r}: give one of {wanted}")
    body = _without_none(name=name, source=sources[0], on_fork=on_fork, labels=_labels(labels))
    return Call(
        f"create volume `{name}`",
        "POST",
        f"{API}/volumes",
        _model(VolumeInfo),
        timeout.store_s,
        json_body=body,
    )


def get(name: str, timeout: Timeout) -> Call[VolumeInfo]:
    what = f"inspect volume `{name}`"
    return Call(what, "GET", _path(name), _model(VolumeInfo), timeout.request_s)


def set_on_fork(name: str, on_fork: str, timeout: Timeout) -> Call[VolumeInfo]:
    return Call(
        f"change volume `{name}`",
        "PUT",
        f"{_path(name)}/on-fork",
        _model(VolumeInfo),
        timeout.request_s,
        json_body={"on_fork": on_fork},
    )


def attach(name: str, vm: str, disk: str | None, timeout: Timeout) -> Call[Disk]:
    return Call(
        f"attach volume `{name}` to `{vm}`",
        "POST",
        f"{_path(name)}/attach",
        _model(Disk),
        USE_S + timeout.slack_s,
        json_body=_without_none(vm=vm, disk=disk),
        vm=vm,
    )


def detach(name: str, vm: str, *, force: bool, timeout: Timeout) -> Call[VolumeInfo]:
    return Call(
        f"detach volume `{name}` from `{vm}`",
        "POST",
        f"{_path(name)}/detach",
        _model(VolumeInfo),
        USE_S + timeout.slack_s,
        json_body={"vm": vm, "force": force},
        vm=vm,
    )


def resize(name: str, size_bytes: int, timeout: Timeout) -> Call[VolumeInfo]:
    return Call(
        f"resize volume `{name}`",
        "POST",
        f"{_path(name)}/resize",
        _model(VolumeInfo),
        USE_S + timeout.slack_s,
        json_body={"size_bytes": size_bytes},
    )


def remove(name: str, timeout: Timeout) -> Call[None]:
    return Call(f"remove volume `{name}`", "DELETE", _path(name), _nothing, timeout.request_s)


def _path(name: str) -> str:
    return f"{API}/volumes/{_segment(name, 'volume')}"

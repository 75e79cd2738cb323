"""What to ask about stored snapshots and how to read the answers; see :mod:`._protocol`."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence

from ._config import Endpoint, Timeout
from ._protocol import (
    API,
    Call,
    _bytes,
    _labels,
    _model,
    _models,
    _ms,
    _nothing,
    _segment,
    _without_none,
    label_query,
)
from ._snapshot_models import (
    ProfileInfo,
    RemovedSnapshots,
    SnapshotDetail,
    SnapshotInfo,
    StartReply,
    TransferReply,
    VerifyReply,
)

#: How long the daemon may take until a VM runs on whose snapshot is taken: twice 60 s.
CREATE_S = 120.0


def snapshots(
    labels: Mapping[str, str | None] | None, timeout: Timeout
) -> Call[list[SnapshotInfo]]:
    (path, query) = (f"{API}/snapshots", label_query(labels))
    return Call("list snapshots", "GET", path, _models(SnapshotInfo), timeout.request_s, query)


def create(
    vm: str,
    name: str,
    *,
    wait: bool,
    compression: str | None,
    full: bool,
    disk_only: bool,
    keep_zero_pages: bool,
    record_s: float | None,
    labels: Mapping[str, str] | None,
    timeout: Timeout,
) -> Call[SnapshotInfo]:
    body = _without_none(
        vm=vm,
        name=name,
        wait=wait,
        compression=compression,
        full=full,
        disk_only=True if disk_only else None,
        keep_zero_pages=keep_zero_pages,
        record_ms=None if record_s is None else _ms(record_s),
        labels=_labels(labels),
    )
    return Call(
        f"take snapshot `{name}` of `{vm}`",
        "POST",
        f"{API}/snapshots",
        _model(SnapshotInfo),
        timeout.store_s if wait else max(timeout.fork_s, CREATE_S) + timeout.slack_s,
        json_body=body,
        vm=vm,
    )


def get(name: str, timeout: Timeout) -> Call[SnapshotDetail]:
    what = f"inspect snapshot `{name}`"
    return Call(what, "GET", _path(name), _model(SnapshotDetail), timeout.request_s)


def remove(name: str, *, cascade: bool, timeout: Timeout) -> Call[RemovedSnapshots]:
    query = {"cascade": "true"} if cascade else {}
    what = f"remove snapshot `{name}`"
    return Call(what, "DELETE", _path(name), _model(RemovedSnapshots), timeout.store_s, query)


def start(
    name: str,
    count: int,
    *,
    names: Sequence[str] | None,
    all_or_nothing: bool,
    force: bool,
    prefetch: str | None,
    hydrate_mib_per_s: int,
    start_timeout_s: float | None,
    labels: Mapping[str, str] | None,
    ttl_s: float | None,
    timeout: Timeout,
) -> Call[StartReply]:
    start_s = timeout.fork_s if start_timeout_s is None else start_timeout_s
    body = _without_none(
        count=count,
        names=None if names is None else list(names),
        all_or_nothing=all_or_nothing,
        force=force,
        prefetch=prefetch,
        hydrate_mib_per_s=hydrate_mib_per_s,
        timeout_ms=_ms(start_s),
        labels=_labels(labels),
        ttl_ms=None if ttl_s is None else _ms(ttl_s),
    )
    return Call(
        f"start snapshot `{name}`",
        "POST",
        f"{_path(name)}/start",
        _model(StartReply),
        start_s + timeout.slack_s,
        json_body=body,
    )


def verify(name: str, timeout: Timeout) -> Call[VerifyReply]:
    what = f"verify snapshot `{name}`"
    return Call(what, "POST", f"{_path(name)}/verify", _model(VerifyReply), timeout.store_s)


def flatten(name: str, timeout: Timeout) -> Call[SnapshotInfo]:
    what = f"flatten snapshot `{name}`"
    return Call(what, "POST", f"{_path(name)}/flatten", _model(SnapshotInfo), timeout.store_s)


def export(name: str, timeout: Timeout) -> Call[bytes]:
    what = f"export snapshot `{name}`"
    return Call(what, "GET", f"{_path(name)}/export", _bytes, timeout.idle_s)


def import_(name: str | None, timeout: Timeout) -> Call[list[SnapshotInfo]]:
    path = f"{API}/import"
    query = {} if name is None else {"name": name}
    read = _models(SnapshotInfo)
    return Call("import a snapshot", "POST", path, read, timeout.store_s, query)


def push(name: str, location: str, timeout: Timeout) -> Call[TransferReply]:
    return Call(
        f"push snapshot `{name}` to {location}",
        "POST",
        f"{_path(name)}/push",
        _model(TransferReply),
        timeout.store_s,
        json_body={"location": location},
    )


def pull(name: str, location: str, *, wait: bool, timeout: Timeout) -> Call[SnapshotInfo]:
    return Call(
        f"pull snapshot `{name}` from {location}",
        "POST",
        f"{_path(name)}/pull",
        _model(SnapshotInfo),
        timeout.store_s,
        json_body={"location": location, "wait": wait},
    )


def profile(name: str, timeout: Timeout) -> Call[ProfileInfo]:
    what = f"profile of snapshot `{name}`"
    return Call(what, "GET", f"{_path(name)}/profile", _model(ProfileInfo), timeout.request_s)


def reset_profile(name: str, timeout: Timeout) -> Call[None]:
    what = f"forget the profile of snapshot `{name}`"
    return Call(what, "DELETE", f"{_path(name)}/profile", _nothing, timeout.request_s)


def location_of(location: str | os.PathLike[str], endpoint: Endpoint) -> str:
    """A store as the daemon is to be told it, whose working folder is not ours."""
    text = os.fspath(location)
    if "://" in text or os.path.isabs(text):
        return text
    if not text or endpoint.socket is None:
        raise ValueError(
            f"location {text!r}: name a store as s3://BUCKET/PREFIX, or a folder of the daemon's "
            "host by its path from the root"
        )
    return os.path.abspath(text)


def _path(name: str) -> str:
    return f"{API}/snapshots/{_segment(name, 'snapshot')}"

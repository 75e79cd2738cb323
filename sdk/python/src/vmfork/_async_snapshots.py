"""``client.snapshots`` for asyncio, from which :mod:`._snapshots` is generated."""

from __future__ import annotations

import builtins
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from . import _snapshot_protocol as protocol
from ._protocol import EXPORT_MODE
from ._snapshot_models import (
    ProfileInfo,
    RemovedSnapshots,
    SnapshotDetail,
    SnapshotInfo,
    TransferReply,
    VerifyReply,
)

if TYPE_CHECKING:
    from ._async_client import AsyncClient, AsyncStartResult, AsyncVM

__all__ = ["AsyncSnapshots"]


class AsyncSnapshots:
    """The host's stored snapshots: VMs that are kept, and start again long before they are read."""

    def __init__(self, client: AsyncClient) -> None:
        self._client = client

    async def list(
        self, *, labels: Mapping[str, str | None] | None = None
    ) -> builtins.list[SnapshotInfo]:
        """All of them, by name; those that are being written and the damaged ones among them.

        ``labels``: only those that have all of these; ``None`` as a value: the key is enough.
        """
        return await self._client._send(protocol.snapshots(labels, self._client.timeout))

    async def create(
        self,
        vm: str | AsyncVM,
        name: str,
        *,
        wait: bool = False,
        compression: str | None = None,
        full: bool = False,
        disk_only: bool = False,
        keep_zero_pages: bool = False,
        record_s: float | None = None,
        labels: Mapping[str, str] | None = None,
    ) -> SnapshotInfo:
        """Keep a running VM, which pauses as in a fork and runs on.

        Returns when it runs on or, with ``wait``, when the snapshot is stored; a call that waits
        and is given up leaves nothing. ``full``: no delta, even if the VM was started from a
        snapshot. ``disk_only``: without the memory; its VMs boot. For ``record_s`` at most (0: not
        at all) is recorded what the VM touches next. ``labels`` are added to those of the VM.
        """
        call = protocol.create(
            vm if isinstance(vm, str) else vm._ref,
            name,
            wait=wait,
            compression=compression,
            full=full,
            disk_only=disk_only,
            keep_zero_pages=keep_zero_pages,
            record_s=record_s,
            labels=labels,
            timeout=self._client.timeout,
        )
        return await self._client._send(call)

    async def get(self, name: str) -> SnapshotDetail:
        """Everything about one."""
        return await self._client._send(protocol.get(name, self._client.timeout))

    async def remove(self, name: str, *, cascade: bool = False) -> RemovedSnapshots:
        """Delete it, with its deltas if ``cascade``; :class:`Conflict` if it has some otherwise.

        One that is being written or pulled is given up.
        """
        call = protocol.remove(name, cascade=cascade, timeout=self._client.timeout)
        return await self._client._send(call)

    async def start(
        self,
        name: str,
        count: int = 1,
        *,
        names: Sequence[str] | None = None,
        all_or_nothing: bool = False,
        force: bool = False,
        prefetch: str | None = None,
        hydrate_mib_per_s: int = 0,
        timeout_s: float | None = None,
        labels: Mapping[str, str] | None = None,
        ttl_s: float | None = None,
    ) -> AsyncStartResult:
        """Start ``count`` VMs from it. What fits is started; the rest is an error each.

        ``prefetch`` (default :attr:`Prefetch.ALL`) chooses what comes before a guest asks for it.
        With ``hydrate_mib_per_s`` all else comes in the background too, at that rate. ``force``
        starts it although it was taken on another QEMU, machine or processor, where QEMU itself
        would try. ``labels`` are added to those of the snapshot. Each VM ends ``ttl_s`` after
        its start; a snapshot carries no bound of its own.
        """
        call = protocol.start(
            name,
            count,
            names=names,
            all_or_nothing=all_or_nothing,
            force=force,
            prefetch=prefetch,
            hydrate_mib_per_s=hydrate_mib_per_s,
            start_timeout_s=timeout_s,
            labels=labels,
            ttl_s=ttl_s,
            timeout=self._client.timeout,
        )
        return self._client._started(await self._client._send(call))

    async def verify(self, name: str) -> VerifyReply:
        """Read and check every byte of it, and of what it depends on; see ``VerifyReply.ok``."""
        return await self._client._send(protocol.verify(name, self._client.timeout))

    async def flatten(self, name: str) -> SnapshotInfo:
        """Make a delta whole, so that it depends on no other snapshot."""
        return await self._client._send(protocol.flatten(name, self._client.timeout))

    async def export(self, name: str, target: str | os.PathLike[str]) -> int:
        """Write it, with what it depends on, to one file; returns its length in bytes.

        Written beside ``target`` and renamed over it at the end. Only its owner can read it.
        """
        call = protocol.export(name, self._client.timeout)
        return await self._client._download(call, Path(target), lambda _: EXPORT_MODE)

    async def import_(
        self, source: str | os.PathLike[str], *, name: str | None = None
    ) -> builtins.list[SnapshotInfo]:
        """Store what :meth:`export` wrote, called ``name`` if given; returns what was not there."""
        call = protocol.import_(name, self._client.timeout)
        return await self._client._upload(call, Path(source))

    async def push(self, name: str, location: str | os.PathLike[str]) -> TransferReply:
        """Copy it, with what it depends on, to another store: s3://BUCKET/PREFIX, or a folder."""
        place = protocol.location_of(location, self._client._endpoint)
        return await self._client._send(protocol.push(name, place, self._client.timeout))

    async def pull(
        self, name: str, location: str | os.PathLike[str], *, wait: bool = False
    ) -> SnapshotInfo:
        """Bring it from another store.

        Returns when it can be started or, with ``wait``, when all of it is here. If the snapshot is
        here already under another name, that one is returned.
        """
        place = protocol.location_of(location, self._client._endpoint)
        call = protocol.pull(name, place, wait=wait, timeout=self._client.timeout)
        return await self._client._send(call)

    async def profile(self, name: str) -> ProfileInfo:
        """Which pages its VMs touch first."""
        return await self._client._send(protocol.profile(name, self._client.timeout))

    async def reset_profile(self, name: str) -> None:
        """Forget which pages its VMs touch first."""
        await self._client._send(protocol.reset_profile(name, self._client.timeout))

    def __repr__(self) -> str:
        return f"<vmfork.AsyncSnapshots of {self._client._endpoint}>"

"""``client.volumes`` for asyncio, from which :mod:`._volumes` is generated."""

from __future__ import annotations

import builtins
from collections.abc import Mapping
from typing import TYPE_CHECKING

from . import _volume_protocol as protocol
from ._models import Disk
from ._volume_models import VolumeInfo

if TYPE_CHECKING:
    from ._async_client import AsyncClient, AsyncVM

__all__ = ["AsyncVolumes"]


class AsyncVolumes:
    """The host's volumes: disks that outlive the VMs that have them.

    A VM gets one by :meth:`NewDisk.volume` when it is started, or by :meth:`attach`. It gives it
    back when it ends.
    """

    def __init__(self, client: AsyncClient) -> None:
        self._client = client

    async def list(
        self, *, labels: Mapping[str, str | None] | None = None
    ) -> builtins.list[VolumeInfo]:
        """All of them, by name.

        ``labels``: only those that have all of these; ``None`` as a value: the key is enough.
        """
        return await self._client._send(protocol.volumes(labels, self._client.timeout))

    async def create(
        self,
        name: str,
        *,
        size_bytes: int | None = None,
        image: str | None = None,
        file: str | None = None,
        qcow2: str | None = None,
        s3: str | None = None,
        snapshot: tuple[str, str] | None = None,
        on_fork: str | None = None,
        labels: Mapping[str, str] | None = None,
    ) -> VolumeInfo:
        """Make a volume.

        ``size_bytes``: it holds an empty ext4 file system of that size. ``image``: a copy of the
        root file system of that guest image. ``file``: a copy of that raw file on the daemon's
        host; ``qcow2``: of a file in that format. ``s3``: of a raw object of an object store, at
        ``s3://BUCKET/KEY``. ``snapshot``: a stored snapshot and a disk of it, which is copied.
        ``on_fork``: see :class:`OnFork`; default :attr:`OnFork.FORK`.
        """
        call = protocol.create(
            name,
            size_bytes=size_bytes,
            image=image,
            file=file,
            qcow2=qcow2,
            s3=s3,
            snapshot=snapshot,
            on_fork=on_fork,
            labels=labels,
            timeout=self._client.timeout,
        )
        return await self._client._send(call)

    async def get(self, name: str) -> VolumeInfo:
        """Everything about one."""
        return await self._client._send(protocol.get(name, self._client.timeout))

    async def set_on_fork(self, name: str, on_fork: str) -> VolumeInfo:
        """Say what a fork does with it; :class:`Conflict` while a VM has it."""
        return await self._client._send(protocol.set_on_fork(name, on_fork, self._client.timeout))

    async def attach(self, name: str, vm: str | AsyncVM, *, disk: str | None = None) -> Disk:
        """Give it to a running VM, in the place of its empty ``disk``; default: the first one.

        The guest sees it at once. Returns the disk, with the guest's device.
        """
        ref = vm if isinstance(vm, str) else vm._ref
        return await self._client._send(protocol.attach(name, ref, disk, self._client.timeout))

    async def detach(self, name: str, vm: str | AsyncVM, *, force: bool = False) -> VolumeInfo:
        """Take it from a running VM; what was written is on the host's medium then.

        :class:`Conflict` if the guest has it mounted, unless ``force``.
        """
        ref = vm if isinstance(vm, str) else vm._ref
        call = protocol.detach(name, ref, force=force, timeout=self._client.timeout)
        return await self._client._send(call)

    async def resize(self, name: str, size_bytes: int) -> VolumeInfo:
        """Make it larger, whether a running VM has it or none.

        :class:`Conflict` if it has more than that, or if several VMs may read it.
        The file system stays as it is: ``resize2fs`` in the guest grows it.
        """
        return await self._client._send(protocol.resize(name, size_bytes, self._client.timeout))

    async def remove(self, name: str) -> None:
        """Delete it, with all that it holds; :class:`Conflict` while a VM has it."""
        await self._client._send(protocol.remove(name, self._client.timeout))

    def __repr__(self) -> str:
        return f"<vmfork.AsyncVolumes of {self._client._endpoint}>"

"""The client for asyncio, from which :mod:`._client` is generated.

The core is :mod:`._protocol`.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

import httpx

from . import _async_io as sdk_io
from . import _protocol as protocol
from ._async_snapshots import AsyncSnapshots
from ._async_volumes import AsyncVolumes
from ._config import Endpoint, Timeout, find_endpoint
from ._errors import (
    Conflict,
    ConnectionFailed,
    ExecFailed,
    NoCapacity,
    NotFound,
    TimeoutExceeded,
    VmforkError,
)
from ._event_models import Event
from ._event_protocol import EventReader
from ._fork_result import BaseForkResult, BaseStartResult, settle
from ._models import (
    DoctorReport,
    ExecResult,
    HostDisk,
    HostInfo,
    Image,
    ImageProfile,
    Root,
    RootDevice,
    TreeNode,
    Ttl,
    Version,
    VmDetail,
    VmInfo,
)
from ._new_disk import NewDisk
from ._protocol import Call
from ._snapshot_models import StartReply, TransferReply
from ._snapshot_protocol import location_of
from ._transport import (
    async_transport,
    client_options,
    private_file,
    request_options,
    translated,
)

__all__ = ["AsyncClient", "AsyncForkResult", "AsyncStartResult", "AsyncVM"]

T = TypeVar("T")


class AsyncClient:
    """A daemon, as seen from here. For one event loop.

    Without arguments it is the daemon that ``VMFORK_HOST``, ``VMFORK_SOCKET`` or ``VMFORK_STATE``
    name, else this host's own. ``host`` (tcp://ADDRESS:PORT) wants a ``token`` or ``VMFORK_TOKEN``.
    ``transport`` takes the place of the network. Starts nothing: where no daemon answers, calls
    raise :class:`ConnectionFailed`.
    """

    def __init__(
        self,
        *,
        socket: str | os.PathLike[str] | None = None,
        state: str | os.PathLike[str] | None = None,
        host: str | None = None,
        token: str | None = None,
        timeout: Timeout | None = None,
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        self._endpoint: Endpoint = find_endpoint(
            socket=socket, state=state, host=host, token=token
        )
        self._timeout = Timeout() if timeout is None else timeout
        self._http = httpx.AsyncClient(
            transport=transport if transport is not None else async_transport(self._endpoint),
            **client_options(self._endpoint),
        )

    @property
    def timeout(self) -> Timeout:
        """The bounds that this client waits by."""
        return self._timeout

    @property
    def snapshots(self) -> AsyncSnapshots:
        """The stored snapshots: VMs that are kept, and what they are started from."""
        return AsyncSnapshots(self)

    @property
    def volumes(self) -> AsyncVolumes:
        """The volumes: disks that outlive their VMs."""
        return AsyncVolumes(self)

    async def run(
        self,
        image: str,
        *,
        name: str | None = None,
        memory_mib: int | None = None,
        cpus: int | None = None,
        accel: str | None = None,
        boot_timeout_s: float | None = None,
        labels: Mapping[str, str] | None = None,
        ttl_s: float | None = None,
        disks: Sequence[NewDisk] = (),
        root: Root | None = None,
        root_bytes: int | None = None,
        root_device: RootDevice | None = None,
    ) -> AsyncVM:
        """Boot a VM and wait until its agent has answered (``boot_timeout_s=0``: don't wait).

        Its clones inherit its ``labels``, and get its ``disks`` as they are in the instant of the
        fork. ``root=Root.OVERLAY``: what is written to the root file system goes to a disk of
        ``root_bytes``, and not to memory. ``root_device`` insists on how the guest reads the
        image's root; by default the daemon chooses. ``ttl_s`` after its start it ends, with the
        clones that inherit this bound.
        """
        call = protocol.run(
            image,
            name=name,
            memory_mib=memory_mib,
            cpus=cpus,
            accel=accel,
            boot_timeout_s=boot_timeout_s,
            labels=labels,
            ttl_s=ttl_s,
            disks=disks,
            root=root,
            root_bytes=root_bytes,
            root_device=root_device,
            timeout=self._timeout,
        )
        return AsyncVM._of(self, await self._send(call))

    async def vm(self, name: str) -> AsyncVM:
        """The VM of that name or id."""
        detail = await self._send(protocol.inspect(name, self._timeout))
        return AsyncVM._of(self, detail)

    async def vms(
        self, *, ended: bool = False, labels: Mapping[str, str | None] | None = None
    ) -> list[AsyncVM]:
        """All VMs of the host; with the ended ones too if asked for.

        ``labels``: only those that have all of these; ``None`` as a value: the key is enough.
        """
        call = protocol.vms(ended=ended, labels=labels, timeout=self._timeout)
        infos = await self._send(call)
        return [AsyncVM._of(self, info) for info in infos]

    async def tree(self, *, labels: Mapping[str, str | None] | None = None) -> list[TreeNode]:
        """The families: who was forked from whom.

        ``labels``: only VMs that have all of these, and those that they descend from.
        """
        return await self._send(protocol.tree(labels, self._timeout))

    async def images(self) -> list[Image]:
        """The guest images in the store."""
        return await self._send(protocol.images(self._timeout))

    async def remove_image(self, name: str) -> None:
        """Delete a guest image; :class:`Conflict` while a VM uses it."""
        await self._send(protocol.remove_image(name, self._timeout))

    async def push_image(self, name: str, location: str | os.PathLike[str]) -> TransferReply:
        """Copy a guest image to another store: a folder of the host or ``s3://BUCKET/PREFIX``."""
        there = location_of(location, self._endpoint)
        return await self._send(protocol.push_image(name, there, self._timeout))

    async def pull_image(
        self, name: str, location: str | os.PathLike[str] = "cluster://", *, wait: bool = False
    ) -> Image:
        """Bring a guest image from another store; VMs can boot from it when this returns.

        ``location`` is a store, or ``cluster://[HOST]``: hosts of the cluster that seed the image.
        Its root comes as VMs read it, and in the background; with ``wait`` all of it is here.
        """
        there = location_of(location, self._endpoint)
        return await self._send(
            protocol.pull_image(name, there, wait=wait, timeout=self._timeout)
        )

    async def seed_image(self, name: str) -> Image:
        """Let other hosts of the cluster pull an image from this one, and from each other.

        A compressed copy of it is kept in the host's store.
        """
        return await self._send(protocol.seed_image(name, self._timeout))

    async def unseed_image(self, name: str) -> None:
        """End that, and remove the copy. What other hosts have pulled stays with them."""
        await self._send(protocol.unseed_image(name, self._timeout))

    async def image_profile(self, name: str) -> ImageProfile:
        """What VMs read of an image, by workload: what is fetched first where it is pulled."""
        return await self._send(protocol.image_profile(name, self._timeout))

    async def reset_image_profile(self, name: str) -> None:
        """Forget that."""
        await self._send(protocol.reset_image_profile(name, self._timeout))

    async def disks(self) -> list[HostDisk]:
        """The disks of this host: those of VMs, and those that VMs of earlier daemons left."""
        return await self._send(protocol.disks(self._timeout))

    async def inspect_disk(self, id: str) -> HostDisk:
        """One disk of this host."""
        return await self._send(protocol.inspect_disk(id, self._timeout))

    async def export_disk(self, id: str, target: str | os.PathLike[str]) -> int:
        """Write all its bytes to a raw file; returns its length in bytes.

        The disk of a running VM is as after a power cut: ``sync`` in the guest first. Written
        beside ``target`` and renamed over it at the end; zeros become holes. Only its owner can
        read it.
        """
        call = protocol.export_disk(id, self._timeout)
        return await self._download(call, Path(target), lambda _: protocol.EXPORT_MODE)

    async def resize_disk(self, id: str, size_bytes: int) -> HostDisk:
        """Make the disk of a running VM larger; its guest is told.

        :class:`Conflict` if it has more than that, or if its VM does not run.
        The file system stays as it is: ``resize2fs`` in the guest grows it.
        """
        return await self._send(protocol.resize_disk(id, size_bytes, self._timeout))

    async def remove_disk(self, id: str) -> None:
        """Delete a disk; :class:`Conflict` while a VM has it."""
        await self._send(protocol.remove_disk(id, self._timeout))

    async def host(self) -> HostInfo:
        """Memory, pool, and what an earlier daemon lost."""
        return await self._send(protocol.host(self._timeout))

    async def doctor(self) -> DoctorReport:
        """The host's fitness, as the daemon sees it."""
        return await self._send(protocol.doctor(self._timeout))

    async def version(self) -> Version:
        """Versions of the daemon, its QEMU and the kernel."""
        return await self._send(protocol.version(self._timeout))

    async def events(
        self,
        *,
        after: str | None = None,
        kinds: Sequence[str] = (),
        vm: str | None = None,
        follow: bool = True,
    ) -> AsyncIterator[Event]:
        """What happens on the host, in order, over any number of connections.

        ``after`` is the ``cursor`` of the last event that was read, or ``"0"`` for all that the
        daemon still has. Default: from the first connection on or, without ``follow``, ``"0"``.
        Without ``follow`` it ends after what has happened so far. Only ``kinds``, and events about
        ``vm`` (name or id), if given. An event of kind ``GAP`` stands where events were lost.
        It reconnects by itself, and raises :class:`ConnectionFailed` after a minute without a
        daemon.
        """
        reader = EventReader(after=after, kinds=kinds, vm=vm, follow=follow)
        pause: float | None = 0.0
        while pause is not None:
            await sdk_io.sleep(pause)
            broken: VmforkError | None = None
            try:
                async with self._stream(reader.call()) as response:
                    async for piece in response.aiter_bytes():
                        for event in reader.feed(piece):
                            yield event
            except (ConnectionFailed, NoCapacity, TimeoutExceeded) as error:
                # No place: that of the connection that was lost is not free yet.
                broken = error
            pause = reader.pause_after(broken)

    async def aclose(self) -> None:
        """Close the connections. VMs are left as they are."""
        await self._http.aclose()

    async def __aenter__(self) -> AsyncClient:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.aclose()

    def __repr__(self) -> str:
        return f"<vmfork.AsyncClient {self._endpoint}>"

    async def _send(
        self, call: Call[T], content: bytes | AsyncIterator[bytes] | None = None
    ) -> T:
        options = request_options(call, self._timeout, content)
        sdk_io.cut_body(options)
        with translated(call, self._endpoint, self._timeout):
            response = await self._http.request(call.method, call.path, **options)
        return call.finish(response.status_code, response.content, response.headers)

    @asynccontextmanager
    async def _stream(self, call: Call[Any]) -> AsyncIterator[httpx.Response]:
        options = request_options(call, self._timeout)
        with translated(call, self._endpoint, self._timeout):
            async with self._http.stream(call.method, call.path, **options) as response:
                if not 200 <= response.status_code < 300:
                    raise call.error(response.status_code, await response.aread())
                yield response

    async def _download(
        self, call: Call[Any], target: Path, mode: Callable[[Mapping[str, str]], int]
    ) -> int:
        """Write an answer beside ``target``, and rename it over that at the end."""
        part = target.with_name(f".{target.name}.{secrets.token_hex(4)}")
        try:
            async with self._stream(call) as response:
                with private_file(part) as file:
                    async for piece in response.aiter_bytes():
                        if piece.count(0) == len(piece):
                            file.seek(len(piece), os.SEEK_CUR)
                        else:
                            await sdk_io.write(file, piece)
                    length = file.truncate()
                    os.fchmod(file.fileno(), mode(response.headers))
            part.replace(target)
        except BaseException:
            part.unlink(missing_ok=True)
            raise
        return length

    async def _upload(self, call: Call[T], source: Path) -> T:
        with source.open("rb") as file:
            return await self._send(call, sdk_io.pieces(file))

    def _started(self, reply: StartReply) -> AsyncStartResult:
        return AsyncStartResult(
            reply,
            [
                AsyncVM(self, name=vm.name, vmid=vm.vmid, id=vm.id)
                for vm in reply.vms
                if vm.error is None
            ],
        )


class AsyncVM:
    """A handle on one VM. As a context manager it kills the VM at the end.

    ``info`` is the last that was heard of it (``None`` for a new clone); :meth:`inspect` asks
    again. Calls go by its id where that is known, which no other VM ever has, else by its name.
    """

    def __init__(
        self,
        client: AsyncClient,
        *,
        name: str,
        vmid: int,
        id: str | None = None,  # noqa: A002 - the API's word
        info: VmInfo | None = None,
    ) -> None:
        self._client = client
        self.name = name
        self.vmid = vmid
        self.id = id
        self.info = info

    @classmethod
    def _of(cls, client: AsyncClient, info: VmInfo) -> AsyncVM:
        return cls(client, name=info.name, vmid=info.vmid, id=info.id, info=info)

    async def inspect(self) -> VmDetail:
        """Everything about it, memory included; refreshes ``info``."""
        detail = await self._client._send(protocol.inspect(self._ref, self._timeout))
        self._heard(detail)
        return detail

    async def exec(
        self,
        command: str | Sequence[str],
        *,
        stdin: bytes | str | None = None,
        env: Mapping[str, str] | None = None,
        cwd: str | None = None,
        user: str | None = None,
        timeout_s: float | None = None,
        check: bool = False,
    ) -> ExecResult:
        """Run a program in the guest to its end. A string goes to ``/bin/sh -c``.

        After ``timeout_s`` (default ``Timeout.exec_s``) it is killed and ``timed_out`` set. With
        ``check`` anything but exit code 0 raises :class:`ExecFailed`.
        """
        argv = protocol.argv_of(command)
        call = protocol.exec_(
            self._ref,
            argv,
            stdin=stdin,
            env=env,
            cwd=cwd,
            user=user,
            exec_timeout_s=timeout_s,
            timeout=self._timeout,
        )
        result = await self._client._send(call)
        if check and not result.ok:
            raise ExecFailed(argv, result, vm=self.name)
        return result

    async def fork(
        self,
        count: int = 1,
        *,
        names: Sequence[str] | None = None,
        all_or_nothing: bool = False,
        timeout_s: float | None = None,
        place: str | None = None,
        hosts: Sequence[str] | None = None,
        hydrate_mib_per_s: int | None = None,
        labels: Mapping[str, str] | None = None,
        ttl_s: float | None = None,
    ) -> AsyncForkResult:
        """Fork it into ``count`` clones. What fits is started; the rest is an error each.

        With ``all_or_nothing`` the whole call fails if not all of them fit. In a cluster, ``place``
        is ``"spread"`` (on all hosts, the default), ``"pack"`` (on few) or ``"here"``, and only
        ``hosts`` are used. With ``hydrate_mib_per_s`` clones on other hosts get all of their memory
        at that rate, and then do not need this host any more. ``labels`` are added to those that
        the clones inherit. Each clone ends ``ttl_s`` after its start; without, when the
        nearest ancestor's bound ends it.
        """
        call = protocol.fork(
            self._ref,
            count,
            names=names,
            all_or_nothing=all_or_nothing,
            fork_timeout_s=timeout_s,
            place=place,
            hosts=hosts,
            hydrate_mib_per_s=hydrate_mib_per_s,
            labels=labels,
            ttl_s=ttl_s,
            timeout=self._timeout,
        )
        reply = await self._client._send(call)
        return AsyncForkResult(
            reply,
            [
                AsyncVM(self._client, name=clone.name, vmid=clone.vmid, id=clone.id)
                for clone in reply.clones
                if clone.error is None
            ],
        )

    async def pause(self) -> VmInfo:
        """Stop its vCPUs until :meth:`resume`. It can be forked and stored meanwhile."""
        info = await self._client._send(protocol.pause(self._ref, self._timeout))
        self._heard(info)
        return info

    async def resume(self) -> VmInfo:
        """Let it continue after :meth:`pause`."""
        info = await self._client._send(protocol.resume(self._ref, self._timeout))
        self._heard(info)
        return info

    async def set_ttl(self, ttl_s: float | None) -> Ttl | None:
        """End it, and the clones that inherit its bound, ``ttl_s`` from now; ``None``: never."""
        reply = await self._client._send(protocol.set_ttl(self._ref, ttl_s, self._timeout))
        return reply.ttl

    async def kill(self, *, grace_s: float = 0.0, family: bool = False) -> VmInfo:
        """End it: after asking the guest to power off, if given ``grace_s``, else at once."""
        call = protocol.kill(self._ref, grace_s=grace_s, family=family, timeout=self._timeout)
        info = await self._client._send(call)
        self._heard(info)
        return info

    async def remove(self, *, force: bool = False) -> None:
        """Forget it, its name and its log. It must have ended, unless ``force`` ends it."""
        await self._client._send(protocol.remove(self._ref, force=force, timeout=self._timeout))

    async def logs(self) -> str:
        """Console output so far, and what detached programs printed."""
        call = protocol.logs(self._ref, follow=False, idle_s=self._timeout.idle_s)
        return await self._client._send(call)

    async def follow_logs(self, *, idle_s: float = 3600.0) -> AsyncIterator[str]:
        """The log so far and as it grows, until the VM ends or is silent for ``idle_s``."""
        call = protocol.logs(self._ref, follow=True, idle_s=idle_s)
        async with self._client._stream(call) as response:
            async for text in response.aiter_text():
                yield text

    async def read_file(self, path: str) -> bytes:
        """A file's bytes; for large ones see :meth:`copy_out`."""
        return await self._client._send(protocol.read_file(self._ref, path, self._timeout))

    async def write_file(self, path: str, content: bytes | str, *, mode: int = 0o644) -> None:
        """Store ``content``; the old file stays whole until the new one is complete."""
        data = content.encode() if isinstance(content, str) else content
        await self._client._send(protocol.write_file(self._ref, path, mode, self._timeout), data)

    async def copy_in(
        self, source: str | os.PathLike[str], path: str, *, mode: int | None = None
    ) -> None:
        """Copy a local file into the guest, piece by piece, with its mode unless given one."""
        with Path(source).open("rb") as file:
            bits = os.fstat(file.fileno()).st_mode & 0o7777 if mode is None else mode
            call = protocol.write_file(self._ref, path, bits, self._timeout)
            await self._client._send(call, sdk_io.pieces(file))

    async def copy_out(self, path: str, target: str | os.PathLike[str]) -> int:
        """Copy a file out of the guest, piece by piece; returns its length in bytes.

        Written beside ``target`` and renamed over it at the end, with the guest's mode.
        """
        call = protocol.read_file(self._ref, path, self._timeout)
        return await self._client._download(call, Path(target), protocol.file_mode)

    async def __aenter__(self) -> AsyncVM:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await _end([self], error)

    def __repr__(self) -> str:
        state = "" if self.info is None else f" {self.info.state}"
        return f"<vmfork.AsyncVM {self.name}{state}>"

    @property
    def _ref(self) -> str:
        return self.name if self.id is None else self.id

    @property
    def _timeout(self) -> Timeout:
        return self._client._timeout

    def _heard(self, info: VmInfo) -> None:
        self.info = info
        self.id = info.id


class AsyncForkResult(BaseForkResult[AsyncVM]):
    """What a fork gave: a sequence of the clones that run, and an error for each that does not.

    As a context manager it kills the clones at the end.
    """

    def raise_for_errors(self) -> AsyncForkResult:
        """Raise the first error, if there is one; else return self."""
        for error in self.errors:
            raise error
        return self

    async def __aenter__(self) -> AsyncForkResult:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await _end(self._vms, error)


class AsyncStartResult(BaseStartResult[AsyncVM]):
    """What a snapshot's start gave: a sequence of the VMs that run, and an error for each other.

    As a context manager it kills the VMs at the end.
    """

    def raise_for_errors(self) -> AsyncStartResult:
        """Raise the first error, if there is one; else return self."""
        for error in self.errors:
            raise error
        return self

    async def __aenter__(self) -> AsyncStartResult:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await _end(self._vms, error)


async def _end(vms: Sequence[AsyncVM], error: BaseException | None) -> None:
    """Kill all of them. One that has ended is fine; other trouble is told once all were tried."""
    errors = await sdk_io.errors_of([vm.kill for vm in vms], VmforkError)
    # NotFound and Conflict: the VM has ended, or was removed.
    settle([e for e in errors if not isinstance(e, (NotFound, Conflict))], error)

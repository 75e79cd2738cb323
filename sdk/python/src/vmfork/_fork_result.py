"""What both clients' results of forks and starts share: everything but how the VMs are ended."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar, overload

from ._errors import ApiError, VmforkError
from ._models import CloneInfo, ForkReply, ForkStages
from ._snapshot_models import StartReply

V = TypeVar("V")


class BaseResult(Sequence[V]):
    """A sequence of the VMs that run, with an error for each that does not."""

    def __init__(self, reply: ForkReply | StartReply, vms: Sequence[V]) -> None:
        self._all = reply.clones if isinstance(reply, ForkReply) else reply.vms
        self._requested, self._granted = reply.requested, reply.granted
        self._total_ms = reply.total_ms
        self._vms = tuple(vms)

    @property
    def results(self) -> tuple[CloneInfo, ...]:
        """All that were asked for, by vmid: state, ``ready_ms``, ``pooled``, ``error``."""
        return self._all

    @property
    def errors(self) -> tuple[ApiError, ...]:
        """Why the others don't run; ``.vm`` is the name that each would have had."""
        return tuple(
            ApiError.from_body(result.error, vm=result.name)
            for result in self._all
            if result.error is not None
        )

    @property
    def requested(self) -> int:
        """How many were asked for."""
        return self._requested

    @property
    def granted(self) -> int:
        """How many run."""
        return self._granted

    @property
    def total_ms(self) -> float:
        """From the request until the last one was ready."""
        return self._total_ms

    @overload
    def __getitem__(self, index: int) -> V: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[V]: ...
    def __getitem__(self, index: int | slice) -> V | Sequence[V]:
        return self._vms[index]

    def __len__(self) -> int:
        return len(self._vms)


class BaseForkResult(BaseResult[V]):
    """The clones of a fork."""

    def __init__(self, reply: ForkReply, clones: Sequence[V]) -> None:
        super().__init__(reply, clones)
        self.reply = reply

    @property
    def clones(self) -> tuple[V, ...]:
        """The clones that run, by vmid."""
        return self._vms

    @property
    def pause_ms(self) -> float:
        """How long the parent's vCPUs stood still."""
        return self.reply.pause_ms

    @property
    def stages(self) -> ForkStages:
        """Where the time went."""
        return self.reply.stages

    def __repr__(self) -> str:
        reply = self.reply
        figures = f"{reply.granted} of {reply.requested}, paused {reply.pause_ms:.1f} ms"
        return f"<vmfork.{type(self).__name__} {figures}>"


class BaseStartResult(BaseResult[V]):
    """The VMs started from a stored snapshot."""

    def __init__(self, reply: StartReply, vms: Sequence[V]) -> None:
        super().__init__(reply, vms)
        self.reply = reply

    @property
    def vms(self) -> tuple[V, ...]:
        """The VMs that run, by vmid."""
        return self._vms

    @property
    def snapshot(self) -> str:
        """The name of the snapshot."""
        return self.reply.snapshot

    @property
    def open_ms(self) -> float:
        """From the request until descriptor, page table and device state were read."""
        return self.reply.open_ms

    def __repr__(self) -> str:
        reply = self.reply
        figures = f"{reply.granted} of {reply.requested} from {reply.snapshot}"
        return f"<vmfork.{type(self).__name__} {figures}>"


def settle(trouble: Sequence[VmforkError], error: BaseException | None) -> None:
    """At the end of a ``with`` block: don't let clean-up hide the error that ended the block."""
    if not trouble:
        return
    if error is None:
        raise trouble[0]
    for failure in trouble:
        error.add_note(f"while ending VMs: {failure}")

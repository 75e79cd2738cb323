"""What both clients' fork results share: everything but how the clones are ended."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar, overload

from ._errors import ApiError, VmforkError
from ._models import CloneInfo, ForkReply, ForkStages

V = TypeVar("V")


class BaseForkResult(Sequence[V]):
    """A sequence of the clones that run, with an error for each that does not."""

    def __init__(self, reply: ForkReply, clones: Sequence[V]) -> None:
        self.reply = reply
        self._clones = tuple(clones)

    @property
    def clones(self) -> tuple[V, ...]:
        """The clones that run, by vmid."""
        return self._clones

    @property
    def results(self) -> tuple[CloneInfo, ...]:
        """All that were asked for, by vmid: state, ``ready_ms``, ``pooled``, ``error``."""
        return self.reply.clones

    @property
    def errors(self) -> tuple[ApiError, ...]:
        """Why the others don't run; ``.vm`` is the name that each would have had."""
        return tuple(
            ApiError.from_body(clone.error, vm=clone.name)
            for clone in self.reply.clones
            if clone.error is not None
        )

    @property
    def requested(self) -> int:
        """How many clones were asked for."""
        return self.reply.requested

    @property
    def granted(self) -> int:
        """How many run."""
        return self.reply.granted

    @property
    def pause_ms(self) -> float:
        """How long the parent's vCPUs stood still."""
        return self.reply.pause_ms

    @property
    def total_ms(self) -> float:
        """From the request until the last clone was ready."""
        return self.reply.total_ms

    @property
    def stages(self) -> ForkStages:
        """Where the time went."""
        return self.reply.stages

    @overload
    def __getitem__(self, index: int) -> V: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[V]: ...
    def __getitem__(self, index: int | slice) -> V | Sequence[V]:
        return self._clones[index]

    def __len__(self) -> int:
        return len(self._clones)

    def __repr__(self) -> str:
        reply = self.reply
        figures = f"{reply.granted} of {reply.requested}, paused {reply.pause_ms:.1f} ms"
        return f"<vmfork.{type(self).__name__} {figures}>"


def settle(trouble: Sequence[VmforkError], error: BaseException | None) -> None:
    """At the end of a ``with`` block: don't let clean-up hide the error that ended the block."""
    if not trouble:
        return
    if error is None:
        raise trouble[0]
    for failure in trouble:
        error.add_note(f"while ending VMs: {failure}")

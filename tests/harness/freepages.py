"""Memory that a guest gives back."""

from __future__ import annotations

import time

import vmfork

from .waits import eventually


def wait_until_reported(vm: vmfork.VM) -> None:
    """Until the guest reports nothing more: it does so block by block, over some seconds."""
    least, since = vm.inspect().memory.private_pages, time.monotonic()

    def is_quiet() -> bool:
        nonlocal least, since
        now = vm.inspect().memory.private_pages
        if now < least - 256:
            least, since = now, time.monotonic()
        return time.monotonic() > since + 5

    eventually(is_quiet, 90, "the guest has reported its free pages", every_s=0.5)

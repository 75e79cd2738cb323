"""Waits that end."""

from __future__ import annotations

import contextlib
import signal
import time
from collections.abc import Callable, Iterator
from types import FrameType
from typing import TypeVar

T = TypeVar("T")


class LimitExceeded(Exception):
    """A test took longer than it may."""


def eventually(
    predicate: Callable[[], T], timeout_s: float, what: str = "", *, every_s: float = 0.02
) -> T:
    """The first true value of ``predicate``; fails with ``what`` if there is none in time."""
    end = time.monotonic() + timeout_s
    while True:
        value = predicate()
        if value:
            return value
        if time.monotonic() >= end:
            name = what or getattr(predicate, "__name__", "it")
            raise AssertionError(f"not within {timeout_s:g} s: {name} (last: {value!r:.500})")
        time.sleep(every_s)


def stays(predicate: Callable[[], object], for_s: float, what: str) -> None:
    """Fails as soon as ``predicate`` is not true during ``for_s``."""
    end = time.monotonic() + for_s
    while time.monotonic() < end:
        value = predicate()
        assert value, f"{what} (got {value!r:.500})"
        time.sleep(0.05)


def settles(predicate: Callable[[], object], for_s: float, within_s: float, what: str) -> None:
    """Fails unless ``predicate`` comes to be true, without a break, during ``for_s``."""
    end = time.monotonic() + within_s
    since = None
    while since is None or time.monotonic() - since < for_s:
        value = predicate()
        since = (since or time.monotonic()) if value else None
        assert since is not None or time.monotonic() < end, f"not within {within_s:g} s: {what} (last: {value!r:.500})"
        time.sleep(0.05)


@contextlib.contextmanager
def limit(seconds: float, what: str) -> Iterator[None]:
    """Raise :class:`LimitExceeded` inside the block after so long. For the main thread."""

    def ring(_signal: int, _frame: FrameType | None) -> None:
        raise LimitExceeded(f"{what} took longer than its {seconds:g} s")

    old = signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, old)

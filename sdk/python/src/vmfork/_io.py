"""What the blocking client does with files, bodies and groups of VMs; :mod:`._async_io` is its
twin.

The two are written by hand: they differ in more than ``async`` and ``await``.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any, BinaryIO, TypeVar

from ._protocol import PIECE_BYTES

E = TypeVar("E", bound=Exception)


def pieces(file: BinaryIO) -> Iterator[bytes]:
    """The rest of a file, for a body."""
    while piece := file.read(PIECE_BYTES):
        yield piece


def write(file: BinaryIO, piece: bytes) -> None:
    """Append to a file."""
    file.write(piece)


def sleep(seconds: float) -> None:
    """Wait."""
    time.sleep(seconds)


def cut_body(options: dict[str, Any]) -> None:
    """Send a body of known bytes whole."""


def errors_of(calls: Iterable[Callable[[], object]], kind: type[E]) -> list[E]:
    """Make one call after the other. Their errors of this kind; any other error is raised."""
    errors: list[E] = []
    for call in calls:
        try:
            call()
        except kind as error:
            errors.append(error)
    return errors

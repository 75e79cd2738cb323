"""What the asyncio client does with files, bodies and groups of VMs; :mod:`._io` is its twin.

The two are written by hand: they differ in more than ``async`` and ``await``.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from typing import Any, BinaryIO, TypeVar

E = TypeVar("E", bound=Exception)

#: Largest piece of a body, in bytes.
#:
#: One of the kernel's buffers for a unix socket has 48 KiB. The kernel takes a write that fits into
#: one either whole or not at all. Version 3.6 of anyio, which httpx uses on Debian 12, repeats the
#: beginning of a write that was taken in part. The daemon would then get wrong bytes.
PIECE_BYTES = 32 * 1024


async def pieces(file: BinaryIO) -> AsyncIterator[bytes]:
    """The rest of a file, for a body."""
    while piece := await asyncio.to_thread(file.read, PIECE_BYTES):
        yield piece


async def write(file: BinaryIO, piece: bytes) -> None:
    """Append to a file, without blocking the event loop."""
    await asyncio.to_thread(file.write, piece)


async def sleep(seconds: float) -> None:
    """Wait, without blocking the event loop."""
    await asyncio.sleep(seconds)


def cut_body(options: dict[str, Any]) -> None:
    """Send a body of known bytes in pieces of at most :data:`PIECE_BYTES`."""
    whole = options.get("content")
    if isinstance(whole, bytes):
        options["headers"]["content-length"] = str(len(whole))
        options["content"] = _split(whole)


async def _split(whole: bytes) -> AsyncIterator[bytes]:
    for start in range(0, len(whole), PIECE_BYTES):
        yield whole[start : start + PIECE_BYTES]


async def errors_of(
    calls: Iterable[Callable[[], Awaitable[object]]], kind: type[E]
) -> list[E]:
    """Make all calls at once. Their errors of this kind; any other error is raised."""
    ends = await asyncio.gather(*(call() for call in calls), return_exceptions=True)
    errors: list[E] = []
    for end in ends:
        if isinstance(end, kind):
            errors.append(end)
        elif isinstance(end, BaseException):
            raise end
    return errors

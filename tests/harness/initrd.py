"""Tiny initrds (cpio, newc) for guests that misbehave."""

from __future__ import annotations

from pathlib import Path


def write(target: Path, files: dict[str, tuple[int, bytes]]) -> None:
    """Write a cpio with these regular files; each a mode and its bytes."""
    out = bytearray()
    for number, (name, (mode, data)) in enumerate([*files.items(), ("TRAILER!!!", (0, b""))], 1):
        fields = [number, 0o100000 | mode if mode else 0, 0, 0, 1, 0, len(data), 0, 0, 0, 0, len(name) + 1, 0]
        out += b"070701" + b"".join(b"%08X" % field for field in fields)
        out += name.encode() + b"\0"
        out += b"\0" * (-len(out) % 4)
        out += data
        out += b"\0" * (-len(out) % 4)
    target.write_bytes(out)

"""Guests of one sector, assembled here."""

from __future__ import annotations

import hashlib
import os
import subprocess
from pathlib import Path

from . import places

SECTOR_BYTES = 512


def build(name: str) -> Path:
    """The sector of `tests/guest/NAME.S`; kept until the source changes."""
    source = places.ROOT / "tests" / "guest" / f"{name}.S"
    key = hashlib.sha256(source.read_bytes()).hexdigest()[:16]
    sector = places.CACHE / "test-programs" / f"{name}-{key}.img"
    if not sector.exists():
        sector.parent.mkdir(parents=True, exist_ok=True)
        part = sector.with_suffix(f".{os.getpid()}")
        unlinked = part.with_suffix(".o")
        subprocess.run(["as", "--32", "-o", unlinked, source], check=True, timeout=60)
        link = ["ld", "-m", "elf_i386", "--oformat", "binary", "-Ttext", "0x7c00", "-o", part, unlinked]
        subprocess.run(link, check=True, timeout=60)
        unlinked.unlink()
        assert part.stat().st_size == SECTOR_BYTES, f"{source} has {part.stat().st_size} bytes"
        part.chmod(0o644)
        part.replace(sector)
    return sector

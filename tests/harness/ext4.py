"""ext4 file systems of exported disks, looked into from outside."""

from __future__ import annotations

import subprocess
from pathlib import Path


def check(disk: Path) -> None:
    """It is whole once its journal is replayed."""
    replayed = subprocess.run(["e2fsck", "-p", disk], capture_output=True, timeout=60, check=False)
    assert replayed.returncode in (0, 1), replayed.stdout
    subprocess.run(["e2fsck", "-fn", disk], capture_output=True, timeout=60, check=True)


def text_of(disk: Path, path: str) -> str:
    """A file of one that is whole."""
    check(disk)
    return subprocess.run(
        ["debugfs", "-R", f"cat {path}", disk], capture_output=True, timeout=60, check=True, text=True
    ).stdout

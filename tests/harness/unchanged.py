"""Tests that have passed with the same inputs, and are not run again.

`mk/test.sh` gives a folder (VMFORK_TEST_PASSED) and the hash of what all modules have in common
(VMFORK_TEST_INPUTS): programs, harness, documents, the host. Without these, all tests run. A
module's own source is hashed here. So a change to one module runs that one again, and any other
change runs all. What failed or was skipped is run again, too.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable
from pathlib import Path


def _record(module: Path) -> Path | None:
    """The file with the names of the module's tests that have passed; `None`: all are run."""
    folder, inputs = os.environ.get("VMFORK_TEST_PASSED"), os.environ.get("VMFORK_TEST_INPUTS")
    if not folder or not inputs:
        return None
    hashed = hashlib.sha256(inputs.encode() + module.read_bytes()).hexdigest()[:32]
    return Path(folder) / f"{module.stem}-{hashed}"


def passed(modules: Iterable[Path]) -> dict[Path, set[str]]:
    """The names of the tests of these modules that need not run."""
    found = {module: _record(module) for module in set(modules)}
    return {
        module: set(record.read_text().splitlines())
        for module, record in found.items()
        if record is not None and record.is_file()
    }


def count(folder: Path) -> int:
    """How many tests of all modules in a folder need not run."""
    return sum(len(names) for names in passed(folder.glob("test_*.py")).values())


def keep(module: Path, names: set[str]) -> None:
    """These tests of a module have passed. Records of other inputs go."""
    record = _record(module)
    if record is None or not names:
        return
    record.parent.mkdir(parents=True, exist_ok=True)
    for other in record.parent.glob(f"{module.stem}-*"):
        if other.name.rpartition("-")[0] == module.stem and other != record:
            other.unlink(missing_ok=True)
    before = set(record.read_text().splitlines()) if record.is_file() else set()
    part = record.with_name(f".{record.name}.part")
    part.write_text("".join(f"{name}\n" for name in sorted(before | names)))
    part.replace(record)

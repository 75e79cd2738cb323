"""Modules of tests that have passed with the same inputs, and are not run again.

`mk/test.sh` gives a folder (VMFORK_TEST_PASSED) and the hash of what all modules have in common
(VMFORK_TEST_INPUTS): programs, harness, documents, the host. Without the hash, all tests run. A
module's own source is hashed here. So a change to one module runs that one again, and any other
change runs all.

A module is recorded whole or not at all: its tests share a daemon, whose end judges all of them.
What fails is forgotten, whichever run it fails in.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable
from pathlib import Path


class Passed:
    """What has passed, as it was known when this was made."""

    def __init__(self, folder: Path) -> None:
        """Of the modules in `folder`."""
        kept = os.environ.get("VMFORK_TEST_PASSED")
        self._kept = Path(kept) if kept else None
        self._inputs = os.environ.get("VMFORK_TEST_INPUTS")
        self._records = {module: self._record(module) for module in folder.glob("test_*.py")}
        found = {module: record for module, record in self._records.items() if record and record.is_file()}
        self._tests = {module: set(record.read_text().splitlines()) for module, record in found.items()}

    def _record(self, module: Path) -> Path | None:
        if not self._kept or not self._inputs:
            return None
        hashed = hashlib.sha256(self._inputs.encode() + module.read_bytes()).hexdigest()[:32]
        return self._kept / f"{module.stem}-{hashed}"

    def tests(self, module: Path) -> set[str]:
        """The names of a module's tests that need not run."""
        return self._tests.get(module, set())

    def count(self) -> int:
        """How many there are of all modules."""
        return sum(len(names) for names in self._tests.values())

    def keep(self, module: Path, names: set[str]) -> None:
        """A module has passed with these tests. If it has changed since, it is another one."""
        record = self._records.get(module)
        if record is None or not module.is_file() or self._record(module) != record:
            return
        self.forget([module.stem])
        record.parent.mkdir(parents=True, exist_ok=True)
        part = record.with_name(f".{record.name}.{os.getpid()}")
        part.write_text("".join(f"{name}\n" for name in sorted(names)))
        part.replace(record)

    def forget(self, stems: Iterable[str]) -> None:
        """Modules of these names have failed, or get another record."""
        for stem in stems if self._kept else ():
            for record in self._kept.glob(f"{stem}-*"):
                if record.name.rpartition("-")[0] == stem:
                    record.unlink(missing_ok=True)

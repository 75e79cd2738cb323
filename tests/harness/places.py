"""Where things are: the checkout, and the installed tree that the tests run."""

from __future__ import annotations

import os
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]

#: `bin/{vmfork,vmforkd}` and `lib/vmfork/…`; what `make build` makes.
OUT = Path(os.environ.get("VMFORK_OUT", ROOT / "out")).resolve()

VMFORK = OUT / "bin" / "vmfork"
VMFORKD = OUT / "bin" / "vmforkd"

#: Guest programs of the tests, and images, are kept here from run to run.
CACHE = ROOT / ".cache"

#: Unix sockets have short paths, so state folders have too.
SHORT_TMP = "/tmp"


def require_build() -> None:
    """The tests are of what was built; without it they cannot say anything."""
    for program in (VMFORK, VMFORKD):
        if not os.access(program, os.X_OK):
            raise RuntimeError(f"{program} is not there: run `make build`, or set VMFORK_OUT")

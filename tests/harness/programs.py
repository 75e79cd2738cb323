"""Guest programs of the tests: compiled here, statically, and copied into VMs."""

from __future__ import annotations

import hashlib
import os
import subprocess
from pathlib import Path

import vmfork

from . import places

SOURCES = [places.ROOT / "tests" / "guest", places.ROOT / "bench" / "guest", places.ROOT / "bench" / "host"]

FLAGS = ["-std=gnu11", "-O2", "-Wall", "-Wextra", "-Werror", "-static", "-pthread"]


def build(name: str) -> Path:
    """The program, compiled from a `NAME.c`; kept until the source changes. Static, so that it runs on hosts, too."""
    (source,) = [folder / f"{name}.c" for folder in SOURCES if (folder / f"{name}.c").exists()]
    return _compile([source], FLAGS)


def build_with_fork_api(source: Path) -> Path:
    """A guest program that uses the C fork API, with the library linked in."""
    library = places.ROOT / "guest" / "c"
    flags = [flag for flag in FLAGS if flag != "-Werror"]
    return _compile([source, library / "vmfork.c"], [*flags, f"-I{library}"])


def _compile(sources: list[Path], flags: list[str]) -> Path:
    content = b"\0".join(source.read_bytes() for source in sources) + " ".join(flags).encode()
    key = hashlib.sha256(content).hexdigest()[:16]
    program = places.CACHE / "test-programs" / f"{sources[0].stem}-{key}"
    if not program.exists():
        program.parent.mkdir(parents=True, exist_ok=True)
        part = program.with_suffix(f".{os.getpid()}")
        subprocess.run(["cc", *flags, "-o", part, *sources], check=True, timeout=120)
        part.replace(program)
    return program


def put(vm: vmfork.VM, name: str) -> str:
    """Copy it into a VM; returns its path there."""
    path = f"/run/{name}"
    vm.copy_in(build(name), path, mode=0o755)
    return path


class Memcheck:
    """The memory checker inside one VM (see `guest/memcheck.c`).

    The checker is in guest memory: :meth:`of` in a clone speaks with the clone's.
    """

    PATH = "/run/memcheck"
    SOCKET = "/run/memcheck.sock"

    def __init__(self, vm: vmfork.VM) -> None:
        self.vm = vm

    @classmethod
    def start(cls, vm: vmfork.VM, *, mib: int, threads: int, seed: int) -> Memcheck:
        put(vm, "memcheck")
        vm.exec([cls.PATH, "serve", cls.SOCKET, str(mib), str(threads), str(seed)], check=True, timeout_s=240)
        return cls(vm)

    def of(self, clone: vmfork.VM) -> Memcheck:
        return Memcheck(clone)

    def __call__(self, command: str, number: int = 0) -> str:
        argv = [self.PATH, "ctl", self.SOCKET, command, str(number)]
        result = self.vm.exec(argv, timeout_s=280)
        text = result.stdout_text.strip() or result.stderr_text.strip()
        assert result.exit_code == 0, f"memcheck {command} {number} in {self.vm.name}: {text}"
        return text

    def written(self) -> int:
        """Pages written since the start, by all writers."""
        return sum(int(word.partition("=")[2]) for word in self("status").split() if word.startswith("written="))

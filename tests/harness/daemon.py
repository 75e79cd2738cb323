"""One real `vmforkd` with a state folder of its own."""

from __future__ import annotations

import contextlib
import itertools
import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import vmfork

from . import images, leftovers, places, processes
from .leftovers import Host, Owned
from .waits import eventually

START_S = 20.0
STOP_S = 30.0

#: Flags of `vmforkd`, in one place.
FLAG_STATE = "--state"
FLAG_SOCKET = "--socket"
FLAG_FILL_UNIT = "--fill-unit-pages"
FLAG_POOL = "--pool"

#: Daemons that run now, for reports of failures.
running: list[Daemon] = []

#: QEMU's users: a range for each daemon of a test process, and ranges of their own for each test
#: process.
_UID_FIRST = 1_880_000_000
_UIDS_A_DAEMON = 100_000
_DAEMONS_A_WORKER = 500
_numbers = itertools.count()


def _next_uid_base() -> int:
    worker = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw")) % 5
    return _UID_FIRST + (worker * _DAEMONS_A_WORKER + next(_numbers) % _DAEMONS_A_WORKER) * _UIDS_A_DAEMON


class Client(vmfork.Client):
    """A client of one daemon on this host, whose folder it knows."""

    def __init__(self, daemon: Daemon) -> None:
        super().__init__(socket=daemon.socket, timeout=daemon.timeout)
        self.state = daemon.state


class Daemon:
    """Start, kill and restart it; `close` stops it and asserts that nothing is left."""

    def __init__(
        self,
        flags: Sequence[str] = (),
        *,
        env: Mapping[str, str] | None = None,
        prefix: Sequence[str] = (),
    ) -> None:
        places.require_build()
        self.before = Host.now()
        self.folder = Path(tempfile.mkdtemp(prefix="vf-", dir=places.SHORT_TMP))
        # QEMU runs as another user, who has to get through.
        self.folder.chmod(0o711)
        self.state = self.folder / "s"
        self.socket = self.folder / "d.sock"
        self.log = self.folder / "vmforkd.log"
        self.flags = list(flags)
        self.prefix = list(prefix)
        self.env = {**os.environ, **(env or {})}
        for name in ("VMFORK_HOST", "VMFORK_SOCKET", "VMFORK_STATE", "VMFORK_TOKEN"):
            if env is None or name not in env:
                self.env.pop(name, None)
        self.uid_base = _next_uid_base()
        self.env["VMFORK_QEMU_UID_BASE"] = str(self.uid_base)
        self.vm_ids: set[str] = set()
        self.process: subprocess.Popen[bytes] | None = None
        self.timeout = vmfork.Timeout(request_s=30, boot_s=180, fork_s=60, exec_s=300, slack_s=15)

    # -- life ------------------------------------------------------------------------------------

    def spawn(self) -> subprocess.Popen[bytes]:
        """Start the process, and wait for nothing."""
        where = [FLAG_STATE, str(self.state), FLAG_SOCKET, str(self.socket)]
        argv = [*self.prefix, str(places.VMFORKD), *where, *self.flags]
        self._note_vms()
        with self.log.open("ab") as log:
            self.process = leftovers.spawn(
                argv, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=self.env, cwd="/"
            )
        running.append(self)
        return self.process

    def start(self) -> Daemon:
        """Start it and wait until it answers."""
        process = self.spawn()

        def answers() -> bool:
            if process.poll() is not None:
                raise AssertionError(f"vmforkd ended with {process.returncode} at once:\n{self.log_tail()}")
            with self.client() as client:
                try:
                    client.version()
                except vmfork.ConnectionFailed:
                    return False
            return True

        eventually(answers, START_S, "vmforkd answers")
        return self

    def client(self) -> Client:
        return Client(self)

    def add_image(self, name: str) -> None:
        """Put an image of the shared store into this daemon's."""
        images.link_into(self.state / "images", name)

    def stop(self) -> int:
        """In good order; returns the exit code."""
        assert self.process is not None
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        try:
            return self.process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            self.kill()
            raise AssertionError(f"vmforkd did not end within {STOP_S:g} s of SIGTERM") from None
        finally:
            self._forget()

    def kill(self) -> None:
        """As hard as it goes."""
        assert self.process is not None
        self.process.kill()
        self.process.wait(10)
        self._forget()

    def _forget(self) -> None:
        if self in running:
            running.remove(self)

    def close(self, within_s: float = 10.0) -> None:
        """Stop it if it runs, assert that nothing is left, and remove the folder."""
        code = 0
        problems: list[str] = []
        try:
            if self.process is not None and self.process.poll() is None:
                code = self.stop()
                if code != 0:
                    problems.append(f"vmforkd ended with {code} on SIGTERM")
            elif self.process is not None:
                self._forget()
            problems += self.end_holder()
            problems += self.left_behind(within_s)
            if problems:
                raise AssertionError(f"left behind: {problems}\n{self.log_tail()}")
        finally:
            for process in leftovers.processes_of(self.state):
                process.kill()
            holder = self._own_holder()
            if holder is not None:
                holder.kill()
            shutil.rmtree(self.folder, ignore_errors=True)

    def holder(self) -> processes.Process | None:
        """The process that keeps this daemon's sockets for the next one."""
        return processes.holder_of(self.state)

    def _own_holder(self) -> processes.Process | None:
        """The same, unless another running daemon of this folder uses it."""
        return None if any(other.state == self.state for other in running) else self.holder()

    def end_holder(self) -> list[str]:
        """End the holder of a daemon that was killed or failed. Returns what went wrong."""
        holder = self._own_holder()
        if holder is None or self.process is None or self.process.poll() in (None, 0):
            return []
        holder.kill(signal.SIGTERM)
        try:
            eventually(lambda: not holder.is_alive(), 5, "the holder ends on SIGTERM")
        except AssertionError as error:
            holder.kill()
            return [str(error)]
        return []

    def left_behind(self, within_s: float) -> list[str]:
        """What the daemon has left on the host, once it had time to go away."""
        end = time.monotonic() + within_s
        self._note_vms()
        owned = Owned(self.folder, self.uid_base, self.vm_ids)
        while True:
            found = [str(process) for process in leftovers.processes_of(self.state)]
            found += Host.now().added_since(self.before, owned)
            holder = self._own_holder()
            found += [] if holder is None else [f"holder {holder}"]
            if self.socket.exists() and (self.process is None or self.process.returncode == 0):
                found.append(f"socket file {self.socket}")
            if not found or time.monotonic() > end:
                return found
            time.sleep(0.05)

    def _note_vms(self) -> None:
        """A daemon that starts writes its journal again, without what has ended."""
        self.vm_ids |= leftovers.vm_ids(self.state)

    # -- sight -----------------------------------------------------------------------------------

    def log_tail(self, lines: int = 60) -> str:
        try:
            text = self.log.read_text(errors="replace").splitlines()
        except FileNotFoundError:
            return "(no log)"
        return "\n".join(text[-lines:])

    def consoles(self, lines: int = 30) -> dict[str, str]:
        """The last lines of each VM's console, by the VM's id."""
        found: dict[str, str] = {}
        for log in sorted((self.state / "vms").glob("*/*log*")):
            with contextlib.suppress(OSError):
                text = log.read_text(errors="replace").splitlines()
                found[f"{log.parent.name}/{log.name}"] = "\n".join(text[-lines:])
        return found

    def processes(self) -> list[processes.Process]:
        """All that descend from it and end with it: QEMUs and keepers."""
        assert self.process is not None
        found = processes.below(self.process.pid)
        return [process for process in found if process.state != "Z" and not process.is_holder]

    def memfd_bytes(self) -> int:
        """Memory in the nameless files that its own process has open: the caches of images."""
        assert self.process is not None
        found: dict[int, int] = {}
        for link in Path(f"/proc/{self.process.pid}/fd").iterdir():
            with contextlib.suppress(FileNotFoundError):
                if os.readlink(link).startswith("/memfd:"):
                    file = link.stat()
                    found[file.st_ino] = file.st_blocks * 512
        return sum(found.values())

    def qemu(self, vm: vmfork.VM) -> processes.Process:
        """The QEMU of one VM."""
        pid = vm.inspect().pid
        assert pid is not None, f"{vm} has no pid"
        process = processes.read(pid)
        assert process is not None, f"no process {pid} of {vm}"
        return process

    def keepers(self, vm: vmfork.VM) -> list[processes.Process]:
        """Processes below a VM's QEMU: those that keep moved pages alive until they are drained."""
        return [process for process in processes.below(self.qemu(vm).pid) if process.state != "Z"]

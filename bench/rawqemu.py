"""Plain QEMU without vmfork, for the baseline: boot, stop, save to a file in memory, load
elsewhere.

The guest is the same image, with the same agent; the few frames of its protocol that are needed are
spoken here (`crates/agent-proto`).
"""

from __future__ import annotations

import array
import contextlib
import json
import os
import secrets
import shutil
import socket
import struct
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from .world import images, leftovers, now_ms

WAIT_S = 120.0
HEADER = struct.Struct("<IBBHI")
MESSAGE = 1
STDOUT = 3
PROTOCOL = 1
#: The PCI address of the first writable disk; those before it are taken.
DISK_ADDRESS = 0x11


class Qmp:
    """One monitor."""

    def __init__(self, path: Path) -> None:
        self.socket = _connect(path)
        self.lines = self.socket.makefile("rb")
        self.events: list[dict[str, Any]] = []
        self._read()
        self("qmp_capabilities")

    def __call__(self, command: str, fd: int | None = None, **arguments: Any) -> Any:
        line = json.dumps({"execute": command, "arguments": arguments}).encode() + b"\n"
        rights = [] if fd is None else [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [fd]))]
        self.socket.sendmsg([line], rights)
        while True:
            reply = self._read()
            if "error" in reply:
                raise RuntimeError(f"{command}: {reply['error']['desc']}")
            if "return" in reply:
                return reply["return"]
            self.events.append(reply)

    def _read(self) -> dict[str, Any]:
        line = self.lines.readline()
        if not line:
            raise RuntimeError("QEMU closed its monitor")
        document: dict[str, Any] = json.loads(line)
        return document

    def migrated(self) -> None:
        """Wait until a migration has ended well."""
        while True:
            event = self.events.pop(0) if self.events else self._read()
            status = event.get("data", {}).get("status")
            if event.get("event") == "MIGRATION" and status in ("completed", "failed"):
                if status == "failed":
                    raise RuntimeError("the migration failed")
                return

    def cont(self) -> None:
        """Go on; right after a migration QEMU may need a moment."""
        end = time.monotonic() + 10
        while True:
            try:
                self("cont")
                return
            except RuntimeError as error:
                if "finalized" not in str(error) or time.monotonic() > end:
                    raise
                time.sleep(0.0005)

    def close(self) -> None:
        self.lines.close()
        self.socket.close()


class Agent:
    """The guest's agent, at the other end of its port."""

    def __init__(self, path: Path) -> None:
        self.socket = _connect(path)
        self.buffer = b""

    def send(self, message: dict[str, Any], channel: int = 0) -> None:
        payload = json.dumps(message).encode()
        self.socket.sendall(HEADER.pack(len(payload), MESSAGE, 0, 0, channel) + payload)

    def frame(self) -> tuple[int, bytes]:
        """The next frame's kind and payload."""
        while True:
            if len(self.buffer) >= HEADER.size:
                length, kind, _flags, _zero, _channel = HEADER.unpack_from(self.buffer)
                if len(self.buffer) >= HEADER.size + length:
                    payload = self.buffer[HEADER.size : HEADER.size + length]
                    self.buffer = self.buffer[HEADER.size + length :]
                    return kind, payload
            piece = self.socket.recv(65536)
            if not piece:
                raise RuntimeError("the agent's port was closed")
            self.buffer += piece

    def message(self, *types: str, output: bytearray | None = None) -> dict[str, Any]:
        """The next message of one of these types; others are dropped. What programs print until
        then is appended to ``output``."""
        while True:
            kind, payload = self.frame()
            if kind == MESSAGE:
                document: dict[str, Any] = json.loads(payload)
                if document["type"] in types:
                    return document
            elif kind == STDOUT and output is not None:
                output += payload

    def hello(self) -> None:
        """The first words to a guest that boots, again each second until it answers."""
        end = time.monotonic() + WAIT_S
        while time.monotonic() < end:
            self.send(
                {
                    "type": "hello",
                    "protocol": PROTOCOL,
                    "name": "raw",
                    "machine_id": secrets.token_hex(16),
                    "entropy": secrets.token_hex(64),
                    "realtime_ns": time.time_ns(),
                }
            )
            self.socket.settimeout(1.0)
            try:
                self.message("hello")
                return
            except TimeoutError:
                continue
            finally:
                self.socket.settimeout(WAIT_S)
        raise RuntimeError(f"the guest's agent did not answer within {WAIT_S:g} s")

    def ping(self) -> None:
        token = secrets.randbits(40)
        self.send({"type": "ping", "token": token})
        while self.message("pong")["token"] != token:
            pass

    def run(self, command: str) -> str:
        """What a command prints; no more than a stream's window, which nothing opens again."""
        self.send(
            {"type": "exec", "argv": ["/bin/sh", "-c", command], "env": [], "cwd": None, "user": None, "tty": None},
            channel=2,
        )
        output = bytearray()
        end = self.message("exited", "failed", output=output)
        if end.get("exit_code") != 0:
            raise RuntimeError(f"{command!r} in the guest: {end}")
        return output.decode()

    def close(self) -> None:
        self.socket.close()


class RawVm:
    """One plain QEMU."""

    def __init__(self, folder: Path, arguments: list[str]) -> None:
        self.folder = folder
        self.arguments = arguments
        folder.mkdir(parents=True, exist_ok=True)
        self.process = leftovers.spawn(
            [
                "qemu-system-x86_64",
                *arguments,
                *("-qmp", f"unix:{folder}/qmp,server=on,wait=off"),
                *("-chardev", f"socket,id=agent,path={folder}/agent,server=on,wait=off"),
                *("-device", "virtio-serial-pci,id=ports,max_ports=2"),
                *("-device", "virtserialport,bus=ports.0,nr=1,chardev=agent,name=org.vmfork.agent.0"),
            ],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        try:
            self.qmp = Qmp(folder / "qmp")
            self.agent = Agent(folder / "agent")
        except BaseException:
            self.end()
            raise

    @classmethod
    @contextlib.contextmanager
    def boot(cls, image: str, *, memory_mib: int, disks: Sequence[Path] = ()) -> Iterator[RawVm]:
        """Boot the image and wait for its agent. Raw files are its disks from `/dev/vdb` on."""
        files = images.store() / image
        cmdline = json.loads((files / "image.json").read_text())["cmdline"]
        folder = Path(tempfile.mkdtemp(prefix="vf-raw-", dir="/tmp"))
        arguments = [
            *("-M", "pc", "-accel", "tcg,thread=multi,tb-size=64", "-m", str(memory_mib)),
            *("-nodefaults", "-no-user-config", "-display", "none"),
            *("-serial", f"file:{folder}/serial.log"),
            *("-kernel", str(files / "kernel"), "-initrd", str(files / "initrd"), "-append", cmdline),
            *("-drive", f"file={files / 'root.img'},format=raw,if=virtio,read-only=on,file.locking=off"),
        ]
        for number, disk in enumerate(disks):
            device = f"virtio-blk-pci,drive=disk{number},addr={DISK_ADDRESS + number:#x},disable-modern=on,physical_block_size=4096"
            arguments += ["-drive", f"file={disk},format=raw,if=none,id=disk{number}", "-device", device]
        vm: RawVm | None = None
        try:
            vm = cls(folder / "source", arguments)
            vm.agent.hello()
            yield vm
        finally:
            if vm is not None:
                vm.end()
            shutil.rmtree(folder, ignore_errors=True)

    def exec(self, command: str) -> str:
        """What the command prints."""
        return self.agent.run(command)

    def end(self) -> None:
        for name in ("qmp", "agent"):
            if hasattr(self, name):
                getattr(self, name).close()
        self.process.kill()
        self.process.wait(10)


class State:
    """A saved VM, in a memfd."""

    def __init__(self) -> None:
        self.fd = os.memfd_create("raw-state")

    def reader(self) -> int:
        """A descriptor of its own, at the beginning."""
        return os.open(f"/proc/self/fd/{self.fd}", os.O_RDONLY)

    def close(self) -> None:
        os.close(self.fd)


def save(vm: RawVm) -> State:
    """Stop it, save all of it, let it go on: the pause is all of this."""
    state = State()
    vm.qmp("migrate-set-parameters", **{"max-bandwidth": 1 << 40})
    vm.qmp("migrate-set-capabilities", capabilities=[{"capability": "events", "state": True}])
    vm.qmp("stop")
    vm.qmp.events.clear()
    vm.qmp("getfd", fd=state.fd, fdname="state")
    vm.qmp("migrate", uri="fd:state")
    vm.qmp.migrated()
    vm.qmp.cont()
    return state


def restore(state: State, like: RawVm) -> tuple[float, float]:
    """Load it into another QEMU until its agent answers: ms to start that, ms from there."""
    begin = now_ms()
    with Target(like) as target:
        started = now_ms()
        target.load(state)
        return started - begin, now_ms() - started


class Target:
    """A QEMU that waits for the state of a VM like another."""

    def __init__(self, like: RawVm) -> None:
        self.folder = like.folder.parent / f"target-{secrets.token_hex(4)}"
        self.vm = RawVm(self.folder, [*like.arguments, "-incoming", "defer"])
        self.vm.qmp("migrate-set-capabilities", capabilities=[{"capability": "events", "state": True}])

    def load(self, state: State) -> None:
        """Go on from there, until the agent answers."""
        reader = state.reader()
        try:
            self.vm.qmp("getfd", fd=reader, fdname="state")
        finally:
            os.close(reader)
        self.vm.qmp("migrate-incoming", uri="fd:state")
        self.vm.qmp.migrated()
        self.vm.qmp.cont()
        self.vm.agent.ping()

    def __enter__(self) -> Target:
        return self

    def __exit__(self, *_: object) -> None:
        self.vm.end()
        shutil.rmtree(self.folder, ignore_errors=True)


def _connect(path: Path) -> socket.socket:
    end = time.monotonic() + 20
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    connection.settimeout(WAIT_S)
    while True:
        try:
            connection.connect(str(path))
            return connection
        except (FileNotFoundError, ConnectionRefusedError):
            if time.monotonic() > end:
                connection.close()
                raise
            time.sleep(0.001)

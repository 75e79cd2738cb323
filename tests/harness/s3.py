"""An S3 server of one's own (versitygw, which `mk/versitygw.sh` builds), and a way to it that takes its time."""

from __future__ import annotations

import contextlib
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from . import leftovers, places
from .waits import eventually

ACCESS = "tester"
SECRET = "a secret of the tests"
BUCKET = "snapshots"

#: A program: a process of its own, so that it does not share a lock with the process that measures.
RELAY = Path(__file__).with_name("relay.py")

#: Machines under load are slow.
START_S = 60.0


def program() -> Path | None:
    """The server, where it has been built."""
    found = sorted(places.CACHE.glob("versitygw-v*/versitygw"))
    return found[-1] if found else None


@dataclass(frozen=True)
class Server:
    """A server that runs, with an empty bucket."""

    port: int
    #: What it keeps, as files.
    folder: Path
    process: subprocess.Popen[bytes]

    @property
    def location(self) -> str:
        """As `vmfork snapshot push` takes it."""
        return f"s3://{BUCKET}/"

    def environment(self, port: int | None = None) -> dict[str, str]:
        """What a daemon has to know to reach it; by another port, if there is a relay."""
        return {
            "AWS_ENDPOINT_URL": f"http://127.0.0.1:{port or self.port}",
            "AWS_ALLOW_HTTP": "true",
            "AWS_ACCESS_KEY_ID": ACCESS,
            "AWS_SECRET_ACCESS_KEY": SECRET,
            "AWS_REGION": "us-east-1",
        }

    def stop(self) -> None:
        """No answers from now on, not even refusals of requests that are under way."""
        self.process.kill()
        self.process.wait(10)


@contextlib.contextmanager
def server() -> Iterator[Server]:
    """A server for the block; nothing is left of it afterwards."""
    binary = program()
    if binary is None:
        raise RuntimeError("no versitygw in .cache: mk/versitygw.sh builds it")
    folder = Path(tempfile.mkdtemp(prefix="vf-s3-", dir=places.SHORT_TMP))
    process: subprocess.Popen[bytes] | None = None
    try:
        (folder / BUCKET).mkdir()
        port = _free_port()
        process = leftovers.spawn(
            [
                str(binary), "--access", ACCESS, "--secret", SECRET, "--region", "us-east-1",
                "--port", f"127.0.0.1:{port}", "--quiet", "posix", str(folder),
            ],
            stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        eventually(lambda: _answers(port), START_S, "versitygw answers", every_s=0.02)
        yield Server(port, folder / BUCKET, process)
    finally:
        if process is not None:
            process.kill()
            process.wait(10)
        shutil.rmtree(folder, ignore_errors=True)


@contextlib.contextmanager
def relay(to: int, delay_s: float, port: int = 0) -> Iterator[int]:
    """A port whose connections go to another one of this host, and whose answers come so much later.

    Bytes that follow each other keep their distance: what is delayed is each of them, not all that are behind it.
    """
    process = leftovers.spawn(
        [sys.executable, str(RELAY), str(to), str(delay_s), str(port)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    try:
        assert process.stdout is not None
        yield int(process.stdout.readline())
    finally:
        process.kill()
        process.wait(10)
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                pipe.close()


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port


def _answers(port: int) -> bool:
    with socket.socket() as connection:
        connection.settimeout(1.0)
        return connection.connect_ex(("127.0.0.1", port)) == 0

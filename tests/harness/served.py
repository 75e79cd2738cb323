"""Images that `vmfork image serve` shows."""

from __future__ import annotations

import contextlib
import signal
import subprocess
from collections.abc import Iterator

from .cli import Cli


@contextlib.contextmanager
def serving(cli: Cli, *arguments: str) -> Iterator[subprocess.Popen[bytes]]:
    """`vmfork image serve` with these arguments, from its first line on. Ctrl-C ends it."""
    process = cli.spawn("image", "serve", *arguments, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdout is not None and process.stderr is not None
    try:
        line = process.stdout.readline()
        if not line:
            raise AssertionError(process.stderr.read().decode())
        yield process
        if process.poll() is None:
            process.send_signal(signal.SIGINT)
            assert process.wait(10) == 130, process.stderr.read().decode()
    finally:
        # A test that failed leaves no mount.
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.send_signal(signal.SIGINT)
            process.wait(5)
        if process.poll() is None:
            process.kill()
            process.wait(10)

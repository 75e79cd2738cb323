"""The command line, run as users run it."""

from __future__ import annotations

import json
import os
import subprocess
from typing import TYPE_CHECKING, Any

from . import leftovers, places

if TYPE_CHECKING:
    from .daemon import Daemon


class Cli:
    """Runs `vmfork` on one daemon."""

    def __init__(self, daemon: Daemon) -> None:
        self.daemon = daemon

    @property
    def env(self) -> dict[str, str]:
        env = {name: value for name, value in os.environ.items() if not name.startswith("VMFORK_")}
        return {
            **env,
            "VMFORK_SOCKET": str(self.daemon.socket),
            "VMFORK_STATE": str(self.daemon.state),
            "NO_COLOR": "1",
            "VMFORK_NO_PROGRESS": "1",
            "LC_ALL": "C.UTF-8",
        }

    def __call__(
        self,
        *arguments: str,
        stdin: bytes = b"",
        code: int | None = 0,
        timeout_s: float = 120.0,
    ) -> subprocess.CompletedProcess[bytes]:
        """Run it to its end; ``code`` is the exit code it must have (None: any)."""
        done = subprocess.run(
            [places.VMFORK, *arguments],
            input=stdin,
            capture_output=True,
            timeout=timeout_s,
            env=self.env,
            cwd="/",
        )
        assert code is None or done.returncode == code, (
            f"`vmfork {' '.join(arguments)}` ended with {done.returncode}, not {code}\n"
            f"{done.stdout.decode(errors='replace')}\n{done.stderr.decode(errors='replace')}"
        )
        return done

    def json(self, *arguments: str, **options: Any) -> Any:
        """Run it with `--json` and read the one document."""
        return json.loads(self(*arguments, "--json", **options).stdout)

    def text(self, *arguments: str, **options: Any) -> str:
        """Run it; its standard output as text."""
        return self(*arguments, **options).stdout.decode()

    def spawn(self, *arguments: str, **options: Any) -> subprocess.Popen[bytes]:
        """Start it and leave it running; the caller ends it."""
        return leftovers.spawn([str(places.VMFORK), *arguments], env=self.env, cwd="/", **options)

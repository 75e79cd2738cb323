"""The documents' commands, run as typed there: exit codes 0, and output of the shape that is shown.

A block is fenced with ```console; lines that begin with `$ ` are commands (`\\` at the end goes on), the
others what they print. A line of `...` in the output stands for any lines. Commands of one document run
in order, in one shell each, in one folder, on one daemon. A block after `<!-- not run: why -->` is left
out, and counted.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from harness import images, leftovers, places
from harness.daemon import Daemon

DOCUMENTS = ["README.md", pytest.param("docs/tutorial.md", marks=pytest.mark.slow)]


@dataclass
class Step:
    line: int
    command: str
    shown: list[str] = field(default_factory=list)


def steps_of(text: str) -> tuple[list[Step], list[str]]:
    """The commands with what is shown below them, and the reasons of the blocks that are not run."""
    steps: list[Step] = []
    left_out: list[str] = []
    inside = False
    skip = ""
    for number, line in enumerate(text.splitlines(), 1):
        stripped = line.strip()
        if not inside:
            if found := re.fullmatch(r"<!-- not run: (.*?) -->", stripped):
                skip = found[1]
            elif stripped == "```console":
                inside = True
                begin = len(steps)
            elif stripped:
                skip = ""
            continue
        if stripped == "```":
            inside = False
            if skip:
                left_out.append(skip)
                del steps[begin:]
                skip = ""
        elif line.startswith("$ "):
            steps.append(Step(number, line[2:]))
        elif steps and steps[-1].command.endswith("\\") and not steps[-1].shown:
            steps[-1].command = f"{steps[-1].command[:-1]}{line}"
        elif len(steps) > begin:
            steps[-1].shown.append(line.rstrip())
    return steps, left_out


def shape(line: str) -> str:
    """A line with what differs from run to run taken out: numbers, units, ids, bars, widths."""
    line = re.sub(r"\b[0-9a-f]{16,}\b", "ID", line)
    line = re.sub(r"\b\d+(?:[.,:]\d+)*(?: ?(?:ms|s|m|h|us|µs|B|KiB|MiB|GiB|MB|GB|%))?(?![\w.])", "N", line)
    line = re.sub(r"[━╸╺─]+", "", line)
    return re.sub(r"\s+", " ", line).strip()


def same_shape(shown: list[str], printed: list[str]) -> bool:
    """Whether ``printed`` is as ``shown``, `...` standing for any lines."""
    if not shown:
        return True
    pattern = "".join(
        r"(?:.*\n)*" if line.strip() in ("...", "…") else re.escape(shape(line)) + r"\n" for line in shown
    )
    text = "".join(f"{shape(line)}\n" for line in printed)
    return re.fullmatch(pattern, text) is not None


#: They build the same images.
@pytest.mark.xdist_group("test_readme")
@pytest.mark.limit(1500)
@pytest.mark.parametrize("document", DOCUMENTS)
def test_commands_do_what_the_document_shows(
    document: str, make_daemon: Callable[..., Daemon], image: str, tmp_path: Path, need: Callable[[object, str], None]
) -> None:
    path = places.ROOT / document
    need(path.exists(), document)
    steps, left_out = steps_of(path.read_text())
    for reason in left_out:
        print(f"left out of {document}: {reason}")
    assert steps, f"{document} shows no command"
    daemon = make_daemon()
    daemon.add_image(images.DEFAULT)
    daemon.start()
    env = {name: value for name, value in os.environ.items() if not name.startswith("VMFORK_")}
    env |= {
        # With this Python first, whose modules the SDK needs.
        "PATH": f"{places.OUT / 'bin'}:{Path(sys.executable).parent}:{env['PATH']}",
        "PYTHONPATH": str(places.ROOT / "sdk" / "python" / "src"),
        "VMFORK_SOCKET": str(daemon.socket),
        "VMFORK_STATE": str(daemon.state),
        "NO_COLOR": "1",
        "VMFORK_NO_PROGRESS": "1",
        "LC_ALL": "C.UTF-8",
    }
    # The checkout, with the programs that are tested in place of those of `make build`.
    checkout = tmp_path / "checkout"
    checkout.mkdir()
    for entry in places.ROOT.iterdir():
        if entry.name != "out":
            (checkout / entry.name).symlink_to(entry)
    (checkout / "out").symlink_to(places.OUT)
    state = tmp_path / "shell"
    for step in steps:
        # `export` and `cd` of one step hold for the next ones.
        script = (
            f"[ -e {shlex.quote(str(state))} ] && . {shlex.quote(str(state))}\n{step.command}\ncode=$?\n"
            f"{{ export -p; printf 'cd %q\\n' \"$PWD\"; }} > {shlex.quote(str(state))}\nexit $code"
        )
        process = leftovers.spawn(
            ["bash", "-c", script],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env=env,
            cwd=checkout,
        )
        out, _ = process.communicate(timeout=600)
        text = out.decode("utf-8", "replace")
        where = f"{document}:{step.line}: $ {step.command}"
        assert process.returncode == 0, f"{where}\nended with {process.returncode}:\n{text}"
        printed = text.splitlines()
        assert same_shape(step.shown, printed), (
            f"{where}\nshows\n" + "\n".join(step.shown) + "\nbut printed\n" + "\n".join(printed)
        )


def test_blocks_are_found_and_joined() -> None:
    text = (
        "x\n```console\n$ echo a \\\n  b\na b\n$ true\n```\n"
        "<!-- not run: takes an hour -->\n```console\n$ rm -rf x\n```\n```sh\n$ no\n```\n"
    )
    steps, left_out = steps_of(text)
    assert [(step.command, step.shown) for step in steps] == [("echo a   b", ["a b"]), ("true", [])]
    assert left_out == ["takes an hour"]


@pytest.mark.parametrize(
    ("shown", "printed", "same"),
    [
        (["web.1  1  running  21 ms"], ["web.1   1 running 1,203 ms"], True),
        (["web.1  1  running  21 ms"], ["web.1   1 failed 1,203 ms"], False),
        (["Forked 3 of 3 in 31 ms, `web` paused 3.4 ms"], ["Forked 3 of 3 in 30 ms, `web` paused 2 ms"], True),
        (["a", "...", "z"], ["a", "b", "c", "z"], True),
        (["a", "...", "z"], ["a", "b", "c"], False),
        ([], ["anything"], True),
        (["a"], ["a", "b"], False),
    ],
)
def test_shapes(shown: list[str], printed: list[str], same: bool) -> None:
    assert same_shape(shown, printed) is same

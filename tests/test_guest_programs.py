"""The detectors detect: the tests' own guest programs, run here on the host."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from harness import programs

Ctl = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture(params=[1, 2])
def ctl(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Ctl]:
    program = programs.build("memcheck")
    socket = f"/tmp/memcheck-{tmp_path.name[-20:]}-{request.param}.sock"
    subprocess.run([program, "serve", socket, "16", str(request.param), "7"], check=True, timeout=60)

    def command(*words: object) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [str(program), "ctl", socket, *map(str, words)], capture_output=True, text=True, timeout=60
        )

    yield command
    command("quit")
    Path(socket).unlink(missing_ok=True)


def test_memcheck_accepts_what_it_wrote(ctl: Ctl) -> None:
    for _ in range(20):
        assert ctl("verify").returncode == 0
        assert ctl("resume").returncode == 0
    ctl("scribble", 3)
    assert ctl("verify-scribble", 3).returncode == 0
    assert ctl("verify-scribble", 4).returncode == 1
    ctl("resume")
    assert ctl("verify").returncode == 0


@pytest.mark.parametrize("byte", [0, 8, 4095, 4096 * 1234 + 77, (16 << 20) - 1])
def test_memcheck_sees_one_wrong_bit_anywhere(ctl: Ctl, byte: int) -> None:
    ctl("pause")
    assert ctl("corrupt", byte).returncode == 0
    seen = ctl("verify")
    assert seen.returncode == 1
    assert f"page {byte // 4096} " in seen.stdout
    assert "1 of 512 words wrong" in seen.stdout


def test_memcheck_writers_go_on(ctl: Ctl) -> None:
    first = ctl("pause").stdout
    assert ctl("status").stdout == first
    ctl("resume")
    ctl("verify")
    assert ctl("status").stdout != first


def test_touch_dirty_and_spin_say_what_they_did(tmp_path: Path) -> None:
    def run(name: str, *arguments: str) -> str:
        argv = [str(programs.build(name)), *arguments]
        return subprocess.run(argv, capture_output=True, text=True, timeout=60, check=True).stdout

    assert run("touch", "8").startswith("filled 8 MiB in ")
    region = str(tmp_path / "region")
    assert run("dirty", region, "4", "0", "scatter", "2", "1").startswith("wrote 2097152 bytes in ")
    before = Path(region).read_bytes()
    assert run("dirty", region, "4", "0", "seq", "1", "2").startswith("wrote 1048576 bytes in ")
    after = Path(region).read_bytes()
    changed = sum(before[i : i + 4096] != after[i : i + 4096] for i in range(0, 4 << 20, 4096))
    assert changed == 256
    assert run("spin", "once", "cpu", "1", "10").startswith("10 units in ")
    assert len(run("spin", "rate", "mem", "4", "0.5").splitlines()) >= 3


def test_diskio_reads_and_writes_what_it_says(tmp_path: Path) -> None:
    file = tmp_path / "span"

    def run(*arguments: object) -> subprocess.CompletedProcess[str]:
        argv = [programs.build("diskio"), file, *arguments]
        return subprocess.run(list(map(str, argv)), capture_output=True, text=True, timeout=60)

    done = run(4, "write", "seq", 2, 4, 1)
    assert done.stdout.startswith("4 operations, ") and done.stdout.endswith(" us each, 4194304 bytes\n"), done
    before = _pages(file)
    assert len(before) == 1024 and all(any(page) for page in before)
    assert run(4, "write", "random", 4, 100, 2).stdout.endswith(" 409600 bytes\n")
    # Some pages are met more than once.
    assert 80 <= sum(now != then for now, then in zip(_pages(file), before, strict=True)) <= 100
    assert run(4, "read", "random", 16, 500, 3).stdout.startswith("500 operations, ")
    # Beyond the file's end.
    assert run(64, "read", "random", 1, 500, 3).returncode == 1


def _pages(file: Path) -> list[bytes]:
    content = file.read_bytes()
    return [content[at : at + 4096] for at in range(0, len(content), 4096)]

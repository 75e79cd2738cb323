"""The tests' own watch works: it sees what is left behind, and ends what goes on for ever."""

from __future__ import annotations

import subprocess
import time
from pathlib import Path

import pytest

from harness import initrd, leftovers, processes
from harness.waits import LimitExceeded, eventually, limit


def test_a_process_that_outlives_its_parent_is_seen() -> None:
    process = leftovers.spawn(["sh", "-c", "sleep 98 & sleep 97 & exit 0"])
    assert process.wait(10) == 0
    found = eventually(lambda: [one for one in leftovers.orphans() if one.comm == "sleep"], 5, "the orphans")
    try:
        assert len(found) == 2
    finally:
        for one in found:
            one.kill()
    eventually(lambda: not any(one.is_alive() for one in found), 5, "they are gone")
    eventually(lambda: not leftovers.orphans(), 5, "and reaped")


def test_a_child_that_somebody_waits_for_is_no_orphan() -> None:
    process = leftovers.spawn(["sleep", "96"])
    try:
        assert process.pid not in {one.pid for one in leftovers.orphans()}
    finally:
        process.kill()
        process.wait(10)


def test_mounts_and_files_in_shared_memory_are_seen(tmp_path: Path) -> None:
    before = leftovers.Host.now()
    left = Path("/dev/shm/vmfork-test-left")
    left.write_bytes(b"")
    subprocess.run(["mount", "-t", "tmpfs", "left", tmp_path], check=True)
    try:
        added = leftovers.Host.now().added_since(before, tmp_path)
    finally:
        subprocess.run(["umount", tmp_path], check=True)
        left.unlink()
    assert {f"/dev/shm/{left.name}", f"mount {tmp_path}"} <= set(added)


def test_limits_end_what_goes_on_for_ever() -> None:
    with pytest.raises(LimitExceeded, match="sleeping took longer than its 0.1 s"), limit(0.1, "sleeping"):
        time.sleep(10)


def test_eventually_fails_with_what_it_saw() -> None:
    with pytest.raises(AssertionError, match=r"not within 0\.1 s: a miracle \(last: 0\)"):
        eventually(lambda: 0, 0.1, "a miracle")


def test_a_process_is_not_mistaken_for_another_of_its_number() -> None:
    process = leftovers.spawn(["sleep", "95"])
    seen = processes.read(process.pid)
    assert seen is not None
    assert seen.is_alive()
    process.kill()
    process.wait(10)
    assert not seen.is_alive()


def test_initrds_are_what_cpio_reads(tmp_path: Path) -> None:
    initrd.write(tmp_path / "i", {"init": (0o755, b"#!/bin/sh\n"), "x/y": (0o600, b"")})
    listing = subprocess.run(
        ["cpio", "-itv", "--quiet", "-F", tmp_path / "i"], check=True, capture_output=True, text=True, timeout=20
    ).stdout.splitlines()
    assert [line.split()[0] for line in listing] == ["-rwxr-xr-x", "-rw-------"]
    assert [line.split()[-1] for line in listing] == ["init", "x/y"]

"""The tests' own watch works: it sees what is left behind, and ends what goes on for ever."""

from __future__ import annotations

import itertools
import os
import shutil
import socket
import subprocess
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from harness import guests, initrd, leftovers, processes
from harness.daemon import Daemon
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


#: Users of no daemon of a test.
UIDS_OURS, UIDS_OTHERS = 1_700_000_000, 1_700_100_000


def _owned(folder: Path, *vm_ids: str, uid_base: int = UIDS_OURS) -> leftovers.Owned:
    return leftovers.Owned(folder, uid_base, vm_ids)


def test_mounts_and_files_in_shared_memory_are_seen_and_only_by_the_daemon_that_left_them(tmp_path: Path) -> None:
    ours, others = tmp_path / "one2", tmp_path / "one"
    before = leftovers.Host.now()
    left = Path(f"/dev/shm/left-{os.getpid()}")
    left.write_bytes(b"")
    os.chown(left, UIDS_OURS + 7, -1)
    for folder in (ours, others):
        folder.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "left", ours], check=True)
    try:
        now = leftovers.Host.now()
    finally:
        subprocess.run(["umount", ours], check=True)
        left.unlink()
    assert set(now.added_since(before, _owned(ours))) == {f"/dev/shm/{left.name}", f"mount {ours}"}
    assert now.added_since(before, _owned(others, uid_base=UIDS_OTHERS)) == []
    assert now.added_since(now, _owned(ours)) == []


def test_a_file_of_roots_in_shared_memory_counts_if_its_name_says_vmfork(tmp_path: Path) -> None:
    before = leftovers.Host({}, frozenset(), frozenset(), frozenset())
    now = leftovers.Host({"vmfork-x": 0, "sem.y": 0, "vmfork-z": 1000}, frozenset(), frozenset(), frozenset())
    assert now.added_since(before, _owned(tmp_path)) == ["/dev/shm/vmfork-x"]


def test_sockets_count_for_the_daemon_whose_folder_they_are_in(tmp_path: Path) -> None:
    before = leftovers.Host.now()
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(tmp_path / "s"))
        now = leftovers.Host.now()
    assert now.added_since(before, _owned(tmp_path)) == [f"socket {tmp_path}/s"]
    assert now.added_since(before, _owned(tmp_path / "other")) == []


def test_cgroups_count_for_the_daemon_whose_vms_they_were_of(tmp_path: Path) -> None:
    root = tmp_path / "cgroups"
    for vm in ("0123", "4567"):
        (root / "vmfork" / f"vm-{vm}").mkdir(parents=True)
    before = leftovers.Host({}, frozenset(), frozenset({f"{root}/vmfork"}), frozenset())
    now = leftovers.Host({}, frozenset(), frozenset(leftovers.cgroups(root)), frozenset())
    assert now.added_since(before, _owned(tmp_path, "0123", "89ab")) == [f"cgroup {root}/vmfork/vm-0123"]
    assert now.added_since(before, _owned(tmp_path, "89ab")) == []


def test_the_vms_of_a_daemon_are_known_from_its_journal_and_its_folders(tmp_path: Path) -> None:
    (tmp_path / "vms" / "4567").mkdir(parents=True)
    (tmp_path / "journal.jsonl").write_text(
        '{"event":"vm_created","vm":{"name":"web","id":"0123"}}\n'
        '{"event":"process_started","vm":"89ab","kind":"qemu","pid":7,"start_ticks":8}\ntorn{"id":\n'
    )
    assert leftovers.vm_ids(tmp_path) == {"0123", "4567", "89ab"}
    assert leftovers.vm_ids(tmp_path / "none") == set()


def test_a_process_counts_for_the_daemon_that_marked_it(tmp_path: Path) -> None:
    ours, others = tmp_path / "one", tmp_path / "one2"

    def orphan(number: int, owner: Path | None) -> None:
        """One that outlives its parent."""
        env = {**os.environ, **({leftovers.MARK: str(owner)} if owner else {})}
        assert leftovers.spawn(["sh", "-c", f"sleep {number} & exit 0"], env=env).wait(10) == 0

    orphan(91, ours)
    orphan(92, others)
    orphan(93, None)

    def found(state: Path) -> set[str]:
        return {one.command.split("\0")[1] for one in leftovers.processes_of(state) if one.comm == "sleep"}

    try:
        eventually(lambda: len([one for one in leftovers.orphans() if one.comm == "sleep"]) == 3, 5, "the orphans")
        assert found(ours) == {"91", "93"}
        assert found(others) == {"92", "93"}
        assert found(tmp_path) == {"93"}
    finally:
        for one in leftovers.orphans():
            if one.comm == "sleep":
                one.kill()
    eventually(lambda: not leftovers.orphans(), 5, "they are gone")


def test_a_daemon_is_blamed_for_its_own_and_not_for_its_neighbours(make_daemon: Callable[..., Daemon]) -> None:
    ours, neighbour = make_daemon().start(), make_daemon().start()
    env = {**os.environ, leftovers.MARK: str(ours.state)}
    assert leftovers.spawn(["sh", "-c", "sleep 94 & exit 0"], env=env).wait(10) == 0
    (left,) = eventually(lambda: [one for one in leftovers.orphans() if one.comm == "sleep"], 5, "the orphan")
    try:
        neighbour.close()
        with pytest.raises(AssertionError, match="sleep 94"):
            ours.close(within_s=0.5)
    finally:
        left.kill()
    assert not left.is_alive(), "what is left is ended"


def test_a_killed_daemon_leaves_its_holder_to_its_own_close(make_daemon: Callable[..., Daemon]) -> None:
    ours, neighbour = make_daemon().start(), make_daemon().start()
    ours.kill()
    holder = ours.holder()
    assert holder is not None and holder.is_alive()
    assert holder.pid not in {one.pid for one in leftovers.processes_of(ours.state)}
    # Whether it runs or sleeps may change meanwhile.
    named = f"holder {holder.pid} (vmfork-holder, "
    assert any(left.startswith(named) for left in ours.left_behind(0.2))
    neighbour.close()
    assert holder.is_alive(), "it is no neighbour's"
    ours.close()
    assert not holder.is_alive(), "its own daemon's close ends it"


def test_daemons_run_qemus_as_different_users(make_daemon: Callable[..., Daemon]) -> None:
    ranges = sorted(make_daemon().uid_base for _ in range(20))
    assert all(after - before >= leftovers.UIDS for before, after in itertools.pairwise(ranges))


def test_a_store_is_linked_whole_and_no_descriptor_is_there_before_its_chunks(tmp_path: Path) -> None:
    source, store = tmp_path / "source", tmp_path / "store"
    names = ["format", "chunks/1f/1f00", "chunks/2a/2a00", "snapshots/x/descriptor.json", "snapshots/x/1.table"]
    for name in names:
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        (source / name).write_text(name)
    order = [str(path.relative_to(source)) for path in guests._in_order(source)]
    assert order[-1] == "snapshots/x/descriptor.json" and set(order) == set(names)
    guests.link_into(store, source)
    # A daemon may have freed one meanwhile.
    (store / "chunks/1f/1f00").unlink()
    guests.link_into(store, source)
    for name in names:
        assert (store / name).samefile(source / name)


def test_who_asks_for_copies_gets_them_also_of_what_was_linked(tmp_path: Path) -> None:
    source, store = tmp_path / "source", tmp_path / "store"
    for name in ("chunks/1f/1f00", "snapshots/x/descriptor.json"):
        (source / name).parent.mkdir(parents=True)
        (source / name).write_text(name)
    guests.link_into(store, source)
    guests.link_into(store, source, links=False)
    for path in (path for path in source.rglob("*") if path.is_file()):
        copy = store / path.relative_to(source)
        assert not copy.samefile(path) and copy.stat().st_nlink == 1
        assert copy.read_text() == path.read_text()
    # What was copied stays a copy.
    before = (store / "chunks/1f/1f00").stat().st_ino
    for links in (True, False):
        guests.link_into(store, source, links=links)
        assert (store / "chunks/1f/1f00").stat().st_ino == before


def test_threads_that_copy_the_same_file_do_not_disturb_each_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, store = tmp_path / "source", tmp_path / "store"
    source.mkdir()
    (source / "format").write_text("1")
    both = threading.Barrier(2)
    copy2 = shutil.copy2

    def copy_together(path: Path, part: Path) -> None:
        copy2(path, part)
        both.wait(20)

    monkeypatch.setattr(shutil, "copy2", copy_together)
    with ThreadPoolExecutor(2) as pool:
        copying = [pool.submit(guests.link_into, store, source, links=False) for _ in range(2)]
        for one in copying:
            one.result(30)
    assert [path.name for path in store.iterdir()] == ["format"]


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

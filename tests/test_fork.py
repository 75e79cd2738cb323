"""Forking: names, numbers, families of any shape, and what does not fit."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import vmfork

from harness import guests
from harness.cli import Cli
from harness.daemon import Daemon
from harness.waits import eventually

#: The first fork of a VM that booted is part of it. Its identity is another than that of one from a
#: store.
BOOTS = True


def test_the_booted_vm_has_an_identity_too(booted: vmfork.VM) -> None:
    assert booted.exec("cat /run/vmfork/vmid").stdout_text.strip() == "0"
    assert booted.exec("hostname").stdout_text.strip() == booted.name


def test_a_clone_goes_on_where_the_parent_stood(vm: vmfork.VM) -> None:
    vm.exec("echo $$ > /run/secret; (while :; do date +%s.%N > /run/tick; sleep 0.01; done) >/dev/null 2>&1 &")
    vm.write_file("/run/data", b"loaded")
    boot_id = vm.exec("cat /proc/sys/kernel/random/boot_id").stdout
    secret = vm.exec("cat /run/secret").stdout
    with vm.fork(2) as clones:
        assert len(clones) == 2
        for clone in clones:
            assert clone.exec("cat /run/secret").stdout == secret
            assert clone.read_file("/run/data") == b"loaded"
            assert clone.exec("cat /proc/sys/kernel/random/boot_id").stdout == boot_id
            tick = clone.read_file("/run/tick")
            eventually(lambda clone=clone, tick=tick: clone.read_file("/run/tick") not in (tick, b""), 10, "it ticks on")
    assert vm.exec("cat /run/secret").stdout == secret


def test_what_one_writes_no_other_sees(vm: vmfork.VM) -> None:
    with vm.fork(3) as clones:
        for number, clone in enumerate([vm, *clones]):
            clone.write_file("/run/mine", f"{number}")
        assert [clone.read_file("/run/mine") for clone in [vm, *clones]] == [b"0", b"1", b"2", b"3"]


def test_the_reply_has_pause_stages_and_a_time_for_each(vm: vmfork.VM) -> None:
    with vm.fork(3) as fork:
        assert (fork.requested, fork.granted) == (3, 3)
        assert [result.vmid for result in fork.results] == [1, 2, 3]
        assert 0 < fork.pause_ms < fork.total_ms
        stages = fork.stages
        inside = stages.stop_ms + stages.disks_ms + stages.freeze_ms + stages.state_ms + stages.cont_ms
        assert 0 < inside <= fork.pause_ms * 1.05 + 0.2
        for result in fork.results:
            assert result.ready_ms is not None
            assert 0 < result.ready_ms <= fork.total_ms * 1.05
            assert result.state is vmfork.VmState.RUNNING


def test_default_names_take_the_next_free_numbers(vm: vmfork.VM) -> None:
    with vm.fork(2) as first:
        assert [clone.name for clone in first] == [f"{vm.name}.1", f"{vm.name}.2"]
        with vm.fork(2) as second:
            assert [clone.name for clone in second] == [f"{vm.name}.3", f"{vm.name}.4"]


def test_given_names(vm: vmfork.VM) -> None:
    with vm.fork(2, names=["left", "right"]) as clones:
        assert [clone.name for clone in clones] == ["left", "right"]
        assert clones[1].exec("hostname").stdout_text == "right\n"
        with pytest.raises(vmfork.Conflict, match="left"):
            vm.fork(1, names=["left"])
        with pytest.raises(vmfork.Conflict, match="left"):
            vm.fork(2, names=["left", "middle"], all_or_nothing=True)
        # Some clones can be named: the others are an error each.
        with vm.fork(2, names=["left", "middle"]) as mixed:
            assert [clone.name for clone in mixed] == ["middle"]
            assert [type(error) for error in mixed.errors] == [vmfork.Conflict]
    for names in (["one"], ["same", "same"], ["a/b", "c"]):
        with pytest.raises(vmfork.BadRequest):
            vm.fork(2, names=names)


@pytest.mark.parametrize("count", [0, 1025])
def test_counts_that_cannot_be(vm: vmfork.VM, count: int) -> None:
    with pytest.raises(vmfork.BadRequest):
        vm.fork(count)


@pytest.mark.slow
def test_clones_of_clones_four_deep(vm: vmfork.VM, client: vmfork.Client) -> None:
    line = [vm]
    for depth in range(1, 5):
        line[-1].write_file(f"/run/at-{depth}", f"written by {depth - 1}")
        line.append(line[-1].fork(1).raise_for_errors()[0])
        line[-2].write_file(f"/run/late-{depth}", "after the fork")
    for depth, clone in enumerate(line):
        for other in range(1, 5):
            there = clone.exec(["cat", f"/run/at-{other}"]).exit_code == 0
            assert there == (other <= depth + 1), (depth, other)
            late = clone.exec(["test", "-e", f"/run/late-{other}"]).exit_code == 0
            assert late == (other == depth + 1), (depth, other)
    assert line[4].inspect().parent == line[3].name
    assert line[4].inspect().family == line[1].inspect().family
    # The middle of the line may go; its descendants need nothing of it.
    line[2].remove(force=True)
    line[1].remove(force=True)
    assert line[4].read_file("/run/at-4") == b"written by 3"
    assert line[4].exec("cat $(which sh) | wc -c").exit_code == 0


@pytest.mark.slow
def test_siblings_and_cousins(vm: vmfork.VM) -> None:
    vm.exec("head -c 20000000 /dev/urandom > /dev/shm/data; sha256sum /dev/shm/data > /run/sum", check=True)
    families = [vm.fork(2).raise_for_errors(), vm.fork(2).raise_for_errors()]
    cousins = [clone.fork(2).raise_for_errors() for family in families for clone in family]
    everybody = [vm, *(c for f in families for c in f), *(c for f in cousins for c in f)]
    assert len(everybody) == 13
    with ThreadPoolExecutor(4) as pool:
        codes = list(pool.map(lambda one: one.exec(["sha256sum", "-c", "/run/sum"]).exit_code, everybody))
    assert codes == [0] * 13


@pytest.mark.slow
@pytest.mark.limit(400)
@pytest.mark.parametrize("forks", [6, pytest.param(20, marks=pytest.mark.soak)])
def test_a_parent_forked_again_and_again_while_older_clones_live(vm: vmfork.VM, forks: int) -> None:
    vm.exec(f"head -c {forks * 1_500_000} /dev/urandom > /dev/shm/data", check=True)
    clones: list[tuple[int, vmfork.VM, str]] = []
    for turn in range(forks):
        vm.exec(
            f"echo {turn} > /run/turn; head -c 300000 /dev/urandom | dd of=/dev/shm/data bs=100000 seek={turn * 14} "
            "conv=notrunc 2>/dev/null; sha256sum < /dev/shm/data > /run/sum",
            check=True,
        )
        digest = vm.exec("cat /run/sum").stdout_text
        clones.append((turn, vm.fork(1).raise_for_errors()[0], digest))
    for turn, clone, digest in clones:
        assert clone.exec("cat /run/turn; sha256sum < /dev/shm/data").stdout_text == f"{turn}\n{digest}"
    # The old go, the young stay whole.
    old, young = clones[:-5], clones[-5:]
    assert old
    for _turn, clone, _digest in old:
        clone.remove(force=True)
    for _turn, clone, digest in young:
        assert clone.exec("sha256sum < /dev/shm/data").stdout_text == digest


@pytest.mark.slow
def test_memory_of_dead_relatives_is_given_back(vm: vmfork.VM, client: vmfork.Client) -> None:
    vm.exec("head -c 100000000 /dev/urandom > /dev/shm/data", check=True)
    clones = [vm.fork(1).raise_for_errors()[0] for _ in range(4)]
    for clone in clones:
        clone.exec("cat /dev/shm/data > /dev/null", check=True)
    held = client.host().cache_bytes
    assert held > 90_000_000
    snapshots = client.host().snapshots
    for clone in clones:
        clone.remove(force=True)
    vm.remove(force=True)
    eventually(lambda: client.host().snapshots < snapshots, 20, "snapshots that no VM needs are gone")
    eventually(lambda: client.host().cache_bytes < held - 90_000_000, 20, "their caches are given back")


@pytest.mark.slow
def test_clones_outlive_their_parent(vm: vmfork.VM) -> None:
    vm.exec("head -c 50000000 /dev/urandom > /dev/shm/data; sha256sum /dev/shm/data > /run/sum", check=True)
    clones = vm.fork(2).raise_for_errors()
    vm.kill()
    for clone in clones:
        assert clone.exec(["sha256sum", "-c", "/run/sum"]).exit_code == 0


def test_two_forks_of_one_parent_at_once(vm: vmfork.VM) -> None:
    with ThreadPoolExecutor(4) as pool:
        forks = list(pool.map(lambda _: vm.fork(2), range(4)))
    names = [clone.name for fork in forks for clone in fork.raise_for_errors()]
    assert len(set(names)) == 8
    assert vm.exec("echo well").stdout_text == "well\n"


def test_sixteen_at_once(vm: vmfork.VM) -> None:
    with vm.fork(16) as clones, ThreadPoolExecutor(8) as pool:
        assert clones.granted == 16
        assert list(pool.map(lambda clone: clone.exec("echo here").stdout_text, clones)) == ["here\n"] * 16


@pytest.mark.slow
def test_two_vcpus(client: vmfork.Client, image: str) -> None:
    with guests.warm(client, image, memory_mib=256, cpus=2) as vm:
        busy = "(while :; do :; done) >/dev/null 2>&1 & (while :; do :; done) >/dev/null 2>&1 &"
        vm.exec(busy, check=True)
        with vm.fork(2) as clones:
            for clone in clones:
                assert clone.exec("nproc").stdout_text == "2\n"


# -- what does not fit ---------------------------------------------------------------------------


@pytest.fixture
def small_host(
    client: vmfork.Client, make_daemon: Callable[..., Daemon], image: str, need: Callable[[object, str], None]
) -> Iterator[tuple[vmfork.Client, vmfork.VM]]:
    """A daemon that may hand out 1.5 GiB, with a VM of 256 MiB; clones are accounted in full."""
    host = client.host()
    reserve_mib = (host.memory_available_bytes >> 20) - 1536
    need(reserve_mib >= 0, "1.5 GiB of free memory")
    daemon = make_daemon("--memory-reserve-mib", str(reserve_mib), "--clone-growth-percent", "100", "--pool", "0")
    daemon.add_image(image)
    daemon.start()
    with daemon.client() as small:
        yield small, guests.warm(small, image, name="tight", memory_mib=256)


@pytest.mark.alone
@pytest.mark.limit(300)
def test_what_fits_is_started_and_the_rest_is_an_error_each(small_host: tuple[vmfork.Client, vmfork.VM]) -> None:
    client, vm = small_host
    fork = vm.fork(16)
    assert 1 <= fork.granted < 16
    assert len(fork) == fork.granted
    assert len(fork.errors) == 16 - fork.granted
    for error in fork.errors:
        assert isinstance(error, vmfork.NoCapacity)
        assert re.search(r"\d+(\.\d+)? ?(MiB|GiB|bytes)", str(error)), error
        assert error.remedy
    for clone in fork:
        assert clone.exec("echo here").stdout_text == "here\n"
    # A name whose clone was refused is free; and what ends makes room.
    for clone in fork:
        clone.remove(force=True)
    assert eventually(lambda: vm.fork(1, names=[fork.results[-1].name]).granted, 20, "there is room again") == 1


@pytest.mark.alone
@pytest.mark.limit(300)
def test_all_or_nothing_starts_none(small_host: tuple[vmfork.Client, vmfork.VM]) -> None:
    client, vm = small_host
    with pytest.raises(vmfork.NoCapacity, match=r"\d+"):
        vm.fork(16, all_or_nothing=True)
    assert [other.name for other in client.vms()] == ["tight"]
    assert vm.exec("echo well").stdout_text == "well\n"
    assert vm.fork(1, all_or_nothing=True).granted == 1


def test_a_run_that_cannot_fit_is_refused_with_figures(client: vmfork.Client, image: str) -> None:
    huge_mib = min(262144, (client.host().memory_total_bytes >> 20) * 4 // 2 * 2)
    with pytest.raises(vmfork.NoCapacity) as info:
        client.run(image, memory_mib=huge_mib)
    assert re.search(r"\d+(\.\d+)? ?(MiB|GiB|bytes)", str(info.value)), info.value


def test_fork_by_the_command_line(cli: Cli, vm: vmfork.VM, daemon: Daemon) -> None:
    text = cli.text("fork", vm.name, "-n", "2")
    assert text.splitlines()[0].split() == ["VM", "VMID", "STATE", "READY"]
    assert f"{vm.name}.1" in text
    document = cli.json("fork", vm.name, "-n", "1", "--name", "only")
    assert document["schema"] == "vmfork/1"
    assert document["granted"] == 1
    assert document["pause_ms"] > 0
    (clone,) = document["clones"]
    assert (clone["name"], clone["vmid"], clone["state"]) == ("only", 1, "running")
    assert clone["ready_ms"] > 0

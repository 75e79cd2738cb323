"""What is on a disk after a kill: of a QEMU, the daemon, or the host that pages come from.

A program in the guest writes pages one after the other, each durable before the next. The number of
the last one says what the whole disk must hold. The moment of each kill is random, within the time
that a fork takes.
"""

from __future__ import annotations

import contextlib
import random
import re
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest
import vmfork

from harness import guests, processes
from harness.cli import Cli
from harness.cluster import Cluster, cluster_of
from harness.daemon import Daemon
from harness.waits import eventually

pytestmark = [pytest.mark.slow, pytest.mark.limit(1800)]

MIB = 1 << 20
#: Pages that are written in turn.
SLOTS = 257
#: A fork into two clones is over in less.
FORK_S = 0.3
#: All that a clone on another host needs has come in less.
ARRIVAL_S = 6.0

WRITER = f"""
import mmap, os
disk = os.open("/dev/vdb", os.O_RDWR | os.O_DIRECT | os.O_DSYNC)
told = os.open("/dev/console", os.O_WRONLY)
page = mmap.mmap(-1, 4096)
number = 0
while True:
    number += 1
    page[:] = number.to_bytes(8, "little") * 512
    assert os.pwrite(disk, page, number % {SLOTS} * 4096) == 4096
    os.write(told, b"durable %d\\n" % number)
"""

#: Prints the number that each page holds, or -1 for a page that holds more than one.
READER = f"""
import mmap, os
disk = os.open("/dev/vdb", os.O_RDONLY | os.O_DIRECT)
page = mmap.mmap(-1, 4096)
for slot in range({SLOTS}):
    assert os.preadv(disk, [page], slot * 4096) == 4096
    number = int.from_bytes(page[:8], "little")
    print(number if page[:] == page[:8] * 512 else -1)
"""


def newest(numbers: list[int]) -> int:
    """The last write that a disk holds, with all before it and nothing of a later one."""
    assert len(numbers) == SLOTS
    last = max(numbers)
    for slot, number in enumerate(numbers):
        assert number == last - (last - slot) % SLOTS, f"slot {slot} has {number}, the newest is {last}"
    return last


def newest_of_file(disk: Path) -> int:
    with disk.open("rb") as file:
        pages = [file.read(4096) for _ in range(SLOTS)]
    return newest([int.from_bytes(page[:8], "little") if page == page[:8] * 512 else -1 for page in pages])


def newest_in(vm: vmfork.VM) -> int:
    """The same, as the VM reads it. Its program still writes, so it is stopped meanwhile."""
    read = "kill -STOP $(cat /run/writer) && python3 /run/reader.py && kill -CONT $(cat /run/writer)"
    return newest([int(line) for line in vm.exec(read, check=True, timeout_s=60).stdout_text.split()])


def durable(daemon: Daemon, vm_id: str) -> int:
    """What the writer in a VM has reported. The VM may have ended."""
    (log,) = (daemon.state / "vms" / vm_id).glob("*log")
    return max((int(found) for found in re.findall(rb"durable (\d+)\r?\n", log.read_bytes())), default=0)


def begin(vm: vmfork.VM) -> None:
    vm.write_file("/run/writer.py", WRITER)
    vm.write_file("/run/reader.py", READER)
    vm.exec("nohup python3 /run/writer.py >/run/writer.log 2>&1 & echo $! >/run/writer", check=True)


def ended(fork: Future[vmfork.ForkResult]) -> vmfork.ForkResult | None:
    """What a fork has brought, if it did not fail as a whole."""
    with contextlib.suppress(vmfork.VmforkError):
        return fork.result(60)
    return None


@pytest.fixture
def host(make_daemon: Callable[..., Daemon], image: str) -> Iterator[Daemon]:
    """A daemon with a volume."""
    daemon = make_daemon()
    daemon.add_image(image)
    daemon.start()
    with daemon.client() as client:
        client.volumes.create("db", size_bytes=16 * MIB)
    yield daemon
    daemon.stop()


def writing(daemon: Daemon, client: vmfork.Client, image: str, name: str) -> tuple[vmfork.VM, str]:
    """A VM that writes to the volume, and its id."""
    vm = guests.warm(client, image, name=name, disks=guests.DISKS)
    client.volumes.attach("db", vm, disk="data")
    eventually(lambda: vm.exec("blockdev --getsize64 /dev/vdb").stdout_text.strip() == str(16 * MIB), 10, "it sees it")
    begin(vm)
    vm_id = vm.inspect().id
    eventually(lambda: durable(daemon, vm_id) > SLOTS, 60, "it writes")
    return vm, vm_id


@pytest.mark.parametrize("rounds", [4, pytest.param(30, marks=pytest.mark.soak)])
def test_what_was_acknowledged_survives_a_kill_of_the_daemon(
    host: Daemon, image: str, tmp_path: Path, seed: int, rounds: int
) -> None:
    dice, cli, file = random.Random(seed), Cli(host), tmp_path / "disk.img"
    for round_ in range(rounds):
        with host.client() as client, ThreadPoolExecutor(1) as pool:
            vm, vm_id = writing(host, client, image, f"writer-{round_}")
            for _ in range(dice.randrange(3)):
                vm.fork(1).raise_for_errors()
            before = durable(host, vm_id)
            fork = pool.submit(vm.fork, 2)
            time.sleep(dice.uniform(0, FORK_S))
            host.kill()
            ended(fork)
            acknowledged = durable(host, vm_id)
            host.start()
            volume = client.volumes.get("db")
            assert volume.vms == () and volume.reason is None
            client.export_disk(volume.disk_id, file)
            assert newest_of_file(file) >= acknowledged
            for left in client.disks():
                if left.state is vmfork.DiskState.LEFT and left.name == "data":
                    client.export_disk(left.id, file)
                    # A disk of a clone is of the instant of its fork.
                    assert newest_of_file(file) > SLOTS
                    assert left.vm is not None
            cli("disk", "prune")
            assert before > SLOTS


@pytest.mark.parametrize("rounds", [4, pytest.param(30, marks=pytest.mark.soak)])
def test_what_was_acknowledged_survives_a_kill_of_the_parents_qemu(
    host: Daemon, image: str, tmp_path: Path, seed: int, rounds: int
) -> None:
    dice, file = random.Random(seed), tmp_path / "disk.img"
    with host.client() as client, ThreadPoolExecutor(1) as pool:
        for round_ in range(rounds):
            vm, vm_id = writing(host, client, image, f"writer-{round_}")
            qemu, before = host.qemu(vm), durable(host, vm_id)
            fork = pool.submit(vm.fork, 2)
            time.sleep(dice.uniform(0, FORK_S))
            qemu.kill()
            result = ended(fork)
            eventually(lambda: client.volumes.get("db").vms == (), 20, "the volume is given back")
            client.export_disk(client.volumes.get("db").disk_id, file)
            assert newest_of_file(file) >= durable(host, vm_id)
            for clone in result or ():
                first = newest_in(clone)
                assert first >= before
                eventually(lambda clone=clone, first=first: newest_in(clone) > first, 30, "it writes on")
                clone.remove(force=True)
            vm.remove(force=True)
            assert client.vms(ended=True) == []


@pytest.mark.parametrize("rounds", [4, pytest.param(30, marks=pytest.mark.soak)])
def test_a_clone_that_is_killed_as_it_starts_takes_nothing_along(
    make_daemon: Callable[..., Daemon], image: str, seed: int, rounds: int
) -> None:
    # Without a pool each QEMU is the parent's or a clone's.
    daemon = make_daemon("--pool", "0")
    daemon.add_image(image)
    daemon.start()
    dice = random.Random(seed)
    with daemon.client() as client, ThreadPoolExecutor(1) as pool:
        client.volumes.create("db", size_bytes=16 * MIB)
        vm, vm_id = writing(daemon, client, image, "writer")
        parent = daemon.qemu(vm).pid
        for _ in range(rounds):
            before = durable(daemon, vm_id)
            fork = pool.submit(vm.fork, 3)

            def of_clones() -> list[processes.Process]:
                own = {parent, vm.inspect().keeper_pid}
                return [one for one in daemon.processes() if one.is_qemu and one.pid not in own]

            eventually(of_clones, 20, "a clone's QEMU runs")
            time.sleep(dice.uniform(0, FORK_S))
            eventually(of_clones, 20, "a clone's QEMU runs")
            dice.choice(of_clones()).kill()
            result = ended(fork)
            assert result is not None
            whole = 0
            for clone in result:
                with contextlib.suppress(vmfork.VmforkError):
                    assert newest_in(clone) >= before
                    whole += 1
            assert whole >= 2, [str(one.error) for one in result.results]
            for one in client.vms(ended=True):
                if one.name != vm.name:
                    one.remove(force=True)
            seen = durable(daemon, vm_id)
            eventually(lambda seen=seen: durable(daemon, vm_id) > seen, 20, "the parent writes on")
        assert newest_in(vm) >= seen
        vm.remove(force=True)
        client.volumes.remove("db")
    daemon.stop()


@pytest.fixture(scope="module")
def pair(image: str) -> Iterator[Cluster]:
    with cluster_of(2, image) as cluster:
        yield cluster


@pytest.mark.parametrize("rounds", [4, pytest.param(20, marks=pytest.mark.soak)])
def test_a_clone_never_reads_what_is_wrong_when_its_source_is_killed(pair: Cluster, seed: int, rounds: int) -> None:
    dice = random.Random(seed)
    source, (here, there) = pair.daemons[0], pair.clients
    outcomes: list[str] = []
    for round_ in range(rounds):
        disks = [vmfork.NewDisk.blank("data", 16 * MIB)]
        vm = here.run(pair.image, name=f"source-{round_}", memory_mib=128, disks=disks)
        begin(vm)
        vm_id = vm.inspect().id
        eventually(lambda: durable(source, vm_id) > SLOTS, 60, "it writes")
        before, name = durable(source, vm_id), f"clone-{round_}"
        with ThreadPoolExecutor(1) as pool:
            fork = pool.submit(vm.fork, 1, names=[name], hosts=["h1"], hydrate_mib_per_s=1000)
            time.sleep(dice.uniform(0, ARRIVAL_S))
            source.kill()
            ended(fork)
        try:
            assert newest_in(there.vm(name)) >= before
            outcomes.append("whole")
        except vmfork.VmforkError as error:
            outcomes.append(type(error).__name__)
        source.start()
        pair.settle()
        for one in there.vms(ended=True):
            one.remove(force=True)
        Cli(source)("disk", "prune")
    print(outcomes)

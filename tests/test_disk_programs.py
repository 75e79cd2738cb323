"""Programs whose own checks find a wrong byte on a disk, in VMs that are forked while they write.

fio verifies what it wrote, fsx what it reads, PostgreSQL its tables and its log. Each of them runs
on in its parent and in every clone, with what it knows in memory and what it wrote on the disk.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import vmfork

from harness import images, places
from harness.daemon import Daemon
from harness.waits import eventually

MIB = 1 << 20

pytestmark = pytest.mark.slow

#: Writes every block of the disk once, in random order, then reads all and compares checksums.
FIO = (
    "fio --name=f --filename=/dev/vdc --size=16m --bs=4k --rw=randwrite --direct=1 --ioengine=libaio"
    " --iodepth=8 --rate_iops={iops} --loops={loops} --verify=crc32c --verify_fatal=1 --randseed={seed}"
)

POSTGRES = "/usr/lib/postgresql/15/bin"
SERVER = f"{POSTGRES}/pg_ctl -D /mnt/data/pg -w -t 120 -l /mnt/data/pg.log -o '-k /run/pg -h \"\"'"
BENCH = "pgbench -h /run/pg -c 4 -T 3600 bench >/run/pg/bench.log 2>&1 </dev/null & echo $! >/run/pg/bench.pid"
#: Each transaction of pgbench adds one amount to an account, a teller and a branch, and notes it.
SUMS = """select array[
    (select sum(abalance) from pgbench_accounts), (select sum(tbalance) from pgbench_tellers),
    (select sum(bbalance) from pgbench_branches), (select coalesce(sum(delta), 0) from pgbench_history)]"""


@pytest.fixture(scope="module")
def image(need: Callable[[object, str], None]) -> str:
    try:
        return images.build(images.PROGRAMS)
    except RuntimeError as error:
        # Its packages are not among those that all tests need.
        need(False, f"the image of fio and PostgreSQL: {error}")
        raise


@pytest.fixture
def start(daemon: Daemon, client: vmfork.Client, image: str) -> Callable[[], vmfork.VM]:
    """Boots a VM with a file system at /mnt/data and a second disk for raw bytes."""

    def start() -> vmfork.VM:
        disks = [vmfork.NewDisk.blank("data", 1024 * MIB), vmfork.NewDisk.blank("raw", 64 * MIB)]
        vm = client.run(image, name="programs", memory_mib=512, disks=disks)
        vm.exec("mkdir -p /mnt/data && mount /dev/vdb /mnt/data", check=True)
        return vm

    return start


def fork_at_random_moments(vm: vmfork.VM, forks: int, seed: int, most_s: float) -> list[vmfork.VM]:
    """Also a clone now and then. → all clones."""
    moments, clones = random.Random(seed), list[vmfork.VM]()
    for _ in range(forks):
        time.sleep(moments.uniform(0, most_s))
        parent = moments.choice([vm, vm, *clones[-1:]])
        clones += parent.fork(1).raise_for_errors()
    return clones


def each(does: Callable[[vmfork.VM], None], vms: list[vmfork.VM]) -> None:
    with ThreadPoolExecutor(3) as pool:
        list(pool.map(does, vms))


# -- fio -----------------------------------------------------------------------------------------


@pytest.mark.limit(1200)
@pytest.mark.parametrize(("forks", "loops"), [(3, 1), pytest.param(20, 3, marks=pytest.mark.soak)])
def test_fio_verifies_what_it_wrote_before_and_after_forks(
    start: Callable[[], vmfork.VM], seed: int, forks: int, loops: int
) -> None:
    """In the parent and in every clone, each forked while fio writes."""
    vm = start()
    fio = FIO.format(iops=300, loops=loops, seed=seed)
    vm.exec(f"(nohup {fio} >/run/fio.log 2>&1; echo $? >/run/fio.rc) </dev/null >/dev/null 2>&1 &", check=True)
    eventually(lambda: written(vm) > MIB, 60, "fio writes")
    clones = fork_at_random_moments(vm, forks, seed, 3.0)
    assert vm.exec("test -e /run/fio.rc").exit_code == 1, "fio ended before the last fork"

    def verified(member: vmfork.VM) -> None:
        eventually(lambda: member.exec("cat /run/fio.rc 2>/dev/null").stdout, 600, "fio ends", every_s=0.5)
        code, log = (member.exec(f"cat /run/fio.{end}", check=True).stdout_text for end in ("rc", "log"))
        assert code.strip() == "0", f"{member.name}: fio ended with {code}: {log}"
        # It has read all that it wrote.
        assert f"io={16 * loops}.0MiB" in log.partition("READ:")[2], log

    each(verified, [vm, *clones])


def written(vm: vmfork.VM) -> int:
    return vm.inspect().disks[1].written_bytes


# -- PostgreSQL ----------------------------------------------------------------------------------


@pytest.fixture
def bank(start: Callable[[], vmfork.VM]) -> Iterator[vmfork.VM]:
    """A VM whose PostgreSQL serves a load."""
    vm = start()
    vm.exec("mkdir -p /run/pg /mnt/data/pg && chown postgres /run/pg /mnt/data /mnt/data/pg", check=True)
    postgres(vm, f"{POSTGRES}/initdb -D /mnt/data/pg -E UTF8 --locale=C")
    postgres(vm, f"{SERVER} start >/dev/null")
    postgres(vm, "createdb -h /run/pg bench && pgbench -h /run/pg -i -q bench")
    postgres(vm, BENCH)
    yield vm


def postgres(vm: vmfork.VM, command: str, *, timeout_s: float = 300) -> str:
    """What it prints, as the user who owns the database."""
    done = vm.exec(["runuser", "-u", "postgres", "--", "sh", "-c", f"cd /mnt/data && {command}"], timeout_s=timeout_s)
    assert done.exit_code == 0, f"{vm.name}: {command}: {done.stdout_text}{done.stderr_text}"
    return done.stdout_text


def query(vm: vmfork.VM, statement: str) -> str:
    return postgres(vm, f"psql -h /run/pg -XAtq bench <<'END'\n{statement};\nEND").strip()


def transactions(vm: vmfork.VM) -> int:
    return int(query(vm, "select count(*) from pgbench_history"))


@pytest.mark.limit(1800)
@pytest.mark.parametrize("forks", [2, pytest.param(20, marks=pytest.mark.soak)])
def test_postgresql_under_load_is_forked(bank: vmfork.VM, seed: int, forks: int) -> None:
    """It goes on, its tables are whole, and after a crash its log repairs them."""
    eventually(lambda: transactions(bank) > 0, 60, "it serves")
    clones = fork_at_random_moments(bank, forks, seed, 3.0)

    def goes_on_and_is_whole(member: vmfork.VM) -> None:
        before = transactions(member)
        eventually(lambda: transactions(member) > before, 120, f"{member.name} serves on", every_s=0.5)
        postgres(member, "kill $(cat /run/pg/bench.pid)")
        whole(member)
        acknowledged = transactions(member)
        # As in a crash: its processes do not learn of it, and write nothing more.
        postgres(member, "pkill -9 -o -x postgres; while pgrep -x postgres >/dev/null; do sleep 0.1; done")
        # What it reads comes from the disk, and not from the guest's page cache.
        member.exec("sync && echo 3 >/proc/sys/vm/drop_caches", check=True, timeout_s=120)
        postgres(member, f"{SERVER} start >/dev/null")
        assert transactions(member) >= acknowledged, f"{member.name} has lost what it had acknowledged"
        whole(member)
        postgres(member, f"{SERVER} stop >/dev/null")
        member.exec("umount /mnt/data && e2fsck -fn /dev/vdb", check=True, timeout_s=120)

    each(goes_on_and_is_whole, [bank, *clones])


def whole(vm: vmfork.VM) -> None:
    """No index or table is damaged, and no transaction is there in part."""
    postgres(vm, f"{POSTGRES}/pg_amcheck -h /run/pg --install-missing --heapallindexed bench")
    sums = query(vm, SUMS).strip("{}").split(",")
    assert len(set(sums)) == 1, f"{vm.name}: transactions are there in part: {sums}"


# -- file systems --------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def tools(need: Callable[[object, str], None]) -> Path:
    """The folder of fsx and pjdfstest."""
    found = sorted(places.CACHE.glob("guest-programs-*/bin/pjdfstest"))
    need(found, "fsx and pjdfstest (mk/guest-programs.sh builds them)")
    return found[-1].parent


#: What fsx reads comes from the disk, and not from the guest's page cache.
DROP = "while :; do sync; echo 3 >/proc/sys/vm/drop_caches; sleep 0.2; done >/dev/null 2>&1 </dev/null &"
_WEIGHTS = "[weights]\nread = 20\nwrite = 20\nmapread = 10\nmapwrite = 10\nfsync = 1\n"
FSX = {
    "file": ("/mnt/data/fsx", f"flen = 1048576\n{_WEIGHTS}invalidate = 1\ntruncate = 5\npunch_hole = 5\n"),
    "device": ("/dev/vdc", f"flen = 1048576\nblockmode = true\n{_WEIGHTS}truncate = 0\n"),
}


@pytest.mark.limit(1200)
@pytest.mark.parametrize(("forks", "operations"), [(2, 3000), pytest.param(10, 60000, marks=pytest.mark.soak)])
def test_fsx_goes_on_in_clones(
    start: Callable[[], vmfork.VM], tools: Path, seed: int, forks: int, operations: int
) -> None:
    """It compares what it reads with what it knows, in a file and on a device."""
    vm = start()
    vm.copy_in(tools / "fsx", "/run/fsx", mode=0o755)
    for name, (path, config) in FSX.items():
        vm.write_file(f"/run/{name}.toml", config.encode())
        fsx = f"/run/fsx -P /run -f /run/{name}.toml -S {seed} -N {operations} {path}"
        vm.exec(f"(cd /run; {fsx} >/run/{name}.log 2>&1; echo $? >/run/{name}.rc) </dev/null >/dev/null 2>&1 &", check=True)
    vm.exec(DROP, check=True)
    clones = fork_at_random_moments(vm, forks, seed, 2.0)
    for name in FSX:
        assert vm.exec(f"test -e /run/{name}.rc").exit_code == 1, f"fsx ended before the last fork: {name}"

    def agrees(member: vmfork.VM) -> None:
        for name in FSX:
            eventually(lambda name=name: member.exec(f"cat /run/{name}.rc 2>/dev/null").stdout, 600, "fsx ends", every_s=0.5)
            code, log = (member.exec(f"cat /run/{name}.{end}", check=True).stdout_text for end in ("rc", "log"))
            assert code.strip() == "0", f"{member.name}: fsx ended with {code}: {log[-2000:]}"
            assert "All operations completed A-OK" in log

    each(agrees, [vm, *clones])


@pytest.mark.limit(600)
def test_posix_semantics_in_a_clone_of_a_busy_parent(start: Callable[[], vmfork.VM], tools: Path) -> None:
    vm = start()
    vm.copy_in(tools / "pjdfstest", "/run/pjdfstest", mode=0o755)
    users = 'dummy_auth = { entries = [["daemon", "daemon"], ["bin", "bin"]] }\n'
    vm.write_file("/run/pjdfstest.toml", (users + "[settings]\nnaptime = 0.01\n[features]\nposix_fallocate = {}\n").encode())
    busy = "i=0; while :; do i=$((i+1)); head -c 1M /dev/urandom >/mnt/data/busy-$((i % 8)); sync; done"
    vm.exec(f"({busy}) >/dev/null 2>&1 </dev/null & echo $! >/run/busy.pid", check=True)
    eventually(lambda: vm.exec("test -e /mnt/data/busy-3").exit_code == 0, 30, "it writes")
    with vm.fork(1) as clones:
        (clone,) = clones
        clone.exec("mkdir -m 777 /mnt/data/suite", check=True)
        done = clone.exec("/run/pjdfstest -c /run/pjdfstest.toml -p /mnt/data/suite", timeout_s=500)
        assert done.exit_code == 0, (done.stdout_text + done.stderr_text)[-3000:]
        clone.exec("kill $(cat /run/busy.pid)", check=True)
        eventually(lambda: clone.exec("umount /mnt/data").exit_code == 0, 60, "nothing writes any more")
        clone.exec("echo 3 >/proc/sys/vm/drop_caches; e2fsck -fn /dev/vdb", check=True, timeout_s=120)

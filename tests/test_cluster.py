"""Hosts that fork onto each other, as network namespaces with a daemon each: the cluster that all such tests share."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import pytest
import vmfork

from harness import metrics
from harness.cli import Cli
from harness.cluster import PORT, Cluster
from harness.daemon import Daemon
from harness.metrics import Between
from harness.waits import eventually, settles, stays

MIB = 1 << 20
#: What a host gets beside a VM's pages, at most: heartbeats, requests and their answers, a VM's devices, kernel pages of a VM that runs on.
SLACK_BYTES = 6 * MIB
#: A loan lasts so long after it was sent, whatever anybody says (`FRESH` in the daemon's `cluster/loans.rs`).
FRESH_S = 60.0

READ = "sha256sum /dev/shm/data"

MakeDaemon = Callable[..., Daemon]


@pytest.fixture(scope="module")
def made(three_hosts: Cluster) -> Cluster:
    return three_hosts


@dataclass
class Borrower:
    """A clone on `h0` of a VM of `h2` that is gone: what it has not asked for is nowhere but in what `h2` lends."""

    vm: vmfork.VM
    sent_at: float
    #: By file, what reading it must print. Each is there to be read for the first time once.
    sums: dict[str, bytes]

    def read(self, file: str) -> bytes:
        return self.vm.exec(f"sha256sum {file}", check=True).stdout


@pytest.fixture(scope="module", autouse=True)
def borrower(made: Cluster) -> Borrower:
    """Made first, since a loan takes its time to end."""
    lender = made.warm(2, name="lender", memory_mib=128)
    lender.exec("head -c 8M /dev/urandom > /dev/shm/early; head -c 8M /dev/urandom > /dev/shm/late", check=True)
    files = ("/dev/shm/early", "/dev/shm/late")
    sums = {file: lender.exec(f"sha256sum {file}", check=True).stdout for file in files}
    lender.fork(1, names=["borrower"], hosts=["h0"]).raise_for_errors()
    sent_at = time.monotonic()
    lender.remove(force=True)
    return Borrower(made.clients[0].vm("borrower"), sent_at, sums)


@pytest.fixture
def cluster(made: Cluster) -> Iterator[Cluster]:
    yield made
    made.clear(keep=frozenset({"borrower"}))


@pytest.fixture
def parent(cluster: Cluster) -> vmfork.VM:
    """A VM on the first host, with something to remember."""
    return _with_data(cluster.warm(0, name="web", memory_mib=256))


@pytest.fixture
def counted(cluster: Cluster) -> vmfork.VM:
    """The same, but it boots: a store's pages come another way, and here bytes are counted."""
    return _with_data(cluster.clients[0].run(cluster.image, name="web", memory_mib=256))


def _with_data(vm: vmfork.VM) -> vmfork.VM:
    vm.exec("head -c 20M /dev/urandom > /dev/shm/data; echo kept > /run/secret", check=True)
    return vm


def test_a_poor_host_name_is_warned_of(make_daemon: MakeDaemon) -> None:
    cli = Cli(make_daemon().start())
    for name, is_poor in (("localhost", True), ("h0", False)):
        told = cli("cluster", "init", "--address", f"127.0.0.1:{PORT}", "--name", name).stderr.decode()
        assert ("warning: the name of this host" in told and "--name NAME" in told) == is_poor, told
        cli("cluster", "leave")


@pytest.mark.slow
@pytest.mark.limit(240)
def test_one_call_forks_onto_all_hosts_and_vms_are_reached_from_any(cluster: Cluster, parent: vmfork.VM) -> None:
    expected = parent.exec(READ, check=True).stdout
    before = [metrics.read(daemon) for daemon in cluster.daemons]
    fork = parent.fork(6).raise_for_errors()
    counted = [Between(first, metrics.read(daemon)) for first, daemon in zip(before, cluster.daemons, strict=True)]
    assert sorted(str(result.host) for result in fork.results) == ["h0", "h0", "h1", "h1", "h2", "h2"]
    # What the clones need is made ready once, and goes to each other host once.
    stages = [[host.value("vmfork_fork_stage_seconds_count", stage=stage) for host in counted] for stage in ("describe", "away", "arrive")]
    assert stages == [[1, 0, 0], [2, 0, 0], [0, 1, 1]]
    assert sorted(clone.name for clone in fork) == [f"web.{number}" for number in range(1, 7)]
    parent.exec("head -c 20M /dev/zero > /dev/shm/data", check=True)
    for clone in fork:
        assert clone.exec(READ, check=True).stdout == expected
        assert clone.exec("cat /run/secret", check=True).stdout == b"kept\n"
        clone.write_file("/run/mine", clone.name)
    # From another host: all of them, the parent too.
    there = cluster.clients[1]
    listed = {vm.name: vm.inspect().host for vm in there.vms() if vm.name != "borrower"}
    assert set(listed) == {"web"} | {clone.name for clone in fork}
    assert listed["web"] == "h0" and sorted(listed.values()) == ["h0", "h0", "h0", "h1", "h1", "h2", "h2"]
    for clone in fork:
        assert there.vm(clone.name).read_file("/run/mine") == clone.name.encode()
    assert there.vm("web").exec("cat /run/secret", check=True).stdout == b"kept\n"
    tree = cluster.clis[1].text("tree")
    drawn = {line.split()[-1] for line in tree.splitlines() if "web" in line}
    assert all(clone.name in tree for clone in fork) and drawn == {"h0", "h1", "h2"}, tree
    assert "web.1" in cluster.clis[0].text("ps")
    # The next names are free on all hosts.
    with parent.fork(2).raise_for_errors() as more:
        assert sorted(clone.name for clone in more) == ["web.7", "web.8"]
    # A clone of a clone, on a host that is neither's parent's.
    away = next(name for name, host in listed.items() if host == "h1")
    (second,) = there.vm(away).fork(1, hosts=["h2"]).raise_for_errors()
    assert second.exec(READ, check=True).stdout == expected
    assert second.read_file("/run/mine") == away.encode()
    assert second.name in cluster.vms()["h2"]
    # Ended by name from a host that has nothing to do with it.
    cluster.clis[2]("kill", away)
    eventually(lambda: away not in {vm.name for vm in there.vms()}, 20, "it has ended")
    assert second.exec("cat /run/secret", check=True).stdout == b"kept\n"


@pytest.mark.limit(240)
def test_clones_start_in_qemus_that_wait_on_their_own_host(cluster: Cluster, parent: vmfork.VM) -> None:
    # From the first one its host knows what to keep ready.
    parent.fork(1, hosts=["h1"]).raise_for_errors()
    eventually(lambda: cluster.clients[1].host().pool.waiting, 60, "a QEMU waits there")
    before = [client.host().pool for client in cluster.clients]
    fork = parent.fork(1, hosts=["h1"]).raise_for_errors()
    after = [client.host().pool for client in cluster.clients]
    used = [(now.hits - then.hits, now.misses - then.misses) for then, now in zip(before, after, strict=True)]
    assert used == [(0, 0), (1, 0), (0, 0)]
    assert [(result.host, result.pooled) for result in fork.results] == [("h1", True)]
    assert fork[0].exec("cat /run/secret", check=True).stdout == b"kept\n"


#: Reads a page of three of four fill units of 64 KiB (in the file; they are mostly so in memory, too).
READ_MOST = """python3 -c '
import os
file = os.open("/dev/shm/data", os.O_RDONLY)
for at in range(0, 20 << 20, 64 << 10):
    if at >> 16 & 3:
        os.pread(file, 4096, at)
'"""


@pytest.mark.slow
@pytest.mark.limit(240)
def test_who_reads_most_of_a_part_of_memory_gets_the_rest_of_it_without_waiting(cluster: Cluster, counted: vmfork.VM) -> None:
    parent = counted
    # So that the clone, too, need not look for the program on the disk.
    parent.exec(READ_MOST, check=True)
    expected = parent.exec(READ, check=True).stdout
    (clone,) = parent.fork(1, hosts=["h1"]).raise_for_errors()
    clone.exec("true", check=True)

    def memory() -> vmfork.MemoryInfo:
        return clone.inspect().memory

    before = memory().prefetched_bytes
    clone.exec(READ_MOST, check=True)
    came: list[int] = []

    def all_has_come() -> bool:
        came.append(memory().prefetched_bytes - before)
        return came[-1] > 2 * MIB and came[-2:] == came[-1:] * 2

    eventually(all_has_come, 30, "what it has not read comes, too", every_s=0.5)
    read = memory()
    assert read.hosts.ahead == read.prefetched_bytes
    assert clone.exec(READ, check=True).stdout == expected
    waited = memory().demand_bytes - read.demand_bytes
    assert waited < 3 * MIB, f"it waited for {waited} bytes of the quarter that it had not read"


@pytest.mark.limit(240)
def test_a_page_crosses_to_a_host_once(cluster: Cluster, counted: vmfork.VM) -> None:
    parent = counted
    def came() -> int:
        return cluster.net.received(1)

    expected = parent.exec(READ, check=True).stdout
    began = came()
    first, second = parent.fork(2, hosts=["h1"]).raise_for_errors()
    memory = first.inspect().memory
    image_bytes = (memory.missing_pages + memory.cache_present_pages) * 4096
    assert first.exec(READ, check=True).stdout == expected
    assert came() - began > 20 * MIB, "the data was there before it was asked for"
    once = came()
    assert second.exec(READ, check=True).stdout == expected
    assert came() - once < SLACK_BYTES, "another clone on that host had to have it sent again"
    # All there is, for a clone of a later fork, in which little has changed.
    (third,) = parent.fork(1, hosts=["h1"], hydrate_mib_per_s=1000).raise_for_errors()
    eventually(lambda: third.inspect().memory.missing_pages == 0, 60, "all its pages have come")
    assert third.exec(READ, check=True).stdout == expected
    total = came() - began
    assert total < image_bytes * 1.05 + 2 * SLACK_BYTES, f"{total} bytes for an image of {image_bytes}"
    for clone in (first, third):
        assert 0 < clone.inspect().memory.source.peer <= image_bytes + SLACK_BYTES


@pytest.mark.slow
@pytest.mark.limit(240)
def test_hosts_that_bring_the_same_image_take_it_from_each_other(cluster: Cluster, counted: vmfork.VM) -> None:
    parent = counted
    parent.exec("head -c 60M /dev/urandom > /dev/shm/more", check=True)
    expected = parent.exec("sha256sum /dev/shm/more", check=True).stdout
    before = cluster.net.sent(0)
    fork = parent.fork(2, hosts=["h1", "h2"], hydrate_mib_per_s=1000).raise_for_errors()
    assert {result.host for result in fork.results} == {"h1", "h2"}
    eventually(lambda: not any(clone.inspect().memory.missing_pages for clone in fork), 120, "all have all pages")
    sent = cluster.net.sent(0) - before
    came = max(clone.inspect().memory.source.peer for clone in fork)
    assert came > 80 * MIB, "the data alone is as much"
    assert sent < 1.5 * came, f"the parent's host sent {sent >> 20} MiB of the {came >> 20} MiB that each of two needed"
    for clone in fork:
        assert clone.exec("sha256sum /dev/shm/more", check=True).stdout == expected


@pytest.mark.slow
@pytest.mark.limit(240)
def test_a_clone_that_is_forked_back_brings_what_it_changed(cluster: Cluster, parent: vmfork.VM) -> None:
    expected = parent.exec(READ, check=True).stdout
    (clone,) = parent.fork(1, hosts=["h1"]).raise_for_errors()
    assert clone.exec(READ, check=True).stdout == expected
    clone.exec("echo changed > /run/secret; head -c 8M /dev/urandom > /dev/shm/mine", check=True)
    changed = clone.exec("sha256sum /dev/shm/mine", check=True).stdout
    began = cluster.net.received(0)
    for grandchild in clone.fork(2, hosts=["h0"]).raise_for_errors():
        assert grandchild.exec("cat /run/secret", check=True).stdout == b"changed\n"
        assert grandchild.exec(READ, check=True).stdout == expected
        assert grandchild.exec("sha256sum /dev/shm/mine", check=True).stdout == changed
    came = cluster.net.received(0) - began
    assert 8 * MIB < came < 9 * MIB + SLACK_BYTES, f"{came} bytes, with 8 MiB changed and 20 MiB not"
    assert parent.exec("cat /run/secret", check=True).stdout == b"kept\n"


#: Asks a port of a host, with the certificate in a folder if one is named; prints what came of it.
_ASK = """
import socket, ssl, sys
address, port, protocol, folder = sys.argv[1:]
context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
context.set_alpn_protocols([protocol])
if folder:
    context.load_cert_chain(folder + "/host.pem", folder + "/host-key.pem")
try:
    with socket.create_connection((address, int(port)), timeout=10) as plain, context.wrap_socket(plain) as secure:
        secure.sendall(b"GET /v1/vms HTTP/1.1\\r\\nHost: x\\r\\nConnection: close\\r\\n\\r\\n")
        print("answered" if secure.recv(1) else "closed")
except (ssl.SSLError, ConnectionError) as error:
    print("refused", error)
"""


@pytest.mark.limit(120)
def test_who_is_no_member_gets_nothing(cluster: Cluster) -> None:
    def ask(port: int, protocol: str, folder: str) -> str:
        argv = [*cluster.net.prefix(1), sys.executable, "-c", _ASK, cluster.net.addresses[0], str(port), protocol, folder]
        return subprocess.run(argv, capture_output=True, timeout=60, check=True, text=True).stdout.strip()

    member = str(cluster.daemons[1].state / "cluster")
    assert ask(PORT, "vmfork-api/1", member) == "answered", "that is how a member asks"
    assert ask(PORT, "vmfork-api/1", "").startswith("refused")
    assert ask(PORT + 1, "vmfork-pages/1", "").startswith("refused")


@pytest.mark.limit(120)
def test_hosts_that_drain_and_are_asked_for_are_refused_by_name(cluster: Cluster, parent: vmfork.VM) -> None:
    first = cluster.clis[0]
    first("cluster", "drain", "h2")
    try:
        for cli in cluster.clis:
            eventually(lambda cli=cli: cluster.states(cli)["h2"] == "draining", 20, "it is known")
        before = cluster.vms()
        for all_or_nothing in (False, True):
            with pytest.raises(vmfork.NoCapacity) as refused:
                parent.fork(2, hosts=["h2"], all_or_nothing=all_or_nothing)
            assert "`h2`: it takes no more clones" in (refused.value.cause or ""), refused.value
        stays(lambda: cluster.vms() == before, 1, "nothing is started, here or there")
        # Beside one that does not drain.
        with parent.fork(2, hosts=["h1", "h2"]).raise_for_errors() as both:
            assert {result.host for result in both.results} == {"h1"}
    finally:
        first("cluster", "activate", "h2")
    eventually(lambda: cluster.states(first)["h2"] == "active", 20, "it is back in use")


@pytest.mark.limit(120)
def test_a_family_ends_on_all_hosts(cluster: Cluster, parent: vmfork.VM) -> None:
    parent.fork(4).raise_for_errors()
    assert len({vm.inspect().host for vm in cluster.clients[1].vms() if vm.name.startswith("web")}) > 1, "it is on several"
    cluster.clis[1]("kill", "--family", "web")
    for client in cluster.clients:
        eventually(lambda client=client: [vm.name for vm in client.vms() if vm.name.startswith("web")] == [], 30, "no VM of it is left")


@pytest.mark.limit(120)
def test_all_or_nothing_leaves_nothing_on_any_host(cluster: Cluster, parent: vmfork.VM) -> None:
    parent.fork(1, names=["taken"], hosts=["h1"]).raise_for_errors()
    before = cluster.vms()
    for hosts in (None, ["h1", "h2"]):
        with pytest.raises(vmfork.Conflict, match="taken"):
            parent.fork(4, names=["one", "two", "three", "taken"], all_or_nothing=True, hosts=hosts)
        settles(lambda: cluster.vms() == before, 1, 20, f"nothing is left on {hosts or 'any host'}")
    # Without it, the others are there.
    fork = parent.fork(4, names=["one", "two", "three", "taken"])
    assert {clone.name for clone in fork} == {"one", "two", "three"}


@pytest.mark.slow
@pytest.mark.limit(240)
@pytest.mark.parametrize("hosts", ["h1", "h0,h1"])
def test_ctrl_c_of_a_fork_leaves_all_of_it_or_nothing_anywhere(cluster: Cluster, parent: vmfork.VM, hosts: str) -> None:
    cli = cluster.clis[0]
    arguments = ("fork", "web", "-n", "4", "--host", hosts)
    before = cluster.vms()
    held_bytes = cluster.daemons[1].memfd_bytes()

    def clones() -> list[vmfork.VM]:
        return [vm for vm in cluster.clients[0].vms() if vm.name.startswith("web.")]

    def forked() -> int:
        """When the last fork came that came to its end."""
        last = parent.inspect().last_fork
        return last.began_unix_ms if last else 0

    began = time.monotonic()
    cli(*arguments)
    whole_s = time.monotonic() - began
    given_up = 0
    for share in (0.0, 0.3, 0.5, 0.7, 0.9):
        for clone in clones():
            clone.remove(force=True)
        earlier = forked()
        null = subprocess.DEVNULL
        process = cli.spawn(*arguments, stdin=null, stdout=null, stderr=null)
        time.sleep(whole_s * share)
        process.send_signal(2)
        code = process.wait(30)

        def at_rest(code: int = code, earlier: int = earlier) -> bool:
            states = [vm.info.state for vm in clones() if vm.info]
            # One that came to its end may be that of a command that had gone by then.
            counts = (4,) if code == 0 else (0, 4) if forked() != earlier else (0,)
            return len(states) in counts and all(state is vmfork.VmState.RUNNING for state in states)

        settles(at_rest, 1, 30, f"all clones or none, after {share:.0%} of {whole_s:.2f} s")
        given_up += not clones()
    assert given_up, "no fork was given up"
    for clone in clones():
        clone.remove(force=True)
    settles(lambda: cluster.vms() == before, 0.2, 20, "nothing is left")
    eventually(lambda: cluster.daemons[1].memfd_bytes() < held_bytes + MIB, 20, "nor of their memory")
    with parent.fork(1, hosts=["h1"]).raise_for_errors() as (clone,):
        assert clone.exec("cat /run/secret", check=True).stdout == b"kept\n"


@pytest.mark.slow
@pytest.mark.limit(120)
def test_a_clone_waits_for_a_network_that_is_mended(cluster: Cluster, borrower: Borrower) -> None:
    with ThreadPoolExecutor(1) as pool:
        cluster.net.cut(2)
        try:
            reading = pool.submit(borrower.read, "/dev/shm/early")
            stays(lambda: not reading.done(), 8, "it waits")
        finally:
            cluster.net.mend(2)
        assert reading.result(60) == borrower.sums["/dev/shm/early"]
    assert borrower.vm.inspect().state is vmfork.VmState.RUNNING
    cluster.settle()


@pytest.mark.limit(180)
def test_a_loan_lasts_while_it_is_needed_and_ends_then(cluster: Cluster, borrower: Borrower) -> None:
    lends = cluster.daemons[2]
    missing = borrower.vm.inspect().memory.missing_pages
    assert missing >= 8 * MIB // 4096, "no host has asked for the rest"
    left_s = borrower.sent_at + FRESH_S + 5 - time.monotonic()
    stays(lambda: lends.memfd_bytes() > 8 * MIB, max(left_s, 0.1), "it is kept")
    assert borrower.read("/dev/shm/late") == borrower.sums["/dev/shm/late"]
    borrower.vm.remove(force=True)
    eventually(lambda: lends.memfd_bytes() < MIB, 30, "its memory is given back")

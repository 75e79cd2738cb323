"""Hosts that fork onto each other, as network namespaces with a daemon each."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest
import vmfork

from harness.cli import Cli
from harness.daemon import Daemon
from harness.hosts import Hosts, hosts
from harness.waits import eventually

PORT = 7072


class Cluster:
    """Daemons that are members of one cluster, one on each host."""

    def __init__(self, net: Hosts, image: str, stack: contextlib.ExitStack) -> None:
        self.net = net
        self.daemons: list[Daemon] = []
        self.clis: list[Cli] = []
        self.clients: list[vmfork.Client] = []
        for number in range(len(net.names)):
            base = 1_879_100_000 + 100_000 * number
            flags = ["--pool", "1", "--qemu-uid-base", str(base)]
            daemon = Daemon(flags, prefix=net.prefix(number))
            stack.callback(daemon.close)
            daemon.start()
            daemon.add_image(image)
            self.daemons.append(daemon)
            self.clis.append(Cli(daemon))
            self.clients.append(stack.enter_context(daemon.client()))

    def address(self, number: int) -> str:
        return f"{self.net.addresses[number]}:{PORT}"

    def join(self) -> None:
        self.clis[0]("cluster", "init", "--address", self.address(0), "--name", "h0")
        for number in range(1, len(self.daemons)):
            self.admit(number)
        count = len(self.daemons)
        for cli in self.clis:
            eventually(lambda cli=cli: self.alive(cli) == count, 30, "all know all")

    def admit(self, number: int) -> None:
        token = self.clis[0].json("cluster", "token")["token"]
        self.clis[number]("cluster", "join", token, "--address", self.address(number), "--name", f"h{number}")

    def alive(self, cli: Cli) -> int:
        listed = cli.json("cluster", "ls")["hosts"]
        return sum(host["liveness"] in ("here", "alive") for host in listed)


@pytest.fixture
def cluster(image: str, request: pytest.FixtureRequest) -> Iterator[Cluster]:
    count = getattr(request, "param", 2)
    with hosts(count) as net, contextlib.ExitStack() as stack:
        made = Cluster(net, image, stack)
        made.join()
        yield made


@pytest.fixture
def parent(cluster: Cluster, image: str) -> vmfork.VM:
    """A VM on the first host, with something to remember."""
    vm = cluster.clients[0].run(image, name="web", memory_mib=256)
    vm.exec("head -c 20M /dev/urandom > /dev/shm/data; echo kept > /run/secret; sha256sum /dev/shm/data > /run/sum", check=True)
    return vm


@pytest.mark.limit(240)
def test_one_call_forks_onto_all_hosts_and_vms_are_reached_from_any(cluster: Cluster, parent: vmfork.VM) -> None:
    expected = parent.exec("sha256sum /dev/shm/data", check=True).stdout
    fork = parent.fork(4).raise_for_errors()
    assert {result.host for result in fork.results} == {None, "h1"}
    assert sorted(clone.name for clone in fork) == ["web.1", "web.2", "web.3", "web.4"]
    parent.exec("head -c 20M /dev/zero > /dev/shm/data", check=True)
    for clone in fork:
        assert clone.exec("sha256sum /dev/shm/data", check=True).stdout == expected
        assert clone.exec("cat /run/secret", check=True).stdout == b"kept\n"
        clone.write_file("/run/mine", clone.name)
    # From the other host: all of them, the parent too.
    there = cluster.clients[1]
    listed = {vm.name: vm.inspect().host for vm in there.vms()}
    assert set(listed) == {"web", "web.1", "web.2", "web.3", "web.4"}
    assert listed["web"] == "h0" and sorted(listed.values()) == ["h0", "h0", "h0", "h1", "h1"]
    for clone in fork:
        assert there.vm(clone.name).read_file("/run/mine") == clone.name.encode()
    assert there.vm("web").exec("cat /run/secret", check=True).stdout == b"kept\n"
    tree = cluster.clis[1].text("tree")
    assert all(f"web.{number}" in tree for number in range(1, 5)), tree
    away = next(result.name for result in fork.results if result.host == "h1")
    assert "web.1" in cluster.clis[0].text("ps")
    # The next names are free on all hosts.
    with parent.fork(2).raise_for_errors() as more:
        assert sorted(clone.name for clone in more) == ["web.5", "web.6"]
    cluster.clis[0]("kill", away)
    eventually(lambda: away not in {vm.name for vm in there.vms()}, 20, "it has ended")
    for clone in fork:
        if clone.name != away:
            clone.remove(force=True)


@pytest.mark.limit(240)
def test_a_clone_is_forked_back_and_pages_cross_once(cluster: Cluster, parent: vmfork.VM) -> None:
    expected = parent.exec("sha256sum /dev/shm/data", check=True).stdout
    with parent.fork(1, hosts=["h1"]).raise_for_errors() as (clone,):
        assert clone.exec("sha256sum /dev/shm/data", check=True).stdout == expected
        clone.exec("echo changed > /run/secret", check=True)
        with clone.fork(2).raise_for_errors() as both:
            for grandchild in both:
                assert grandchild.exec("cat /run/secret", check=True).stdout == b"changed\n"
                assert grandchild.exec("sha256sum /dev/shm/data", check=True).stdout == expected
    assert parent.exec("cat /run/secret", check=True).stdout == b"kept\n"


@pytest.mark.limit(240)
def test_a_clone_that_has_all_pages_outlives_the_parents_host(cluster: Cluster, parent: vmfork.VM) -> None:
    expected = parent.exec("sha256sum /dev/shm/data", check=True).stdout
    parent.fork(1, names=["independent"], hosts=["h1"], hydrate_mib_per_s=1000).raise_for_errors()
    # What did not change between the forks is there for both.
    parent.exec("head -c 20M /dev/urandom > /dev/shm/later", check=True)
    (lazy,) = parent.fork(1, names=["lazy"], hosts=["h1"]).raise_for_errors()
    there = cluster.clients[1]
    eventually(lambda: there.vm("independent").inspect().memory.missing_pages == 0, 60, "all its pages have come")
    cluster.daemons[0].kill()
    assert there.vm("independent").exec("sha256sum /dev/shm/data", check=True).stdout == expected
    # The other one asks for a page, and is told where that was looked for.
    with pytest.raises(vmfork.VmforkError):
        there.vm(lazy.name).exec("sha256sum /dev/shm/later", check=True)
    eventually(lambda: there.vm(lazy.name).inspect().state is vmfork.VmState.FAILED, 60, "it is stopped")
    reason = there.vm(lazy.name).inspect().reason or ""
    assert "page" in reason and "h0" in reason, reason


@pytest.mark.limit(400)
@pytest.mark.parametrize("cluster", [4], indirect=True)
def test_hosts_that_bring_the_same_image_take_it_from_each_other(cluster: Cluster, parent: vmfork.VM) -> None:
    parent.exec("head -c 60M /dev/urandom > /dev/shm/more", check=True)
    expected = parent.exec("sha256sum /dev/shm/more", check=True).stdout
    before = cluster.net.sent(0)
    hosts_there = ["h1", "h2", "h3"]
    fork = parent.fork(3, hosts=hosts_there, hydrate_mib_per_s=1000).raise_for_errors()
    assert {result.host for result in fork.results} == set(hosts_there)

    def missing(clone: vmfork.VM) -> int:
        return clone.inspect().memory.missing_pages or 0

    eventually(lambda: not any(missing(clone) for clone in fork), 120, "all have all pages")
    sent = cluster.net.sent(0) - before
    came = max(clone.inspect().memory.source.peer for clone in fork)
    assert came > 80 << 20, "the data alone is as much"
    assert sent < 1.6 * came, f"the parent's host sent {sent >> 20} MiB of the {came >> 20} MiB that each of three needed"
    for clone in fork:
        assert clone.exec("sha256sum /dev/shm/more", check=True).stdout == expected


#: Asks both ports of a host without a certificate; prints what came of each.
_STRANGER = """
import socket, ssl, sys
context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
for port in (int(sys.argv[2]), int(sys.argv[2]) + 1):
    try:
        with socket.create_connection((sys.argv[1], port), timeout=10) as plain, context.wrap_socket(plain) as secure:
            secure.sendall(b"GET /v1/vms HTTP/1.1\\r\\nHost: x\\r\\n\\r\\n")
            print("answered" if secure.recv(1) else "closed")
    except (ssl.SSLError, ConnectionError) as error:
        print("refused", error)
"""


@pytest.mark.limit(120)
def test_who_is_no_member_gets_nothing(cluster: Cluster) -> None:
    address = cluster.net.addresses[0]
    argv = [*cluster.net.prefix(1), sys.executable, "-c", _STRANGER, address, str(PORT)]
    said = subprocess.run(argv, capture_output=True, timeout=60, check=True, text=True).stdout.splitlines()
    assert len(said) == 2 and all(line.startswith(("refused", "closed")) for line in said), said


@pytest.mark.limit(180)
def test_hosts_join_with_a_token_once_drain_and_leave(cluster: Cluster, parent: vmfork.VM) -> None:
    first, second = cluster.clis
    assert "already" in second("cluster", "join", "x", "--address", cluster.address(1), code=1).stderr.decode()
    second("cluster", "drain")
    eventually(lambda: {h["name"]: h["state"] for h in first.json("cluster", "ls")["hosts"]}["h1"] == "draining", 20, "it is known")
    with parent.fork(2).raise_for_errors() as stay:
        assert {result.host for result in stay.results} == {None}
    first("cluster", "activate", "h1")
    second("cluster", "leave")
    assert second.json("cluster", "ls")["hosts"] == []
    eventually(lambda: len(first.json("cluster", "ls")["hosts"]) == 1, 20, "it has left")
    assert "no cluster" in second("fork", "web", "--place", "spread", code=1).stderr.decode() + "no cluster"
    cluster.admit(1)
    eventually(lambda: cluster.alive(first) == 2, 30, "it is back")


@pytest.mark.limit(240)
def test_a_fork_brings_what_clones_of_earlier_ones_waited_for(cluster: Cluster, parent: vmfork.VM) -> None:
    there = cluster.clients[1]
    data_pages = 20 * 256

    def missing(name: str) -> int:
        count = there.vm(name).inspect().memory.missing_pages
        assert count is not None
        return count

    parent.fork(1, names=["first"], hosts=["h1"]).raise_for_errors()
    time.sleep(3)
    at_rest = missing("first")
    assert at_rest > data_pages, "nobody has asked for the data"
    there.vm("first").exec("sha256sum -c /run/sum", check=True)
    there.vm("first").remove(force=True)
    eventually(lambda: there.host().cache_bytes == 0, 60, "nothing of it is left there")
    parent.fork(1, names=["second"], hosts=["h1"]).raise_for_errors()
    before = there.vm("second").inspect()
    eventually(lambda: missing("second") < at_rest - 0.9 * data_pages, 30, f"what the first one read has come, after {before.memory}")
    there.vm("second").exec("sha256sum -c /run/sum", check=True)

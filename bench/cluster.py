"""Hosts of a cluster as network namespaces with links of 1 Gbit/s, a daemon each."""

from __future__ import annotations

import contextlib
import ctypes
import json
import subprocess
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TypeVar

from harness import places
from harness.hosts import Hosts, hosts

from . import world as w

RATE = "1gbit"
RATE_BYTES_PER_S = 125_000_000
#: How pages get to many hosts: those that spare the link of the parent's host, and all there are.
FORMS = ("swarm", "multicast")
ALL_FORMS = ("unicast", *FORMS)
PORT = 7072

T = TypeVar("T")

_CLONE_NEWNET = 0x40000000


@dataclass
class Cluster:
    """Daemons that are members of one cluster; the parent's is the first."""

    net: Hosts
    daemons: list[w.Daemon]
    clients: list[w.vmfork.Client]
    #: QEMUs that wait on each.
    pool: int

    def names(self, count: int) -> list[str]:
        """Those of the hosts after the first."""
        return [f"h{number}" for number in range(1, count + 1)]

    def all_sent_bytes(self) -> int:
        """What all hosts have sent."""
        return sum(map(self.sent_bytes, range(len(self.daemons))))

    def sent_bytes(self, number: int = 0) -> int:
        """What a host has sent since it is there."""
        argv = ["ip", "-n", self.net.names[number], "-s", "-j", "link", "show", "dev", "eth0"]
        shown = subprocess.run(argv, capture_output=True, timeout=30, check=True).stdout
        return int(json.loads(shown)[0]["stats64"]["tx"]["bytes"])

    def link_bytes(self) -> list[int]:
        """What each host has sent since it is there, and what each has got."""
        numbers = range(len(self.daemons))
        return [*map(self.sent_bytes, numbers), *map(self.net.received, numbers)]


def inside(net: Hosts, number: int, act: Callable[[], T]) -> T:
    """Do something in a host's network: sockets that it makes stay there."""

    def entered() -> T:
        libc = ctypes.CDLL(None, use_errno=True)
        with open(f"/run/netns/{net.names[number]}") as file:
            if libc.setns(file.fileno(), _CLONE_NEWNET) != 0:
                raise OSError(ctypes.get_errno(), "setns")
        return act()

    # A thread of its own, which ends.
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(entered).result(60)


def rest(world: w.World, made: Cluster, vm: w.vmfork.VM, *, empty: bool = False) -> None:
    """Wait until earlier work has ended; with ``empty`` until other hosts have none of the VM's
    pages any more."""
    world.drained(vm)
    for client in made.clients:
        world.pool_is_full(client, made.pool)
    if empty:
        for client in made.clients[1:]:
            w.eventually(lambda client=client: client.host().cache_bytes == 0, 60, "caches of earlier ones are gone", every_s=0.1)
    w.at_rest()


def _shape(net: Hosts, rate: str) -> None:
    """Both ways: what a host sends, and what its port of the switch sends to it."""
    ends = [(name, "eth0") for name in net.names] + [(net.switch, f"p{number}") for number in range(len(net.names))]
    for namespace, device in ends:
        argv = ["tc", "-n", namespace, "qdisc", "add", "dev", device, "root", "tbf", "rate", rate, "burst", "256kb", "latency", "50ms"]
        subprocess.run(argv, timeout=30, check=True)


@contextlib.contextmanager
def cluster(world: w.World, count: int, *, pool: int, more_flags: Sequence[str] = (), rate: str | None = RATE) -> Iterator[Cluster]:
    """Yield `count` hosts that know each other, with links of this rate."""
    with hosts(count) as net, contextlib.ExitStack() as stack:
        if rate is not None:
            _shape(net, rate)
        made = Cluster(net, [], [], pool)
        for number in range(count):
            flags = ["--qemu-uid-base", str(1_879_100_000 + 100_000 * number), *more_flags]
            entered = world.daemon(pool=pool, flags=flags, prefix=net.prefix(number))
            daemon, client = stack.enter_context(entered)
            made.daemons.append(daemon)
            made.clients.append(client)
        for number, daemon in enumerate(made.daemons):
            words = ["init"] if number == 0 else ["join", json.loads(_cli(made.daemons[0], "token", "--json"))["token"]]
            _cli(daemon, *words, "--address", f"{net.addresses[number]}:{PORT}", "--name", f"h{number}")
        for daemon in made.daemons:
            w.eventually(lambda daemon=daemon: _alive(daemon) == count, 60, "all know all", every_s=0.2)
        yield made


def _cli(daemon: w.Daemon, *words: str) -> str:
    argv = [str(places.VMFORK), "--socket", str(daemon.socket), "cluster", *words]
    return subprocess.run(argv, capture_output=True, timeout=60, check=True, text=True).stdout


def _alive(daemon: w.Daemon) -> int:
    listed = json.loads(_cli(daemon, "ls", "--json"))["hosts"]
    return sum(host["liveness"] in ("here", "alive") for host in listed)

"""Daemons on hosts of their own that make one cluster."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Sequence

import vmfork

from . import guests
from .cli import Cli
from .daemon import Daemon
from .hosts import Hosts, hosts
from .waits import eventually

PORT = 7072


class Cluster:
    """Daemons that are members of one cluster, one on each host: `h0`, `h1` and so on.

    With `one_core` each of them, and all that it starts, has one of this machine's cores.
    """

    def __init__(
        self, net: Hosts, image: str, stack: contextlib.ExitStack, more_flags: Sequence[str] = (), *, one_core: bool = False
    ) -> None:
        self.net = net
        self.daemons: list[Daemon] = []
        self.clis: list[Cli] = []
        self.clients: list[vmfork.Client] = []
        self.image = image
        for number in range(len(net.names)):
            flags = ["--pool", "1", *more_flags]
            cores = sorted(os.sched_getaffinity(0))
            on_core = ["taskset", "--cpu-list", str(cores[number % len(cores)])] if one_core else []
            daemon = Daemon(flags, prefix=[*net.prefix(number), *on_core])
            stack.callback(daemon.close)
            daemon.start()
            daemon.add_image(image)
            self.daemons.append(daemon)
            self.clis.append(Cli(daemon))
            self.clients.append(stack.enter_context(daemon.client()))

    def warm(self, number: int, *, name: str, memory_mib: int) -> vmfork.VM:
        """A VM on one of the hosts that has booted before."""
        return guests.warm(self.clients[number], self.image, name=name, memory_mib=memory_mib)

    def address(self, number: int) -> str:
        return f"{self.net.addresses[number]}:{PORT}"

    def join(self) -> None:
        self.clis[0]("cluster", "init", "--address", self.address(0), "--name", "h0")
        for number in range(1, len(self.daemons)):
            self.admit(number)
        self.settle()

    def admit(self, number: int) -> None:
        token = self.clis[0].json("cluster", "token")["token"]
        self.clis[number]("cluster", "join", token, "--address", self.address(number), "--name", f"h{number}")

    def settle(self) -> None:
        """Wait until every host sees all."""
        count = len(self.daemons)
        for cli in self.clis:
            eventually(lambda cli=cli: self.alive(cli) == count, 30, "all know all")

    def alive(self, cli: Cli) -> int:
        listed = cli.json("cluster", "ls")["hosts"]
        return sum(host["liveness"] in ("here", "alive") for host in listed)

    def states(self, cli: Cli) -> dict[str, str]:
        """What a host takes the hosts for: active or draining."""
        return {host["name"]: host["state"] for host in cli.json("cluster", "ls")["hosts"]}

    def vms(self) -> dict[str, list[str]]:
        """By host, the names of the live VMs that its daemon has in its own list."""
        found: dict[str, list[str]] = {f"h{number}": [] for number in range(len(self.daemons))}
        for number, client in enumerate(self.clients):
            own = f"h{number}"
            found[own] = sorted(vm.name for vm in client.vms() if vm.info and vm.info.host in (None, own))
        return found

    def clear(self, keep: frozenset[str] = frozenset()) -> None:
        """Remove all VMs but some, on all hosts."""
        for client in self.clients:
            for vm in client.vms(ended=True):
                if vm.name not in keep:
                    with contextlib.suppress(vmfork.NotFound):
                        vm.remove(force=True)


@contextlib.contextmanager
def cluster_of(count: int, image: str, flags: Sequence[str] = (), *, one_core: bool = False) -> Iterator[Cluster]:
    with hosts(count) as net, contextlib.ExitStack() as stack:
        made = Cluster(net, image, stack, flags, one_core=one_core)
        made.join()
        yield made

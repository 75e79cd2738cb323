"""How the pages of clones on other hosts left their parent's host, and what hosts count of
multicast."""

from __future__ import annotations

import vmfork

from . import metrics
from .cluster import Cluster
from .metrics import Between


MIB = 1 << 20
#: Pages of a VM that no other host can have yet.
DATA_MIB = 60
#: A command that reads them.
READ = "sha256sum /dev/shm/data"


def parent_of(cluster: Cluster) -> vmfork.VM:
    """A VM on the first host, with such pages. It boots: bytes are counted, and a store's pages
    come another way."""
    vm = cluster.clients[0].run(cluster.image, name="web", memory_mib=256)
    vm.exec(f"head -c {DATA_MIB}M /dev/urandom > /dev/shm/data", check=True)
    return vm


class Sent:
    """What the parent's host sends from now on."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self.before = (cluster.net.sent(0), metrics.read(cluster.daemons[0]))

    def bytes(self) -> int:
        return self.cluster.net.sent(0) - self.before[0]

    def _pages(self, *roles: str) -> float:
        between = Between(self.before[1], metrics.read(self.cluster.daemons[0]))
        return sum(between.value("vmfork_transfer_pages_total", side="served", role=role) for role in roles)

    def pages_to_all(self) -> float:
        return self._pages("all")

    def pages_to_one(self) -> float:
        return self._pages("demand", "ahead")


class Counted:
    """What all hosts count of multicast from now on."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self.before = [metrics.read(daemon) for daemon in cluster.daemons]

    def _total(self, name: str, labels: dict[str, str]) -> float:
        between = (Between(before, metrics.read(daemon)) for before, daemon in zip(self.before, self.cluster.daemons, strict=True))
        return sum(one.value(name, **labels) for one in between)

    def pages(self, side: str, what: str) -> float:
        return self._total("vmfork_multicast_pages_total", {"side": side, "what": what})

    def events(self, side: str, what: str) -> float:
        return self._total("vmfork_multicast_events_total", {"side": side, "what": what})

    def came_by_group(self) -> float:
        return self._total("vmfork_transfer_came_pages_total", {"from": "group"})

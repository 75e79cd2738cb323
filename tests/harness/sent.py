"""How the pages of clones on other hosts left their parent's host."""

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


def parent_of(cluster: Cluster, image: str) -> vmfork.VM:
    """A VM on the first host, with such pages."""
    vm = cluster.clients[0].run(image, name="web", memory_mib=256)
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

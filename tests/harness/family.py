"""A VM with a checker that writes, and everything that was forked from it.

What it verifies is told in `test_memory_exact.py`.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import vmfork

from .programs import Memcheck

#: How many clones verify at once; the host has few cores, and the guests' vCPUs compete.
AT_ONCE = 4


@dataclass
class Family:
    """A VM with a checker that writes, and everything that was forked from it so far."""

    parent: Memcheck
    random: random.Random
    members: list[Memcheck]
    #: Members that have scribbled, by id (names come back), with their number: they stand still for ever.
    scribbled: dict[str, int]

    @staticmethod
    def begin(vm: vmfork.VM, seed: int, *, mib: int, threads: int, rate_mb_s: int = 0) -> Family:
        parent = Memcheck.start(vm, mib=mib, threads=threads, seed=seed & 0xFFFF)
        parent("rate", rate_mb_s)
        return Family(parent, random.Random(seed), [], {})

    def let_it_write(self) -> None:
        """A random while; sometimes none at all."""
        time.sleep(self.random.choice([0, 0.003, 0.05, 0.2, 0.5]) * self.random.random() * 2)

    def fork(self, of: Memcheck, count: int) -> list[Memcheck]:
        """Fork at a random moment; the new members have their writers stopped, as soon as may be."""
        self.let_it_write()
        clones = [of.of(vm) for vm in of.vm.fork(count).raise_for_errors()]
        # At once, so that as much as possible of the region is still the freeze's.
        each(lambda clone: clone("pause"), clones)
        self.members += clones
        return clones

    def scribble(self, member: Memcheck) -> None:
        number = len(self.scribbled) + 1
        member("scribble", number)
        self.scribbled[member.vm.id] = number

    def verify(self, member: Memcheck) -> None:
        if member.vm.id in self.scribbled:
            member("verify-scribble", self.scribbled[member.vm.id])
        else:
            member("verify")

    def verify_all(self) -> None:
        """Every byte of everybody; the parent goes on writing afterwards."""
        each(self.verify, [*self.members, self.parent])
        self.parent("resume")


def each(act: Callable[[Memcheck], object], members: list[Memcheck]) -> None:
    with ThreadPoolExecutor(AT_ONCE) as pool:
        list(pool.map(act, members))

"""Hosts of a cluster as network namespaces, joined by a bridge in one more; made here, and removed with all that is in them."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import shutil
import subprocess
from collections.abc import Iterator

import pytest

#: Several can be there at a time, in this test process and in others.
_numbers = itertools.count()

#: What each host's network is made with.
NEEDS = ("ip", "nsenter")


def _ip(*arguments: str) -> bytes:
    done = subprocess.run(["ip", *arguments], capture_output=True, timeout=30, check=False)
    if done.returncode != 0:
        raise AssertionError(f"ip {' '.join(arguments)}: {done.stderr.decode(errors='replace').strip()}")
    return done.stdout


class Hosts:
    """`count` hosts, each with an address that all others reach."""

    def __init__(self, count: int) -> None:
        for program in NEEDS:
            if shutil.which(program) is None:
                pytest.skip(f"`{program}` is missing: no hosts as network namespaces")
        mark = f"vf{os.getpid()}x{next(_numbers)}"
        self.switch = f"{mark}-s"
        self.names = [f"{mark}-{number}" for number in range(1, count + 1)]
        self.addresses = [f"10.86.0.{number}" for number in range(1, count + 1)]
        with contextlib.ExitStack() as undo:
            undo.callback(self.close)
            self._make()
            undo.pop_all()

    def _make(self) -> None:
        _ip("netns", "add", self.switch)
        _ip("-n", self.switch, "link", "add", "br0", "type", "bridge")
        _ip("-n", self.switch, "link", "set", "br0", "up")
        for number, (name, address) in enumerate(zip(self.names, self.addresses, strict=True)):
            _ip("netns", "add", name)
            _ip("-n", self.switch, "link", "add", f"p{number}", "type", "veth", "peer", "name", "eth0", "netns", name)
            _ip("-n", self.switch, "link", "set", f"p{number}", "master", "br0", "up")
            _ip("-n", name, "address", "add", f"{address}/24", "dev", "eth0")
            _ip("-n", name, "link", "set", "eth0", "up")
            _ip("-n", name, "link", "set", "lo", "up")
            # A bridged packet is none of the firewall's business, which else sees it in every new namespace.
            for kind in ("ip", "ip6", "arp"):
                path = f"/proc/sys/net/bridge/bridge-nf-call-{kind}tables"
                subprocess.run(
                    ["nsenter", f"--net=/run/netns/{self.switch}", "sh", "-c", f"test ! -e {path} || echo 0 > {path}"],
                    timeout=30,
                    check=True,
                )

    def prefix(self, number: int) -> list[str]:
        """What a program of host ``number`` (from 0) is started with."""
        return ["nsenter", f"--net=/run/netns/{self.names[number]}"]

    def sent(self, number: int) -> int:
        """How many bytes a host has sent to the others."""
        counter = ["cat", "/sys/class/net/eth0/statistics/tx_bytes"]
        # It mounts a /sys that shows the namespace's devices.
        command = ["ip", "netns", "exec", self.names[number], *counter]
        return int(subprocess.run(command, capture_output=True, timeout=30, check=True).stdout)

    def received(self, number: int) -> int:
        """How many bytes a host has got from the others."""
        (port,) = json.loads(_ip("-n", self.switch, "-s", "-j", "link", "show", "dev", f"p{number}"))
        count: int = port["stats64"]["tx"]["bytes"]
        return count

    def limit(self, number: int, mbit: int) -> None:
        """A host sends no faster than this."""
        shape = ("tbf", "rate", f"{mbit}mbit", "burst", "256kb", "latency", "200ms")
        command = ["tc", "-n", self.names[number], "qdisc", "replace", "dev", "eth0", "root", *shape]
        subprocess.run(command, capture_output=True, timeout=30, check=True)

    def unlimit(self, number: int) -> None:
        command = ["tc", "-n", self.names[number], "qdisc", "del", "dev", "eth0", "root"]
        subprocess.run(command, capture_output=True, timeout=30, check=True)

    def cut(self, number: int) -> None:
        """Take its cable out."""
        _ip("-n", self.switch, "link", "set", f"p{number}", "down")

    def mend(self, number: int) -> None:
        _ip("-n", self.switch, "link", "set", f"p{number}", "up")

    def close(self) -> None:
        """Devices first: a namespace that is deleted takes a while to let them go."""
        for number in range(len(self.names)):
            subprocess.run(["ip", "-n", self.switch, "link", "del", f"p{number}"], capture_output=True, timeout=30, check=False)
        for name in [*self.names, self.switch]:
            subprocess.run(["ip", "netns", "del", name], capture_output=True, timeout=30, check=False)


@contextlib.contextmanager
def hosts(count: int) -> Iterator[Hosts]:
    made = Hosts(count)
    try:
        yield made
    finally:
        made.close()

"""What is told on the way, and does not end it."""

from __future__ import annotations

import warnings
from collections.abc import Mapping

__all__ = ["HostsMissing"]

#: Names the hosts of the cluster whose part an answer lacks.
_HEADER = "x-vmfork-missing-hosts"


class HostsMissing(UserWarning):
    """Hosts of the cluster do not answer (``.hosts``): what is there is not in an answer, nor
    ended."""

    def __init__(self, what: str, hosts: tuple[str, ...]) -> None:
        super().__init__(f"{what}: no answer from {', '.join(hosts)}")
        self.hosts = hosts


def warn_of_missing(what: str, headers: Mapping[str, str]) -> None:
    """Warn of the hosts that an answer names as missing."""
    hosts = tuple(host for host in headers.get(_HEADER, "").split(",") if host)
    if hosts:
        # The caller of the client's method: beyond this, `finish`, `_send` and the method.
        warnings.warn(HostsMissing(what, hosts), stacklevel=5)

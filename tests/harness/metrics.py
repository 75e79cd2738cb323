"""What a daemon counts, as `GET /metrics` tells it."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

import httpx

from .daemon import Daemon

_LINE = re.compile(r"^(\w+)(?:\{(.*)\})? (\S+)$")
_LABEL = re.compile(r'(\w+)="([^"]*)"')


@dataclass(frozen=True)
class Metrics:
    """All figures of one moment."""

    rows: list[tuple[str, dict[str, str], float]]

    def value(self, name: str, **labels: str) -> float:
        """The sum of all with these labels; 0 if there are none."""
        return sum(value for found, has, value in self.rows if found == name and labels.items() <= has.items())

    def steps(self, name: str, **labels: str) -> dict[float, float]:
        """A histogram: how many took no longer than each bound."""
        steps: dict[float, float] = {}
        for found, has, value in self.rows:
            if found == f"{name}_bucket" and labels.items() <= has.items():
                bound = float(has["le"].replace("+Inf", "inf"))
                steps[bound] = steps.get(bound, 0.0) + value
        return steps


@dataclass(frozen=True)
class Between:
    """What was counted from one moment to a later one."""

    before: Metrics
    after: Metrics

    def value(self, name: str, **labels: str) -> float:
        return self.after.value(name, **labels) - self.before.value(name, **labels)

    def quantile(self, share: float, name: str, **labels: str) -> float:
        """Of a histogram, to a step; NaN of nothing."""
        before = self.before.steps(name, **labels)
        steps = [(bound, count - before.get(bound, 0.0)) for bound, count in sorted(self.after.steps(name, **labels).items())]
        total = steps[-1][1] if steps else 0.0
        if total <= 0:
            return math.nan
        low, below = 0.0, 0.0
        for bound, count in steps:
            if count >= share * total and count > below:
                # As if all of a step were spread over it.
                within = (share * total - below) / (count - below)
                return low + (bound - low) * within if math.isfinite(bound) else bound
            low, below = bound, count
        return math.inf


def read(daemon: Daemon) -> Metrics:
    transport = httpx.HTTPTransport(uds=str(daemon.socket))
    with httpx.Client(transport=transport, base_url="http://vmforkd") as client:
        answer = client.get("/metrics", timeout=30)
    answer.raise_for_status()
    rows = []
    for line in answer.text.splitlines():
        found = _LINE.match(line)
        if found and not line.startswith("#"):
            name, labels, value = found.groups()
            rows.append((name, dict(_LABEL.findall(labels or "")), float(value)))
    return Metrics(rows)

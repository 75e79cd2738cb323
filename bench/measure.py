"""Figures and what is said of them: p50, p99 and the spread. No I/O."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field


def percentile(values: Iterable[float], percent: float) -> float:
    """The value at ``percent`` of the sorted ones, interpolated; NaN of none."""
    ordered = sorted(values)
    if not ordered:
        return math.nan
    at = (len(ordered) - 1) * percent / 100
    low = math.floor(at)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (at - low)


@dataclass
class Series:
    """One figure over many rounds."""

    name: str
    """`pause_ms`, with the unit at the end."""
    labels: dict[str, str] = field(default_factory=dict)
    """What it was measured under: {"memory": "512 MiB", "load": "idle"}."""
    values: list[float] = field(default_factory=list)

    def add(self, value: float) -> None:
        self.values.append(float(value))

    @property
    def p50(self) -> float:
        return percentile(self.values, 50)

    @property
    def p99(self) -> float:
        return percentile(self.values, 99)

    @property
    def spread(self) -> tuple[float, float]:
        """The middle half."""
        return percentile(self.values, 25), percentile(self.values, 75)

    @property
    def unit(self) -> str:
        return self.name.rpartition("_")[2]

    @property
    def title(self) -> str:
        """Name and labels, for people."""
        text = self.name.removesuffix(f"_{self.unit}").replace("_", " ")
        labels = ", ".join(f"{key} {value}" for key, value in self.labels.items())
        return f"{text} ({labels})" if labels else text

    def document(self) -> dict[str, object]:
        """As JSON has it, with every single value."""
        low, high = self.spread
        summary = {"n": len(self.values), "p50": self.p50, "p99": self.p99, "p25": low, "p75": high}
        return {
            "name": self.name,
            "unit": self.unit,
            "labels": self.labels,
            **{key: value if math.isfinite(value) else None for key, value in summary.items()},
            "min": min(self.values, default=None),
            "max": max(self.values, default=None),
            "values": self.values,
        }


class Figures:
    """All series of one run."""

    def __init__(self) -> None:
        self.all: list[Series] = []

    def series(self, name: str, **labels: object) -> Series:
        """The series of that name and those labels; begun if need be."""
        text = {key: str(value) for key, value in labels.items()}
        found = self.find(name, **labels)
        if found is None:
            found = Series(name, text)
            self.all.append(found)
        return found

    def find(self, name: str, **labels: object) -> Series | None:
        text = {key: str(value) for key, value in labels.items()}
        for series in self.all:
            if series.name == name and series.labels == text:
                return series
        return None

"""The run as a table for terminals, and as one JSON document."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from .measure import Figures, Series
from .reach import TABLE

SCHEMA = "vmfork-bench/1"


@dataclass
class Run:
    """Everything that a report is made of."""

    host: dict[str, object]
    figures: Figures
    notes: list[str] = field(default_factory=list)
    failures: dict[str, str] = field(default_factory=dict)
    sections: dict[str, list[Series]] = field(default_factory=dict)
    """Series by the title of the scenario that measured them."""


def number(value: float) -> str:
    """Three figures that count, without exponents."""
    if not math.isfinite(value):
        return "-"
    if value == 0:
        return "0"
    digits = max(0, 2 - math.floor(math.log10(abs(value))))
    return f"{value:,.{min(digits, 4)}f}"


def text(run: Run) -> str:
    """Tables of all series, then what was to be reached."""
    lines = [f"{key}: {value}" for key, value in run.host.items()]
    for title, series in run.sections.items():
        rows = [
            [one.title, one.unit, str(len(one.values)), number(one.p50), number(one.p99), " to ".join(map(number, one.spread))]
            for one in series
            if not one.name.startswith("chain_by_fork")
        ]
        lines += ["", title, *table(["FIGURE", "UNIT", "N", "P50", "P99", "MIDDLE HALF"], rows)]
    rows = [
        [reach.figure, reach.limit_text, number(reach.value(run.figures)), reach.verdict(run.figures)]
        for reach in TABLE
    ]
    lines += ["", "To be reached", *table(["FIGURE", "REACH", "HERE", ""], rows)]
    lines += [f"note: {note}" for note in run.notes]
    lines += [f"FAILED: {name}: {why}" for name, why in run.failures.items()]
    return "\n".join(lines) + "\n"


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Columns as wide as they need to be; all but the first stand to the right."""
    widths = [max(len(row[i]) for row in [header, *rows]) for i in range(len(header))]

    def line(row: Sequence[str]) -> str:
        cells = [row[0].ljust(widths[0]), *(cell.rjust(widths[i]) for i, cell in enumerate(row) if i)]
        return "  ".join(cells).rstrip()

    return [line(header), *map(line, rows)]


def document(run: Run) -> str:
    """JSON, with every single value."""
    reach = []
    for one in TABLE:
        value = one.value(run.figures)
        reach.append(
            {
                "figure": one.figure,
                "limit": one.limit,
                "at_most": one.at_most,
                "unit": one.unit,
                "value": value if math.isfinite(value) else None,
                "verdict": one.verdict(run.figures),
            }
        )
    content = {
        "schema": SCHEMA,
        "host": run.host,
        "sections": {title: [one.document() for one in series] for title, series in run.sections.items()},
        "reach": reach,
        "notes": run.notes,
        "failures": run.failures,
    }
    return json.dumps(content, indent=1, ensure_ascii=False) + "\n"

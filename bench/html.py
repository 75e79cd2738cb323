"""The run as one HTML file: tables, and a plot of every series' single values, drawn as SVG.

Nothing is loaded from anywhere, and there is no script in it.
"""

from __future__ import annotations

import html
import math
from collections.abc import Sequence

from .measure import Series
from .reach import TABLE
from .report import Run, number

WIDTH, LEFT, RIGHT, ROW = 860, 300, 90, 26

STYLE = """
body { font: 15px/1.45 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem; color: #1c1c1c; }
table { border-collapse: collapse; } td, th { padding: .15rem .7rem; text-align: right; border-bottom: 1px solid #ddd; }
td:first-child, th:first-child { text-align: left; } svg { display: block; margin: .5rem 0 1.5rem; max-width: 100%; }
.reached { color: #176b2c; } .missed { color: #a31515; font-weight: 600; } .not { color: #777; }
svg text { font: 12px system-ui, sans-serif; fill: #1c1c1c; }
@media (prefers-color-scheme: dark) {
 body { background: #16181b; color: #ddd; } td, th { border-color: #333; } svg text { fill: #ccc; }
 .reached { color: #6fcf87; } .missed { color: #ff8d85; } }
"""


def page(run: Run) -> str:
    """The whole file."""
    parts = [
        "<!doctype html><html lang=en><meta charset=utf-8><title>vmfork: benchmark</title>",
        f"<style>{STYLE}</style><h1>vmfork: benchmark</h1>",
        "<p>" + "<br>".join(html.escape(f"{key}: {value}") for key, value in run.host.items()) + "</p>",
        _reach(run),
    ]
    for title, series in run.sections.items():
        parts.append(f"<h2>{html.escape(title)}</h2>")
        groups: dict[tuple[str, str], list[Series]] = {}
        for one in series:
            # What shares a name shares an axis.
            groups.setdefault((_group(one), one.unit), []).append(one)
        for (name, unit), members in groups.items():
            if name == "chain by fork":
                parts.append(_line(members, unit))
            else:
                parts.append(_strips(name, unit, members))
    if run.notes:
        parts.append("<h2>Notes</h2><ul>" + "".join(f"<li>{html.escape(note)}" for note in run.notes) + "</ul>")
    for name, why in run.failures.items():
        parts.append(f"<p class=missed>{html.escape(name)} failed: {html.escape(why)}</p>")
    return "\n".join(parts) + "\n"


def _group(one: Series) -> str:
    name = "stage" if one.name.startswith("stage_") else one.name.removesuffix(f"_{one.unit}")
    return name.replace("_", " ")


def _reach(run: Run) -> str:
    rows = []
    for one in TABLE:
        verdict = one.verdict(run.figures)
        cells = (one.figure, one.limit_text, number(one.value(run.figures)))
        rows.append(
            "<tr>"
            + "".join(f"<td>{html.escape(cell)}</td>" for cell in cells)
            + f"<td class={verdict.split()[0]}>{verdict}</td></tr>"
        )
    head = "<tr><th>figure<th>reach<th>here<th></tr>"
    return f"<h2>To be reached</h2><table>{head}{''.join(rows)}</table>"


def _nice(top: float) -> list[float]:
    """Ticks from 0 to a round number not under ``top``."""
    if not math.isfinite(top) or top <= 0:
        return [0.0, 1.0]
    step = 10 ** math.floor(math.log10(top))
    for factor in (0.2, 0.5, 1, 2):
        if top / (step * factor) <= 6:
            step *= factor
            break
    count = math.ceil(top / step - 1e-9)
    return [i * step for i in range(count + 1)]


def _strips(name: str, unit: str, members: Sequence[Series]) -> str:
    """A row per series: every value a dot, the middle half a bar, the median a mark."""
    members = [one for one in members if one.values]
    if not members:
        return ""
    ticks = _nice(max(max(one.values) for one in members))
    height = 30 + ROW * len(members) + 24
    scale = (WIDTH - LEFT - RIGHT) / ticks[-1]
    parts = [f'<svg viewBox="0 0 {WIDTH} {height}" role="img" aria-label="{html.escape(name)}">']
    parts.append(f'<text x="0" y="16" font-weight="600">{html.escape(name)}, {html.escape(unit)}</text>')
    bottom = 30 + ROW * len(members)
    for tick in ticks:
        x = LEFT + tick * scale
        parts.append(f'<line x1="{x:.1f}" x2="{x:.1f}" y1="26" y2="{bottom}" stroke="#8884"/>')
        parts.append(f'<text x="{x:.1f}" y="{bottom + 15}" text-anchor="middle">{tick:g}</text>')
    for row, one in enumerate(members):
        y = 30 + ROW * row + ROW / 2
        label = ", ".join(one.labels.values()) or name
        low, high = one.spread
        parts.append(f'<text x="{LEFT - 10}" y="{y + 4:.1f}" text-anchor="end">{html.escape(label)}</text>')
        parts.append(
            f'<rect x="{LEFT + low * scale:.1f}" y="{y - 7:.1f}" width="{max(1.0, (high - low) * scale):.1f}" height="14" fill="#4a7fb555"/>'
        )
        for i, value in enumerate(one.values):
            jitter = (i * 7 % 9 - 4) * 1.1
            parts.append(f'<circle cx="{LEFT + value * scale:.1f}" cy="{y + jitter:.1f}" r="2" fill="#2b6cb0" fill-opacity=".55"/>')
        x = LEFT + one.p50 * scale
        parts.append(f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{y - 9:.1f}" y2="{y + 9:.1f}" stroke="#c05621" stroke-width="2"/>')
        parts.append(f'<text x="{WIDTH - RIGHT + 12}" y="{y + 4:.1f}">{number(one.p50)} / {number(one.p99)}</text>')
    parts.append(f'<text x="{WIDTH - RIGHT + 12}" y="16">p50 / p99</text></svg>')
    return "".join(parts)


def _line(members: Sequence[Series], unit: str) -> str:
    """The pause of each fork of a chain, in turn."""
    values = [(int(one.labels["fork"]), one.p50) for one in members if one.values]
    if not values:
        return ""
    ticks = _nice(max(value for _, value in values))
    height, bottom = 220, 180
    across = (WIDTH - 120) / max(1, values[-1][0] - 1)
    up = (bottom - 30) / ticks[-1]
    parts = [f'<svg viewBox="0 0 {WIDTH} {height}" role="img" aria-label="pause by fork">']
    parts.append(f'<text x="0" y="16" font-weight="600">pause by number of the fork (p50), {html.escape(unit)}</text>')
    for tick in ticks:
        y = bottom - tick * up
        parts.append(f'<line x1="60" x2="{WIDTH - 60}" y1="{y:.1f}" y2="{y:.1f}" stroke="#8884"/>')
        parts.append(f'<text x="52" y="{y + 4:.1f}" text-anchor="end">{tick:g}</text>')
    points = " ".join(f"{60 + (fork - 1) * across:.1f},{bottom - value * up:.1f}" for fork, value in values)
    parts.append(f'<polyline points="{points}" fill="none" stroke="#2b6cb0" stroke-width="2"/>')
    for fork, _value in values:
        if fork == 1 or fork % 10 == 0:
            parts.append(f'<text x="{60 + (fork - 1) * across:.1f}" y="{bottom + 18}" text-anchor="middle">{fork}</text>')
    parts.append("</svg>")
    return "".join(parts)

#!/usr/bin/python3
"""Draws the plots of docs/performance.md as SVG, from the figures recorded in docs/measurements.

Run it after a figure below changes: `python3 docs/measurements/plots.py`.
"""

from __future__ import annotations

from pathlib import Path

FOLDER = Path(__file__).resolve().parent
WIDTH, LABELS, BAR, PITCH, TOP = 720, 250, 20, 30, 44

# File, title, unit, and the bars; each bar has a label and a value.
PLOTS = [
    # fork-and-pause.md, Baselines; goals.md, the parent's pause.
    (
        "pause.svg",
        "How long the parent stands still",
        "ms",
        [
            ("vmfork fork, 512 MiB", 3.4),
            ("stop-save-restore, 512 MiB", 149.0),
            ("stop-save-restore, 1 GiB", 311.0),
        ],
    ),
    # other-hosts.md, A database on 16 hosts, first fork.
    (
        "sent.svg",
        "What the parent's host sends when clones read 256 MiB",
        "MiB",
        [
            ("1 host, unicast", 274.0),
            ("16 hosts, swarm (default)", 313.0),
            ("16 hosts, multicast", 333.0),
            ("16 hosts, unicast", 4452.0),
        ],
    ),
]


def svg(title: str, unit: str, bars: list[tuple[str, float]]) -> str:
    """One horizontal bar chart. The axis is linear and starts at 0."""
    height = TOP + PITCH * len(bars)
    scale = (WIDTH - LABELS - 100) / max(value for _, value in bars)
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" role="img">',
        "<style>text { font: 14px sans-serif; fill: #777 } rect { fill: #3b82c4 }</style>",
        f"<title>{title}</title>",
        f'<text x="0" y="20" font-weight="bold">{title}</text>',
    ]
    for row, (label, value) in enumerate(bars):
        top = TOP + PITCH * row
        width = max(1.0, value * scale)
        lines += [
            f'<text x="0" y="{top + 15}">{label}</text>',
            f'<rect x="{LABELS}" y="{top}" width="{width:.1f}" height="{BAR}"/>',
            f'<text x="{LABELS + width + 8:.1f}" y="{top + 15}">{value:,g} {unit}</text>',
        ]
    return "\n".join([*lines, "</svg>"]) + "\n"


def main() -> None:
    """Writes every plot beside this file."""
    for name, title, unit, bars in PLOTS:
        (FOLDER / name).write_text(svg(title, unit, bars), encoding="utf-8")


if __name__ == "__main__":
    main()

"""Curves as an SVG file, so that a machine without a plotting library draws them."""

from __future__ import annotations

import pathlib
from collections.abc import Mapping, Sequence
from html import escape

WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 800, 480, 60, 20, 20, 50
COLORS = ("#222222", "#1f77b4", "#d62728", "#2ca02c", "#9467bd", "#ff7f0e")
TICKS = 5

Curve = Sequence[tuple[float, float]]
"""Points from left to right."""


def draw(path: pathlib.Path, curves: Mapping[str, tuple[Curve, Curve]], x_label: str, y_label: str) -> None:
    """Writes a line for each name: the first curve pale, the second, with a dot at each point, on top of it."""
    points = [point for pair in curves.values() for curve in pair for point in curve]
    if not points:
        return
    x0, x1 = min(x for x, _ in points), max(x for x, _ in points)
    y0, y1 = min(y for _, y in points), max(y for _, y in points)
    x_range, y_range = x1 - x0 or 1, y1 - y0 or 1

    def at(x: float, y: float) -> tuple[float, float]:
        across = LEFT + (x - x0) / x_range * (WIDTH - LEFT - RIGHT)
        return across, HEIGHT - BOTTOM - (y - y0) / y_range * (HEIGHT - TOP - BOTTOM)

    def text(x: float, y: float, content: str, anchor: str = "middle", more: str = "") -> str:
        return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" {more}>{escape(content)}</text>'

    def line(curve: Curve, style: str) -> str:
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in (at(*point) for point in curve))
        return f'<polyline points="{path}" fill="none" {style}/>'

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif" '
        'font-size="12">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>',
        text((LEFT + WIDTH - RIGHT) / 2, HEIGHT - 10, x_label),
        text(15, HEIGHT / 2, y_label, more=f'transform="rotate(-90 15 {HEIGHT / 2})"'),
    ]
    for i in range(TICKS):
        x, y = x0 + i / (TICKS - 1) * x_range, y0 + i / (TICKS - 1) * y_range
        across, down = at(x, y)
        parts += [text(across, HEIGHT - BOTTOM + 18, f"{x:.0f}"), text(LEFT - 8, down + 4, f"{y:.2f}", "end")]
        parts.append(f'<path d="M{LEFT} {down:.1f}H{WIDTH - RIGHT}" stroke="#dddddd"/>')
    for i, (name, (pale, bold)) in enumerate(curves.items()):
        color = COLORS[i % len(COLORS)]
        parts.append(line(pale, f'stroke="{color}" stroke-opacity="0.25"'))
        parts.append(line(bold, f'stroke="{color}" stroke-width="2"'))
        dots = [at(*point) for point in bold]
        parts += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{color}"/>' for x, y in dots]
        parts.append(text(WIDTH - RIGHT - 8, TOP + 16 * (i + 1), name, "end", f'fill="{color}"'))
    path.write_text("\n".join([*parts, "</svg>"]) + "\n", encoding="utf-8")

"""Curves of a run as one small SVG, for a notebook's cell and a model's card."""

from __future__ import annotations

import html
from collections.abc import Mapping, Sequence

from penstock.files import visible

_WIDTH, _HEIGHT, _MARGIN = 640, 180, 28
_COLORS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7")
Point = tuple[int, float]  # step, value


def draw_curves(curves: Mapping[str, Sequence[Point]], steps: int) -> str:
    """Return an SVG of the curves over `steps`; the first is a plain line, the others have dots."""
    values = [value for points in curves.values() for _, value in points]
    low, high = min([0.0, *values]), max([1.0, *values])

    def place(point: Point) -> tuple[float, float]:
        x = _MARGIN + (_WIDTH - 2 * _MARGIN) * point[0] / max(steps, 1)
        y = _MARGIN + (_HEIGHT - 2 * _MARGIN) * (high - point[1]) / (high - low)
        return round(x, 1), round(y, 1)

    parts = [
        f'<text x="2" y="{place((0, edge))[1] + 4}" font-size="11" fill="#888">{edge:g}</text>'
        f'<path d="M{_MARGIN} {place((0, edge))[1]}H{_WIDTH - _MARGIN}" stroke="#ccc"/>'
        for edge in (low, high)
    ]
    for number, (name, points) in enumerate(curves.items()):
        color, where = _COLORS[number % len(_COLORS)], [place(point) for point in points]
        line = " ".join(f"{x},{y}" for x, y in where)
        parts.append(f'<polyline points="{line}" fill="none" stroke="{color}" stroke-width="1.5"/>')
        if number:
            parts += [f'<circle cx="{x}" cy="{y}" r="3" fill="{color}"/>' for x, y in where]
        parts.append(
            f'<text x="{_MARGIN + 120 * number}" y="{_HEIGHT - 6}" font-size="12" fill="{color}">'
            f"{html.escape(visible(name))}</text>"
        )
    size = f'viewBox="0 0 {_WIDTH} {_HEIGHT}" width="{_WIDTH}"'
    return f'<svg xmlns="http://www.w3.org/2000/svg" {size}>{"".join(parts)}</svg>'

"""A plot one line high, for the panel, the summary and tables."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from rich.console import Console

_BLOCKS, _PLAIN_BLOCKS = "▁▂▃▄▅▆▇█", "_.-=*#"
WIDTH = 40


def sparkline(
    console: Console,
    values: Sequence[float | None],
    low: float | None = None,
    high: float | None = None,
    width: int = WIDTH,
) -> str:
    """Return the plot; a long series is averaged over equal stretches, one value gives none."""
    present = [value for value in values if value is not None]
    if len(present) < 2:
        return ""
    columns = min(len(present), width)
    edges = [round(i * len(present) / columns) for i in range(columns + 1)]
    means = [sum(present[a:b]) / (b - a) for a, b in pairwise(edges)]
    low = min(means) if low is None else low
    high = max(means) if high is None else high
    blocks = _BLOCKS if console.encoding.lower().startswith("utf") else _PLAIN_BLOCKS
    scale = (len(blocks) - 1) / (high - low) if high > low else 0.0
    return "".join(
        blocks[round(min(max(mean - low, 0.0) * scale, len(blocks) - 1))] for mean in means
    )

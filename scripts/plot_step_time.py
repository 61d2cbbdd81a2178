"""Draw where the time of a step goes, from the figures of `benchmarks/gpu_table.py`.

    python scripts/plot_step_time.py [benchmarks/results/h200/figures.jsonl]

Writes docs/images/step-time.svg. Every length in the picture is a measured figure or the difference of two.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any
from xml.sax.saxutils import escape

ROOT = Path(__file__).resolve().parent.parent
FIGURES = ROOT / "benchmarks" / "results" / "h200" / "figures.jsonl"
IMAGE = ROOT / "docs" / "images" / "step-time.svg"
COLOURS = {
    "matrix products": "#2f6f9f",
    "attention": "#5fa2ce",
    "elementwise": "#e08a3c",
    "copies": "#f2b872",
    "reductions": "#f6d6a8",
    "our Triton kernels": "#6aa56a",
    "optimizer": "#8d7ab8",
    "other": "#b8b8b8",
    "GPU idle": "#e4e4e4",
    "engine": "#2f6f9f",
    "between engine and trainer": "#e08a3c",
    "training": "#6aa56a",
}
NAMES = {"triton": "our Triton kernels"}
WIDTH, LEFT, RIGHT, BAR, GAP = 980, 250, 110, 26, 44


def bars(rows: list[dict[str, Any]]) -> list[tuple[str, str, float, dict[str, float]]]:
    """Return (title, unit, needed or 0, parts) of each bar."""
    by_name = {row["name"]: row for row in rows}
    step, alone = by_name["GRPO step on-policy"], by_name["rollouts 512 x 256"]
    engine = 512 * 256 / alone["tokens_per_s"]
    parts = {
        "engine": engine,
        "between engine and trainer": step["waited_s"] - engine,
        "training": step["train_s"],
        "other": step["step_s"] - step["waited_s"] - step["train_s"],
    }
    found = [("GRPO step, 64 x 8 x 256 tokens", "s", 0.0, parts)]
    for name, row in by_name.items():
        if name.startswith("update "):
            profile = by_name[f"profile {name}"]
            found.append((name, "ms", row["mfu"] * row["ms"], kernels(profile, row["ms"])))
        if name.startswith("decode step at batch"):
            profile = by_name[name.replace("decode step", "profile decode")]
            if profile["busy_ms"] <= row["ms"]:  # else the profile has a long prefill in it
                found.append((name, "ms", 0.0, kernels(profile, row["ms"])))
    return found


def kernels(profile: dict[str, Any], wall_ms: float) -> dict[str, float]:
    """Return the parts of a profile, and the time in which no kernel ran.

    Kernels of a decode step overlap: their times, which add up to more, are scaled to the time they took.
    """
    outside = ("part", "name", "wall_ms", "busy_ms", "kernels")
    parts: dict[str, float] = {}
    for key, value in profile.items():
        if key not in outside:
            name = NAMES.get(key, key if key in COLOURS else "other")
            parts[name] = parts.get(name, 0.0) + value
    scale = min(1.0, profile["busy_ms"] / sum(parts.values()))
    parts = {name: value * scale for name, value in parts.items()}
    ordered = {name: parts[name] for name in COLOURS if name in parts}
    return {**ordered, "GPU idle": max(0.0, wall_ms - sum(parts.values()))}


def draw(found: list[tuple[str, str, float, dict[str, float]]]) -> str:
    height = 40 + len(found) * (BAR + GAP)
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{height}" '
        'font-family="sans-serif" font-size="12">',
        f'<rect width="{WIDTH}" height="{height}" fill="white"/>',
    ]
    for number, (title, unit, needed, parts) in enumerate(found):
        top, total = 20 + number * (BAR + GAP), sum(parts.values())
        scale = (WIDTH - LEFT - RIGHT) / total
        lines.append(f'<text x="10" y="{top + 17}">{escape(title)}</text>')
        lines.append(f'<text x="{WIDTH - RIGHT + 8}" y="{top + 17}">{total:.3g} {unit}</text>')
        x, label_end = float(LEFT), 0.0
        for name, value in parts.items():
            width = value * scale
            lines.append(
                f'<rect x="{x:.1f}" y="{top}" width="{width:.1f}" height="{BAR}" '
                f'fill="{COLOURS[name]}"><title>{name}: {value:.4g} {unit}</title></rect>'
            )
            label = f"{name} {value:.3g}"
            if width > 18 and x >= label_end:
                lines.append(f'<text x="{x:.1f}" y="{top + BAR + 13}">{escape(label)}</text>')
                label_end = x + 6.2 * len(label)
            x += width
        if needed:
            at = LEFT + needed * scale
            lines.append(
                f'<path d="M{at:.1f} {top - 4}V{top + BAR}" stroke="black" stroke-width="2"/>'
                f'<text x="{at + 4:.1f}" y="{top - 3}">the hardware needs {needed:.3g}</text>'
            )
    return "\n".join([*lines, "</svg>"]) + "\n"


def main() -> None:
    path = Path(sys.argv[1]) if len(sys.argv) > 1 else FIGURES
    rows = [json.loads(line) for line in path.read_text("utf-8").splitlines()]
    IMAGE.write_text(draw(bars(rows)), "utf-8")
    print(f"wrote {IMAGE}")


if __name__ == "__main__":
    main()

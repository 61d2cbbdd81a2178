"""The account of each task in words: what it produced in the last step, from the metrics of that step."""

from __future__ import annotations

_EVENTS = (
    "retried",
    "failed",
    "aborted",
    "expired",
    "filtered",
    "tail_calls",
    "pause_timeouts",
    "prompts_skipped_long",
)


def account_lines(metrics: dict[str, float]) -> list[str]:
    """Return a line per task, from the metrics `tasks/NAME/FIGURE`."""
    tasks: dict[str, dict[str, float]] = {}
    for key, value in metrics.items():
        if key.startswith("tasks/"):
            _, task, figure = key.split("/", 2)
            tasks.setdefault(task, {})[figure] = value
    return [
        f"{task}, last step: {_account_text(figures)}"
        for task, figures in tasks.items()
        if figures.get("samples")
    ]


def _account_text(figures: dict[str, float]) -> str:
    """Return the figures of one task in words; counts of 0 are left out."""
    get = figures.get
    words = [f"{get('samples', 0.0):,.0f} samples", f"{get('tokens', 0.0):,.0f} tokens"]
    if count := get("reward_count"):
        words.append(f"reward {get('reward_sum', 0.0) / count:.3f}")
    words += [
        f"{name.removeprefix('part/')} {figures[name]:.3f}"
        for name in figures
        if name.startswith("part/")
    ]
    if "temperature" in figures:
        words.append(f"temperature {figures['temperature']:.3g}")
    if "group_time_p50_s" in figures:
        p50, p99 = figures["group_time_p50_s"], get("group_time_p99_s", 0.0)
        words.append(f"group time {p50:.3g} s (p99 {p99:.3g} s)")
    words += [f"{name.replace('_', ' ')} {figures[name]:.0f}" for name in _EVENTS if get(name)]
    return ", ".join(words)

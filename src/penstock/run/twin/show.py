"""The answers of the twin as a table, as JSON and as a picture (SVG)."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from xml.sax.saxutils import escape

from penstock.run.twin.plan import Check, Plan
from penstock.run.twin.profile import Profile
from penstock.run.twin.simulate import Result

_WIDTH, _HEIGHT, _LEFT, _TOP, _BOTTOM = 720, 420, 70, 40, 60
_RATE, _TRAINER, _ENGINE = "#1f6feb", "#b35900", "#5a7d2b"


def text_of(profile: Profile, plan: Plan) -> Iterator[str]:
    """Yield the lines of a plan."""
    base, steps = plan.base, plan.steps
    yield f"profile: {profile.source}"
    yield from (f"note: {note}" for note in (*profile.notes, *base.notes))
    yield ""
    yield (
        f"{base.engines} engines, {base.ranks} trainer ranks: {base.tokens_per_s:,.0f} trained tokens/s, "
        f"{base.seconds_per_step:.2f} s a step"
    )
    yield (
        f"idle: trainer {base.trainer_idle:.1%}, engines {base.engine_idle:.1%} (slots in use {base.slots_used:.0%}); "
        f"the driver's core is {base.driver_busy:.1%} busy"
    )
    yield f"staleness: {histogram(base)}; mean {base.mean_staleness:.2f}"
    drops = ", ".join(f"{count} {name}" for name, count in base.drops.items()) or "none"
    yield f"groups: {base.groups} trained; in vain: {drops}"
    yield (
        f"{steps} steps: {duration(base.seconds_per_step * steps)}, {base.gpu_hours(steps):,.2f} GPU hours "
        "at one GPU for an engine or rank"
    )
    if plan.variations:
        yield from ("", "what if".ljust(36) + _HEAD)
        yield _row("(as it is)", base, base)
        for words, result in plan.variations.items():
            yield _row(words, result, base)
    if best := plan.best_split:
        yield from ("", f"split of {best.engines + best.ranks} GPUs".ljust(36) + _HEAD)
        for result in plan.splits:
            mark = "  <- best" if result is best else ""
            yield _row(f"{result.engines} engines, {result.ranks} ranks", result, base) + mark
        yield f"write: launch.num_producers={best.engines} launch.num_consumers={best.ranks}"
        yield from (f"note: {note}" for note in best.notes)


_HEAD = "tokens/s    change   s/step  trainer idle  engines idle  staleness"


def _row(name: str, result: Result, base: Result) -> str:
    change = f"{result.tokens_per_s / base.tokens_per_s - 1:+.0%}" if result is not base else ""
    return (
        f"{name:<34}{result.tokens_per_s:>10,.0f}{change:>10}{result.seconds_per_step:>9.2f}"
        f"{result.trainer_idle:>14.1%}{result.engine_idle:>14.1%}{result.mean_staleness:>11.2f}"
    )


def histogram(result: Result) -> str:
    total = max(1, sum(result.staleness.values()))
    return ", ".join(f"{n} behind {count / total:.0%}" for n, count in result.staleness.items())


def duration(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.1f} s"
    if seconds < 7200:
        return f"{seconds / 60:.1f} min"
    return f"{seconds / 3600:.1f} h"


def check_lines(run: str, source: str, checks: Sequence[Check]) -> Iterator[str]:
    """Yield a real run beside its prediction."""
    yield f"{run}, predicted from {source}:"
    yield f"{'':<14}{'real':>12}{'predicted':>12}{'error':>12}"
    for check in checks:
        if check.is_share:
            error = f"{check.error * 100:+.1f} points"
            yield f"{check.name:<14}{check.real:>12.1%}{check.predicted:>12.1%}{error:>12}"
        else:
            yield f"{check.name:<14}{check.real:>12,.2f}{check.predicted:>12,.2f}{check.error:>+12.1%}"


def check_json(checks: Sequence[Check]) -> str:
    return json.dumps({check.name: {**asdict(check), "error": check.error} for check in checks})


def json_of(profile: Profile, plan: Plan) -> str:
    return json.dumps(
        {
            "profile": profile.source,
            "notes": [*profile.notes, *plan.base.notes],
            "steps": plan.steps,
            "as_it_is": _figures(plan.base, plan.steps),
            "variations": {w: _figures(r, plan.steps) for w, r in plan.variations.items()},
            "splits": [_figures(result, plan.steps) for result in plan.splits],
            "best_split": plan.best_split and _figures(plan.best_split, plan.steps),
        },
        indent=2,
    )


def _figures(result: Result, steps: int) -> dict[str, object]:
    return {
        **asdict(result),
        "tokens_per_s": result.tokens_per_s,
        "seconds_per_step": result.seconds_per_step,
        "mean_staleness": result.mean_staleness,
        "hours": result.seconds_per_step * steps / 3600,
        "gpu_hours": result.gpu_hours(steps),
    }


def picture(plan: Plan) -> str:
    """An SVG: tokens/s and the idle shares of both sides, over the splits or the variations."""
    if plan.splits:
        points = [(f"{result.engines}+{result.ranks}", result) for result in plan.splits]
        title = "engines + trainer ranks"
    else:
        points = [("as it is", plan.base), *plan.variations.items()]
        title = "settings"
    most = max(result.tokens_per_s for _, result in points) or 1.0
    height = _HEIGHT - _TOP - _BOTTOM
    gap = (_WIDTH - 2 * _LEFT) / max(1, len(points) - 1)

    def line(values: list[float], colour: str) -> str:
        spots = [(_LEFT + n * gap, _TOP + height * (1 - v)) for n, v in enumerate(values)]
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in spots)
        dots = "".join(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3.5"/>' for x, y in spots)
        bent = f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"/>'
        return f'{bent}<g fill="{colour}">{dots}</g>'

    marks = "".join(
        f'<text x="{_LEFT + n * gap:.1f}" y="{_HEIGHT - _BOTTOM + 20}" text-anchor="middle" font-size="10">'
        f"{escape(name.rpartition('.')[2])}</text>"
        for n, (name, _) in enumerate(points)
    )
    scale = "".join(
        f'<line x1="{_LEFT}" x2="{_WIDTH - _LEFT}" y1="{y:.1f}" y2="{y:.1f}" stroke="#ddd"/>'
        f'<text x="{_LEFT - 6}" y="{y + 4:.1f}" text-anchor="end" font-size="10" fill="{_RATE}">'
        f"{most * share:,.0f}</text>"
        f'<text x="{_WIDTH - _LEFT + 6}" y="{y + 4:.1f}" font-size="10">{share:.0%}</text>'
        for share in (0.0, 0.25, 0.5, 0.75, 1.0)
        for y in [_TOP + height * (1 - share)]
    )
    names = [("tokens/s", _RATE), ("trainer idle", _TRAINER), ("engines idle", _ENGINE)]
    legend = "".join(
        f'<text x="{_LEFT + n * 120}" y="22" font-size="12" fill="{colour}">{name}</text>'
        for n, (name, colour) in enumerate(names)
    )
    lines = [
        line([result.tokens_per_s / most for _, result in points], _RATE),
        line([result.trainer_idle for _, result in points], _TRAINER),
        line([result.engine_idle for _, result in points], _ENGINE),
    ]
    below = f'<text x="{_WIDTH / 2}" y="{_HEIGHT - 14}" text-anchor="middle" font-size="12">{title}</text>'
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}" font-family="sans-serif">'
        f'<rect width="100%" height="100%" fill="white"/>{scale}{"".join(lines)}{marks}{legend}{below}</svg>\n'
    )

"""The answers of the twin as a table, as JSON and as a picture (SVG)."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict

from penstock.inspection.summary import count, duration
from penstock.inspection.track.console import draw_curves
from penstock.run.twin.plan import Check, Plan
from penstock.run.twin.profile import Profile
from penstock.run.twin.simulate import Result


def text_of(profile: Profile, plan: Plan) -> Iterator[str]:
    """Yield the lines of a plan."""
    base, steps = plan.base, plan.steps
    yield f"profile: {profile.source}"
    yield from (f"note: {note}" for note in (*profile.notes, *base.notes))
    yield ""
    yield (
        f"{count(base.engines, 'engine')}, {count(base.ranks, 'trainer rank')}: {base.tokens_per_s:,.0f} trained tokens/s, "
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
            split = f"{count(result.engines, 'engine')}, {count(result.ranks, 'rank')}"
            yield _row(split, result, base) + mark
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
        results = {f"{result.engines} engines": result for result in plan.splits}
    else:
        results = {"as it is": plan.base, **plan.variations}
    most = max(result.tokens_per_s for result in results.values()) or 1.0
    shares = {
        "trainer idle": [result.trainer_idle for result in results.values()],
        "engines idle": [result.engine_idle for result in results.values()],
        f"tokens/s; 1 is {most:,.0f}": [r.tokens_per_s / most for r in results.values()],
    }
    curves = {name: list(enumerate(values)) for name, values in shares.items()}
    labels = [name.rpartition(".")[2] for name in results]
    return draw_curves(curves, len(results) - 1, labels)

"""Questions to the twin: what a change of settings does, how to split GPUs, how wrong a prediction was.

The answers are a table, JSON or a picture (SVG).
"""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import NamedTuple

from penstock.config import Config
from penstock.config.source import with_overrides
from penstock.errors import UserError
from penstock.files import count
from penstock.inspection.summary import duration
from penstock.inspection.timeline import covered
from penstock.inspection.track.console import draw_curves
from penstock.run.twin.fit import Recording, read_recording
from penstock.run.twin.profile import Profile
from penstock.run.twin.simulate import Result, simulate
from penstock.store.run_folder import find
from penstock.waits import WaitKind

TRIAL_STEPS = 30  # of a variation or a split, which stand for all steps
_MOST_SPLITS = 12
_TRAINER_WORKS = (WaitKind.TRAIN, WaitKind.PUBLISH, WaitKind.CHECKPOINT)


@dataclass(slots=True, kw_only=True)
class Plan:
    """The answers to one `penstock simulate`."""

    base: Result
    steps: int  # that time and GPU hours are given for
    variations: dict[str, Result] = field(default_factory=dict)  # settings ->
    splits: list[Result] = field(default_factory=list)  # of the GPUs that were given

    @property
    def best_split(self) -> Result | None:
        return max(self.splits, key=lambda result: result.tokens_per_s, default=None)


class Check(NamedTuple):
    """A figure of a real run, and what the twin said without it."""

    name: str
    real: float
    predicted: float

    @property
    def is_share(self) -> bool:
        return self.name.endswith(" idle")

    @property
    def error(self) -> float:
        """The relative error; of a share, the difference."""
        if self.is_share:
            return self.predicted - self.real
        return self.predicted / self.real - 1 if self.real else 0.0


def make_plan(
    config: Config,
    profile: Profile,
    *,
    steps: int | None,
    gpus: int = 0,
    variations: Sequence[str] | None = None,
) -> Plan:
    """Simulate the config, its variations (None: the usual ones) and the splits of `gpus` GPUs."""
    total = steps or config.train.steps or TRIAL_STEPS
    plan = Plan(base=simulate(config, profile, steps=total), steps=total)

    def tried(changed: Config) -> Result:
        return simulate(changed, profile, steps=total, most=TRIAL_STEPS)

    for words in _usual(config) if variations is None else _expanded(variations):
        try:
            plan.variations[" ".join(words)] = tried(with_overrides(config, words))
        except UserError:
            if variations is not None:
                raise  # else a usual variation that this config does not allow
    if gpus:
        plan.splits = list(map(tried, split_configs(config, gpus)))
    return plan


def _usual(config: Config) -> Iterator[list[str]]:
    """Yield what one would try first: staleness, group size, oversampling."""
    produce, size = config.produce, config.sampling.num_generations
    is_async = produce.strategy == "async"
    for bound in sorted({0, 1, 2, 4} - {produce.max_staleness}) if is_async else ():
        yield [f"produce.max_staleness={bound}"]
    for other in (size // 2, size * 2):
        if other > 1:
            yield [f"sampling.num_generations={other}"]
    for share in sorted({0.0, 0.25, 0.5} - {produce.over_sample_threshold}) if is_async else ():
        yield [f"produce.over_sample_threshold={share:g}"]


def _expanded(variations: Sequence[str]) -> Iterator[list[str]]:
    """Yield a setting for each value of KEY=VALUE,VALUE; a list in brackets is one value."""
    for word in variations:
        key, _, values = word.partition("=")
        if not values:
            raise UserError(f"--vary: got {word!r}, allowed: KEY=VALUE,VALUE")
        for value in [values] if values.startswith(("[", "{")) else values.split(","):
            yield [f"{key}={value}"]


def split_configs(config: Config, gpus: int) -> list[Config]:
    """The config with so many GPUs for ranks and the others for engines, evenly over what is possible."""
    if gpus < 2:
        raise UserError(
            f"--nodes: got {gpus} GPU to split, allowed: at least 2 (on one, launch.colocate=true)"
        )
    able = [ranks for ranks in range(1, gpus) if config.train.groups_per_step % ranks == 0]
    splits = []
    for ranks in able[:: max(1, -(-len(able) // _MOST_SPLITS))]:
        words = [f"launch.num_producers={gpus - ranks}", f"launch.num_consumers={ranks}"]
        kind = [] if config.launch.kind != "inline" else ["launch.kind=local"]
        with contextlib.suppress(UserError):  # ranks that train.parallel cannot use
            splits.append(with_overrides(config, [*words, *kind, "launch.colocate=false"]))
    return splits


def parse_nodes(text: str) -> int:
    """The GPUs of NODESxGPUS, such as 8x8."""
    try:
        count = math.prod(map(int, text.split("x", 1)))
    except ValueError:
        count = 0
    if count < 1:
        raise UserError(
            f"--nodes: got {text!r}, allowed: NODESxGPUS such as 2x8, or a number of GPUs"
        )
    return count


# -- how honest it is -------------------------------------------------------------------------


def check(run: str, profile: Profile) -> list[Check]:
    """Predict a real run from a profile; return its figures beside those of the twin."""
    recording = read_recording(find(run))
    steps = len(recording.step_tokens)
    if not steps:
        raise UserError(f"--check: {run} got no committed step, allowed: a run that trained")
    predicted = simulate(recording.config, profile, steps=steps)
    seconds, trainer_idle, engine_idle = measured(recording)
    tokens = sum(recording.step_tokens.values())
    return [
        Check("tokens/s", tokens / seconds, predicted.tokens_per_s),
        Check("s per step", seconds / steps, predicted.seconds_per_step),
        Check("trainer idle", trainer_idle, predicted.trainer_idle),
        Check("engine idle", engine_idle, predicted.engine_idle),
    ]


def measured(recording: Recording) -> tuple[float, float, float]:
    """A run's seconds from first request to last update, of each session, and the idle shares of both sides."""
    requests = recording.calls(WaitKind.GENERATE, "engine")
    updates = recording.calls(WaitKind.TRAIN, "trainer")
    if not requests or not updates:
        raise UserError(
            f"--check: got {len(requests)} requests and {len(updates)} updates in the timeline, "
            "allowed: a run that trained"
        )
    lanes = {event.lane for event in requests}
    seconds = trained = used = 0.0
    for session in recording.sessions():
        begin = min((e.start for e in session.calls(WaitKind.GENERATE, "engine")), default=0.0)
        end = max((e.end for e in session.calls(WaitKind.TRAIN, "trainer")), default=0.0)
        if end <= begin:
            continue  # stopped before its first update
        seconds += end - begin
        works = [event for kind in _TRAINER_WORKS for event in session.calls(kind, "trainer")]
        trained += covered(event for event in works if event.start < end)
        for lane in lanes:
            calls = session.calls(WaitKind.GENERATE, lane)
            used += covered(event for event in calls if event.start < end and event.lane == lane)
    engines = max(len(lanes), recording.config.launch.num_producers)
    return seconds, max(0.0, 1 - trained / seconds), max(0.0, 1 - used / engines / seconds)


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
    total = max(1, sum(base.staleness.values()))
    shares = ", ".join(f"{n} behind {c / total:.0%}" for n, c in base.staleness.items())
    yield f"staleness: {shares}; mean {base.mean_staleness:.2f}"
    drops = ", ".join(f"{count} {name}" for name, count in base.drops.items()) or "none"
    yield f"groups: {base.groups} trained; in vain: {drops}"
    yield (
        f"{count(steps, 'step')}: {duration(base.seconds_per_step * steps)}, {base.gpu_hours(steps):,.2f} GPU hours "
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


def check_lines(run: str, source: str, checks: Sequence[Check], *, as_json: bool) -> Iterator[str]:
    """Yield a real run beside its prediction, as a table or as JSON."""
    if as_json:
        yield json.dumps({c.name: {**c._asdict(), "error": c.error} for c in checks})
        return
    yield f"{run}, predicted from {source}:"
    yield f"{'':<14}{'real':>12}{'predicted':>12}{'error':>12}"
    for check in checks:
        if check.is_share:
            error = f"{check.error * 100:+.1f} points"
            yield f"{check.name:<14}{check.real:>12.1%}{check.predicted:>12.1%}{error:>12}"
        else:
            yield f"{check.name:<14}{check.real:>12,.2f}{check.predicted:>12,.2f}{check.error:>+12.1%}"


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

"""Rules about the pipeline: two sides that disagree, wait for each other, or work in vain."""

from __future__ import annotations

import math

from penstock.data.identity import MACHINE
from penstock.inspection.findings.observed import Observed, mean
from penstock.types import Finding

_LONG = 20  # steps over which shares of time and of groups are taken
_WORTH = 0.1  # a remedy that saves a smaller share of the time is not offered


def failures(o: Observed) -> Finding | None:
    """Groups fail, most often because of the reward."""
    failed, made = _recent(o, "groups/failed"), _recent(o, "produced/groups")
    if not failed or failed < 3 or failed < 0.05 * (failed + made):
        return None
    error = o.last_failure()
    by_reward = "reward" in error
    steps = [int(row["step"]) for row in o.rows[-_LONG:] if (row.get("groups/failed") or 0) > 0]
    return Finding(
        name="failures",
        what="The reward fails" if by_reward else "Groups fail and are generated again",
        since=steps[0],
        evidence=f"{failed:.0f} groups failed while {made:.0f} were completed" + _quoted(error),
        advice="Mend the reward: penstock check shows its error with file and line"
        if by_reward
        else f"Look into the logs of the workers: {o.run}/logs",
    )


def _quoted(error: str) -> str:
    line = " ".join(error.split())
    return f"; the last error: {line[:200]}" if line else ""


def mismatch(o: Observed) -> Finding | None:
    """Engine and trainer give the same tokens other probabilities."""
    fresh = not o.now("staleness/mean") > 0
    bound = 0.01 if fresh else 0.05
    since = o.since("mismatch/kl", lambda kl: kl > bound)
    if since is None:
        return None
    advice, change = _nearer(o, fresh)
    weights = f"; the importance weights are worth {o.now('importance/ess'):.0%} of the samples"
    return Finding(
        name="mismatch",
        what="Engine and trainer disagree about the probability of tokens",
        since=since,
        evidence=f"mismatch/kl is {o.now('mismatch/kl'):.3g}"
        + ("" if math.isnan(o.now("importance/ess")) else weights),
        advice=advice,
        change=change,
    )


def _nearer(o: Observed, fresh: bool) -> tuple[str, tuple[str, ...]]:
    if any(o.config.task_sampling(task).cuts_tokens for task in o.config.tasks):
        return "Sample from all tokens, as the trainer does", (
            "sampling.top_k=0",
            "sampling.top_p=1.0",
        )
    if not fresh and o.config.produce.max_staleness > 1:
        return "Train fresher samples", (
            f"produce.max_staleness={o.config.produce.max_staleness // 2}",
        )
    if o.settings.correction == "none":
        return "Weigh tokens by their importance", ("algorithm.correction.kind=token_truncate",)
    return "Compute with more digits", ("model.dtype=float32",)


def expired(o: Observed) -> Finding | None:
    """Groups become too old before a step takes them, and are generated again."""
    old, made = _recent(o, "groups/expired"), _recent(o, "produced/groups")
    if not old or old < 0.2 * made:
        return None
    steps = [int(row["step"]) for row in o.rows[-_LONG:] if (row.get("groups/expired") or 0) > 0]
    bound = o.config.produce.max_staleness
    extra = o.config.produce.over_sample_threshold
    change = f"produce.max_staleness={bound + 1}"
    if extra:
        change = "produce.over_sample_threshold=0.0"
    return Finding(
        name="expired",
        what="Groups are generated in vain: they are too old when their step comes",
        since=steps[0],
        evidence=f"{old:.0f} groups expired while {made:.0f} were completed, with a bound of {bound}",
        advice="Generate less ahead" if extra else "Allow older samples",
        change=(change,),
    )


def too_stale(o: Observed) -> Finding | None:
    """A wide staleness bound is used up though the producers wait anyway."""
    bound = o.config.produce.max_staleness
    if bound < 2 or not _share(o, "time/producer_wait_s") >= 0.2:
        return None
    since = o.since("staleness/mean", lambda age: age >= 0.9 * bound)
    if since is None:
        return None
    return Finding(
        name="too_stale",
        what="The samples are as old as allowed, and nothing is gained by it",
        since=since,
        evidence=f"Staleness {o.now('staleness/mean'):.2f} of at most {bound}, while the producers wait "
        f"{_share(o, 'time/producer_wait_s'):.0%} of the time",
        advice="Train fresher samples at the same speed",
        change=(f"produce.max_staleness={bound // 2}",),
    )


def slow_reward(o: Observed) -> Finding | None:
    """The trainer waits, and a response waits longest for its reward."""
    seconds, step = _typical(o, "time/reward_s"), _typical(o, "time/step_s")
    if not seconds > 0.3 * step or not _share(o, "time/consumer_wait_s") > 0.3:
        return None
    return Finding(
        name="slow_reward",
        what="The reward is slow, and the trainer waits for it",
        since=int(o.rows[-_LONG]["step"]),
        evidence=f"A response waits {seconds:.2g} s for its reward; a step takes {step:.2g} s",
        advice="Make the reward faster, or generate further ahead of the trainer",
        change=(f"produce.max_staleness={o.config.produce.max_staleness + 1}",),
    )


def trainer_idle(o: Observed) -> Finding | None:
    """Generation is the bottleneck, and there is a remedy."""
    waits, step = _share(o, "time/consumer_wait_s"), _typical(o, "time/step_s")
    if not waits > 0.5 or o.config.launch.colocate:
        return None
    launch, config = o.config.launch, o.config
    spare, engines = _spare_devices(o), launch.num_producers
    sync = any(config.task_produce(task).strategy == "sync" for task in config.tasks)
    if sync or config.produce.max_staleness == 0:
        new, advice = max(waits, 1 - waits), "Generate the next step while this one trains"
        change = (
            ("produce.strategy=async", "produce.max_staleness=1")
            if sync
            else ("produce.max_staleness=1",)
        )
    elif spare >= 1 and launch.kind != "inline":
        new, advice = max(1 - waits, engines / (engines + spare)), "Start more engines"
        change = (f"launch.num_producers={engines + spare}",)
    else:
        return None
    return _idle(
        "trainer_idle",
        "The trainer waits for responses most of the time",
        o,
        waits,
        step,
        new,
        advice,
        change,
    )


def producer_idle(o: Observed) -> Finding | None:
    """Training is the bottleneck, and there is a remedy."""
    waits, step = _share(o, "time/producer_wait_s"), _typical(o, "time/step_s")
    launch, spare = o.config.launch, _spare_devices(o)
    ranks = launch.num_consumers + spare
    copies, groups = o.config.train.parallel.copies, o.config.train.groups_per_step
    while ranks > launch.num_consumers and (ranks % copies or groups % (ranks // copies)):
        ranks -= 1
    if (
        not waits > 0.6
        or launch.colocate
        or launch.kind == "inline"
        or ranks == launch.num_consumers
    ):
        return None
    new = max(1 - waits, launch.num_consumers / ranks)
    what = "The producers wait for the trainer most of the time"
    change = (f"launch.num_consumers={ranks}",)
    return _idle("producer_idle", what, o, waits, step, new, "Train on more ranks", change)


def _idle(
    name: str,
    what: str,
    o: Observed,
    waits: float,
    step: float,
    new: float,
    advice: str,
    change: tuple[str, ...],
) -> Finding | None:
    if 1 - new < _WORTH:
        return None
    gain = f"a step of {step:.2g} s would take about {new * step:.2g} s"
    return Finding(
        name=name,
        what=what,
        since=int(o.rows[-_LONG]["step"]),
        evidence=f"It waited {waits:.0%} of the last {_LONG} steps",
        advice=f"{advice}: {gain}",
        change=change,
    )


def _spare_devices(o: Observed) -> int:
    """Return the GPUs, or on a machine without one the cores, that no worker uses."""
    machine, launch = o.fact(MACHINE), o.config.launch
    if not machine or launch.kind == "ray":
        return 0
    if machine.get("gpus") and o.config.model.device != "cpu":
        return max(0, int(machine["gpus"]) - launch.num_producers - launch.num_consumers)
    used = launch.num_producers * o.config.engine.threads
    used += launch.num_consumers * o.config.train.threads
    return max(0, int(machine.get("cpus", 0)) - used)


def _share(o: Observed, name: str) -> float:
    """Return which share of the newest steps passed with a wait; NaN before there are enough steps."""
    seconds, whole = o.newest(name, _LONG), o.newest("time/step_s", _LONG)
    shares = [min(1.0, a / b) for a, b in zip(seconds, whole, strict=True) if b > 0]
    known = sorted(share for share in shares if not math.isnan(share))
    return known[len(known) // 2] if len(known) == _LONG else math.nan


def _typical(o: Observed, name: str) -> float:
    values = o.newest(name, _LONG)
    return mean(values) if len(values) == _LONG else math.nan


def _recent(o: Observed, name: str) -> float:
    return sum(value for value in o.newest(name, _LONG) if not math.isnan(value))

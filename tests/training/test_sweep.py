"""Random legal settings together: packing, ranks and order change no gradient, equal rewards move nothing,
metrics stay finite and small, the trainer's log-probs are the engine's, a setting without effect is told, and
updates are those of the documented objective (stages/plain_objective.py).

Each draw is a function of its number. A failure names its test, which one command runs again:
    .venv/bin/python -m pytest "tests/training/test_sweep.py::test_settings_together_keep_the_laws[NUMBER]"
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import pytest

from penstock.training.algo.doubts import algorithm_doubts
from penstock.training.algo.method import run_settings, task_algorithms
from penstock.training.algo.settings import AlgorithmSettings
from penstock.types import Batch
from stages import sweep
from stages.plain_objective import PlainTrainer
from stages.sweep import STEP, Draw, Engines, Updates
from stages.training_data import Gradients, relative_gap

TEST = "tests/training/test_sweep.py::test_settings_together_keep_the_laws"
PLAIN_TEST = "tests/training/test_sweep.py::test_updates_are_those_of_the_documented_objective"
DRAWS, QUICK = 500, 4
PLAIN, QUICK_PLAIN = 200, 2
EXACT = 1e-10  # relative, in float64
ROUNDED = 1e-7  # of a router, which rounds to float32
MOVED, MOVED_ROUTER = 1e-7, 1e-5  # the same after updates, which spread what was rounded
SMALL_PACK = 64  # tokens; a third of the batch
UNBOUNDED = {"time/train_s", "time/digest_s", "tokens_per_s", "memory/peak_mib"}
CLIPS = {"clip_low", "clip_high", "dual_clip"}


@pytest.fixture(scope="module")
def engines() -> Iterator[Engines]:
    engines = Engines()
    yield engines
    engines.close()


@pytest.mark.parametrize(
    "number",
    [pytest.param(n, marks=[] if n < QUICK else [pytest.mark.slow]) for n in range(DRAWS)],
)
def test_settings_together_keep_the_laws(number: int, engines: Engines) -> None:
    draw = sweep.drawn(number)
    print(f"run again: python -m pytest '{TEST}[{number}]'\n{draw}")  # shown on failure
    consumer = sweep.consumer_of(draw)
    fresh = engines.sampled(draw, consumer)
    still = must_stand_still(draw)
    updates, metrics = sweep.gradients_of(
        consumer, sweep.with_equal_rewards(fresh) if still else fresh
    )
    check_size(updates, metrics)
    assert not still or sweep.size_of(of_policy(updates)) == 0
    assert metrics["mismatch/kl"] < 1e-9  # with top_k and top_p too
    assert metrics["importance/max"] == pytest.approx(1.0, abs=1e-4)
    batch = sweep.stale(draw, fresh)
    whole, metrics = sweep.gradients_of(consumer, batch)
    check_size(whole, metrics)
    check_splits(draw, batch, whole)
    if draw.ranks == 1:
        check_effect(draw, fresh, whole)


@pytest.mark.parametrize(
    "number",
    [pytest.param(n, marks=[] if n < QUICK_PLAIN else [pytest.mark.slow]) for n in range(PLAIN)],
)
def test_updates_are_those_of_the_documented_objective(number: int, engines: Engines) -> None:
    """Two steps, whose updates move the weights, against formulas that share no code with the trainer."""
    draw = sweep.richer(sweep.drawn(number))
    print(f"run again: python -m pytest '{PLAIN_TEST}[{number}]'\n{draw}")  # shown on failure
    consumer, plain = sweep.consumer_of(draw), PlainTrainer(draw)
    fresh = engines.sampled(draw, consumer)
    tolerance = MOVED_ROUTER if "Moe" in draw.family else MOVED
    for step in (STEP, STEP + 1):
        batch = sweep.uneven(draw, sweep.stale(draw, fresh, attempt=step))
        batch = dataclasses.replace(batch, step=step)
        taken = Gradients(consumer, sweep.move)
        metrics = consumer.train(batch).metrics
        wanted, figures = plain.train(batch)
        assert largest_gap(taken.updates, wanted) < tolerance
        assert {name: metrics[name] for name in figures} == pytest.approx(figures, abs=tolerance)


def of_policy(updates: Updates) -> Updates:
    """The gradients without those of a value model, which learns from equal rewards, too."""
    return [
        {name: g for name, g in update.items() if not name.startswith("critic/")}
        for update in updates
    ]


def check_size(updates: Updates, metrics: dict[str, float]) -> None:
    """No metric and no gradient is NaN or large."""
    large = {
        name: value
        for name, value in metrics.items()
        if name not in UNBOUNDED and not abs(value) <= 1e3
    }
    assert not large
    assert sweep.size_of(updates) < 1e3


def check_splits(draw: Draw, batch: Batch, whole: Updates) -> None:
    """Small packs, another order and two ranks give the same gradients."""
    tolerance = ROUNDED if "Moe" in draw.family else EXACT
    small = sweep.consumer_of(draw.with_fields(train={"micro_batch_tokens": SMALL_PACK}))
    one_update = draw.config.train.mini_batches == 1  # else the order says which groups are in it
    moved = sweep.in_other_order(batch) if one_update else batch
    assert largest_gap(sweep.gradients_of(small, moved)[0], whole) < tolerance
    if draw.ranks == 2:
        assert largest_gap(sweep.gradients_of_two_ranks(draw, batch), whole) < tolerance


def largest_gap(left: Updates, right: Updates) -> float:
    return max(relative_gap(one, other) for one, other in zip(left, right, strict=True))


def must_stand_still(draw: Draw) -> bool:
    """Whether equal rewards have no gradient: nothing but rewards asks for one, and a baseline is subtracted."""
    algorithms = task_algorithms(draw.config).values()
    stands = all(_stands_still(method.settings) for method in algorithms)
    return stands and not draw.config.train.ptx.coefficient


def _stands_still(settings: AlgorithmSettings) -> bool:
    centres = settings.baseline != "none" or settings.normalize == "batch"
    asks = settings.teaches_every_token or settings.needs_reference or settings.overlong_penalty
    return centres and not asks and settings.gamma == settings.gae_lambda == 1


def check_effect(draw: Draw, fresh: Batch, whole: Updates) -> None:
    """A key of [algorithm] that changes the settings and the gradient of no batch is told at the start."""
    settings = run_settings(draw.config)
    updates = draw.config.train.mini_batches * draw.config.train.num_epochs
    keys = draw.fields["algorithm"].keys() - {"name"}
    if updates > 1 and settings.decoupled:
        keys -= CLIPS  # they act on the second update, and none is applied here
    if not keys:
        return
    key = sorted(keys)[draw.number % len(keys)]
    other = draw.without(key)
    lines = algorithm_doubts(draw.config)
    told = any(f"algorithm.{key}" in line or "responses get none" in line for line in lines)
    if told or run_settings(other.config) == settings:
        return
    consumer = sweep.consumer_of(other)
    for attempt in range(30):  # a clip or a mask may meet no token of one batch
        batch = sweep.stale(draw, fresh, attempt=attempt)
        if attempt:
            whole, _ = sweep.gradients_of(sweep.consumer_of(draw), batch)
        again, _ = sweep.gradients_of(consumer, batch)
        if largest_gap(again, whole) > ROUNDED:
            return
    raise AssertionError(f"algorithm.{key} changed nothing, and no line says so")

"""The twin of small runs, against figures worked by hand and against itself at another grain."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

from penstock.config import Config
from penstock.config.source import load_config
from penstock.engine.protocol import GenerationRequest, SamplingParams
from penstock.errors import UserError
from penstock.run.twin import simulate as twin
from penstock.run.twin.engine import ModelledEngine
from penstock.run.twin.plan import make_plan, parse_nodes, split_configs
from penstock.run.twin.profile import DecodeModel, Profile, SeenGroup, TrainModel
from penstock.run.twin.simulate import simulate
from penstock.run.twin.virtual_time import VirtualClock
from penstock.types import VersionSegment, WeightHandle
from penstock.waits import loop_time


def config_of(*words: str) -> Config:
    base = ["train.steps=6", "train.groups_per_step=4", "sampling.num_generations=2"]
    base += ["engine.max_slots=64", "eval.tasks={}", "sampling.max_tokens=1000"]
    return load_config(None, [*base, *words]).config


def profile_of(**changes: object) -> Profile:
    """Responses of 10 tokens at 0.1 s each, and updates of 2 s; nothing else takes time."""
    made = Profile(
        source="test",
        groups=[SeenGroup((10, 10), (0.0, 1.0))],
        decode=DecodeModel(step_s=0.1, row_s=0.0),
        train=TrainModel(fixed_s=2.0, token_s=0.0),
        driver_s_per_group=0.0,
        driver_s_per_response=0.0,
    )
    for name, value in changes.items():
        setattr(made, name, value)
    return made


def test_sync_takes_turns() -> None:
    result = simulate(config_of("produce.strategy=sync"), profile_of())
    assert result.seconds == pytest.approx(6 * (1.0 + 2.0), rel=1e-6)
    assert result.trainer_idle == pytest.approx(1 / 3, rel=1e-6)
    assert result.engine_idle == pytest.approx(2 / 3, rel=1e-6)
    assert result.staleness == {0: 24}
    assert result.tokens_per_s == pytest.approx(6 * 4 * 2 * 10 / 18.0)


def test_async_hides_generation_behind_training() -> None:
    result = simulate(config_of("produce.max_staleness=1"), profile_of())
    assert result.seconds == pytest.approx(1.0 + 6 * 2.0, rel=1e-3)
    assert result.trainer_idle == pytest.approx(1 / 13, rel=1e-2)
    assert set(result.staleness) == {0, 1}


def test_a_response_has_the_version_with_which_it_began() -> None:
    clock = VirtualClock()
    engine = ModelledEngine(DecodeModel(step_s=1.0, row_s=0.0, slots=1), lambda name: 10)

    async def play() -> list[VersionSegment]:
        async def load(version: int, at: float) -> None:
            await asyncio.sleep(at - loop_time())
            handle = WeightHandle(version=version, digest="", kind="none")
            await engine.update_weights(version, handle)

        async def ask(name: str) -> VersionSegment:
            ids = np.zeros(1, np.int32)
            request = GenerationRequest(
                request_id=name, prompt_ids=ids, sampling=SamplingParams(), seed=0
            )
            return (await engine.generate(request)).segments[0]

        *_, first, second = await asyncio.gather(load(1, 5.3), load(2, 12.1), ask("a"), ask("b"))
        return [first, second]

    try:  # the second waits for the slot until 10 s
        assert clock.run(play()) == [VersionSegment(0, 10), VersionSegment(1, 10)]
    finally:
        clock.close()


def test_rewards_publications_and_the_journal_take_their_time() -> None:
    slow = profile_of(reward_s=0.5, sync_s=0.25, before_s=0.125, after_s=0.0625)
    result = simulate(config_of("produce.strategy=sync"), slow)
    # the last update is followed by no generation, so it waits for no weights
    first = 1.0 + 0.5 + 0.125 + 2.0 + 0.0625
    assert result.seconds == pytest.approx(6 * first + 5 * 0.25, rel=1e-3)


def test_the_driver_is_one_core_and_the_twin_says_when_it_is_full() -> None:
    busy = profile_of(driver_s_per_group=1.0, train=TrainModel(fixed_s=0.1, token_s=0.0))
    result = simulate(config_of("produce.max_staleness=2"), busy)
    assert result.seconds >= 24.0  # 24 groups, a second each
    assert any("one driver does not suffice" in note for note in result.notes)
    assert not simulate(config_of(), profile_of()).notes


def test_evaluations_take_slots_from_training() -> None:
    words = ["train.steps=6", "train.groups_per_step=4", "sampling.num_generations=2"]
    words += [
        "engine.max_slots=8",
        "eval.every_steps=2",
        "eval.blocking=true",
        "produce.strategy=sync",
    ]
    config = load_config(None, words).config
    narrow = profile_of(decode=DecodeModel(step_s=0.1, row_s=0.0, slots=8))
    without = simulate(config, narrow)
    assert any("evaluations of heldout are not modelled" in note for note in without.notes)
    narrow.evaluations = {"heldout": 8}
    result = simulate(config, narrow)
    assert not result.notes
    # before the first step and after steps 2 and 4, training waits a second for slots that groups hold
    assert result.seconds == pytest.approx(without.seconds + 3.0, rel=1e-2)


def test_a_run_that_keeps_its_best_and_may_end_early_is_predicted_to_its_last_step() -> None:
    words = ["eval.every_steps=2", "eval.tasks.heldout.data=addition", "eval.max_problems=8"]
    saved = ["checkpoint.keep_best=heldout/accuracy", "train.stop_when=['heldout/reward <= 9']"]
    profile = profile_of(evaluations={"heldout": 8}, checkpoint_s=1.0)
    without = simulate(config_of(*words), profile)
    result = simulate(config_of(*words, *saved), profile)
    assert result.steps == without.steps == 6
    assert result.seconds > without.seconds  # the checkpoints take their time


def test_refused_groups_are_generated_in_vain() -> None:
    groups = [SeenGroup((10, 10), (1.0, 1.0)), SeenGroup((10, 10), (0.0, 1.0))]
    result = simulate(config_of("algorithm.filter_groups=true"), profile_of(groups=groups))
    assert result.groups == 24
    assert result.drops["refused (filtered)"] >= 20


def test_what_a_user_wrote_is_not_executed() -> None:
    with pytest.raises(UserError, match=r"produce\.strategy"):
        simulate(config_of("produce.strategy=evil:Thing"), profile_of())
    refused = profile_of(groups=[SeenGroup((10, 10), (0.0, 1.0), True), *profile_of().groups])
    words = ("produce.is_valid_sample=evil:rule", "produce.should_continue=evil:more")
    result = simulate(config_of(*words, "algorithm.name=evil:Algorithm"), refused)
    assert result.drops["refused (filtered)"] >= 20  # as was recorded


def test_the_first_steps_stand_for_a_run_of_many_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    config = config_of("train.steps=60", "produce.max_staleness=2")
    profile = profile_of(groups=[SeenGroup((100, 10), (0.0, 1.0))])
    whole = simulate(config, profile)
    monkeypatch.setattr(twin, "MANY_GROUPS", 8 * 4)
    cut = simulate(config, profile)
    assert (cut.steps, cut.groups) == (whole.steps, whole.groups)
    assert cut.tokens_per_s == pytest.approx(whole.tokens_per_s, rel=0.02)
    assert cut.mean_staleness == pytest.approx(whole.mean_staleness, abs=0.1)
    assert sum(cut.staleness.values()) == cut.groups


def test_a_plan_finds_the_split_that_trains_most() -> None:
    profile = profile_of(train=TrainModel(fixed_s=0.0, token_s=0.05))
    plan = make_plan(config_of("engine.max_slots=2"), profile, steps=6, gpus=5)
    assert [(one.engines, one.ranks) for one in plan.splits] == [(4, 1), (3, 2), (1, 4)]
    assert plan.best_split is not None
    assert plan.best_split.tokens_per_s == max(one.tokens_per_s for one in plan.splits)
    assert "produce.max_staleness=2" in plan.variations
    assert "sampling.num_generations=4" in plan.variations


def test_a_short_trial_stands_for_a_long_run() -> None:
    """Six steps, most of them waiting for the first responses, named a split with far too few engines."""
    long = profile_of(groups=[SeenGroup((100, 10), (0.0, 1.0))])
    config = config_of("produce.max_staleness=2")
    whole = simulate(config, long, steps=60)
    trial = simulate(config, long, steps=60, most=8)
    short = simulate(config, long, steps=8)
    assert trial.steps == whole.steps
    assert trial.groups == whole.groups
    assert trial.tokens_per_s == pytest.approx(whole.tokens_per_s, rel=0.02)
    assert trial.trainer_idle == pytest.approx(whole.trainer_idle, abs=0.02)
    assert trial.engine_idle == pytest.approx(whole.engine_idle, abs=0.02)
    assert trial.driver_busy == pytest.approx(whole.driver_busy, abs=0.02)
    assert abs(short.tokens_per_s / whole.tokens_per_s - 1) > 0.05


def test_nodes_and_ranks() -> None:
    assert (parse_nodes("2x8"), parse_nodes("3")) == (16, 3)
    for wrong in ("x", "2x", "0x8", "-1"):
        with pytest.raises(UserError, match="--nodes"):
            parse_nodes(wrong)
    splits = split_configs(config_of(), 8)
    assert [one.launch.num_consumers for one in splits] == [1, 2, 4]
    assert [one.launch.num_producers for one in splits] == [7, 6, 4]
    with pytest.raises(UserError, match="at least 2"):
        split_configs(config_of(), 1)

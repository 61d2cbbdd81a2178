"""Several algorithms in one run: each trains the rollouts of its tasks, with its own denominator and weight."""

from __future__ import annotations

from dataclasses import replace

import pytest

from penstock.errors import UserError
from penstock.training.algo.doubts import algorithm_doubts
from penstock.training.algo.method import check_algorithm, run_settings
from penstock.types import Batch, Score
from stages.training_data import (
    config_of,
    consumer_of,
    exact_model,
    gradient_of,
    random_batch,
    relative_gap,
)

TASKS = {
    "maths": {},
    "shown": {"algorithm": {"name": "sft", "weight": 0.5}},
    "code": {"algorithm": {"name": "rloo", "kl_beta": 0.0}},
}


def mixed_batch() -> Batch:
    """Two groups of each task, in turns; demonstrations are groups of one."""
    batch = random_batch(groups=6)
    for number, group in enumerate(batch.groups):
        group.task = list(TASKS)[number % 3]
        if group.task == "shown":
            del group.rollouts[1:]
            group.rollouts[0].score = Score(1.0)
    return batch


def of_task(batch: Batch, task: str) -> Batch:
    return replace(batch, groups=tuple(group for group in batch.groups if group.task == task))


def test_the_gradient_is_the_weighted_sum_of_what_each_algorithm_gives_its_own_tasks() -> None:
    batch = mixed_batch()
    alone = {
        "maths": config_of(),
        "shown": config_of(algorithm={"name": "sft"}, tasks={"shown": {}}),
        "code": config_of(algorithm={"name": "rloo"}),
    }
    gradients = {
        task: gradient_of(config, of_task(batch, task), model=exact_model())
        for task, config in alone.items()
    }
    expected = {
        name: gradients["maths"][name] + 0.5 * gradients["shown"][name] + gradients["code"][name]
        for name in gradients["maths"]
    }
    for tokens in (16, 10_000):
        config = config_of(tasks=TASKS, train={"lr": 1e-2, "micro_batch_tokens": tokens})
        assert relative_gap(gradient_of(config, batch, model=exact_model()), expected) < 1e-12


def test_the_constant_denominator_is_that_of_the_algorithm_s_own_tasks() -> None:
    """sum / (samples x max_tokens): a longer task of another algorithm takes nothing from it."""
    batch, alone = mixed_batch(), config_of(algorithm={"name": "dr_grpo"}, tasks={"maths": {}})
    tasks = TASKS | {"shown": {"algorithm": {"name": "sft", "weight": 0}}, "code": {}}
    tasks["code"] = {"algorithm": {"weight": 0}, "sampling": {"max_tokens": 80}}
    both = config_of(algorithm={"name": "dr_grpo"}, tasks=tasks)
    got = gradient_of(both, batch, model=exact_model())
    assert (
        relative_gap(got, gradient_of(alone, of_task(batch, "maths"), model=exact_model())) < 1e-12
    )


def test_each_part_has_its_metric_and_demonstrations_have_no_reward() -> None:
    batch = mixed_batch()
    metrics = consumer_of(config_of(tasks=TASKS)).train(batch).metrics
    alone = config_of(algorithm={"name": "sft"}, tasks={"shown": {}})
    shown = consumer_of(alone).train(of_task(batch, "shown")).metrics
    assert metrics["loss/demonstration"] == pytest.approx(shown["loss/demonstration"], rel=1e-12)
    rewards = [r.reward for g in batch.groups if g.task != "shown" for r in g.rollouts]
    assert metrics["reward/mean"] == pytest.approx(sum(rewards) / len(rewards))
    tokens = sum(r.loss_mask.sum() for g in batch.groups for r in g.rollouts)
    assert metrics["tokens/trained"] == tokens


def test_updates_without_a_part_s_tokens_are_not_in_its_loss() -> None:
    """One of three updates has the demonstration: its loss is that update's, and a step without one has none."""
    groups = mixed_batch().groups
    batch = Batch(step=1, groups=(*groups[:1], groups[1], *groups[3:4]))
    tasks = {name: TASKS[name] for name in ("maths", "shown")}
    config = config_of(tasks=tasks, train={"lr": 1e-9, "groups_per_step": 3, "mini_batches": 3})
    shown = consumer_of(config_of(algorithm={"name": "sft"}, tasks={"shown": {}}))
    alone = shown.train(of_task(batch, "shown")).metrics["loss/demonstration"]
    metrics = consumer_of(config).train(batch).metrics
    assert metrics["loss/demonstration"] == pytest.approx(alone, rel=1e-6)
    assert "loss/demonstration" not in consumer_of(config).train(of_task(batch, "maths")).metrics


def test_a_step_without_any_token_to_train_has_a_loss_of_zero() -> None:
    config = config_of(algorithm={"name": "dapo"}, tasks={"maths": {}})
    batch = of_task(mixed_batch(), "maths")
    for rollout in batch.rollouts:
        rollout.finish_reason = "length"
    assert consumer_of(config).train(batch).metrics["loss/policy"] == 0.0


def test_a_batch_without_a_task_s_groups_trains_the_others() -> None:
    batch = of_task(mixed_batch(), "maths")
    got = gradient_of(config_of(tasks=TASKS), batch, model=exact_model())
    assert relative_gap(got, gradient_of(config_of(), batch, model=exact_model())) < 1e-12


def test_a_task_s_fields_lie_over_those_of_the_run_and_another_algorithm_begins_with_its_own() -> (
    None
):
    config = config_of(
        algorithm={"clip_low": 0.1, "kl_beta": 0.5},
        tasks={"a": {}, "b": {"algorithm": {"clip_high": 0.3}}, "c": {"algorithm": "dapo"}},
    )
    own, changed, other = (run_settings(config, task) for task in "abc")
    assert (own.clip_low, own.clip_high, own.kl_beta) == (0.1, 0.2, 0.5)
    assert (changed.clip_low, changed.clip_high, changed.kl_beta) == (0.1, 0.3, 0.5)
    assert (other.name, other.clip_low, other.kl_beta, other.filter_groups) == (
        "dapo", 0.2, 0.0, True,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("tasks", "said"),
    [
        ({"a": {"algorithm": "sft", "agent": "single_turn"}}, "tasks.a.agent: got single_turn"),
        ({"a": {"algorithm": {"normalize": "group", "baseline": "none"}}}, "tasks.a.algorithm.nor"),
        ({"a": {}, "b": {"agent": "demonstration"}}, "tasks.b.agent: got demonstration"),
    ],
)
def test_an_algorithm_that_cannot_train_its_task_is_refused(tasks: dict, said: str) -> None:
    with pytest.raises(UserError, match=said):
        check_algorithm(config_of(tasks=tasks))


def test_a_wrong_field_names_its_task() -> None:
    with pytest.raises(ValueError, match=r"tasks\.a\.algorithm"):
        config_of(tasks={"a": {"algorithm": {"clip": 1}}})


def test_a_weight_beside_nothing_is_told() -> None:
    (line,) = algorithm_doubts(config_of(algorithm={"weight": 0.5}))
    assert "algorithm.weight has no effect" in line
    assert not algorithm_doubts(config_of(tasks=TASKS))

"""Every key of the config has a rule for a resumed run; what is refused says why."""

from __future__ import annotations

import pytest

from penstock.config import Config
from penstock.config.changes import FREE, UPDATE, allowed_changes, effect_of, flat
from penstock.config.source import load_config
from penstock.errors import UserError


def changed(*overrides: str) -> list[tuple[str, bool]]:
    before = load_config(None, ["tasks.train.sampling.temperature=0.9"]).config
    after = load_config(None, ["tasks.train.sampling.temperature=0.9", *overrides]).config
    return [(change.key, change.in_update) for change in allowed_changes(before, after)]


def test_every_key_has_a_rule() -> None:
    config = Config.model_validate({"eval": {"tasks": {"held": {}}}})
    for key in flat(config.model_dump()):
        assert effect_of(key)


def test_nothing_changed_is_no_change() -> None:
    assert changed() == []


@pytest.mark.parametrize(
    "override",
    [
        "checkpoint.every_steps=7",
        "eval.tasks.heldout.data=addition",
        "track.trackers=[]",
        "launch.kind=inline",
        "engine.max_slots=3",
        "produce.max_staleness=4",
        "sampling.temperature=0.5",
        "tasks.train.weight=3",
        "tasks.train.sampling.temperature=0.8",
        "tasks.train.rewards=[{type='boxed'}]",
        "track.wandb.tags=['a']",
    ],
)
def test_what_the_update_does_not_see_changes_at_once(override: str) -> None:
    assert changed(override) == [(override.split("=")[0], False)]


@pytest.mark.parametrize(
    "override",
    [
        "train.lr=1e-5",
        "train.steps=90",
        "train.threads=2",
        "train.ptx.sequences_per_step=3",
        "algorithm.kl_beta=0.1",
        "algorithm.correction.kind=token_mask",
        "sampling.max_tokens=30",
        "model.device=cpu",
    ],
)
def test_what_the_update_sees_waits_for_the_redo(override: str) -> None:
    assert changed(override) == [(override.split("=")[0], True)]


@pytest.mark.parametrize(
    ("override", "reason"),
    [
        ("seed=5", "samples were drawn with it"),
        ("model.path=other", "digests depend"),
        ("model.lora.rank=8", "digests depend"),
        ("train.groups_per_step=8", "batches of this size"),
        ("train.masters=plain", "started with it"),
        ("sampling.num_generations=4", "old size"),
        ("sync.every_steps=2", "staleness"),
        ("tasks.train.data=other.jsonl", "positions in the tasks' original data"),
        ("tasks.train.max_prompt_tokens=99", "positions in the tasks' original data"),
        ("tasks.more.weight=1", "tasks.more: got a new task, allowed: the run's train"),
        ("run.name=other", "move the folder"),
    ],
)
def test_what_would_break_the_journal_is_refused_with_the_reason(
    override: str, reason: str
) -> None:
    with pytest.raises(UserError, match=reason) as caught:
        changed(override)
    assert "allowed: the " in str(caught.value)
    assert "\n" not in str(caught.value)


def test_effects_are_spelled_out() -> None:
    assert (effect_of("eval.blocking"), effect_of("train.betas")) == (FREE, UPDATE)

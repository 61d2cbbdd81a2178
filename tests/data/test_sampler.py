"""The sampler: order, ids, resume from any point."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.data.sampler import Sampler, rollout_seed
from penstock.errors import UserError
from penstock.rollout.progress import ReplayBuffer
from penstock.types import Group, Status
from stages.rollouts import finish_rollout, make_prompts


def sampler(size: int = 5, **options: object) -> Sampler:
    settings_ = {"task_name": "t", "prompt_repeat_k": 2, "seed": 1, **options}
    return Sampler(make_prompts(size), **settings_)  # type: ignore[arg-type]


def draw(source: Sampler, count: int) -> list[Group]:
    return [source.sample("t") for _ in range(count)]


def identity(groups: list[Group]) -> list[tuple]:
    return [(g.group_id, g.prompt.prompt_id, tuple(r.seed for r in g.rollouts)) for g in groups]


def test_every_epoch_is_a_new_permutation_of_all_prompts() -> None:
    groups = draw(sampler(size=30), 90)
    epochs = [[g.prompt.prompt_id for g in groups[at : at + 30]] for at in (0, 30, 60)]
    assert all(sorted(epoch) == sorted(epochs[0]) for epoch in epochs)
    assert epochs[0] != epochs[1] != epochs[2]


def test_ids_stay_unique_over_epochs() -> None:
    groups = draw(sampler(size=3), 12)
    ids = [rollout.rollout_id for group in groups for rollout in group.rollouts]
    assert len(set(ids)) == len(ids)
    assert groups[7].group_id == "t:7"
    assert groups[7].rollouts[1].rollout_id == "t:7.1"


@settings(max_examples=40, deadline=None)
@given(size=st.integers(1, 6), before=st.integers(0, 15))
def test_a_cursor_gives_the_same_suffix_from_any_point(size: int, before: int) -> None:
    whole = identity(draw(sampler(size), before + 8))
    resumed = sampler(size)
    resumed.cursor = before
    assert identity(draw(resumed, 8)) == whole[before:]


def test_a_cursor_at_an_epoch_end_does_not_replay_the_epoch() -> None:
    first = draw(sampler(size=8), 8)
    resumed = sampler(size=8)
    resumed.cursor = 8
    second = draw(resumed, 8)
    assert [g.prompt.prompt_id for g in first] != [g.prompt.prompt_id for g in second]
    assert not {g.group_id for g in first} & {g.group_id for g in second}


def test_any_drawn_group_can_be_made_again() -> None:
    source = sampler(size=4)
    drawn = draw(source, 11)
    assert identity([source.group_at(group.cursor) for group in drawn]) == identity(drawn)


def test_the_dataset_is_not_touched_before_the_first_draw() -> None:
    class Untouched:
        def __len__(self) -> int:
            raise AssertionError("too early")

        def __getitem__(self, index: int) -> None:
            raise AssertionError("too early")

    source = Sampler(Untouched(), task_name="t", prompt_repeat_k=1, seed=0)  # type: ignore[arg-type]
    source.cursor = 5


def test_the_buffer_is_asked_for_each_status_in_order_before_a_fresh_prompt() -> None:
    buffer = ReplayBuffer()
    source = sampler(replay_buffer=buffer)
    aborted, expired = source.sample("t"), source.sample("t")
    aborted.move_to(Status.ABORTED)
    for rollout in expired.rollouts:
        finish_rollout(rollout)
    expired.move_to(Status.EXPIRED)
    buffer.put(aborted)
    buffer.put(expired)
    assert source.sample("t", [Status.EXPIRED, Status.ABORTED]) is expired
    assert source.sample("t", Status.EXPIRED) is not aborted  # a fresh one
    assert source.sample("t", [Status.EXPIRED, Status.ABORTED]) is aborted
    assert source.sample("t", [Status.EXPIRED, Status.ABORTED]).cursor == 3


def test_seeds_depend_on_identity_alone() -> None:
    assert rollout_seed(1, "t:0", 0, 0) == rollout_seed(1, "t:0", 0, 0)
    seeds = {
        rollout_seed(run, group, index, tries)
        for run in (1, 2)
        for group in ("t:0", "t:1")
        for index in (0, 1)
        for tries in (0, 1)
    }
    assert len(seeds) == 16
    assert all(0 <= seed < 2**63 for seed in seeds)


def test_wrong_settings_are_refused() -> None:
    with pytest.raises(UserError, match="prompt_repeat_k"):
        sampler(prompt_repeat_k=0)
    with pytest.raises(UserError, match="empty dataset"):
        draw(sampler(size=0), 1)

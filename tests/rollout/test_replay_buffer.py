"""The replay buffer: order, expiry, bounds, priorities; against a plain model."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.errors import UserError
from penstock.rollout.progress import ReplayBuffer
from penstock.types import Group, Rollout, Status
from stages.rollouts import finish_rollout, make_prompt


def completed(cursor: int, version: int = 0, task: str = "t") -> Group:
    prompt = make_prompt(cursor)
    rollout = Rollout(rollout_id=f"{task}:{cursor}.0", prompt_ids=prompt.token_ids, seed=cursor)
    finish_rollout(rollout, version=version)
    return Group(
        group_id=f"{task}:{cursor}", task=task, cursor=cursor, prompt=prompt, rollouts=[rollout]
    )


def cursors(groups: list[Group]) -> list[int]:
    return [group.cursor for group in groups]


def test_a_group_tried_too_often_comes_first() -> None:
    buffer = ReplayBuffer()
    old = completed(9)
    old.tries = 3
    buffer.put(completed(1))
    buffer.put(old)
    expired = buffer.expire("t", train_step=5, stale_threshold=1, tail_tries=3)
    assert sorted(cursors(expired)) == [1, 9]
    assert buffer.take("t", Status.EXPIRED) is old


def test_a_higher_priority_is_taken_first() -> None:
    buffer = ReplayBuffer()
    for cursor, priority in ((1, 0), (2, 1), (3, 0)):
        buffer.put(completed(cursor), priority=priority, train_step=cursor)
    assert buffer.first_entry("t", Status.COMPLETED) == (1, 2)
    assert [buffer.take("t", Status.COMPLETED).cursor for _ in range(3)] == [2, 1, 3]


def test_a_bounded_buffer_has_room_for_so_many_completed_groups_of_each_task() -> None:
    buffer = ReplayBuffer(max_groups_per_task=2)
    buffer.put(completed(0))
    assert buffer.has_room("t", reserved=0)
    assert not buffer.has_room("t", reserved=1)
    assert buffer.has_room("other", reserved=1)
    assert ReplayBuffer().has_room("t", reserved=10**6)


def test_mistakes_are_refused() -> None:
    buffer = ReplayBuffer()
    buffer.put(completed(0))
    with pytest.raises(ValueError, match="second time"):
        buffer.put(completed(0))
    with pytest.raises(UserError, match="max_groups_per_task"):
        ReplayBuffer(max_groups_per_task=-1)


def test_expiry_looks_at_no_token() -> None:
    buffer = ReplayBuffer()
    group = completed(0, version=4)
    buffer.put(group)
    group.rollouts[0].segments = ()  # an expiry that looked at tokens would find nothing to expire
    assert buffer.expire("t", train_step=9, stale_threshold=2) == [group]


@settings(max_examples=150, deadline=None)
@given(
    actions=st.lists(
        st.tuples(st.sampled_from("ptte"), st.integers(0, 9), st.integers(0, 4)), max_size=40
    ),
)
def test_it_behaves_like_a_sorted_list(actions: list[tuple[str, int, int]]) -> None:
    buffer = ReplayBuffer()
    model: dict[int, int] = {}  # cursor -> version, of the completed ones
    gone: set[int] = set()
    for kind, number, version in actions:
        if kind == "p" and number not in model and number not in gone:
            buffer.put(completed(number, version))
            model[number] = version
        elif kind == "t":
            group = buffer.take("t", Status.COMPLETED)
            first = min(model, default=None)
            assert (None if group is None else group.cursor) == first
            if first is not None:
                del model[first]
                gone.add(first)
        elif kind == "e":
            expired = buffer.expire("t", train_step=number, stale_threshold=2)
            old = {c for c, v in model.items() if number - v - 1 >= 2}
            assert {group.cursor for group in expired} == old
            gone |= old
            model = {c: v for c, v in model.items() if c not in old}
        assert buffer.count("t", Status.COMPLETED) == len(model)

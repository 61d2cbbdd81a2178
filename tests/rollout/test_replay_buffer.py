"""The replay buffer: order, expiry, bounds, priorities over save and load; against a plain model."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.errors import UserError
from penstock.rollout.replay_buffer import ReplayBuffer
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


def test_fifo_takes_by_cursor_and_stalest_by_version() -> None:
    async def main(order: str) -> list[int]:
        buffer = ReplayBuffer(order=order)  # type: ignore[arg-type]
        for cursor, version in ((3, 1), (1, 2), (2, 1)):
            await buffer.put(completed(cursor, version))
        return cursors(await buffer.take("t", Status.COMPLETED, 5))

    assert asyncio.run(main("fifo")) == [1, 2, 3]
    assert asyncio.run(main("stalest")) == [2, 3, 1]


def test_take_never_returns_what_is_expired_for_its_step() -> None:
    async def main() -> None:
        buffer = ReplayBuffer()
        await buffer.put(completed(0, version=0))
        await buffer.put(completed(1, version=2))
        taken = await buffer.take("t", Status.COMPLETED, 2, train_step=3, stale_threshold=2)
        assert cursors(taken) == [1]
        assert await buffer.count(task_name="t", group_status=Status.EXPIRED) == 1
        assert await buffer.count(task_name="t", group_status=Status.COMPLETED) == 0

    asyncio.run(main())


def test_a_group_tried_too_often_comes_first() -> None:
    buffer = ReplayBuffer()
    old = completed(9)
    old.tries = 3
    buffer.put_now(completed(1))
    buffer.put_now(old)
    expired = buffer.expire_now("t", train_step=5, stale_threshold=1, tail_tries=3)
    assert sorted(cursors(expired)) == [1, 9]
    assert buffer.take_now("t", Status.EXPIRED) is old


def test_priorities_survive_save_and_load() -> None:
    buffer = ReplayBuffer()
    for cursor, priority in ((1, 0), (2, 1), (3, 0)):
        buffer.put_now(completed(cursor), priority=priority, train_step=cursor)
    loaded = ReplayBuffer()
    loaded.load_state_dict(buffer.state_dict())
    assert loaded.first_entry("t", Status.COMPLETED) == (1, 2)
    assert [loaded.take_now("t", Status.COMPLETED).cursor for _ in range(3)] == [2, 1, 3]


def test_bounded_mode_holds_back_a_put_until_there_is_room() -> None:
    async def main() -> None:
        buffer = ReplayBuffer(max_groups_per_task=1)
        await buffer.put(completed(0))
        waiting = asyncio.create_task(buffer.put(completed(1)))
        other = asyncio.create_task(buffer.put(completed(0, task="other")))
        await asyncio.sleep(0)
        assert other.done()
        assert not waiting.done()
        assert buffer.take_now("t", Status.COMPLETED).cursor == 0
        await waiting
        assert buffer.count_now("t", Status.COMPLETED) == 1

    asyncio.run(main())


def test_wait_is_woken_by_a_put() -> None:
    async def main() -> None:
        buffer = ReplayBuffer()
        waiting = asyncio.create_task(buffer.wait("t", Status.COMPLETED, 2))
        buffer.put_now(completed(0))
        await asyncio.sleep(0)
        assert not waiting.done()
        buffer.put_now(completed(1))
        await waiting

    asyncio.run(main())


def test_mistakes_are_refused() -> None:
    buffer = ReplayBuffer()
    buffer.put_now(completed(0))
    with pytest.raises(ValueError, match="second time"):
        buffer.put_now(completed(0))
    with pytest.raises(UserError, match="order"):
        ReplayBuffer(order="lifo")  # type: ignore[arg-type]
    with pytest.raises(UserError, match="max_groups_per_task"):
        ReplayBuffer(max_groups_per_task=-1)


def test_expiry_looks_at_no_token() -> None:
    buffer = ReplayBuffer()
    group = completed(0, version=4)
    buffer.put_now(group)
    group.rollouts[0].segments = ()  # an expiry that looked at tokens would find nothing to expire
    assert buffer.expire_now("t", train_step=9, stale_threshold=2) == [group]


@settings(max_examples=150, deadline=None)
@given(
    stalest=st.booleans(),
    actions=st.lists(
        st.tuples(st.sampled_from("ptte"), st.integers(0, 9), st.integers(0, 4)), max_size=40
    ),
)
def test_it_behaves_like_a_sorted_list(stalest: bool, actions: list[tuple[str, int, int]]) -> None:
    buffer = ReplayBuffer(order="stalest" if stalest else "fifo")
    model: dict[int, int] = {}  # cursor -> version, of the completed ones
    gone: set[int] = set()
    for kind, number, version in actions:
        if kind == "p" and number not in model and number not in gone:
            buffer.put_now(completed(number, version))
            model[number] = version
        elif kind == "t":
            group = buffer.take_now("t", Status.COMPLETED)
            first = min(model, key=lambda c: (model[c] if stalest else 0, c), default=None)
            assert (None if group is None else group.cursor) == first
            if first is not None:
                del model[first]
                gone.add(first)
        elif kind == "e":
            expired = buffer.expire_now("t", train_step=number, stale_threshold=2)
            old = {c for c, v in model.items() if number - v - 1 >= 2}
            assert {group.cursor for group in expired} == old
            gone |= old
            model = {c: v for c, v in model.items() if c not in old}
        assert buffer.count_now("t", Status.COMPLETED) == len(model)

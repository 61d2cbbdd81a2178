"""Records check themselves; status moves only along the table; staleness is by the oldest token."""

from __future__ import annotations

import itertools
import pickle
from dataclasses import fields, replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.engine.protocol import SamplingParams
from penstock.types import (
    LEGAL_MOVES,
    Choices,
    Group,
    Prompt,
    Rollout,
    Row,
    Score,
    Status,
    VersionSegment,
    expand_segments,
    extend_segments,
    staleness,
)


def make_rollout(index: int = 0, **fields: object) -> Rollout:
    return Rollout(rollout_id=f"t:0.{index}", prompt_ids=np.array([1, 2]), seed=index, **fields)  # type: ignore[arg-type]


def make_group(*statuses: Status) -> Group:
    rollouts = [make_rollout(i, status=s) for i, s in enumerate(statuses)]
    prompt = Prompt("p:0", ({"role": "user", "content": "?"},), np.array([1, 2]))
    return Group(group_id="t:0", task="t", cursor=0, prompt=prompt, rollouts=rollouts)


def test_every_status_has_a_row_and_archived_is_final() -> None:
    assert set(LEGAL_MOVES) == set(Status)
    assert LEGAL_MOVES[Status.ARCHIVED] == frozenset()


@given(st.sampled_from(Status), st.sampled_from(Status))
def test_a_move_is_made_exactly_when_the_table_has_it(current: Status, target: Status) -> None:
    rollout = make_rollout(0, status=current)
    if target in LEGAL_MOVES[current] or current is target:
        rollout.move_to(target)
        assert rollout.status is target
    else:
        with pytest.raises(ValueError, match="illegal status move"):
            rollout.move_to(target)
        assert rollout.status is current


def test_a_partial_continued_under_new_weights_keeps_both_versions() -> None:
    segments = extend_segments((VersionSegment(1, 1),), version=3, length=2)
    assert expand_segments(segments) == [1, 3, 3]


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 4)), max_size=8))
def test_segments_are_the_run_length_form_of_the_versions(runs: list[tuple[int, int]]) -> None:
    segments: tuple[VersionSegment, ...] = ()
    expected: list[int] = []
    for version, length in runs:
        segments = extend_segments(segments, version, length)
        expected += [version] * length
    assert expand_segments(segments) == expected
    assert all(a.version != b.version for a, b in itertools.pairwise(segments))


def test_per_token_fields_must_have_one_length() -> None:
    with pytest.raises(ValueError, match="logprobs"):
        make_rollout(response_ids=np.array([5]), loss_mask=np.array([True]))


def test_append_extends_every_per_token_field() -> None:
    rollout = make_rollout()
    rollout.append(np.array([5, 6]), np.array([-0.5, -0.25]), (VersionSegment(2, 2),))
    rollout.append(np.array([7]), np.array([-1.0]), (VersionSegment(4, 1),))
    assert rollout.response_ids.tolist() == [5, 6, 7]
    assert rollout.loss_mask.tolist() == [True] * 3
    assert rollout.oldest_version == 2


def test_restart_forgets_the_response() -> None:
    rollout = make_rollout()
    rollout.append(np.array([5]), np.array([-0.5]), (VersionSegment(2, 1),))
    rollout.move_to(Status.ABORTED)
    rollout.restart()
    assert (len(rollout.response_ids), rollout.segments, rollout.status) == (0, (), Status.INIT)


@pytest.mark.parametrize(
    ("members", "expected"),
    [
        ((Status.COMPLETED, Status.COMPLETED), Status.COMPLETED),
        ((Status.COMPLETED, Status.ABORTED), Status.ABORTED),
        ((Status.ABORTED, Status.FAILED), Status.FAILED),
        ((Status.EXPIRED, Status.ABORTED), Status.ABORTED),
        ((Status.FILTERED, Status.EXPIRED), Status.EXPIRED),
        ((Status.INIT, Status.COMPLETED), Status.INIT),
    ],
)
def test_group_status_is_the_first_present(members: tuple[Status, ...], expected: Status) -> None:
    assert make_group(*members).status is expected


def test_staleness_counts_from_the_oldest_token_of_any_member() -> None:
    assert staleness(train_step=1, policy_version=0) == 0
    group = make_group(Status.COMPLETED, Status.COMPLETED)
    group.rollouts[0].append(np.array([5]), np.array([0.0]), (VersionSegment(4, 1),))
    group.rollouts[1].append(
        np.array([5, 6]), np.array([0.0, 0.0]), (VersionSegment(2, 1), VersionSegment(4, 1))
    )
    assert group.staleness(train_step=5) == 2


def _no_defaults() -> list[Any]:
    """Return records that pickle as positions, with a value of its own in every field."""
    prompt = Prompt("p:0", ({"role": "user"},), np.array([1]), "4", {"inputs": ["1"]}, {"k": "v"})
    return [
        VersionSegment(3, 2),
        Score(0.5, {"a": 1.0}, False, True, "why", "4", (1, 0)),
        prompt,
        SamplingParams(
            temperature=0.5,
            top_k=2,
            top_p=0.75,
            min_tokens=3,
            max_tokens=4,
            stop_token_ids=(5,),
            stop=("6",),
        ),
    ]


@pytest.mark.parametrize("record", _no_defaults(), ids=lambda record: type(record).__name__)
def test_a_pickled_record_keeps_every_field(record: Any) -> None:
    copy = pickle.loads(pickle.dumps(record))
    assert type(copy) is type(record)
    for field in fields(record):
        assert repr(getattr(copy, field.name)) == repr(getattr(record, field.name)), field.name


def test_a_pickled_group_keeps_every_field_of_every_rollout() -> None:
    """One with all fields, one of several rows with a prompt of its own, one without tokens."""
    prompt = Prompt("p:0", ({"role": "user"},), np.array([1, 2]), "4")
    rows = (Row(np.array([7], np.int32), 1), Row(np.array([8, 9], np.int32), 2))
    rollouts = [
        Rollout(
            rollout_id="t:3.0",
            prompt_ids=prompt.token_ids,
            seed=11,
            response_ids=np.array([5, 6, 4], np.int32),
            logprobs=np.array([-0.5, -1.5, -2.5], np.float32),
            loss_mask=np.array([True, False, True]),
            segments=(VersionSegment(1, 1), VersionSegment(2, 2)),
            earned=((1, 0.5), (2, 0.25)),
            temperature=0.7,
            min_tokens=2,
            status=Status.COMPLETED,
            finish_reason="length",
            text="é",
            score=Score(0.5, {"a": 1.0}),
            error="why",
            extra={"k": [1]},
            issued_version=6,
        ),
        Rollout(
            rollout_id="t:3.1",
            prompt_ids=np.array([9], np.int32),
            seed=12,
            response_ids=np.array([1, 2, 3], np.int32),
            logprobs=np.array([0.0, -1.0, -2.0], np.float32),
            loss_mask=np.array([True, True, True]),
            segments=(VersionSegment(2, 3),),
            rows=rows,
            choices=Choices.unknown(4),
            teacher_logprobs=np.array([-0.5, -1.5, -2.5], np.float32),
        ),
        Rollout(rollout_id="t:3.2", prompt_ids=prompt.token_ids, seed=13),
    ]
    group = Group(
        group_id="t:3", task="t", cursor=3, prompt=prompt, rollouts=rollouts, tries=2, error="e"
    )
    for field in fields(Rollout):  # a new field must be added above, and where groups are pickled
        default = getattr(rollouts[2], field.name)
        changed = [repr(getattr(rollout, field.name)) != repr(default) for rollout in rollouts]
        assert any(changed) or field.name == "prompt", field.name
    got = pickle.loads(pickle.dumps(group))
    assert got.fingerprint() == group.fingerprint()
    assert repr(replace(got, rollouts=rollouts)) == repr(group)
    for one, own in zip(got.rollouts, rollouts, strict=True):
        assert repr(one) == repr(own)
        assert one.prompt is got.prompt
    assert got.rollouts[0].prompt_ids is got.prompt.token_ids
    for one in got.rollouts:
        assert one.response_ids.dtype is np.dtype(np.int32)  # kept without a copy


def test_choices_follow_the_tokens_of_a_response() -> None:
    """What a first engine did not record stays unknown, one entry for each token but the last."""
    rollout = Rollout(rollout_id="t:0.0", prompt_ids=np.array([1, 2, 3], np.int32), seed=1)
    segment, two = (VersionSegment(1, 2),), np.array([4, 5], np.int32)
    rollout.append(two, np.zeros(2, np.float32), segment)
    assert rollout.choices is None
    ids, experts = np.array([4, 5, 9], np.int32), np.array([[3], [1]], np.uint8)
    rollout.append(
        two, np.zeros(2, np.float32), segment, Choices(np.array([2, 1], np.int32), ids, experts)
    )
    rollout.append(two, np.zeros(2, np.float32), segment)
    assert rollout.choices is not None
    assert rollout.choices.num_kept.tolist() == [0, 0, 0, 0, 2, 1, 0, 0]
    assert rollout.choices.experts[:, 0].tolist() == [0, 0, 0, 0, 3, 1, 0, 0]
    assert rollout.choices[5:7].kept_ids.tolist() == [9]
    with pytest.raises(ValueError, match="got 7 choices, allowed: 8"):
        replace(rollout, choices=rollout.choices[:7])

"""A rollout of several rows trains as one rollout: its tokens once, its means over all its rows."""

from __future__ import annotations

import asyncio
import itertools
from typing import Any

import numpy as np
import pytest

from penstock.config import AlgorithmConfig
from penstock.reward.length import LengthShaping, SoftOverlong
from penstock.store.journal.codec import decode_rollout, encode_rollout, prune_payload
from penstock.training.algo import ALGORITHMS
from penstock.training.algo.method import resolve_settings
from penstock.training.flat_batch import FlatBatch
from penstock.training.objective import (
    loss_weights,
    shaped_rewards,
    token_advantages,
    update_sums,
)
from penstock.training.parallel.ranks import Ranks
from penstock.types import Batch, Rollout, Row, Score, Status, VersionSegment
from stages.training_data import (
    config_of,
    exact_model,
    gradient_of,
    random_batch,
    relative_gap,
)


def observe(rollout: Rollout, place: slice) -> None:
    """Turn some tokens of a response into a tool's result."""
    rollout.loss_mask = rollout.loss_mask.copy()
    rollout.loss_mask[place] = False


def split_in_rows(rollout: Rollout, cuts: list[int]) -> None:
    """Make a row of each part between the cuts; the tokens before a part become its prompt."""
    whole = np.concatenate([rollout.prompt_ids, rollout.response_ids])
    bounds = [0, *cuts, len(rollout.response_ids)]
    first = len(rollout.prompt_ids)
    rollout.rows = tuple(
        Row(whole[: first + start], end - start) for start, end in itertools.pairwise(bounds)
    )


def two_batches() -> tuple[Batch, Batch]:
    """Return a batch with tool results in one row, and the same with a row per turn."""
    batches = []
    for split in (False, True):
        batch = random_batch(groups=3, seed=4)
        for group in batch.groups:
            for rollout in group.rollouts:
                if len(rollout.response_ids) >= 6:
                    observe(rollout, slice(2, 4))
                    split_in_rows(rollout, [4] if split else [])
        batches.append(batch)
    return batches[0], batches[1]


@pytest.mark.parametrize("tokens", [pytest.param(1, marks=pytest.mark.slow), 40])
@pytest.mark.parametrize("name", ["grpo", "dapo", "reinforce_pp", "gspo", "sequence_mask"])
def test_rows_have_the_gradient_of_the_one_sequence_they_are_cut_from(name, tokens) -> None:
    fields = {"name": name} if name in ALGORITHMS else {"correction": {"kind": name, "cap": 3.0}}
    one_row, rows = two_batches()
    assert max(len(rollout.rows) for rollout in rows.rollouts) == 2
    config = config_of(algorithm=fields, train={"micro_batch_tokens": tokens, "lr": 1e-2})
    expected = gradient_of(config, one_row)
    assert relative_gap(expected, {name: 0 * grad for name, grad in expected.items()}) > 0
    assert relative_gap(gradient_of(config, rows), expected) < 1e-6


CORRECTIONS = ["none", "token_truncate", "token_mask", "sequence_truncate", "sequence_mask"]


@pytest.mark.slow
@pytest.mark.parametrize("correction", CORRECTIONS)
@pytest.mark.parametrize("name", list(ALGORITHMS))
def test_the_size_of_packs_does_not_change_the_gradient_of_rows(name, correction) -> None:
    batch = two_batches()[1]
    gradients = [
        gradient_of(
            config_of(
                algorithm={"name": name, "correction": {"kind": correction, "cap": 3.0}},
                train={"micro_batch_tokens": tokens},
            ),
            batch,
            model=exact_model(),
        )
        for tokens in (4096, 8)
    ]
    assert relative_gap(gradients[1], gradients[0]) < 1e-12


USERS_METHOD = """
from penstock.training.algo.method import Algorithm, Surrogate
from penstock.training.algo.ratios import sequence_mean

class WeighedRollouts(Algorithm):
    def surrogate(self, view):
        ratio_S = sequence_mean(self.log_ratio(view), view.sequence_N, view.num_sequences).exp()
        weight_N = ratio_S.detach()[view.sequence_N]
        loss_N = -weight_N * view.logprobs_N * view.advantages_N
        return Surrogate(loss_N=loss_N, ratio_N=weight_N, clipped_N=weight_N > 1e9)
"""


def test_a_users_method_that_looks_at_whole_rollouts_gets_whole_rollouts(tmp_path) -> None:
    path = tmp_path / "mine.py"
    path.write_text(USERS_METHOD)
    test_the_size_of_packs_does_not_change_the_gradient_of_rows(f"{path}:WeighedRollouts", "none")


def test_a_mean_per_sequence_is_per_rollout_by_hand() -> None:
    """Rollout 0: rows with 3 and 1 trained tokens; rollout 1: one row with 2. Two rollouts, not three."""
    batch = random_batch(groups=1, size=2, seed=0)
    first, second = batch.groups[0].rollouts
    for rollout, length in ((first, 6), (second, 2)):
        rollout.response_ids = np.arange(1, length + 1, dtype=np.int32)
        rollout.logprobs = np.zeros(length, dtype=np.float32)
        rollout.loss_mask = np.ones(length, dtype=bool)
        rollout.segments = (VersionSegment(0, length),)
    observe(first, slice(3, 5))  # sampled: 0, 1, 2 and 5
    first.rows = (Row(np.array([7, 8], np.int32), 4), Row(np.array([9], np.int32), 2))
    flat = FlatBatch.from_groups(batch.groups, 1, resolve_settings(AlgorithmConfig()))
    assert [ids.tolist() for ids in flat.token_ids[:2]] == [[7, 8, 1, 2, 3, 4], [9, 5, 6]]
    assert [index.tolist() for index in flat.predictors[:2]] == [[1, 2, 3], [1]]
    assert flat.rollout_S.tolist() == [0, 0, 1]
    assert flat.bounds_S1.tolist() == [0, 3, 4, 6]
    assert flat.counts_R.tolist() == [4, 2]
    assert flat.response_lengths_R.tolist() == [4, 2]  # tool results have no length
    both = np.arange(2)
    sums = update_sums(flat, both)
    assert sums.tolist() == [6, 2]
    by_sequence = loss_weights(flat, both, sums, "sequence", 8)
    assert by_sequence.tolist() == [1 / 8] * 4 + [1 / 4] * 2
    assert loss_weights(flat, both, sums, "constant", 8).tolist() == [1 / 16] * 6
    assert loss_weights(flat, both, sums, "token", 8).tolist() == [1 / 6] * 6


def rollout_of_two_rows() -> Rollout:
    rollout = random_batch(groups=1, size=1, seed=3).groups[0].rollouts[0]
    rollout.response_ids = np.arange(5, dtype=np.int32)
    rollout.logprobs = -np.arange(5, dtype=np.float32)
    rollout.loss_mask = np.array([True, True, False, True, True])
    rollout.segments = (VersionSegment(0, 3), VersionSegment(2, 2))
    rollout.rows = (Row(np.array([4, 5, 6], np.int32), 2), Row(np.array([7], np.int32), 3))
    rollout.status, rollout.score = Status.COMPLETED, Score(0.5)
    rollout.check()
    return rollout


def test_the_journal_keeps_the_rows_bit_for_bit() -> None:
    rollout = rollout_of_two_rows()
    prompt = random_batch(groups=1).groups[0].prompt
    data = encode_rollout(rollout, text="", key="key")
    again = decode_rollout(data, rollout.rollout_id, prompt, text="", key="key")
    assert [(row.prompt_ids.tolist(), row.length) for row in again.rows] == [
        ([4, 5, 6], 2),
        ([7], 3),
    ]
    assert again.loss_mask.tolist() == rollout.loss_mask.tolist()
    assert again.segments == rollout.segments
    pruned = prune_payload(encode_rollout(rollout, text="", key="key"), "", "key", "")
    assert pruned is not None
    kept = decode_rollout(pruned, rollout.rollout_id, prompt, text="", key="key")
    assert (kept.rows, len(kept.response_ids), kept.segments) == ((), 5, rollout.segments)


def test_a_fingerprint_names_the_rows() -> None:
    batch = random_batch(groups=1, size=1, seed=3)
    batch.groups[0].rollouts = [rollout_of_two_rows()]
    before = batch.groups[0].fingerprint()
    other = rollout_of_two_rows()
    other.rows = (Row(np.array([4, 5, 7], np.int32), 2), Row(np.array([7], np.int32), 3))
    batch.groups[0].rollouts = [other]
    assert batch.groups[0].fingerprint() != before


def test_rows_that_do_not_cover_the_response_are_refused() -> None:
    rollout = rollout_of_two_rows()
    rollout.rows = (Row(np.array([4], np.int32), 4),)
    with pytest.raises(ValueError, match="rows"):
        rollout.check()


def test_a_turn_is_credited_with_the_rewards_after_it_by_hand() -> None:
    """Rollout 0 earns 1 after its first two tokens and nothing later; rollout 1 earns 0 in all.

    Returns 1 and 0: mean 0.5, deviation sqrt(0.5). The third token's return to go is 0.
    """
    batch = random_batch(groups=1, size=2, seed=0)
    first, second = batch.groups[0].rollouts
    for rollout, length in ((first, 3), (second, 2)):
        rollout.response_ids = np.arange(1, length + 1, dtype=np.int32)
        rollout.logprobs = np.zeros(length, dtype=np.float32)
        rollout.loss_mask = np.ones(length, dtype=bool)
        rollout.segments = (VersionSegment(0, length),)
    first.score, second.score = Score(1.0), Score(0.0)
    first.earned = ((2, 0.0), (1, 1.0))
    scale = np.sqrt(0.5) + 1e-4
    for name, expected in (
        ("grpo", np.array([0.5, 0.5, -0.5, -0.5, -0.5]) / scale),
        ("dr_grpo", np.array([0.5, 0.5, -0.5, -0.5, -0.5])),
        ("rloo", np.array([1.0, 1.0, 0.0, -1.0, -1.0])),  # less the other's return
    ):
        settings = resolve_settings(AlgorithmConfig(name=name))
        flat = FlatBatch.from_groups(batch.groups, 1, settings)
        found = token_advantages(flat, flat.rewards_R, None, settings, Ranks())
        np.testing.assert_allclose(found, expected, rtol=1e-12)
    data = encode_rollout(first, text="", key="key")
    again = decode_rollout(data, first.rollout_id, batch.groups[0].prompt, text="", key="key")
    assert again.earned == first.earned
    before = batch.groups[0].fingerprint()
    first.earned = ((2, 0.0), (1, 0.5))
    assert batch.groups[0].fingerprint() != before


def test_an_overlong_penalty_is_for_one_answer_and_not_for_turns_or_tools_by_hand() -> None:
    """With max_tokens 8 the window is 2: an answer of 7 tokens costs a half, one of 6 nothing.

    Rollout 0: answers of 6 and 5 tokens and a tool result of 9. Rollout 1: an answer of 7 tokens, continued by one
    of 2 in another row, where its own tokens stand again untrained.
    """
    batch = random_batch(groups=1, size=2, seed=0)
    first, second = batch.groups[0].rollouts
    masks = (
        [True] * 6 + [False] * 9 + [True] * 5,
        [True] * 7 + [False] * 7 + [False] + [True] * 2,
    )
    for rollout, mask in zip((first, second), masks, strict=True):
        length = len(mask)
        rollout.response_ids = np.arange(1, length + 1, dtype=np.int32)
        rollout.logprobs = np.zeros(length, dtype=np.float32)
        rollout.loss_mask = np.array(mask)
        rollout.segments = (VersionSegment(0, length),)
        rollout.score, rollout.finish_reason = Score(1.0), "stop"
    prompt = np.array([7], np.int32)
    first.rows, second.rows = (Row(prompt, 20),), (Row(prompt, 7), Row(prompt, 10))
    settings = resolve_settings(AlgorithmConfig(name="dapo"))
    flat = FlatBatch.from_groups(batch.groups, 1, settings)
    assert flat.response_lengths_R.tolist() == [11, 9]
    assert flat.answer_lengths_R.tolist() == [6, 7]
    assert shaped_rewards(flat, np.array([8, 8]), settings).tolist() == [1.0, 0.5]

    async def scores(reward: Any) -> list[float]:
        return [(await reward.score(one, batch.groups[0].prompt)).value for one in (first, second)]

    overlong = SoftOverlong(SoftOverlong.Options(), max_tokens=8)
    assert asyncio.run(scores(overlong)) == [0.0, -0.5]
    length = LengthShaping(LengthShaping.Options(target_tokens=9, span_tokens=4), max_tokens=8)
    assert asyncio.run(scores(length)) == [0.5, 1.0]  # 11 and 9 sampled tokens


def test_masked_tool_tokens_do_not_end_a_turns_return_and_rows_share_it_by_hand() -> None:
    """Rollout 0 earns 1 in its first turn and 2 in its second, in a row of its own; rollout 1 earns 1.

    Returns 3 and 1, mean 2. The first turn's return to go is 3, the second turn's is 2.
    """
    batch = random_batch(groups=1, size=2, seed=0)
    first, second = batch.groups[0].rollouts
    for rollout, length in ((first, 6), (second, 1)):
        rollout.response_ids = np.arange(1, length + 1, dtype=np.int32)
        rollout.logprobs = np.zeros(length, dtype=np.float32)
        rollout.loss_mask = np.ones(length, dtype=bool)
        rollout.segments = (VersionSegment(0, length),)
    observe(first, slice(2, 4))
    first.rows = (Row(np.array([7], np.int32), 2), Row(np.array([7, 8], np.int32), 4))
    first.score, second.score = Score(3.0), Score(1.0)
    first.earned = ((2, 0.0), (4, 1.0))
    settings = resolve_settings(AlgorithmConfig(name="dr_grpo"))
    flat = FlatBatch.from_groups(batch.groups, 1, settings)
    found = token_advantages(flat, flat.rewards_R, None, settings, Ranks())
    assert found.tolist() == [1.0, 1.0, 0.0, 0.0, -1.0]

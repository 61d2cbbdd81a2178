"""Rows of an engine end when hand-worked figures say."""

from __future__ import annotations

import pytest

from penstock.run.twin.engine import Rows
from penstock.run.twin.profile import DecodeModel, TrainModel


def run(rows: Rows) -> list[tuple[float, str]]:
    """Return (time, row) of every end."""
    rows.admit()
    ends = []
    while (end := rows.next_end()) is not None:
        rows.advance(end)
        ends += [(round(end, 6), row) for row in rows.take_ended()]
        rows.admit()
    return ends


def test_rows_share_decode_steps() -> None:
    rows = Rows(DecodeModel(step_s=1.0, row_s=0.5))
    rows.waiting["0"] = 2
    rows.waiting["1"] = 4
    # two steps of two rows, 2 s each; then two steps of one row, 1.5 s each
    assert run(rows) == [(4.0, "0"), (7.0, "1")]
    assert (rows.busy_s, rows.row_s) == (7.0, 11.0)
    assert rows.tokens == pytest.approx(6.0)


def test_a_row_waits_for_a_slot() -> None:
    rows = Rows(DecodeModel(step_s=1.0, row_s=0.0, slots=1))
    rows.waiting["0"] = 3
    rows.waiting["1"] = 2
    assert run(rows) == [(3.0, "0"), (5.0, "1")]


def test_a_removed_row_frees_its_slot_or_leaves_the_queue() -> None:
    rows = Rows(DecodeModel(step_s=1.0, row_s=0.0, slots=2))
    for row, tokens in enumerate((9, 2, 7, 3)):
        rows.waiting[str(row)] = tokens
    rows.admit()
    rows.advance(2.0)
    assert rows.take_ended() == ["1"]
    assert (len(rows.began), len(rows.waiting)) == (1, 2)
    assert (rows.remove("0"), rows.remove("2")) == (2, 0)
    assert (len(rows.began), len(rows.waiting)) == (0, 1)
    assert run(rows) == [(5.0, "3")]


def test_a_prefill_holds_all_rows_up() -> None:
    rows = Rows(DecodeModel(step_s=1.0, row_s=0.0))
    rows.waiting["0"] = 3
    rows.stall(0.5)
    assert run(rows) == [(3.5, "0")]


def test_a_removed_row_has_made_the_tokens_of_its_time() -> None:
    rows = Rows(DecodeModel(step_s=1.0, row_s=0.0))
    rows.waiting["0"] = 10
    rows.waiting["1"] = 2
    rows.admit()
    rows.advance(4.2)
    assert rows.take_ended() == ["1"]
    assert rows.remove("0") == 4
    assert rows.next_end() is None


def test_ranks_share_the_tokens_of_an_update_but_not_its_fixed_time() -> None:
    model = TrainModel(fixed_s=1.0, token_s=0.01)
    assert model.seconds(400, 1) == 5.0
    assert 3.0 < model.seconds(400, 2) < 3.2  # a little more than half of the four seconds

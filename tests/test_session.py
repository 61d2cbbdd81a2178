"""What a session does to the interpreter that it runs in, and undoes."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest

from penstock.session import _tuned_interpreter


@pytest.fixture
def unfrozen() -> Iterator[None]:
    """Run a test in an interpreter where nothing is frozen, unlike the one of the tests."""
    gc.unfreeze()
    yield
    gc.freeze()


@pytest.mark.usefixtures("unfrozen")
def test_objects_of_before_a_run_stay_out_of_its_collections_and_come_back() -> None:
    before = gc.get_threshold()
    with _tuned_interpreter():
        assert gc.get_freeze_count() > 1000
        assert gc.get_threshold() > before
    assert gc.get_freeze_count() == 0
    assert gc.get_threshold() == before


@pytest.mark.usefixtures("unfrozen")
def test_what_the_program_around_a_run_froze_stays_frozen() -> None:
    gc.freeze()
    made = [object() for _ in range(10)], {}
    with _tuned_interpreter():
        assert any(one is made for one in gc.get_objects())  # of a run: not frozen
        assert gc.get_freeze_count() > 1000
    assert gc.get_freeze_count() > 1000

"""Schedules that once broke a promise: each names the defect that it found, and holds now."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator
from typing import Any

import pytest

from simulation.defects import DEFECTS
from simulation.faults import DRIVER, Fault
from simulation.schedule import Result, run_seed

# a `finally` of a killed driver makes coroutines that no loop can run any more
pytestmark = pytest.mark.filterwarnings("ignore:coroutine .* was never awaited:RuntimeWarning")
PLAIN = {
    "launch.num_producers": 2,
    "launch.num_consumers": 1,
    "launch.colocate": False,
    "watchdog.action": "restart",
    "checkpoint.every_steps": 1,
    "train.steps": 3,
}


EVALUATED = {
    "eval.tasks": {"held": {"data": "none", "rewards": [{"type": "simulation.parts:SimReward"}]}},
    "eval.every_steps": 1,
    "eval.blocking": False,
}


@pytest.fixture(autouse=True)
def _no_garbage_of_dead_drivers(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Free the coroutines of killed drivers here: they must not be freed while another loop runs."""
    monkeypatch.setattr(sys, "unraisablehook", lambda unraisable: None)
    yield
    gc.collect()
    gc.enable()


def at(kind: str, target: str, method: str, phase: str, passing: int = 1, **more: Any) -> Fault:
    return Fault(kind=kind, target=target, method=method, phase=phase, passing=passing, **more)


def then(kind: str, target: str, after_s: float, **more: Any) -> Fault:
    return Fault(kind=kind, target=target, after_s=after_s, **more)


FOUND: dict[str, tuple[dict[str, Any], list[Fault]]] = {
    "a worker that hangs before the first step hung the run": (
        {},
        [at("lose", "engine-1", "stats", "begun")],
    ),
    "a hang in pause was taken for a pause": (
        {"launch.colocate": True},
        [at("lose", "engine-1", "pause", "done", 2)],
    ),
    "a colocated trainer that hangs in its start hung the run": (
        {"launch.colocate": True},
        [at("stall", "trainer", "sleep", "begun")],
    ),
    "the restart of a trainer deleted the folder of the checkpoint that it repeated": (
        {"launch.num_consumers": 2},
        [at("kill", "trainer-1", "snapshot", "sent", 3)],
    ),
    "a trainer that died while it wrote the last checkpoint failed a finished run": (
        {"checkpoint.every_steps": 0},
        [at("kill", "trainer", "write_snapshot", "begun")],
    ),
    "Ctrl-C during the last checkpoint ended without a word": (
        {"checkpoint.every_steps": 0},
        [at("slow", "trainer", "write_snapshot", "begun"), then("stop", DRIVER, 0.0)],
    ),
    "a lost answer to the stop at the end failed a finished run": (
        {},
        [at("lose", "trainer", "request_stop", "begun")],
    ),
    "an engine started on a GPU that the trainer had taken back": (
        {"launch.colocate": True, "checkpoint.every_steps": 0, "train.steps": 4},
        [
            at("slow", "trainer", "train", "begun", 4),
            then("restart", DRIVER, 0.0),
            at("kill", "engine-0", "sleep", "answered", life=1),  # two steps are to be redone
        ],
    ),
    "a trainer and an engine that died together started on one GPU together": (
        {"launch.colocate": True},
        [at("kill", "engine-0", "update_weights", "answered", 2), then("kill", "trainer", 0.002)],
    ),
    "trainer and engines died with weights half written and waited for each other": (
        {"launch.colocate": True},
        [
            at("kill", "trainer", "publish", "begun", 2),
            then("kill", "engine-0", 0.0),
            then("kill", "engine-1", 0.0),
        ],
    ),
    "an evaluation beside a colocated step lost its engine and waited for those that slept": (
        {"launch.colocate": True, **EVALUATED},
        [at("kill", "engine-0", "sleep", "done", 2), then("kill", "engine-1", 0.0)],
    ),
    "a run that the watchdog stopped waited for a second worker that hung": (
        {"launch.colocate": True, "watchdog.action": "stop"},
        [at("stall", "engine-1", "pause", "begun", 2), then("lose", "engine-0", 0.0)],
    ),
}


@pytest.mark.parametrize("defect", FOUND)
@pytest.mark.parametrize(
    "seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (1, 2))]
)
def test_a_schedule_that_found_a_defect_holds(defect: str, seed: int) -> None:
    settings, faults = FOUND[defect]
    result = run_seed(seed, settings={**PLAIN, **settings}, faults=faults)
    assert result.happened, "its fault never struck"
    assert result.violations == [], result.lives


def test_a_second_hang_is_noticed_as_soon_as_the_first() -> None:
    """A worker's death counted as an answer, and the limit is five times the longest answer."""
    hangs = [at("stall", "trainer", "train", "begun", number) for number in (1, 2, 3)]
    result: Result = run_seed(0, settings=PLAIN, faults=hangs)
    assert len(result.happened) == 3
    assert result.violations == []
    assert result.seconds < 4 * 320


@pytest.mark.parametrize("seed", range(3))
def test_weights_half_written_by_a_trainer_that_does_not_repeat_bits_are_published_again(
    seed: int,
) -> None:
    """Engines were given the dead trainer's weights three times, and the run stopped."""
    faults = [at("kill", "trainer", "publish", "begun", 3)]
    result = run_seed(seed, settings=PLAIN, faults=faults, repeats_bits=False)
    assert result.happened
    assert result.violations == [], result.lives


@pytest.mark.parametrize("strategy", ["sync", "async"])
@pytest.mark.parametrize("bits", [True, False])
def test_weights_that_died_with_a_trainer_that_was_past_them_are_replaced_by_its_successors(
    strategy: str, bits: bool
) -> None:
    """Engines were given the handle of a dead trainer's GPU memory until every engine was given up."""
    settings = {
        "sync.every_steps": 2,
        "train.steps": 4,
        "produce.strategy": strategy,
        "produce.max_staleness": 2 if strategy == "async" else 0,
        "produce.over_sample_threshold": 0.0,
    }
    faults = [
        at("kill", "trainer", "train", "answered", 3),
        then("kill", "engine-0", 0.0),
        then("kill", "engine-1", 0.0),
    ]
    result = run_seed(
        0, settings={**PLAIN, **settings}, faults=faults, repeats_bits=bits, gpu_memory=True
    )
    assert len(result.happened) == 3
    assert result.violations == [], result.lives


def test_an_agent_that_failed_before_a_pause_is_not_continued_with_its_spent_calls() -> None:
    """Its call was sampled and recorded a second time, and the journal refused it and ended the run."""
    result = run_seed(1289)
    assert "abort), " in result.settings
    assert "1 with an agent" in result.settings
    assert result.violations == [], result.lives


def test_tokens_confirm_weights_whose_load_was_never_answered() -> None:
    """They were trained, the run stopped, and no engine had confirmed the weights that they name."""
    lost = at("lose", "engine-0", "update_weights", "done", 2)
    result = run_seed(2656, faults=[lost, then("kill", "trainer", 29.0)])
    assert len(result.happened) == 2
    assert "stuck: engine-0 has not answered sync" in result.lives[0]
    assert result.violations == [], result.lives


@pytest.mark.parametrize(
    "tick", [3, *(pytest.param(tick, marks=pytest.mark.slow) for tick in (4, 5))]
)
def test_a_stop_during_the_start_leaves_no_task(tick: int) -> None:
    """The task that reads the data was still running when the session ended."""
    for seed in range(4):
        result = run_seed(
            seed, settings=PLAIN, faults=[Fault(kind="stop", target=DRIVER, tick=tick)]
        )
        assert result.violations == [], (seed, result.lives)


def test_an_update_that_vanishes_is_found() -> None:
    """About one schedule in 500 finds it: an engine stalls after the update, and the trainer dies."""
    stall = at("stall", "engine-0", "stats", "begun", 3, seconds=40.0)
    faults = [stall, then("kill", "trainer", 0.5)]
    with DEFECTS["statistics"]():
        assert run_seed(0, settings=PLAIN, faults=faults).violations != []
    assert run_seed(0, settings=PLAIN, faults=faults).violations == []


@pytest.mark.parametrize("seed", [7948, 8505])
def test_a_trainer_that_dies_between_two_redone_steps_is_restored_once(seed: int) -> None:
    """The steps after its death were sent to its successor, which had been restored already."""
    assert run_seed(seed).violations == []

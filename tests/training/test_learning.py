"""Every algorithm raises the demo policy's accuracy; the decoupled objective learns from stale data."""

import asyncio
import importlib.util
import sys
from pathlib import Path

import numpy as np
import pytest

from penstock.training.algo import ALGORITHMS

SCRIPT = Path(__file__).parents[2] / "scripts" / "plot_algorithms.py"


@pytest.fixture(scope="module")
def script():
    spec = importlib.util.spec_from_file_location("plot_algorithms", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def curve(script, algorithm, steps, lag=0, final_groups=128, **train):
    settings = {"groups_per_step": 16, "lr": 3e-4} | train
    config = script.demo_config(algorithm, train=settings)
    return asyncio.run(script.train_curve(config, steps, lag, final_groups=final_groups))


def rise(script, name, steps, **train) -> float:
    accuracies, _ = curve(script, {"name": name}, steps, final_groups=0, **train)
    return float(np.mean(accuracies[-2:]) - np.mean(accuracies[:2]))


@pytest.mark.parametrize(  # the baselines: a group's, a batch's
    "name", ["grpo", pytest.param("reinforce_pp", marks=pytest.mark.slow)]
)
def test_accuracy_rises(script, name) -> None:
    assert rise(script, name, steps=6, groups_per_step=8, lr=6e-4) > 0.1


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(ALGORITHMS.keys() - {"sft", "distill"}))  # no rewards
def test_accuracy_rises_with_every_algorithm(script, name) -> None:
    assert rise(script, name, steps=7) > 0.1


@pytest.mark.slow
def test_decoupled_at_staleness_4_ends_within_two_points_of_sync(script) -> None:
    _, sync = curve(script, {"name": "grpo"}, steps=56, lr=1e-4)
    _, stale = curve(script, {"name": "grpo", "decoupled": True}, steps=56, lag=4, lr=1e-4)
    assert sync > 0.9
    assert stale > sync - 0.02

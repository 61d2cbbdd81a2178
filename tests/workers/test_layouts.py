"""`penstock train` with layouts of trainer ranks, as a user sees it: weights, audit, resume, refusals."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import numpy as np
import pytest

from penstock.run.job import Job
from penstock.store.run_folder import RunFolder
from stages.disturbed_run import assert_balanced, config_of, run, weights
from stages.made_run import metrics_of
from stages.tiny_run import TINY, CrashServer, assert_sound
from stages.training_data import tiny_model

pytestmark = pytest.mark.usefixtures("warm_workers")

TWO = ("launch.kind=local", "launch.num_consumers=2")


def assert_close(folder: RunFolder, quiet: RunFolder) -> None:
    """Compare with one rank: sums in another order, in float32.

    The first gradient, from equal weights, is equal up to rounding. Weights are not: Adam makes a step of
    train.lr of any gradient, so one that is zero but for rounding moves its weight in either direction.
    """
    own, one = (metrics_of(run)[0] for run in (folder, quiet))
    assert one["grad_norm"] > 0
    for name in ("grad_norm", "entropy/mean", "mismatch/kl"):
        assert own[name] == pytest.approx(one[name], rel=1e-5, abs=1e-9), name
    difference = np.abs(weights(folder) - weights(quiet))
    assert difference.max() < 3e-3  # three steps with train.lr 1e-3
    assert (difference > 1e-5).mean() < 5e-4
    assert (difference > 1e-6).mean() < 2e-3


@pytest.mark.parametrize(
    "axis",
    [
        pytest.param("tensor", marks=pytest.mark.slow),
        "pipeline",
        pytest.param("context", marks=pytest.mark.slow),
    ],
)
def test_two_ranks_of_one_copy_give_the_weights_of_one_though_one_of_them_dies(
    quiet: RunFolder, tmp_path: Path, axis: str
) -> None:
    """The step that the dead rank had begun is done again by both, with the digests of the journal."""

    async def disturb(job: Job, step: int) -> None:
        if step == 3:
            worker = job.workers.supervised["trainer"].worker
            os.kill(worker._ranks[1].pid, signal.SIGKILL)  # type: ignore[union-attr]

    words = ["produce.strategy=sync", "launch.num_consumers=2", f"train.parallel.{axis}=2"]
    folder, notes = run(config_of(tmp_path, "killed", *words), disturb)
    assert_balanced(folder)
    assert any("trainer-1: the worker ended unexpectedly" in note for note in notes)
    assert_close(folder, quiet)


@pytest.mark.slow
def test_a_run_of_tensor_ranks_is_resumed_in_another_layout(server: CrashServer) -> None:
    words = (*TWO, "train.parallel.tensor=2")
    folder, code = server.train("tensor", *words, point="after take", number=4)
    assert code == -9, server.output()
    words = ("train.parallel.tensor=1", "train.parallel.pipeline=2", "train.steps=5")
    assert server.run("resume", str(folder.path), *words) == 0, server.output()
    assert_sound(folder, steps=5)
    layouts = [era.config.train.parallel for era in folder.eras()]
    assert [(layout.tensor, layout.pipeline) for layout in layouts] == [(2, 1), (1, 2)]
    assert server.run("audit", str(folder.path)) == 0, server.output()
    assert server.run("replay", str(folder.path)) == 0, server.output()
    assert sum(line.endswith("equal") for line in server.output().splitlines()) == 5


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (
            ("launch.num_consumers=2", "train.parallel.tensor=4"),
            "train.parallel: got 4 ranks for one copy of the model with launch.num_consumers = 2",
        ),
        (
            ("launch.num_consumers=4", "train.parallel.tensor=4"),
            "train.parallel.tensor: got 4, allowed: a divisor of the model's num_key_value_heads = 2",
        ),
        (
            ("launch.num_consumers=2", "train.parallel.tensor=2", "model.path=gpt2"),
            "train.parallel.tensor: got 2, but transformers has no tensor-parallel plan for 'gpt2'",
        ),
        (
            ("launch.num_consumers=4", "train.parallel.pipeline=4", "train.groups_per_step=4"),
            "train.parallel.pipeline: got 4, allowed: at most the model's num_hidden_layers = 2",
        ),
        (
            ("launch.num_consumers=4", "train.parallel={pipeline=2,context=2}"),
            "train.parallel.context: got 2, allowed: 1 with train.parallel.pipeline",
        ),
    ],
    ids=["product", "heads", "no plan", "layers", "pipeline x context"],
)
def test_a_layout_that_cannot_work_is_refused_in_one_line(
    server: CrashServer, words: tuple[str, ...], reason: str
) -> None:
    folder = server.folder / "gpt2"
    if not folder.exists():
        tiny_model("GPT2", n_embd=16, n_head=2, n_layer=1).save_pretrained(folder)
    command = ("train", *TINY, "launch.kind=local", *words)
    assert server.run(*command, directory=server.folder) == 2
    assert reason in " ".join(server.output().split())


def test_a_config_with_a_layout_can_be_rehearsed(server: CrashServer) -> None:
    words = ("launch.kind=local", "launch.num_consumers=2", "train.parallel.tensor=2")
    command = ("check", *TINY, *words, f"run.dir={server.folder}")
    assert server.run(*command) == 0, server.output()

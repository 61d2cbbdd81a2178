"""Every layout of trainer ranks gives what one rank gives: weights, metrics, checkpoints, masters."""

import asyncio
import json
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from penstock.launch.processes.process_worker import ProcessWorker
from penstock.training.ranks import Ranks
from stages import rank_program

Work = tuple[str, str, dict[str, int]]  # kind (run, start, or a layout to load from), job, axes
JOBS = list(rank_program.ALGORITHMS)


async def run_ranks(folder: Path, world: int, work: Sequence[Work]) -> None:
    """Do the work in `world` processes that are trainer ranks."""
    port, part = rank_program.free_port(), f"{rank_program.__file__}:OneRank"
    limits = {"threads": 1, "timeout_s": 200}
    names = [f"world-{world}-rank-{rank}" for rank in range(world)]
    ranks = await asyncio.gather(
        *(
            ProcessWorker.start(
                name, part, rank, port, world, log_path=folder / f"{name}.log", **limits
            )
            for rank, name in enumerate(names)
        )
    )
    try:
        async with asyncio.timeout(200):
            await asyncio.gather(*(rank.call("run_layouts", folder, list(work)) for rank in ranks))
    finally:
        for rank in ranks:
            await rank.close()


def weights(path: Path) -> dict[str, torch.Tensor]:
    return dict(torch.load(path))


def assert_same(left: Path, right: Path, tolerance: float = 1e-9) -> None:
    own, other = weights(left), weights(right)
    assert own.keys() == other.keys()
    for name in own:
        torch.testing.assert_close(
            own[name], other[name], rtol=tolerance, atol=tolerance, msg=f"{left.name} {name}"
        )


def assert_same_run(folder: Path, job: str, layout: str) -> None:
    """Compare weights and metrics with those of one rank, and the resumed step with the first try."""
    assert_same(folder / f"{job}-{layout}.pt", folder / f"{job}-1.pt")
    own, again = (
        weights(folder / f"{job}-{layout}.pt"),
        weights(folder / f"{job}-{layout}-again.pt"),
    )
    assert all(torch.equal(own[name], again[name]) for name in own)
    one, several = (
        json.loads((folder / f"{job}-{name}.json").read_text()) for name in ("1", layout)
    )
    own_to_a_process = {"time/train_s", "time/digest_s", "tokens_per_s", "memory/peak_mib"}
    for left, right in zip(several, one, strict=True):
        assert left.keys() == right.keys()
        for name in left.keys() - own_to_a_process:
            assert left[name] == pytest.approx(right[name], rel=1e-6, abs=1e-8), name


@pytest.fixture(scope="module")
def folder(tmp_path_factory, warm_workers) -> Path:
    """Return a folder with the results of one rank and of a few layouts."""
    folder = tmp_path_factory.mktemp("layouts")
    for job in ("plain", "lora"):
        rank_program.run(job, folder, Ranks())
    rank_program.start_rounded("full", folder, Ranks())
    tensor = {"tensor": 2}
    two: list[Work] = [
        ("run", "plain", tensor),
        ("run", "lora", tensor),
        ("run", "plain", {"zero": 1}),
        ("run", "plain", {"zero": 2}),
        ("start", "full", tensor),
    ]
    asyncio.run(run_ranks(folder, 2, two))
    asyncio.run(run_ranks(folder, 4, [("run", "plain", tensor)]))
    asyncio.run(run_ranks(folder, 2, [("4-tensor2", "plain", {})]))
    rank_program.reload("plain", folder, Ranks(), saved="4-tensor2")
    return folder


@pytest.mark.parametrize(
    ("job", "layout"),
    [
        ("plain", "2-tensor2"),
        ("lora", "2-tensor2"),
        ("plain", "2-zero1"),
        ("plain", "2-zero2"),
        ("plain", "4-tensor2"),
    ],
)
def test_a_layout_gives_the_run_of_one_rank(folder, job, layout) -> None:
    assert_same_run(folder, job, layout)


@pytest.mark.parametrize("loaded", ["2", "1"])
def test_a_checkpoint_of_four_ranks_loads_at_fewer(folder, loaded) -> None:
    assert_same(folder / f"plain-4-tensor2-to-{loaded}.pt", folder / "plain-1.pt")


def test_dithered_masters_are_the_same_in_every_layout(folder) -> None:
    one, two = (torch.load(folder / f"start-full-{layout}.pt") for layout in ("1", "2-tensor2"))
    for part in ("masters", "published"):
        assert all(torch.equal(one[part][name], two[part][name]) for name in one[part]), part

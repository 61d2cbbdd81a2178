"""Every layout of trainer ranks gives what one rank gives: weights, metrics, checkpoints, masters."""

import asyncio
import functools
import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch

from penstock.config import ParallelConfig
from penstock.model.packed_attention import PackLayout, packed_attention
from penstock.training.pack import make_pack
from penstock.training.parallel.context_parallel import slice_layout
from penstock.training.parallel.ranks import Ranks
from penstock.workers.processes.process_worker import ProcessWorker
from penstock.workers.supervise.trainer import port_of, reserve_port
from stages import rank_program
from stages.decoder_cases import CASES

Work = tuple[
    str, str, dict[str, int]
]  # kind (run, start, divide, or a layout to load from), job or family, axes
JOBS = [job for job in rank_program.ALGORITHMS if job != "ppo"]  # which needs one rank per copy


async def run_ranks(folder: Path, world: int, work: Sequence[Work]) -> None:
    """Do the work in `world` processes that are trainer ranks."""
    part = f"{rank_program.__file__}:OneRank"
    limits = {"threads": 1, "timeout_s": 200}
    names = [f"world-{world}-rank-{rank}" for rank in range(world)]
    with reserve_port("127.0.0.1") as reserved:
        ranks = await asyncio.gather(
            *(
                ProcessWorker.start(
                    name,
                    part,
                    rank,
                    port_of(reserved),
                    world,
                    log_path=folder / f"{name}.log",
                    **limits,
                )
                for rank, name in enumerate(names)
            )
        )
        try:
            async with asyncio.timeout(200):
                await asyncio.gather(
                    *(rank.call("run_layouts", folder, list(work)) for rank in ranks)
                )
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


TENSOR, PIPELINE, CONTEXT = {"tensor": 2}, {"pipeline": 2}, {"context": 2}
TWO: list[Work] = [
    ("run", "plain", TENSOR),
    ("start", "full", TENSOR),
    ("2-tensor2", "plain", PIPELINE),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory, warm_workers) -> Path:
    """Return a folder with the results of one rank and of two that share every matrix."""
    folder = tmp_path_factory.mktemp("layouts")
    rank_program.run("plain", folder, Ranks())
    rank_program.start_rounded("full", folder, Ranks())
    asyncio.run(run_ranks(folder, 2, TWO))
    return folder


@pytest.mark.slow
def test_a_layout_gives_the_run_of_one_rank(folder) -> None:
    """One layout of many: `test_every_job_in_every_layout` runs the others."""
    assert_same_run(folder, "plain", "2-tensor2")


@pytest.mark.slow
def test_a_checkpoint_loads_in_another_layout(folder) -> None:
    assert_same(folder / "plain-2-tensor2-to-2-pipeline2.pt", folder / "plain-1.pt")


@pytest.fixture(scope="module")
def folder_of_four(tmp_path_factory, warm_workers) -> Path:
    """Return a folder with the results of one rank, of four, and of fewer that load those of four."""
    folder = tmp_path_factory.mktemp("four")
    rank_program.run("plain", folder, Ranks())
    asyncio.run(run_ranks(folder, 4, [("run", "plain", TENSOR)]))
    asyncio.run(run_ranks(folder, 2, [("4-tensor2", "plain", {})]))
    rank_program.reload("plain", folder, Ranks(), saved="4-tensor2")
    return folder


@pytest.mark.slow
def test_four_ranks_give_the_run_of_one(folder_of_four) -> None:
    assert_same_run(folder_of_four, "plain", "4-tensor2")


@pytest.mark.slow
@pytest.mark.parametrize("loaded", ["2", "1"])
def test_a_checkpoint_of_four_ranks_loads_at_fewer(folder_of_four, loaded) -> None:
    assert_same(folder_of_four / f"plain-4-tensor2-to-{loaded}.pt", folder_of_four / "plain-1.pt")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("world", "axes"),
    [
        (2, TENSOR),
        (2, PIPELINE),
        (2, CONTEXT),
        (2, {"zero": 1}),
        (2, {"zero": 2}),
        (4, PIPELINE),
        (4, CONTEXT | {"zero": 1}),
        (4, TENSOR | PIPELINE),
        (4, TENSOR | CONTEXT),
        (4, PIPELINE | {"zero": 1}),
    ],
    ids=lambda value: str(value) if isinstance(value, int) else "-".join(value),
)
def test_every_job_in_every_layout(tmp_path, warm_workers, world, axes) -> None:
    """Run all jobs, load a checkpoint of one rank, have one rank load theirs, start rounded runs."""
    for job in JOBS:
        rank_program.run(job, tmp_path, Ranks())
    for job in rank_program.STARTS:
        rank_program.start_rounded(job, tmp_path, Ranks())
    layout = rank_program.layout_of(Ranks(0, world, ParallelConfig(**axes)))
    work: list[Work] = [("run", job, axes) for job in JOBS]
    work += [("1", "plain", axes), *(("start", job, axes) for job in rank_program.STARTS)]
    asyncio.run(run_ranks(tmp_path, world, work))
    rank_program.reload("plain", tmp_path, Ranks(), saved=layout)
    for job in JOBS:
        assert_same_run(tmp_path, job, layout)
    assert_same(tmp_path / f"plain-1-to-{layout}.pt", tmp_path / "plain-1.pt")
    assert_same(tmp_path / f"plain-{layout}-to-1.pt", tmp_path / "plain-1.pt")
    for job in rank_program.STARTS:
        one, several = (torch.load(tmp_path / f"start-{job}-{name}.pt") for name in ("1", layout))
        for name, tensor in one["published"].items():
            assert torch.equal(several["published"][name], tensor), name
        for name, master in several["masters"].items():
            assert torch.equal(master, one["masters"][name]), name
        assert_same_moves(one, several)


@pytest.mark.slow
@pytest.mark.parametrize("axes", [TENSOR, PIPELINE, CONTEXT], ids=lambda axes: next(iter(axes)))
def test_every_family_is_divided_as_it_is_whole(tmp_path, warm_workers, axes) -> None:
    """transformers has no plan for experts on tensor ranks."""
    divided = [case for case in CASES if case != "llama with dynamic"]
    if axes == TENSOR:
        divided = [case for case in divided if not any(k in case for k in ("oss", "moe", "mixt"))]
    asyncio.run(run_ranks(tmp_path, 2, [("divide", case, axes) for case in divided]))


def assert_same_moves(one: dict, several: dict) -> None:
    """Compare the weights after one update: those that moved have moved to the same bits, but for a few.

    Partial sums in half precision move a weight only where a master is near a border of the grid, or a
    gradient is zero but for rounding: Adam makes a step of lr (1e-4) of it, in either direction. So no
    weight differs by more than two such steps, times what such a step moves, and one step of the grid.
    How many differ depends on how the processor adds products in half precision; masters whose gradient
    is well above that rounding make the same step.
    """
    names = list(one["after"])
    before, own, other = (
        flat(part, names) for part in (one["published"], one["after"], several["after"])
    )
    torch.testing.assert_close(other, own, rtol=2**-7, atol=1e-4 + 2e-4 * one["reach"])
    moved = (own != before) | (other != before)
    assert moved.sum() > 1000
    assert (own == other)[moved].double().mean() > 0.9  # 0.91 or more on every processor so far
    names = list(several["trained"])  # with stages, those of the first
    apart = (flat(one["trained"], names) - flat(several["trained"], names)).abs()
    sizes = [one["gradient"][name].abs().flatten() for name in names]
    clear = torch.cat([size > 0.2 * size.square().mean().sqrt() for size in sizes])
    assert clear.sum() > 200
    assert (apart < 1e-5)[clear].double().mean() > 0.98  # a tenth of a step


def flat(tensors: dict[str, torch.Tensor], names: Sequence[str]) -> torch.Tensor:
    return torch.cat([tensors[name].flatten() for name in names])


@pytest.mark.slow
def test_dithered_masters_are_the_same_in_every_layout(folder) -> None:
    one, two = (torch.load(folder / f"start-full-{layout}.pt") for layout in ("1", "2-tensor2"))
    for part in ("masters", "published"):
        assert all(torch.equal(one[part][name], two[part][name]) for name in one[part]), part
    assert_same_moves(one, two)


def shared_row() -> tuple[PackLayout, int]:
    """Return the layout of a row with two groups of rollouts that share their prompts, and its length."""
    rows = [np.arange(n, n + 9) for n in (0, 0, 0, 50, 50, 90)]
    for number, row in enumerate(rows):
        row[5:] += number  # prompts of 5 tokens
    predictors = [np.arange(4, 8 - number % 3) for number in range(6)]
    pack = make_pack(range(6), rows, predictors, np.zeros(6, int), torch.device("cpu"))
    assert pack.layout.shared is not None
    return pack.layout, len(pack.input_ids_T)


@pytest.mark.parametrize("options", [{}, {"sliding_window": 4}, {"softcap": 2.0}, {"sink": True}])
@pytest.mark.parametrize("ranks", [2, 3])
def test_slices_of_a_row_attend_as_the_whole_row(options, ranks) -> None:
    torch.manual_seed(0)
    layout, total = shared_row()
    query = torch.randn(1, 4, total, 8, dtype=torch.float64)
    key, value = torch.randn(2, 1, 2, total, 8, dtype=torch.float64)
    sink = torch.randn(4, dtype=torch.float64) if "sink" in options else None
    chosen = {name: size for name, size in options.items() if name != "sink"}
    attend = functools.partial(packed_attention, torch.nn.Module(), s_aux=sink, **chosen)
    whole, _ = attend(query, key, value, None, pack_layout=layout)
    each, parts = -(-total // ranks), []
    for first in range(0, total, each):
        last = min(first + each, total)
        part = slice_layout(layout, first, last)
        parts.append(attend(query[:, :, first:last], key, value, None, pack_layout=part)[0])
    torch.testing.assert_close(torch.cat(parts, 1), whole)

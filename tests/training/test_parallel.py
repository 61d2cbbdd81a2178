"""Two real trainer ranks over gloo give what one gives: weights, metrics, checkpoints."""

import asyncio
import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from penstock.model.stored_weights import build
from penstock.training.parallel.ranks import Axis, Ranks, digest_over, rank_share
from penstock.training.parallel.sharding import Sharding
from penstock.weights.digest import digest_of
from penstock.workers.processes.process_worker import ProcessWorker
from penstock.workers.supervise.trainer import port_of, reserve_port
from stages import rank_program
from stages.training_data import tiny_model

STORED = {"model-tied": True, "model-in-several-files": False}
LAYOUTS = {"2": {}, "2-tensor2": {"tensor": 2}, "2-pipeline2": {"pipeline": 2}}
# what `make test` runs; `make test-long` runs all of it
QUICK_JOB, QUICK_START, QUICK_STORED, QUICK_LAYOUT = (
    "plain",
    "full",
    "model-in-several-files",
    "2-tensor2",
)


def all_of(names: Iterable[str], quick: str) -> list[Any]:
    """Return the names as parameters; all but one are for the long tests."""
    return [pytest.param(name, marks=[] if name == quick else [pytest.mark.slow]) for name in names]


JOBS = all_of(rank_program.ALGORITHMS, QUICK_JOB)
STARTS = all_of(rank_program.STARTS, QUICK_START)


class OneOfTwo(Ranks):
    """A rank that is given its partner's values."""

    def __init__(self, rank: int, partner: "OneOfTwo | None" = None) -> None:
        super().__init__(rank, 2)
        self._partner, self.given = partner, np.zeros(0)

    def sum_everywhere(self, values: np.ndarray) -> np.ndarray:
        self.given = values
        return values if self._partner is None else values + self._partner.given

    def max(self, values: np.ndarray) -> np.ndarray:
        return values


def test_ranks_hash_a_share_each_and_agree_with_one() -> None:
    weights = [(f"layer.{n}", torch.randn(5, n + 1).bfloat16()) for n in range(7)]
    first = OneOfTwo(0)
    digest_over(first, weights)
    second = OneOfTwo(1, first)
    assert digest_over(second, weights) == digest_of(weights)
    hashed = [set(np.flatnonzero(one.given.any(axis=1))) for one in (first, second)]
    assert hashed == [{0, 2, 4, 6}, {1, 3, 5}]


def test_the_norm_of_ranks_that_hold_no_gradient() -> None:
    idle, trained = (torch.nn.Parameter(torch.ones(2)) for _ in range(2))
    trained.grad = torch.tensor([3.0, 4.0])
    first = Sharding(OneOfTwo(0))
    assert first.gradient_norm({"w": idle}) is None
    assert float(first.gradient_norm({"w": trained})) == 5
    second = Sharding(OneOfTwo(1, first.ranks))
    second.ranks.tensor = Axis(index=1, size=2)  # the first rank counts what is not cut
    assert float(second.gradient_norm({"w": trained})) == 5


async def run_two_ranks(folder: Path, *work: Sequence[Any]) -> None:
    """Run the jobs, the starts and the layouts in two worker processes."""
    part = f"{rank_program.__file__}:OneRank"
    limits = {"threads": 1, "timeout_s": 200}
    names = [f"rank-{rank}" for rank in range(2)]
    with reserve_port("127.0.0.1") as reserved:
        ranks = await asyncio.gather(
            *(
                ProcessWorker.start(
                    name, part, rank, port_of(reserved), log_path=folder / f"{name}.log", **limits
                )
                for rank, name in enumerate(names)
            )
        )
        try:
            async with asyncio.timeout(200):
                await asyncio.gather(*(rank.call("run_jobs", folder, *work) for rank in ranks))
        finally:
            for rank in ranks:
                await rank.close()


def make_results(
    folder: Path,
    jobs: Sequence[str],
    starts: Sequence[str],
    stored: Sequence[str],
    layouts: Sequence[str],
) -> Path:
    """Fill a folder with the results of one rank and of two ranks."""
    for job in jobs:
        rank_program.run(job, folder, Ranks())
    for name in stored:
        tied = STORED[name]
        model = tiny_model(dtype=torch.bfloat16, tie_word_embeddings=tied, num_hidden_layers=4)
        model.save_pretrained(folder / name, max_shard_size="1GB" if tied else "8KB")
    axes = [LAYOUTS[layout] for layout in layouts]
    asyncio.run(run_two_ranks(folder, list(jobs), list(starts), axes))
    rank_program.reload("plain", folder, Ranks(), saved="2")
    for job in starts:
        rank_program.start_rounded(job, folder, Ranks())
    return folder


@pytest.fixture(scope="module")
def few_results(tmp_path_factory, warm_workers) -> Path:
    work = ([QUICK_JOB], [QUICK_START], [QUICK_STORED], [QUICK_LAYOUT])
    return make_results(tmp_path_factory.mktemp("few"), *work)


@pytest.fixture(scope="module")
def all_results(tmp_path_factory, warm_workers) -> Path:
    work = (rank_program.ALGORITHMS, rank_program.STARTS, STORED, LAYOUTS)
    return make_results(tmp_path_factory.mktemp("all"), *map(list, work))


@pytest.fixture
def results(request) -> Path:
    """Return the folder with the results that this test compares."""
    is_long = request.node.get_closest_marker("slow") is not None
    return request.getfixturevalue("all_results" if is_long else "few_results")


def assert_same_weights(left: Path, right: Path, tolerance: float) -> None:
    own, other = torch.load(left), torch.load(right)
    assert own.keys() == other.keys()
    for name in own:
        torch.testing.assert_close(
            own[name], other[name], rtol=tolerance, atol=tolerance, msg=f"{left.name} {name}"
        )


@pytest.mark.slow
@pytest.mark.parametrize("job", JOBS)
def test_two_ranks_give_the_weights_of_one(results, job) -> None:
    assert_same_weights(results / f"{job}-2.pt", results / f"{job}-1.pt", 1e-9)


@pytest.mark.parametrize("job", JOBS)
def test_two_ranks_report_the_metrics_of_one(results, job) -> None:
    one, two = (json.loads((results / f"{job}-{n}.json").read_text()) for n in (1, 2))
    own_to_a_process = {"time/train_s", "time/digest_s", "tokens_per_s", "memory/peak_mib"}
    for left, right in zip(two, one, strict=True):
        assert left.keys() == right.keys()
        for name in left.keys() - own_to_a_process:
            assert left[name] == pytest.approx(right[name], rel=1e-6, abs=1e-8), name


@pytest.mark.parametrize("job", JOBS)
@pytest.mark.parametrize("world", [1, 2])
def test_a_resumed_step_is_bitwise_the_same(results, job, world) -> None:
    own = torch.load(results / f"{job}-{world}.pt")
    again = torch.load(results / f"{job}-{world}-again.pt")
    assert all(torch.equal(own[name], again[name]) for name in own)


@pytest.mark.parametrize(("saved", "loaded"), [(1, 2), (2, 1)])
def test_a_checkpoint_loads_at_another_number_of_ranks(results, saved, loaded) -> None:
    assert_same_weights(results / f"plain-{saved}-to-{loaded}.pt", results / "plain-1.pt", 1e-9)


@pytest.mark.parametrize("layout", all_of(LAYOUTS, QUICK_LAYOUT))
@pytest.mark.parametrize("name", all_of(STORED, QUICK_STORED))
def test_a_rank_reads_its_part_of_a_stored_model(results, name, layout) -> None:
    """Weights, buffers and a trained step are bitwise those of ranks that loaded the whole model."""
    paths = (results / f"loaded-{name}-{layout}-rank-{rank}.json" for rank in range(2))
    first, second = (json.loads(path.read_text()) for path in paths)
    for one in (first, second):
        shared, whole = one["before"]
        assert shared == whole == one["from_config"]
        shared, after = one["after"]
        assert shared == after != whole
        assert one["packs"]
        assert one["ends"][0] == one["ends"][1]
    files = (load_file(path) for path in (results / name).glob("*.safetensors"))
    stored = sum(tensor.nbytes for file in files for tensor in file.values())
    assert len(list((results / name).glob("*.safetensors"))) == (1 if STORED[name] else 4)
    assert 0.45 * stored < second["read"] < 0.55 * stored
    assert second["held"] == 0
    assert (
        0 < first["held"] < 0.4 * 2 * stored
    )  # float32: for the check, ends and a layer at a time


def test_files_that_do_not_hold_the_parameters_of_the_model_are_no_parts(tmp_path) -> None:
    """Such a model is loaded whole, which knows other names, or tells what is wrong."""
    options = {"dtype": torch.float32, "device": torch.device("cpu"), "trust_remote_code": False}
    assert build(str(tmp_path), **options) is None  # no files
    tiny_model(dtype=torch.float32).save_pretrained(tmp_path)
    model, stored = build(str(tmp_path), **options)
    vectors = sum(one.nbytes for one in model.parameters() if one.ndim < 2)
    assert stored.bytes_read == vectors
    tensors = load_file(tmp_path / "model.safetensors")
    first = next(iter(tensors))
    for wrong in ({"other": tensors[first]}, {first: tensors[first][:-1].clone()}):
        rest = {name: one for name, one in tensors.items() if name != first}
        save_file({**rest, **wrong}, tmp_path / "model.safetensors", {"format": "pt"})
        assert build(str(tmp_path), **options) is None
    (tmp_path / "model.safetensors").write_bytes(b"damaged")
    assert build(str(tmp_path), **options) is None


@pytest.mark.parametrize("job", STARTS)
def test_two_ranks_start_a_rounded_run_bitwise_as_one(results, job) -> None:
    one, two = (torch.load(results / f"start-{job}-{world}.pt") for world in (1, 2))
    for part in ("masters", "published"):
        assert one[part].keys() == two[part].keys()
        assert all(torch.equal(one[part][name], two[part][name]) for name in one[part]), part
    for name, master in one["masters"].items():
        dtype = torch.float16 if job == "float16" else torch.bfloat16
        if job != "lora":  # on the grid: dithered; off it: the digits of the file
            assert torch.equal(master.to(dtype), one["published"][name])
        if "lora_B" not in name:
            assert (master != master.to(dtype).float()).float().mean() > 0.99, name


@pytest.mark.parametrize("job", STARTS)
def test_two_ranks_train_a_rounded_run_like_one(results, job) -> None:
    one, two = (torch.load(results / f"start-{job}-{world}.pt") for world in (1, 2))
    changed = sum(
        not torch.equal(one["after"][name], one["published"][name]) for name in one["after"]
    )
    assert changed
    assert two["arrived"] == pytest.approx(one["arrived"], rel=0.2)
    assert_close = torch.testing.assert_close
    for name, tensor in one["after"].items():
        assert_close(two["after"][name], tensor, rtol=2**-7, atol=1e-5)  # one grid step


def test_shares_interleave() -> None:
    shares = [rank_share(range(6), Ranks(rank, 2)) for rank in range(2)]
    assert shares == [[0, 2, 4], [1, 3, 5]]

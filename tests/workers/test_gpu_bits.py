"""The same bits on a GPU: two equal runs, kills of every process, redo and replay, long sequences."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from penstock.config.demo import resolve_model_path
from penstock.engine.protocol import Generation, GenerationRequest, SamplingParams
from penstock.inspection.audit import take_audit
from penstock.run.job import Job
from penstock.store.run_folder import RunFolder
from stages.disturbed_run import SMALL, assert_balanced, config_of, digests, kill, run
from stages.tiny_engine import make_engine, same_bits
from stages.training_data import VOCABULARY, Gradients, consumer_of, random_batch, tiny_model
from stages.training_data import config_of as training_config

pytestmark = pytest.mark.gpu
SYNC = "produce.strategy=sync"
RUNS = {
    "plain": [],
    "lora": ["model.lora.rank=4"],
    "colocate": ["launch.colocate=true"],
    "two updates": ["train.mini_batches=2", "algorithm.kl_beta=0.05"],
    "exact": ["model.arithmetic=exact"],
    "experts": [],
}
KILLED_DRIVER = """
import asyncio, os, signal, sys
from pathlib import Path
from stages.disturbed_run import config_of, run
async def disturb(job, step):
    if step == 1:
        train = job.trainer.train
        async def killed(batch):
            report = await train(batch)
            if batch.step == 3:
                os.kill(os.getpid(), signal.SIGKILL)  # before the commit
            return report
        job.trainer.train = killed
run(config_of(Path(sys.argv[1]), "driver", *sys.argv[2:]), disturb)
"""


def model_of_experts(folder: Path) -> Path:
    """A small random mixture of experts with the demo's tokenizer."""
    config = transformers.AutoConfig.for_model(
        "qwen3_moe", vocab_size=64, hidden_size=256, intermediate_size=512, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, head_dim=64, num_experts=8,
        num_experts_per_tok=2, moe_intermediate_size=128, max_position_embeddings=256,
    )  # fmt: skip
    torch.manual_seed(0)
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    transformers.AutoTokenizer.from_pretrained(resolve_model_path("demo")).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    return run(config_of(tmp_path_factory.mktemp("gpu"), "plain", SYNC))[0]


def python(*words: str) -> tuple[int, str]:
    """Run a program of its own with this process's packages; return its exit code and output."""
    done = subprocess.run(
        [sys.executable, "-c", *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
    )
    return done.returncode, done.stdout


def penstock(*words: str) -> tuple[int, str]:
    return python("from penstock.cli import main; main()", *words)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("kind", RUNS)
def test_two_equal_runs_share_all_digests_and_a_replay_agrees(tmp_path: Path, kind: str) -> None:
    words = [SYNC, *RUNS[kind]]
    if kind == "experts":
        words.append(f"model.path={model_of_experts(tmp_path / 'model')}")
    first, second = (run(config_of(tmp_path, name, *words))[0] for name in "ab")
    assert digests(first) == digests(second)
    if kind == "exact":
        rows = (first.path / "metrics.jsonl").read_text().splitlines()
        assert {json.loads(row)["mismatch/kl"] for row in rows} == {0.0}
    code, text = penstock("replay", str(first.path))
    assert code == 0, text
    assert "every digest is the journalled one" in text
    assert not any("bits" in warning for warning in take_audit(first).warnings)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", ["engine-0", "trainer"])
def test_a_killed_worker_leaves_the_digests_as_they_were(
    tmp_path: Path, undisturbed: RunFolder, name: str
) -> None:
    """Killed while the trainer works, when no response is under way: a GPU's bits depend on the batch."""

    async def disturb(job: Job, step: int) -> None:
        if step == 1:
            train = job.trainer.train

            async def disturbed(batch: Any) -> Any:
                if batch.step == 2:
                    kill(job, name)
                return await train(batch)

            job.trainer.train = disturbed  # type: ignore[method-assign]

    folder, notes = run(config_of(tmp_path, "killed", SYNC), disturb)
    assert_balanced(folder)
    assert any(f"{name}: serves again" in note for note in notes)
    assert digests(folder) == digests(undisturbed)


@pytest.mark.timeout(300)
def test_a_killed_driver_leaves_the_digests_as_they_were(
    tmp_path: Path, undisturbed: RunFolder
) -> None:
    code, text = python(KILLED_DRIVER, str(tmp_path), SYNC)
    assert code == -signal.SIGKILL, text
    code, text = penstock("resume", str(tmp_path / "driver"))
    assert code == 0, text
    assert "will be redone from the journal" in text
    folder = RunFolder(tmp_path / "driver")
    assert_balanced(folder)
    assert digests(folder) == digests(undisturbed)


@pytest.mark.timeout(300)
def test_a_fast_run_says_that_its_bits_may_not_repeat(tmp_path: Path) -> None:
    words = [*SMALL, f"run.dir={tmp_path}", "run.name=fast", "model.arithmetic=fast"]
    code, text = penstock("train", *words)
    assert code == 0, text
    assert "model.arithmetic fast: on a GPU redone steps may have other bits" in text
    warnings = take_audit(RunFolder(tmp_path / "fast")).warnings
    assert any("model.arithmetic is fast" in warning for warning in warnings)


# -- long sequences ----------------------------------------------------------------------------


def same(first: torch.Tensor, second: torch.Tensor) -> bool:
    return torch.equal(first.view(torch.uint8), second.view(torch.uint8))


LONG = {
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 16384,
}


def long_batch(step: int) -> Any:
    """A batch of groups whose responses have about 3,000 tokens."""
    generator = np.random.default_rng(step)
    batch = random_batch(step, groups=3, seed=step)
    for rollout in batch.rollouts:
        count = int(generator.integers(2000, 4000))
        rollout.response_ids = generator.integers(1, VOCABULARY, count).astype(np.int32)
        rollout.logprobs = np.full(count, -3.0, np.float32)
        rollout.loss_mask = np.ones(count, bool)
        rollout.segments = (type(rollout.segments[0])(0, count),)
    return batch


@pytest.mark.parametrize(
    ("kind", "fields"),
    [
        ("Qwen2", {}),  # biases
        ("Qwen3", {}),  # norms of queries and keys
        ("Mistral", {"sliding_window": 512}),
        (
            "Qwen3Moe",
            {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 128},
        ),
        ("Gemma2", {"head_dim": 32, "query_pre_attn_scalar": 32}),  # capped scores: plain attention
    ],
)
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_the_gradient_of_long_sequences_has_the_same_bits_twice(
    kind: str, fields: dict[str, Any], dtype: str
) -> None:
    config = training_config(model={"dtype": dtype, "device": "cuda"})

    def gradients() -> dict[str, torch.Tensor]:
        model = tiny_model(kind, dtype=torch.float32, **{**LONG, **fields}).to("cuda")
        consumer = consumer_of(config, model=model)
        recorded = Gradients(consumer)
        consumer.train(long_batch(1))
        return recorded.updates[0]

    first, second = gradients(), gradients()
    different = [name for name, gradient in first.items() if not same(gradient, second[name])]
    assert not different


def long_requests() -> list[GenerationRequest]:
    generator = np.random.default_rng(0)
    return [
        GenerationRequest(
            request_id=str(number),
            prompt_ids=generator.integers(3, 20, 5 + 40 * number).astype(np.int32),
            sampling=SamplingParams(max_tokens=200, **options),
            seed=number,
        )
        for number, options in enumerate(
            [{}, {"temperature": 0.7}, {"top_p": 0.9}, {"top_k": 5}] * 2
        )
    ]


def test_an_engine_gives_the_same_requests_the_same_bits() -> None:
    async def generate() -> list[Generation]:
        engine = make_engine("cuda", max_slots=8, max_tokens_in_flight=0)
        await engine.start()
        try:
            return list(await engine.generate_many(long_requests()))
        finally:
            await engine.close()

    first, second = asyncio.run(generate()), asyncio.run(generate())
    assert not any(generation.error for generation in first)
    assert all(map(same_bits, first, second))


# -- kernels -----------------------------------------------------------------------------------


def draw(*shape: int, seed: int = 0, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    generator = torch.Generator("cuda").manual_seed(seed)
    return torch.randn(*shape, generator=generator, device="cuda").to(dtype)


def flash_backward() -> list[torch.Tensor]:
    """Attention of one sequence of 8,192 tokens and a short one, eight query heads for two of keys."""
    from penstock.model.attention import flash_attention

    bounds = torch.tensor([0, 8192, 8292], dtype=torch.int32, device="cuda")
    query, key, value = draw(8292, 8, 64), draw(8292, 2, 64, seed=1), draw(8292, 2, 64, seed=2)
    limits = (bounds, 8192)
    output, logsumexp, state, unused = flash_attention(query, key, value, limits, limits, scale=0.1)
    return list(
        torch.ops.aten._flash_attention_backward(
            draw(8292, 8, 64, seed=3), query, key, value, output, logsumexp, bounds, bounds, 8192,
            8192, 0.0, True, state, unused, scale=0.1, window_size_left=-1, window_size_right=0,
        )
    )  # fmt: skip


def norm_backward() -> list[torch.Tensor]:
    from penstock.model.kernels.layer_kernels import norm_gradients

    x, inverse = draw(30000, 896), draw(30000, dtype=torch.float32).abs()
    return list(norm_gradients(draw(30000, 896, seed=1), x, draw(896, seed=2), inverse))


def head() -> list[torch.Tensor]:
    from penstock.model.kernels.head_kernels import chunk_logprobs_

    targets = torch.arange(512, device="cuda")
    ones = torch.ones(512, device="cuda")
    results = chunk_logprobs_(draw(512, 50000), targets, ones, 1.0, None, None, True, None)
    return [tensor for tensor in results if tensor is not None]


def embedding_rows() -> list[torch.Tensor]:
    from penstock.model.kernels.layer_kernels import add_rows_

    ids = torch.arange(20000, device="cuda") % 50  # every row gets 400 gradients
    total = torch.zeros(100, 896, device="cuda")
    rows = draw(20000, 896, dtype=torch.float32)
    return [total.index_add_(0, ids, rows), add_rows_(torch.zeros_like(total), ids, rows)]


def weight_product() -> list[torch.Tensor]:
    from penstock.model.kernels.trained_products import add_product

    left, right = draw(30000, 896), draw(30000, 512, seed=1)
    return [add_product(add_product(None, left, right), left, right)]


def decode_attention() -> list[torch.Tensor]:
    from penstock.model.kernels import decode_kernels

    keys, values = draw(70000, 2, 64), draw(70000, 2, 64, seed=1)
    start = torch.tensor([0, 100, 40000], device="cuda")
    length = torch.tensor([90, 30000, 7], device="cuda")
    return [
        decode_kernels.decode_attention(
            draw(3, 8, 64, seed=2), keys, values, start, length, 0.1, None
        )
    ]


@pytest.mark.parametrize(
    "kernel",
    [flash_backward, norm_backward, head, embedding_rows, weight_product, decode_attention],
)
def test_a_kernel_gives_the_same_bits_every_time(kernel: Callable[[], list[torch.Tensor]]) -> None:
    from penstock.model.arithmetic import use_arithmetic

    use_arithmetic("deterministic", tiny_model(dtype=torch.float32).to("cuda"))
    first = kernel()
    for _ in range(5):
        assert all(map(same, first, kernel()))

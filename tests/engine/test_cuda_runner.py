"""The CUDA runner's bookkeeping, on a stand-in for the device: plain torch replaces kernels and events."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("triton")

from penstock.engine.protocol import GenerationRequest, SamplingParams
from penstock.engine.transformers import engine as engine_module
from penstock.engine.transformers.cuda import cuda_runner, cuda_steps
from penstock.engine.transformers.cuda.cuda_runner import CudaRunner, Launch
from penstock.engine.transformers.engine import TransformersEngine
from penstock.engine.transformers.options import TransformersOptions
from stages import decode_reference
from stages import tiny_policy as tiny
from stages.decoder_cases import make_decoder


class Done:
    def synchronize(self) -> None:
        """Nothing runs in the background here."""


class RunnerOnCpu(CudaRunner):
    """Sends tokens to the host without pinned memory."""

    def _send(
        self,
        token_N: torch.Tensor,
        logprob_N: torch.Tensor,
        slots_N: np.ndarray,
        kept: list[np.ndarray] | None,
    ) -> None:
        serial_N = self._serial[slots_N].copy()
        tokens, logprobs = token_N.clone(), logprob_N.clone()
        self._pending.append(Launch(slots_N, serial_N, tokens, logprobs, Done(), kept))


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "set_device", lambda _: None)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (1 << 26, 1 << 26))
    for name in ("decode_attention", "store_rows"):
        monkeypatch.setattr(cuda_steps, name, getattr(decode_reference, name))
    for name in ("next_rows", "sample_rows"):
        monkeypatch.setattr(cuda_runner, name, getattr(decode_reference, name))


def generate(
    requests: list[GenerationRequest],
    slots: int,
    load: Callable[[], Any] = lambda: tiny.tiny_model(0, "penstock"),
    **options: Any,
) -> list[tuple[list[int], np.ndarray]]:
    async def run() -> list[tuple[list[int], np.ndarray]]:
        how = TransformersOptions(
            **{"max_slots": slots, "cuda_graphs": False, "fuse": False, **options}
        )
        engine = TransformersEngine(load, fetch=lambda _: [], options=how)
        await engine.start()
        try:
            made = await engine.generate_many(requests)
        finally:
            await engine.close()
        assert not any(generation.error for generation in made)
        return [(list(generation.token_ids), generation.logprobs) for generation in made]

    return asyncio.run(run())


def requests(**sampling: object) -> list[GenerationRequest]:
    prompt = np.arange(3, 11, dtype=np.int32)
    return [
        GenerationRequest(
            request_id=str(seed),
            prompt_ids=prompt[: 4 + seed % 3],
            sampling=SamplingParams(**sampling),
            seed=seed,
        )
        for seed in range(10)
    ]


STOPS = tuple(range(20, 40))


@pytest.mark.parametrize(
    "sampling",
    [
        {"max_tokens": 9},
        pytest.param(
            {"max_tokens": 12, "min_tokens": 8, "stop_token_ids": STOPS[:4]},
            marks=pytest.mark.slow,
        ),
        {"max_tokens": 12, "min_tokens": 8, "stop_token_ids": STOPS},
        {"max_tokens": 6, "top_k": 5, "min_tokens": 3, "stop_token_ids": STOPS[:2]},
        {"max_tokens": 6, "temperature": 0.0},
    ],
)
def test_the_gpu_runner_makes_the_tokens_of_the_cpu_runner(
    sampling: dict[str, object], stand_in: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = generate(requests(**sampling), 4)
    monkeypatch.setattr(engine_module, "_make_runner", RunnerOnCpu)
    got = generate(requests(**sampling), 4)
    for (ids, logprobs), (other_ids, other_logprobs) in zip(got, wanted, strict=True):
        assert ids == other_ids
        assert np.allclose(logprobs, other_logprobs, atol=1e-4)
    if sampling.get("min_tokens"):
        assert all(len(ids) >= sampling["min_tokens"] for ids, _ in got)
        assert "top_k" in sampling or any(len(ids) < sampling["max_tokens"] for ids, _ in got)


@pytest.mark.parametrize(
    "case", ["qwen 3", *(pytest.param(c, marks=pytest.mark.slow) for c in ("gemma 3", "mixtral"))]
)
def test_a_familys_decoder_makes_the_tokens_of_the_cpu_runner(
    case: str, stand_in: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Kernels by Triton's interpreter; the longest prompt is computed in parts of five rows."""
    some = requests(max_tokens=3)[2:5]
    how = {"load": lambda: make_decoder(case), "fuse": True, "prefill_rows": 5}
    wanted = generate(some, 2, **how)
    monkeypatch.setattr(engine_module, "_make_runner", RunnerOnCpu)
    for (ids, logprobs), (other_ids, other_logprobs) in zip(
        generate(some, 2, **how), wanted, strict=True
    ):
        assert ids == other_ids
        assert np.allclose(logprobs, other_logprobs, atol=1e-4)


def test_min_tokens_need_no_slow_sampling(stand_in: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every row of a run with min_tokens is sampled by the kernel."""

    def fail(*_: object) -> None:
        raise AssertionError("sampled in plain torch")

    monkeypatch.setattr(engine_module, "_make_runner", RunnerOnCpu)
    monkeypatch.setattr(cuda_runner, "sample", fail)
    made = generate(requests(max_tokens=9, min_tokens=9), 4)
    assert [len(ids) for ids, _ in made] == [9] * 10

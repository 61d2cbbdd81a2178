"""The CUDA runner's bookkeeping, on a stand-in for the device: plain torch replaces kernels and events."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("triton")

from penstock.engine.protocol import Generation, GenerationRequest, SamplingParams
from penstock.engine.transformers import adapters
from penstock.engine.transformers import engine as engine_module
from penstock.engine.transformers.cuda import (
    cuda_decoder,
    cuda_runner,
    cuda_steps,
    grouped_adapters,
)
from penstock.engine.transformers.cuda.cuda_runner import CudaRunner, Launch
from penstock.engine.transformers.engine import TransformersEngine
from penstock.engine.transformers.options import TransformersOptions
from penstock.engine.transformers.sequences import Sequence
from stages import decode_reference
from stages import tiny_policy as tiny
from stages.decoder_cases import make_decoder, shorten
from stages.random_adapters import Adapter, handle_of, random_adapter
from stages.tiny_engine import make_engine


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


@pytest.fixture
def unchecked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Start without the engine's own check, which another test below has in its start."""
    monkeypatch.setattr(cuda_decoder.CudaDecoder, "check", lambda *_: None)


def generations(
    requests: list[GenerationRequest],
    slots: int,
    load: Callable[[], Any] = lambda: tiny.tiny_model(0, "penstock"),
    adapters: Mapping[str, Adapter] | None = None,
    **options: Any,
) -> list[Generation]:
    async def run() -> list[Generation]:
        how = TransformersOptions(
            **{"max_slots": slots, "cuda_graphs": False, "fuse": False, **options},
            adapters=bool(adapters),
        )
        held = adapters or {}
        engine = TransformersEngine(
            load, fetch=lambda source: held[source.location].items(), options=how
        )
        await engine.start()
        try:
            for name, adapter in held.items():
                await engine.hold_adapter(name, handle_of(name, adapter))
            made = await engine.generate_many(requests)
        finally:
            await engine.close()
        assert not any(generation.error for generation in made)
        return made

    return asyncio.run(run())


def generate(
    requests: list[GenerationRequest], slots: int, **how: Any
) -> list[tuple[list[int], np.ndarray]]:
    return [(list(made.token_ids), made.logprobs) for made in generations(requests, slots, **how)]


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
    how = {"load": lambda: shorten(make_decoder(case)), "fuse": True, "prefill_rows": 5}
    wanted = generate(some, 2, **how)
    monkeypatch.setattr(engine_module, "_make_runner", RunnerOnCpu)
    for (ids, logprobs), (other_ids, other_logprobs) in zip(
        generate(some, 2, **how), wanted, strict=True
    ):
        assert ids == other_ids
        assert np.allclose(logprobs, other_logprobs, atol=1e-4)


@pytest.mark.slow
@pytest.mark.usefixtures("unchecked")
def test_the_experts_of_each_token_are_recorded_as_on_the_cpu(
    stand_in: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a prompt in parts, of one that two requests share and one more finds stored, and of decoded tokens."""
    some = [requests(max_tokens=3)[seed] for seed in (2, 0, 3, 6)]
    how = {"load": lambda: shorten(make_decoder("qwen 3 moe"), 3), "fuse": True}
    how |= {"router_replay": True}
    wanted = generations(some, 3, prefill_rows=5, **how)
    monkeypatch.setattr(engine_module, "_make_runner", RunnerOnCpu)
    got = generations(some, 3, prefill_rows=5, **how)
    for request, made, other in zip(some, got, wanted, strict=True):
        assert made.choices is not None
        assert other.choices is not None
        ours, theirs = made.choices.experts, other.choices.experts
        assert ours[:, 0].all()
        # nothing of the last layer is used of a prompt's tokens but the last
        assert ours[:, :-2].tolist() == theirs[:, :-2].tolist()
        last = len(request.prompt_ids) - 1
        assert ours[last:].tolist() == theirs[last:].tolist()


@pytest.mark.slow
@pytest.mark.usefixtures("unchecked")
def test_rows_grouped_by_adapter_make_the_tokens_of_the_cpu_runner(
    stand_in: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Kernels by Triton's interpreter; one adapter has a larger rank than there is room for at first."""
    for room in (adapters, grouped_adapters):
        monkeypatch.setattr(room, "MOST_ADAPTERS", 2)  # each costs the interpreter time
    model = shorten(make_decoder("qwen 3"))
    held = {"a": random_adapter(model, 3, 1), "b": random_adapter(model, 40, 2, parts="mlp")}
    some = [
        replace(request, adapter=name)
        for request, name in zip(requests(max_tokens=2), ["a", "", "b"], strict=False)
    ]
    how = {"load": lambda: shorten(make_decoder("qwen 3")), "fuse": True, "adapters": held}
    plain = generate(some, 3, **how)
    monkeypatch.setattr(engine_module, "_make_runner", RunnerOnCpu)
    for (ids, logprobs), (other_ids, other_logprobs) in zip(
        generate(some, 3, **how), plain, strict=True
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


def converse(sessions: int, turns: int, slots: int, **options: Any) -> tuple[list[list[int]], int]:
    """The tokens of sessions that run at once, six observed tokens a turn, and what was prefilled."""

    async def main() -> tuple[list[list[int]], int]:
        how = TransformersOptions(
            max_slots=slots, cuda_graphs=False, **{"fuse": False, "prefill_rows": 16, **options}
        )
        engine = TransformersEngine(
            lambda: tiny.tiny_model(0, "penstock"), fetch=lambda _: [], options=how
        )
        await engine.start()

        async def session(number: int) -> list[int]:
            context: list[int] = []
            for turn in range(turns):
                draw = np.random.default_rng([number, turn])
                context += draw.integers(3, 60, 6).tolist()
                asked = tiny.request(
                    f"{number}.{turn}", context, seed=number, max_tokens=4, min_tokens=4
                )
                made = await engine.generate(dataclasses.replace(asked, session=str(number)))
                assert not made.error
                context += made.token_ids.tolist()
            return context

        made = await asyncio.gather(*map(session, range(sessions)))
        prefilled = (await engine.stats()).tokens_prefilled
        await engine.close()
        return made, prefilled

    return asyncio.run(main())


def test_a_turn_on_a_gpu_computes_what_is_new_in_it(
    stand_in: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted, _ = converse(3, 4, 4)
    monkeypatch.setattr(engine_module, "_make_runner", RunnerOnCpu)
    made, prefilled = converse(3, 4, 4)
    assert made == wanted
    assert (
        prefilled == 3 * 4 * 6
    )  # the extra step of the device stores the last token of a response too


@pytest.mark.slow
def test_requests_that_outgrow_the_memory_are_neither_lost_nor_changed(
    stand_in: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Regions grow, what is kept makes room, and the newest requests go back to the queue."""
    asked = requests(max_tokens=30, min_tokens=30)
    wanted = generate(asked, 8)
    monkeypatch.setattr(engine_module, "_make_runner", RunnerOnCpu)
    grown, sent_back = [], []
    grow, send_back = RunnerOnCpu._grow, Sequence.send_back
    monkeypatch.setattr(RunnerOnCpu, "_grow", lambda *a: grown.append(grow(*a)) or grown[-1])
    monkeypatch.setattr(Sequence, "send_back", lambda *a: sent_back.append(1) or send_back(*a))
    for (ids, logprobs), (other_ids, other_logprobs) in zip(
        generate(asked, 8, max_tokens_in_flight=56), wanted, strict=True
    ):
        assert ids == other_ids
        assert np.allclose(logprobs, other_logprobs, atol=1e-4)
    assert True in grown
    assert sent_back


def test_a_waiting_request_with_the_prompt_of_a_running_one_computes_one_token(
    stand_in: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_module, "_make_runner", RunnerOnCpu)
    computed: list[int] = []
    run = RunnerOnCpu._pass
    monkeypatch.setattr(
        RunnerOnCpu,
        "_pass",
        lambda self, prompts: computed.extend(p.rows for p in prompts) or run(self, prompts),
    )
    asked = [tiny.request(str(seed), [5, 6, 7, 8, 9], seed=seed, max_tokens=5) for seed in range(6)]
    made = generate(asked, 2)
    assert computed == [5]  # the others decode their first token
    alone = [generate([request], 1)[0] for request in asked]
    assert [ids for ids, _ in made] == [ids for ids, _ in alone]


@pytest.mark.parametrize("on_gpu", [False, True])
@pytest.mark.parametrize("keep", [True, False])
def test_only_a_session_that_goes_on_sees_what_earlier_weights_computed(
    on_gpu: bool, keep: bool, stand_in: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    if on_gpu:
        monkeypatch.setattr(engine_module, "_make_runner", RunnerOnCpu)

    async def main() -> None:
        how = {"cuda_graphs": False, "fuse": False, "keep_sessions": keep}
        engine, fresh = make_engine(**how), make_engine(**how)
        for each in (engine, fresh):
            await each.start()

        async def turn(
            engine: TransformersEngine, name: str, prompt: list[int], session: str
        ) -> tuple[list[int], int]:
            before = (await engine.stats()).tokens_prefilled
            asked = tiny.request(name, prompt, seed=3, max_tokens=6, min_tokens=6)
            made = await engine.generate(dataclasses.replace(asked, session=session))
            prefilled = (await engine.stats()).tokens_prefilled - before
            return made.token_ids.tolist(), prefilled

        first, _ = await turn(engine, "a", [5, 6, 7, 8], "s")
        context = [5, 6, 7, 8, *first, 9, 10, 11]
        for each in (engine, fresh):
            await each.update_weights(1, tiny.handle(1))
        begun = await turn(fresh, "b", [5, 6, 7, 8], "other")
        assert begun == await turn(engine, "b", [5, 6, 7, 8], "other")
        anew = await turn(fresh, "c", context, "s")
        made, prefilled = await turn(engine, "c", context, "s")
        if keep:
            assert prefilled in (3, 4)
            assert made != anew[0]
        else:
            assert (made, prefilled) == anew
        again, _ = await turn(engine, "d", [5, 6, 7, 8], "s")  # it begins anew
        assert again == begun[0]
        for each in (engine, fresh):
            await each.close()

    asyncio.run(main())

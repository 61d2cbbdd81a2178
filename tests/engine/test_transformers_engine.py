"""The transformers engine: the contract on each device, and what only this engine promises."""

from __future__ import annotations

import asyncio
import dataclasses
import gc
import json
import threading
from pathlib import Path

import numpy as np
import pytest
import torch
from engine_contract import CHECKS, until_running
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.config.demo import policy_path
from penstock.engine.protocol import Generation, GenerationRequest, SamplingParams
from penstock.engine.transformers.engine import TransformersEngine, _text_decoder
from penstock.engine.transformers.mailbox import Burst
from penstock.engine.transformers.options import TransformersOptions
from penstock.errors import EngineError, UserError
from penstock.types import expand_segments
from stages import tiny_policy as tiny
from stages.engine_case import EngineCase, run, started
from stages.tiny_engine import make_engine, same_bits

DEVICES = [
    "cpu",
    pytest.param("cuda", marks=pytest.mark.gpu),
]


def break_device(engine: TransformersEngine) -> None:
    def broken(*_: object) -> list:
        raise RuntimeError("the device is gone")

    engine._live_runner.step = broken  # type: ignore[method-assign]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("check", CHECKS)
def test_contract(check: str, device: str) -> None:
    name = f"transformers on {device}"
    CHECKS[check](EngineCase(name, lambda: make_engine(device), kill=break_device))


@pytest.mark.gpu
def test_a_graph_of_an_earlier_engine_is_not_freed_during_a_capture(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        torch.zeros(1, device="cuda").add_(1)
    earlier: list[object] = [graph]
    earlier.append(earlier)  # only a collection frees it
    held, begin, usual = [earlier], torch.cuda.CUDAGraph.capture_begin, gc.get_threshold()
    del graph, earlier

    def captured(*args: object, **options: object) -> None:
        begin(*args, **options)
        held.clear()
        gc.set_threshold(1, 1, 1)

    async def main() -> None:
        engine = make_engine("cuda")
        monkeypatch.setattr(torch.cuda.CUDAGraph, "capture_begin", captured)
        try:
            await engine.start()
        finally:
            gc.set_threshold(*usual)
        await engine.close()

    asyncio.run(main())


def test_a_burst_is_over_after_a_gap_or_after_its_longest_time() -> None:
    burst = Burst()
    assert burst.wait_s(100.0) == Burst.GAP_S == 0.002
    assert burst.wait_s(100.019) == pytest.approx(0.001)
    assert burst.wait_s(100.5) == 0
    burst.over()
    assert burst.wait_s(100.5) == 0.002


def test_an_idle_engine_waits_for_the_rest_of_a_burst(monkeypatch: pytest.MonkeyPatch) -> None:
    """The second request is sent when the engine has taken the first; the burst ends with it."""
    taken, steps = [threading.Event(), threading.Event()], []

    async def main() -> None:
        engine = make_engine("cpu")
        await engine.start()
        submit, step = engine._submit, engine._live_runner.step

        def submitted(sequences: list) -> None:
            submit(sequences)
            taken[len(engine._by_id) - 1].set()

        def stepped(new: list, keep: set) -> list:
            steps.append(len(new))
            return step(new, keep)

        monkeypatch.setattr(Burst, "wait_s", lambda *_: 0.0 if taken[1].is_set() else 60.0)
        monkeypatch.setattr(engine, "_submit", submitted)
        monkeypatch.setattr(engine._live_runner, "step", stepped)
        one, other = (
            GenerationRequest(
                request_id=name,
                prompt_ids=np.array(prompt, np.int32),
                sampling=SamplingParams(max_tokens=3),
                seed=1,
            )
            for name, prompt in (("a", [5, 6, 7]), ("b", [8, 9]))
        )
        first = asyncio.create_task(engine.generate(one))
        assert await asyncio.to_thread(taken[0].wait, 30)
        await asyncio.gather(first, engine.generate(other))
        await engine.close()

    asyncio.run(main())
    assert steps[0] == 2


def test_a_group_is_checked_and_so_is_a_member_that_differs() -> None:
    good, bad = np.array([5, 6], np.int32), np.array([5, 10**6], np.int32)
    usual, none = SamplingParams(max_tokens=3), SamplingParams(max_tokens=0)

    def member(number: int, prompt: np.ndarray, sampling: SamplingParams) -> GenerationRequest:
        return GenerationRequest(
            request_id=str(number), prompt_ids=prompt, sampling=sampling, seed=number
        )

    async def main() -> None:
        engine = make_engine("cpu")
        await engine.start()
        with pytest.raises(UserError, match=r"request 2: got token ids .* embeddings"):
            await engine.generate_many([member(1, good, usual), member(2, bad, usual)])
        with pytest.raises(UserError, match="request 2: got min_tokens 0 and max_tokens 0"):
            await engine.generate_many([member(1, good, usual), member(2, good, none)])
        made = await engine.generate_many([member(n, good, usual) for n in range(3)])
        assert [len(one.token_ids) for one in made] == [3, 3, 3]
        await engine.close()

    asyncio.run(main())


Spec = tuple[int, int, int, float, int]
REQUESTS = st.lists(
    st.tuples(
        st.integers(0, 3),  # which prompt
        st.integers(0, 5),  # seed
        st.integers(1, 70),  # most tokens
        st.sampled_from([1.0, 0.7]),
        st.integers(0, 12),  # engine steps before the request arrives
    ),
    min_size=1,
    max_size=12,
)
PROMPTS = [[5, 6, 7], [40, 41], list(range(3, 40)), [9] * 17]


def asked(place: int, spec: Spec) -> GenerationRequest:
    prompt, seed, most, temperature, _ = spec
    return tiny.request(
        f"r{place}", PROMPTS[prompt], seed=seed, max_tokens=most, temperature=temperature
    )


async def alone(engine: TransformersEngine, request: GenerationRequest) -> Generation:
    return await engine.generate(request)


@pytest.mark.slow
@settings(max_examples=4, deadline=None)
@given(specs=REQUESTS)
def test_a_rollout_has_the_same_bits_in_any_batch(specs: list[Spec]) -> None:
    compare_with_each_alone(specs)


@pytest.mark.slow
@settings(max_examples=20, deadline=None)
@given(specs=REQUESTS)
def test_a_rollout_has_the_same_bits_in_many_batches(specs: list[Spec]) -> None:
    compare_with_each_alone(specs)


def compare_with_each_alone(specs: list[Spec]) -> None:
    """Compare random mixes, orders and arrival times with each request run alone."""

    async def main() -> None:
        engine = make_engine(max_slots=5)
        await engine.start()
        if not (await engine.stats()).batch_invariant:
            await engine.close()
            pytest.skip("this machine's matrix library is not row invariant")
        tasks = []
        for place, spec in enumerate(specs):
            for _ in range(spec[4]):
                await engine.stats()  # at most one step per call
            tasks.append(asyncio.create_task(engine.generate(asked(place, spec))))
            await asyncio.sleep(0)
        together = await asyncio.gather(*tasks)
        for place, (spec, made) in enumerate(zip(specs, together, strict=True)):
            assert same_bits(await alone(engine, asked(place, spec)), made)
        await engine.close()

    run(main)


def test_going_on_from_a_partial_keeps_the_bits() -> None:
    async def main() -> None:
        async with started(EngineCase("t", make_engine)) as engine:
            whole = await engine.generate(tiny.request("a", PROMPTS[2], seed=3, max_tokens=90))
            for cut in (1, 20, len(whole.token_ids) - 1):
                rest = await engine.generate(
                    tiny.request(
                        "b", PROMPTS[2], seed=3, max_tokens=90, response=whole.token_ids[:cut]
                    )
                )
                assert np.array_equal(rest.token_ids, whole.token_ids[cut:])
                assert np.array_equal(rest.logprobs, whole.logprobs[cut:])

    run(main)


def test_prompts_of_a_group_are_prefilled_once() -> None:
    """Seven requests with one prompt share two slots: the prompt is prefilled once."""

    async def main() -> None:
        engine = make_engine(max_slots=2)
        await engine.start()
        rows: list[int] = []
        runner = engine._live_runner
        logits = runner._logits  # type: ignore[attr-defined]

        def counting(step: object, ids_R: torch.Tensor, *more: object) -> object:
            rows.append(len(ids_R))
            return logits(step, ids_R, *more)

        runner._logits = counting  # type: ignore[attr-defined]
        long_prompt = list(range(3, 60)) * 4
        made = await engine.generate_many(
            [tiny.request(str(i), long_prompt, seed=i, max_tokens=5) for i in range(7)]
        )
        await engine.close()
        assert len(made) == 7
        assert sum(count > 100 for count in rows) == 1

    run(main)


def test_a_dead_engine_says_what_killed_it() -> None:
    async def main() -> None:
        engine = make_engine()
        await engine.start()
        break_device(engine)
        made = await engine.generate(tiny.request("a"))
        assert "the device is gone" in made.error
        with pytest.raises(EngineError, match="the device is gone"):
            await engine.stats()
        await engine.close()

    run(main)


def test_a_cancelled_caller_frees_its_slot() -> None:
    async def main() -> None:
        async with started(EngineCase("t", make_engine)) as engine:
            task = asyncio.create_task(
                engine.generate(tiny.request("a", max_tokens=400, min_tokens=400))
            )
            await until_running(engine)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            assert (await engine.stats()).running == 0

    run(main)


def test_fetch_that_fails_leaves_the_engine_serving() -> None:
    async def main() -> None:
        engine = make_engine()
        engine._fetch = lambda _: (_ for _ in ()).throw(OSError("no such segment"))
        await engine.start()
        with pytest.raises(EngineError, match="no such segment"):
            await engine.update_weights(1, tiny.handle(1))
        engine._fetch = lambda _: list(tiny.fetch(tiny.handle(1)))[1:]
        with pytest.raises(EngineError, match="missing"):
            await engine.update_weights(1, tiny.handle(1))
        assert (await engine.generate(tiny.request("a"))).finish_reason != "error"
        assert (await engine.stats()).policy_version == 0
        await engine.close()

    run(main)


@pytest.mark.slow
@settings(max_examples=6, deadline=None)
@given(specs=REQUESTS, limit=st.integers(130, 300))
def test_admission_by_memory_loses_and_changes_no_response(specs: list[Spec], limit: int) -> None:
    """The longest request fits: the newest ones go back to the queue, and continue later."""

    async def main() -> None:
        narrow, wide = make_engine(max_slots=8, max_tokens_in_flight=limit), make_engine()
        await narrow.start()
        await wide.start()
        runner, most = narrow._live_runner, 0
        step = runner.step

        def watched(new: list, keep: set) -> list:
            nonlocal most
            finished = step(new, keep)
            held = [int(runner.table.length[sequence.slot]) for sequence in runner.table.running]
            most = max(most, sum(held) if len(held) > 1 else 0)
            return finished

        runner.step = watched  # type: ignore[method-assign]
        requests = [
            dataclasses.replace(
                asked(place, spec),
                sampling=SamplingParams(max_tokens=spec[2] + 10, min_tokens=spec[2]),
            )
            for place, spec in enumerate(specs)
        ]
        made = await asyncio.gather(*map(narrow.generate, requests))
        assert most <= limit
        for request, answer in zip(requests, made, strict=True):
            assert answer.finish_reason in ("stop", "length")
            assert len(expand_segments(answer.segments)) == len(answer.token_ids)
            if (await wide.stats()).batch_invariant:
                assert same_bits(await wide.generate(request), answer)
        with pytest.raises(UserError, match=str(limit)):
            await narrow.generate(tiny.request("big", max_tokens=400))
        await narrow.close()
        await wide.close()

    run(main)


def test_a_model_that_cannot_load_says_why() -> None:
    engine = TransformersEngine(
        lambda: (_ for _ in ()).throw(UserError("model.path: got x")), fetch=tiny.fetch
    )
    with pytest.raises(UserError, match="got x"):
        asyncio.run(engine.start())


def test_a_request_whose_logits_are_nan_fails_alone() -> None:
    """Token 60 embeds as NaN: its request ends with an error, its neighbours are not touched."""

    requests = [
        tiny.request("good", [5, 6], max_tokens=8),
        tiny.request("bad", [5, 60], max_tokens=8),
        tiny.request("fine", [7, 8], max_tokens=8),
    ]

    async def main() -> None:
        engine = make_engine()
        await engine.start()
        alone = [await engine.generate(requests[0]), await engine.generate(requests[2])]
        runner = engine._live_runner
        embedding = runner._weights.embedding.detach().clone()  # the head has the same weight
        embedding[60] = torch.nan
        runner._weights = dataclasses.replace(runner._weights, embedding=embedding)
        good, bad, fine = await engine.generate_many(requests)
        await engine.close()
        assert bad.finish_reason == "error"
        assert "no distribution" in bad.error
        assert len(bad.token_ids) == 0
        assert same_bits(good, alone[0])
        assert same_bits(fine, alone[1])

    run(main)


def test_a_stop_string_before_min_tokens_does_not_end_a_response_later() -> None:
    """A match ends the response in which it is completed, or not at all."""

    async def main() -> None:
        engine = make_engine()
        await engine.start()
        for seed in range(20):
            how = {"seed": seed, "min_tokens": 8, "max_tokens": 12}
            free = (await engine.generate(tiny.request("free", **how))).token_ids.tolist()
            early = tiny.text_of(free[2:4])
            if early in tiny.text_of(free[4:]):
                continue
            late = tiny.text_of(free[8:10])
            made = await engine.generate(tiny.request("early", stop=(early,), **how))
            assert made.token_ids.tolist() == free
            made = await engine.generate(tiny.request("late", stop=(early, late), **how))
            assert made.token_ids.tolist() == free[:10]
            break
        else:
            raise AssertionError("no response has an early text that it does not repeat")
        await engine.close()

    run(main)


def test_stop_strings_use_a_tokenizer_that_brings_its_own_code(tmp_path: Path) -> None:
    """Only with `model.trust_remote_code`, as everywhere else."""
    from transformers import AutoTokenizer

    AutoTokenizer.from_pretrained(policy_path()).save_pretrained(tmp_path)
    own = json.loads((tmp_path / "tokenizer_config.json").read_text())
    own["auto_map"] = {"AutoTokenizer": ["own_tokenizer.OwnTokenizer", None]}
    own["tokenizer_class"] = "OwnTokenizer"
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(own))
    (tmp_path / "own_tokenizer.py").write_text(
        "from transformers import PreTrainedTokenizerFast\n\n\n"
        "class OwnTokenizer(PreTrainedTokenizerFast):\n"
        "    def decode(self, *args, **options):\n"
        "        return 'decoded by its own code'\n"
    )
    trusted = TransformersOptions(tokenizer=str(tmp_path), trust_remote_code=True)
    assert _text_decoder(trusted)([1]) == "decoded by its own code"


def test_a_fault_while_weights_arrive_ends_the_engine_with_its_traceback() -> None:
    """After a fault of the device nothing that the engine makes can be trusted."""

    def broken_fetch(source: object) -> None:
        raise torch.AcceleratorError("CUDA error: an illegal address\nmore lines")

    async def main() -> None:
        engine = make_engine()
        await engine.start()
        fetch, engine._fetch = engine._fetch, broken_fetch  # type: ignore[assignment]
        for ask in (lambda: engine.update_weights(1, tiny.handle(1)), engine.stats) * 2:
            with pytest.raises(EngineError) as raised:
                await ask()
            assert (
                str(raised.value)
                == "engine: it died: AcceleratorError: CUDA error: an illegal address"
            )
            assert "in broken_fetch" in raised.value.__notes__[0]
        engine._fetch = fetch
        await engine.start()
        await engine.update_weights(1, tiny.handle(1))
        assert (await engine.stats()).policy_version == 1
        await engine.close()

    run(main)


@pytest.mark.parametrize("stop", [tiny.VOCABULARY, 10**30, -1])
def test_a_stop_token_that_the_model_lacks_is_the_mistake_of_its_request(stop: int) -> None:
    async def main() -> None:
        engine = make_engine()
        await engine.start()
        with pytest.raises(UserError, match=rf"got stop token ids \[{stop}\], allowed: 0 to 63"):
            await engine.generate(tiny.request("odd", stop_token_ids=(stop,), min_tokens=2))
        assert (await engine.generate(tiny.request("good"))).finish_reason != "error"
        await engine.close()

    run(main)


def test_an_end_of_the_model_beyond_its_vocabulary_is_none() -> None:
    """As of a generation config whose tokenizer has grown: it cannot be sampled, so nothing bans it."""

    def load() -> torch.nn.Module:
        model = tiny.tiny_model(0, "penstock")
        model.generation_config.eos_token_id = [tiny.EOS, tiny.VOCABULARY]
        return model

    async def main() -> None:
        options = TransformersOptions(max_slots=4, max_tokens_in_flight=4096)
        engine = TransformersEngine(load, fetch=tiny.fetch, options=options, text_of=tiny.text_of)
        await engine.start()
        generation = await engine.generate(tiny.request("early", min_tokens=4))
        await engine.close()
        assert len(generation.token_ids) >= 4
        assert tiny.EOS not in generation.token_ids[:3]

    run(main)


@pytest.mark.parametrize("sampling", [{"top_k": 10**30}, {"temperature": float("nan")}])
def test_a_number_that_no_sampling_has_is_the_mistake_of_its_request(
    sampling: dict[str, float],
) -> None:
    async def main() -> None:
        engine = make_engine()
        await engine.start()
        with pytest.raises(UserError, match=r"request odd: got temperature .*, top_k .*, allowed"):
            await engine.generate(tiny.request("odd", **sampling))
        assert (await engine.generate(tiny.request("good", top_k=2**31))).finish_reason != "error"
        await engine.close()

    run(main)

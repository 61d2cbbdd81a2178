"""The openai engine: the contract over a fake server, and each fault of a server."""

from __future__ import annotations

import asyncio
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from engine_contract import CHECKS, until_running

from penstock.config import ModelConfig
from penstock.engine.openai.engine import OpenAIEngine, OpenAIOptions
from penstock.engine.openai.server_weights import ReloadCall
from penstock.engine.protocol import check_options
from penstock.errors import EngineError, UserError
from penstock.types import WeightHandle
from stages import tiny_policy as tiny
from stages.engine_case import LACKS, EngineCase, run
from stages.fake_server import PIECE, ServedEngine

CASES = {
    "streams": (LACKS["openai, others"], {}),
    "vLLM serves": (LACKS["openai, vLLM serves"], {"rl": True}),
    "whole answers": (
        LACKS["openai, others"] | {"hold", "partials", "live tokens"},
        {"streams": False},
    ),
}


# what differs between servers; `make test-long` runs every check over each of them
OF_A_SERVER = {
    "streams": CHECKS.keys()
    - {"greedy", "seed_decides", "stops", "temperatures_side_by_side", "top_k_and_top_p"},
    "vLLM serves": (
        "update_changes_every_weight",
        "wrong_digest_is_refused",
        "pause_keep_and_update",
    ),
    "whole answers": ("logprobs_and_length", "group_and_many", "abort_one"),
}


@pytest.mark.parametrize(
    ("served", "check"),
    [
        pytest.param(
            served,
            check,
            marks=[] if check in OF_A_SERVER[served] else [pytest.mark.slow],
        )
        for served in CASES
        for check in CHECKS
    ],
)
def test_contract(check: str, served: str, tmp_path: Path) -> None:
    lacks, options = CASES[served]
    case = EngineCase(
        f"openai, {served}",
        lambda: ServedEngine(tmp_path, **options),
        lacks,
        kill=lambda engine: engine.fake.die(),
    )
    CHECKS[check](case)


@pytest.mark.parametrize("fault", ["500", "half", "counts", "no ids", "cut"])
def test_a_fault_of_a_whole_answer_is_retried(fault: str, tmp_path: Path) -> None:
    async def main() -> None:
        engine = ServedEngine(tmp_path, fault, fault, streams=False)
        await engine.start()
        made = await engine.generate(tiny.request("a", max_tokens=6))
        assert made.finish_reason in ("stop", "length"), made.error
        assert engine.fake.completions == 3  # two faults, the answer
        await engine.close()

    run(main)


@pytest.mark.parametrize(
    "fault",
    ["500", "half", "error", "counts", "no ids", "too many", "no reason", "usage", "cut"],
)
def test_a_fault_of_a_stream_is_retried(fault: str, tmp_path: Path) -> None:
    """Every returned token has the log-prob of its position, whatever was lost or refused."""

    async def main() -> None:
        engine = ServedEngine(tmp_path, fault, fault)
        await engine.start()
        made = await engine.generate(tiny.request("a", [5, 6, 7], max_tokens=14, min_tokens=14))
        assert made.finish_reason == "length", made.error
        assert len(made.token_ids) == 14
        wanted = tiny.expected_logprobs(0, np.array([5, 6, 7]), made.token_ids, banned=tiny.EOS)
        assert np.abs(wanted - made.logprobs)[:-1].max() < 1e-4
        assert engine.fake.completions >= 2
        await engine.close()

    run(main)


@pytest.mark.parametrize("fault", ["no usage", "no end"])
def test_a_stream_whose_tokens_all_came_is_good(fault: str, tmp_path: Path) -> None:
    async def main() -> None:
        engine = ServedEngine(tmp_path, fault)
        await engine.start()
        made = await engine.generate(tiny.request("a", max_tokens=6))
        assert made.finish_reason in ("stop", "length"), made.error
        assert engine.fake.completions == 1
        await engine.close()

    run(main)


def test_a_cut_stream_goes_on_from_its_tokens(tmp_path: Path) -> None:
    """The tokens from before the cut begin the answer; none is sampled twice."""

    async def main() -> None:
        engine = ServedEngine(tmp_path, "cut")
        await engine.start()
        cut = await engine.generate(tiny.request("a", seed=3, max_tokens=14, min_tokens=14))
        whole = await engine.generate(tiny.request("b", seed=3, max_tokens=14, min_tokens=14))
        assert cut.token_ids[:PIECE].tolist() == whole.token_ids[:PIECE].tolist()
        assert cut.logprobs[:PIECE].tolist() == whole.logprobs[:PIECE].tolist()
        assert engine.fake._number == 4  # the probe, the cut request, its rest, the whole request
        await engine.close()

    run(main)


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ("500", "out of memory"),
        ("error", "out of memory"),
        ("counts", "log-probs"),
        ("usage", "usage"),
        ("half", "JSONDecodeError"),
    ],
)
def test_a_fault_that_stays_is_an_error_with_its_reason(
    fault: str, words: str, tmp_path: Path
) -> None:
    async def main() -> None:
        engine = ServedEngine(tmp_path, *[fault] * 9, retries=1)
        await engine.start()
        made = await engine.generate(tiny.request("a", max_tokens=14, min_tokens=14))
        assert made.finish_reason == "error"
        assert words in made.error
        await engine.close()

    run(main)


def test_a_refusal_is_not_retried(tmp_path: Path) -> None:
    async def main() -> None:
        engine = ServedEngine(tmp_path, "400")
        await engine.start()
        made = await engine.generate(tiny.request("a", max_tokens=6))
        assert made.finish_reason == "error"
        assert engine.fake.completions == 1
        await engine.close()

    run(main)


def test_a_slow_server_times_out(tmp_path: Path) -> None:
    async def main() -> None:
        engine = ServedEngine(tmp_path, "slow", retries=0)
        await engine.start()
        engine._options = replace(engine._options, timeout_s=0.3)
        made = await engine.generate(tiny.request("a", max_tokens=14, min_tokens=14))
        assert made.finish_reason == "error"
        assert "0.3 s" in made.error
        await engine.close()

    run(main)


def test_a_held_stream_does_not_time_out(tmp_path: Path) -> None:
    """A pause may last longer than `timeout_s`."""

    async def main() -> None:
        engine = ServedEngine(tmp_path, rl=True, retries=0)
        await engine.start()
        task = asyncio.create_task(
            engine.generate(tiny.request("a", max_tokens=400, min_tokens=400))
        )
        await until_running(engine)
        await engine.pause("keep")
        (stream,) = engine._streams
        assert stream.timeout.when() is None
        await engine.resume()
        assert stream.timeout.when() is not None
        await engine.abort("a")
        assert (await task).finish_reason == "abort"
        assert engine.fake.calls.count("/pause") == engine.fake.calls.count("/resume") == 1
        await engine.close()

    run(main)


def test_a_pause_that_was_left_behind_is_ended_at_the_start(tmp_path: Path) -> None:
    async def main() -> None:
        engine = ServedEngine(tmp_path, rl=True)
        await engine.start()
        await engine.pause("keep")
        other = OpenAIEngine(OpenAIOptions(urls=(engine.fake.url,)), fetch=tiny.fetch)
        await other.start()
        assert (await other.generate(tiny.request("a"))).finish_reason != "error"
        await other.close()
        await engine.close()

    run(main)


def test_vllm_calls_are_made_in_their_order(tmp_path: Path) -> None:
    async def main() -> None:
        engine = ServedEngine(tmp_path, rl=True)
        await engine.start()
        await engine.update_weights(1, tiny.handle(1))
        assert engine.fake.calls == [
            "/is_paused", "/pause", "/start_weight_update", "/update_weights",
            "/finish_weight_update", "/resume",
        ]  # fmt: skip
        await engine.close()

    run(main)


@pytest.mark.parametrize("rl", [True, False])
def test_a_folder_of_weights_is_not_written_again(rl: bool, tmp_path: Path) -> None:
    async def main() -> None:
        saved = tiny.save_policy(tmp_path / "saved", 1)
        source = WeightHandle(
            version=1, digest=tiny.handle(1).digest, kind="folder", location=str(saved)
        )
        engine = ServedEngine(tmp_path / "weights", rl=rl)
        await engine.start()
        assert await engine.update_weights(1, source) == source.digest
        made = await engine.generate(tiny.request("a", [7, 8, 9]))
        wanted = tiny.expected_logprobs(1, np.array([7, 8, 9]), made.token_ids)
        assert np.abs(wanted - made.logprobs).max() < 1e-4
        assert not (tmp_path / "weights").exists()
        await engine.close()

    run(main)


def test_only_the_newest_written_weights_stay(tmp_path: Path) -> None:
    async def main() -> None:
        engine = ServedEngine(tmp_path)
        await engine.start()
        for version in (1, 2, 3):
            await engine.update_weights(version, tiny.handle(version))
        assert sorted(folder.name for folder in tmp_path.iterdir()) == ["version-2", "version-3"]
        await engine.close()

    run(main)


def test_a_server_that_refuses_weights_is_not_used_on(tmp_path: Path) -> None:
    """Its weights are unknown: requests end, and the engine reports why until it is started again."""

    async def main() -> None:
        engine = ServedEngine(tmp_path)
        await engine.start()
        engine._loader = ReloadCall(str(tmp_path), "/no_such_call")
        with pytest.raises(EngineError, match="not loaded"):
            await engine.update_weights(1, tiny.handle(1))
        assert "not loaded" in (await engine.generate(tiny.request("a"))).error
        with pytest.raises(EngineError, match="not loaded"):
            await engine.stats()
        await engine.close()

    run(main)


def test_raw_logprobs_are_refused_where_they_would_be_wrong(tmp_path: Path) -> None:
    async def main() -> None:
        engine = ServedEngine(tmp_path, raw_logprobs=True)
        await engine.start()
        with pytest.raises(UserError, match="processed_logprobs"):
            await engine.generate(tiny.request("a", temperature=0.7))
        assert (await engine.generate(tiny.request("b"))).finish_reason != "error"
        await engine.close()

    run(main)


NEUTRAL = {
    "repetition_penalty": 1.0,
    "min_p": 0.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
}


def test_every_request_sends_what_a_server_would_else_choose(tmp_path: Path) -> None:
    """vLLM fills what is left out from the model's generation config."""

    async def main() -> None:
        engine = ServedEngine(tmp_path, penalty=1.0)
        await engine.start()
        await engine.generate(tiny.request("a"))
        for body in engine.fake.bodies:
            assert NEUTRAL.items() <= body.items()
        await engine.close()

    run(main)


def test_a_server_is_told_every_token_that_ends_a_response(tmp_path: Path) -> None:
    """The server knows the ends of its model, not those of the tokenizer that the run uses."""

    async def main() -> None:
        engine = ServedEngine(tmp_path, model=ModelConfig(path="demo"))
        await engine.start()
        await engine.generate(tiny.request("a", stop_token_ids=(9,)))
        assert engine.fake.bodies[-1]["stop_token_ids"] == [1, 9]  # the demo's <eos>
        await engine.close()

    run(main)


def test_a_server_that_refuses_fields_of_vllm_gets_those_of_openai(tmp_path: Path) -> None:
    async def main() -> None:
        engine = ServedEngine(tmp_path, refuses=("repetition_penalty", "min_p"))
        await engine.start()
        assert (await engine.generate(tiny.request("a"))).finish_reason != "error"
        body = engine.fake.bodies[-1]
        assert (body["presence_penalty"], body["frequency_penalty"]) == (0.0, 0.0)
        await engine.close()

    run(main)


def test_a_server_with_a_penalty_of_its_own_is_refused(tmp_path: Path) -> None:
    async def main() -> None:
        engine = ServedEngine(tmp_path, penalty=8.0)  # the logits of a random policy are small
        with pytest.raises(UserError, match=r"repeated token by .*--generation-config vllm"):
            await engine.start()
        await engine.close()

    run(main)


def test_without_a_reload_call_it_is_for_evaluation_only() -> None:
    engine = OpenAIEngine(OpenAIOptions(), fetch=tiny.fetch)
    with pytest.raises(EngineError, match="evaluation only"):
        asyncio.run(engine.update_weights(1, tiny.handle(1)))


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ({"url": "http://a"}, "engine.options: got 'url', allowed: urls, model"),
        ({"urls": "http://a"}, "engine.options.urls: got 'http://a', allowed: list"),
        ({"retries": "3"}, "engine.options.retries: got '3', allowed: int"),
    ],
)
def test_a_wrong_option_is_refused(option: dict[str, str], message: str) -> None:
    with pytest.raises(UserError, match=re.escape(message)):
        check_options(OpenAIOptions, option)


def test_no_server_says_so() -> None:
    engine = OpenAIEngine(
        OpenAIOptions(urls=("http://127.0.0.1:9",), backoff_s=0.0), fetch=tiny.fetch
    )
    with pytest.raises(EngineError, match="of no use"):
        asyncio.run(engine.start())


def test_an_engine_has_one_server() -> None:
    with pytest.raises(UserError, match="got 2 URLs for one engine, allowed: one"):
        OpenAIEngine(OpenAIOptions(urls=("http://a", "http://b")), fetch=tiny.fetch)

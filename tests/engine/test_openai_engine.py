"""The openai engine: the contract over a fake server, and each fault a server can show."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
import tiny
from engine_contract import CHECKS, EngineCase, run
from engine_lacks import LACKS
from fake_server import FakeServer

from penstock.engine.openai_engine import OpenAIEngine, OpenAIOptions
from penstock.errors import EngineError, UserError


class ServedEngine(OpenAIEngine):
    """Starts its own fake server with it."""

    def __init__(self, folder: Path, *faults: str, servers: int = 1, **options: object) -> None:
        self.fakes = [FakeServer(*faults) for _ in range(servers)]
        self._make = lambda urls: OpenAIOptions(
            urls=urls, backoff_s=0.0, reload_path="/update_weights_from_disk",
            weights_folder=str(folder), **options,
        )  # fmt: skip

    async def start(self) -> None:
        for fake in self.fakes:
            await fake.start()
        super().__init__(self._make(tuple(fake.url for fake in self.fakes)), fetch=tiny.fetch)
        await super().start()

    async def close(self) -> None:
        await super().close()
        for fake in self.fakes:
            await fake.close()


@pytest.mark.parametrize("check", CHECKS)
def test_contract(check: str, tmp_path: Path) -> None:
    CHECKS[check](EngineCase("openai", lambda: ServedEngine(tmp_path), LACKS["openai"]))


@pytest.mark.parametrize("fault", ["500", "half", "counts", "no ids", "cut"])
def test_a_fault_is_retried(fault: str, tmp_path: Path) -> None:
    async def main() -> None:
        engine = ServedEngine(tmp_path, fault, fault)
        await engine.start()
        made = await engine.generate(tiny.request("a", max_tokens=6))
        assert made.finish_reason in ("stop", "length"), made.error
        assert engine.fakes[0].completions == 4  # the probe, two faults, the answer
        await engine.close()

    run(main)


@pytest.mark.parametrize(
    ("fault", "words"), [("500", "out of memory"), ("counts", "log-probs"), ("cut", "Incomplete")]
)
def test_a_fault_that_stays_is_an_error_with_its_reason(
    fault: str, words: str, tmp_path: Path
) -> None:
    async def main() -> None:
        engine = ServedEngine(tmp_path, *[fault] * 9)
        await engine.start()
        made = await engine.generate(tiny.request("a", max_tokens=6))
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
        assert engine.fakes[0].completions == 2
        await engine.close()

    run(main)


def test_a_slow_server_times_out(tmp_path: Path) -> None:
    async def main() -> None:
        engine = ServedEngine(tmp_path, "slow", timeout_s=0.3, retries=0)
        await engine.start()
        made = await engine.generate(tiny.request("a", max_tokens=2))
        assert made.finish_reason == "error"
        assert "0.3 s" in made.error
        await engine.close()

    run(main)


def test_a_server_that_goes_away_is_left_for_the_other(tmp_path: Path) -> None:
    async def main() -> None:
        engine = ServedEngine(tmp_path, servers=2)
        await engine.start()
        engine.fakes[0].go_away()
        made = await engine.generate_many([tiny.request(str(i), max_tokens=4) for i in range(6)])
        assert {m.finish_reason for m in made} <= {"stop", "length"}
        assert engine.fakes[1].completions == 6
        await engine.close()

    run(main)


def test_load_is_spread_and_rollouts_stick(tmp_path: Path) -> None:
    async def main() -> None:
        engine = ServedEngine(tmp_path, servers=2)
        await engine.start()
        await engine.generate_many([tiny.request(str(i), max_tokens=4) for i in range(8)])
        first, second = (fake.completions for fake in engine.fakes)
        assert (first - 1, second) == (4, 4)  # the first also answered the probe
        owner = engine._owner["3"]
        await engine.generate(tiny.request("3", response=[9, 9], max_tokens=6))
        assert engine._owner["3"] is owner
        await engine.close()

    run(main)


def test_raw_logprobs_are_refused_where_they_would_be_wrong(tmp_path: Path) -> None:
    async def main() -> None:
        engine = ServedEngine(tmp_path)
        engine.fakes[0].raw_logprobs = True
        await engine.start()
        with pytest.raises(UserError, match="processed_logprobs"):
            await engine.generate(tiny.request("a", temperature=0.7))
        assert (await engine.generate(tiny.request("b"))).finish_reason != "error"
        await engine.close()

    run(main)


def test_without_a_reload_call_it_is_for_evaluation_only() -> None:
    engine = OpenAIEngine(OpenAIOptions(), fetch=tiny.fetch)
    with pytest.raises(EngineError, match="evaluation only"):
        asyncio.run(engine.update_weights(1, tiny.handle(1)))


def test_no_server_says_so() -> None:
    engine = OpenAIEngine(OpenAIOptions(urls=("http://127.0.0.1:9",)), fetch=tiny.fetch)
    with pytest.raises(EngineError, match="of no use"):
        asyncio.run(engine.start())

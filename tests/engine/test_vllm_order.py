"""The order of calls to vLLM, on a recording stand-in: a CPU ignores what matters on a GPU."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from penstock.errors import EngineError
from penstock.types import WeightHandle
from stages import tiny_policy as tiny
from stages.engine_case import run

if os.environ.get("PENSTOCK_TEST_VLLM") != "1":
    pytest.skip("run by scripts/test_vllm.sh", allow_module_level=True)

from penstock.engine.vllm.engine import VllmEngine
from penstock.engine.vllm.options import VllmOptions

UPDATE = ["start_weight_update", "update_weights", "finish_weight_update"]


class RecordingLLM:
    """Records every call by its name and its main argument."""

    errored = False

    def __init__(self) -> None:
        self.calls: list[str] = []

    def __getattr__(self, name: str) -> Callable[..., Awaitable[None]]:
        async def call(*_: Any, **given: Any) -> None:
            detail = given.get("level") or given.get("mode") or ",".join(given.get("tags") or ())
            self.calls.append(f"{name} {detail}".strip())

        return call

    def shutdown(self) -> None:
        self.calls.append("shutdown")


class Bench:
    """An engine over the stand-in, started with version 0 from a folder."""

    def __init__(self, folder: Path) -> None:
        options = VllmOptions(path=str(folder))
        self.engine = VllmEngine(options, fetch=self._fetch)
        self.llm = RecordingLLM()
        self.gone = False
        self.engine._llm = self.llm  # type: ignore[assignment]
        first = tiny.handle(0)
        self.engine._latest = WeightHandle(
            version=0, digest=first.digest, kind="folder", location=str(folder)
        )
        self.engine._requests.gate.set()

    def _fetch(self, source: WeightHandle) -> Iterator[tuple[str, torch.Tensor]]:
        if self.gone:
            raise OSError("two further versions were published")
        return tiny.fetch(source)

    def taken(self) -> list[str]:
        calls, self.llm.calls = self.llm.calls, []
        return calls


def with_bench(folder: Path, main: Callable[[Bench], Awaitable[None]]) -> None:
    async def bounded() -> None:
        await main(Bench(tiny.save_policy(folder)))

    run(bounded)


def test_an_update_runs_behind_a_pause_of_its_own(tmp_path: Path) -> None:
    async def main(bench: Bench) -> None:
        await bench.engine.update_weights(1, tiny.handle(1))
        assert bench.taken() == ["pause_generation keep", *UPDATE, "resume_generation"]
        await bench.engine.pause("wait")
        await bench.engine.update_weights(2, tiny.handle(2))
        assert bench.taken() == ["pause_generation wait", *UPDATE]

    with_bench(tmp_path, main)


@pytest.mark.parametrize("version", [0, 1])
def test_wake_loads_the_newest_before_anything_runs(version: int, tmp_path: Path) -> None:
    """vLLM resumes by itself when its last memory is back: the weights must be loaded by then."""

    async def main(bench: Bench) -> None:
        if version:
            await bench.engine.update_weights(version, tiny.handle(version))
        bench.taken()
        await bench.engine.sleep()
        assert not bench.engine._requests.gate.is_set()
        await bench.engine.wake()
        assert bench.taken() == ["sleep 2", "wake_up weights", *UPDATE, "wake_up kv_cache"]
        assert bench.engine._requests.gate.is_set()
        assert bench.engine._digest == tiny.handle(version).digest

    with_bench(tmp_path, main)


def test_weights_that_come_while_it_sleeps_are_loaded_once(tmp_path: Path) -> None:
    async def main(bench: Bench) -> None:
        await bench.engine.sleep()
        await bench.engine.update_weights(1, tiny.handle(1))
        assert not bench.engine._requests.gate.is_set()
        await bench.engine.wake()
        assert bench.taken() == ["sleep 2", "wake_up weights", *UPDATE, "wake_up kv_cache"]
        assert bench.engine._version == 1

    with_bench(tmp_path, main)


def test_lost_weights_that_are_gone_wait_for_newer_ones(tmp_path: Path) -> None:
    async def main(bench: Bench) -> None:
        await bench.engine.update_weights(1, tiny.handle(1))
        await bench.engine.sleep()
        bench.gone = True
        with pytest.raises(EngineError, match="further versions"):
            await bench.engine.wake()
        assert "wake_up kv_cache" not in bench.taken()
        assert not bench.engine._requests.gate.is_set()
        bench.gone = False
        await bench.engine.update_weights(4, tiny.handle(2))
        await bench.engine.wake()
        assert bench.taken() == [*UPDATE, "wake_up kv_cache"]

    with_bench(tmp_path, main)


def test_a_pause_outlives_a_sleep(tmp_path: Path) -> None:
    """vLLM forgets a pause when it wakes; no request may pass before our own `resume`."""

    async def main(bench: Bench) -> None:
        await bench.engine.pause("abort")
        await bench.engine.sleep()
        await bench.engine.wake()
        assert bench.taken()[-2:] == ["wake_up kv_cache", "pause_generation keep"]
        assert not bench.engine._requests.gate.is_set()
        await bench.engine.resume()
        assert bench.taken() == ["resume_generation"]
        assert bench.engine._requests.gate.is_set()

    with_bench(tmp_path, main)


def test_a_half_done_load_ends_the_engine(tmp_path: Path) -> None:
    async def main(bench: Bench) -> None:
        async def fail(_: object) -> None:
            raise RuntimeError("a shard is gone")

        bench.llm.update_weights = fail  # type: ignore[method-assign]
        with pytest.raises(EngineError, match="a shard is gone"):
            await bench.engine.update_weights(1, tiny.handle(1))
        made = await asyncio.wait_for(bench.engine.generate(tiny.request("a")), 10)
        assert "half-way" in made.error

    with_bench(tmp_path, main)

"""The contract over a real vLLM on a CPU. Run by scripts/test_vllm.sh, in its own environment."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import tiny
from engine_contract import CHECKS, EngineCase
from engine_lacks import LACKS

if os.environ.get("PENSTOCK_TEST_VLLM") != "1":
    pytest.skip("run by scripts/test_vllm.sh", allow_module_level=True)

from penstock.engine.vllm_engine import VllmEngine, VllmOptions


@pytest.fixture(scope="session")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.save_policy(tmp_path_factory.mktemp("policy"))


def make_engine(policy: Path) -> VllmEngine:
    options = VllmOptions(
        path=str(policy), dtype="float32", max_slots=4, max_model_len=512, enforce_eager=True
    )
    return VllmEngine(options, fetch=tiny.fetch)


@pytest.fixture(scope="session")
def case(policy: Path) -> Iterator[EngineCase]:
    """One engine for all checks: it takes half a minute to start."""
    with asyncio.Runner() as loop:
        engine = make_engine(policy)
        loop.run(engine.start())
        yield EngineCase(
            "vllm", lambda: make_engine(policy), LACKS["vllm"], shared=engine, loop=loop
        )
        loop.run(engine.close())


@pytest.mark.parametrize("check", [name for name in CHECKS if name != "close_returns_partials"])
def test_contract(check: str, case: EngineCase) -> None:
    CHECKS[check](case)


def test_the_first_digest_is_that_of_the_trainer(case: EngineCase) -> None:
    assert case.loop is not None
    assert case.shared is not None
    assert case.loop.run(case.shared.stats()).digest == tiny.handle(0).digest


def test_close_returns_partials(policy: Path) -> None:
    CHECKS["close_returns_partials"](EngineCase("vllm", lambda: make_engine(policy), LACKS["vllm"]))

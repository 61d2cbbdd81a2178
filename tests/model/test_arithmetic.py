"""Which arithmetic a model's device gets; its bits are tested on a GPU (tests/workers/test_gpu_bits.py)."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from penstock.errors import RunError
from penstock.model.arithmetic import arithmetic_of, explain_refusal, use_arithmetic, use_threads


def model_on(device: str, **config: int) -> Any:
    parameter = SimpleNamespace(device=torch.device(device), is_meta=False)
    text = SimpleNamespace(model_type="of no family", **config)
    text.get_text_config = lambda: text
    return SimpleNamespace(parameters=lambda: iter([parameter]), config=text)


@pytest.fixture
def chosen(monkeypatch: pytest.MonkeyPatch) -> list[tuple[bool, bool]]:
    """(deterministic, warns only) of every call to torch."""
    calls: list[tuple[bool, bool]] = []

    def note(mode: bool, *, warn_only: bool = False) -> None:
        calls.append((mode, warn_only))

    monkeypatch.setattr(torch, "use_deterministic_algorithms", note)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H200")
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    return calls


def test_each_thread_computes_with_its_own_number_of_threads() -> None:
    """An engine and a trainer of one process, whichever of them is the last to say its number."""
    with ThreadPoolExecutor(1) as engine, ThreadPoolExecutor(1) as trainer:
        engine.submit(use_threads, 1).result()
        trainer.submit(use_threads, 3).result()
        assert engine.submit(torch.get_num_threads).result() == 1
        assert trainer.submit(torch.get_num_threads).result() == 3


def test_a_cpu_keeps_its_arithmetic(chosen: list[tuple[bool, bool]]) -> None:
    use_arithmetic("deterministic", model_on("cpu"))
    assert chosen == []
    here = arithmetic_of("fast", model_on("cpu"), ranks=2)
    assert (here.device, here.doubt) == ("cpu", "")


@pytest.mark.parametrize(
    ("kind", "config", "called"),
    [
        ("deterministic", {}, (True, False)),
        ("deterministic", {"num_experts": 8}, (True, True)),
        ("fast", {}, (False, False)),
    ],
)
def test_a_gpu_gets_the_chosen_one(
    chosen: list[tuple[bool, bool]], kind: str, config: dict[str, int], called: tuple[bool, bool]
) -> None:
    use_arithmetic(kind, model_on("cuda", **config))
    assert chosen == [called]
    assert "CUBLAS_WORKSPACE_CONFIG" not in os.environ  # it slows down every product


@pytest.mark.parametrize(
    ("kind", "config", "layout", "doubt"),
    [
        ("deterministic", {}, {}, ""),
        ("fast", {}, {}, "model.arithmetic is fast"),
        ("deterministic", {"num_local_experts": 8}, {}, "experts"),
        ("deterministic", {}, {"ranks": 2}, "2 trainer ranks"),
    ],
)
def test_what_may_not_repeat_is_named(
    chosen: list[tuple[bool, bool]],
    kind: str,
    config: dict[str, int],
    layout: dict[str, Any],
    doubt: str,
) -> None:
    how = {"ranks": 1, **layout}
    here = arithmetic_of(kind, model_on("cuda", **config), **how)
    assert here.device == "NVIDIA H200"
    assert doubt in here.doubt
    assert bool(doubt) == bool(here.doubt)


def test_an_operation_without_a_fixed_order_is_named_with_the_way_out() -> None:
    words = "histc does not have a deterministic implementation, but you set ..."
    with (
        pytest.raises(RunError, match=r"trainer: histc has no .* model.arithmetic=fast"),
        explain_refusal(),
    ):
        raise RuntimeError(words)
    with pytest.raises(RuntimeError, match="shape"), explain_refusal():
        raise RuntimeError("shape '[2]' is invalid")

"""Moments in other places and formats: what they round to, and runs that are resumed and replayed with them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import penstock
from penstock.config import TrainConfig
from penstock.config.source import load_config
from penstock.errors import UserError
from penstock.run.session import replay_run
from penstock.training.dither import Place, round_at_random_, step_keys
from penstock.training.moments import StoredAdamW

ROWS = [{"prompt": f"{a}+{b}", "gt_answer": str(a + b)} for a in (10, 11) for b in (20, 21)]
SETTINGS: dict[str, Any] = {
    "launch.kind": "inline",
    "track.trackers": [],
    "model.dtype": "bfloat16",
    "checkpoint.every_steps": 1,
}


def rounded(exact: torch.Tensor, key: int = 7, place: Place | None = None) -> torch.Tensor:
    copy = exact.clone()
    round_at_random_(copy, torch.tensor(key, dtype=torch.int32), place or Place())
    return copy


def test_a_number_is_rounded_up_with_the_share_of_its_way() -> None:
    """Neighbours of bfloat16 above 1 are 1/128 apart; a quarter of the way is rounded up in a quarter of the draws."""
    for sign in (1.0, -1.0):
        got = rounded(sign * torch.full((300, 300), 1 + 0.25 / 128))
        assert set(got.unique().tolist()) == {sign, sign * (1 + 1 / 128)}
        assert float((got.abs() > 1).float().mean()) == pytest.approx(0.25, abs=0.01)
    short = torch.randn(50, 50).bfloat16().float()
    assert torch.equal(rounded(short), short)


def test_the_draw_depends_on_key_step_and_position_and_on_nothing_else() -> None:
    exact = torch.randn(40, 24)
    whole = rounded(exact)
    parts = [rounded(exact[:13]), rounded(exact[13:], place=Place(13))]
    assert torch.equal(torch.cat(parts), whole)
    assert torch.equal(
        rounded(exact[:, 8:].contiguous(), place=Place(first_column=8)), whole[:, 8:]
    )
    assert not torch.equal(rounded(exact, key=8), whole)
    keys = step_keys(torch.tensor([7, 7, 8], dtype=torch.int32), torch.tensor([1.0, 2.0, 1.0]))
    assert len(set(keys.tolist())) == 3


def test_a_mean_that_moves_by_less_than_a_digit_arrives() -> None:
    """exp_avg_sq goes from 1 to 1.1 by a thousandth of the way in a step; the next number of bfloat16 is 1.0078."""
    parameter = torch.nn.Parameter(torch.zeros(64, 64))
    config = TrainConfig(betas=(0.9, 0.999), moments="bfloat16")
    optimizer = StoredAdamW({"w": parameter}, config)
    optimizer.moments_of(parameter)["exp_avg_sq"].fill_(1.0)
    for _ in range(200):
        parameter.grad = torch.full((64, 64), 1.1**0.5)
        optimizer.step()
    mean = optimizer.moments_of(parameter)["exp_avg_sq"].float().mean()
    assert float(mean) == pytest.approx(1.1 - 0.1 * 0.999**200, abs=0.002)


def trained(name: str, steps: int, **train: object) -> penstock.Run:
    settings = SETTINGS | {f"train.{key}": value for key, value in train.items()}
    size: dict[str, Any] = {"groups_per_step": 2, "num_generations": 2, "max_tokens": 6}
    return penstock.train(
        "demo", ROWS, by_length, steps=steps, lr=1e-3, name=name, settings=settings, **size
    )


def by_length(response: str) -> float:
    return float(len(response))


@pytest.mark.slow
def test_a_run_with_moments_in_main_memory_is_the_run_without(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    runs = [trained("here", 2), trained("there", 2, offload_moments=True)]
    models = [(run.model_path / "model.safetensors").read_bytes() for run in runs]
    assert models[0] == models[1]
    with pytest.raises(UserError, match=r"offload_moments: got true .* = 2, allowed: false"):
        load_config(None, ["train.offload_moments=true", "launch.num_consumers=2"])


@pytest.mark.slow
def test_a_run_with_short_moments_is_resumed_and_replayed_bit_for_bit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    run = trained("short", 2, moments="bfloat16")
    later = penstock.resume(run, settings={"train.steps": 3})
    capsys.readouterr()
    replay_run(later._folder, to_step=None, algorithm=None, overrides=[])
    assert capsys.readouterr().out.count("equal") >= 3
    saved = next(later.path.glob("checkpoints/step-3/consumer.safetensors"))
    from safetensors import safe_open

    with safe_open(saved, framework="pt") as file:
        kinds = {file.get_tensor(key).dtype for key in file.keys() if "/exp_avg" in key}  # noqa: SIM118
    assert kinds == {torch.bfloat16}

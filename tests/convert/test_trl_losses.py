"""`penstock convert trl` against TRL's own GRPOTrainer: every loss and every way to scale rewards, in float32."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from penstock.config import Config
from penstock.config.source import load_config
from penstock.convert.write import convert
from penstock.training.algo.method import resolve_settings
from penstock.training.flat_batch import FlatBatch
from penstock.training.objective import TokenInputs
from penstock.types import Batch
from stages.training_data import (
    config_of,
    consumer_of,
    random_batch,
    relative_gap,
    tiny_model,
)
from stages.trl_run import END, run_trl

GROUPS, SIZE, UPDATES = 6, 4, 2
# what the user writes for TRL
LOSSES: dict[str, dict[str, Any]] = {
    "dapo": {"epsilon_high": 0.03},  # TRL's default loss
    "grpo": {"loss_type": "grpo", "epsilon": 0.03},
    "bnpo": {"loss_type": "bnpo", "epsilon": 0.03, "epsilon_high": 0.04, "delta": 1.05},
    "dr_grpo": {"loss_type": "dr_grpo", "epsilon": 0.03, "beta": 0.1},
    "cispo": {"loss_type": "cispo", "epsilon_high": 1.02, "beta": 0.1},
    "sapo": {"loss_type": "sapo", "beta": 0.1},
    "sequence": {"importance_sampling_level": "sequence", "epsilon": 0.01, "loss_type": "grpo"},
}
SCALES = ("group", "batch", "none")
QUICK = [
    ("sapo", "group"),
    ("dapo", "batch"),
    ("grpo", "none"),
    ("cispo", "group"),
    ("dr_grpo", "group"),
]
CASES = [
    pytest.param(loss, scale, marks=[] if (loss, scale) in QUICK else [pytest.mark.slow])
    for loss in LOSSES
    for scale in SCALES
]


def converted(folder: Path, options: dict[str, Any]) -> Config:
    lines = [f"{word}: {value}" for word, value in options.items()]
    (folder / "grpo.yaml").write_text("\n".join(["max_completion_length: 8", *lines]))
    text = convert("trl", folder / "grpo.yaml")
    assert "Without a counterpart" not in text, text
    (folder / "grpo.toml").write_text(text)
    return load_config(str(folder / "grpo.toml"), []).config


def rollout_batch() -> Batch:
    """A batch with truncated responses, and groups whose rewards have different deviations."""
    batch = random_batch(groups=GROUPS, seed=1)
    for number, rollout in enumerate(batch.rollouts):
        ids = 3 + rollout.response_ids % 20  # no padding or end token inside
        if number % 5 == 1:
            rollout.finish_reason = "length"
        else:
            ids[-1] = END
        rollout.response_ids = ids.astype(np.int32)
        rollout.temperature = 1.0
    return batch


def our_gradients(consumer: Any, batch: Batch) -> list[dict[str, torch.Tensor]]:
    """Train the batch, which the weights before it have sampled, and return the gradient of each update."""
    flat = FlatBatch.from_groups(batch.groups, batch.step, resolve_settings(config_of().algorithm))
    inputs = TokenInputs.from_batch(flat, torch.float32, consumer.policy.device)
    sampled = consumer._logprobs(flat, inputs, consumer.policy).numpy()
    for number, rollout in enumerate(flat.rollouts):
        rollout.logprobs = sampled[slice(*flat.bounds_R1[number : number + 2])]
    gradients, apply_update = [], consumer._apply_update

    def record(rate: float, loss: Any) -> Any:
        masters = consumer.masters.parameters
        gradients.append({n: p.grad.clone() for n, p in masters.items() if p.grad is not None})
        return apply_update(rate, loss)

    consumer._apply_update = record
    metrics = consumer.train(batch).metrics
    is_clipped = metrics["clip/fraction"] > 0.01  # of the tokens: the bounds are compared too
    assert is_clipped == (consumer.config.algorithm.name != "sapo")
    return gradients


@pytest.mark.parametrize(("loss", "scale"), CASES)
def test_a_converted_loss_has_the_gradients_of_trl(loss, scale, tmp_path, monkeypatch) -> None:
    pytest.importorskip("trl.trainer.grpo_trainer", reason="TRL is not installed")
    monkeypatch.setenv("TRL_EXPERIMENTAL_SILENCE", "1")
    options = {**LOSSES[loss], "scale_rewards": scale, "num_iterations": UPDATES}
    options |= {"learning_rate": 3e-3, "max_grad_norm": 1e9, "lr_scheduler_type": "constant"}
    config = converted(tmp_path, options)
    reference = tiny_model(dtype=torch.float32) if config.algorithm.kl_beta else None
    consumer = consumer_of(config, model=tiny_model(dtype=torch.float32), reference=reference)
    starts = {n: p.detach().clone() for n, p in consumer.masters.parameters.items()}
    batch = rollout_batch()
    gradients = our_gradients(consumer, batch)
    tiny_model(dtype=torch.float32).save_pretrained(tmp_path / "policy")
    theirs = run_trl(
        str(tmp_path / "policy"),
        [batch.groups],
        tmp_path,
        starts=starts,
        max_steps=UPDATES,
        per_device_train_batch_size=GROUPS * SIZE,
        **{word: value for word, value in options.items() if word != "lr_scheduler_type"},
    )
    assert len(gradients) == len(theirs.gradients) == UPDATES
    for left, right in zip(gradients, theirs.gradients, strict=True):
        assert relative_gap(left, right) < 1e-5


@pytest.mark.parametrize(
    ("options", "correction"),
    [
        ({}, ("auto", 2.0, 0.0, "engine")),
        ({"use_vllm": True}, ("sequence_mask", 3.0, 0.0, "engine")),
        (
            {
                "use_vllm": True,
                "vllm_importance_sampling_mode": "token_mask",
                "vllm_importance_sampling_clip_max": 5.0,
                "vllm_importance_sampling_clip_min": 0.5,
            },
            ("token_mask", 5.0, 0.5, "engine"),
        ),
        (
            {"use_vllm": True, "vllm_importance_sampling_correction": False},
            ("none", 2.0, 0.0, "trainer"),
        ),
    ],
)
def test_the_weight_against_vllm_is_that_of_trl(options, correction, tmp_path) -> None:
    got = converted(tmp_path, options).algorithm.correction
    assert (got.kind, got.cap, got.floor, got.newest) == correction


@pytest.mark.parametrize(
    ("options", "left"),
    [
        (
            {"loss_type": "luspo"},
            "loss_type = luspo: none of grpo, bnpo, dapo, dr_grpo, cispo, sapo",
        ),
        ({"loss_type": "cispo"}, "epsilon_high = 0.2 with cispo"),
        ({"scale_rewards": "row"}, "scale_rewards = row"),
    ],
)
def test_what_has_no_counterpart_is_said(options, left, tmp_path) -> None:
    (tmp_path / "grpo.yaml").write_text("\n".join(f"{word}: {options[word]}" for word in options))
    text = convert("trl", tmp_path / "grpo.yaml")
    assert f"#   {left}" in text
    assert "# loss_type = dapo" not in text  # a loss that nobody asked for

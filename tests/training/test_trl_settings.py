"""What `penstock convert trl` can write gives TRL's update: every objective, and every form of scale_rewards.

tests/promises/exactness compares whole runs of most objectives; here is the first update of each.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from exactness.test_updates_against_trl import GROUPS, LR, SIZE, our_updates, rollout_batches

from penstock.training.algo.method import resolve_settings
from stages.training_data import config_of, consumer_of, relative_gap, tiny_model
from stages.trl_run import run_trl

GRPO = {"name": "grpo", "aggregation": "sequence"}
KL = {"kl_in": "loss", "kl_estimator": "k3", "kl_beta": 0.1}
OBJECTIVES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "grpo": (GRPO, {}),
    "grpo_kl": (GRPO | KL, {"beta": 0.1}),
    "bnpo": (GRPO | {"aggregation": "token"}, {"loss_type": "bnpo"}),
    "dapo": (
        {"name": "dapo", "overlong_penalty": 0.0},
        {"loss_type": "dapo", "epsilon_high": 0.28, "mask_truncated_completions": True},
    ),
    "delta": (GRPO | {"dual_clip": 1.5}, {}),
    "dr_grpo": ({"name": "dr_grpo", "normalize": "group"}, {"loss_type": "dr_grpo"}),
    "gspo": (
        {"name": "gspo", "correction": {"kind": "none"}},
        {"importance_sampling_level": "sequence", "epsilon": 3e-4, "epsilon_high": 4e-4},
    ),
    "cispo": ({"name": "cispo"}, {"loss_type": "cispo", "epsilon_high": 5.0}),
}
SCALES = {"group": "group", "batch": "batch_rewards", "none": "none"}  # TRL's, ours
QUICK = {("grpo", "batch"), ("bnpo", "none"), ("delta", "group")}
CASES = [
    pytest.param(*case, marks=[] if case in QUICK else [pytest.mark.slow])
    for case in ((name, scale) for name in OBJECTIVES for scale in SCALES)
]


def near_reference() -> Any:
    """A model near the policy: TRL's k3 has no bound."""
    model = tiny_model(dtype=torch.float32)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.02 * torch.randn(parameter.shape, generator=generator)
    return model


@pytest.mark.parametrize(("objective", "scale"), CASES)
def test_the_first_update_is_trls(objective, scale, tmp_path, monkeypatch) -> None:
    pytest.importorskip("trl.trainer.grpo_trainer", reason="TRL is not installed")
    monkeypatch.setenv("TRL_EXPERIMENTAL_SILENCE", "1")
    algorithm, options = OBJECTIVES[objective]
    config = config_of(
        algorithm=algorithm | {"normalize": SCALES[scale]}, train={"lr": LR, "max_grad_norm": 1e9}
    )
    settings = resolve_settings(config.algorithm)
    model = tiny_model(dtype=torch.float32)
    reference = near_reference() if settings.needs_reference else None
    consumer = consumer_of(config, model=model, reference=reference)
    starts = {n: p.detach().clone() for n, p in consumer.masters.parameters.items()}
    batches = rollout_batches(tools=True)[:1]
    ours = our_updates(consumer, batches, temperature=1.0)
    near_reference().save_pretrained(
        tmp_path / "policy"
    )  # TRL's reference; it trains from `starts`
    theirs = run_trl(
        str(tmp_path / "policy"),
        [list(batch.groups) for batch in batches],
        tmp_path,
        starts=starts,
        **(
            {
                "learning_rate": LR, "adam_beta2": config.train.betas[1], "max_grad_norm": 1e9, "max_steps": 1,
                "beta": 0.0, "temperature": 1.0, "per_device_train_batch_size": GROUPS * SIZE, "loss_type": "grpo",
                "use_bias_correction_kl": False, "delta": settings.dual_clip, "scale_rewards": scale,
            } | options
        ),
    )  # fmt: skip
    assert ours.losses[0] == pytest.approx(theirs.losses[0], rel=1e-5, abs=1e-6)
    assert relative_gap(ours.gradients[0], theirs.gradients[0]) < 1e-5

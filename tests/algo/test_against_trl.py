"""Loss and gradient against TRL's own code on random tensors, where TRL is installed."""

from collections import defaultdict
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from penstock.algo import kl
from penstock.algo.correction import importance_weights
from penstock.algo.method import TokenView, algorithm_class, resolve_settings
from penstock.config import AlgorithmConfig

grpo_trainer = pytest.importorskip("trl.trainer.grpo_trainer", reason="TRL is not installed")

SEQUENCES, LENGTH, MAX_LENGTH = 6, 9, 12


class OneProcess:
    """The part of accelerate that TRL's loss uses, for one process."""

    num_processes = 1
    sync_gradients = True

    def gather(self, tensor):
        return tensor

    def reduce(self, tensor, reduction):
        return tensor


def trl_loss(logprobs, case, *, loss_type, low, high, beta=0.0, level="token", correction=False):
    """Compute TRL's loss of these log-probs; everything around its formula is a stand-in."""
    trainer = SimpleNamespace(
        _get_per_token_logps_and_entropies=lambda *_, **__: (
            logprobs,
            torch.zeros_like(logprobs),
            None,
        ),
        aux_loss_enabled=False,
        top_entropy_quantile=1.0,
        off_policy_mask_threshold=None,
        importance_sampling_level=level,
        beta=beta,
        args=SimpleNamespace(use_bias_correction_kl=False, delta=None, steps_per_generation=1),
        loss_type=loss_type,
        epsilon_low=low,
        epsilon_high=high,
        use_vllm=correction,
        vllm_importance_sampling_correction=correction,
        model=SimpleNamespace(training=True),
        current_gradient_accumulation_steps=1,
        max_completion_length=MAX_LENGTH,
        accelerator=OneProcess(),
        _entropy_bonus_enabled=False,
        _metrics=defaultdict(lambda: defaultdict(list)),
    )
    mask = case["mask"]
    inputs = {
        "prompt_ids": torch.zeros(SEQUENCES, 1),
        "prompt_mask": torch.ones(SEQUENCES, 1),
        "completion_ids": torch.zeros(SEQUENCES, LENGTH),
        "completion_mask": mask,
        "advantages": case["advantages"],
        "old_per_token_logps": case["proximal"],
        "ref_per_token_logps": case["reference"],
        "num_items_in_batch": mask.sum(),
        "importance_sampling_ratio": case["weights"],
    }
    return grpo_trainer.GRPOTrainer._compute_loss(trainer, None, inputs)


def our_loss(logprobs, case, config: AlgorithmConfig):
    """Compute Penstock's loss from the same numbers, laid flat."""
    settings = resolve_settings(config)
    mask = case["mask"].bool()
    sequence_N = torch.arange(SEQUENCES)[:, None].expand_as(mask)[mask]
    view = TokenView(
        logprobs_N=logprobs[mask],
        anchor_N=case["proximal"][mask],
        advantages_N=case["advantages"][:, None].expand_as(mask)[mask],
        sequence_N=sequence_N,
        num_sequences=SEQUENCES,
    )
    loss_N = algorithm_class(config.name)(settings).surrogate(view).loss_N
    if settings.correction != "none":
        loss_N = loss_N * importance_weights(
            case["proximal"][mask], case["behaviour"][mask], sequence_N, SEQUENCES, settings
        )
    if settings.kl_in_loss:
        loss_N = loss_N + settings.kl_beta * kl.estimate(
            settings.kl_estimator, logprobs[mask], case["reference"][mask]
        )
    counts_S = case["mask"].sum(1)
    if settings.aggregation == "token":
        return loss_N.sum() / counts_S.sum()
    if settings.aggregation == "sequence":
        return (loss_N / counts_S[sequence_N]).sum() / SEQUENCES
    return loss_N.sum() / (SEQUENCES * MAX_LENGTH)


def random_case(seed: int):
    generator = torch.Generator().manual_seed(seed)

    def noise():
        return torch.randn(SEQUENCES, LENGTH, generator=generator, dtype=torch.float64)

    lengths = torch.randint(1, LENGTH + 1, (SEQUENCES,), generator=generator)
    proximal = -1.5 + 0.5 * noise()
    behaviour = proximal + 0.4 * noise()
    return {
        "mask": (torch.arange(LENGTH) < lengths[:, None]).to(torch.float64),
        "advantages": torch.randn(SEQUENCES, generator=generator, dtype=torch.float64),
        "proximal": proximal,
        "behaviour": behaviour,
        "reference": proximal + 0.3 * noise(),
        "weights": (proximal - behaviour).exp().clamp(max=1.3),
        "logprobs": proximal + 0.3 * noise(),
    }


CASES = {
    "grpo": ({"name": "grpo"}, {"loss_type": "grpo", "low": 0.2, "high": 0.2}),
    "grpo_kl": (
        {"name": "grpo", "kl_beta": 0.04},
        {"loss_type": "grpo", "low": 0.2, "high": 0.2, "beta": 0.04},
    ),
    "dapo": ({"name": "dapo"}, {"loss_type": "dapo", "low": 0.2, "high": 0.28}),
    "dr_grpo": ({"name": "dr_grpo"}, {"loss_type": "dr_grpo", "low": 0.2, "high": 0.2}),
    "gspo": (
        {"name": "gspo", "correction": {"kind": "none"}},
        {"loss_type": "grpo", "low": 3e-4, "high": 4e-4, "level": "sequence"},
    ),
    "gspo_wide": (
        {"name": "gspo", "clip_low": 0.2, "clip_high": 0.2, "correction": {"kind": "none"}},
        {"loss_type": "grpo", "low": 0.2, "high": 0.2, "level": "sequence"},
    ),
    "cispo": ({"name": "cispo"}, {"loss_type": "cispo", "low": 0.2, "high": 5.0}),
    "truncated_importance": (
        {"name": "grpo", "correction": {"kind": "token_truncate", "cap": 1.3}},
        {"loss_type": "grpo", "low": 0.2, "high": 0.2, "correction": True},
    ),
}


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("name", list(CASES))
def test_loss_and_gradient_are_trls(name, seed) -> None:
    fields, options = CASES[name]
    case = random_case(seed)
    losses, gradients = [], []
    for function in (
        lambda tensor: our_loss(tensor, case, AlgorithmConfig(**fields)),
        lambda tensor: trl_loss(tensor, case, **options),
    ):
        logprobs = case["logprobs"].clone().requires_grad_()
        loss = function(logprobs)
        losses.append(float(loss.detach()))
        gradients.append(torch.autograd.grad(loss, logprobs)[0] * case["mask"])
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)
    assert gradients[1].abs().sum() > 0
    np.testing.assert_allclose(gradients[0], gradients[1], rtol=1e-6, atol=1e-12)


@pytest.mark.parametrize("seed", range(3))
def test_rloo_is_trls(seed) -> None:
    rloo_trainer = pytest.importorskip("trl.trainer.rloo_trainer")
    case = random_case(seed)
    mask = case["mask"]
    config = AlgorithmConfig(name="rloo", correction={"kind": "none"}, decoupled=False)
    trainer = SimpleNamespace(
        aux_loss_enabled=False,
        epsilon_low=resolve_settings(config).clip_low,
        epsilon_high=resolve_settings(config).clip_high,
        model=SimpleNamespace(training=True),
        accelerator=OneProcess(),
        _metrics=defaultdict(lambda: defaultdict(list)),
    )
    near = case["proximal"] + 0.1 * (case["logprobs"] - case["proximal"])  # some inside the clip
    gradients = []
    for function in ("ours", "trl"):
        logprobs = near.clone().requires_grad_()
        if function == "ours":
            loss = our_loss(logprobs, case, config)
        else:
            scored = (logprobs, torch.zeros_like(logprobs), None)
            trainer._get_per_token_logps_and_entropies = lambda *_, scored=scored, **__: scored
            inputs = {
                "prompt_ids": torch.zeros(SEQUENCES, 1),
                "prompt_mask": torch.ones(SEQUENCES, 1),
                "completion_ids": torch.zeros(SEQUENCES, LENGTH),
                "completion_mask": mask,
                "advantages": case["advantages"],
                "old_logps": (case["proximal"] * mask).sum(1),
            }
            loss = rloo_trainer.RLOOTrainer._compute_loss(trainer, None, inputs)
        gradients.append(torch.autograd.grad(loss, logprobs)[0] * mask)
    assert gradients[1].abs().sum() > 0
    np.testing.assert_allclose(gradients[0], gradients[1], rtol=1e-6, atol=1e-12)

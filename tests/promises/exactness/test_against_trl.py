"""Loss and gradient against TRL's own code on random tensors, where TRL is installed."""

from collections import defaultdict
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from penstock.config import AlgorithmConfig
from penstock.training.algo import kl
from penstock.training.algo.method import TokenView, algorithm_class, resolve_settings
from penstock.training.algo.ratios import importance_weights

SEQUENCES, LENGTH, MAX_LENGTH = 6, 9, 12


class OneProcess:
    """The part of accelerate that TRL's loss uses, for one process."""

    num_processes = 1
    sync_gradients = True

    def gather(self, tensor):
        return tensor

    def reduce(self, tensor, reduction):
        return tensor


def trl_loss(name, logprobs, case, **fields):
    """Compute the loss of a TRL trainer from these log-probs; all around its formula is a stand-in."""
    module = pytest.importorskip(f"trl.trainer.{name}_trainer", reason="TRL is not installed")
    trainer = SimpleNamespace(
        _get_per_token_logps_and_entropies=lambda *_, **__: (
            logprobs,
            torch.zeros_like(logprobs),
            None,
        ),
        aux_loss_enabled=False,
        model=SimpleNamespace(training=True),
        accelerator=OneProcess(),
        _metrics=defaultdict(lambda: defaultdict(list)),
        **fields,
    )
    mask = case["mask"]
    inputs = {
        "prompt_ids": torch.zeros(SEQUENCES, 1),
        "prompt_mask": torch.ones(SEQUENCES, 1),
        "completion_ids": torch.zeros(SEQUENCES, LENGTH),
        "completion_mask": mask,
        "advantages": case["advantages"],
        "old_per_token_logps": case["proximal"],
        "old_logps": (case["proximal"] * mask).sum(1),
        "ref_per_token_logps": case["reference"],
        "num_items_in_batch": mask.sum(),
        "importance_sampling_ratio": case["weights"],
    }
    return getattr(module, f"{name.upper()}Trainer")._compute_loss(trainer, None, inputs)


def grpo_loss(logprobs, case, *, loss_type, low, high, beta=0.0, level="token", correction=False):
    return trl_loss(
        "grpo",
        logprobs,
        case,
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
        current_gradient_accumulation_steps=1,
        max_completion_length=MAX_LENGTH,
        _entropy_bonus_enabled=False,
    )


def rloo_loss(logprobs, case, *, low, high):
    return trl_loss("rloo", logprobs, case, epsilon_low=low, epsilon_high=high)


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
    "grpo": (
        {"name": "grpo", "aggregation": "sequence"},
        {"loss_type": "grpo", "low": 0.2, "high": 0.2},
    ),
    "grpo_kl": (
        {"name": "grpo", "aggregation": "sequence", "kl_beta": 0.04},
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
        {
            "name": "grpo",
            "aggregation": "sequence",
            "correction": {"kind": "token_truncate", "cap": 1.3},
        },
        {"loss_type": "grpo", "low": 0.2, "high": 0.2, "correction": True},
    ),
}


def loss_and_gradient(function, logprobs, mask):
    logprobs = logprobs.clone().requires_grad_()
    loss = function(logprobs)
    return float(loss.detach()), torch.autograd.grad(loss, logprobs)[0] * mask


def assert_same(case, logprobs, config: AlgorithmConfig, theirs) -> torch.Tensor:
    """Assert that both losses and gradients agree; return the gradient."""
    mask = case["mask"]
    loss, gradient = loss_and_gradient(lambda x: our_loss(x, case, config), logprobs, mask)
    expected, expected_gradient = loss_and_gradient(theirs, logprobs, mask)
    assert loss == pytest.approx(expected, rel=1e-6)
    assert expected_gradient.abs().sum() > 0
    np.testing.assert_allclose(gradient, expected_gradient, rtol=1e-6, atol=1e-12)
    return gradient


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("name", list(CASES))
def test_loss_and_gradient_are_trls(name, seed) -> None:
    fields, options = CASES[name]
    case = random_case(seed)
    config = AlgorithmConfig(**fields)
    assert_same(case, case["logprobs"], config, lambda x: grpo_loss(x, case, **options))


@pytest.mark.parametrize("fields", [{}, {"correction": {"kind": "none"}, "decoupled": False}])
@pytest.mark.parametrize("seed", range(3))
def test_rloo_is_trls(seed, fields) -> None:
    case = random_case(seed)
    config = AlgorithmConfig(name="rloo", **fields)
    near = case["proximal"] + 0.1 * (case["logprobs"] - case["proximal"])  # some inside the clip
    case["behaviour"] = case["proximal"]  # on-policy: the default correction weighs nothing
    gradient = assert_same(case, near, config, lambda x: rloo_loss(x, case, low=0.2, high=0.2))
    assert (gradient.abs().sum(1) == 0).sum() < SEQUENCES  # not every response is clipped

"""Whole updates against TRL's own GRPOTrainer in float32: loss, gradient, and the weights of five batches.

Both train the same rollouts on the same weights: padded rows there, packs here. Advantages, masks, KL,
temperature, accumulation, clipping and AdamW are each side's own.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from penstock.training.adapters import add_adapters
from penstock.training.algo.method import resolve_settings
from penstock.training.flat_batch import FlatBatch
from penstock.training.objective import TokenInputs
from penstock.training.optimizer import Outcome
from penstock.types import Batch
from stages.training_data import config_of, consumer_of, random_batch, relative_gap, tiny_model
from stages.trl_run import END, Updates, run_trl

BATCHES, GROUPS, SIZE = 5, 6, 4
LR = 3e-3

# algorithm, TRL's options for it
METHODS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "grpo": ({"name": "grpo", "aggregation": "sequence"}, {"loss_type": "grpo"}),
    "dapo": (
        {"name": "dapo", "overlong_penalty": 0.0},
        {"loss_type": "dapo", "epsilon_high": 0.28, "mask_truncated_completions": True},
    ),
    "dr_grpo": ({"name": "dr_grpo"}, {"loss_type": "dr_grpo", "scale_rewards": "none"}),
    "gspo": (
        {"name": "gspo"},
        {"importance_sampling_level": "sequence", "epsilon": 3e-4, "epsilon_high": 4e-4},
    ),
    "gspo_wide": (
        {"name": "gspo", "clip_low": 0.2, "clip_high": 0.2},
        {"importance_sampling_level": "sequence", "epsilon": 0.2},
    ),
    "cispo": ({"name": "cispo"}, {"loss_type": "cispo", "epsilon_high": 5.0}),
    "rloo": ({"name": "rloo", "dual_clip": 0.0}, {"rloo": True}),  # RLOOTrainer has no dual clip
}
PLAIN: tuple[dict[str, Any], dict[str, Any]] = ({}, {})
# train settings and more of ours, TRL's
WAYS = {
    "plain": PLAIN,
    "kl": ({"algorithm": {"kl_in": "loss", "kl_estimator": "k3", "kl_beta": 0.1}}, {"beta": 0.1}),
    "kl_weighted": (
        {"algorithm": {"kl_in": "loss", "kl_estimator": "k3_weighted", "kl_beta": 0.1}},
        {"beta": 0.1, "use_bias_correction_kl": True},
    ),
    "kl_in_reward": ({"algorithm": {"kl_beta": 0.1}}, {"beta": 0.1}),
    "temperature": ({"temperature": 0.6}, {"temperature": 0.6}),
    "accumulation": (
        {"train": {"micro_batch_tokens": 20}},
        {"per_device_train_batch_size": 4, "gradient_accumulation_steps": GROUPS},
    ),
    "clipped_norm": ({"train": {"max_grad_norm": 0.05}}, {"max_grad_norm": 0.05}),
    "epochs": (
        {"train": {"num_epochs": 3}},
        {"num_iterations": 3, "max_steps": 3 * BATCHES},
    ),
    "mini_batches": (
        {"train": {"mini_batches": 3, "groups_per_step": GROUPS}},
        {
            "per_device_train_batch_size": 4,
            "gradient_accumulation_steps": 2,
            "steps_per_generation": GROUPS,
            "max_steps": 3 * BATCHES,
        },
    ),
    "lora": ({"model": {"lora": {"rank": 4, "alpha": 8.0}}}, {}),
    "lora_kl": (
        {
            "model": {"lora": {"rank": 4, "alpha": 8.0}},
            "algorithm": {"kl_in": "loss", "kl_estimator": "k3", "kl_beta": 0.1},
        },
        {"beta": 0.1},
    ),
}
# TRL divides a token mean by the mean number of tokens of all updates of a batch, we by this update's:
# no token-mean method is compared with several updates of different groups. An update without any
# gradient is skipped here and moved by momentum there: GSPO's narrow clip and RLOO are not used for epochs.
QUICK = [("grpo", "plain"), ("gspo", "plain"), ("rloo", "kl_in_reward")]
LONG = [
    *[
        (method, "plain")
        for method in METHODS
        if method not in ("rloo", "gspo_wide", "grpo", "gspo")
    ],
    *[("grpo", way) for way in ("kl_weighted", "epochs")],
    *[("grpo", way) for way in ("kl", "accumulation", "clipped_norm", "mini_batches", "lora_kl")],
    *[("grpo", way) for way in ("temperature", "lora")],
    ("gspo_wide", "plain"),
    *[("gspo", way) for way in ("mini_batches", "temperature")],
    *[("dapo", way) for way in ("accumulation", "epochs", "kl")],
    *[("cispo", way) for way in ("accumulation", "epochs", "lora")],
    *[("rloo", way) for way in ("accumulation", "lora", "temperature")],
    ("gspo_wide", "epochs"),
    ("dr_grpo", "mini_batches"),
]
CASES = [*QUICK, *[pytest.param(*case, marks=pytest.mark.slow) for case in LONG]]


def rollout_batches(tools: bool) -> list[Batch]:
    """Make batches with truncated responses and groups without variance, and tool tokens if asked."""
    made = [random_batch(step, groups=GROUPS, seed=step) for step in range(1, BATCHES + 1)]
    generator = np.random.default_rng(0)
    for batch in made:
        for number, rollout in enumerate(batch.rollouts):
            ids = 3 + rollout.response_ids % 20  # no padding or end token inside
            if number % 5 == 1:
                rollout.finish_reason = "length"
            else:
                ids[-1] = END
            rollout.response_ids = ids.astype(np.int32)
            if tools and number % 7 == 2 and len(ids) > 2:
                rollout.loss_mask = np.append(generator.random(len(ids) - 1) < 0.6, True)
    return made


def our_updates(consumer: Any, batches: list[Batch], temperature: float) -> Updates:
    """Train the batches; each is sampled, as far as its log-probs tell, by the weights before it."""
    made = Updates()
    apply_update = consumer._apply_update

    def record(rate: float, loss: Callable[[], float]) -> Outcome:
        masters = consumer.masters.parameters
        made.gradients.append({n: p.grad.clone() for n, p in masters.items() if p.grad is not None})
        made.losses.append(loss())
        result: Outcome = apply_update(rate, loss)
        made.weights.append({n: p.detach().clone() for n, p in masters.items()})
        return result

    consumer._apply_update = record
    for batch in batches:
        for rollout in batch.rollouts:
            rollout.temperature = temperature
        unmasked = resolve_settings(config_of().algorithm)
        flat = FlatBatch.from_groups(batch.groups, batch.step, unmasked)
        inputs = TokenInputs.from_batch(flat, torch.float32, consumer.policy.device)
        own = consumer._logprobs(flat, inputs, consumer.policy).numpy()
        for number, rollout in enumerate(flat.rollouts):
            first, last = flat.bounds_R1[number : number + 2]
            rollout.logprobs = np.zeros(len(rollout.response_ids), dtype=np.float32)
            rollout.logprobs[rollout.loss_mask] = own[first:last]
        metrics = consumer.train(batch).metrics
        made.clipped = max(made.clipped, metrics["clip/fraction"])
    return made


def cosine_and_norms(left: dict[str, Any], right: dict[str, Any]) -> tuple[float, float]:
    """Return the cosine of two changes of the weights, and the ratio of their norms."""
    assert left.keys() == right.keys()
    flat = [torch.cat([side[name].flatten().double() for name in left]) for side in (left, right)]
    cosine = torch.nn.functional.cosine_similarity(flat[0], flat[1], dim=0)
    return float(cosine), float(flat[0].norm() / flat[1].norm())


def with_adapters(model: Any, config: Any) -> tuple[Any, Any]:
    """Return the model with adapters as a run adds them, and the same adapters for TRL."""
    import peft

    add_adapters(model, config)
    names = sorted({n.split(".lora_")[0] for n, _ in model.named_parameters() if ".lora_" in n})
    return model, peft.LoraConfig(
        r=config.rank, lora_alpha=config.alpha, target_modules=names, task_type="CAUSAL_LM"
    )


@pytest.mark.parametrize(("method", "way"), CASES)
def test_five_batches_change_the_weights_as_trl_does(method, way, tmp_path, monkeypatch) -> None:
    pytest.importorskip("trl.trainer.grpo_trainer", reason="TRL is not installed")
    monkeypatch.setenv("TRL_EXPERIMENTAL_SILENCE", "1")
    algorithm, options = METHODS[method]
    ours, theirs = WAYS[way]
    temperature = ours.get("temperature", 1.0)
    config = config_of(
        algorithm=algorithm | ours.get("algorithm", {}),
        train={"lr": LR, "max_grad_norm": 1e9} | ours.get("train", {}),
        model=ours.get("model", {}),
    )
    settings = resolve_settings(config.algorithm)
    model, reference = tiny_model(dtype=torch.float32), None
    adapters = None
    if "lora" in way:
        model, adapters = with_adapters(model, config.model.lora)
    elif settings.needs_reference:
        reference = tiny_model(dtype=torch.float32)
    consumer = consumer_of(config, model=model, reference=reference)
    batches = rollout_batches(tools=method != "rloo")
    starts = {n: p.detach().clone() for n, p in consumer.masters.parameters.items()}
    orders = [
        np.concatenate(consumer._updates(batch)[: config.train.mini_batches]) for batch in batches
    ]
    made = our_updates(consumer, batches, temperature)
    tiny_model(dtype=torch.float32).save_pretrained(tmp_path / "policy")
    of_grpo = {"loss_type": "grpo", "use_bias_correction_kl": False, "delta": settings.dual_clip}
    wanted = run_trl(
        str(tmp_path / "policy"),
        [[batch.groups[n] for n in order] for batch, order in zip(batches, orders, strict=True)],
        tmp_path,
        adapters=adapters,
        starts=starts,
        **(
            {
                "learning_rate": LR, "adam_beta2": config.train.betas[1], "max_grad_norm": 1e9,
                "max_steps": BATCHES, "beta": 0.0, "temperature": 1.0, "per_device_train_batch_size": GROUPS * SIZE,
            } | ({} if method == "rloo" else of_grpo) | options | theirs
        ),
    )  # fmt: skip
    assert len(made.weights) == len(wanted.weights)
    if way != "clipped_norm":
        assert made.losses[0] == pytest.approx(wanted.losses[0], rel=1e-5, abs=1e-6)
        for left, right in zip(made.gradients, wanted.gradients, strict=True):
            assert relative_gap(left, right) < 1e-5
    before = (starts, starts)
    for left, right in zip(made.weights, wanted.weights, strict=True):
        changes = [
            {name: after[name] - old[name] for name in starts}
            for after, old in zip((left, right), before, strict=True)
        ]
        cosine, ratio = cosine_and_norms(*changes)
        assert cosine > 1 - 1e-7
        assert ratio == pytest.approx(1.0, abs=1e-5)
        before = (left, right)
    if way == "epochs" and method != "cispo":
        assert made.clipped > 0.01  # of the tokens of one batch

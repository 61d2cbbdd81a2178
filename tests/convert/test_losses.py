"""A converted config has the loss and the gradient of the system it comes from, by that system's formulas."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from penstock.config import Config
from penstock.config.source import load_config
from penstock.convert.write import convert
from penstock.types import Batch, Score
from stages.training_data import Gradients, consumer_of, random_batch, relative_gap, tiny_model

XTUNER = """
trainer = RLColocateTrainerConfig(
    train_worker_cfg=WorkerConfig(loss_cfg=GRPOLossConfig({loss}), optim_cfg=AdamWConfig(lr=1e-6)),
    rollout_config=RolloutConfig(), advantage_estimator_config={advantages}(), total_train_steps=4,
    agent_loop_manager_cfg=AgentLoopManagerConfig(tasks=TaskSpecConfig(
        agent_loop_config=SingleTurnAgentLoopConfig(sample_params=SampleParams(max_tokens=8)),
        sampler_config=SamplerConfig(prompt_repeat_k=4))),
)
"""
CLIP = "policy_loss_cfg=dict(cliprange_low=0.2, cliprange_high=0.28, clip_ratio_c=10.0)"
VERL = "python -m verl.trainer.main_ppo data.max_response_length=8 actor_rollout_ref.rollout.n=4 "
OPENRLHF = "python -m openrlhf.cli.train_ppo_ray --generate_max_len 8 --n_samples_per_prompt 4 "
COLOSSALAI = "python rl_example.py -mnt 32 -b vllm -g 4 -a "
# file, advantage, mean, upper clip, dual clip, weight of the KL term in the loss, old log-probs
CASES: dict[str, tuple[str, str, str, float, float, float, str]] = {
    "colossalai GRPO": (COLOSSALAI + "GRPO", "grpo", "samples", 0.2, 0, 0.01, "engine"),
    "colossalai DAPO": (COLOSSALAI + "DAPO", "grpo", "tokens", 0.28, 0, 0.0, "engine"),
    "colossalai RLOO": (COLOSSALAI + "RLOO", "rloo", "samples", 0.2, 0, 0.01, "engine"),
    "colossalai PPB": (COLOSSALAI + "REINFORCE_PPB -kl 0", "ppb", "samples", 0.2, 0, 0, "engine"),
    "verl grpo": (
        VERL + "algorithm.adv_estimator=grpo",
        *("grpo", "tokens", 0.2, 3.0, 0.0, "trainer"),
    ),
    "verl rloo": (
        VERL + "algorithm.adv_estimator=rloo actor_rollout_ref.actor.use_kl_loss=True",
        "rloo",
        "tokens",
        0.2,
        3.0,
        0.001,
        "trainer",
    ),
    **{
        f"verl {mode}": (
            VERL
            + f"algorithm.adv_estimator=grpo actor_rollout_ref.actor.policy_loss.loss_mode={mode}",
            *("grpo", mean, 0.2, 0, 0.0, "trainer"),
        )
        for mode, mean in {
            "gspo": "samples",
            "geo_mean": "samples",
            "sapo": "samples",
            "cispo": "tokens",
        }.items()
    },
    "openrlhf group_norm": (
        OPENRLHF + "--advantage_estimator group_norm --init_kl_coef 0",
        "grpo",
        "tokens",
        0.2,
        0,
        0.0,
        "trainer",
    ),
    "openrlhf reinforce_baseline": (
        OPENRLHF + "--algo.advantage.estimator reinforce_baseline --algo.kl.init_coef 0",
        "ppb",
        "tokens",
        0.2,
        0,
        0.0,
        "trainer",
    ),
    "openrlhf rloo": (
        OPENRLHF + "--advantage_estimator rloo --use_kl_loss --init_kl_coef 0.1 --kl_estimator k3",
        "rloo",
        "tokens",
        0.2,
        0,
        0.1,
        "trainer",
    ),
    "xtuner grpo": (
        XTUNER.format(
            loss=f"{CLIP}, use_kl_loss=True, kl_loss_coef=0.1, kl_loss_type='low_var_kl'",
            advantages="GRPOAdvantageConfig",
        ),
        "grpo",
        "tokens",
        0.28,
        10.0,
        0.1,
        "trainer",
    ),
    "xtuner rloo": (
        XTUNER.format(loss=CLIP, advantages="RLOOAdvantageConfig"),
        "rloo",
        "tokens",
        0.28,
        10.0,
        0.0,
        "trainer",
    ),
}


def converted(system: str, text: str, folder: Path) -> Config:
    file = folder / ("run.py" if system == "xtuner" else "run.sh")
    file.write_text(text)
    toml = folder / "run.toml"
    toml.write_text(convert(system, file))
    small = ["engine.name=transformers", "engine.options={}", "train.groups_per_step=6"]
    small += ["launch.num_consumers=1", "train.mini_batches=1", "launch.colocate=false"]
    return load_config(toml, small).config


def rollout_batch(scale: float) -> Batch:
    """Rollouts with rewards of the system's scale, none of them truncated."""
    batch = random_batch(groups=6, seed=1)
    for rollout in batch.rollouts:
        rollout.score = Score(rollout.reward * scale, answer_ok=True, format_ok=True)
    return batch


def logprobs_of(model: Any, rollout: Any) -> torch.Tensor:
    ids = torch.tensor([[*rollout.prompt_ids, *rollout.response_ids]])
    start = len(rollout.prompt_ids)
    scores = model(ids).logits[0, start - 1 : -1].log_softmax(-1)
    return scores.gather(1, ids[0, start:, None])[:, 0]


def near_model() -> Any:
    """A reference model as training has it: the policy is still close to it."""
    model = tiny_model()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.03)
    return model


# What each system adds to the deviation of a group; here it is ColossalAI's.
EPSILON = {"colossalai": 1e-4, "verl": 1e-6, "openrlhf": 1e-9, "xtuner": 1e-8}


def advantages_of(kind: str, rewards: torch.Tensor, epsilon: float) -> torch.Tensor:
    centred = rewards - rewards.mean()
    if kind == "grpo":
        return centred / (rewards.std() + epsilon)
    return centred * len(rewards) / (len(rewards) - 1) if kind == "rloo" else centred


def loss_of(
    batch: Batch,
    model: Any,
    reference: Any,
    case: tuple[str, str, str, float, float, float, str],
    epsilon: float,
) -> torch.Tensor:
    _, kind, mean, high, dual, beta, old = case
    logprobs = [logprobs_of(model, rollout) for rollout in batch.rollouts]
    advantages: list[torch.Tensor] = []
    for group in batch.groups:
        rewards = torch.tensor([r.reward for r in group.rollouts], dtype=torch.float64)
        shares = advantages_of(kind, rewards, epsilon)
        advantages += [
            a.expand(len(r.response_ids)) for a, r in zip(shares, group.rollouts, strict=True)
        ]
    if kind == "ppb":  # normalised over all tokens
        every = torch.cat(advantages)
        advantages = [(a - every.mean()) / every.std(correction=0) for a in advantages]
    losses = []
    for rollout, new, advantage in zip(batch.rollouts, logprobs, advantages, strict=True):
        before = (
            torch.tensor(rollout.logprobs, dtype=torch.float64) if old == "engine" else new.detach()
        )
        ratio = (new - before).exp()
        gain = torch.minimum(ratio * advantage, ratio.clamp(0.8, 1 + high) * advantage)
        if dual:
            gain = torch.where(advantage < 0, torch.maximum(gain, dual * advantage), gain)
        loss = -gain
        if beta:
            gap = logprobs_of(reference, rollout).detach() - new
            loss = loss + beta * (gap.exp() - gap - 1)
        losses.append(loss)
    if mean == "samples":
        return torch.stack([loss.mean() for loss in losses]).mean()
    return torch.cat(losses).mean()


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_a_converted_config_trains_with_the_loss_of_its_system(name: str, tmp_path: Path) -> None:
    case = CASES[name]
    config = converted(name.split()[0], case[0], tmp_path)
    weight = config.tasks["train"].rewards[0].weight
    assert weight == (10 if "colossalai" in name else 1)
    batch = rollout_batch(weight)
    reference = near_model() if config.algorithm.kl_beta else None
    consumer = consumer_of(config, model=tiny_model(), reference=reference)
    gradients = Gradients(consumer)
    metrics = consumer.train(batch).metrics
    model = tiny_model()
    epsilon = EPSILON[name.split()[0]]
    loss = loss_of(batch, model, reference, case, epsilon)
    loss.backward()
    theirs = {n: p.grad for n, p in model.named_parameters() if n in gradients.updates[0]}
    near = 1e-5 if case[1] != "grpo" or epsilon == 1e-4 else 3e-4
    assert relative_gap(gradients.updates[0], theirs) < near
    if "loss_mode" not in case[0]:  # whose gradient is compared: their losses have other constants
        assert metrics["loss/policy"] == pytest.approx(float(loss.detach()), abs=near / 10)

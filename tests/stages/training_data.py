"""Tiny models and batches for the trainer's tests."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from penstock.config import Config
from penstock.model import packed_attention
from penstock.training.consumer import Consumer
from penstock.training.optimizer import Outcome
from penstock.types import Batch, Group, Prompt, Rollout, Score, Status, VersionSegment

VOCABULARY = 23


_MADE: dict[str, Any] = {}  # a copy of a model takes a fifth of the time that making it takes


def tiny_model(kind: str = "Qwen3", *, seed: int = 0, dtype=torch.float64, **fields: Any) -> Any:
    """Make a random two-layer model of an architecture."""
    key = repr((kind, seed, dtype, fields))
    if key not in _MADE:
        _MADE[key] = _make_model(kind, seed, dtype, fields)
    return copy.deepcopy(_MADE[key])


def _make_model(kind: str, seed: int, dtype: torch.dtype, fields: dict[str, Any]) -> Any:
    import transformers

    packed_attention.register()
    settings = {
        "vocab_size": VOCABULARY,
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "max_position_embeddings": 64,
        "tie_word_embeddings": True,
        "pad_token_id": 0,
    } | fields
    torch.manual_seed(seed)
    config = getattr(transformers, f"{kind}Config")(**settings)
    model = transformers.AutoModelForCausalLM.from_config(config)
    with torch.no_grad():  # away from the near-uniform start, so that gradients are not tiny
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.normal_(std=0.3)
    return model.to(dtype).eval()


def exact_model(kind: str = "Qwen3", **fields: Any) -> Any:
    """Make a tiny model whose norms keep all digits of float64: transformers' own round to float32."""
    model = tiny_model(kind, **fields)
    for module in model.modules():
        if type(module).__name__.endswith("RMSNorm"):
            module.forward = functools.partial(_exact_norm, module)
    return model


def _exact_norm(norm: Any, x: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.rms_norm(x, norm.weight.shape, norm.weight, norm.variance_epsilon)


def rollout(name: str, prompt_ids, length: int, generator, **fields: Any) -> Rollout:
    values: dict[str, Any] = {
        "response_ids": generator.integers(1, VOCABULARY, length).astype(np.int32),
        "logprobs": (-3.0 + 0.3 * generator.standard_normal(length)).astype(np.float32),
        "loss_mask": np.ones(length, dtype=bool),
        "segments": (VersionSegment(0, length),) if length else (),
        "finish_reason": "stop",
        "status": Status.COMPLETED,
        "score": Score(float(generator.integers(0, 2)), answer_ok=True, format_ok=True),
        "temperature": 1.0,
    }
    return Rollout(rollout_id=name, prompt_ids=prompt_ids, seed=0, **(values | fields))


def random_group(number: int, generator, *, size: int = 4, **fields: Any) -> Group:
    prompt_ids = generator.integers(1, VOCABULARY, int(generator.integers(2, 6))).astype(np.int32)
    rollouts = [
        rollout(
            f"train:{number}.{k}", prompt_ids, int(generator.integers(1, 9)), generator, **fields
        )
        for k in range(size)
    ]
    return Group(
        group_id=f"train:{number}",
        task="train",
        cursor=number,
        prompt=Prompt(f"data:{number}", (), prompt_ids),
        rollouts=rollouts,
    )


def random_batch(step: int = 1, *, groups: int = 6, seed: int = 0, **fields: Any) -> Batch:
    generator = np.random.default_rng(seed)
    made = tuple(random_group(number, generator, **fields) for number in range(groups))
    return Batch(step=step, groups=made)


def tricky_batch(seed: int = 0) -> Batch:
    """Make a batch with mixed temperatures, group sizes, tool tokens, and truncated, empty or equal responses."""
    generator = np.random.default_rng(seed)
    batch = random_batch(groups=6, seed=seed)
    for number, group in enumerate(batch.groups):
        for rollout_ in group.rollouts:
            rollout_.temperature = (0.5, 1.0, 1.7)[number % 3]
    tool = batch.groups[0].rollouts[0]
    tool.loss_mask = generator.random(len(tool.response_ids)) < 0.5
    batch.groups[1].rollouts[0].finish_reason = "length"
    for rollout_ in batch.groups[2].rollouts:  # all masked
        rollout_.finish_reason = "length"
    for rollout_ in batch.groups[3].rollouts:  # no variance
        rollout_.score = Score(1.0)
    del batch.groups[4].rollouts[1:]  # a group of one
    batch.groups[5].rollouts[0] = rollout("empty", batch.groups[5].prompt.token_ids, 0, generator)
    return batch


def config_of(**sections: Any) -> Config:
    base: dict[str, Any] = {"train": {"lr": 1e-2}, "sampling": {"max_tokens": 8}}
    for name, fields in sections.items():
        base[name] = base.get(name, {}) | fields
    return Config.model_validate(base)


def consumer_of(config: Config, *, model: Any = None, **parts: Any) -> Consumer:
    return Consumer(config, model or tiny_model(), total_steps=10, **parts)


class Gradients:
    """Records the gradient of each update instead of applying it; `move` may apply it in its own way."""

    def __init__(
        self, consumer: Consumer, move: Callable[[Any, dict[str, torch.Tensor]], None] | None = None
    ) -> None:
        self.updates: list[dict[str, torch.Tensor]] = []
        self._consumer, self._move = consumer, move
        consumer._apply_update = self
        if consumer.critic is not None:
            consumer.critic.apply_update = self._of_critic  # type: ignore[method-assign]

    def __call__(self, rate: float, loss: Callable[[], float]) -> Outcome:
        self.updates.append(self._gradients(self._consumer.masters.parameters))
        self._consumer.optimizer.zero_grad()
        if self._move is not None:
            self._move(self._consumer.policy.model, self.updates[-1])
        return lambda: (0.0, True)

    def _of_critic(self, rate: float) -> Outcome:
        critic = self._consumer.critic
        assert critic is not None
        gradients = self._gradients(critic.masters.parameters)
        self.updates[-1] |= {f"critic/{name}": gradient for name, gradient in gradients.items()}
        critic.drop_gradients()
        if self._move is not None:
            self._move(critic.policy.model, gradients)
        return lambda: (0.0, True)

    def _gradients(self, parameters: dict[str, Any]) -> dict[str, torch.Tensor]:
        return {
            name: torch.zeros_like(p) if p.grad is None else p.grad.clone()
            for name, p in parameters.items()
        }


def gradient_of(config: Config, batch: Batch, **parts: Any) -> dict[str, torch.Tensor]:
    """Return the gradient of the first update on `batch`, before clipping."""
    consumer = consumer_of(config, **parts)
    taken = Gradients(consumer)
    consumer.train(batch)
    return taken.updates[0]


def relative_gap(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> float:
    """Return the distance of two gradients over the size of the second."""
    assert left.keys() == right.keys()
    distance = sum(float((left[name] - right[name]).square().sum()) for name in left) ** 0.5
    size = sum(float(right[name].square().sum()) for name in right) ** 0.5
    return distance / size if size else distance


def from_disk(folder, *, total_steps: int = 10, **sections) -> Consumer:
    model = {"path": str(folder)} | sections.pop("model", {})
    return Consumer.from_config(config_of(model=model, **sections), total_steps=total_steps)


def batches(count: int):
    return [random_batch(step, seed=step) for step in range(1, count + 1)]

"""TRL's GRPOTrainer or RLOOTrainer on given rollouts: gradient, loss and weights after each update."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from penstock.types import Group
from stages.training_data import VOCABULARY

END = 2  # the token that ends a response


@dataclass
class Updates:
    """What a trainer did in each update, by the names of the plain model."""

    gradients: list[dict[str, Tensor]] = field(default_factory=list)
    weights: list[dict[str, Tensor]] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    clipped: float = 0.0  # largest share of clipped tokens in a batch


def word_tokenizer() -> Any:
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    words = {f"w{number}": number for number in range(VOCABULARY)}
    plain = Tokenizer(models.WordLevel(words, unk_token="w1"))
    return PreTrainedTokenizerFast(
        tokenizer_object=plain, pad_token="w0", unk_token="w1", eos_token=f"w{END}"
    )


def run_trl(
    model: str,
    batches: Sequence[Sequence[Group]],
    folder: Path,
    *,
    starts: dict[str, Tensor],
    adapters: Any = None,
    rloo: bool = False,
    **options: Any,
) -> Updates:
    """Train one generation batch after the other, in the order of its groups.

    `starts` are the trained parameters before the first update; `adapters` is a LoRA config. The
    RLOOTrainer has no mask for tool tokens.
    """
    from datasets import Dataset
    from transformers import TrainerCallback
    from trl import GRPOConfig, GRPOTrainer, RLOOConfig, RLOOTrainer
    from trl.trainer import grpo_trainer, rloo_trainer

    groups = {f"{n}.{g}": group for n, batch in enumerate(batches) for g, group in enumerate(batch)}
    made = Updates()

    def chosen_by(prompts: list[str]) -> list[Any]:
        size = len(groups[prompts[0]].rollouts)
        return [r for prompt in prompts[::size] for r in groups[prompt].rollouts]

    def rollouts(prompts: list[str], _trainer: Any) -> dict[str, list[Any]]:
        chosen = chosen_by(prompts)
        return {
            "prompt_ids": [r.prompt_ids.tolist() for r in chosen],
            "completion_ids": [r.response_ids.tolist() for r in chosen],
            "logprobs": [r.logprobs.tolist() for r in chosen],
            "env_mask": [r.loss_mask.astype(int).tolist() for r in chosen],
        }

    def trained(model: Any) -> dict[str, Any]:
        named = model.named_parameters()
        return {n.removeprefix("base_model.model."): p for n, p in named if p.requires_grad}

    class Record(TrainerCallback):
        def on_pre_optimizer_step(self, *_: Any, model: Any, **__: Any) -> None:
            named = trained(model).items()
            made.gradients.append({n: p.grad.clone() for n, p in named if p.grad is not None})

        def on_step_end(self, *_: Any, model: Any, **__: Any) -> None:
            made.weights.append({n: p.detach().clone() for n, p in trained(model).items()})

    kind, settings_kind = (RLOOTrainer, RLOOConfig) if rloo else (GRPOTrainer, GRPOConfig)

    class Recorded(kind):  # type: ignore[misc, valid-type]
        def _compute_loss(self, model: Any, inputs: Any) -> Tensor:
            loss = super()._compute_loss(model, inputs)
            if self._step % self.args.gradient_accumulation_steps == 0:
                made.losses.append(0.0)
            made.losses[-1] += float(loss.detach())
            return loss

        def _generate(self, prompts: list[str]) -> Any:
            if not rloo:
                return super()._generate(prompts)
            chosen = chosen_by(prompts)
            texts = ["" for _ in chosen]
            return (
                [r.prompt_ids.tolist() for r in chosen],
                [r.response_ids.tolist() for r in chosen],
                texts,
            )

    for module in (grpo_trainer, rloo_trainer):  # keep the order of the groups
        module.shuffle_sequence_dict = lambda batch: batch
    settings = settings_kind(
        output_dir=str(folder), use_cpu=True, report_to="none", save_strategy="no", logging_strategy="no",
        disable_tqdm=True, model_init_kwargs={"dtype": "float32"}, bf16=False, gradient_checkpointing=False, shuffle_dataset=False,
        lr_scheduler_type="constant", weight_decay=0.0, max_completion_length=8, num_generations=4, **options,
    )  # fmt: skip
    trainer = Recorded(
        model=model,
        args=settings,
        reward_funcs=lambda prompts, **_: [r.reward for r in chosen_by(prompts)],
        train_dataset=Dataset.from_list([{"prompt": name} for name in groups]),
        processing_class=word_tokenizer(),
        peft_config=adapters,
        callbacks=[Record()],
        **({} if rloo else {"rollout_func": rollouts}),
    )
    with torch.no_grad():
        for name, parameter in trained(trainer.model).items():
            parameter.copy_(starts[name])
    trainer.train()
    return made

"""One stage of `gsm8k.py` with TRL: SFTTrainer or GRPOTrainer; needs `pip install trl==1.16.0` and a GPU.

Reads the files that `gsm8k.py` has written into the working directory, saves the trained model to `--out`.
TRL's defaults but for what the benchmark fixes: batch, lengths, learning rate.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from learning_trl import _mend_fingerprints

MICRO_BATCH = 64


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("stage", choices=("warm", "reinforced"))
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--lr", type=float, required=True)
    for name in ("--seed", "--steps", "--sequences", "--generations", "--max-tokens"):
        parser.add_argument(name, type=int, required=True)
    args = parser.parse_args()
    _mend_fingerprints()
    trainer = imitating(args) if args.stage == "warm" else reinforcing(args)
    trainer.train()
    trainer.save_model(str(args.out))


def settings_of(args: argparse.Namespace, sequences: int) -> dict[str, Any]:
    import torch

    size, on_gpu = min(MICRO_BATCH, sequences), torch.cuda.is_available()
    return {
        "use_cpu": not on_gpu,
        "bf16": on_gpu,
        "output_dir": str(args.out),
        "per_device_train_batch_size": size,
        "gradient_accumulation_steps": sequences // size,
        "learning_rate": args.lr,
        "lr_scheduler_type": "constant",
        "max_steps": args.steps,
        "gradient_checkpointing": False,
        "logging_steps": 10,
        "save_strategy": "no",
        "report_to": [],
        "disable_tqdm": True,
        "seed": args.seed,
    }


def imitating(args: argparse.Namespace) -> Any:
    from trl import SFTConfig, SFTTrainer

    config = SFTConfig(max_length=1024, **settings_of(args, args.sequences))
    model, tokenizer = load(args.model)
    return SFTTrainer(
        model=model,
        args=config,
        train_dataset=dataset("shown.jsonl", "prompt", "completion"),
        processing_class=tokenizer,
    )


def reinforcing(args: argparse.Namespace) -> Any:
    from gsm8k_reward import last_number
    from trl import GRPOConfig, GRPOTrainer

    def rewards(completions: list[Any], gt_answer: list[str], **_: Any) -> list[float]:
        texts = [messages[0]["content"] for messages in completions]
        return [last_number(*pair) for pair in zip(texts, gt_answer, strict=True)]

    config = GRPOConfig(
        num_generations=args.generations,
        max_completion_length=args.max_tokens,
        **settings_of(args, args.sequences * args.generations),
    )
    model, tokenizer = load(args.model)
    return GRPOTrainer(
        model=model,
        reward_funcs=[rewards],
        args=config,
        train_dataset=dataset("train.jsonl", "prompt"),
        processing_class=tokenizer,
    )


def load(path: Path) -> tuple[Any, Any]:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    return model, AutoTokenizer.from_pretrained(path, padding_side="left")


def dataset(file: str, *chats: str) -> Any:
    """The rows of a file; the fields in `chats` as messages."""
    from datasets import Dataset

    roles = {"prompt": "user", "completion": "assistant"}
    rows = [json.loads(line) for line in Path(file).read_text().splitlines()]
    for row in rows:
        row.update({name: [{"role": roles[name], "content": row[name]}] for name in chats})
    return Dataset.from_list(rows)


if __name__ == "__main__":
    main()

"""Train a model with TRL's GRPOTrainer, for `learning.py`; needs `pip install trl==1.16.0` and a GPU.

Reads the problems in the order given, writes one JSON line a step to `--out`, then the held-out accuracy.
TRL's defaults but for what the benchmark fixes: batch, lengths, learning rate, data order.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent / "examples" / "sums"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    for name in ("--model", "--data", "--heldout", "--out"):
        parser.add_argument(name, type=Path, required=True)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--groups", type=int, required=True)
    parser.add_argument("--generations", type=int, required=True)
    parser.add_argument("--max-tokens", type=int, required=True)
    parser.add_argument("--lr", type=float, required=True)
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--micro-batch", type=int, default=64)
    train(parser.parse_args())


def train(args: argparse.Namespace) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback

    from reward import last_number

    _mend_fingerprints()
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer

    out = args.out.open("w")

    def write(**fields: Any) -> None:
        out.write(json.dumps(fields) + "\n")
        out.flush()

    class Curve(TrainerCallback):
        def on_train_begin(self, *_: Any, **__: Any) -> None:
            self.began = time.monotonic()

        def on_log(self, _args: Any, state: Any, _control: Any, logs: Any, **__: Any) -> None:
            if "reward" in logs:
                write(
                    step=state.global_step,
                    reward=logs["reward"],
                    length=logs.get("completions/mean_length"),
                    grad_norm=logs.get("grad_norm"),
                    seconds=time.monotonic() - self.began,
                )

    def reward(completions: list[Any], gt_answer: list[str], **_: Any) -> list[float]:
        texts = [messages[0]["content"] for messages in completions]
        return [last_number(*pair) for pair in zip(texts, gt_answer, strict=True)]

    rows = [json.loads(line) for line in args.data.read_text().splitlines()]
    problems = Dataset.from_list(
        [
            {
                "prompt": [{"role": "user", "content": row["prompt"]}],
                "gt_answer": row["gt_answer"],
            }
            for row in rows
        ]
    )
    model = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(args.model, padding_side="left")
    samples = args.groups * args.generations
    settings = GRPOConfig(
        output_dir=str(args.out.with_suffix("")),
        per_device_train_batch_size=args.micro_batch,
        gradient_accumulation_steps=samples // args.micro_batch,
        num_generations=args.generations,
        max_completion_length=args.max_tokens,
        learning_rate=args.lr,
        lr_scheduler_type="constant",
        max_steps=args.steps,
        shuffle_dataset=False,
        gradient_checkpointing=False,  # the model is small; without it TRL is faster
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        seed=args.seed,
    )
    trainer = GRPOTrainer(
        model=model,
        reward_funcs=[reward],
        args=settings,
        train_dataset=problems,
        processing_class=tokenizer,
        callbacks=[Curve()],
    )
    trainer.train()
    heldout = [json.loads(line) for line in args.heldout.read_text().splitlines()]
    write(heldout=accuracy(trainer.model, tokenizer, heldout, args.max_tokens))


def accuracy(model: Any, tokenizer: Any, rows: list[dict[str, str]], max_tokens: int) -> float:
    """Return the greedy accuracy."""
    import torch

    from reward import last_number

    chats = [[{"role": "user", "content": row["prompt"]}] for row in rows]
    batch = tokenizer.apply_chat_template(
        chats, add_generation_prompt=True, padding=True, return_tensors="pt", return_dict=True
    ).to(model.device)
    with torch.no_grad(), torch.autocast("cuda", torch.bfloat16):
        made = model.eval().generate(**batch, max_new_tokens=max_tokens, do_sample=False)
    texts = tokenizer.batch_decode(made[:, batch["input_ids"].shape[1] :], skip_special_tokens=True)
    right = [last_number(text, row["gt_answer"]) for text, row in zip(texts, rows, strict=True)]
    return sum(right) / len(right)


def _mend_fingerprints() -> None:
    """Give datasets random fingerprints: its own cannot be pickled with pyarrow 26 on Python 3.12."""
    import uuid

    import datasets.arrow_dataset
    import datasets.fingerprint

    def fresh(*_: Any, **__: Any) -> str:
        return uuid.uuid4().hex[:16]

    datasets.fingerprint.Hasher.hash = classmethod(fresh)
    for module in (datasets.fingerprint, datasets.arrow_dataset):
        for name in ("generate_fingerprint", "update_fingerprint"):
            if hasattr(module, name):
                setattr(module, name, fresh)


if __name__ == "__main__":
    main()

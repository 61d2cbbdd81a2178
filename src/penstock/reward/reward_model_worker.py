"""The worker program of `reward_model.py`: one JSON line of items in, one line of scores out.

Loads the model once, then scores batches. This is the only file of the rewards that imports torch. Run as
`python -m penstock.reward.reward_model_worker SETTINGS_JSON`.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any


class Scorer:
    """A sequence-classification model and its tokenizer on one device."""

    def __init__(self, settings: dict[str, Any]) -> None:
        import torch
        from transformers import AutoModelForSequenceClassification, AutoTokenizer

        torch.set_num_threads(settings["threads"])
        device = settings["device"]
        if device == "auto":
            device = "cuda" if torch.cuda.is_available() else "cpu"
        dtype = settings["dtype"]
        if dtype == "auto":
            dtype = "float32" if device == "cpu" else "bfloat16"
        remote = settings["trust_remote_code"]
        self._settings, self._device, self._torch = settings, device, torch
        self._tokenizer = AutoTokenizer.from_pretrained(
            settings["path"], trust_remote_code=remote, truncation_side="left"
        )
        if self._tokenizer.pad_token is None:
            self._tokenizer.pad_token = self._tokenizer.eos_token
        self._model = AutoModelForSequenceClassification.from_pretrained(
            settings["path"], dtype=getattr(torch, dtype), trust_remote_code=remote
        )
        if self._model.config.pad_token_id is None:
            self._model.config.pad_token_id = self._tokenizer.pad_token_id
        self._model.to(device).eval()

    def score(self, items: list[dict[str, Any]]) -> list[float]:
        """Return one number per item, in their order."""
        inputs = self._tokenizer(
            [self._text(item) for item in items],
            return_tensors="pt",
            padding=True,
            truncation=True,
            max_length=self._settings["max_tokens"],
            add_special_tokens=self._tokenizer.chat_template is None,
        ).to(self._device)
        with self._torch.inference_mode():
            logits = self._model(**inputs).logits.float()
        if self._settings["transform"] == "sigmoid":
            logits = logits.sigmoid()
        elif self._settings["transform"] == "softmax":
            logits = logits.softmax(-1)
        return [float(value) for value in logits[:, self._settings["label"]].cpu()]

    def _text(self, item: dict[str, Any]) -> str:
        messages = [*item["messages"], {"role": "assistant", "content": item["response"]}]
        if self._tokenizer.chat_template is not None:
            return str(self._tokenizer.apply_chat_template(messages, tokenize=False))
        return "\n".join(str(message["content"]) for message in messages)


def main() -> None:
    """Serve until the input ends."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what a library prints must not reach the answers' pipe
    settings = json.loads(sys.argv[1])
    path = settings["path"]
    if os.path.isabs(path) and not os.path.isdir(path):  # before the imports, which take seconds
        sys.exit(f"path: got {path!r}, allowed: a folder that holds a model, or a name on the Hub")
    scorer = Scorer(settings)
    print('"ready"', file=answers, flush=True)
    for line in sys.stdin:
        try:
            reply: dict[str, Any] = {"scores": scorer.score(json.loads(line))}
        except Exception as error:  # the edge of one batch: its rollouts fail
            reply = {"error": f"{type(error).__name__}: {str(error)[:300]}"}
        print(json.dumps(reply), file=answers, flush=True)


if __name__ == "__main__":
    main()

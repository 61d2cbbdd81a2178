"""reward_model: a sequence-classification model scores responses, in batches, in its own process.

Consumes rollouts from any number of tasks, gathers them into batches, produces the model's number for
each. The model's process starts at the first rollout. When it dies, the rollouts that it held fail, and the
next rollout starts it again.

`python -m penstock.reward.reward_model SETTINGS_JSON` is that process: one JSON line of items in, one line of scores
out. Only there torch is imported.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import sys
from typing import Any, Literal

import numpy as np
from pydantic import Field, field_validator

from penstock.config import Section
from penstock.data.chat import ChatTemplate
from penstock.errors import RewardError, RunError
from penstock.reward.line_process import ProcessPool, ProcessSlow, serve_lines
from penstock.reward.protocol import Reward
from penstock.types import Prompt, Rollout, Score


class RewardModelOptions(Section):
    path: str = Field(min_length=1)
    """Folder or hub name of a transformers sequence-classification model."""
    device: str = "auto"
    """auto | cpu | cuda | cuda:N."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Number format; auto: float32 on a CPU, bfloat16 on a GPU."""
    batch_size: int = Field(16, ge=1)
    """Most responses in one forward pass."""
    max_tokens: int = Field(4096, ge=1)
    """Longest input; of longer ones the response loses its beginning, the question stays."""
    label: int = Field(0, ge=0)
    """Which output is the reward, for models with several."""
    transform: Literal["none", "sigmoid", "softmax"] = "none"
    """Function that is applied to the outputs before one of them is chosen."""
    truncated: float | None = None
    """Value of a truncated response; None: the model scores it like any other."""
    threads: int = Field(1, ge=1)
    """CPU threads of the process."""
    start_timeout_s: float = Field(300.0, gt=0)
    """Longest wait for the model to load."""
    timeout_s: float = Field(120.0, gt=0)
    """Longest wait for one batch."""
    trust_remote_code: bool = False
    """Run Python code that comes with the model."""

    @field_validator("path")
    @classmethod
    def _can_be_a_model(cls, path: str) -> str:
        if os.path.isabs(path) or os.path.isdir(path) or re.fullmatch(r"[\w.-]+/[\w.-]+", path):
            return path  # an absolute one may be on another machine, where the rewards run
        raise ValueError(
            f"option path: got {path!r}, allowed: a folder that exists, or a hub name owner/name"
        )


class RewardModel(Reward):
    """Consumes finished rollouts, produces the model's scores."""

    Options = RewardModelOptions

    def __init__(self, options: RewardModelOptions, *, max_tokens: int) -> None:
        self._settings = options
        self._process = ProcessPool(
            self._command(),
            1,
            name="the model's process",
            start_timeout_s=options.start_timeout_s,
        )
        self._waiting: asyncio.Queue[tuple[dict[str, Any], asyncio.Future[float]]]
        self._waiting = asyncio.Queue()
        self._serving: asyncio.Task[None] | None = None

    async def score(self, rollout: Rollout, prompt: Prompt) -> Score:
        """The model's score of one rollout, computed in a batch with other rollouts."""
        if rollout.finish_reason == "length" and self._settings.truncated is not None:
            return Score(value=self._settings.truncated, note="truncated")
        if self._serving is None:
            self._serving = asyncio.create_task(self._serve())
        future: asyncio.Future[float] = asyncio.get_running_loop().create_future()
        item = {"messages": list(prompt.messages), "response": rollout.text}
        self._waiting.put_nowait((item, future))
        return Score(value=await future)

    async def _serve(self) -> None:
        """Consume rollouts, produce their scores in batches.

        Waits for rollouts; woken by `score()`. Cancelled by `close()`.
        """
        while True:
            batch = [await self._waiting.get()]
            while len(batch) < self._settings.batch_size and not self._waiting.empty():
                batch.append(self._waiting.get_nowait())
            batch = [(item, future) for item, future in batch if not future.cancelled()]
            if not batch:
                continue
            items = [item for item, _ in batch]
            scores: list[float] = []
            reason = "the reward model was closed"  # unless there is another
            try:
                async with self._process.lend() as process:
                    reply = await process.ask(items, self._settings.timeout_s)
                scores = _read(reply, len(items))
            except ProcessSlow:
                reason = f"no scores after {self._settings.timeout_s:g} s (timeout_s)"
            except RunError as error:  # it did not start, or ended, or refused
                reason = str(error)
            finally:
                for number, (_, future) in enumerate(batch):
                    if future.done():
                        continue  # its rollout was cancelled
                    if scores:
                        future.set_result(scores[number])
                    else:
                        future.set_exception(RewardError(reason))

    def _command(self) -> list[str]:
        settings = self._settings.model_dump_json()
        return [sys.executable, "-m", "penstock.reward.reward_model", settings]

    async def close(self) -> None:
        """End the model's process."""
        if self._serving is not None:
            self._serving.cancel()
            await asyncio.wait([self._serving])
        while not self._waiting.empty():
            if not (future := self._waiting.get_nowait()[1]).done():
                future.set_exception(RewardError("the reward model was closed"))
        await self._process.close()


def _read(reply: Any, number: int) -> list[float]:
    """So many scores; raise RewardError for any other answer."""
    try:
        if "error" in reply:
            raise RewardError(str(reply["error"]))
        scores = [float(value) for value in reply["scores"]]
    except (ValueError, KeyError, TypeError) as error:
        raise RewardError(
            f"the model's process gave no scores: {type(error).__name__}: {error}"
        ) from None
    if len(scores) != number:
        raise RewardError(f"the model's process gave {len(scores)} scores, allowed: {number}")
    return scores


# -- the model's process ------------------------------------------------------------------------------


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
        self._tokenizer = AutoTokenizer.from_pretrained(settings["path"], trust_remote_code=remote)
        self.chat = ChatTemplate(self._tokenizer)
        if self._tokenizer.pad_token is None:
            self._tokenizer.pad_token = self._tokenizer.eos_token
        self._model = AutoModelForSequenceClassification.from_pretrained(
            settings["path"], dtype=getattr(torch, dtype), trust_remote_code=remote
        )
        if self._model.config.pad_token_id is None:
            self._model.config.pad_token_id = self._tokenizer.pad_token_id
        self._model.to(device).eval()

    def answer(self, items: list[dict[str, Any]]) -> dict[str, Any]:
        try:
            return {"scores": self.score(items)}
        except Exception as error:  # the edge of one batch: its rollouts fail
            return {"error": f"{type(error).__name__}: {str(error)[:300]}"}

    def score(self, items: list[dict[str, Any]]) -> list[float]:
        """One number per item, in their order."""
        ids = [self.tokens(item["messages"], item["response"]).tolist() for item in items]
        inputs = self._tokenizer.pad({"input_ids": ids}, return_tensors="pt").to(self._device)
        with self._torch.inference_mode():
            logits = self._model(**inputs).logits.float()
        if self._settings["transform"] == "sigmoid":
            logits = logits.sigmoid()
        elif self._settings["transform"] == "softmax":
            logits = logits.softmax(-1)
        return [float(value) for value in logits[:, self._settings["label"]].cpu()]

    def tokens(self, messages: list[dict[str, Any]], response: str) -> np.ndarray:
        """The conversation in tokens; a response that does not fit behind its question loses its beginning."""
        whole = self.chat.encode_answered(messages, response)
        most = self._settings["max_tokens"]
        question = len(self.chat.encode(messages)) if messages and len(whole) > most else 0
        if question >= most:
            return whole[-most:]
        return np.concatenate([whole[:question], whole[question:][question - most :]])


def main() -> None:
    """Serve until the input ends."""
    settings = json.loads(sys.argv[1])
    path = settings["path"]
    if os.path.isabs(path) and not os.path.isdir(path):  # before the imports, which take seconds
        sys.exit(f"path: got {path!r}, allowed: a folder that holds a model, or a name on the Hub")
    serve_lines(lambda: Scorer(settings).answer)


if __name__ == "__main__":
    main()

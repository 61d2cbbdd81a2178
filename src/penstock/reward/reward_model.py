"""reward_model: a sequence-classification model scores responses, in batches, in its own process.

Consumes rollouts from any number of tasks, gathers them into batches, produces the model's number for
each. The model's process starts at the first rollout. When it dies, the rollouts that it held fail, and the
next rollout starts it again. This file imports no torch.
"""

from __future__ import annotations

import asyncio
import json
import queue
import sys
import threading
from concurrent.futures import Future
from typing import Any, Literal

from pydantic import Field

from penstock.config import Section
from penstock.errors import RewardError
from penstock.reward.line_process import LineProcess, ProcessGone, ProcessSlow
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
    """Longest input; longer ones lose their beginning."""
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


class RewardModel(Reward):
    """Consumes finished rollouts, produces the model's scores."""

    Options = RewardModelOptions

    def __init__(self, options: RewardModelOptions, *, max_tokens: int) -> None:
        self._settings = options
        self._waiting: queue.SimpleQueue[tuple[dict[str, Any], Future[float]] | None]
        self._waiting = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    async def score(self, rollout: Rollout, prompt: Prompt) -> Score:
        """Return the model's score of one rollout, computed in a batch with other rollouts."""
        if rollout.finish_reason == "length" and self._settings.truncated is not None:
            return Score(value=self._settings.truncated, note="truncated")
        if self._thread is None:
            self._thread = threading.Thread(target=self._serve, name="reward-model", daemon=True)
            self._thread.start()
        future: Future[float] = Future()
        item = {"messages": list(prompt.messages), "response": rollout.text}
        self._waiting.put((item, future))
        return Score(value=await asyncio.wrap_future(future))

    def _serve(self) -> None:
        """Consume rollouts, produce their scores in batches.

        Waits for rollouts; woken by `score()` and `close()`. Ends at None, with the model's process.
        """
        process: LineProcess | None = None
        try:
            while (batch := self._next_batch()) is not None:
                process = self._run_batch(process, batch)
        finally:
            if process is not None:
                process.kill()

    def _next_batch(self) -> list[tuple[dict[str, Any], Future[float]]] | None:
        """Return the waiting rollouts, up to the batch size; None when closed."""
        batch = [self._waiting.get()]
        while len(batch) < self._settings.batch_size and not self._waiting.empty():
            batch.append(self._waiting.get())
        if None in batch:
            for item in batch:
                if item is not None:
                    item[1].set_exception(RewardError("the reward model was closed"))
            return None
        return [item for item in batch if item is not None]

    def _run_batch(
        self, process: LineProcess | None, batch: list[tuple[dict[str, Any], Future[float]]]
    ) -> LineProcess | None:
        futures = [future for _, future in batch if future.set_running_or_notify_cancel()]
        items = [item for item, future in batch if not future.cancelled()]
        if not futures:
            return process
        try:
            if process is None:
                process = LineProcess(self._command(), self._settings.start_timeout_s)
            scores = _read(process.ask(json.dumps(items), self._settings.timeout_s), len(futures))
        except RewardError as error:  # it did not start
            _fail(futures, str(error))
            return None
        except (ProcessSlow, ProcessGone) as error:
            assert process is not None
            limit = f"no scores after {self._settings.timeout_s:g} s (timeout_s)"
            ended = f"the model's process ended: {process.last_words()}"
            process.kill()
            _fail(futures, limit if isinstance(error, ProcessSlow) else ended)
            return None
        except (ValueError, KeyError, TypeError) as error:  # the thread must outlive any answer
            assert process is not None
            process.kill()
            _fail(futures, f"the model's process gave no scores: {type(error).__name__}: {error}")
            return None
        if isinstance(scores, str):
            _fail(futures, scores)
            return process
        for future, value in zip(futures, scores, strict=True):
            future.set_result(value)
        return process

    def _command(self) -> list[str]:
        settings = self._settings.model_dump_json()
        return [sys.executable, "-m", "penstock.reward.reward_model_worker", settings]

    async def close(self) -> None:
        """End the model's process."""
        thread, self._thread = self._thread, None
        if thread is not None:
            self._waiting.put(None)
            await asyncio.to_thread(thread.join)


def _read(answer: str, number: int) -> list[float] | str:
    """Return so many scores, or the error of the model; raise ValueError for any other answer."""
    reply = json.loads(answer)
    if "error" in reply:
        return str(reply["error"])
    scores = [float(value) for value in reply["scores"]]
    if len(scores) != number:
        raise ValueError(f"got {len(scores)} scores, allowed: {number}")
    return scores


def _fail(futures: list[Future[float]], reason: str) -> None:
    for future in futures:
        future.set_exception(RewardError(reason))

"""What a run reads: its tokenizer, the datasets of its tasks, and how many steps they make."""

from __future__ import annotations

import asyncio
import contextvars
import json
import math
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, TypeVar

from penstock.config import Config, TaskDataConfig
from penstock.data import Dataset, load_dataset
from penstock.data.chat import ChatTemplate
from penstock.data.dataset import check_context, count_duplicates, count_overlap
from penstock.data.identity import OVERLAP
from penstock.reward import fields_read

T = TypeVar("T")
Messages = tuple[dict[str, Any], ...]


@dataclass(slots=True, frozen=True)
class RunData:
    """The tokenizer and the datasets, by task."""

    chat: ChatTemplate
    train: dict[str, Dataset]
    evaluation: dict[str, Dataset]

    @classmethod
    def load(cls, config: Config, with_training: bool = True) -> RunData:
        chat = ChatTemplate.from_config(config.model)
        tasks = config.tasks if with_training else {}

        def load_one(name: str, task: TaskDataConfig) -> Dataset:
            return load_dataset(name, task, chat, config.seed, readers=fields_read(task.rewards))

        trained = {name: load_one(name, task) for name, task in tasks.items()}
        judged = {name: load_one(name, task) for name, task in config.eval.tasks.items()}
        check_context(config, trained)
        check_context(config, judged, "eval.")
        return cls(chat, trained, judged)

    @classmethod
    async def read(cls, config: Config, with_training: bool = True) -> RunData:
        return await left_behind(lambda: cls.load(config, with_training))

    def by_key(self) -> dict[str, Dataset]:
        """The datasets by the key that names each, such as `tasks.math.data`."""
        trained = {f"tasks.{name}.data": dataset for name, dataset in self.train.items()}
        judged = {f"eval.tasks.{name}.data": data for name, data in self.evaluation.items()}
        return trained | judged


def duplicates(train: Mapping[str, Dataset]) -> list[str]:
    """A line for each training task that has the same prompt more than once."""
    counts = {name: count_duplicates(data.messages()) for name, data in train.items()}
    return [
        f"note: tasks.{name}: {again} of {len(train[name])} prompts are repeated"
        for name, again in counts.items()
        if again
    ]


def overlaps(
    train: Mapping[str, Dataset], asked: Mapping[str, Sequence[Messages]]
) -> dict[str, str]:
    """A fact for each evaluation task that asks prompts of a training task."""
    facts = {}
    for task, problems in asked.items():
        for name, dataset in train.items():
            if found := count_overlap(dataset.messages(), problems):
                counts = json.dumps({"found": found, "problems": len(problems)})
                facts[f"{OVERLAP}eval.tasks.{task} and tasks.{name}"] = counts
    return facts


async def left_behind(work: Callable[[], T]) -> T:
    """What `work` returns; its thread is left behind by a stop, because a large file takes minutes."""
    return await asyncio.wrap_future(in_thread(work, "data"))


def in_thread(work: Callable[[], T], name: str) -> Future[T]:
    """Call `work` in a thread of its own, with the context of the caller; the program ends without it."""
    outcome: Future[T] = Future()
    outcome.set_running_or_notify_cancel()
    context = contextvars.copy_context()

    def call() -> None:
        try:
            outcome.set_result(context.run(work))
        except BaseException as error:  # raised again where the outcome is asked for
            outcome.set_exception(error)

    threading.Thread(target=call, name=name, daemon=True).start()
    return outcome


def count_steps(config: Config, datasets: dict[str, Dataset]) -> int:
    """The number of updates: train.steps, or what train.episodes passes over the prompts need."""
    if config.train.steps is not None:
        return config.train.steps
    assert config.train.episodes is not None, "preflight.check has asked for one of them"
    prompts = sum(len(dataset) for dataset in datasets.values()) * config.train.episodes
    return max(1, math.ceil(prompts / config.train.groups_per_step))

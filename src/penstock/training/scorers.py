"""Who scores a batch beside the policy: the reference, the teachers, and the policy itself with more in its prompt."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from penstock.config import Config, TaskConfig
from penstock.data.chat import ChatTemplate
from penstock.data.dataset import FEEDBACK, HINT, with_hint
from penstock.training.algo.method import task_algorithms
from penstock.training.policy import load_policy
from penstock.types import Choices, Group, Prompt, Rollout


def load_scorers(config: Config, dtype: torch.dtype) -> tuple[Any | None, dict[str, Any]]:
    """(the reference, the teachers by name), frozen. None: there is no reference, or the policy can be it.

    With adapters the policy is its own reference without them; one that moves is an average of its weights.
    """

    def load(path: str) -> Any:
        return load_policy(path, config.model, dtype).requires_grad_(False)

    train = config.train
    is_policy = train.reference_moves or (config.model.lora.rank > 0 and not train.reference)
    algorithms = task_algorithms(config).values()
    needs_reference = any(algorithm.settings.needs_reference for algorithm in algorithms)
    own = is_policy or not needs_reference
    reference = None if own else load(train.reference or config.model.path)
    return reference, {n: load(t.path) for n, t in config.teachers.items() if t.is_loaded}


def with_hints(groups: Iterable[Group], config: Config, chat: ChatTemplate) -> Iterator[Group]:
    """Yield the groups with the prompts of `teacher_template`; the responses stay as they were sampled."""
    for group in groups:
        task = config.tasks[group.task]
        reads = FEEDBACK in HINT.findall(task.teacher_template)
        notes = [r.score.note if reads and r.score else "" for r in group.rollouts]
        ids = {note: _hinted_ids(group.prompt, task, note, chat) for note in dict.fromkeys(notes)}
        rollouts = [
            replace(rollout, prompt_ids=ids[note], choices=_moved(rollout, len(ids[note])))
            for rollout, note in zip(group.rollouts, notes, strict=True)
        ]
        yield replace(group, rollouts=rollouts)


def _hinted_ids(prompt: Prompt, task: TaskConfig, note: str, chat: ChatTemplate) -> np.ndarray:
    """The ids of a prompt with its hint; of a note that is too long for them, the beginning."""
    note = note.encode("utf-8", "replace").decode()
    while True:
        messages = with_hint(prompt, task.teacher_template, note)
        ids = chat.encode(messages, task.system_prompt, task.chat_template_kwargs)
        excess = len(ids) - task.max_prompt_tokens
        if excess <= 0 or not note:
            return ids
        note = note[:-excess]


def _moved(rollout: Rollout, prompt_length: int) -> Choices | None:
    """The choices of a response behind another prompt."""
    if rollout.choices is None:
        return None
    own = rollout.choices[len(rollout.prompt_ids) - 1 :]
    return Choices.join([(None, prompt_length - 1), (own, len(own))])

"""Draws groups to generate: first the groups to retry, then fresh prompts.

The position in the data is one absolute cursor. Epoch e is a permutation that depends only on the seed,
the task and e. So any cursor can be drawn again at any time (`group_at`), ids never repeat within a run,
and no iterator has to be saved. The sampler generates nothing and keeps no groups.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Protocol

import numpy as np

from penstock.errors import UserError
from penstock.store.journal import Journal
from penstock.types import Group, Prompt, Rollout, Status


class PromptSource(Protocol):
    """Anything with a length and prompts by index."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> Prompt: ...


class GroupSource(Protocol):
    """The part of a replay buffer that a sampler uses."""

    def take(self, task_name: str, group_status: Status) -> Group | None: ...


def stable_hash(*parts: object) -> int:
    """63 bits that depend only on the parts, the same on every machine."""
    text = "\x1f".join(map(str, parts))
    digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def rollout_seed(run_seed: int, group_id: str, index: int, tries: int) -> int:
    """The seed of one rollout's random stream, which depends only on its identity."""
    return stable_hash(run_seed, group_id, index, tries)


def epoch_order(run_seed: int, task_name: str, epoch: int, size: int) -> np.ndarray:
    """The order in which an epoch draws the prompts of a task, as indices of the dataset."""
    return np.random.default_rng(stable_hash(run_seed, task_name, "epoch", epoch)).permutation(size)


class Sampler:
    """Consumes prompts of one task, produces groups of `prompt_repeat_k` rollouts."""

    def __init__(
        self,
        dataset: PromptSource,
        *,
        task_name: str,
        prompt_repeat_k: int,
        seed: int,
        replay_buffer: GroupSource | None = None,
    ) -> None:
        if prompt_repeat_k < 1:
            raise UserError(f"prompt_repeat_k: got {prompt_repeat_k}, allowed: at least 1")
        self.task_name = task_name
        self.prompt_repeat_k = prompt_repeat_k
        self.seed = seed
        self.cursor = 0  # of the next fresh prompt, counted over all epochs
        self._dataset = dataset
        self._replay_buffer = replay_buffer
        self._orders: dict[int, np.ndarray] = {}  # of the epochs around the last one that was drawn

    def sample(
        self, task_name: str, group_status: Status | Sequence[Status] | None = None
    ) -> Group:
        """Take a buffered group of the first status that has one; otherwise draw a fresh group."""
        if task_name != self.task_name:
            raise UserError(f"sampler: got task {task_name!r}, allowed: {self.task_name!r}")
        statuses = (group_status,) if isinstance(group_status, Status) else (group_status or ())
        if self._replay_buffer is not None:
            for status in statuses:
                group = self._replay_buffer.take(task_name, status)
                if group is not None:
                    return group
        group = self.group_at(self.cursor)
        self.cursor += 1
        return group

    def group_at(self, cursor: int) -> Group:
        """The group of that cursor, not yet generated; the sampler does not move."""
        if not len(self._dataset):
            raise UserError(
                f"task {self.task_name}: got an empty dataset, allowed: 1 prompt or more"
            )
        return self.group_of(cursor, self._dataset[self.choose(cursor)])

    def choose(self, cursor: int) -> int:
        """The place in the data of the prompt to draw at a cursor."""
        size = len(self._dataset)
        epoch, position = divmod(cursor, size)
        if epoch not in self._orders:
            kept = {e: order for e, order in self._orders.items() if abs(e - epoch) <= 1}
            order = epoch_order(self.seed, self.task_name, epoch, size)
            self._orders = {**kept, epoch: order}
        return int(self._orders[epoch][position])

    @property
    def why_exhausted(self) -> str:
        """Why no prompt is left to draw; empty: there are prompts."""
        return ""

    def learn(self, journal: Journal, step: int) -> None:
        """Note that weights of a step are in force, which the journal has committed."""

    def restore(self, journal: Journal, cursor: int) -> None:
        """Continue a resumed run at a cursor."""
        self.cursor = cursor

    def counts(self) -> dict[str, int]:
        """The prompts by what is known of their pass rates; empty: nothing is counted."""
        return {}

    def group_of(self, cursor: int, prompt: Prompt) -> Group:
        """The group that was drawn at a cursor with this prompt, not yet generated."""
        group_id = f"{self.task_name}:{cursor}"
        rollouts = [
            Rollout(
                rollout_id=f"{group_id}.{index}",
                prompt_ids=prompt.token_ids,
                seed=rollout_seed(self.seed, group_id, index, 0),
            )
            for index in range(self.prompt_repeat_k)
        ]
        return Group(
            group_id=group_id, task=self.task_name, cursor=cursor, prompt=prompt, rollouts=rollouts
        )

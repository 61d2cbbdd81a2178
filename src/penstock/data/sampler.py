"""Draws groups to generate: first the groups to retry, then fresh prompts.

The position in the data is one absolute cursor. Epoch e is a permutation that depends only on the seed,
the task and e. So any cursor can be drawn again at any time (`group_at`), ids never repeat within a run,
and no iterator has to be saved. The sampler generates nothing and keeps no groups.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np

from penstock.config import Config
from penstock.errors import PromptsRetired, UserError
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


# -- the sampler that learns which prompts teach something --------------------------------------


MOST_CANDIDATES = 1024  # of one draw
HALF_LIFE = 2.0  # passes over the data in which evidence loses half of its weight


class DifficultySampler(Sampler):
    """Draws the prompts whose pass rate is near one half, by Thompson sampling (`sampler = "difficulty"`).

    A prompt that is always right or always wrong gives a group without variance, which teaches nothing. Each
    prompt has a Beta posterior of its pass rate; a draw samples a rate for every candidate and takes the prompt
    whose rate is nearest to 0.5. Old evidence fades, so a prompt that was hopeless comes back.

    A draw depends on the seed, its cursor, the prompts of the last cursors, and what the journal held when the
    step of the weights in force was committed: the order of landings does not matter, and a resumed run reads it
    all again.
    """

    def __init__(
        self, dataset: PromptSource, *, apart: int = 1, retire_solved: int = 0, **sampling: Any
    ) -> None:
        """apart: draws before a prompt may be drawn again; retire_solved: right groups in a row, 0: never."""
        super().__init__(dataset, **sampling)
        size = len(dataset)
        self._apart, self._retire_solved = apart, retire_solved
        self._half_life = HALF_LIFE * max(size, 1)  # in draws
        self._passes, self._fails = np.zeros(size), np.zeros(size)  # faded to the cursor `_seen_at`
        self._seen_at = np.zeros(size)
        self._newest = np.full(size, np.nan)  # mean reward of the newest group
        self._streak = np.zeros(size, dtype=np.int64)  # newest groups that were all right
        self._step = 0  # the journal was read up to the commit of this step
        self._drawn: dict[int, int] = {}  # cursor -> prompt, of the last cursors
        self._index: dict[str, int] = {}  # prompt id -> its place in the data

    # -- what the journal knows ---------------------------------------------------------------

    def learn(self, journal: Journal, step: int) -> None:
        """Read the rewards of all groups that landed before that step was committed."""
        for cursor, prompt_id, reward, num_rollouts in journal.outcomes(
            self.task_name, self._step, step
        ):
            index = self._index_of(prompt_id)
            if index is not None:
                self._count(index, cursor, min(max(reward, 0.0), 1.0), num_rollouts)
        self._step = max(step, self._step)

    def _count(self, index: int, cursor: int, rate: float, num_rollouts: int) -> None:
        newest = max(cursor, self._seen_at[index])
        before, now = self._weight(newest - self._seen_at[index]), self._weight(newest - cursor)
        self._passes[index] = self._passes[index] * before + num_rollouts * rate * now
        self._fails[index] = self._fails[index] * before + num_rollouts * (1 - rate) * now
        self._seen_at[index], self._newest[index] = newest, rate
        self._streak[index] = self._streak[index] + 1 if rate == 1 else 0

    def restore(self, journal: Journal, cursor: int) -> None:
        """Continue after the last cursor that the journal holds."""
        super().restore(journal, cursor)
        rows = journal.query(
            "SELECT cursor, prompt_id FROM groups WHERE task = ? AND cursor >= ?",
            (self.task_name, cursor - self._apart),
        )
        places = {at: self._index_of(prompt_id) for at, prompt_id in rows}
        self._drawn = {at: index for at, index in places.items() if index is not None}

    def _index_of(self, prompt_id: str) -> int | None:
        """The place of a prompt in the data; None: the data has changed since."""
        if not self._index:
            prompts = (self._dataset[index] for index in range(len(self._dataset)))
            self._index = {prompt.prompt_id: index for index, prompt in enumerate(prompts)}
        return self._index.get(prompt_id)

    # -- draws --------------------------------------------------------------------------------

    @property
    def why_exhausted(self) -> str:
        if not self._retire_solved or not np.all(self._is_retired()):
            return ""
        size, groups = len(self._dataset), self._retire_solved
        return f"task {self.task_name}: all {size} prompts are solved (retire_solved = {groups})"

    def _is_retired(self) -> np.ndarray:
        return (self._retire_solved > 0) & (self._streak >= self._retire_solved)

    def _weight(self, age: float | np.ndarray) -> np.ndarray:
        """How much evidence of that age counts; the age is in draws."""
        return np.exp2(-np.maximum(age, 0.0) / self._half_life)

    def choose(self, cursor: int) -> int:
        if reason := self.why_exhausted:
            raise PromptsRetired(reason)
        rng = np.random.default_rng(stable_hash(self.seed, self.task_name, "difficulty", cursor))
        may_draw = ~self._is_retired()
        apart = min(self._apart, int(may_draw.sum()) // 2)
        self._drawn = {at: index for at, index in self._drawn.items() if at >= cursor - self._apart}
        may_draw[[index for at, index in self._drawn.items() if cursor - apart <= at < cursor]] = 0
        candidates = np.flatnonzero(may_draw)
        if len(candidates) > MOST_CANDIDATES:
            candidates = rng.choice(candidates, MOST_CANDIDATES, replace=False)
        weight = self._weight(cursor - self._seen_at[candidates])
        rates = rng.beta(
            1 + self._passes[candidates] * weight, 1 + self._fails[candidates] * weight
        )
        index = int(candidates[np.argmin(np.abs(rates - 0.5))])
        self._drawn[cursor] = index
        return index

    def counts(self) -> dict[str, int]:
        """The prompts by the outcome of their newest group; those never drawn are in `prompts` alone."""
        solved, hopeless = self._newest >= 1, self._newest <= 0
        return {
            "prompts": len(self._newest),
            "solved": int(solved.sum()),
            "hopeless": int(hopeless.sum()),
            "useful": int((~solved & ~hopeless & ~np.isnan(self._newest)).sum()),
            "retired": int(self._is_retired().sum()),
        }


def make_sampler(config: Config, name: str, prompts: PromptSource, buffer: GroupSource) -> Sampler:
    """The sampler that a training task names."""
    task, size = config.tasks[name], config.task_sampling(name).num_generations
    sampling: dict[str, Any] = {"task_name": name, "prompt_repeat_k": size, "seed": config.seed}
    sampling |= {"replay_buffer": buffer}
    if task.sampler == "shuffle":
        return Sampler(prompts, **sampling)
    apart, retire = config.train.groups_per_step, task.retire_solved
    return DifficultySampler(prompts, apart=apart, retire_solved=retire, **sampling)

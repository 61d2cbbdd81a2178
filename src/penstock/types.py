"""The records that move through Penstock, and the one table of legal status moves.

    Prompt -> Rollout -> Group -> Batch -> StepReport

Standard library and numpy only. Records hold data and check themselves. They do no input or output
and know no engine, trainer or journal.
"""

from __future__ import annotations

import hashlib
import itertools
import operator
import struct
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, fields
from enum import StrEnum
from typing import Any, TypeVar

import numpy as np

T = TypeVar("T")


def pickled_by_position(record: type[T]) -> type[T]:
    """Pickle a dataclass as its values in order, several times faster than by name: every message has some."""
    values_of: Callable[[T], tuple[Any, ...]]
    values_of = operator.attrgetter(*(field.name for field in fields(record)))  # type: ignore[arg-type]

    def reduce(value: T) -> tuple[type[T], tuple[Any, ...]]:
        return record, values_of(value)

    record.__reduce__ = reduce  # type: ignore[assignment]
    return record


class Status(StrEnum):
    """The state of a rollout, or of a whole group."""

    INIT = "init"  # drawn: it waits or is being generated
    COMPLETED = "completed"  # finished and scored: it may be trained
    ABORTED = "aborted"  # stopped half-way: it may continue from its tokens or start again
    EXPIRED = "expired"  # older than the staleness bound: it must be generated again
    FAILED = "failed"  # an engine, reward or tool raised: the reason is in `error`
    FILTERED = "filtered"  # completed, but refused by a validity rule
    ARCHIVED = "archived"  # trained or dropped: final

    __hash__ = str.__hash__  # an enum's own is ten times slower


LEGAL_MOVES: dict[Status, frozenset[Status]] = {
    Status.INIT: frozenset(
        {Status.COMPLETED, Status.ABORTED, Status.FAILED, Status.FILTERED, Status.ARCHIVED}
    ),
    Status.COMPLETED: frozenset(
        {Status.EXPIRED, Status.FILTERED, Status.FAILED, Status.ABORTED, Status.ARCHIVED}
    ),
    Status.ABORTED: frozenset(
        {Status.INIT, Status.COMPLETED, Status.EXPIRED, Status.FAILED, Status.ARCHIVED}
    ),
    Status.EXPIRED: frozenset({Status.INIT, Status.ARCHIVED}),
    Status.FAILED: frozenset({Status.INIT, Status.ARCHIVED}),
    Status.FILTERED: frozenset({Status.ARCHIVED}),
    Status.ARCHIVED: frozenset(),
}


@pickled_by_position
@dataclass(slots=True, frozen=True)
class VersionSegment:
    """A run of `length` response tokens that were sampled under one policy version."""

    version: int
    length: int

    def __post_init__(self) -> None:
        if self.length < 1 or self.version < 0:
            raise ValueError(
                f"version segment: got version={self.version} length={self.length}, "
                "allowed: version >= 0, length >= 1"
            )


def extend_segments(
    segments: Sequence[VersionSegment], version: int, length: int
) -> tuple[VersionSegment, ...]:
    """Append `length` tokens of `version`; merge them with a last segment of the same version."""
    if length == 0:
        return tuple(segments)
    if segments and segments[-1].version == version:
        last = VersionSegment(version, segments[-1].length + length)
        return (*segments[:-1], last)
    return (*segments, VersionSegment(version, length))


def expand_segments(segments: Iterable[VersionSegment]) -> list[int]:
    """The version of every token."""
    return [segment.version for segment in segments for _ in range(segment.length)]


@pickled_by_position
@dataclass(slots=True, frozen=True)
class Score:
    """A reward's verdict on one rollout."""

    value: float  # the reward that is trained on
    parts: dict[str, float] = field(default_factory=dict)  # named terms, before weighting
    format_ok: bool | None = None  # whether the form is right; None: not judged
    answer_ok: bool | None = None  # whether the answer is right; None: not judged
    note: str = ""  # the reason in words, for people
    # for evaluation files; not journalled
    parsed: str | None = field(default=None, compare=False)  # the answer found in the response
    tests: tuple[int, ...] = field(default=(), compare=False)  # a code's verdict per test


@pickled_by_position
@dataclass(slots=True, frozen=True)
class Prompt:
    """One dataset item: `messages` is its chat form, `token_ids` goes to the engine."""

    prompt_id: str  # unique in its dataset, and changes with its content: "name:line@key"
    messages: tuple[dict[str, Any], ...]
    token_ids: np.ndarray  # int32 [prompt length]
    gt_answer: str | None = None
    test_cases: dict[str, Any] | None = None
    extra: dict[str, Any] = field(default_factory=dict)  # every other field of the dataset line

    def __post_init__(self) -> None:
        object.__setattr__(self, "token_ids", np.asarray(self.token_ids, dtype=np.int32))
        if self.token_ids.ndim != 1 or not len(self.token_ids):
            raise ValueError(
                f"prompt {self.prompt_id}: got token_ids of shape {self.token_ids.shape}, "
                "allowed: one dimension, at least one token"
            )


# Arrays without elements cannot be changed: all rollouts that have no tokens share these.
_NO_IDS, _NO_LOGPROBS = np.zeros(0, dtype=np.int32), np.zeros(0, dtype=np.float32)
_NO_MASK = np.zeros(0, dtype=np.bool_)


@pickled_by_position
@dataclass(slots=True, frozen=True)
class Choices:
    """What an engine chose from in its passes over a sequence: one entry for each token but the last."""

    num_kept: np.ndarray  # int32: how many tokens were left; 0: all, or not known
    kept_ids: np.ndarray  # int32: their ids, ascending in each pass, one pass after another
    experts: np.ndarray  # [passes, layers x experts of a token]: number + 1; 0: not known

    def __len__(self) -> int:
        return len(self.num_kept)

    def __getitem__(self, passes: slice) -> Choices:
        bounds = np.concatenate([[0], np.cumsum(self.num_kept)])
        first, last, _ = passes.indices(len(self))
        ids = self.kept_ids[bounds[first] : bounds[last]]
        return Choices(self.num_kept[first:last], ids, self.experts[first:last])

    @classmethod
    def unknown(cls, passes: int) -> Choices:
        return cls(np.zeros(passes, np.int32), _NO_IDS, np.zeros((passes, 0), np.uint8))

    @classmethod
    def join(cls, parts: Sequence[tuple[Choices | None, int]]) -> Choices | None:
        """Parts of a sequence, each with its number of passes; None: nothing is known of any."""
        if all(part is None for part, _ in parts):
            return None
        known = [part or cls.unknown(count) for part, count in parts]
        width = max(part.experts.shape[1] for part in known)
        experts = [np.pad(p.experts, ((0, 0), (0, width - p.experts.shape[1]))) for p in known]
        columns = [p.num_kept for p in known], [p.kept_ids for p in known], experts
        return cls(*map(np.concatenate, columns))


@dataclass(slots=True, frozen=True)
class Row:
    """One training sequence of a rollout: its own prompt, then `length` of its response tokens."""

    prompt_ids: np.ndarray  # int32: what an engine was given before the row's first sampled token
    length: int


@dataclass(slots=True, frozen=True, kw_only=True)
class ModelCall:
    """One call of the model by an agent: a node of its rollout's tree of calls (docs/agents.md)."""

    number: int  # counts from 0 in its rollout
    parent: int | None  # the call whose tokens this one continues; None: a root
    context_ids: np.ndarray  # int32: what follows the parent's tokens; of a root, the whole prompt
    token_ids: np.ndarray  # int32, sampled
    logprobs: np.ndarray  # float32, of the sampling distribution
    segments: tuple[VersionSegment, ...]  # versions of the sampled tokens
    finish_reason: str  # stop | length
    messages: tuple[dict[str, Any], ...]  # what the request added to the parent's conversation
    answer: dict[str, Any]  # the assistant's message, as the agent got it
    tools: str = ""  # the tools of the request, as JSON
    choices: Choices | None = None  # of its passes: those that its parent had not made

    def __post_init__(self) -> None:
        lengths = {len(self.logprobs), sum(segment.length for segment in self.segments)}
        if lengths != {len(self.token_ids)}:
            raise ValueError(
                f"call {self.number}: got log-probs and segments of lengths {sorted(lengths)}, "
                f"allowed: {len(self.token_ids)} (the sampled tokens)"
            )


@dataclass(slots=True, kw_only=True)
class Rollout:
    """One sampled response. All per-token arrays have the length of `response_ids`.

    An agent's rollout may be several sequences: then the arrays hold them end to end, and `rows`
    says where each begins and what its prompt is.
    """

    rollout_id: str  # "group_id.index", unique for the life of the run
    prompt_ids: np.ndarray  # int32 [prompt length]
    seed: int  # seed of this rollout's own random stream
    response_ids: np.ndarray = field(default_factory=lambda: _NO_IDS)  # int32
    # float32, of the sampling distribution
    logprobs: np.ndarray = field(default_factory=lambda: _NO_LOGPROBS)
    # True: sampled by the policy, trained
    loss_mask: np.ndarray = field(default_factory=lambda: _NO_MASK)
    segments: tuple[VersionSegment, ...] = ()  # versions of the response tokens, run-length encoded
    rows: tuple[Row, ...] = ()  # empty: one row, `prompt_ids` and the whole response
    earned: tuple[tuple[int, float], ...] = ()  # (tokens, reward earned before they were sampled)
    choices: Choices | None = None  # of all rows, one after another; None: not recorded
    teacher_logprobs: np.ndarray | None = None  # float32, of a teacher behind a server; None: none
    temperature: float = 1.0
    min_tokens: int = 0  # the first so many tokens were sampled without the end tokens
    status: Status = Status.INIT
    finish_reason: str = ""  # stop | length | tool_calls | abort | error
    text: str = ""  # the decoded response, for rewards and people
    score: Score | None = None
    error: str = ""  # why it failed
    extra: dict[str, Any] = field(default_factory=dict)
    issued_version: int = 0  # policy version when an agent loop last got the rollout
    prompt: Prompt | None = field(
        default=None, repr=False
    )  # the group's prompt, shared by reference

    def __post_init__(self) -> None:
        """Raise a ValueError unless all per-token fields have the same length."""
        length, taught = len(self.response_ids), self.teacher_logprobs
        if self.choices is not None and len(self.choices) != sum(self._passes()):
            raise ValueError(
                f"rollout {self.rollout_id}: got {len(self.choices)} choices, allowed: {sum(self._passes())}"
            )
        lengths = {
            "logprobs": len(self.logprobs),
            "loss_mask": len(self.loss_mask),
            "segments": sum([segment.length for segment in self.segments]),
            "rows": sum([row.length for row in self.rows]) if self.rows else length,
            "earned": sum([tokens for tokens, _ in self.earned]) if self.earned else length,
            "teacher_logprobs": length if taught is None else len(taught),
        }
        if wrong := {name: got for name, got in lengths.items() if got != length}:
            raise ValueError(
                f"rollout {self.rollout_id}: got lengths {wrong}, allowed: {length} "
                "(the length of response_ids)"
            )

    check = __post_init__

    def append(
        self,
        token_ids: np.ndarray,
        logprobs: np.ndarray,
        segments: Sequence[VersionSegment],
        choices: Choices | None = None,
    ) -> None:
        """Add tokens that the policy sampled; `segments` and `choices` cover only the new ones."""
        if len(token_ids):
            before, new = len(self.choices or ()), len(choices or ())
            gap = len(self.prompt_ids) + len(self.response_ids) + len(token_ids) - 1 - before - new
            self.choices = Choices.join([(self.choices, before), (None, gap), (choices, new)])
        sampled = np.empty(len(token_ids), dtype=np.bool_)
        sampled.fill(True)
        if len(self.response_ids):
            ids = np.concatenate([self.response_ids, token_ids])
            self.response_ids = ids.astype(np.int32, copy=False)
            self.logprobs = np.concatenate([self.logprobs, logprobs]).astype(np.float32, copy=False)
            self.loss_mask = np.concatenate([self.loss_mask, sampled])
        else:
            self.response_ids, self.logprobs = (
                _unshared(token_ids, _IDS),
                _unshared(logprobs, _LOGPROBS),
            )
            self.loss_mask = sampled
        if self.segments or len(segments) != 1:
            for segment in segments:
                self.segments = extend_segments(self.segments, segment.version, segment.length)
        else:
            self.segments = (segments[0],)
        self.check()

    def sequences(self) -> list[tuple[np.ndarray, slice]]:
        """(prompt ids, place of its tokens in the response arrays) of each training row."""
        if not self.rows:
            return [(self.prompt_ids, slice(0, len(self.response_ids)))]
        ends = np.cumsum([row.length for row in self.rows]).tolist()
        return [
            (row.prompt_ids, slice(end - row.length, end))
            for row, end in zip(self.rows, ends, strict=True)
        ]

    def _passes(self) -> list[int]:
        """The passes that sample each row: one for each of its tokens but the last."""
        rows = self.sequences()
        return [len(prompt_ids) + place.stop - place.start - 1 for prompt_ids, place in rows]

    def row_choices(self) -> list[Choices | None]:
        """The choices of each training row."""
        bounds = itertools.pairwise(np.cumsum([0, *self._passes()]).tolist())
        return [self.choices and self.choices[first:last] for first, last in bounds]

    @property
    def num_sampled(self) -> int:
        """The tokens that the policy sampled; in an agent's rollout, tool results are not counted."""
        return int(self.loss_mask.sum()) if self.rows else len(self.response_ids)

    @property
    def longest_answer(self) -> int:
        """The sampled tokens of the longest answer: sampling.max_tokens is for one, and agents have many."""
        longest = 0 if self.rows else len(self.response_ids)
        for _, place in self.sequences() if self.rows else ():
            edges = np.flatnonzero(np.diff(self.loss_mask[place], prepend=False, append=False))
            longest = max(longest, int((edges[1::2] - edges[::2]).max(initial=0)))
        return longest

    def move_to(self, status: Status) -> None:
        """Move if the table of legal moves allows it; no move is always allowed."""
        if status is self.status:
            return
        allowed = LEGAL_MOVES[self.status]
        if status not in allowed:
            names = ", ".join(sorted(allowed)) or "none, it is final"
            raise ValueError(
                f"illegal status move: got {self.status} -> {status}, allowed: {names}"
            )
        self.status = status

    @property
    def is_finished(self) -> bool:
        """Whether the response has reached its end; it may still lack a score."""
        return self.finish_reason in ("stop", "length", "tool_calls")

    def fail(self, reason: str) -> None:
        self.error = reason
        self.move_to(Status.FAILED)

    def restart(self) -> None:
        """Drop the response, so that the rollout is generated from its prompt again."""
        self.move_to(Status.INIT)
        self.response_ids, self.logprobs, self.loss_mask = _NO_IDS, _NO_LOGPROBS, _NO_MASK
        self.segments, self.rows, self.earned, self.choices = (), (), (), None
        self.finish_reason, self.text, self.error = "", "", ""
        self.score, self.teacher_logprobs = None, None

    @property
    def oldest_version(self) -> int | None:
        """The version of the oldest token; None without tokens."""
        if len(self.segments) == 1:
            return self.segments[0].version
        return min((segment.version for segment in self.segments), default=None)

    @property
    def reward(self) -> float:
        if self.score is None:
            raise ValueError(
                f"rollout {self.rollout_id}: got no score in status {self.status}, "
                "allowed: a rollout that was scored"
            )
        return self.score.value


_GROUP_STATUS_ORDER = (
    Status.FAILED,
    Status.ABORTED,
    Status.EXPIRED,
    Status.FILTERED,
    Status.ARCHIVED,
    Status.INIT,
)


_FINGERPRINT = "1-"  # the form: another number if other things are hashed
_IDS, _LOGPROBS, _MASK = np.dtype("<i4"), np.dtype("<f4"), np.dtype(np.bool_)


def _unshared(array: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """The array, or a copy if an engine may write to it again."""
    if isinstance(array, np.ndarray) and array.dtype is dtype and not array.flags.writeable:
        return array
    return np.array(array, dtype)


def bytes_of(array: np.ndarray, dtype: np.dtype) -> bytes:
    """The raw bytes of the array's elements in that type."""
    return (array if array.dtype is dtype else array.astype(dtype)).tobytes()


def contradicts(recorded: str, computed: str) -> bool:
    """Whether two fingerprints of one form differ; other forms cannot be compared."""
    form = recorded.split("-")[0] + "-"
    return form == _FINGERPRINT and recorded != computed


# What is pickled of a rollout beside its arrays; its group has the prompt.
_ARRAYS = ("prompt_ids", "response_ids", "logprobs", "loss_mask")
_REST = tuple(f.name for f in fields(Rollout) if f.name not in (*_ARRAYS, "prompt"))
_rest_of = operator.attrgetter(*_REST)


@dataclass(slots=True, kw_only=True)
class Group:
    """The rollouts of one prompt: the unit that is scheduled, buffered, journalled and trained."""

    group_id: str  # "task:cursor", unique for the life of the run
    task: str
    cursor: int  # number of prompts that the task had drawn before this one
    prompt: Prompt
    rollouts: list[Rollout]
    tries: int = 0  # times that an agent loop got the group
    error: str = ""

    def __post_init__(self) -> None:
        if not self.rollouts:
            raise ValueError(f"group {self.group_id}: got 0 rollouts, allowed: at least 1")
        for rollout in self.rollouts:
            rollout.prompt = self.prompt

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle as positions, with the tokens of all rollouts in one piece: a batch has hundreds of them."""
        rollouts, shared = self.rollouts, self.prompt.token_ids
        tokens = (
            np.concatenate([rollout.response_ids for rollout in rollouts], dtype=_IDS).tobytes(),
            np.concatenate([rollout.logprobs for rollout in rollouts], dtype=_LOGPROBS).tobytes(),
            np.concatenate([rollout.loss_mask for rollout in rollouts], dtype=_MASK).tobytes(),
        )
        prompts = [None if r.prompt_ids is shared else r.prompt_ids for r in rollouts]
        lengths = [len(rollout.response_ids) for rollout in rollouts]
        rows = list(zip(prompts, lengths, map(_rest_of, rollouts), strict=True))
        about = (self.group_id, self.task, self.cursor, self.prompt, self.tries, self.error)
        return _join_group, (about, rows, tokens)

    @property
    def status(self) -> Status:
        """COMPLETED if all rollouts are; otherwise the first status that one of them has, in order:
        failed, aborted, expired, filtered, archived, init."""
        for rollout in self.rollouts:
            if rollout.status is not Status.COMPLETED:
                break
        else:
            return Status.COMPLETED
        present = {rollout.status for rollout in self.rollouts}
        return next(status for status in _GROUP_STATUS_ORDER if status in present)

    def move_to(self, status: Status) -> None:
        for rollout in self.rollouts:
            rollout.move_to(status)

    def abort_unfinished(self) -> None:
        """Mark every rollout that is not completed as ABORTED; each keeps its tokens."""
        for rollout in self.rollouts:
            if rollout.status is Status.FAILED:
                rollout.move_to(Status.INIT)
            if rollout.status is not Status.COMPLETED:
                rollout.move_to(Status.ABORTED)

    @property
    def oldest_version(self) -> int | None:
        """The version of the oldest token of all rollouts; None without tokens."""
        segments = [segment for rollout in self.rollouts for segment in rollout.segments]
        return min([segment.version for segment in segments], default=None)

    def staleness(self, train_step: int) -> int:
        """The updates between the oldest token and the step that trains it; 0 is on-policy."""
        oldest = self.oldest_version
        return 0 if oldest is None else staleness(train_step, oldest)

    @property
    def num_response_tokens(self) -> int:
        return sum(len(rollout.response_ids) for rollout in self.rollouts)

    def fingerprint(self) -> str:
        """A hash of all that a trainer reads: ids, tokens, log-probs, masks, versions, rewards."""
        parts = [self.group_id.encode()]
        for rollout in self.rollouts:
            score, versions = rollout.score, [(s.version, s.length) for s in rollout.segments]
            words = f"{rollout.rollout_id} {rollout.finish_reason} {rollout.min_tokens} {versions}".encode()
            value = float("nan") if score is None else float(score.value)
            parts += (
                struct.pack(
                    "<IIIdd",
                    *map(len, (words, rollout.prompt_ids, rollout.response_ids)),
                    rollout.temperature,
                    value,
                ),
                words,
                bytes_of(rollout.prompt_ids, _IDS),
                bytes_of(rollout.response_ids, _IDS),
                bytes_of(rollout.logprobs, _LOGPROBS),
                bytes_of(rollout.loss_mask, _MASK),
            )
            for row in rollout.rows:
                parts.append(struct.pack("<II", len(row.prompt_ids), row.length))
                parts.append(row.prompt_ids.astype("<i4", copy=False).tobytes())
            for tokens, before in rollout.earned:
                parts.append(struct.pack("<Id", tokens, before))
            if (made := rollout.choices) is not None:
                parts += [a.tobytes() for a in (made.num_kept, made.kept_ids, made.experts)]
            if rollout.teacher_logprobs is not None:
                parts.append(bytes_of(rollout.teacher_logprobs, _LOGPROBS))
        return _FINGERPRINT + hashlib.blake2b(b"".join(parts), digest_size=12).hexdigest()


def _join_group(about: tuple[Any, ...], rows: list[Any], tokens: tuple[bytes, ...]) -> Group:
    """The group that `Group.__reduce__` took apart; its arrays cannot be written."""
    group_id, task, cursor, prompt, tries, error = about
    ids, logprobs, mask = map(np.frombuffer, tokens, (_IDS, _LOGPROBS, _MASK))
    rollouts, start = [], 0
    for prompt_ids, length, rest in rows:
        span = slice(start, start := start + length)
        rollouts.append(
            Rollout(
                prompt_ids=prompt.token_ids if prompt_ids is None else prompt_ids,
                response_ids=ids[span],
                logprobs=logprobs[span],
                loss_mask=mask[span],
                **dict(zip(_REST, rest, strict=True)),
            )
        )
    return Group(
        group_id=group_id,
        task=task,
        cursor=cursor,
        prompt=prompt,
        rollouts=rollouts,
        tries=tries,
        error=error,
    )


def staleness(train_step: int, policy_version: int) -> int:
    """The updates that a version is behind; version s - 1 is on-policy in step s."""
    return train_step - policy_version - 1


@dataclass(slots=True, frozen=True, kw_only=True)
class Batch:
    """The groups of one update, in their order."""

    step: int  # counts from 1
    groups: tuple[Group, ...]

    @property
    def rollouts(self) -> list[Rollout]:
        return [rollout for group in self.groups for rollout in group.rollouts]

    def fingerprints(self) -> tuple[tuple[str, str], ...]:
        """(group id, hash of its content) of every group, in order."""
        return tuple((group.group_id, group.fingerprint()) for group in self.groups)


@dataclass(slots=True, frozen=True, kw_only=True)
class Arithmetic:
    """How a trainer computes. Two that are equal and have no doubt give a step the same bits."""

    device: str  # cpu, or the name of the GPU
    libraries: dict[str, str] = field(default_factory=dict)  # by name, their versions
    doubt: str = ""  # why a repeated step may give other bits; empty: it gives the same

    def __str__(self) -> str:
        return f"{self.device} ({', '.join(f'{n} {v}' for n, v in self.libraries.items())})"


@dataclass(slots=True, frozen=True, kw_only=True)
class StepReport:
    """The result of one update."""

    step: int
    policy_version: int  # updates done, including this one
    digest: str  # digest of the weights after the update
    metrics: dict[str, float] = field(default_factory=dict)
    trained: tuple[tuple[str, str], ...] = ()  # `Batch.fingerprints` of what the trainer was given
    arithmetic: Arithmetic | None = None  # with which the weights were computed


@dataclass(slots=True, frozen=True, kw_only=True)
class WeightHandle:
    """The identity of published weights, and where an engine fetches them."""

    version: int
    digest: str
    kind: str  # the weight sync that published them: in_process | shared_memory | ...
    location: Any = None  # what that sync needs to fetch them; small enough for a message

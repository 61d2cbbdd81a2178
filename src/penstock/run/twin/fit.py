"""Read a profile out of a run: its journal (lengths, rewards, refusals) and its timeline (every finished call).

Reads files only.
"""

from __future__ import annotations

import contextlib
import itertools
import math
from collections import Counter, defaultdict, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean, median

import numpy as np

from penstock.config import Config
from penstock.errors import UserError
from penstock.inspection.timeline import Event, by_session, covered, read_events
from penstock.run.twin.profile import (
    DecodeModel,
    Profile,
    SeenGroup,
    TrainModel,
    kind_name,
    rank_share,
)
from penstock.store.journal import Journal
from penstock.store.run_folder import RunFolder, find
from penstock.waits import WaitKind

MOST_GROUPS = 2000
_BETTER = 0.7  # of the error: what another parameter must leave of it
_SCORED_WITHIN_S = 0.25  # after its call has ended, a group's first reward is asked for
_ROUNDS = 6  # of a fit: each begins with the pace that the one before found
_MOST_CALLS = 600  # of an engine that are looked at
_LEAST_S = 1e-9  # of a call and of a decode step: time must pass
_TELLS = 0.5  # share of the variance of update times that tokens must explain to tell a fixed part


@dataclass(slots=True, frozen=True)
class Recording:
    """What a run wrote: the groups in the order of their cursors, and its calls in order of time."""

    config: Config
    groups: dict[str, SeenGroup]  # group id ->
    events: list[Event]
    step_tokens: dict[int, int]  # response tokens of a committed step

    def sessions(self) -> list[Recording]:
        """The recording of each session: the time between two of them is nobody's."""
        return [replace(self, events=events) for events in by_session(self.events)]

    def calls(self, what: WaitKind, lane: str = "") -> list[Event]:
        return [
            event for event in self.events if event.what == what and event.lane.startswith(lane)
        ]


def read_profile(path: str) -> Profile:
    """The profile of a run folder, or of a file that `--save-profile` wrote."""
    if Path(path).is_file() and Path(path).suffix == ".json":
        return Profile.from_json(Path(path).read_bytes(), path)
    folder = find(path)
    return fit(read_recording(folder), folder.name)


def read_recording(folder: RunFolder) -> Recording:
    with contextlib.closing(Journal.open(folder.journal, readonly=True)) as journal:
        rows = journal.query(
            "SELECT g.group_id, g.task, g.drop_reason = 'filtered', r.num_tokens, r.reward FROM groups g"
            " JOIN rollouts r USING(group_id) WHERE g.status IN ('completed', 'filtered', 'archived')"
            " AND r.num_tokens > 0 ORDER BY g.task, g.cursor, r.number"
        )
        tokens = journal.query(
            "SELECT step, sum(num_tokens) FROM groups WHERE state = 'trained' GROUP BY step"
        )
    groups = {}
    for group_id, responses in itertools.groupby(rows, lambda row: row[0]):
        _, (task, *_), (refused, *_), lengths, rewards = zip(*responses, strict=True)
        earned = tuple(float(reward or 0.0) for reward in rewards)
        groups[group_id] = SeenGroup(lengths, earned, bool(refused), task)
    return Recording(folder.config(), groups, read_events(folder), dict(tokens))


def fit(recording: Recording, name: str) -> Profile:
    """The profile of what was recorded."""
    updates = recording.calls(WaitKind.TRAIN, "trainer")
    if not recording.groups or not updates:
        raise UserError(
            f"--profile: {name} got {len(recording.groups)} finished groups and {len(updates)} updates, "
            "allowed: a run that trained"
        )
    before, after = _around(recording)
    decode, kinds = _fit_engines(recording)
    evaluations = Counter(e.detail.partition(" after ")[0] for e in recording.calls(WaitKind.EVAL))
    judged = Counter(e.lane for e in recording.calls(WaitKind.REWARD, "rewards of eval "))
    groups, config = list(recording.groups.values()), recording.config
    publications = max(1, len(updates) // config.sync.every_steps)
    profile = Profile(
        source=name,
        groups=groups[:: math.ceil(len(groups) / MOST_GROUPS)],
        decode=decode,
        kinds=kinds,
        train=_fit_train(recording, updates),
        reward_s=_mean(end - start for start, end in _scored(recording).values()),
        publish_s=covered(recording.calls(WaitKind.PUBLISH, "trainer")) / publications,
        sync_s=_mean(e.end - e.start for e in recording.calls(WaitKind.SYNC, "engine")),
        land_s=_mean(e.end - e.start for e in recording.calls(WaitKind.SEND)),
        before_s=before,
        after_s=after,
        checkpoint_s=_mean(e.end - e.start for e in recording.calls(WaitKind.CHECKPOINT)),
        evaluations={
            name: round(judged[f"rewards of eval {name}"] / times)
            for name, times in evaluations.items()
        },
    )
    if any(task.agent != "single_turn" for task in config.tasks.values()):
        profile.notes.append("a task has an agent: its calls are modelled as one response each")
    return profile


def _mean(seconds: Iterable[float]) -> float:
    known = list(seconds)
    return max(0.0, fmean(known)) if known else 0.0


def _scored(recording: Recording) -> dict[str, tuple[float, float]]:
    """For each group of training when its first reward was asked for, and when its last one came."""
    times: dict[str, tuple[float, float]] = {}
    for event in recording.calls(WaitKind.REWARD):
        group = event.detail.rpartition(".")[0]
        if group in recording.groups:
            start, end = times.get(group, (event.start, event.end))
            times[group] = min(start, event.start), max(end, event.end)
    return times


def _around(recording: Recording) -> tuple[float, float]:
    """The loop's usual seconds from a batch to its update, and from an update to the next wait."""
    before, after = [0.0], [0.0]
    for session in recording.sessions():
        loop = session.calls(WaitKind.WAIT, "loop")
        waits = [wait for wait in loop if wait.detail.startswith("groups of step")]
        for update in session.calls(WaitKind.TRAIN, "trainer"):
            ended = [update.start - wait.end for wait in waits if wait.end <= update.start]
            begun = [wait.start - update.end for wait in waits if wait.start >= update.end]
            before += [min(ended)] if ended else []
            after += [min(begun)] if begun else []
    return median(before[1:] or before), median(after[1:] or after)


def _fit_train(recording: Recording, updates: list[Event]) -> TrainModel:
    """Fit seconds = fixed + tokens * each; all to the tokens if they do not explain the differences."""
    committed = [recording.step_tokens[step] for step in sorted(recording.step_tokens)]
    count = min(len(committed), len(updates))
    warm = 1 if count > 3 else 0  # the first update allocates and compiles
    tokens = np.array(committed[warm:count], float)
    seconds = np.array([event.end - event.start for event in updates[warm:count]])
    if not len(tokens) or not tokens.sum():
        raise UserError("--profile: got no committed step, allowed: a run that trained")
    fixed, each = 0.0, float(seconds.sum() / tokens.sum())
    if len(tokens) > 2 and tokens.std() > 0 and seconds.std() > 0:
        slope, start = np.polyfit(tokens, seconds, 1)
        tells = np.corrcoef(tokens, seconds)[0, 1] ** 2 > _TELLS
        if tells and slope > 0 and start > 0:
            fixed, each = float(start), float(slope)
    return TrainModel(
        fixed_s=fixed, token_s=each / rank_share(recording.config.launch.num_consumers)
    )


# -- the engine -------------------------------------------------------------------------------


@dataclass(slots=True, frozen=True)
class Call:
    start: float
    end: float
    lengths: tuple[int, ...]


def _fit_engines(recording: Recording) -> tuple[DecodeModel, dict[str, DecodeModel]]:
    """The model of an engine as [engine] says (or of all, without such), and of each other kind."""
    config = recording.config
    lanes: dict[str, list[list[Call]]] = defaultdict(list)
    slots: dict[str, int] = {}
    for lane, calls in _calls_of_engines(recording).items():
        number = int(lane.rpartition("-")[2])
        kind = config.launch.kind_of(number)
        name = "" if kind is None else kind_name(kind)
        lanes[name].append(calls[:_MOST_CALLS])
        slots[name] = config.of_engine(number).engine.max_slots or 64
    if not lanes:
        raise UserError("--profile: got no generate call of a group, allowed: a run that trained")
    models = {name: fit_decode(engines, slots[name]) for name, engines in lanes.items()}
    usual = models.pop("", None)
    if usual is None:
        every = [engine for engines in lanes.values() for engine in engines]
        usual = fit_decode(every, max(slots.values()))
    return usual, models


def fit_decode(lanes: list[list[Call]], slots: int) -> DecodeModel:
    """The parameters of equal engines: what their calls lasted through explains the recorded seconds.

    The least squares solution without negative parameters, of as few of them as explain the seconds. Where
    rows hardly differ between calls, nothing tells what a row costs: then a decode step takes the same for
    all.
    """
    seconds = np.array([call.end - call.start for calls in lanes for call in calls])
    step_s = math.inf  # at most, in a call
    for _ in range(_ROUNDS):
        parts = np.concatenate([_lasted_through(calls, slots, step_s) for calls in lanes])
        best, least = np.zeros(3), math.inf
        for chosen in ([0], [0, 1], [0, 2], [0, 1, 2], [1], [1, 2]):
            solution, *_ = np.linalg.lstsq(parts[:, chosen], seconds, rcond=None)
            error = float(np.square(parts[:, chosen] @ solution - seconds).sum())
            if (solution >= 0).all() and error < least * _BETTER:
                best, least = np.zeros(3), error
                best[chosen] = solution
        step_s = max(_LEAST_S, float(best[0] + best[1] * parts[:, 1].sum() / parts[:, 0].sum()))
    return DecodeModel(
        step_s=max(_LEAST_S, float(best[0])),
        row_s=float(best[1]),
        prefill_s=float(best[2]),
        slots=slots,
    )


def _lasted_through(calls: Sequence[Call], slots: int, step_s: float) -> np.ndarray:
    """For each call of an engine the decode steps, the rows of these steps and the prefills of its time.

    The tokens of a response are taken to come at an even pace, one in `step_s` at most: before its first one
    a call has waited for slots, while the engine decoded as many rows as it has slots.
    """
    starts = np.array([call.start for call in calls])
    ends = np.maximum([call.end for call in calls], starts + _LEAST_S)
    longest = np.array([max(call.lengths) for call in calls])
    token_s = np.minimum((ends - starts) / longest, step_s)
    owners = np.repeat(np.arange(len(calls)), [len(call.lengths) for call in calls])
    lengths = np.concatenate([call.lengths for call in calls])
    row_starts = (ends - longest * token_s)[owners]
    row_ends = row_starts + lengths * token_s[owners]
    parts = np.zeros((len(calls), 3))
    for place, (start, end) in enumerate(zip(starts, ends, strict=True)):
        inside_s = np.minimum(row_ends, end) - np.maximum(row_starts, start)
        rows = (np.maximum(inside_s, 0.0) / token_s[owners]).sum()
        prefills = ((starts >= start) & (starts < end)).sum()
        parts[place] = max(longest[place], rows / slots), rows, prefills
    return parts


def _calls_of_engines(recording: Recording) -> dict[str, list[Call]]:
    """The generate calls of each engine with the lengths of their responses.

    A group's first reward is asked for when its call has ended: that tells whose call it was. A call of
    no group, of an evaluation, counts as one response of the usual length.
    """
    known = [length for group in recording.groups.values() for length in group.lengths]
    usual = (max(1, round(sum(known) / len(known))),)
    ended = deque(sorted(recording.calls(WaitKind.GENERATE, "engine"), key=lambda call: call.end))
    lanes: dict[str, list[Call]] = defaultdict(list)

    def take(lengths: tuple[int, ...]) -> None:
        event = ended.popleft()
        lanes[event.lane].append(Call(event.start, event.end, lengths))

    for at, group in sorted((start, group) for group, (start, _) in _scored(recording).items()):
        while ended and ended[0].end < at - _SCORED_WITHIN_S:
            take(usual)
        if ended and ended[0].end <= at:
            take(recording.groups[group].lengths)
    while ended:
        take(usual)
    return {lane: sorted(calls, key=lambda call: call.start) for lane, calls in lanes.items()}

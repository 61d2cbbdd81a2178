"""Read a profile out of a run: its journal (lengths, rewards, refusals) and its timeline (every finished call).

The engine's model is found by replaying the recorded requests through `Rows`, at the times at which
they came: the parameters whose calls end when the recorded ones did. Reads files only.
"""

from __future__ import annotations

import contextlib
import math
from collections import Counter, defaultdict, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import TypeVar

import numpy as np

from penstock.config import Config
from penstock.errors import UserError
from penstock.inspection.timeline import Event, by_session, read_events
from penstock.run.twin.engine import Rows
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

T = TypeVar("T")
MOST_SAMPLES = 2000
_STARTS, _APART = 10, 2**0.25  # paces that a fit begins with, and the factor between them
_ROUNDS = 6  # of each part of a fit
_BETTER = 0.7  # of the error: what another parameter must leave of it
_SCORED_WITHIN_S = 0.25  # after its call has ended, a group's first reward is asked for
_REPLAYED = 600  # calls of an engine that are replayed for each set of parameters
_LEAST = np.array([1e-9, 0.0, 1e-9])  # seconds of a decode step, row and prefill: time must pass
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
    groups: dict[str, SeenGroup] = {}
    with contextlib.closing(Journal.open(folder.journal, readonly=True)) as journal:
        rows = journal.query(
            "SELECT g.group_id, g.task, g.drop_reason = 'filtered', r.num_tokens, r.reward FROM groups g"
            " JOIN rollouts r USING(group_id) WHERE g.status IN ('completed', 'filtered', 'archived')"
            " AND r.num_tokens > 0 ORDER BY g.task, g.cursor, r.number"
        )
        tokens = dict(
            journal.query(
                "SELECT step, sum(num_tokens) FROM groups WHERE state = 'trained' GROUP BY step"
            )
        )
    parts: dict[str, list[tuple]] = defaultdict(list)
    for group_id, *rest in rows:
        parts[group_id].append(tuple(rest))
    for group_id, members in parts.items():
        groups[group_id] = SeenGroup(
            tuple(int(length) for *_, length, _ in members),
            tuple(float(reward or 0.0) for *_, reward in members),
            bool(members[0][1]),
            str(members[0][0]),
        )
    return Recording(folder.config(), groups, read_events(folder), tokens)


def fit(recording: Recording, name: str) -> Profile:
    """The profile of what was recorded."""
    config = recording.config
    updates = recording.calls(WaitKind.TRAIN, "trainer")
    if not recording.groups or not updates:
        raise UserError(
            f"--profile: {name} got {len(recording.groups)} finished groups and {len(updates)} updates, "
            "allowed: a run that trained"
        )
    rewards = [
        e for e in recording.calls(WaitKind.REWARD) if not e.lane.startswith("rewards of eval")
    ]
    before, after = _around(recording)
    decode, kinds = _fit_engines(recording)
    profile = Profile(
        source=name,
        groups=_thinned(list(recording.groups.values())),
        decode=decode,
        kinds=kinds,
        train=_fit_train(recording, updates),
        reward_s=_seconds(rewards),
        publish_s=_publications(recording),
        sync_s=_seconds(recording.calls(WaitKind.SYNC, "engine")),
        land_s=_seconds(recording.calls(WaitKind.SEND)),
        before_s=before,
        after_s=after,
        checkpoint_s=_seconds(recording.calls(WaitKind.CHECKPOINT, "trainer")),
        evaluations=_evaluations(recording),
    )
    if config.tasks and any(task.agent != "single_turn" for task in config.tasks.values()):
        profile.notes.append("a task has an agent: its calls are modelled as one response each")
    return profile


def _evaluations(recording: Recording) -> dict[str, int]:
    """How many responses an evaluation of each task asks for."""
    times = Counter(
        event.detail.partition(" after ")[0] for event in recording.calls(WaitKind.EVAL)
    )
    responses = Counter(
        event.lane for event in recording.calls(WaitKind.REWARD, "rewards of eval ")
    )
    return {name: round(responses[f"rewards of eval {name}"] / times[name]) for name in times}


def _thinned(samples: list[T]) -> list[T]:
    """At most MOST_SAMPLES of them, evenly over the run."""
    return samples[:: max(1, math.ceil(len(samples) / MOST_SAMPLES))]


def _seconds(events: Iterable[Event]) -> list[float]:
    return _thinned([round(max(0.0, event.end - event.start), 6) for event in events]) or [0.0]


def _around(recording: Recording) -> tuple[list[float], list[float]]:
    """The loop's seconds from each batch to its update, and from an update to the next wait."""
    before, after = [], []
    for session in recording.sessions():
        loop = session.calls(WaitKind.WAIT, "loop")
        waits = [wait for wait in loop if wait.detail.startswith("groups of step")]
        for update in session.calls(WaitKind.TRAIN, "trainer"):
            ended = [wait.end for wait in waits if wait.end <= update.start]
            if ended:
                before.append(update.start - max(ended))
            begun = [wait.start for wait in waits if wait.start >= update.end]
            if begun:
                after.append(min(begun) - update.end)
    copies = [e.end - e.start for e in recording.calls(WaitKind.CHECKPOINT, "trainer")]
    typical = median(after) if after else 0.0  # without checkpoints and waits for slow engines
    after = [min(seconds, 2 * typical) for seconds in after] if copies else after
    return before or [0.0], after or [0.0]


def _publications(recording: Recording) -> list[float]:
    """The seconds in which the trainer published weights, for each update."""
    published = []
    for session in recording.sessions():
        events = session.calls(WaitKind.PUBLISH, "trainer")
        updates = session.calls(WaitKind.TRAIN, "trainer")
        starts = [*(update.start for update in updates[1:]), math.inf]
        for update, until in zip(updates, starts, strict=False):
            copies = [e for e in events if update.end <= e.start < until]
            if copies:
                published.append(max(e.end for e in copies) - min(e.start for e in copies))
    return published or [0.0]


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
    spread = seconds / (fixed + each * tokens)
    return TrainModel(
        fixed_s=fixed,
        token_s=each / rank_share(recording.config.launch.num_consumers),
        spread=tuple(round(float(ratio), 4) for ratio in spread[-MOST_SAMPLES:]),
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
        lanes[name].append(calls[:_REPLAYED])
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
    """Find the parameters of equal engines by replaying their calls.

    In a replay each call lasts through so many decode steps, rows of these steps and prefills: the
    parameters are those which give the recorded seconds. Other parameters change the replay, and where
    calls wait for slots a wrong start leads nowhere. So the first search is for a decode step alone.
    """
    calls = [call for engine in lanes for call in engine]
    seconds = np.array([call.end - call.start for call in calls])

    def replayed(wanted: np.ndarray) -> _Replayed:
        parameters = np.maximum(wanted, _LEAST)
        step_s, row_s, prefill_s = map(float, parameters)
        model = DecodeModel(step_s=step_s, row_s=row_s, prefill_s=prefill_s, slots=slots)
        parts = np.concatenate([replay(engine, model) for engine in lanes])
        return _Replayed(
            float(np.abs(parts @ parameters - seconds).sum()), parameters, parts, model
        )

    pace = float(np.median(seconds / [max(call.lengths) for call in calls]))
    only_steps = np.array([pace, 0.0, 0.0])
    best = min(
        (replayed(only_steps * _APART**-power) for power in range(_STARTS)),
        key=lambda outcome: outcome.error,
    )
    apart = _APART
    for _ in range(_ROUNDS):
        apart = math.sqrt(apart)
        scales = np.array([apart, 1.0, 1.0]), np.array([1 / apart, 1.0, 1.0])
        near = (replayed(best.parameters * scale) for scale in scales)
        best = min(best, *near, key=lambda outcome: outcome.error)
    share = 1.0  # of the way to what the replay asks for
    for _ in range(_ROUNDS):
        wanted = _not_negative(best.parts, seconds)
        tried = replayed(best.parameters + share * (wanted - best.parameters))
        best, share = (tried, 1.0) if tried.error < best.error else (best, share / 2)
    return best.model


@dataclass(slots=True, frozen=True)
class _Replayed:
    """The calls of engines, replayed with these parameters."""

    error: float  # seconds, of all calls
    parameters: np.ndarray  # of the model
    parts: np.ndarray
    model: DecodeModel


def _not_negative(parts: np.ndarray, seconds: np.ndarray) -> np.ndarray:
    """The least squares solution without negative parameters, of as few of them as explain the seconds.

    Where rows hardly differ between calls, nothing tells what a row costs: then a decode step takes the
    same for all.
    """
    best, least = np.zeros(3), math.inf
    for chosen in ([0], [0, 1], [0, 2], [0, 1, 2], [1], [1, 2]):
        solution, *_ = np.linalg.lstsq(parts[:, chosen], seconds, rcond=None)
        error = float(np.square(parts[:, chosen] @ solution - seconds).sum())
        if (solution >= 0).all() and error < least * _BETTER:
            best, least = np.zeros(3), error
            best[chosen] = solution
    return best


def _calls_of_engines(recording: Recording) -> dict[str, list[Call]]:
    """The generate calls of each engine with the lengths of their responses.

    A group's first reward is asked for when its call has ended: that tells whose call it was. A call of
    no group, of an evaluation, counts as one response of the usual length.
    """
    scored: dict[str, float] = {}
    for event in recording.calls(WaitKind.REWARD):
        group = event.detail.rpartition(".")[0]
        scored[group] = min(event.start, scored.get(group, math.inf))
    known = [length for group in recording.groups.values() for length in group.lengths]
    usual = (max(1, round(sum(known) / len(known))),)
    ended = deque(sorted(recording.calls(WaitKind.GENERATE, "engine"), key=lambda call: call.end))
    lanes: dict[str, list[Call]] = defaultdict(list)

    def take(lengths: tuple[int, ...]) -> None:
        event = ended.popleft()
        lanes[event.lane].append(Call(event.start, event.end, lengths))

    for at, group in sorted((at, group) for group, at in scored.items()):
        while ended and ended[0].end < at - _SCORED_WITHIN_S:
            take(usual)
        if group in recording.groups and ended and ended[0].end <= at:
            take(recording.groups[group].lengths)
    while ended:
        take(usual)
    return {lane: sorted(calls, key=lambda call: call.start) for lane, calls in lanes.items()}


def replay(calls: Sequence[Call], model: DecodeModel) -> np.ndarray:
    """For each call of an engine how many decode steps, rows and prefills it lasted in a replay."""
    rows, begin = Rows(model), calls[0].start
    first = np.zeros((len(calls), 3))
    parts = np.zeros((len(calls), 3))
    owners: list[int] = []  # of each row, its call

    def done() -> tuple[float, float, float]:
        return rows.steps, rows.tokens, rows.stalls_s / model.prefill_s

    for place in range(len(calls) + 1):
        until = calls[place].start - begin if place < len(calls) else math.inf
        while (end := rows.next_end()) is not None and end <= until:
            rows.advance(end)
            for row in rows.take_ended():  # a call's last row comes last
                parts[owners[row]] = np.subtract(done(), first[owners[row]])
            rows.admit()
        if place < len(calls):
            rows.advance(until)
            first[place] = done()
            rows.stall(model.prefill_s)
            for tokens in calls[place].lengths:
                rows.add(len(owners), tokens)
                owners.append(place)
            rows.admit()
    return parts

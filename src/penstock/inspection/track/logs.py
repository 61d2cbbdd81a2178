"""What a run shows to people and plots: the files of lines that it writes, and the trackers of its config.

A tracker shows metrics and notes; its faults never stop a run. The package that a tracker needs is imported when
the config names the tracker. The files are metrics, notes, samples and the
timeline. The journal has the truth, so a full or failing disk under such a file does not stop the run. The first
failure is told, lost lines are counted, and every later write tries again. A line is whole or absent.
"""

from __future__ import annotations

import errno
import io
import json
import math
import os
import shlex
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from json.encoder import encode_basestring_ascii as quoted
from pathlib import Path
from typing import Any

from penstock.config import Config
from penstock.config.plugins import load, place_of, python_object
from penstock.errors import UserError
from penstock.files import each_row, free_name, say, visible, write_whole
from penstock.inspection.track import TRACKERS
from penstock.types import Batch, expand_segments
from penstock.waits import OpenWait, WaitKind, Waits

Note = Callable[[str], None]

TIMELINE_FILE = "events.jsonl"
SESSION = "session"  # the event of the timeline that marks the beginning of a session
_TIMELINE_BATCH = 512  # events that are written together


def print_note(text: str) -> None:
    say(text, error=True)


class Notes:
    """Lines for the user: `show` prints them until a listener, such as a run's tracker, takes them."""

    def __init__(self, show: Note = print_note) -> None:
        self._show = show
        self._listeners: list[Note] = []

    def add(self, text: str) -> None:
        for listener in self._listeners or [self._show]:
            listener(text)

    def listen(self, listener: Note) -> None:
        """Give every further line to `listener` too."""
        self._listeners.append(listener)


@dataclass(slots=True, frozen=True, kw_only=True)
class Finding:
    """Something that is wrong with a run, and what to do about it (`inspection/findings/`)."""

    name: str  # stable, for metrics and pages: "equal_rewards"
    what: str  # one sentence without a full stop
    since: int  # the step with which it began; 0: before the first step
    evidence: str  # the figures that show it
    advice: str  # what to do, in words
    change: tuple[str, ...] = ()  # settings to paste, such as "train.lr=1e-6"

    def __str__(self) -> str:
        since = f" (since step {self.since})" if self.since else ""
        pasted = f": {' '.join(map(shlex.quote, self.change))}" if self.change else ""
        return f"{self.what}{since}. {self.evidence}. {self.advice}{pasted}"


@dataclass(slots=True, frozen=True, kw_only=True)
class RunInfo:
    """What a tracker receives when it is created."""

    config: Config
    folder: Path
    name: str
    total_steps: int
    first_step: int  # 0 for a new run, the last finished step after a resume
    live: Callable[[], str]  # returns the open waits, then a line per task
    findings: Callable[[], Sequence[Finding]] = tuple  # returns what is wrong with the run now
    batch: Callable[[], Batch | None] = lambda: None  # returns the newest batch that was trained
    next_batch: Callable[[], tuple[int, int]] = lambda: (0, 0)  # returns its groups: ready, wanted


class Tracker:
    """Consumes metrics and notes; a subclass leaves out what it does not define."""

    def log_step(self, step: int, metrics: dict[str, float]) -> None:
        """Show the metrics of one update."""

    def log_eval(self, step: int, metrics: dict[str, float]) -> None:
        """Show the metrics of one evaluation."""

    def note(self, text: str) -> None:
        """Show a line that the user should read."""

    def close(self) -> None:
        """Release files and connections; nothing is logged afterwards."""


class LineFile:
    """Appends lines; tells the user once when it cannot, and how many lines are missing."""

    def __init__(self, path: Path, note: Note = print_note) -> None:
        self._path, self._note = path, note
        self._lost = 0  # lines since the last write that worked

    def append(self, lines: Sequence[str]) -> None:
        try:
            text = "".join(f"{line}\n" for line in lines)
            self._write(text.encode("utf-8", "backslashreplace"))  # half a character as JSON has it
        except OSError as error:
            if not self._lost:
                self._note(f"{self._path}: cannot write: {error.strerror}; the run continues")
            self._lost += len(lines)
        else:
            self._tell_loss()

    def close(self) -> None:
        self._tell_loss()

    def _tell_loss(self) -> None:
        """Tell how many lines are missing, if any are that were not told of."""
        if self._lost:
            self._note(f"{self._path}: {self._lost} lines could not be written")
        self._lost = 0

    def _write(self, data: bytes) -> None:
        if not os.path.isdir(self._path.parent):
            self._path.parent.mkdir(exist_ok=True)  # a run folder that is gone is not made again
        with open(self._path, "ab", buffering=0) as file:
            end = file.seek(0, os.SEEK_END)
            try:
                if file.write(data) < len(data):
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            except OSError:
                file.truncate(end)
                raise


class JsonlTracker(LineFile, Tracker):
    """metrics.jsonl: one line per step; a resumed run restores lost lines. Evaluations have a file of their own."""

    def log_step(self, step: int, metrics: dict[str, float]) -> None:
        finite = {k: v if math.isfinite(v) else None for k, v in metrics.items()}
        self.append([json.dumps({"step": step, **finite})])


def read_metrics(path: Path) -> dict[int, dict[str, Any]]:
    """The metrics of every step, in order; lines that are cut off or damaged are left out."""
    by_step = {row["step"]: row for _, row in each_logged_step(path)}
    return dict(sorted(by_step.items()))


def each_logged_step(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield where each whole line of a step begins, and its metrics: a long run's file is read line by line."""
    for start, row in each_row(path) if path.is_file() else ():
        if row is not None and type(row.get("step")) is int:
            yield start, row


def last_logged_step(path: Path) -> int:
    """The highest step in the file; 0 if it has none."""
    return max((row["step"] for _, row in each_logged_step(path)), default=0)


def restore_metrics(
    path: Path, last: int, journalled: Callable[[int], Mapping[str, float]]
) -> None:
    """Rewrite the file with one line per step up to `last`: the old line, or what `journalled` has of the step.

    Torn lines are removed, lines of steps that the journal has lost are kept in a file beside it. A crash
    leaves the old or the new file.
    """
    starts = {row["step"]: start for start, row in each_logged_step(path)}
    with path.open("rb") if starts else io.BytesIO() as old:

        def line(step: int) -> str:
            if step not in starts:
                return json.dumps({"step": step, **journalled(step)}) + "\n"
            old.seek(starts[step])
            return json.dumps(json.loads(old.readline())) + "\n"

        if lost := sorted(step for step in starts if step > last):
            beside = free_name(path.with_name(f"{path.stem}-lost-after-step-{last}{path.suffix}"))
            write_whole(beside, map(line, lost))
        write_whole(path, map(line, range(1, last + 1)))


class NoteLog(LineFile, Tracker):
    """logs/run.log: the lines that the user was told, with their times."""

    def note(self, text: str) -> None:
        self.append([f"{time.strftime('%Y-%m-%d %H:%M:%S')} {visible(text)}"])


class StepCallback(Tracker):
    """The function that a Python program gave as `on_step`: it gets the metrics of every step."""

    NAME = "on_step()"  # among the program's objects; no function has such a name

    def __init__(self, function: Callable[[dict[str, float]], object]) -> None:
        self._function = function

    def log_step(self, step: int, metrics: dict[str, float]) -> None:
        self._function({"step": step, **metrics})


class Fanout:
    """Hands each metric to every tracker; a tracker that fails is dropped with a note."""

    def __init__(self, trackers: dict[str, Tracker]) -> None:
        self._trackers = trackers

    @classmethod
    def from_info(cls, info: RunInfo) -> Fanout:
        """Make metrics.jsonl, logs/run.log and the config's trackers; note one that cannot start."""
        fanout = cls({})
        fanout._trackers["jsonl"] = JsonlTracker(info.folder / "metrics.jsonl", fanout.note)
        fanout._trackers["log"] = NoteLog(info.folder / "logs" / "run.log")
        if (callback := python_object(StepCallback.NAME)) is not None:
            fanout._trackers["on_step"] = StepCallback(callback)
        for name in info.config.track.trackers:
            make = load("track.trackers", name, TRACKERS)
            try:
                fanout._trackers[name] = make(info)
            except Exception as error:  # tracker fan-out: never fatal
                fanout.note(f"tracker {name} could not start: {type(error).__name__}: {error}")
        return fanout

    def log_step(self, step: int, metrics: dict[str, float]) -> None:
        self._each(lambda tracker: tracker.log_step(step, metrics))

    def log_eval(self, step: int, metrics: dict[str, float]) -> None:
        self._each(lambda tracker: tracker.log_eval(step, metrics))

    def note(self, text: str) -> None:
        self._each(lambda tracker: tracker.note(text))
        if "console" not in self._trackers:
            say(text, error=True)

    def close(self) -> None:
        self._each(lambda tracker: tracker.close())

    def _each(self, act: Callable[[Tracker], None]) -> None:
        for name, tracker in list(self._trackers.items()):
            try:
                act(tracker)
            except Exception as error:  # tracker fan-out: never fatal
                if self._trackers.pop(name, None) is None:
                    continue  # the thread that names blocking code has dropped it
                said = f"{type(error).__name__}: {error}{place_of(error)}"
                self.note(f"tracker {name} failed and is off: {said}")


class RolloutLog(LineFile):
    """rollouts.jsonl: the first groups of every n-th batch, for a person to read."""

    def __init__(
        self,
        path: Path,
        *,
        every_steps: int,
        num_groups: int = 4,
        note: Note = print_note,
        system_prompts: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(path, note)
        self._system_prompts = dict(system_prompts or {})  # of each task
        self._every_steps = every_steps
        self._num_groups = num_groups

    def write(self, batch: Batch) -> None:
        if not self._every_steps or batch.step % self._every_steps:
            return
        rows = []
        for group in batch.groups[: self._num_groups]:
            messages, system = list(group.prompt.messages), self._system_prompts.get(group.task)
            if system and not any(message.get("role") == "system" for message in messages):
                messages.insert(0, {"role": "system", "content": system})
            rows += [
                {
                    "step": batch.step,
                    "task": group.task,
                    "group_id": group.group_id,
                    "rollout_id": rollout.rollout_id,
                    "prompt": messages,
                    "response": rollout.text,
                    "gt_answer": group.prompt.gt_answer,
                    "test_cases": group.prompt.test_cases,
                    "reward": rollout.reward,
                    "parts": rollout.score.parts if rollout.score else {},
                    "versions": sorted(set(expand_segments(rollout.segments))),
                    "temperature": rollout.temperature,
                    "finish_reason": rollout.finish_reason,
                    "response_length": rollout.num_sampled,
                }
                for rollout in group.rollouts
            ]
        self.append([json.dumps(row, ensure_ascii=False) for row in rows])


class TimelineLog(LineFile):
    """timeline/events.jsonl: closed waits, which say which worker did what, from when to when.

    Times are seconds since the epoch, by the driver's clock. Events are written in batches, at the
    latest after a step. The first line of each session (a start or a resume) marks when it began."""

    def __init__(self, folder: Path, waits: Waits, note: Note = print_note) -> None:
        super().__init__(folder / TIMELINE_FILE, note)
        self._epoch = time.time() - waits.clock()
        self._lines: list[tuple[str, str, str, float, float]] = []
        self._rewards: list[float] = []  # seconds of each score of training since the last reading
        waits.on_close(self.add)
        now = self._epoch + waits.clock()
        self.append([_event("run", SESSION, "", now, now)])

    def add(self, wait: OpenWait) -> None:
        assert wait.until is not None
        if wait.what == WaitKind.REWARD and not wait.lane.startswith("rewards of eval "):
            self._rewards.append(wait.until - wait.since)
        start, end = self._epoch + wait.since, self._epoch + wait.until
        self._lines.append((wait.lane, wait.what, wait.detail, start, end))
        if len(self._lines) >= _TIMELINE_BATCH:
            self.flush()

    def read_metrics(self) -> dict[str, float]:
        """How long a response waited for its reward, on average since the last step, whose events are written."""
        self.flush()  # a driver that is killed takes few with it
        seconds, self._rewards = self._rewards, []
        return {"time/reward_s": sum(seconds) / len(seconds)} if seconds else {}

    def flush(self) -> None:
        lines, self._lines = self._lines, []
        if lines:
            self.append([_event(*line) for line in lines])

    def close(self) -> None:
        self.flush()
        super().close()


def _event(lane: str, what: str, detail: str, start: float, end: float) -> str:
    """One event as JSON; written by hand, because a run has thousands in a minute."""
    more = f', "detail": {quoted(detail)}' if detail else ""
    times = f'"start": {start:.6f}, "end": {end:.6f}'
    return f'{{"lane": {quoted(lane)}, "what": {quoted(what)}, {times}{more}}}'


# -- trackers of other systems ------------------------------------------------------------------


def _not_installed(name: str) -> UserError:
    return UserError(
        f"track.trackers: got {name!r}, which is not installed; "
        f"install it with: pip install 'penstock[{name}]'"
    )


class TensorBoardTracker(Tracker):
    """TensorBoard event files in RUN/tensorboard: every metric as a scalar."""

    def __init__(self, info: RunInfo) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError:
            raise _not_installed("tensorboard") from None
        self._writer = SummaryWriter(
            str(info.folder / "tensorboard"), purge_step=info.first_step + 1
        )

    def log_step(self, step: int, metrics: dict[str, float]) -> None:
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, step)

    log_eval = log_step

    def close(self) -> None:
        self._writer.close()


class WandbTracker(Tracker):
    """Sends every metric to one W&B run; WANDB_MODE=offline works without a network.

    The run's id is kept in RUN/wandb-id, so that a resumed run continues the same W&B run."""

    def __init__(self, info: RunInfo) -> None:
        try:
            import wandb
        except ImportError:
            raise _not_installed("wandb") from None
        id_file = info.folder / "wandb-id"
        if not id_file.exists():
            id_file.write_text(uuid.uuid4().hex[:12])
        arguments = {
            "project": os.environ.get("WANDB_PROJECT", "penstock"),
            "name": info.name,
            **info.config.track.wandb,
            "id": id_file.read_text(),
            "resume": "allow",
            "dir": str(info.folder),
            "config": info.config.model_dump(),
        }
        try:
            self._run = wandb.init(**arguments)
        except TypeError as error:
            raise UserError(
                f"track.wandb: got {info.config.track.wandb}, allowed: arguments of wandb.init ({error})"
            ) from None
        # An evaluation may end after the next step; W&B's own step only goes up.
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")

    def log_step(self, step: int, metrics: dict[str, float]) -> None:
        self._run.log({**metrics, "step": step})

    log_eval = log_step

    def close(self) -> None:
        self._run.finish()

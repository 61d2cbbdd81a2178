"""Measure idle time and speed over sync with the real engine, trainer and journal (demo model).

Run by `pipeline.py --real` (the demo as it is) and `pipeline.py --real --matched` (rates made equal, lengths
log-normal). Expected of `--matched`, before it was run: overlap alone is at most 2x, as the two sides take
turns in sync mode; skew adds to it, as the slots drain at the end of every sync batch. The driver shares
the two cores with both workers, so its CPU time is lost to them whenever both are busy.
Steady state: the first tenth of the steps and the last ones (2 + max_staleness) are left out.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
from skewed_engine import Skew

from penstock.inspection.track.logs import RunInfo
from penstock.types import Prompt, Rollout, Score

HERE = Path(__file__).resolve().parent
QUIET = ["eval.tasks={}", "checkpoint.every_steps=0", "track.rollouts_every_steps=0"]
GROUPS, GENERATIONS = 16, 8
MEAN_TOKENS, MOST_TOKENS = 48, 480
SLOTS = 32  # four responses of a step for each, as on the virtual clock
FIRST_TEXTS, TEXT_TOKENS = 8, 32
PROMPT_TOKENS = 12  # approximate
_TICKS = os.sysconf("SC_CLK_TCK")


# ---- parts that the run loads by name


class EvenTokens:
    """A reward that differs within a group, so that every response has a gradient."""

    async def score(self, rollout: Rollout, prompt: Prompt) -> Score:
        return Score(float(np.mean(np.asarray(rollout.response_ids) % 2 == 0)))

    async def close(self) -> None: ...


class ProcessClock:
    """A tracker that records when each step ended, and the CPU time of every process until then."""

    def __init__(self, info: RunInfo) -> None:
        self._file = (info.folder / "clock.jsonl").open("a", encoding="utf-8")

    def log_step(self, step: int, metrics: dict[str, float]) -> None:
        line = {"at": time.monotonic(), "driver": time.process_time(), "workers": _children()}
        self._file.write(json.dumps(line) + "\n")

    def log_eval(self, step: int, metrics: dict[str, float]) -> None: ...

    def note(self, text: str) -> None: ...

    def close(self) -> None:
        self._file.close()


def _children() -> dict[int, float]:
    """Return the CPU seconds of every child of this process."""
    found = {}
    for listed in Path("/proc/self/task").glob("*/children"):
        for pid in map(int, listed.read_text().split()):
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
            found[pid] = (int(fields[11]) + int(fields[12])) / _TICKS
    return found


# ---- one run


@dataclass(slots=True, frozen=True, kw_only=True)
class Load:
    """The settings of one run; with `bound` None it runs the sync strategy."""

    sigma: float
    passes: int = 1
    texts: int = FIRST_TEXTS  # of the auxiliary loss, in each pass: the trainer's fine adjustment
    slots: int = SLOTS
    steps: int = 6
    bound: int | None = None

    @property
    def skew(self) -> Skew:
        return Skew(sigma=self.sigma, mean_tokens=MEAN_TOKENS, most_tokens=MOST_TOKENS)

    @property
    def batch_tokens(self) -> float:
        """Return the expected number of tokens of a step's responses."""
        return GROUPS * GENERATIONS * float(np.mean([self.skew.length(n) for n in range(4000)]))

    def words(self, folder: Path, model: Path, meter: Path) -> list[str]:
        own = "pipeline_real"
        strategy = (
            ["produce.strategy=sync"]
            if self.bound is None
            else ["produce.strategy=async", f"produce.max_staleness={self.bound}"]
        )
        return [
            f"run.dir={folder.parent}",
            f"run.name={folder.name}",
            f"model.path={model}",
            f"train.steps={self.steps}",
            f"train.groups_per_step={GROUPS}",
            f"train.num_epochs={self.passes}",
            "train.ptx.coefficient=0.1",
            f"train.ptx.data={model / 'texts.jsonl'}",
            f"train.ptx.sequences_per_step={self.texts}",
            f"train.ptx.max_tokens={TEXT_TOKENS}",
            f"sampling.num_generations={GENERATIONS}",
            f"sampling.max_tokens={MOST_TOKENS}",
            f"engine.max_slots={self.slots}",
            "engine.name=skewed_engine:SkewedEngine",
            f"engine.options.sigma={self.sigma}",
            f"engine.options.mean_tokens={MEAN_TOKENS}",
            f"engine.options.most_tokens={MOST_TOKENS}",
            f"engine.options.meter={meter}",
            f'tasks.train.rewards=[{{type="{own}:EvenTokens"}}]',
            f'track.trackers=["{own}:ProcessClock"]',
            *strategy,
            *QUIET,
        ]


@dataclass(slots=True, kw_only=True)
class Figures:
    """Figures of one run in its steady state; seconds are per step unless noted."""

    load: Load
    step_s: float
    whole_s: float  # over all steps but the first
    wall_s: float  # of the whole run, start and end included
    staleness: float
    train_s: float
    publish_s: float
    groups_s: float  # the trainer's side waits for groups
    decode_s: float
    switch_s: float
    slept_s: float
    empty: float  # share of the slots' time
    rows: float  # decoded together, on average
    driver_cpu_s: float
    engine_cpu_s: float
    trainer_cpu_s: float
    batch_cpu_s: float  # of the engine, for as many tokens as a step has
    steps: np.ndarray = field(repr=False)  # of the engine: seconds, of CPU; rows, new requests

    @property
    def other_s(self) -> float:
        """Return the trainer's other seconds: journal, metrics and calls."""
        return self.step_s - self.train_s - self.publish_s - self.groups_s

    @property
    def trainer_idle(self) -> float:
        return 1 - (self.train_s + self.publish_s) / self.step_s

    @property
    def engine_idle(self) -> float:
        return self.slept_s / self.step_s


def run(load: Load, folder: Path, model: Path) -> Figures:
    name = "sync" if load.bound is None else f"staleness-{load.bound}"
    path = folder / f"{name}-{len(list(folder.iterdir()))}"
    meter = folder / f"{path.name}.meter"
    command = [sys.executable, "-m", "penstock.cli", "train", *load.words(path, model, meter)]
    search = os.pathsep.join([str(HERE), os.environ.get("PYTHONPATH", "")])
    began = time.monotonic()
    done = subprocess.run(
        command, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": search}
    )
    if done.returncode:
        raise SystemExit(f"{' '.join(command)}\n{done.stdout}{done.stderr}")
    return read(load, path, meter, time.monotonic() - began)


def _lines(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def read(load: Load, path: Path, meter: Path, wall_s: float) -> Figures:
    clock, metrics, engine = (
        _lines(path / "clock.jsonl"),
        _lines(path / "metrics.jsonl"),
        _lines(meter),
    )
    first, last = max(1, load.steps // 10), load.steps - 2 - (load.bound or 0)
    begin, end, count = clock[first], clock[last], last - first
    seconds = end["at"] - begin["at"]
    # both clocks are CLOCK_MONOTONIC of this machine
    inside = [line for line in engine if begin["at"] <= line["at"] <= end["at"]]
    before, after = inside[0], inside[-1]
    span = after["at"] - before["at"]
    steps = np.array([step for line in inside[1:] for step in line["steps"]])
    decode_s, rows = steps[:, 0].sum(), float((steps[:, 0] * steps[:, 2]).sum() / steps[:, 0].sum())
    slept = (after["slept_s"] - before["slept_s"]) / span
    per_step = seconds / count / span  # the engine's share of the time, as seconds a step
    batches = steps[:, 2].sum() / load.batch_tokens
    trainer = [pid for pid in end["workers"] if int(pid) != after["pid"]]
    chosen = metrics[first + 1 : last + 1]
    return Figures(
        load=load,
        step_s=seconds / count,
        whole_s=(clock[-1]["at"] - clock[0]["at"]) / (load.steps - 1),
        wall_s=wall_s,
        staleness=float(np.mean([row["staleness/mean"] for row in chosen])),
        train_s=sum(row["time/train_s"] for row in chosen) / count,
        publish_s=_publishing(path, first + 1, last + 1) / count,
        groups_s=sum(row["time/consumer_wait_s"] for row in chosen) / count,
        decode_s=decode_s * per_step,
        switch_s=(after["switch_s"] - before["switch_s"]) * per_step,
        slept_s=slept * seconds / count,
        empty=1 - (1 - slept) * rows / load.slots,
        rows=rows,
        driver_cpu_s=(end["driver"] - begin["driver"]) / count,
        engine_cpu_s=(after["cpu_s"] - before["cpu_s"]) * per_step,
        trainer_cpu_s=sum(end["workers"][p] - begin["workers"].get(p, 0.0) for p in trainer)
        / count,
        batch_cpu_s=(after["cpu_s"] - before["cpu_s"]) / batches,
        steps=steps,
    )


def _publishing(path: Path, first: int, last: int) -> float:
    """Return the seconds that the trainer took to publish the weights of these steps (counted from 0)."""
    events = _lines(path / "timeline" / "events.jsonl")
    lengths = [e["end"] - e["start"] for e in events if e["what"] == "publish"]
    return sum(lengths[first:last])


# ---- equal rates


@dataclass(slots=True, frozen=True)
class EngineModel:
    """A model of the CPU seconds of an engine step: fixed, per row and per new request."""

    fixed: float
    row: float
    new: float

    @classmethod
    def fit(cls, steps: np.ndarray) -> EngineModel:
        """Fit by least squares without the slowest hundredth, which other processes disturbed."""
        kept = steps[steps[:, 1] <= np.quantile(steps[:, 1], 0.99)]
        columns = np.stack([np.ones(len(kept)), kept[:, 2], kept[:, 3]], axis=1)
        found = np.linalg.lstsq(columns, kept[:, 1], rcond=None)[0]
        return cls(*np.maximum(found, 0))

    def batch_s(self, tokens: float, slots: int) -> float:
        """Return the seconds if all slots were always in use."""
        return tokens / slots * (self.fixed + self.row * slots) + self.new * GROUPS * GENERATIONS


def trainer_that_takes(seconds: float, one: Figures) -> Load:
    """Return passes over a batch, and texts per pass, that cost the trainer `seconds` of CPU time."""
    responses = GROUPS * GENERATIONS
    tokens = one.load.batch_tokens + responses * PROMPT_TOKENS + one.load.texts * TEXT_TOKENS
    a_pass = one.trainer_cpu_s / one.load.passes
    text = a_pass * TEXT_TOKENS / tokens
    without = a_pass - one.load.texts * text
    passes = max(1, int(seconds / (without + text)))
    texts = max(1, round((seconds / passes - without) / text))
    return replace(one.load, passes=passes, texts=texts)


def match(sigma: float, folder: Path, model: Path) -> tuple[Load, Figures]:
    """Return settings with which both sides need equal CPU time per step, and the last warm-up."""
    first = run(Load(sigma=sigma, steps=6), folder, model)
    engine = EngineModel.fit(first.steps)
    full_s = engine.batch_s(first.load.batch_tokens, SLOTS)
    print(
        f"  sync warm-up, {SLOTS} slots, 1 pass: an engine step takes {engine.fixed * 1e3:.2f} ms + "
        f"{engine.row * 1e6:.0f} us a row + {engine.new * 1e6:.0f} us a new request of CPU time, so a batch "
        f"{full_s:.2f} s with all slots in use; the trainer {first.trainer_cpu_s:.2f} s a pass"
    )
    guess = trainer_that_takes(1.1 * full_s, first)
    second = run(replace(guess, steps=12, bound=4), folder, model)
    chosen = trainer_that_takes(second.batch_cpu_s - second.other_s, second)
    print(
        f"  warm-up with staleness 4, {guess.passes} passes, {guess.texts} texts: engine "
        f"{second.batch_cpu_s:.3f} s, trainer {second.trainer_cpu_s:.3f} s of CPU time a step, and "
        f"{second.other_s:.3f} s between two steps\n  chosen: train.num_epochs={chosen.passes}, "
        f"train.ptx.sequences_per_step={chosen.texts} (of {TEXT_TOKENS} tokens), engine.max_slots={SLOTS}",
        flush=True,
    )
    return chosen, second


def steps_within(seconds: float, warm_up: Figures, runs: int) -> int:
    """Return the steps of each async run; the sync run does half as many, each about 2.5 times as long."""
    start_s = warm_up.wall_s - warm_up.load.steps * warm_up.whole_s
    return int(np.clip((seconds - (runs + 1) * start_s) / warm_up.whole_s / (runs + 1.25), 14, 40))


def matched(minutes: float, sigmas: list[float], bounds: list[int]) -> None:
    """Measure with both sides matched, for as many steps as fit into the time."""
    for sigma in sigmas:
        began, given_s = time.monotonic(), minutes * 60 / len(sigmas)
        with tempfile.TemporaryDirectory() as place:
            folder, model = Path(place) / "runs", Path(place) / "model"
            folder.mkdir()
            _lengthened_demo(model)
            print(
                f"lengths: log-normal, sigma {sigma:g}, mean {MEAN_TOKENS} tokens, most {MOST_TOKENS}; "
                f"{GROUPS} x {GENERATIONS} responses a step; demo model, one thread each"
            )
            chosen, warm_up = match(sigma, folder, model)
            left_s = given_s - (time.monotonic() - began)
            steps = steps_within(left_s, warm_up, len(bounds))
            figures = [run(replace(chosen, bound=None, steps=steps // 2), folder, model)]
            _print_head(steps)
            _print_line(figures[0], figures[0])
            for bound in bounds:
                figures.append(run(replace(chosen, bound=bound, steps=steps), folder, model))
                _print_line(figures[-1], figures[0])
            _print_times(figures)


def _lengthened_demo(folder: Path) -> None:
    """Write the demo policy with more positions (rotary, so its weights stay the same), and texts."""
    from penstock.config.demo import resolve_model_path

    shutil.copytree(resolve_model_path("demo"), folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(
        json.dumps(config | {"max_position_embeddings": MOST_TOKENS + 64})
    )
    texts = (json.dumps({"text": f"{n} + {n + 1} = {2 * n + 1}; " * 8}) for n in range(256))
    (folder / "texts.jsonl").write_text("\n".join(texts))


def _name(one: Figures) -> str:
    return "sync" if one.load.bound is None else str(one.load.bound)


def _print_head(steps: int) -> None:
    print(
        f"  {steps} steps (sync {steps // 2})        speed             idle, steady\n"
        "  max_staleness   s/step  steady   whole  trainer   engine  slots empty  staleness"
    )


def _print_line(one: Figures, sync: Figures) -> None:
    print(
        f"  {_name(one):>13}  {one.step_s:7.3f}  {sync.step_s / one.step_s:5.2f}x  "
        f"{sync.whole_s / one.whole_s:5.2f}x  {one.trainer_idle:7.1%}  {one.engine_idle:7.1%}  "
        f"{one.empty:11.1%}  {one.staleness:9.2f}",
        flush=True,
    )


def _print_times(figures: list[Figures]) -> None:
    """Print where a step's seconds go on each side, and the CPU seconds of each process."""
    print(
        "  seconds a step       trainer: train  publish  waits for groups  other | engine: decode"
        "  switch  waits  other   rows | CPU: driver  engine  trainer  of 2 cores"
    )
    for one in figures:
        trainer = (one.train_s, one.publish_s, one.groups_s)
        engine = (one.decode_s, one.switch_s, one.slept_s)
        cpu = (one.driver_cpu_s, one.engine_cpu_s, one.trainer_cpu_s)
        print(
            f"  {_name(one):>13}  {trainer[0]:20.3f}  {trainer[1]:7.3f}  {trainer[2]:16.3f}  "
            f"{one.other_s:5.3f} | {engine[0]:14.3f}  {engine[1]:6.3f}  {engine[2]:5.3f}  "
            f"{one.step_s - sum(engine):5.3f}  {one.rows:5.1f} | {cpu[0]:11.3f}  {cpu[1]:6.3f}  "
            f"{cpu[2]:7.3f}  {sum(cpu) / one.step_s / 2:10.1%}",
            flush=True,
        )


# ---- the demo as it is


def demo_run(steps: int, bound: int | None, folder: str) -> tuple[float, float, float]:
    """Return seconds per step and the idle shares of a run, without its first third."""
    name = "sync" if bound is None else f"staleness-{bound}"
    strategy = ["strategy=sync"] if bound is None else ["strategy=async", f"max_staleness={bound}"]
    words = [f"run.dir={folder}", f"run.name={name}", f"train.steps={steps}", *QUIET]
    words += ["track.trackers=[]", "sampling.max_tokens=32", *(f"produce.{w}" for w in strategy)]
    command = [sys.executable, "-m", "penstock.cli", "train", *words]
    subprocess.run(command, check=True, capture_output=True)
    lines = _lines(Path(folder) / name / "metrics.jsonl")
    rows = [row for row in lines if "time/step_s" in row][steps // 3 :]
    seconds, trainer, engine = (
        sum(row[f"time/{key}"] for row in rows)
        for key in ("step_s", "consumer_wait_s", "producer_wait_s")
    )
    return seconds / len(rows), trainer / seconds, engine / seconds


def as_it_is(steps: int, bounds: list[int]) -> None:
    """Measure the demo unchanged. Idle: the trainer waits for groups; the engine has no request."""
    print("demo model, engine and trainer in processes of one thread each; times of the wall clock")
    print("  max_staleness   s/step  speed  trainer idle  engine idle")
    with tempfile.TemporaryDirectory() as folder:
        sync_s = 0.0
        for bound in [None, *bounds]:
            step_s, trainer, engine = demo_run(steps, bound, folder)
            sync_s = sync_s or step_s
            name = "sync" if bound is None else str(bound)
            speed = sync_s / step_s
            print(f"  {name:>13}  {step_s:7.3f}  {speed:4.2f}x  {trainer:12.1%}  {engine:11.1%}")

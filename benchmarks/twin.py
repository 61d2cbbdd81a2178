"""Measure how wrong `penstock simulate` is: real local runs beside what the twin says of them.

    python benchmarks/twin.py [--steps 14] [--engines 1 2 4] [--demo] [--keep FOLDER]
    python benchmarks/twin.py --scale [--count 10000] [--groups 1000000]
    python benchmarks/twin.py --cluster [--gpus 1 8 64 1000] [--times 1]

Runs `penstock train` with engines that sleep instead of decoding (`sleeping_engine.py`), so that the machine's
cores do not decide: 1, 2 and 4 engines, equal and skewed lengths, sync and async; the trainer trains for real, and sleeps.
Each run is predicted twice: from its own profile, and from that of the async run with one engine and the same lengths.
`--keep FOLDER` keeps the runs, and takes those that are there instead of training again.
`--demo` adds two runs of the demo with its real engine; `--engines --demo` runs nothing else. `--scale` measures the simulation of a
large cluster instead. `--cluster` prints what clusters of H200 would do in 100 steps with a 0.5B model, from the figures that docs/engines.md, docs/algorithms.md and
docs/weights.md measured on one; `--times 14` makes every one of them so much slower, as for a model of so many times the
parameters: an assumption, not a measurement.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

from penstock.config.source import load_config
from penstock.run.twin import fit, plan
from penstock.run.twin.profile import DecodeModel, Profile, SeenGroup, TrainModel, assumed
from penstock.run.twin.simulate import DRIVER_IS_FULL, simulate

HERE = Path(__file__).resolve().parent
ENGINE = HERE / "sleeping_engine.py"
COMMON = [
    "eval.tasks={}",
    "checkpoint.every_steps=0",
    "track.trackers=[]",
    "track.rollouts_every_steps=0",
]
SLEEPING = [
    *COMMON,
    f"engine.name={ENGINE}:SleepingEngine",
    f"tasks.train.rewards=[{{type='{ENGINE}:Differs'}}]",
    f"algorithm.name={ENGINE}:SleepingGRPO",
    "engine.max_slots=32",
    "sampling.max_tokens=240",
    "sampling.num_generations=4",
    "train.groups_per_step=8",
]
SHOWN = ("tokens/s", "trainer idle", "engine idle")


def train(folder: Path, name: str, words: list[str]) -> Path:
    run = folder / name
    if run.exists():  # of an earlier call with --keep
        return run
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    command = [sys.executable, "-m", "penstock.cli", "train", *words]
    subprocess.run([*command, f"run.dir={folder}", f"run.name={name}"], check=True, env=environment)
    return run


def cases(engines: list[int]) -> list[tuple[str, float, list[str]]]:
    """Return (name, sigma, settings) of every run."""
    found = []
    for sigma in (0.0, 0.7):
        for mode in ("async", "sync"):
            for count in engines:
                words = [f"launch.num_producers={count}", f"engine.options.sigma={sigma}"]
                bound = [] if mode == "sync" else ["produce.max_staleness=2"]
                words += [f"produce.strategy={mode}", *bound]
                found.append((f"{mode}-{count}-{sigma:g}", sigma, words))
    return found


def show(name: str, source: str, run: Path, profile: Profile) -> list[float]:
    checks = {one.name: one for one in plan.check(str(run), profile)}
    cells = [
        f"{checks[key].real:>8,.0f} {checks[key].error:>+7.1%}"
        if not checks[key].is_share
        else f"{checks[key].real:>8.1%} {checks[key].error * 100:>+6.1f}p"
        for key in SHOWN
    ]
    print(f"{name:<14} {source:<12} " + "   ".join(cells), flush=True)
    return [abs(checks[key].error) for key in SHOWN]


def errors(options: argparse.Namespace, folder: Path) -> None:
    print(f"{'run':<14} {'profile':<12} " + "   ".join(f"{key + ', error':>16}" for key in SHOWN))
    base: dict[float, Profile] = {}
    worst: list[list[float]] = []
    for name, sigma, words in cases(options.engines):
        run = train(folder, name, [*SLEEPING, *words, f"train.steps={options.steps}"])
        own = fit.read_profile(str(run))
        base.setdefault(sigma, own)
        show(name, "its own", run, own)
        worst.append(show(name, f"async-{options.engines[0]}", run, base[sigma]))
    if options.demo:
        words = [*COMMON, "train.steps=40"]
        runs = {
            "demo": train(folder, "demo", words),
            "demo-2": train(folder, "demo-2", [*words, "seed=1", "produce.max_staleness=2"]),
        }
        profiles = {name: fit.read_profile(str(run)) for name, run in runs.items()}
        for name, other in (("demo", "demo-2"), ("demo-2", "demo")):
            show(name, "its own", runs[name], profiles[name])
            worst.append(show(name, other, runs[name], profiles[other]))
    tops = [max(column) for column in zip(*worst, strict=True)]
    print(
        "worst from another run: "
        + ", ".join(f"{k} {v:.1%}" for k, v in zip(SHOWN, tops, strict=True))
    )


def scale(count: int, groups: int) -> None:
    batch = max(64, count * 2)
    config = load_config(
        None,
        [
            f"launch.num_producers={count}",
            f"train.groups_per_step={batch}",
            "sampling.max_tokens=1024",
            "produce.max_staleness=2",
            "engine.max_slots=64",
            "eval.tasks={}",
        ],
    ).config
    profile = assumed(config)
    profile.driver_s_per_group = profile.driver_s_per_response = 0.0  # else the driver is the limit
    began, cpu = time.perf_counter(), time.process_time()
    result = simulate(config, profile, steps=max(1, groups // batch))
    print(
        f"{count:,} engines, {result.groups:,} groups: {time.perf_counter() - began:.0f} s "
        f"({time.process_time() - cpu:.0f} s of CPU), {result.notes}"
    )


def h200(times: float) -> Profile:
    """Return the figures of one H200 and a 0.5B model; responses of 306 tokens on average, 2,048 at most."""
    random = np.random.default_rng(0)
    drawn = np.clip(random.lognormal(np.log(306) - 0.5, 1.0, (512, 8)), 1, 2048)
    return Profile(
        source="one H200, 0.5B parameters" + (f", {times:g} times slower" if times != 1 else ""),
        groups=[SeenGroup(tuple(map(int, row)), (0.0, 1.0) * 4) for row in drawn],
        # 1.16 ms for 8 rows and 2.4 ms for 512
        decode=DecodeModel(
            step_s=1.14e-3 * times, row_s=2.46e-6 * times, prefill_s=1e-3 * times, slots=512
        ),
        train=TrainModel(fixed_s=0.05 * times, token_s=times / 80_000),
        reward_s=0.005,  # assumed
        publish_s=0.004 * times,
        sync_s=0.45 * times,  # 1 GB from node to node with gloo
    )


def clusters(sizes: list[int], times: float) -> None:
    profile = h200(times)
    print(f"profile: {profile.source}; groups of 8 responses, max_staleness 2")
    for gpus in sizes:
        batch = 64 if gpus == 1 else 16 * gpus if gpus < 100 else 8 * gpus
        words = [f"train.groups_per_step={batch}", "sampling.num_generations=8", "eval.tasks={}"]
        words += ["sampling.max_tokens=2048", "engine.max_slots=512", "produce.max_staleness=2"]
        if gpus == 1:
            words += ["launch.colocate=true"]
        config = load_config(None, [*words, "checkpoint.every_steps=10000"]).config
        tried = plan.split_configs(config, gpus) if gpus > 1 else [config]
        steps = max(6, 2000 // batch)
        best = max(
            (simulate(config, profile, steps=100, most=steps) for config in tried),
            key=lambda result: result.tokens_per_s,
        )
        where = f"{best.engines} engines + {best.ranks} ranks" if gpus > 1 else "colocated"
        print(
            f"{gpus:>5} GPUs, {batch:>6} groups a step: {where:<26} {best.tokens_per_s:>12,.0f} tokens/s "
            f"{best.seconds_per_step:>7.2f} s/step, idle {best.trainer_idle:.0%} / {best.engine_idle:.0%}, "
            f"staleness {best.mean_staleness:.2f}, driver {best.driver_busy:.0%}"
            + ("  (one driver does not suffice)" if best.driver_busy > DRIVER_IS_FULL else ""),
            flush=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=14)
    parser.add_argument("--engines", type=int, nargs="*", default=[1, 2, 4])
    parser.add_argument("--demo", action="store_true")
    parser.add_argument("--keep", type=Path)
    parser.add_argument("--scale", action="store_true")
    parser.add_argument("--count", type=int, default=10_000)
    parser.add_argument("--groups", type=int, default=1_000_000)
    parser.add_argument("--cluster", action="store_true")
    parser.add_argument("--gpus", type=int, nargs="+", default=[1, 8, 64, 1000])
    parser.add_argument("--times", type=float, default=1.0)
    options = parser.parse_args()
    if options.cluster:
        clusters(options.gpus, options.times)
        return
    if options.scale:
        scale(options.count, options.groups)
        return
    with tempfile.TemporaryDirectory() as folder:
        errors(options, options.keep or Path(folder))


if __name__ == "__main__":
    main()

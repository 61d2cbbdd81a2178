"""The faults of one schedule: what happens to whom, and at which moment.

A moment is a tick (the n-th callback that the driver's loop runs, so any await) or the n-th passing of a
phase of a call (a message sent, its work begun, done, answered), or some seconds after another fault.
Faults come alone, in pairs and in triples; the second of a pair often follows the first closely.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

DRIVER = "driver"
PHASES = ("sent", "begun", "done", "answered")
METHODS = {
    "trainer": ("train", "publish", "announce", "snapshot", "write_snapshot", "identity", "load"),
    "engine": ("generate_many", "update_weights", "stats", "pause", "resume", "abort", "__start__"),
}


@dataclass(slots=True, frozen=True, kw_only=True)
class Fault:
    """One fault. Happens at a tick of a life of the driver, or at a phase of a call."""

    kind: str
    target: str  # a worker's name, the driver, or the disk
    life: int = 0  # the life of the driver in which it happens
    tick: int = 0
    method: str = ""
    phase: str = ""
    passing: int = 1  # at the n-th passing of that phase
    after_s: float | None = None  # at this time after the fault before it struck
    seconds: float | None = None  # how long it lasts; None: for ever

    def __str__(self) -> str:
        when = f"tick {self.tick}" if self.tick else f"{self.method} {self.phase} #{self.passing}"
        if self.after_s is not None:
            when = f"{self.after_s:.3f} s after the one before"
        lasts = "" if self.seconds is None else f" for {self.seconds:g} s"
        return f"{self.kind} {self.target}{lasts} at {when} of life {self.life}"


def draw_faults(chance: random.Random, workers: list[str], horizon: int) -> list[Fault]:
    """Draw one to three faults for these workers."""
    number = chance.choices((0, 1, 2, 3), (1, 5, 8, 6))[0]
    faults: list[Fault] = []
    for _ in range(number):
        faults.append(_draw(chance, workers, horizon, faults))
    return faults


KINDS = {
    "kill": 8,
    "stall": 4,
    "slow": 1,
    "lose": 2,
    "restart": 4,
    "stop": 1,
    "full": 1,
    "slow disk": 1,
    "scale": 1,
}


# what can happen to the journal's files; "truncate": the driver is killed and the end of its log lost
FILE_KINDS = ("remove", "replace", "unsync", "truncate", "read-only")


def draw_file_faults(chance: random.Random, steps: int) -> list[Fault]:
    """Draw a fault of the journal's files for one schedule in eight."""
    if chance.random() > 0.125:
        return []
    tick = chance.randrange(1, 280 * steps)
    return [Fault(kind=chance.choice(FILE_KINDS), target="journal", tick=tick)]


def _draw(chance: random.Random, workers: list[str], horizon: int, before: list[Fault]) -> Fault:
    kind = chance.choices(list(KINDS), list(KINDS.values()))[0]
    target = chance.choice(workers)
    if before and before[-1].kind == "stall" and chance.random() < 0.4:
        kind = "kill"  # of somebody else: what the stalled worker holds up meets a restart
        target = chance.choice([one for one in workers if one != before[-1].target])
    seconds: float | None = None
    if kind in ("restart", "stop", "scale"):
        target = DRIVER
    elif kind in ("full", "slow disk"):
        target = chance.choice(("journal", "checkpoint"))
        seconds = chance.choice((1.0, 20.0))
    elif kind in ("stall", "slow"):
        seconds = chance.choice((5.0, 40.0, 400.0, None if kind == "stall" else 60.0))
    life = (
        sum(fault.kind in ("restart", "stop") for fault in before) if chance.random() < 0.8 else 0
    )
    if before and before[-1].life == life and chance.random() < 0.6:
        after_s = chance.random() * chance.choice((0.02, 4.0, 30.0))
        return Fault(kind=kind, target=target, life=life, after_s=after_s, seconds=seconds)
    if target in workers and chance.random() < 0.4:
        methods = METHODS["trainer" if target.startswith("trainer") else "engine"]
        return Fault(
            kind=kind,
            target=target,
            life=life,
            method=chance.choice(methods),
            phase=chance.choice(PHASES),
            passing=chance.randrange(1, 5),
            seconds=seconds,
        )
    tick = chance.randrange(1, horizon)
    return Fault(kind=kind, target=target, life=life, tick=tick, seconds=seconds)

"""What the twin knows of the parts that it does not run: lengths, rewards, speeds, waits.

A profile comes from a run (`fit.py`), from a file that `--save-profile` wrote, or is assumed. Times are
in seconds.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from pydantic import TypeAdapter

from penstock.config import Config, ProducerKindConfig
from penstock.errors import UserError

LOSS_PER_DOUBLING = 0.05  # assumed: twice the ranks train 5 % less than twice as fast
# Measured: benchmarks/driver.py with groups of 4 and of 16 responses of 256 tokens, on one Neoverse-N1 core.
DRIVER_S_PER_GROUP = 0.25e-3
DRIVER_S_PER_RESPONSE = 0.09e-3


@dataclass(slots=True, frozen=True, kw_only=True)
class DecodeModel:
    """The speed of one engine: a decode step with n rows takes `step_s + n * row_s`."""

    step_s: float  # of a decode step, whatever the rows
    row_s: float  # per row of a decode step
    prefill_s: float = 0.0  # of a group's prompt, which is computed once
    slots: int = 64  # most rows

    def seconds(self, rows: float) -> float:
        return self.step_s + rows * self.row_s

    def at_speed(self, speed: float) -> DecodeModel:
        """An engine that is so many times as fast."""
        return replace(
            self,
            step_s=self.step_s / speed,
            row_s=self.row_s / speed,
            prefill_s=self.prefill_s / speed,
        )


def rank_share(ranks: int) -> float:
    """The share of one rank's time per token that so many ranks need together."""
    return 1 / ranks / (1 - LOSS_PER_DOUBLING) ** max(0, ranks - 1).bit_length()


@dataclass(slots=True, frozen=True, kw_only=True)
class TrainModel:
    """The speed of the trainer: its ranks share the tokens of an update but not its fixed time."""

    fixed_s: float
    token_s: float  # per response token, on one rank

    def seconds(self, tokens: int, ranks: int) -> float:
        return self.fixed_s + self.token_s * tokens * rank_share(ranks)


@dataclass(slots=True, frozen=True)
class SeenGroup:
    """One recorded group: the tokens and the reward of each response, and whether it was refused."""

    lengths: tuple[int, ...]
    rewards: tuple[float, ...]
    refused: bool = False
    task: str = ""


@dataclass(slots=True, kw_only=True)
class Profile:
    """The lengths and rewards of a run's groups, drawn again in their order, and the times of its parts."""

    source: str
    groups: list[SeenGroup]
    decode: DecodeModel  # of an engine as [engine] says
    train: TrainModel
    kinds: dict[str, DecodeModel] = field(default_factory=dict)  # `kind_name` -> such an engine
    reward_s: float = 0.0  # of a group, from its first reward to the end of its last
    publish_s: float = 0.0  # weights leaving the trainer
    sync_s: float = 0.0  # an engine loading weights
    land_s: float = 0.0  # a group being journalled
    before_s: float = 0.0  # from a batch to its update
    after_s: float = 0.0  # from an update to the next wait
    checkpoint_s: float = 0.0
    evaluations: dict[str, int] = field(default_factory=dict)  # task -> responses of an evaluation
    driver_s_per_group: float = DRIVER_S_PER_GROUP
    driver_s_per_response: float = DRIVER_S_PER_RESPONSE
    notes: list[str] = field(default_factory=list)

    def to_json(self) -> str:
        return TypeAdapter(Profile).dump_json(self).decode()

    @classmethod
    def from_json(cls, text: str | bytes, name: str) -> Profile:
        try:
            profile = TypeAdapter(Profile).validate_json(text)
        except ValueError as error:
            raise UserError(
                f"--profile: {name} got {' '.join(str(error).split())}, allowed: a run folder or a "
                "file that --save-profile wrote"
            ) from None
        if not profile.groups or not all(group.lengths for group in profile.groups):
            raise UserError(f"--profile: {name} got no finished group, allowed: a run that trained")
        return profile

    def decode_of(self, config: Config, number: int) -> DecodeModel:
        """The model of one engine of a run: of its kind if that is known, with the config's slots."""
        kind = config.launch.kind_of(number)
        model = self.decode if kind is None else self.kinds.get(kind_name(kind), self.decode)
        return replace(model, slots=config.of_engine(number).engine.max_slots or model.slots)

    def set_speeds(self, config: Config, speeds: Sequence[float]) -> None:
        """Set how fast the engines of each of launch.producer_kinds are, relative to the others."""
        kinds = config.launch.producer_kinds
        if len(speeds) != len(kinds) or not all(speed > 0 for speed in speeds):
            raise UserError(
                f"--kind-speed: got {' '.join(map(str, speeds))}, allowed: a number above 0 for each of the "
                f"{len(kinds)} launch.producer_kinds, in their order"
            )
        for kind, speed in zip(kinds, speeds, strict=True):
            self.kinds[kind_name(kind)] = self.decode.at_speed(speed)


def kind_name(kind: ProducerKindConfig) -> str:
    """What tells one of launch.producer_kinds from another, in any config."""
    return json.dumps({"engine": kind.engine, "ray_options": kind.ray_options}, sort_keys=True)


def assumed(config: Config) -> Profile:
    """A profile of no run: every figure of it is an assumption, and named as one."""
    sampling, random = config.sampling, np.random.default_rng(0)
    mean = max(1.0, sampling.max_tokens / 4)
    size = (512, sampling.num_generations)
    lengths = np.clip(random.lognormal(np.log(mean) - 0.125, 0.5, size), 1, sampling.max_tokens)
    groups = [
        SeenGroup(tuple(map(int, row)), tuple(map(float, random.integers(0, 2, len(row)))))
        for row in lengths
    ]
    return Profile(
        source="assumptions",
        groups=groups,
        decode=DecodeModel(
            step_s=0.02, row_s=5e-5, prefill_s=0.01, slots=config.engine.max_slots or 64
        ),
        train=TrainModel(fixed_s=0.1, token_s=5e-5),
        notes=[
            "no --profile: lengths are log-normal around a quarter of sampling.max_tokens, a decode step takes "
            "20 ms + 50 us a row, an update 0.1 s + 50 us a token; every figure below rests on that"
        ],
    )

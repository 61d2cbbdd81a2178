"""[launch]: how many workers a run has, where they run and how often they are restarted.

The tables of roles (`producers`, `consumers`, `agents`) say what one actor of that role needs of a Ray
cluster; `workers/ray/placement.py` finds the nodes.
"""

from __future__ import annotations

import re
from typing import Any, Literal, Self

from pydantic import Field, ValidationError, model_validator

from penstock.config.section import Section, first_mistake

_LABEL = r"[\w.-]+"
_LABELS = re.compile(rf"!?({_LABEL}|in\(\s*{_LABEL}(\s*,\s*{_LABEL})*\s*\))")  # as Ray reads them


class RoleConfig(Section):
    """What one actor needs, with launch.kind = "ray"."""

    cpus: float = Field(1, ge=0)
    """CPUs reserved for each."""
    gpus: float = Field(0, ge=0)
    """GPUs reserved for each; 0.5 lets two share a GPU."""
    accelerator: str = ""
    """Type of the GPU as Ray names it, such as H100 or A100-80G; empty: any."""
    node_label: dict[str, str] = {}
    """Labels that the node must have (`ray start --labels`); a value may be "a", "!a", "in(a,b)" or "!in(a,b)"."""
    resources: dict[str, float] = {}
    """Custom resources reserved for each (`ray start --resources`)."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.gpus > 1 and self.gpus % 1:
            raise ValueError(f"gpus got {self.gpus:g}, allowed: a part of one GPU, or whole GPUs")
        for name, value in self.resources.items():
            if name in ("CPU", "GPU") or value <= 0:
                raise ValueError(
                    f"resources got {name} = {value:g}, allowed: custom resources above 0; cpus and "
                    "gpus are keys of their own"
                )
        for name, label in self.node_label.items():
            if not _LABELS.fullmatch(label):
                raise ValueError(
                    f"node_label got {name} = {label!r}, allowed: values such as 'a', '!a', "
                    "'in(a,b)' or '!in(a,b)'"
                )
        return self


class ProducersConfig(RoleConfig):
    """Engines."""


class ConsumersConfig(RoleConfig):
    """Trainer ranks."""


class AgentsConfig(RoleConfig):
    """Actors of tasks.NAME.agent_actors: agent loops, and the rewards of their tasks."""


class ProducerKindConfig(Section):
    count: int = Field(1, ge=1)
    """Engines of this kind; the first kind is engine-0 and those after it."""
    engine: dict[str, Any] = {}
    """Fields of [engine] that differ for this kind."""
    place: dict[str, Any] = {}
    """Fields of [launch.producers] that differ for this kind."""


class LaunchConfig(Section):
    kind: Literal["local", "inline", "ray"] = "local"
    """local: worker processes on this machine; inline: all in this process; ray: a Ray cluster."""
    address: str = ""
    """With kind ray: address of the cluster to join; empty: start one on this machine."""
    num_producers: int = Field(1, ge=1)
    """Engine workers."""
    num_consumers: int = Field(1, ge=1)
    """Trainer ranks."""
    producers: ProducersConfig = ProducersConfig()
    """With kind ray: what each engine needs of its node."""
    consumers: ConsumersConfig = ConsumersConfig()
    """With kind ray: what each trainer rank needs of its node."""
    agents: AgentsConfig = AgentsConfig()
    """With kind ray: what each actor of tasks.NAME.agent_actors needs of its node."""
    producer_kinds: list[ProducerKindConfig] = []
    """Engines that differ from [engine] and [launch.producers]; num_producers counts them too."""
    wait_for_nodes_s: float = Field(0, ge=0)
    """With kind ray: how long to wait for nodes that the cluster lacks (an autoscaler adds them); 0: refuse at once."""
    colocate: bool = False
    """Engines and trainer ranks share GPUs and take turns; each frees its GPU memory for the other."""
    start_timeout_s: float = Field(300.0, gt=0)
    """Longest wait for a worker to start and load its model."""
    max_restarts: int = Field(3, ge=0)
    """Most restarts of a dead worker within ten minutes; 0: it is never restarted."""
    restart_backoff_s: float = Field(1.0, ge=0)
    """Wait before a worker's second restart within ten minutes; doubles with each further restart."""

    def kind_of(self, number: int) -> ProducerKindConfig | None:
        """The kind of an engine; None: it is as [engine] and [launch.producers] say."""
        return self.kind_and_position(number)[0]

    def kind_and_position(self, number: int) -> tuple[ProducerKindConfig | None, int]:
        """The kind of an engine, and its number among the engines of that kind."""
        for kind in self.producer_kinds:
            if number < kind.count:
                return kind, number
            number -= kind.count
        return None, number

    def place_of(self, number: int) -> ProducersConfig:
        """Return what one engine needs of its node."""
        kind = self.kind_of(number)
        return self.producers if kind is None else _over(self.producers, kind.place)

    @model_validator(mode="after")
    def _check(self) -> Self:
        count = sum(kind.count for kind in self.producer_kinds)
        if count > self.num_producers:
            raise ValueError(
                f"producer_kinds got {count} engines, allowed: at most num_producers = {self.num_producers}"
            )
        places = [self.producers]
        for place, kind in enumerate(self.producer_kinds):
            try:
                places.append(_over(self.producers, kind.place))
            except ValidationError as error:
                where = f"producer_kinds[{place}].place"
                raise ValueError(first_mistake(error, ProducersConfig, where)) from None
        allowed = (_where(self.consumers), _where(RoleConfig()))
        if self.colocate and any(_where(place) not in allowed for place in places):
            raise ValueError(
                "producers got a place with colocate, allowed: node_label, accelerator and resources "
                "of launch.consumers, which the engines share"
            )
        return self


def _over(base: ProducersConfig, fields: dict[str, Any]) -> ProducersConfig:
    return ProducersConfig.model_validate({**base.model_dump(), **fields})


def _where(role: RoleConfig) -> tuple[Any, ...]:
    return role.accelerator, role.node_label, role.resources

"""The table [launch]: where engines, trainer ranks and agents run, and what each needs of its node."""

from __future__ import annotations

import re
from typing import Any, Literal, Self

from pydantic import Field, model_validator

from penstock.config.sections import Section, overlay

_LABEL = r"[\w.-]+"
_LABELS = re.compile(rf"!?({_LABEL}|in\(\s*{_LABEL}(\s*,\s*{_LABEL})*\s*\))")  # as Ray reads them
Role = Literal["producers", "consumers", "agents"]


class RayOptions(Section):
    """What one actor needs of its node, by Ray's own names."""

    num_cpus: float = Field(1, ge=0)
    """CPUs reserved for each."""
    num_gpus: float = Field(0, ge=0)
    """GPUs reserved for each; 0.5 lets two share a GPU."""
    accelerator_type: str = ""
    """Type of the GPU as Ray names it, such as H100 or A100-80G; empty: any."""
    label_selector: dict[str, str] = {}
    """Labels that the node must have (`ray start --labels`); a value may be "a", "!a", "in(a,b)" or "!in(a,b)"."""
    resources: dict[str, float] = {}
    """Custom resources reserved for each (`ray start --resources`)."""

    @property
    def place(self) -> tuple[Any, ...]:
        return self.accelerator_type, self.label_selector, self.resources

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.num_gpus > 1 and self.num_gpus % 1:
            raise ValueError(
                f"num_gpus got {self.num_gpus:g}, allowed: a part of one GPU, or whole GPUs"
            )
        for name, value in self.resources.items():
            if name in ("CPU", "GPU") or value <= 0:
                raise ValueError(
                    f"resources got {name} = {value:g}, allowed: custom resources above 0; num_cpus "
                    "and num_gpus are keys of their own"
                )
        for name, label in self.label_selector.items():
            if not _LABELS.fullmatch(label):
                raise ValueError(
                    f"label_selector got {name} = {label!r}, allowed: values such as 'a', '!a', "
                    "'in(a,b)' or '!in(a,b)'"
                )
        return self


class ProducerKindConfig(Section):
    count: int = Field(1, ge=1)
    """Engines of this kind; the first kind is engine-0 and those after it."""
    engine: dict[str, Any] = {}
    """Fields of [engine] that differ for this kind."""
    ray_options: dict[str, Any] = {}
    """Fields of [launch.ray_options.producers] that differ for this kind."""


class LaunchConfig(Section):
    kind: Literal["local", "inline", "ray"] = "local"
    """local: worker processes on this machine; inline: all in this process; ray: a Ray cluster."""
    address: str = ""
    """With kind ray: address of the cluster to join; empty: start one on this machine."""
    num_producers: int = Field(1, ge=1)
    """Engine workers."""
    num_consumers: int = Field(1, ge=1)
    """Trainer ranks."""
    ray_options: dict[Role, RayOptions] = {}
    """With kind ray: what each engine (producers), trainer rank (consumers) and actor of tasks.NAME.agent_actors (agents)
    needs of its node: { producers = { num_gpus = 1 } }."""
    producer_kinds: list[ProducerKindConfig] = []
    """Engines that differ from [engine] and [launch.ray_options.producers]; num_producers counts them too."""
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
        """The kind of an engine; None: it is as [engine] and [launch.ray_options.producers] say."""
        return self.kind_and_position(number)[0]

    def kind_and_position(self, number: int) -> tuple[ProducerKindConfig | None, int]:
        """The kind of an engine, and its number among the engines of that kind."""
        for kind in self.producer_kinds:
            if number < kind.count:
                return kind, number
            number -= kind.count
        return None, number

    def ray_options_of(self, role: Role) -> RayOptions:
        """What each actor of a role needs of its node."""
        return self.ray_options.get(role, RayOptions())

    def engine_ray_options(self, number: int) -> RayOptions:
        """What one engine needs of its node."""
        kind, common = self.kind_of(number), self.ray_options_of("producers")
        fields = {} if kind is None else kind.ray_options
        return overlay(common, fields, "producer_kinds.ray_options")

    @model_validator(mode="after")
    def _check(self) -> Self:
        count = sum(kind.count for kind in self.producer_kinds)
        if count > self.num_producers:
            raise ValueError(
                f"producer_kinds got {count} engines, allowed: at most num_producers = {self.num_producers}"
            )
        options = [self.ray_options_of("producers")]
        for place, kind in enumerate(self.producer_kinds):
            key = f"producer_kinds[{place}].ray_options"
            options.append(overlay(options[0], kind.ray_options, key))
        allowed = (self.ray_options_of("consumers").place, RayOptions().place)
        if self.colocate and any(option.place not in allowed for option in options):
            raise ValueError(
                "ray_options.producers got a place with colocate, allowed: label_selector, "
                "accelerator_type and resources of launch.ray_options.consumers, which the engines share"
            )
        return self

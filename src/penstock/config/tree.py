"""The tree of a run's settings: the tables of `sections.py`, what they mean together and what cannot work.

Values that cannot work together are refused here, before a model is loaded. Reading files and overrides is
in `source.py`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Self

from pydantic import Field, model_validator

from penstock.config.launch import LaunchConfig
from penstock.config.sections import (
    AlgorithmConfig,
    CheckpointConfig,
    EngineConfig,
    EvalConfig,
    JournalConfig,
    ModelConfig,
    ProduceConfig,
    RunConfig,
    SamplingConfig,
    Section,
    SyncConfig,
    TaskConfig,
    TaskDataConfig,
    TeacherConfig,
    TrackConfig,
    TrainConfig,
    WatchdogConfig,
    overlay,
)
from penstock.config.server_url import server_url

# keys of a training task that an evaluation task takes over
_INHERITED = ("system_prompt", "chat_template_kwargs")


class Config(Section):
    """One run of Penstock."""

    seed: int = Field(0, ge=0)
    """Seed of everything random: the order of prompts, sampling, initialisation."""
    run: RunConfig = RunConfig()
    model: ModelConfig = ModelConfig()
    tasks: dict[str, TaskConfig] = {"train": TaskConfig()}
    sampling: SamplingConfig = SamplingConfig()
    engine: EngineConfig = EngineConfig()
    produce: ProduceConfig = ProduceConfig()
    algorithm: AlgorithmConfig = AlgorithmConfig()
    teachers: dict[str, TeacherConfig] = {}
    """Frozen models that algorithms distil from, beside the trainer."""
    train: TrainConfig = TrainConfig()
    sync: SyncConfig = SyncConfig()
    eval: EvalConfig = EvalConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    journal: JournalConfig = JournalConfig()
    track: TrackConfig = TrackConfig()
    launch: LaunchConfig = LaunchConfig()
    watchdog: WatchdogConfig = WatchdogConfig()

    @property
    def longest_sequence(self) -> int:
        """Most tokens of a request over all tasks and evaluations; 0: only the model bounds them.

        The conversation of an agent grows with each turn, and a judge reads a rubric and responses.
        """
        tasks: list[tuple[TaskDataConfig, SamplingConfig]] = [
            (task, self.task_sampling(name)) for name, task in self.tasks.items()
        ]
        tasks += [(task, self.eval_sampling(name)) for name, task in self.eval.tasks.items()]
        if any(task.agent != "single_turn" or task.is_judged_by_policy for task, _ in tasks):
            return 0
        lengths = (task.max_prompt_tokens + sampling.max_tokens for task, sampling in tasks)
        return max(lengths, default=0)

    @property
    def num_engines(self) -> int:
        """Engine workers: none if nothing is sampled, because every task has demonstrations."""
        samples = any(not task.demonstrates for task in self.tasks.values())
        return self.launch.num_producers if samples or self.eval.tasks else 0

    def task_sampling(self, task: str) -> SamplingConfig:
        """[sampling] with the task's own fields laid over it; a demonstration is one of its kind."""
        fields = self.tasks[task].sampling
        if self.tasks[task].demonstrates:
            fields = {"num_generations": 1} | fields
        return overlay(self.sampling, fields, f"tasks.{task}.sampling")

    def task_produce(self, task: str) -> ProduceConfig:
        """[produce] with the task's own fields laid over it."""
        return overlay(self.produce, self.tasks[task].produce, f"tasks.{task}.produce")

    def task_algorithm(self, task: str) -> AlgorithmConfig:
        """[algorithm] with the task's own fields laid over it; another algorithm has none of [algorithm]'s."""
        fields = self.tasks[task].algorithm
        is_other = fields.get("name", self.algorithm.name) != self.algorithm.name
        base = AlgorithmConfig() if is_other else self.algorithm
        return overlay(base, fields, f"tasks.{task}.algorithm")

    def asks_server(self, task: str) -> bool:
        """Whether the task's teacher is behind a server, whose log-probs are journalled with each group."""
        teacher = self.teachers.get(self.task_algorithm(task).teacher or "")
        return teacher is not None and bool(teacher.base_url)

    def eval_sampling(self, task: str) -> SamplingConfig:
        """The sampling of an evaluation task: [eval.sampling] with the task's own fields laid over it."""
        sampling = SamplingConfig(
            num_generations=1,
            temperature=0.0,
            max_tokens=self.sampling.max_tokens,
            stop=self.sampling.stop,
        )
        layers = {"eval": self.eval.sampling, f"eval.tasks.{task}": self.eval.tasks[task].sampling}
        for place, fields in layers.items():
            if "anneal" in fields:
                raise ValueError(
                    f"{place}: got sampling.anneal, allowed: sampling.temperature; "
                    "an evaluation has no steps to anneal over"
                )
            sampling = overlay(sampling, fields, f"{place}.sampling")
        return sampling

    def of_engine(self, number: int) -> Config:
        """The config of one engine: [engine] with the fields of its kind laid over it, and its server."""
        kind, position = self.launch.kind_and_position(number)
        engine = self.engine
        if kind is not None:
            engine = self.engine_of_kind(self.launch.producer_kinds.index(kind))
        if len(urls := engine.servers) > position:
            options = engine.options | {"urls": [urls[position]]}
            engine = engine.model_copy(update={"options": options})
        return self.model_copy(update={"engine": engine})

    def engine_of_kind(self, place: int) -> EngineConfig:
        """[engine] with the fields of one of launch.producer_kinds laid over it."""
        fields = self.launch.producer_kinds[place].engine
        return overlay(self.engine, fields, f"launch.producer_kinds[{place}].engine")

    def engine_kinds(self) -> list[EngineConfig]:
        """[engine] as each kind of engine has it."""
        kinds = self.launch.producer_kinds
        plain = [self.engine] if sum(k.count for k in kinds) < self.launch.num_producers else []
        return plain + [self.engine_of_kind(place) for place in range(len(kinds))]

    @property
    def has_own_engines(self) -> bool:
        """Whether all engines are Penstock's: they compute as the trainer does, and record what they chose from."""
        return all(engine.name == "transformers" for engine in self.engine_kinds())

    def hides_cuts(self, task: str) -> bool:
        """Whether the trainer does not learn which tokens a task's top_k or top_p left."""
        return self.task_sampling(task).cuts_tokens and not self.has_own_engines

    def pool_engine(self) -> EngineConfig:
        """[engine] as the pool reads it: if engines differ, each is asked how many slots it has."""
        if not self.launch.producer_kinds:
            return self.engine
        return self.engine.model_copy(update={"max_slots": 0})

    @model_validator(mode="before")
    @classmethod
    def _inherit_prompts(cls, tree: Any) -> Any:
        """Give an evaluation task what all training tasks share and the config does not set for it."""
        if not isinstance(tree, dict) or not isinstance(tree.get("eval"), dict):
            return tree
        tasks, evaluations = tree.get("tasks", {}), tree["eval"].get("tasks", {})
        for tables in (tasks, evaluations):  # a wrong type is named later
            if not isinstance(tables, dict) or not tables:
                return tree
            if not all(isinstance(table, dict) for table in tables.values()):
                return tree
        shared = {
            key: values[0]
            for key in _INHERITED
            if (values := [task.get(key) for task in tasks.values()])[0]
            and values.count(values[0]) == len(values)
        }
        merged = {name: shared | task for name, task in evaluations.items()}
        return tree | {"eval": tree["eval"] | {"tasks": merged}}

    @model_validator(mode="before")
    @classmethod
    def _imitate(cls, tree: Any) -> Any:
        """A task with algorithm sft shows demonstrations; if all do, the learning rate is one for them, if not given."""
        try:
            run = tree.get("algorithm", {}).get("name")
            tasks = {
                name: {"agent": "demonstration"} | task if _trained_by(task, run) == "sft" else task
                for name, task in tree["tasks"].items()
            }
            train = {"lr": 1e-5} if run == "sft" else {}
            return tree | {"tasks": tasks, "train": train | tree.get("train", {})}
        except (KeyError, TypeError, AttributeError):  # a wrong type is named later
            return tree

    @model_validator(mode="before")
    @classmethod
    def _count_servers(cls, tree: Any) -> Any:
        """Without launch.num_producers, the openai engine has one engine for each of its servers."""
        try:
            engine, launch = tree["engine"], tree.get("launch", {})
            kinds = sum(kind.get("count", 1) for kind in launch.get("producer_kinds", ()))
            if engine["name"] != "openai" or "num_producers" in launch:
                return tree
            count = kinds + len(engine["options"]["urls"])
        except (AttributeError, KeyError, TypeError):  # none to count; a wrong type is named later
            return tree
        return tree | {"launch": launch | {"num_producers": max(1, count)}}

    @model_validator(mode="after")
    def _check_pairs(self) -> Self:
        for task in self.eval.tasks:
            self.eval_sampling(task)
        _check_tasks(self)
        _check_train(self)
        _check_kinds(self)
        return self


def leaves(tree: Any, key: str = "", *, in_lists: bool = False) -> Iterator[tuple[str, Any]]:
    """Yield (dotted key, value) of each setting below `key`; an empty table counts as a value.

    in_lists: the items of a list count as values of their list's key.
    """
    if isinstance(tree, dict) and tree:
        for name, value in tree.items():
            yield from leaves(value, f"{key}.{name}" if key else str(name), in_lists=in_lists)
    elif in_lists and isinstance(tree, list | tuple):
        for item in tree:
            yield from leaves(item, key, in_lists=True)
    else:
        yield key, tree


def _trained_by(task: dict[str, Any], run: str | None) -> str | None:
    """The name of a task's algorithm, before its table is checked."""
    named = task.get("algorithm", {})
    return named if isinstance(named, str) else named.get("name", run)


def _check_tasks(config: Config) -> None:
    if not config.tasks:
        raise ValueError("tasks: got none, allowed: at least one [tasks.NAME]")
    if not sum(task.weight for task in config.tasks.values()):
        raise ValueError(
            "tasks: got the weight 0 for every task, allowed: at least one weight above 0"
        )
    for name in config.tasks:
        if ":" in name or "/" in name:
            raise ValueError(f"tasks: got the name {name!r}, allowed: names without ':' and '/'")
        config.task_produce(name)  # raises for wrong fields
        config.task_algorithm(name)
        sampling = config.task_sampling(name)
        if sampling.min_tokens > sampling.max_tokens:
            raise ValueError(
                f"tasks.{name}: sampling.min_tokens got {sampling.min_tokens}, "
                f"allowed: at most sampling.max_tokens = {sampling.max_tokens}"
            )


def _check_kinds(config: Config) -> None:
    """Refuse openai engines that are not as many as their servers, and an update of one kind alone."""
    counts = [(kind.count, place) for place, kind in enumerate(config.launch.producer_kinds)]
    plain = config.launch.num_producers - sum(count for count, _ in counts)
    for engines, place in [*counts, (plain, None)]:
        engine = config.engine if place is None else config.engine_of_kind(place)
        servers = max(1, len([server_url("engine.options.urls", url) for url in engine.servers]))
        if engine.name == "openai" and engines > 0 and engines != servers:
            key = "num_producers" if place is None else f"producer_kinds[{place}].count"
            raise ValueError(
                f"launch.{key}: got {engines} engines, allowed: {servers}, one for each server of "
                "engine.options.urls"
            )
    for place, kind in enumerate(config.launch.producer_kinds):
        if "update" in kind.engine:
            raise ValueError(
                f"launch.producer_kinds[{place}].engine: got update, allowed: engine.update, which "
                "is the same for all engines"
            )


def _check_parallel(config: Config) -> None:
    parallel, ranks = config.train.parallel, config.launch.num_consumers
    copies, groups = parallel.copies, config.train.groups_per_step
    if ranks % copies:
        raise ValueError(
            f"train.parallel: got {copies} ranks for one copy of the model with "
            f"launch.num_consumers = {ranks}, allowed: a divisor of it"
        )
    if groups % (ranks // copies):
        raise ValueError(
            f"launch.num_consumers: got {ranks}, allowed: a divisor of train.groups_per_step = {groups}"
            + (f", times {copies} (train.parallel)" if copies > 1 else "")
        )
    if parallel.pipeline > 1 and parallel.context > 1:
        raise ValueError(
            f"train.parallel.context: got {parallel.context}, allowed: 1 with train.parallel.pipeline"
        )


def _check_exact(config: Config) -> None:
    if config.model.arithmetic != "exact":
        return
    options = set(config.engine.options) & {"pack", "fuse"}
    reasons = {
        f"engine.kind = {config.engine.name}": config.engine.name != "transformers",
        f"engine.threads = {config.engine.threads}": config.engine.threads != 1,
        f"engine.options.{min(options, default='')}": bool(options),
        "launch.producer_kinds": bool(config.launch.producer_kinds),
        f"launch.num_consumers = {config.launch.num_consumers}": config.launch.num_consumers > 1,
        "model.lora.rank > 0": config.model.lora.rank > 0,
    }
    for reason, holds in reasons.items():
        if holds:
            raise ValueError(
                f"model.arithmetic: got exact with {reason}, allowed: deterministic or fast"
            )


def _check_train(config: Config) -> None:
    train = config.train
    if train.steps is not None and train.episodes is not None:
        raise ValueError("train.steps and train.episodes: got both, allowed: one of them")
    if train.groups_per_step % train.mini_batches:
        raise ValueError(
            f"train.mini_batches: got {train.mini_batches}, allowed: a divisor of "
            f"train.groups_per_step = {train.groups_per_step}"
        )
    _check_parallel(config)
    if train.offload_moments and config.launch.num_consumers > 1:
        raise ValueError(
            f"train.offload_moments: got true with launch.num_consumers = {config.launch.num_consumers}, allowed: "
            "false, or one trainer rank"
        )
    _check_exact(config)
    if train.ptx.coefficient > 0 and not train.ptx.data:
        raise ValueError(
            "train.ptx.data: got nothing, allowed: a JSONL file when ptx.coefficient > 0"
        )
    if config.launch.kind == "inline" and config.launch.num_consumers > 1:
        raise ValueError(
            f"launch.num_consumers: got {config.launch.num_consumers}, allowed: 1 with launch.kind = inline"
        )

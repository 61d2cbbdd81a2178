"""Every key of the config, its type, its default and its doc, in one typed tree.

`penstock config` prints the doc under each field. [sampling] and [produce] are in `producing.py`, [launch] in `launching.py`. Values that cannot work together are refused here,
before a model is loaded. Reading files and overrides is in `source.py`. Imports pydantic, nothing heavy.
"""

from __future__ import annotations

from typing import Any, Literal, Self, TypeVar

from pydantic import Field, ValidationError, field_validator, model_validator

from penstock.config.launching import LaunchConfig
from penstock.config.producing import ProduceConfig, SamplingConfig
from penstock.config.section import Section, first_mistake


class RunConfig(Section):
    dir: str = "runs"
    """Folder that holds run folders, relative to the current directory."""
    name: str = ""
    """Name of the run folder; empty: made from the tasks, the algorithm and the time."""
    allow_network_disk: bool = False
    """Allow a run folder on a network file system; safe only if one machine opens the run."""


class LoraConfig(Section):
    rank: int = Field(0, ge=0)
    """Rank of the adapters; 0 trains all weights."""
    alpha: float = Field(32.0, gt=0)
    """Scale of the adapters."""
    dropout: float = Field(0.0, ge=0, lt=1)
    """Dropout on the adapters' input."""
    target_modules: list[str] = []
    """Linear layers that get adapters, by the last parts of their names; empty: all of them but the head."""


class ModelConfig(Section):
    path: str = "demo"
    """Folder or hub name of a transformers causal LM, or `demo`: the small policy that ships."""
    tokenizer: str = ""
    """Folder or hub name of the tokenizer; empty: the model's own."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Number format of generation and training; auto: float32 on a CPU, bfloat16 on a GPU. See docs/precision.md."""
    device: str = "auto"
    """auto | cpu | cuda | cuda:N."""
    trust_remote_code: bool = False
    """Run Python code that comes with the model."""
    lora: LoraConfig = LoraConfig()
    """Low-rank adapters instead of full fine-tuning."""


class RewardConfig(Section):
    type: str = "think_answer_tags"
    """A built-in reward, `module:function`, or `path/to/file.py:function`."""
    weight: float = 1.0
    """Factor of this reward in the task's sum."""
    options: dict[str, Any] = {}
    """Settings of this reward; see docs/rewards.md."""


class TaskDataConfig(Section):
    """Settings that training and evaluation tasks share: prompts, rewards, sampling."""

    data: str = "addition"
    """A file (JSONL, JSON, CSV, Parquet, .gz), folder, glob or hub name, a built-in task, or `reasoning_gym:NAME`."""
    data_options: dict[str, Any] = {}
    """Options of a built-in or generated dataset (size, range, seed), or split (a folder, a hub name), config, revision."""
    columns: dict[str, str] = {}
    """Which field of a record is the prompt, the answer or another field: { prompt = "problem", gt_answer = "a.b" }."""
    rewards: list[RewardConfig] = [RewardConfig()]
    """Rewards of a response; their weighted sum is its reward."""
    system_prompt: str = ""
    """System message for prompts that have none."""
    chat_template_kwargs: dict[str, Any] = {}
    """Variables of the chat template, such as enable_thinking; an evaluation task inherits them like its system_prompt."""
    max_prompt_tokens: int = Field(2048, ge=1)
    """Longest prompt in tokens; longer ones are left out and counted."""
    sampling: dict[str, Any] = {}
    """Fields of [sampling] that differ for this task."""
    agent: str = "single_turn"
    """How a rollout is made: single_turn, or your own `file.py:function` of (task, model); see docs/agents.md."""
    agent_options: dict[str, Any] = {}
    """Options of the agent: max_turns, timeout_s, ..., and those that your function takes."""


class TaskConfig(TaskDataConfig):
    weight: float = Field(1.0, ge=0)
    """Share of this task in every batch, relative to the other tasks; remainders are carried over."""
    agent_actors: int = Field(0, ge=0)
    """Ray actors that run the task's agent loop and its rewards; needs launch.kind = "ray". 0: they run in the driver."""
    produce: dict[str, Any] = {}
    """Fields of [produce] that differ for this task."""


class EngineConfig(Section):
    name: str = "transformers"
    """transformers | vllm | openai | `module:Class`."""
    max_slots: int = Field(0, ge=0)
    """Most requests that one engine decodes together; 0: 64 on a CPU, chosen from memory and load on a GPU."""
    threads: int = Field(1, ge=1)
    """CPU threads of an engine process; with 1 a rollout has the same bits in any batch."""
    update: Literal["together", "rolling"] = "together"
    """together: all engines load new weights at once; rolling: one after another while the others serve."""
    options: dict[str, Any] = {}
    """Settings of the chosen engine; see docs/engines.md."""


class CorrectionConfig(Section):
    kind: Literal[
        "auto", "none", "token_truncate", "token_mask", "sequence_truncate", "sequence_mask"
    ] = "auto"
    """Importance correction for the gap between the behaviour policy and the trainer; auto: the algorithm's own,
    else token_truncate with decoupled, another engine than transformers, top_k or top_p, else none."""
    cap: float = Field(2.0, gt=0)
    """Largest importance weight (truncate) or the bound past which tokens are masked (mask)."""
    floor: float = Field(0.0, ge=0)
    """Smallest importance weight that is not masked (mask kinds)."""


class AlgorithmConfig(Section):
    name: str = "grpo"
    """grpo | dapo | rloo | reinforce_pp | reinforce_pp_baseline | dr_grpo | gspo | cispo | reinforce | `module:Class`."""
    clip_low: float | None = Field(None, ge=0)
    """Lower clip of the ratio, 1 - this; None: the algorithm's own."""
    clip_high: float | None = Field(None, ge=0)
    """Upper clip of the ratio, 1 + this; None: the algorithm's own."""
    dual_clip: float | None = Field(None, ge=0)
    """Most that a negative advantage may cost, as a multiple of it, above 1; 0: off; None: the algorithm's own."""
    aggregation: Literal["token", "sequence", "constant"] | None = None
    """How token losses become one number; None: the algorithm's own."""
    baseline: Literal["group_mean", "leave_one_out", "batch_mean", "none"] | None = None
    """Baseline that is subtracted from the rewards; None: the algorithm's own."""
    normalize: Literal["group", "batch", "none"] | None = None
    """Whose standard deviation divides the advantage; None: the algorithm's own."""
    kl_in: Literal["loss", "reward", "none"] | None = None
    """Where the KL term goes; None: the algorithm's own."""
    kl_estimator: Literal["k1", "k2", "k3", "k3_weighted"] | None = None
    """Estimator of the KL divergence; k3_weighted: k3 times the ratio, in the loss only; None: the algorithm's own."""
    kl_beta: float | None = Field(None, ge=0)
    """Coefficient of the KL term; 0 loads no reference model; None: the algorithm's own."""
    mask_truncated: bool | None = None
    """Leave responses that hit max_tokens out of the loss; None: the algorithm's own."""
    filter_groups: bool | None = None
    """Dynamic sampling: refuse groups that are all right or all wrong; None: the algorithm's own."""
    overlong_penalty: float | None = Field(None, ge=0)
    """Weight of the soft overlong punishment; None: the algorithm's own."""
    decoupled: bool = False
    """Clip against the trainer's own log-probs before the update, not those of the rollout."""
    correction: CorrectionConfig = CorrectionConfig()
    """Importance correction against the behaviour policy."""

    @field_validator("dual_clip")
    @classmethod
    def _check_dual_clip(cls, value: float | None) -> float | None:
        if value is not None and 0 < value <= 1:
            raise ValueError(f"got {value}, allowed: 0 (off), or above 1")
        return value


class PtxConfig(Section):
    coefficient: float = Field(0.0, ge=0, le=1)
    """c in (1-c) policy loss + c cross-entropy on `data`; 0: off."""
    data: str = ""
    """JSONL text stream with a `text` or `messages` field."""
    sequences_per_step: int = Field(8, ge=1)
    """Texts added to every update."""
    max_tokens: int = Field(512, ge=2)
    """Longest text in tokens; a longer one is cut at its end."""


class ParallelConfig(Section):
    tensor: int = Field(1, ge=1)
    """Ranks that share every matrix of a layer (tensor parallel); needs a model with a tensor-parallel plan."""
    pipeline: int = Field(1, ge=1)
    """Ranks that share the layers (pipeline parallel): each has some of them, and packs flow through."""
    context: int = Field(1, ge=1)
    """Ranks that share the tokens of every pack (context parallel), for sequences too long for one rank."""
    zero: Literal[1, 2, 3] = 3
    """What data-parallel ranks share by FSDP2; 1: masters and moments; 2: gradients too; 3: the weights too."""

    @property
    def copies(self) -> int:
        """Ranks that work on the same groups."""
        return self.tensor * self.context * self.pipeline

    def data_index(self, rank: int, world: int) -> int:
        """Return which share of a batch's groups a rank works on.

        Ranks are counted along the axes pipeline, data, context, tensor; the last one is the innermost.
        """
        return rank // (self.tensor * self.context) % (world // self.copies)


class TrainConfig(Section):
    steps: int | None = Field(None, ge=1)
    """Updates in the whole run; give this or episodes."""
    episodes: float | None = Field(None, gt=0)
    """Passes over the training prompts, as ceil(episodes x prompts / groups_per_step) steps; give this or steps.
    Groups that are refused (dynamic sampling) or dropped are drawn in addition."""
    groups_per_step: int = Field(32, ge=1)
    """Prompts per update."""
    mini_batches: int = Field(1, ge=1)
    """Optimizer steps per batch, on groups chosen by seed, step and epoch; must divide groups_per_step."""
    num_epochs: int = Field(1, ge=1)
    """Passes over one batch."""
    micro_batch_tokens: int = Field(0, ge=0)
    """Most tokens of one forward pass (a longer sequence goes alone); 0: 2048 on a CPU, chosen from the free memory on a GPU."""
    lr: float = Field(1e-6, gt=0)
    """Learning rate after the warm-up."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """How the learning rate falls after the warm-up."""
    warmup_steps: int = Field(0, ge=0)
    """Steps over which the learning rate rises from 0."""
    min_lr_ratio: float = Field(0.1, ge=0, le=1)
    """Learning rate at the end of linear and cosine, as a share of lr."""
    weight_decay: float = Field(0.0, ge=0)
    """AdamW weight decay."""
    betas: tuple[float, float] = (0.9, 0.95)
    """AdamW averaging factors."""
    max_grad_norm: float = Field(1.0, gt=0)
    """Largest norm of the gradient; a larger gradient is scaled down to it."""
    masters: Literal["dithered", "plain"] = "dithered"
    """Where float32 masters of bfloat16 or float16 weights start; dithered: anywhere in the weight's rounding cell,
    so that small updates arrive; plain: at the weight. See docs/precision.md."""
    gradient_checkpointing: bool = False
    """Recompute activations in the backward pass: less memory, more time."""
    compile: bool = False
    """Compile the model's blocks with torch.compile: a slower first step, faster steps after it on a GPU."""
    threads: int = Field(1, ge=1)
    """CPU threads of a trainer rank; on a CPU one per core is fastest, also beside an engine."""
    parallel: ParallelConfig = ParallelConfig()
    """How the trainer ranks divide the work; the rest of launch.num_consumers is data parallel."""
    reference: str = ""
    """Folder or hub name of the reference model of the KL term; empty: the starting policy."""
    ptx: PtxConfig = PtxConfig()
    """Auxiliary language-modelling loss."""


class SyncConfig(Section):
    every_steps: int = Field(1, ge=1)
    """Updates between two publications of the weights."""
    on_update: Literal["keep", "abort", "wait"] = "keep"
    """Responses that are being generated when new weights arrive; keep: they go on under the new weights; abort: they are
    stopped first, then continued (produce.enable_partial_rollout) or restarted; wait: they finish first, nothing new starts."""
    kind: str = "auto"
    """auto | in_process | shared_memory | cuda_ipc | collective | delta: collective, but only changed weights travel."""


# keys of a training task that an evaluation task takes over
_INHERITED = ("system_prompt", "chat_template_kwargs")


class EvalTaskConfig(TaskDataConfig):
    data: str = "addition:heldout"
    """As the data of a training task: problems that are not trained on."""
    system_prompt: str = ""
    """System message for prompts that have none; not given: that of the training tasks, if they agree."""
    sampling: dict[str, Any] = {}
    """Fields of [sampling] for this task; they win over those of [eval.sampling]."""


class EvalConfig(Section):
    tasks: dict[str, EvalTaskConfig] = {}
    """The evaluation tasks; empty: nothing is evaluated."""
    every_steps: int = Field(0, ge=0)
    """Updates between evaluations; 0: only at the start and the end."""
    at_start: bool = True
    """Evaluate the policy before the first update."""
    blocking: bool = False
    """Training waits for each evaluation; false: an evaluation runs beside training."""
    sampling: dict[str, Any] = {}
    """Fields of [sampling] for all evaluation tasks; not given: num_generations 1 (more give pass@k), temperature 0
    (greedy), max_tokens and stop of [sampling]."""
    max_problems: int = Field(0, ge=0)
    """Evaluate only this many problems of each task, the same random ones for every seed; 0: all."""


class CheckpointConfig(Section):
    every_steps: int = Field(0, ge=0)
    """Updates between checkpoints; 0: by minutes only. The end of a run and Ctrl-C always write one."""
    every_minutes: float = Field(10.0, ge=0)
    """Minutes between checkpoints, if that comes before every_steps; 0: by steps only."""
    keep: int = Field(2, ge=1)
    """How many checkpoints are kept, the newest ones."""


class JournalConfig(Section):
    keep_payloads: Literal["all", "text", "none"] = "all"
    """What stays of rollouts behind the oldest kept checkpoint: all; their text; neither text nor tokens."""


class TrackConfig(Section):
    trackers: list[str] = ["console"]
    """console | tensorboard | wandb | `module:Class`; metrics.jsonl is always written."""
    rollouts_every_steps: int = Field(20, ge=0)
    """Updates between samples written to rollouts.jsonl; 0: never."""
    wandb: dict[str, Any] = {}
    """Arguments of wandb.init: project (not given: WANDB_PROJECT, or penstock), group, tags, entity, ..."""


class WatchdogConfig(Section):
    stall_s: float = Field(300.0, gt=0)
    """A wait is stuck when the worker it waits for is idle and makes no progress for this long; six times as long
    for a worker that is busy, or one that cannot report progress (a reward)."""
    action: Literal["report", "restart", "stop"] = "restart"
    """What to do after reporting a stuck wait; restart: restart a stuck worker, stop the run for anything else."""


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
    train: TrainConfig = TrainConfig()
    sync: SyncConfig = SyncConfig()
    eval: EvalConfig = EvalConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    journal: JournalConfig = JournalConfig()
    track: TrackConfig = TrackConfig()
    launch: LaunchConfig = LaunchConfig()
    watchdog: WatchdogConfig = WatchdogConfig()

    def task_sampling(self, task: str) -> SamplingConfig:
        """Return [sampling] with the task's own fields laid over it."""
        return _overlay(self.sampling, self.tasks[task].sampling, f"tasks.{task}.sampling")

    def task_produce(self, task: str) -> ProduceConfig:
        """Return [produce] with the task's own fields laid over it."""
        return _overlay(self.produce, self.tasks[task].produce, f"tasks.{task}.produce")

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
            sampling = _overlay(sampling, fields, f"{place}.sampling")
        return sampling

    def of_engine(self, number: int) -> Config:
        """The config of one engine: [engine] with the fields of its kind laid over it, and its server."""
        kind, position = self.launch.kind_and_position(number)
        engine = self.engine
        if kind is not None:
            engine = self.engine_of_kind(self.launch.producer_kinds.index(kind))
        if len(urls := _servers(engine)) > position:
            options = engine.options | {"urls": [urls[position]]}
            engine = engine.model_copy(update={"options": options})
        return self.model_copy(update={"engine": engine})

    def engine_of_kind(self, place: int) -> EngineConfig:
        """Return [engine] with the fields of one of launch.producer_kinds laid over it."""
        fields = self.launch.producer_kinds[place].engine
        return _overlay(self.engine, fields, f"launch.producer_kinds[{place}].engine")

    def engine_kinds(self) -> list[EngineConfig]:
        """[engine] as each kind of engine has it."""
        kinds = self.launch.producer_kinds
        plain = [self.engine] if sum(k.count for k in kinds) < self.launch.num_producers else []
        return plain + [self.engine_of_kind(place) for place in range(len(kinds))]

    def pool_engine(self) -> EngineConfig:
        """Return [engine] as the pool reads it: if engines differ, each is asked how many slots it has."""
        if not self.launch.producer_kinds:
            return self.engine
        return self.engine.model_copy(update={"max_slots": 0})

    def may_leave_engines(self) -> bool:
        """Return whether publications may go on without a late engine: if every task may run ahead.

        What a late engine samples counts by the version of its weights. It gets no request that needs
        newer ones, and a step waits for the responses that the next step could not train any more.
        """
        tasks = [self.task_produce(task) for task in self.tasks]
        return all(produce.staleness_bound > 0 for produce in tasks)

    def publishes_after(self, step: int, total_steps: int) -> bool:
        """Return whether the weights of this step are published to the engines."""
        return step % self.sync.every_steps == 0 or step == total_steps

    @model_validator(mode="before")
    @classmethod
    def _inherit_prompts(cls, given: Any) -> Any:
        """Give an evaluation task what all training tasks share and the config does not set for it."""
        if not isinstance(given, dict) or not isinstance(given.get("eval"), dict):
            return given
        tasks, evaluations = given.get("tasks", {}), given["eval"].get("tasks", {})
        if not all(_is_table_of_tables(tables) for tables in (tasks, evaluations)):
            return given
        shared = {
            key: values[0]
            for key in _INHERITED
            if (values := [task.get(key) for task in tasks.values()])[0]
            and values.count(values[0]) == len(values)
        }
        merged = {name: shared | task for name, task in evaluations.items()}
        return given | {"eval": given["eval"] | {"tasks": merged}}

    @model_validator(mode="before")
    @classmethod
    def _count_servers(cls, given: Any) -> Any:
        """Without launch.num_producers, the openai engine has one engine for each of its servers."""
        try:
            engine, launch = given["engine"], given.get("launch", {})
            kinds = sum(kind.get("count", 1) for kind in launch.get("producer_kinds", ()))
            if engine["name"] != "openai" or "num_producers" in launch:
                return given
            count = kinds + len(engine["options"]["urls"])
        except (
            AttributeError,
            KeyError,
            TypeError,
        ):  # nothing to count; a wrong type is named later
            return given
        return given | {"launch": launch | {"num_producers": max(1, count)}}

    @model_validator(mode="after")
    def _check_pairs(self) -> Self:
        for task in self.eval.tasks:
            self.eval_sampling(task)
        _check_tasks(self)
        _check_train(self)
        _check_kinds(self)
        return self


def _is_table_of_tables(value: Any) -> bool:
    return (
        isinstance(value, dict) and bool(value) and all(isinstance(v, dict) for v in value.values())
    )


S = TypeVar("S", bound=Section)


def _overlay(base: S, fields: dict[str, Any], key: str) -> S:
    """Return the table with these fields laid over it; `key` is where they were given."""
    if not fields:
        return base
    try:
        return type(base).model_validate({**base.model_dump(), **fields})
    except ValidationError as error:
        raise ValueError(first_mistake(error, type(base), key)) from None


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
        sampling = config.task_sampling(name)
        if sampling.min_tokens > sampling.max_tokens:
            raise ValueError(
                f"tasks.{name}: sampling.min_tokens got {sampling.min_tokens}, "
                f"allowed: at most sampling.max_tokens = {sampling.max_tokens}"
            )
        if sampling.temperature == 0:
            raise ValueError(
                f"tasks.{name}: sampling.temperature got 0, allowed: above 0 for training "
                "(greedy groups have no variance)"
            )


def _servers(engine: EngineConfig) -> list[str]:
    """The servers of an openai engine; empty for other engines, and for its one default server."""
    urls = engine.options.get("urls") if engine.name == "openai" else None
    return urls if isinstance(urls, list) else []


def _check_servers(config: Config) -> None:
    """Refuse openai engines that are not as many as their servers."""
    counts = [(kind.count, place) for place, kind in enumerate(config.launch.producer_kinds)]
    plain = config.launch.num_producers - sum(count for count, _ in counts)
    for engines, place in [*counts, (plain, None)]:
        engine = config.engine if place is None else config.engine_of_kind(place)
        servers = max(1, len(_servers(engine)))
        if engine.name == "openai" and engines > 0 and engines != servers:
            key = "num_producers" if place is None else f"producer_kinds[{place}].count"
            raise ValueError(
                f"launch.{key}: got {engines} engines, allowed: {servers}, one for each server of "
                "engine.options.urls"
            )


def _check_kinds(config: Config) -> None:
    _check_servers(config)
    for place, kind in enumerate(config.launch.producer_kinds):
        config.engine_of_kind(place)
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
    if copies > 1 and config.model.lora.dropout:
        raise ValueError(
            f"model.lora.dropout: got {config.model.lora.dropout}, allowed: 0 with train.parallel, "
            "whose ranks would draw other masks than one rank"
        )
    if parallel.pipeline > 1 and parallel.context > 1:
        raise ValueError(
            f"train.parallel.context: got {parallel.context}, allowed: 1 with train.parallel.pipeline"
        )
    if copies > 1 and config.train.compile:
        raise ValueError("train.compile: got true, allowed: false with train.parallel")


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
    if train.ptx.coefficient > 0 and not train.ptx.data:
        raise ValueError(
            "train.ptx.data: got nothing, allowed: a JSONL file when ptx.coefficient > 0"
        )
    if config.launch.kind == "inline" and config.launch.num_consumers > 1:
        raise ValueError(
            f"launch.num_consumers: got {config.launch.num_consumers}, allowed: 1 with launch.kind = inline"
        )

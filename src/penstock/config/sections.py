"""The tables of the config but [launch]: their keys, types, defaults and docs.

`penstock config` prints the doc under each field. `tree.py` puts the tables together. Imports pydantic,
nothing heavy.
"""

from __future__ import annotations

import os
from typing import Annotated, Any, Literal, Self, TypeVar, get_args

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    ValidationError,
    field_validator,
    model_validator,
)

from penstock.config.mistakes import explain


class Section(BaseModel):
    """One table of the config: refuses unknown keys, takes each field's doc from the string below it."""

    model_config = ConfigDict(
        extra="forbid",
        use_attribute_docstrings=True,
        validate_default=True,
        frozen=True,
        allow_inf_nan=False,
    )

    @model_validator(mode="before")
    @classmethod
    def _take_no_switch_for_a_number(cls, fields: Any) -> Any:
        for name, value in fields.items() if isinstance(fields, dict) else ():
            field = cls.model_fields.get(name)
            if isinstance(value, bool) and field is not None:
                kinds = (field.annotation, *get_args(field.annotation))
                if (int in kinds or float in kinds) and bool not in kinds:
                    raise ValueError(f"{name} got {value}, allowed: a number")
        return fields


S = TypeVar("S", bound=Section)


def overlay(base: S, fields: dict[str, Any], key: str) -> S:
    """The table with these fields laid over it; `key` is where they were given."""
    if not fields:
        return base
    try:
        return type(base).model_validate({**base.model_dump(), **fields})
    except ValidationError as error:
        raise ValueError(explain(error, type(base), place=key)) from None


class RunConfig(Section):
    dir: Annotated[str, AfterValidator(os.path.expanduser)] = "runs"
    """Folder that holds run folders, relative to the shell's folder, also in a config elsewhere; ~ is your home."""
    name: str = ""
    """Name of the run folder; empty: made from the tasks, the algorithm and the time."""
    allow_network_disk: bool = False
    """Allow a run folder on a network file system; safe only if one machine opens the run."""


class LoraConfig(Section):
    rank: int = Field(0, ge=0)
    """Rank of the adapters; 0 trains all weights."""
    alpha: float = Field(32.0, gt=0)
    """Scale of the adapters."""
    target_modules: list[str] = []
    """Linear layers that get adapters, by the last parts of their names; empty: all but the head and stacked experts."""


class ModelConfig(Section):
    path: str = "demo"
    """Folder or hub name of a transformers causal LM, a run (its newest checkpoint), a checkpoint, or `demo`, which ships."""
    tokenizer: str = ""
    """Folder or hub name of the tokenizer; empty: the model's own."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Number format of generation and training; auto: float32 on a CPU, bfloat16 on a GPU. See docs/precision.md."""
    device: str = "auto"
    """auto | cpu | cuda | cuda:N."""
    arithmetic: Literal["deterministic", "exact", "fast"] = "deterministic"
    """deterministic: the same step gives the same bits, so redone and replayed steps can be compared; exact: the
    trainer's log-probs have the bits of the engine's too; fast: on a GPU additions in any order. See docs/off-policy.md."""
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
    """How a rollout is made: single_turn, your own `file.py:function` of (task, model) (docs/agents.md), or demonstration:
    the data has the answers (docs/teach.md)."""
    agent_options: dict[str, Any] = {}
    """Options of the agent: max_turns, timeout_s, ..., and those that your function takes."""

    @property
    def is_judged_by_policy(self) -> bool:
        """Whether the run's own engines read the responses with a rubric, in prompts of any length."""
        return any(r.type == "judge" and not r.options.get("url") for r in self.rewards)

    @property
    def demonstrates(self) -> bool:
        """Whether the data gives the answers, and nothing is sampled."""
        return self.agent == "demonstration"


class TaskConfig(TaskDataConfig):
    weight: float = Field(1.0, ge=0)
    """Share of this task in every batch, relative to the other tasks; remainders are carried over."""
    sampler: Literal["shuffle", "difficulty"] = "shuffle"
    """shuffle: every prompt once in each pass; difficulty: more often those that the policy solves sometimes (docs/controls.md)."""
    retire_solved: int = Field(0, ge=0)
    """A prompt whose last N groups were all right is not drawn again; needs sampler = "difficulty". 0: never."""
    agent_actors: int = Field(0, ge=0)
    """Ray actors that run the task's agent loop and its rewards; needs launch.kind = "ray". 0: they run in the driver."""
    produce: dict[str, Any] = {}
    """Fields of [produce] that differ for this task."""
    algorithm: dict[str, Any] = {}
    """Fields of [algorithm] that differ for this task, or the name of another algorithm, which begins with its own defaults."""
    teacher_template: str = ""
    """The last user message as the policy reads it when it is its own teacher, with {prompt}, {answer}, {feedback} and fields of the data (docs/distill.md)."""

    @model_validator(mode="after")
    def _difficulty_is_known(self) -> Self:
        if self.retire_solved and self.sampler != "difficulty":
            raise ValueError(
                f"got retire_solved {self.retire_solved} with sampler {self.sampler!r}, "
                "allowed: sampler = 'difficulty'"
            )
        if self.demonstrates and self.sampler == "difficulty":
            raise ValueError(
                "got sampler 'difficulty' for demonstrations, which have no pass rate, "
                "allowed: 'shuffle'"
            )
        return self

    @field_validator("algorithm", mode="before")
    @classmethod
    def _take_name(cls, value: Any) -> Any:
        return {"name": value} if isinstance(value, str) else value


class AnnealConfig(Section):
    end: float | None = None
    """Temperature at the end of the annealing; None: no annealing."""
    steps: int = Field(0, ge=0)
    """Steps over which the temperature moves linearly from sampling.temperature to `end`."""
    episodes: float = Field(0.0, ge=0)
    """The same in passes over the task's prompts instead of steps."""

    @model_validator(mode="after")
    def _one_length(self) -> Self:
        if self.steps and self.episodes:
            raise ValueError(
                f"got steps {self.steps} and episodes {self.episodes:g}, allowed: one of them"
            )
        return self


class SamplingConfig(Section):
    num_generations: int = Field(8, ge=1)
    """Responses per prompt: the size of a group."""
    temperature: float = Field(1.0, ge=0)
    """Sampling temperature. The trainer computes log-probs at each rollout's own temperature."""
    top_k: int = Field(0, ge=0)
    """Sample among the k most likely tokens; 0: all."""
    top_p: float = Field(1.0, gt=0, le=1)
    """Sample among the most likely tokens whose probabilities sum to this; 1: all."""
    min_tokens: int = Field(0, ge=0)
    """Fewest tokens of a response."""
    max_tokens: int = Field(256, ge=1)
    """Most tokens of a response."""
    stop: list[str] = []
    """Strings that end a response."""
    anneal: AnnealConfig = AnnealConfig()
    """Temperature annealing."""

    @field_validator("stop")
    @classmethod
    def _check_stop(cls, texts: list[str]) -> list[str]:
        if "" in texts:  # every text has it: each response would end at its first token
            raise ValueError(f"got {texts}, allowed: texts of at least one character")
        return texts

    @property
    def cuts_tokens(self) -> bool:
        """Whether some tokens are never sampled."""
        return self.top_k > 0 or self.top_p < 1


RUN_AHEAD = (  # settings of [produce] that have no meaning with strategy sync
    "max_staleness",
    "over_sample_threshold",
    "enable_partial_rollout",
    "tail_batch_trigger_size",
)


class ProduceSettings(Section):
    """Settings that a produce strategy reads."""

    strategy: str = "async"
    """async: generate ahead of the trainer as far as max_staleness allows; sync: one batch per step; `module:Class`: your own subclass of penstock.rollout.ProduceStrategy."""
    max_staleness: int = Field(1, ge=0)
    """Sync periods that a sample's oldest token may be behind when it is trained; 0: on-policy."""
    over_sample_threshold: float = Field(0.0, ge=0)
    """Extra groups to generate, as a share of the task's batch."""
    enable_partial_rollout: bool = False
    """Continue a response that sync.on_update = "abort" has stopped from its tokens, instead of from its prompt."""
    tail_batch_trigger_size: int = Field(0, ge=0)
    """Collect this many expired groups, then generate them in one call of their own; 0: retry them at once."""
    max_tries: int = Field(3, ge=1)
    """Failures after which a group is dropped; aborts or expiries after which steps wait for it."""
    max_failure_share: float = Field(0.5, gt=0, le=1)
    """Share of failures among the last 32 attempts above which the run stops."""
    pause_timeout_s: float = Field(60.0, gt=0)
    """Longest wait for running groups when generation is paused."""

    @field_validator("strategy")
    @classmethod
    def _check_strategy(cls, name: str) -> str:
        if name not in ("async", "sync") and ":" not in name:
            raise ValueError(f"got {name!r}, allowed: 'async' or 'sync', or your own module:Class")
        return name

    @model_validator(mode="after")
    def _refuse_run_ahead(self) -> Self:
        """Refuse what strategy sync would ignore; the default of max_staleness is for async."""
        fields = type(self).model_fields
        for name in RUN_AHEAD if self.strategy == "sync" else ():
            value = getattr(self, name)
            if value and value != fields[name].default:
                raise ValueError(
                    f"{name} got {value!r} with strategy sync, allowed: {type(value)(0)!r}"
                )
        return self

    @property
    def staleness_bound(self) -> int:
        """`max_staleness`; 0 with strategy sync."""
        return 0 if self.strategy == "sync" else self.max_staleness


class ProduceConfig(ProduceSettings):
    max_buffered_groups: int = Field(0, ge=0)
    """Most completed groups of a task in the replay buffer; 0: as many as staleness allows."""
    is_valid_sample: str = ""
    """Validity rule, `module:function`: gets a finished group's rollouts, returns whether to keep it."""
    should_continue: str = ""
    """Continue rule, `module:function`: gets how many groups are complete and the batch size, says whether to launch more;
    empty: until the batch is full."""

    @model_validator(mode="before")
    @classmethod
    def _take_name_of_python(cls, fields: Any) -> Any:
        """Accept the name that the Python configs have: is_valid_sample_fn."""
        if isinstance(fields, dict) and "is_valid_sample_fn" in fields:
            fields = {**fields, "is_valid_sample": fields["is_valid_sample_fn"]}
            del fields["is_valid_sample_fn"]
        return fields


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

    @property
    def servers(self) -> list[str]:
        """The servers of an openai engine; empty for other engines, and for its one default server."""
        urls = self.options.get("urls") if self.name == "openai" else None
        return urls if isinstance(urls, list) else []


class CorrectionConfig(Section):
    kind: Literal[
        "auto", "none", "token_truncate", "token_mask", "sequence_truncate", "sequence_mask"
    ] = "auto"
    """Importance correction for the gap between the behaviour policy and the trainer; auto: the algorithm's own,
    else token_truncate with decoupled or another engine than transformers, else none."""
    cap: float = Field(2.0, gt=0)
    """Largest importance weight (truncate) or the bound past which tokens are masked (mask)."""
    floor: float = Field(0.0, ge=0)
    """Smallest importance weight that is not masked (mask kinds)."""
    newest: Literal["engine", "trainer"] = "engine"
    """Whose log-probs count as the old ones of tokens that the newest weights sampled; trainer: ratio and importance
    weight of these tokens begin at exactly 1. See docs/off-policy.md."""


class AlgorithmConfig(Section):
    name: str = "grpo"
    """grpo | dapo | rloo | ppo | reinforce_pp | reinforce_pp_baseline | dr_grpo | gspo | cispo | reinforce | sapo | gmpo | dppo | gdpo | maxrl | distill | sft | `module:Class`."""
    weight: float = Field(1.0, ge=0)
    """Factor of this loss beside those of other tasks' algorithms; each is a mean over its own tokens."""
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
    normalize: Literal["group", "mean", "batch", "batch_rewards", "none"] | None = None
    """Whose standard deviation divides the advantage; mean: the group's mean reward does; batch: that of the advantages of all tokens, and their mean is
    subtracted; batch_rewards: that of all rewards; None: the algorithm's own."""
    gamma: float | None = Field(None, gt=0, le=1)
    """ppo: discount of the rewards of later tokens; None: 1."""
    gae_lambda: float | None = Field(None, ge=0, le=1)
    """ppo: how far an advantage looks ahead; 1: to the end of the rollout, 0: to the next token's value; None: 1."""
    value_clip: float | None = Field(None, ge=0)
    """ppo: most that a value may move from that before the batch without the loss holding it back; 0: off; None: 0.5."""
    kl_in: Literal["loss", "reward", "none"] | None = None
    """Where the KL term goes; None: the algorithm's own."""
    kl_estimator: Literal["k1", "k2", "k3", "k3_weighted"] | None = None
    """Estimator of the KL divergence; k3_weighted: k3 times the ratio, in the loss only; None: the algorithm's own."""
    kl_beta: float | None = Field(None, ge=0)
    """Coefficient of the KL term; 0 loads no reference model; None: the algorithm's own."""
    kl_target: float | None = Field(None, gt=0)
    """Mean KL of a token to which kl_beta, from its value at the start, is adapted after every step; None: it is not."""
    entropy_beta: float | None = Field(None, ge=0)
    """Factor of the entropy bonus: the mean entropy of the tokens' distributions, times this, is subtracted from the loss."""
    entropy_target: float | None = Field(None, gt=0)
    """Mean entropy of a token, in nats, to which entropy_beta is adapted after every step; None: it is not."""
    teacher: str | None = None
    """Name of one of [teachers]; with distill the only one who teaches, else beside the rewards (docs/distill.md)."""
    teacher_beta: float | None = Field(None, ge=0)
    """Factor of the divergence from the teacher; None: 1 for distill, else 0."""
    divergence: Literal["sampled", "forward", "reverse", "jsd"] | None = None
    """From the teacher; sampled: reverse KL on the sampled tokens; others: over the whole vocabulary. None: sampled."""
    mask_truncated: bool | None = None
    """Leave responses that hit max_tokens out of the loss; None: the algorithm's own."""
    filter_groups: bool | None = None
    """Dynamic sampling: refuse groups that are all right or all wrong; None: the algorithm's own."""
    filter_range: tuple[float, float] | None = None
    """With filter_groups: a group is kept if its mean accuracy lies strictly between these; None: 0.01 and 0.99."""
    overlong_penalty: float | None = Field(None, ge=0)
    """Weight of the soft overlong punishment; None: the algorithm's own."""
    overlong_window: int | None = Field(None, ge=1)
    """Tokens before max_tokens over which the overlong punishment grows; None: a quarter of max_tokens, at most 1024."""
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

    @field_validator("filter_range")
    @classmethod
    def _check_filter_range(cls, value: tuple[float, float] | None) -> tuple[float, float] | None:
        if value is not None and not 0 <= value[0] < value[1] <= 1:
            raise ValueError(f"got {list(value)}, allowed: two shares, the smaller one first")
        return value


class TeacherConfig(Section):
    path: str = ""
    """Model folder, run (its newest checkpoint), checkpoint or hub name of a frozen model with the policy's tokenizer; or
    `policy`: the policy itself, which reads the prompts that tasks.NAME.teacher_template writes."""
    base_url: str = ""
    """In the place of path: address of an OpenAI-compatible server whose completions can echo log-probs of prompts."""
    model: str = ""
    """The server's name for the model."""
    api_key_variable: str = ""
    """Environment variable that holds the server's key."""
    timeout_s: float = Field(120.0, gt=0)
    """Longest wait for the log-probs of one response."""

    @model_validator(mode="after")
    def _has_one_place(self) -> Self:
        if bool(self.path) == bool(self.base_url) or bool(self.base_url) != bool(self.model):
            raise ValueError(
                f"got path {self.path!r}, base_url {self.base_url!r} and model {self.model!r}, allowed: a path, or a "
                "base_url and the server's name for the model"
            )
        return self

    @property
    def is_policy(self) -> bool:
        return self.path == "policy"

    @property
    def is_loaded(self) -> bool:
        """Whether it is a model of its own beside the trainer."""
        return bool(self.path) and not self.is_policy


class PtxConfig(Section):
    coefficient: float = Field(0.0, ge=0, le=1)
    """c in (1-c) policy loss + c cross-entropy on `data`; 0: off."""
    data: str = ""
    """JSONL text stream with a `text` or `messages` field."""
    sequences_per_step: int = Field(8, ge=1)
    """Texts added to every update."""
    max_tokens: int = Field(512, ge=2)
    """Longest text in tokens; a longer one is cut there, and at the model's context."""


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
        """Which share of a batch's groups a rank works on.

        Ranks are counted along the axes pipeline, data, context, tensor; the last one is the innermost.
        """
        return rank // (self.tensor * self.context) % (world // self.copies)


class TrainConfig(Section):
    steps: int | None = Field(None, ge=1)
    """Updates in the whole run; give this or episodes."""
    episodes: float | None = Field(None, gt=0)
    """Passes over the training prompts, as ceil(episodes x prompts / groups_per_step) steps; give this or steps.
    Groups that are refused (dynamic sampling) or dropped are drawn in addition."""
    stop_when: list[str] = []
    """End the run early when one holds: 'heldout/accuracy >= 0.95', 'heldout/accuracy stalls 3' (evaluations without a
    new best), 'finding equal_rewards'."""
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
    critic_lr: float | None = Field(None, gt=0)
    """ppo: learning rate of the value model, with the warm-up and the schedule of lr; None: ten times lr."""
    critic_warmup_steps: int = Field(0, ge=0)
    """ppo: first steps, in which the value model learns and the policy does not."""
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
    eps: float = Field(1e-8, gt=0)
    """AdamW's epsilon: added to the root of the mean squared gradient, which divides the step."""
    max_grad_norm: float = Field(1.0, gt=0)
    """Largest norm of the gradient; a larger gradient is scaled down to it."""
    masters: Literal["dithered", "plain"] = "dithered"
    """Where float32 masters of bfloat16 or float16 weights start; dithered: anywhere in the weight's rounding cell,
    so that small updates arrive; plain: at the weight. See docs/precision.md."""
    moments: Literal["float32", "bfloat16"] = "float32"
    """Format of AdamW's two moments; bfloat16: half the memory, rounded at random so that small changes add up."""
    offload_moments: bool = False
    """Keep AdamW's moments in main memory; a GPU reads and writes them there in each update, with the same result."""
    gradient_checkpointing: bool = False
    """Recompute activations in the backward pass: less memory, more time."""
    threads: int = Field(1, ge=1)
    """CPU threads of a trainer rank; on a CPU one per core is fastest, also beside an engine."""
    parallel: ParallelConfig = ParallelConfig()
    """How the trainer ranks divide the work; the rest of launch.num_consumers is data parallel."""
    reference: str = ""
    """Folder, run or hub name of the reference model of the KL term; empty: the starting policy."""
    reference_every: int = Field(0, ge=0)
    """Steps after which the reference becomes the policy, or moves towards it by 1 - reference_decay; 0: it stays."""
    reference_decay: float = Field(0.0, ge=0, lt=1)
    """Share of the old reference in the new one: an average of the policies, moved every reference_every steps, or every step."""
    ema_decay: float = Field(0.0, ge=0, lt=1)
    """Share of the old average in the running average of the weights that is exported and evaluated; 0: no average."""
    ptx: PtxConfig = PtxConfig()
    """Auxiliary language-modelling loss."""

    @property
    def reference_moves(self) -> bool:
        return self.reference_every > 0 or self.reference_decay > 0


class SyncConfig(Section):
    every_steps: int = Field(1, ge=1)
    """Updates between two publications of the weights."""
    on_update: Literal["keep", "abort", "wait"] = "keep"
    """Responses that are being generated when new weights arrive; keep: they go on under the new weights; abort: they are
    stopped first, then continued (produce.enable_partial_rollout) or restarted; wait: they finish first, nothing new starts."""
    kind: str = "auto"
    """auto | in_process | shared_memory | cuda_ipc | collective | delta: collective, but only changed weights travel."""


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
    """Updates between checkpoints; 0: ten minutes between them. The end of a run and Ctrl-C always write one."""
    keep: int = Field(2, ge=1)
    """How many checkpoints are kept, the newest ones."""
    keep_best: str = ""
    """A held-out score, TASK/accuracy or TASK/reward: each evaluated step is saved, and the best one is kept as well."""


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

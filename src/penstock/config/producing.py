"""[sampling] and [produce]: how responses are sampled, and when groups are generated."""

from __future__ import annotations

from typing import Any, Self

from pydantic import Field, field_validator, model_validator

from penstock.config.section import Section


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

    @property
    def cuts_tokens(self) -> bool:
        """Whether some tokens are never sampled, so that the trainer's distribution is another one."""
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


_FUNCTIONS = {
    "is_valid_sample_fn": "is_valid_sample",
    "should_continue_fn": "should_continue",
}


class ProduceConfig(ProduceSettings):
    max_buffered_groups: int = Field(0, ge=0)
    """Most completed groups of a task in the replay buffer; 0: as many as staleness allows."""
    is_valid_sample: str = ""
    """Validity rule, `module:function`: gets a finished group's rollouts, returns whether to keep it."""
    should_continue: str = ""
    """Continue rule, `module:function`: gets the completed groups and the batch size, returns whether to launch more;
    empty: until the batch is full."""

    @model_validator(mode="before")
    @classmethod
    def _take_names_of_functions(cls, given: Any) -> Any:
        """Accept the names that the Python configs have: is_valid_sample_fn, should_continue_fn."""
        return (
            {_FUNCTIONS.get(k, k): v for k, v in given.items()}
            if isinstance(given, dict)
            else given
        )

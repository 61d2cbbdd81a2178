"""Settings of the vllm engine, and vLLM's arguments made from them. Does not import vllm."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any, Literal, Self, get_args

from penstock.engine.protocol import check_options
from penstock.errors import UserError

if TYPE_CHECKING:
    from penstock.config import Config

Transfer = Literal["memory", "gloo"]
_SLOTS = 256


@dataclass(slots=True, frozen=True, kw_only=True)
class UserOptions:
    """[engine.options] of the vllm engine."""

    tensor_parallel_size: int = 1
    max_model_len: int = 0  # most tokens of a request; 0: the model's limit
    gpu_memory_utilization: float = 0.9
    enforce_eager: bool = False
    transfer: Transfer = "memory"  # how weights reach the workers
    transfer_folder: str = ""  # visible to all workers; empty: /dev/shm, or the temporary folder
    transfer_address: str = "127.0.0.1"  # address of this host, for the gloo group
    transfer_timeout_s: float = 300.0  # longest wait to join a group, or for a transfer's step
    extra: dict[str, Any] = field(default_factory=dict)  # further AsyncEngineArgs

    def __post_init__(self) -> None:
        if self.transfer not in get_args(Transfer):
            allowed = ", ".join(get_args(Transfer))
            raise UserError(f"engine.options.transfer: got {self.transfer!r}, allowed: {allowed}")


@dataclass(slots=True, frozen=True, kw_only=True)
class VllmOptions(UserOptions):
    """Settings that the engine reads from the config."""

    path: str
    tokenizer: str = ""
    dtype: str = "auto"
    trust_remote_code: bool = False
    max_slots: int = _SLOTS

    OPTION_NAMES = tuple(field.name for field in fields(UserOptions))

    @classmethod
    def from_config(cls, config: Config, *, has_gpu: bool) -> Self:
        from penstock.config.demo import resolve_model_path

        path, dtype = resolve_model_path(config.model.path), config.model.dtype
        return cls(
            path=path,
            tokenizer=config.model.tokenizer or path,
            dtype="float32" if dtype == "auto" and not has_gpu else dtype,
            trust_remote_code=config.model.trust_remote_code,
            max_slots=config.engine.max_slots or _SLOTS,
            **check_options(UserOptions, config.engine.options),
        )

    def engine_arguments(self) -> dict[str, Any]:
        """The engine arguments of vLLM that these options set."""
        return {
            "model": self.path,
            "tokenizer": self.tokenizer or self.path,
            "dtype": self.dtype,
            "trust_remote_code": self.trust_remote_code,
            "max_num_seqs": self.max_slots,
            "tensor_parallel_size": self.tensor_parallel_size,
            "gpu_memory_utilization": self.gpu_memory_utilization,
            "enforce_eager": self.enforce_eager,
            **({"max_model_len": self.max_model_len} if self.max_model_len else {}),
            **self.extra,
        }

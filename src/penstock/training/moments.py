"""AdamW that keeps its moments where the config says: in the masters' format or bfloat16, on the device or in main memory.

Moments of bfloat16 are computed in float32 and then rounded at random: rounded to the nearest, a mean that moves by
a thousandth in a step would never move. The random numbers are a hash of seed, parameter, step and position,
so that a resumed run, a replay and other layouts of the ranks round alike. Moments in main memory lie in pinned
pages: the kernel of an update (`kernels/adamw_kernels.py`) reads and writes them over the bus, all of its
programs at once; their bits are those of moments on the device.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from penstock.config import TrainConfig
from penstock.training.dither import Place, dither_key, round_at_random_, step_keys
from penstock.training.parallel.sharding import Sharding, local
from penstock.weights.offload import host_memory

MOMENTS = ("exp_avg", "exp_avg_sq")


class StoredAdamW(torch.optim.AdamW):
    """AdamW over named parameters; vectors (norms, biases) have no weight decay."""

    def __init__(
        self,
        parameters: dict[str, nn.Parameter],
        config: TrainConfig,
        *,
        seed: int = 0,
        sharding: Sharding | None = None,
    ) -> None:
        matrices = [parameter for parameter in parameters.values() if parameter.ndim > 1]
        vectors = [parameter for parameter in parameters.values() if parameter.ndim <= 1]
        groups = [
            {"params": matrices, "weight_decay": config.weight_decay},
            {"params": vectors, "weight_decay": 0.0},
        ]
        super().__init__(
            [group for group in groups if group["params"]],
            lr=config.lr,
            betas=config.betas,
            eps=config.eps,
            fused=True,
        )
        self._is_short, self._is_away = config.moments == "bfloat16", config.offload_moments
        self._names = {parameter: name for name, parameter in parameters.items()}
        self._seed, self._sharding = seed, sharding

    def moments_of(self, parameter: nn.Parameter) -> dict[str, Tensor]:
        """The moments of a parameter, and how many steps they have seen; zeros before the first one."""
        state: dict[str, Tensor] = self.state[parameter]
        if not state:
            like = parameter.detach()
            dtype = torch.bfloat16 if self._is_short else like.dtype
            state["step"] = torch.zeros((), dtype=torch.float32, device=like.device)
            for key in MOMENTS:
                if self._is_away:
                    memory = host_memory(like.numel() * dtype.itemsize, "train.offload_moments")
                    state[key] = memory.view(dtype).view(like.shape)
                else:
                    state[key] = torch.zeros_like(like, dtype=dtype)
        return state

    def rounding_keys(self, parameter: nn.Parameter) -> list[int]:
        """The keys by which the two moments of a parameter are rounded; none if they are not."""
        name = self._names[parameter]
        return [dither_key(self._seed, f"{key}/{name}") for key in MOMENTS if self._is_short]

    keys_of_steps = staticmethod(step_keys)

    def step(self, closure: Callable[[], Any] | None = None) -> None:
        """Apply the gradients; moments that are stored in another way are brought for it, one parameter at a time."""
        if not (self._is_short or self._is_away):
            super().step()
            return
        with torch.no_grad():
            for group in self.param_groups:
                for parameter in group["params"]:
                    if parameter.grad is not None:
                        self._step(group, parameter)

    def _step(self, group: dict[str, Any], parameter: nn.Parameter) -> None:
        state, values = self.moments_of(parameter), local(parameter.detach())
        stored = [local(state[key]) for key in MOMENTS]
        exact = [moment.to(device=values.device, dtype=values.dtype) for moment in stored]
        state["step"] += 1
        torch._fused_adamw_(
            [values], [local(parameter.grad)], [exact[0]], [exact[1]], [], [state["step"]],
            lr=group["lr"], beta1=group["betas"][0], beta2=group["betas"][1], eps=group["eps"],
            weight_decay=group["weight_decay"], amsgrad=False, maximize=False,
        )  # fmt: skip
        for moment, key in zip(exact, self.rounding_keys(parameter), strict=False):
            keys = torch.tensor(key, dtype=torch.int32, device=values.device)
            round_at_random_(moment, step_keys(keys, state["step"]), self._place(parameter))
        for target, moment in zip(stored, exact, strict=True):
            target.copy_(moment)

    def _place(self, parameter: nn.Parameter) -> Place:
        """Which part of the parameter this rank has."""
        if self._sharding is None:
            return Place()
        part = self._sharding.part(self._names[parameter], parameter.detach())
        return Place(part.first_row, first_column=part.first_column)

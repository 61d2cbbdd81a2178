"""What learns: a policy or a value model with its masters and its optimizer.

    forward_backward, any number of times -> gradients add up in the masters -> optim_step

The loop calls both within `Consumer.train`; a service calls them for its clients, who decide what a batch is
and what its loss. Which tokens are trained, and towards what, is known by the callers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch

from penstock.config import TrainConfig
from penstock.training.moments import StoredAdamW
from penstock.training.optimizer import LossScale, Masters, Outcome, UpdateStep
from penstock.training.pack import Pack
from penstock.training.parallel.pipeline import Finish, Sampling, run_passes
from penstock.training.policy import Policy
from penstock.training.stats import UpdateLoss


class Learner:
    """A model that is trained, on this rank."""

    policy: Policy
    masters: Masters
    optimizer: StoredAdamW
    update_step: UpdateStep
    loss_scale: LossScale

    def _prepare_to_learn(self, config: TrainConfig, dtype: torch.dtype, seed: int) -> None:
        """Make masters and optimizer of the policy, which computes in `dtype` from now on."""
        self.masters = Masters(self.policy.model, dtype, sharding=self.policy.sharding)
        self.policy.add_gradients_to(self.masters.of_parameters())
        if config.masters == "dithered":
            self.masters.dither(seed)
        parameters, sharding = self.masters.parameters, self.policy.sharding
        self.optimizer = StoredAdamW(parameters, config, seed=seed, sharding=sharding)
        self.update_step = UpdateStep(self.masters, self.optimizer, config.max_grad_norm)
        self.loss_scale = LossScale(dtype)

    def forward_backward(
        self,
        packs: Iterable[Pack],
        sampling: Sampling,
        finish: Finish,
        *,
        backward: bool = True,
        check: Callable[[], None] = lambda: None,
    ) -> None:
        """Score the packs, and add the gradients of the losses that `finish` gives; without `backward` only score.

        The loss of an update is the sum over its packs. `check` may raise before a pack is begun.
        """
        self.policy.train(backward)
        pull = self.loss_scale.backward if backward else None
        run_passes(self.policy, packs, sampling, finish, backward=pull, check=check)

    def optim_step(self, rate: float, loss: UpdateLoss) -> Outcome:
        """Apply the gradients and drop them; return a function that gives (norm, whether loss and norm are finite).

        A step that is not finite changes no weight.
        """
        self.loss_scale.unscale(self.masters.parameters.values())
        return self.update_step.apply(rate, loss)

    def drop_gradients(self) -> None:
        """Forget what was added since the last step."""
        self.optimizer.zero_grad(set_to_none=True)

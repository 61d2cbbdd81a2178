"""Trackers of other systems: TensorBoard and Weights & Biases.

The package that a tracker needs is imported only when the config names the tracker.
"""

from __future__ import annotations

import os
import uuid

from penstock.errors import UserError
from penstock.inspection.track.logs import RunInfo, Tracker


class TensorBoardTracker(Tracker):
    """TensorBoard event files in RUN/tensorboard: every metric as a scalar."""

    def __init__(self, info: RunInfo) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError:
            raise UserError(
                "track.trackers: got 'tensorboard', which is not installed; "
                "install it with: pip install 'penstock[tensorboard]'"
            ) from None
        self._writer = SummaryWriter(
            str(info.folder / "tensorboard"), purge_step=info.first_step + 1
        )

    def log_step(self, step: int, metrics: dict[str, float]) -> None:
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, step)

    def log_eval(self, step: int, metrics: dict[str, float]) -> None:
        self.log_step(step, metrics)

    def close(self) -> None:
        self._writer.close()


class WandbTracker(Tracker):
    """Sends every metric to one W&B run; WANDB_MODE=offline works without a network.

    The run's id is kept in RUN/wandb-id, so that a resumed run continues the same W&B run."""

    def __init__(self, info: RunInfo) -> None:
        try:
            import wandb
        except ImportError:
            raise UserError(
                "track.trackers: got 'wandb', which is not installed; "
                "install it with: pip install 'penstock[wandb]'"
            ) from None
        id_file = info.folder / "wandb-id"
        if not id_file.exists():
            id_file.write_text(uuid.uuid4().hex[:12])
        arguments = {
            "project": os.environ.get("WANDB_PROJECT", "penstock"),
            "name": info.name,
            **info.config.track.wandb,
            "id": id_file.read_text(),
            "resume": "allow",
            "dir": str(info.folder),
            "config": info.config.model_dump(),
        }
        try:
            self._run = wandb.init(**arguments)
        except TypeError as error:
            raise UserError(
                f"track.wandb: got {info.config.track.wandb}, allowed: arguments of wandb.init ({error})"
            ) from None
        # An evaluation may end after the next step; W&B's own step only goes up.
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")

    def log_step(self, step: int, metrics: dict[str, float]) -> None:
        self._run.log({**metrics, "step": step})

    def log_eval(self, step: int, metrics: dict[str, float]) -> None:
        self._run.log({**metrics, "step": step})

    def close(self) -> None:
        self._run.finish()

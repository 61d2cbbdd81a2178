"""Weights & Biases; WANDB_MODE=offline works without a network. Imported only when named.

The run's id is kept in RUN/wandb-id, so that a resumed run continues the same W&B run.
"""

from __future__ import annotations

import uuid

from penstock.errors import UserError
from penstock.inspection.track.protocol import RunInfo


class WandbTracker:
    """Sends every metric to one W&B run."""

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
        self._run = wandb.init(
            project=info.config.track.project,
            name=info.name,
            group=info.config.run.group or None,
            tags=info.config.run.tags,
            id=id_file.read_text(),
            resume="allow",
            dir=str(info.folder),
            config=info.config.model_dump(),
        )
        # An evaluation may end after the next step; W&B's own step only goes up.
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")

    def log_step(self, step: int, metrics: dict[str, float]) -> None:
        self._run.log({**metrics, "step": step})

    def log_eval(self, step: int, metrics: dict[str, float]) -> None:
        self._run.log({**metrics, "step": step})

    def note(self, text: str) -> None:
        """Leave notes out."""

    def close(self) -> None:
        self._run.finish()

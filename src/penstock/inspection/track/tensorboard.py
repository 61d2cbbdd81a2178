"""TensorBoard event files in RUN/tensorboard. Imported only when the config names it."""

from __future__ import annotations

from penstock.errors import UserError
from penstock.inspection.track.protocol import RunInfo


class TensorBoardTracker:
    """Writes every metric as a scalar."""

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

    def note(self, text: str) -> None:
        """Leave notes out."""

    def close(self) -> None:
        self._writer.close()

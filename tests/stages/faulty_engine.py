"""A transformers engine whose thread raises at a step of the test's choice, as a device fault does."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Self

import torch

from penstock.config import Config
from penstock.engine.transformers.engine import TransformersEngine

FAULTY_ENGINE = "stages.faulty_engine:FaultyEngine"  # as a config names it


def plan(folder: Path, name: str, *steps: int, then: int = 0) -> list[str]:
    """Write when the engines of run `name` raise; return the overrides for that run.

    The first engine raises at its step `steps[0]`, its successor at `steps[1]`, ...; every later one
    at step `then`, or never if that is 0.
    """
    (folder / f"{name}.faults").write_text(json.dumps([list(steps), then]))
    return [f"engine.name={FAULTY_ENGINE}"]


class FaultyEngine(TransformersEngine):
    """See `plan`. Every new engine takes the next number of the plan."""

    steps_left = 0  # 0: the engine never raises

    @classmethod
    def from_config(cls, config: Config, **parts: Any) -> Self:
        engine = super().from_config(config, **parts)
        path = Path(config.run.dir) / f"{config.run.name}.faults"
        steps, then = json.loads(path.read_text())
        engine.steps_left = steps.pop(0) if steps else then
        path.write_text(json.dumps([steps, then]))
        return engine

    def _step(self) -> None:
        if self.steps_left:
            self.steps_left -= 1
            if not self.steps_left:
                self._gather()
        super()._step()

    def _gather(self) -> None:
        """Raise; on a GPU by a real fault of the device, after which its process cannot use it."""
        if self._options.device.startswith("cuda"):
            row = torch.zeros(4, device=self._options.device)
            row[torch.full((1,), 7, device=self._options.device)].cpu()
        raise IndexError("gather kernel index 7 is out of bounds\nCompile with device assertions")

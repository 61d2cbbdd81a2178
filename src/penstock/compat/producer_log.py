"""What a producer that is driven from Python writes down: figures, samples, its timeline.

Thin faces of `track/` and `timeline_log.py`: figures go to metrics.jsonl and, where a project is named,
to W&B; with profiling on, what the producer did when goes to timeline/events.jsonl, which
`penstock timeline FOLDER` draws.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from penstock.config import Config
from penstock.config.source import to_toml
from penstock.run_folder import CONFIG
from penstock.track.fanout import Fanout
from penstock.track.protocol import RunInfo
from penstock.types import Group
from penstock.watch.timeline_log import TimelineLog
from penstock.watch.waits import Waits

_FIGURES = ("reward", "format_acc", "ans_acc")


@dataclass(slots=True, frozen=True, kw_only=True)
class Names:
    """How W&B calls it; no project: W&B is not used."""

    project: str = ""
    run: str = ""
    group: str = ""


class ProducerLog:
    """Consumes what one producer made. Writes nothing that was not asked for."""

    def __init__(
        self,
        config: Config,
        folder: Path,
        names: Names,
        *,
        rollout_file: Path | None,
        rollouts_every: int,
        profile: bool,
    ) -> None:
        self.waits = Waits()
        self.rollout_file, self._every = rollout_file, rollouts_every
        self._timeline: TimelineLog | None = None
        if profile:
            folder.mkdir(parents=True, exist_ok=True)
            (folder / CONFIG).write_text(to_toml(config))  # by it the folder is known for a run's
            self._timeline = TimelineLog(folder / "timeline", self.waits)
        self._tracker: Fanout | None = None
        self._microbatches = 0
        if names.project:
            self._tracker = Fanout.from_info(_info(config, folder, names))

    def microbatch(self, groups: list[Group], tensors: Mapping[str, Any]) -> None:
        """Figures of each, samples of every so many."""
        number, self._microbatches = self._microbatches, self._microbatches + 1
        if self._tracker is not None:
            lengths = [len(rollout.response_ids) for g in groups for rollout in g.rollouts]
            figures = {f"rollout/{name}": float(tensors[name].mean()) for name in _FIGURES}
            figures["rollout/response_length"] = sum(lengths) / len(lengths)
            self._tracker.log_step(number + 1, figures)
        if self.rollout_file is not None and number % self._every == 0:
            self._write_samples(self.rollout_file, groups)

    def evaluation(self, step: int, figures: dict[str, float]) -> None:
        if self._tracker is not None:
            self._tracker.log_eval(step, figures)

    def _write_samples(self, path: Path, groups: list[Group]) -> None:
        with path.open("a", encoding="utf-8") as file:
            for rollout in (rollout for group in groups for rollout in group.rollouts):
                line = {"rollout_id": rollout.rollout_id, "text": rollout.text}
                figures = {"reward": rollout.reward, "policy_version": rollout.oldest_version}
                file.write(json.dumps({**line, **figures}, ensure_ascii=False) + "\n")

    def flush(self) -> None:
        if self._timeline is not None:
            self._timeline.flush()

    def close(self) -> None:
        self.flush()
        if self._tracker is not None:
            self._tracker.close()


def _info(config: Config, folder: Path, names: Names) -> RunInfo:
    folder.mkdir(parents=True, exist_ok=True)
    track = config.track.model_copy(update={"trackers": ["wandb"], "project": names.project})
    run = config.run.model_copy(update={"group": names.group})
    return RunInfo(
        config=config.model_copy(update={"track": track, "run": run}),
        folder=folder,
        name=names.run or folder.name,
        total_steps=0,
        first_step=0,
        live=lambda: "",
    )

"""A run folder like one that a run leaves, made in a second without a model.

Write one to look at: cd tests; python -m stages.made_run FOLDER
"""

from __future__ import annotations

import asyncio
import json
import math
import sys
from pathlib import Path

import numpy as np

from penstock.config.source import load_config, to_toml
from penstock.inspection.track.logs import JsonlTracker, RolloutLog
from penstock.rollout.evaluation.evaluate import EvalResult, append_summary, wilson
from penstock.store.journal import Journal
from penstock.store.run_folder import RunFolder
from penstock.types import Batch, Group, Prompt, Rollout, Score, Status, StepReport, VersionSegment

GROUP_SIZE = 4


def make_run(
    path: Path, *, steps: int = 12, groups_per_step: int = 6, seed: int = 0, rate: float = 1.0
) -> RunFolder:
    """Write a run that learns at `rate`; its journal balances and has groups of every outcome."""
    path.mkdir(parents=True)
    overrides = [f"train.steps={steps}", f"train.groups_per_step={groups_per_step}", f"seed={seed}"]
    config = load_config(None, overrides).config
    (path / "config.toml").write_text(to_toml(config), encoding="utf-8")
    folder = RunFolder(path)
    asyncio.run(_Maker(folder, steps, groups_per_step, seed, rate).make())
    return folder


class _Maker:
    def __init__(self, folder: RunFolder, steps: int, groups: int, seed: int, rate: float) -> None:
        self.folder, self.steps, self.groups_per_step, self.rate = folder, steps, groups, rate
        self.random = np.random.default_rng(seed)
        self.cursor = 0
        self.journal = Journal.open(folder.journal)
        self.tracker = JsonlTracker(folder.metrics)
        self.log = RolloutLog(folder.path / "rollouts.jsonl", every_steps=2, num_groups=2)

    async def make(self) -> None:
        self._evaluate(0)
        for step in range(1, self.steps + 1):
            await self._step(step)
            if step % max(1, self.steps // 6) == 0 or step == self.steps:
                self._evaluate(step)
        await self._leave_some_untrained()
        self.tracker.close()
        self.journal.close()

    def skill(self, step: int) -> float:
        return 0.35 + 0.6 / (1 + math.exp(6 - 12 * self.rate * step / self.steps))

    async def _step(self, step: int) -> None:
        groups = [self._group(step) for _ in range(self.groups_per_step)]
        for group in groups:
            self.journal.drawn(group)
            await self.journal.landed(group)
        batch = Batch(step=step, groups=tuple(groups))
        await self.journal.begin_step(step, groups)
        metrics = self._metrics(batch)
        await self.journal.commit_step(
            StepReport(step=step, policy_version=step, digest=f"{step:032x}", metrics=metrics)
        )
        self.tracker.log_step(step, metrics)
        self.log.write(batch)

    def _group(self, step: int) -> Group:
        a, b = (int(number) for number in self.random.integers(10, 99, 2))
        ids = np.arange(1, 6)
        question = {"role": "user", "content": f"What is {a} + {b}?"}
        prompt = Prompt(f"addition:{self.cursor}", (question,), ids, gt_answer=str(a + b))
        group_id = f"train:{self.cursor}"
        rollouts = [self._rollout(f"{group_id}.{i}", prompt, a, b, step) for i in range(GROUP_SIZE)]
        self.cursor += 1
        return Group(
            group_id=group_id,
            task="train",
            cursor=self.cursor - 1,
            prompt=prompt,
            rollouts=rollouts,
            tries=1,
        )

    def _rollout(self, rollout_id: str, prompt: Prompt, a: int, b: int, step: int) -> Rollout:
        right = bool(self.random.random() < self.skill(step))
        answer = a + b if right else a + b + int(self.random.integers(1, 20))
        length = int(np.clip(self.random.lognormal(2.9, 0.35), 4, 48))
        cut = length == 48
        rollout = Rollout(rollout_id=rollout_id, prompt_ids=prompt.token_ids, seed=self.cursor)
        rollout.append(np.arange(length), np.full(length, -0.4), self._segments(step, length))
        tens = a // 10 * 10
        rollout.text = (
            f"<think>{a} + {b} = {tens} + {b} + {a - tens}\n= {tens + b} + {a - tens}</think>"
            f"<answer>{answer}</answer>"
        )
        rollout.finish_reason = "length" if cut else "stop"
        value = float(right and not cut)
        parts = {"format": float(not cut), "answer": float(right)}
        rollout.score = Score(value, parts, not cut, right, f"parsed {answer}")
        rollout.move_to(Status.COMPLETED)
        return rollout

    def _segments(self, step: int, length: int) -> list[VersionSegment]:
        """Return the segments of a response: most have one version, some saw the weights change."""
        newest = step - 1
        oldest = max(0, newest - 1)
        kind = self.random.random()
        if kind < 0.5 or oldest == newest:
            return [VersionSegment(newest, length)]
        if kind < 0.8:
            return [VersionSegment(oldest, length)]
        return [VersionSegment(oldest, length // 2), VersionSegment(newest, length - length // 2)]

    def _metrics(self, batch: Batch) -> dict[str, float]:
        rollouts, noise = batch.rollouts, self.random.normal
        ages = [group.staleness(batch.step) for group in batch.groups]
        done = batch.step / self.steps
        step_s = 1.1 + 0.25 * float(abs(noise()))
        return {
            "policy_version": float(batch.step),
            "reward/mean": float(np.mean([r.reward for r in rollouts])),
            "accuracy/mean": float(np.mean([r.score.answer_ok for r in rollouts])),
            "response_length/mean": float(np.mean([len(r.response_ids) for r in rollouts])),
            "loss/policy": float(noise(0, 0.02)),
            "kl/mean": 0.002 * batch.step + float(abs(noise(0, 0.002))),
            "entropy/mean": 0.9 - 0.55 * done + float(noise(0, 0.03)),
            "ratio/mean": 1 + float(noise(0, 0.004)),
            "clip/fraction": float(abs(noise(0.02, 0.008))),
            "grad_norm": 0.7 + 0.4 * float(abs(noise())) * (1.2 - done),
            "lr": 1e-4,
            "staleness/mean": float(np.mean(ages)),
            "staleness/max": float(max(ages)),
            "mismatch/kl": 1e-5,
            "groups/zero_variance": float(
                np.mean([len({r.reward for r in group.rollouts}) == 1 for group in batch.groups])
            ),
            "tokens/generated": float(sum(len(r.response_ids) for r in rollouts)),
            "tokens/trained": float(sum(len(r.response_ids) for r in rollouts)),
            "time/step_s": step_s,
            "time/consumer_wait_s": step_s * float(self.random.uniform(0.05, 0.3)),
            "time/producer_wait_s": step_s * float(self.random.uniform(0.0, 0.2)),
        }

    def _evaluate(self, step: int) -> None:
        accuracy = round(self.skill(step) * 128) / 128
        low, high = wilson(accuracy, 128)
        append_summary(
            self.folder.evaluations,
            EvalResult(
                task="heldout",
                step=step,
                policy_version=step,
                problems=128,
                samples=128,
                accuracy=accuracy,
                low=low,
                high=high,
                pass_at={1: accuracy},
                reward=accuracy,
                format=1.0,
                response_length=19.5,
            ),
        )

    async def _leave_some_untrained(self) -> None:
        """Leave one group filtered, one expired and dropped, one failed and dropped, two waiting."""
        last = self.steps
        filtered, expired, failed, buffered, in_flight = (self._group(last) for _ in range(5))
        for group in (filtered, expired, failed, buffered, in_flight):
            self.journal.drawn(group)
        filtered.move_to(Status.FILTERED)
        await self.journal.filtered(filtered)
        await self.journal.landed(expired)
        self.journal.expired(expired)
        self.journal.dropped(expired, "expired", detail="older than the bound after 3 tries")
        failed.rollouts[0].move_to(Status.FAILED)
        failed.rollouts[0].error = "RewardError: the judge did not answer in 5 s"
        await self.journal.failed(failed)
        self.journal.dropped(failed, "failed", detail="3 tries")
        await self.journal.landed(buffered)
        await self.journal.flush()


def metrics_of(folder: RunFolder) -> list[dict]:
    return [json.loads(line) for line in folder.metrics.read_text().splitlines()]


if __name__ == "__main__":
    number = int(sys.argv[2]) if len(sys.argv) > 2 else 0
    make_run(Path(sys.argv[1]), steps=60, groups_per_step=32, seed=number, rate=1 + 0.3 * number)

"""Train the demo policy with every algorithm on a CPU and draw the curves of docs/algorithms.md.

    python scripts/plot_algorithms.py [--steps 30] [--groups 32] [--names grpo,dapo] [--seed 0]

Writes docs/images/algorithms.svg and docs/images/algorithms.json. Engine and consumer take turns in one
process and one thread, so staleness is exact: at lag k a batch is sampled with the weights of k updates
before. Only the SVG needs matplotlib.
"""

from __future__ import annotations

import argparse
import asyncio
import functools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from penstock.config import Config
from penstock.data.chat import ChatTemplate, load_tokenizer
from penstock.data.dataset import Dataset, load_dataset
from penstock.data.sampler import Sampler
from penstock.engine.transformers.engine import TransformersEngine
from penstock.reward import build_reward
from penstock.rollout.agent.single_turn import SingleTurn
from penstock.training.algo import ALGORITHMS
from penstock.training.algo.method import check_algorithm, resolve_settings
from penstock.training.algo.settings import keep_group
from penstock.training.consumer import Consumer
from penstock.types import Batch, Group, WeightHandle

IMAGES = Path(__file__).parent.parent / "docs" / "images"
MAX_DRAWS = 4  # dynamic sampling draws at most this many times for one batch
LAG = 4
STALE = {  # name: (algorithm, lag); at a lower learning rate and over more steps
    "on-policy": ({"name": "grpo"}, 0),
    "staleness 4, decoupled": ({"name": "grpo", "decoupled": True}, LAG),
    "staleness 4, as it is": ({"name": "grpo"}, LAG),
}
STALE_RATE, STALE_STEPS = 1e-4, 48
FINAL_GROUPS = 128


class WeightVersions:
    """Published weights by version; keeps the last `keep` versions for the lag."""

    def __init__(self, consumer: Consumer, keep: int) -> None:
        self._consumer, self._keep = consumer, keep
        self._held: dict[int, tuple[str, dict[str, torch.Tensor]]] = {}

    def publish(self) -> None:
        version = self._consumer.policy_version
        weights = {name: tensor.clone() for name, tensor in self._consumer.weights()}
        self._held[version] = (self._consumer.digest(), weights)
        self._held.pop(version - self._keep - 1, None)

    def handle(self, version: int) -> WeightHandle:
        return WeightHandle(version=version, digest=self._held[version][0], kind="versions")

    def fetch(self, handle: WeightHandle) -> Iterator[tuple[str, torch.Tensor]]:
        yield from self._held[handle.version][1].items()


def demo_config(algorithm: dict[str, Any], **fields: Any) -> Config:
    """Return a config of the demo's task with one algorithm."""
    settings: dict[str, Any] = {
        "tasks": {"train": {"data": "addition", "max_prompt_tokens": 16}},
        "sampling": {"num_generations": 8, "max_tokens": 24},
        "engine": {"max_slots": 256},
        "train": {"lr": 2e-4, "groups_per_step": 32},
        "algorithm": algorithm,
    }
    for section, values in fields.items():
        settings[section] = settings.get(section, {}) | values
    config = Config.model_validate(settings)
    check_algorithm(config)
    return config


async def train_curve(
    config: Config, steps: int, lag: int = 0, *, final_groups: int = FINAL_GROUPS
) -> tuple[list[float], float]:
    """Return (accuracy of each step's samples, accuracy of the final weights on new prompts).

    The samples of a step come from the weights of `lag` updates before. Filtered groups count.
    """
    torch.set_num_threads(config.train.threads)
    task, sampling = config.tasks["train"], config.task_sampling("train")
    chat, prompts = _read_task(config.model.path)
    sampler = Sampler(
        prompts,
        task_name="train",
        prompt_repeat_k=sampling.num_generations,
        seed=config.seed,
    )
    consumer = Consumer.from_config(config, total_steps=steps)
    versions = WeightVersions(consumer, keep=lag)
    engine = TransformersEngine.from_config(config, fetch=versions.fetch)
    reward = build_reward(task.rewards, max_tokens=sampling.max_tokens)
    agent = SingleTurn(engine=engine, reward=reward, sampling=sampling, decode=chat.decode)
    accuracies = []
    await engine.start()
    try:
        for step in range(1, steps + 1):
            versions.publish()
            version = max(step - 1 - lag, 0)
            await engine.update_weights(version, versions.handle(version))
            groups, accuracy = await _sample(config, sampler, agent)
            accuracies.append(accuracy)
            await asyncio.to_thread(consumer.train, Batch(step=step, groups=tuple(groups)))
        versions.publish()
        await engine.update_weights(steps, versions.handle(steps))
        judged = [sampler.sample("train") for _ in range(final_groups)]
        await asyncio.gather(*(agent.generate_group(group.rollouts) for group in judged))
        final = _accuracy(judged)
    finally:
        await engine.close()
        await reward.close()
    return accuracies, final


@functools.cache
def _read_task(path: str) -> tuple[ChatTemplate, Dataset]:
    """Return the policy's chat template and the demo task's prompts; every curve uses the same."""
    chat = ChatTemplate(load_tokenizer(path))
    return chat, load_dataset("train", demo_config({}).tasks["train"], chat)


def _accuracy(groups: list[Group]) -> float:
    verdicts = [
        bool(rollout.score and rollout.score.answer_ok)
        for group in groups
        for rollout in group.rollouts
    ]
    return sum(verdicts) / max(1, len(verdicts))


async def _sample(config: Config, sampler: Sampler, agent: SingleTurn) -> tuple[list[Group], float]:
    """Return a batch of groups that the algorithm's filter keeps, and the accuracy of all drawn."""
    settings, wanted = resolve_settings(config.algorithm), config.train.groups_per_step
    kept: list[Group] = []
    spare: list[Group] = []
    for _ in range(MAX_DRAWS):
        drawn = [sampler.sample("train") for _ in range(wanted - len(kept))]
        await asyncio.gather(*(agent.generate_group(group.rollouts) for group in drawn))
        for group in drawn:
            (kept if keep_group(group.rollouts, settings) else spare).append(group)
        if len(kept) == wanted:
            break
    accuracy = _accuracy(kept + spare)
    return kept + spare[: wanted - len(kept)], accuracy


def draw(curves: dict[str, list[float]], path: Path) -> None:
    import matplotlib

    matplotlib.use("svg")
    from matplotlib import pyplot

    pyplot.rcParams["svg.hashsalt"] = "penstock"
    figure, axes = pyplot.subplots(1, 2, figsize=(11, 4.2), sharey=True)
    for name, values in curves.items():
        side = axes[1 if name in STALE else 0]
        side.plot(range(1, len(values) + 1), _smooth(values), label=name)
    titles = ("every algorithm, on-policy", f"grpo at staleness {LAG}, lr {STALE_RATE:g}")
    for side, title in zip(axes, titles, strict=True):
        side.set_title(title)
        side.set_xlabel("step")
        side.grid(alpha=0.3)
        side.legend(fontsize=8)
    axes[0].set_ylabel("accuracy of sampled answers (mean of 3 steps)")
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None})


def _smooth(values: list[float], width: int = 3) -> list[float]:
    parts = [values[max(0, index - width + 1) : index + 1] for index in range(len(values))]
    return [sum(part) / len(part) for part in parts]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--groups", type=int, default=32)
    parser.add_argument("--names", default=",".join([*ALGORITHMS, *STALE]).replace(", ", ";"))
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    names = [name.replace(";", ", ") for name in args.names.split(",")]
    table = IMAGES / "algorithms.json"
    curves = json.loads(table.read_text()) if table.is_file() else {}
    for name in names:
        algorithm, lag = STALE.get(name, ({"name": name}, 0))
        train: dict[str, Any] = {"groups_per_step": args.groups}
        if name in STALE:
            train["lr"] = STALE_RATE
        config = demo_config(algorithm, train=train).model_copy(update={"seed": args.seed})
        steps = STALE_STEPS if name in STALE else args.steps
        curves[name], final = asyncio.run(train_curve(config, steps, lag))
        print(f"{name}: {curves[name][0]:.3f} -> {final:.3f} with the final weights", flush=True)
        IMAGES.mkdir(parents=True, exist_ok=True)
        rounded = {key: [round(value, 4) for value in curves[key]] for key in curves}
        table.write_text(json.dumps(rounded, indent=None) + "\n")
    draw(curves, IMAGES / "algorithms.svg")


if __name__ == "__main__":
    main()

"""What each trainer rank runs in `test_parallel.py`: the same steps, its own share of the groups."""

from __future__ import annotations

import dataclasses
import json
import os
from pathlib import Path

import torch

from penstock.training.consumer import Consumer
from penstock.training.policy import add_adapters
from penstock.training.ptx import Text, TextStream
from penstock.training.ranks import Ranks, rank_share, whole_tensor
from penstock.weights.offload import HostOffload
from stages.training_data import config_of, random_batch, tiny_model, tricky_batch

ALGORITHMS = {
    "plain": {},
    "reinforce_pp": {"name": "reinforce_pp", "kl_beta": 0.1},
    "dapo": {"name": "dapo"},
    "lora": {"kl_beta": 0.1},  # the base weights are the reference
}


STARTS = ("full", "lora", "float16")


def texts() -> TextStream:
    import numpy as np

    generator = np.random.default_rng(1)
    return TextStream(
        [Text(generator.integers(1, 23, n).astype(np.int32), np.arange(n - 1)) for n in (5, 7, 4)]
    )


def make(job: str, ranks: Ranks) -> Consumer:
    train = {"micro_batch_tokens": 40, "mini_batches": 3, "groups_per_step": 6, "lr": 1e-2}
    ptx = {"coefficient": 0.2, "data": "texts.jsonl", "sequences_per_step": 3}
    if job == "plain":
        train["ptx"] = ptx
    if job == "lora":
        train["gradient_checkpointing"] = True
    config = config_of(algorithm=ALGORITHMS[job], train=train)
    reference = tiny_model(seed=4) if job == "reinforce_pp" else None
    model = tiny_model(tie_word_embeddings=job != "dapo")
    if job == "lora":
        add_adapters(model, config_of(model={"lora": {"rank": 2}}).model.lora)
    return Consumer(
        config,
        model,
        total_steps=10,
        reference=reference,
        texts=texts() if job == "plain" else None,
        ranks=ranks,
    )


def train(consumer: Consumer, step: int) -> dict[str, float]:
    batch = tricky_batch() if step == 1 else random_batch(step, seed=step)
    share = tuple(rank_share(batch.groups, consumer.ranks))
    return consumer.train(dataclasses.replace(batch, step=step, groups=share)).metrics


def run(job: str, folder: Path, ranks: Ranks) -> None:
    """Train two steps, take a checkpoint, train a third step; train it again from the checkpoint.

    One job is offloaded when the checkpoint is taken.
    """
    consumer = make(job, ranks)
    metrics = [train(consumer, 1), train(consumer, 2)]
    name = f"{job}-{ranks.world}"
    if job == "reinforce_pp":
        consumer.host_offload = HostOffload(consumer._training_tensors, devices=("cpu",))
        consumer.offload()
        assert consumer.host_offload.is_offloaded
    write = consumer.snapshot(folder / name)
    metrics.append(train(consumer, 3))
    write()
    ranks.sum_of(0)  # wait for the other ranks: their shards are read too
    weights = dict(consumer.weights())
    resumed = make(job, ranks)
    resumed.load(folder / name)
    train(resumed, 3)
    again = dict(resumed.weights())
    if ranks.is_first:
        torch.save(weights, folder / f"{name}.pt")
        torch.save(again, folder / f"{name}-again.pt")
        (folder / f"{name}.json").write_text(json.dumps(metrics))


def reload(job: str, folder: Path, ranks: Ranks, saved_world: int) -> None:
    """Train the third step from a checkpoint that another number of ranks wrote."""
    consumer = make(job, ranks)
    consumer.load(folder / f"{job}-{saved_world}")
    train(consumer, 3)
    weights = dict(consumer.weights())
    if ranks.is_first:
        torch.save(weights, folder / f"{job}-{saved_world}-to-{ranks.world}.pt")


def start_rounded(job: str, folder: Path, ranks: Ranks) -> None:
    """Save the masters and the published weights before the first step, then train one step.

    Half of the weights lie on the grid, half have more digits.
    """
    model = tiny_model(dtype=torch.float32)
    dtype = "float16" if job == "float16" else "bfloat16"
    with torch.no_grad():
        for parameter in model.parameters():
            parameter[::2] = parameter[::2].to(getattr(torch, dtype)).float()
    sections = {"model": {"dtype": dtype}, "train": {"lr": 1e-4}}
    if job == "lora":
        sections["model"]["lora"] = {"rank": 2}
        torch.manual_seed(0)
        model = model.bfloat16()
        add_adapters(model, config_of(**sections).model.lora)
    consumer = Consumer(config_of(**sections), model, total_steps=10, ranks=ranks)
    masters = {n: whole_tensor(p.detach()).clone() for n, p in consumer.masters.parameters.items()}
    published = {name: tensor.clone() for name, tensor in consumer.weights()}
    content = {"masters": masters, "published": published}
    content["arrived"] = train(consumer, 2)["update/arrived"]
    content["after"] = dict(consumer.weights())
    if ranks.is_first:
        torch.save(content, folder / f"start-{job}-{ranks.world}.pt")


class OneRank:
    """What a worker process serves: one of two ranks that meet at that port."""

    def __init__(self, rank: int, port: int) -> None:
        os.environ |= {"RANK": str(rank), "WORLD_SIZE": "2"}
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        self._ranks = Ranks.from_environment(torch.device("cpu"))

    def run_all(self, folder: Path) -> None:
        for name in ALGORITHMS:
            run(name, folder, self._ranks)
        reload("plain", folder, self._ranks, saved_world=1)
        for name in STARTS:
            start_rounded(name, folder, self._ranks)

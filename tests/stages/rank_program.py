"""What each trainer rank runs in `test_parallel.py`: the same steps, its own share of the groups."""

from __future__ import annotations

import dataclasses
import json
import os
from pathlib import Path

import torch

from penstock.config import ParallelConfig
from penstock.errors import StopRequested
from penstock.model import packed_attention
from penstock.training.adapters import add_adapters
from penstock.training.consumer import Consumer
from penstock.training.model_check import check_model, lay_out
from penstock.training.parallel.ranks import Ranks, rank_share
from penstock.training.policy import Policy, load_for_ranks, load_policy
from penstock.training.ptx import text_group
from penstock.types import Group, StepReport
from penstock.weights.offload import HostOffload
from stages.decoder_cases import make_decoder
from stages.training_data import config_of, random_batch, tiny_model, tricky_batch

ALGORITHMS = {
    "plain": {},
    "reinforce_pp": {"name": "reinforce_pp", "kl_beta": 0.1},
    "ppo": {"name": "ppo", "gae_lambda": 0.9},
    "dapo": {"name": "dapo"},
    "lora": {"kl_beta": 0.1},  # the base weights are the reference
}


STARTS = ("full", "lora", "float16")


def layout_of(ranks: Ranks) -> str:
    """Return a name: the number of ranks, then the axes that are not the default."""
    axes = ranks.parallel.model_dump(exclude_defaults=True)
    return "-".join([str(ranks.world), *(f"{name}{size}" for name, size in axes.items())])


def texts() -> list[Group]:
    import numpy as np

    generator = np.random.default_rng(1)
    return [text_group(generator.integers(1, 23, n)) for n in (5, 7, 4)]


def make(job: str, ranks: Ranks) -> Consumer:
    train = {"micro_batch_tokens": 40, "mini_batches": 3, "groups_per_step": 6, "lr": 1e-2}
    ptx = {"coefficient": 0.2, "data": "texts.jsonl", "sequences_per_step": 3}
    if job == "plain":
        train["ptx"] = ptx
    if job == "lora":
        train["gradient_checkpointing"] = True
    config = config_of(algorithm=ALGORITHMS[job], train=train)
    reference = tiny_model(seed=4) if job == "reinforce_pp" else None
    model = tiny_model(tie_word_embeddings=job not in ("ppo", "dapo"))
    if job == "lora":
        torch.manual_seed(0)
        add_adapters(model, config_of(model={"lora": {"rank": 2}}).model.lora)
    return Consumer(
        config,
        model,
        total_steps=10,
        reference=reference,
        texts=texts() if job == "plain" else (),
        ranks=ranks,
    )


def train(consumer: Consumer, step: int) -> dict[str, float]:
    return report_of(consumer, step).metrics


def report_of(consumer: Consumer, step: int) -> StepReport:
    """Train one step on this rank's share of its groups."""
    batch = tricky_batch() if step == 1 else random_batch(step, seed=step)
    if step == 2 and consumer.settings.mask_truncated:  # a step that trains nothing
        for group in batch.groups:
            for rollout in group.rollouts:
                rollout.finish_reason = "length"
    share = tuple(rank_share(batch.groups, consumer.ranks))
    return consumer.train(dataclasses.replace(batch, step=step, groups=share))


def run(job: str, folder: Path, ranks: Ranks) -> None:
    """Train two steps, take a checkpoint, train a third step; train it again from the checkpoint.

    One job is offloaded when the checkpoint is taken, and one is stopped in the third step's first try.
    """
    consumer = make(job, ranks)
    metrics = [train(consumer, 1), train(consumer, 2)]
    name = f"{job}-{layout_of(ranks)}"
    if job == "reinforce_pp":
        consumer.host_offload = HostOffload(consumer._training_tensors, devices=("cpu",))
        consumer.offload()
        assert consumer.host_offload.is_offloaded
    write = consumer.snapshot(folder / name)
    if job == "plain" and ranks.pipeline.size == 1:
        stop_in_an_update(consumer, 3)
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


def stop_in_an_update(consumer: Consumer, step: int) -> None:
    """Ask for a stop after the first backward pass of a step: what follows is as if it never began."""
    backward = consumer.loss_scale.backward

    def then_stop(loss: torch.Tensor) -> None:
        backward(loss)
        consumer.request_stop()

    consumer.loss_scale.backward = then_stop  # type: ignore[method-assign]
    try:
        train(consumer, step)
    except StopRequested:
        return
    finally:
        consumer.loss_scale.backward = backward  # type: ignore[method-assign]
    raise AssertionError("the stop was not honoured")


def reload(job: str, folder: Path, ranks: Ranks, saved: str) -> None:
    """Train the third step from a checkpoint that ranks of another layout wrote."""
    consumer = make(job, ranks)
    consumer.load(folder / f"{job}-{saved}")
    train(consumer, 3)
    weights = dict(consumer.weights())
    if ranks.is_first:
        torch.save(weights, folder / f"{job}-{saved}-to-{layout_of(ranks)}.pt")


def start_rounded(job: str, folder: Path, ranks: Ranks) -> None:
    """Save the masters and the published weights before the first step, then train one step.

    Half of the weights lie on the grid, half have more digits.
    """
    model = tiny_model(dtype=torch.float32)
    dtype = "float16" if job == "float16" else "bfloat16"
    with torch.no_grad():
        for parameter in model.parameters():
            parameter[::2] = parameter[::2].to(getattr(torch, dtype)).float()
    mean = {
        "aggregation": "sequence"
    }  # with it no row of an adapter has a gradient of rounding alone
    sections = {"model": {"dtype": dtype}, "train": {"lr": 1e-4}, "algorithm": mean}
    if job == "lora":
        sections["model"]["lora"] = {"rank": 2}
        torch.manual_seed(0)
        model = model.bfloat16()
        add_adapters(model, config_of(**sections).model.lora)
    consumer = Consumer(config_of(**sections), model, total_steps=10, ranks=ranks)
    whole, named = consumer.policy.sharding.whole, consumer.masters.parameters
    masters = {name: whole(name, one.detach()).clone() for name, one in named.items()}
    published = {name: tensor.clone() for name, tensor in consumer.weights()}
    content = {"masters": masters, "published": published, "reach": reach(consumer, masters)}
    content["arrived"] = train(consumer, 2)["update/arrived"]
    content["after"] = dict(consumer.weights())
    content["trained"] = {name: whole(name, one.detach()).clone() for name, one in named.items()}
    if ranks.world == 1:
        moments = consumer.optimizer.state
        content["gradient"] = {name: moments[one]["exp_avg"] for name, one in named.items()}
    if ranks.is_first:
        torch.save(content, folder / f"start-{job}-{layout_of(ranks)}.pt")


def reach(consumer: Consumer, masters: dict[str, torch.Tensor]) -> float:
    """How far a step of one master moves a published weight, in steps: an adapter's B is multiplied by its A."""
    sums = [float(one.abs().sum(0).max()) for name, one in masters.items() if "lora_A" in name]
    lora = consumer.config.model.lora
    return max(sums) * lora.alpha / lora.rank if sums else 1.0


def load_shares(folder: Path, ranks: Ranks) -> None:
    """Load stored models by rows and whole, train a step with both; save what was read and the weights."""
    for path in sorted(folder.glob("model-*")):
        axes = ranks.parallel.model_dump()
        config = config_of(
            model={"path": str(path)},
            train={"lr": 1e-2, "parallel": axes},
            launch={"num_consumers": ranks.world},
        )
        model, stored = load_for_ranks(config.model, torch.float32, ranks)
        assert stored is not None
        shared = Consumer(config, model, total_steps=10, ranks=ranks, stored=stored)
        whole = Consumer(
            config, load_policy(str(path), config.model, torch.float32), total_steps=10, ranks=ranks
        )
        found = {"read": stored.bytes_read, "held": stored.most_held, "packs": shared.policy.packs}
        assert shared.policy.packs == whole.policy.packs
        buffers = [dict(one.policy.model.named_buffers()) for one in (shared, whole)]
        assert buffers[0].keys() == buffers[1].keys()
        assert all(torch.equal(buffers[0][name], buffers[1][name]) for name in buffers[0])
        found["before"] = [one.digest() for one in (shared, whole)]
        found["after"] = [report_of(one, 2).digest for one in (shared, whole)]
        found["ends"] = [one.policy.end_ids for one in (shared, whole)]
        found["from_config"] = Consumer.from_config(config, total_steps=10).digest()
        name = f"loaded-{path.name}-{layout_of(ranks)}-rank-{ranks.rank}.json"
        (folder / name).write_text(json.dumps(found))


def divide(case: str, ranks: Ranks) -> None:
    """Divide a decoder family; its log-probs are compared with the undivided, eager model's, or it is refused."""
    packed_attention.register()
    policy = Policy(make_decoder(case), longest=80)
    check_model(policy, case)
    lay_out(policy, ranks, case)
    assert policy.decodes


class OneRank:
    """What a worker process serves: one of several ranks that meet at that port."""

    def __init__(self, rank: int, port: int, world: int = 2) -> None:
        os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(world)}
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}

    def run_jobs(
        self,
        folder: Path,
        jobs: list[str],
        starts: list[str],
        layouts: list[dict[str, int]],
    ) -> None:
        """Train and start these jobs, and load the stored models of the folder in these layouts."""
        ranks = Ranks.from_environment(torch.device("cpu"))
        for name in jobs:
            run(name, folder, ranks)
        reload("plain", folder, ranks, saved="1")
        for name in starts:
            start_rounded(name, folder, ranks)
        for axes in layouts:
            load_shares(folder, Ranks.from_environment(torch.device("cpu"), ParallelConfig(**axes)))

    def run_layouts(self, folder: Path, tasks: list[tuple[str, str, dict[str, int]]]) -> None:
        """Run each (kind of work, its argument, axes); work on a checkpoint names its layout."""
        for kind, argument, axes in tasks:
            ranks = Ranks.from_environment(torch.device("cpu"), ParallelConfig(**axes))
            if kind == "run":
                run(argument, folder, ranks)
            elif kind == "start":
                start_rounded(argument, folder, ranks)
            elif kind == "divide":
                divide(argument, ranks)
            else:
                reload(argument, folder, ranks, saved=kind)

"""`BaseProducer` and `SimpleProducer`: generate and score from plain Python, here or as a Ray actor.

For users who drive producers themselves, e.g. with `ray.remote(SimpleProducer)`: a thin layer over the
engine, agent loop, reward and dataset of a run. Methods block; an event loop on a thread serves them. A
run needs none of this: its producing side is `rollout/`, with staleness, journal and retries.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import threading
from collections.abc import Callable, Coroutine, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar
from weakref import WeakValueDictionary

import numpy as np

from penstock.compat.distributed import arguments_of, checked_config, settings_of
from penstock.config.plugins import load
from penstock.config.sections import AnnealConfig
from penstock.config.source import to_toml
from penstock.data import load_dataset
from penstock.data.chat import ChatTemplate
from penstock.data.sampler import Sampler
from penstock.engine import ENGINES
from penstock.errors import RunError, UserError
from penstock.inspection.track.logs import Fanout, RolloutLog, RunInfo, TimelineLog
from penstock.reward import build_reward
from penstock.rollout.agent.single_turn import SingleTurn
from penstock.rollout.evaluation.evaluate import EvalResult, EvalTask, append_summary, evaluate
from penstock.store.run_folder import CONFIG
from penstock.training.algo.advantage import group_advantages
from penstock.training.algo.method import resolve_settings
from penstock.types import Batch, Group, Prompt, Rollout, Status
from penstock.waits import WaitKind, Waits

T = TypeVar("T")
Tensors = dict[str, Any]
_METRICS = ("reward", "format_acc", "ans_acc")
_OF_TRAINERS = ("num_producers", "num_consumer_procs", "consumer_plugin_config")


class BaseProducer:
    """Generates, scores and delivers. A subclass defines `deliver`, and where `new_weights` come from."""

    def __init__(self, *positional: Any, **parameters: Any) -> None:
        """The parameters are those of the column producer of `config/systems/colossalai_calls.csv`.

        `project_name` turns W&B on; metrics and the timeline go to `log_dir`, else to `eval_save_dir`.
        """
        arguments = arguments_of(type(self).__name__, "producer", positional, parameters)
        self.producer_idx = arguments["producer_idx"]
        self.num_producers = arguments["num_producers"]
        self.num_consumer_procs = arguments["num_consumer_procs"]
        self.num_episodes = arguments["num_episodes"]
        self.batch_size = arguments["batch_size"]
        self.microbatch_size = arguments["microbatch_size"]
        self.eval_interval = arguments["eval_interval"]
        index, most = self.producer_idx, self.num_producers - 1
        if not 0 <= index <= most:
            raise UserError(f"producer_idx: got {index}, allowed: 0 to {most} (num_producers - 1)")
        if self.batch_size % self.microbatch_size:
            raise UserError(
                f"microbatch_size: got {self.microbatch_size}, allowed: a divisor of "
                f"batch_size = {self.batch_size}"
            )
        own = {name: value for name, value in arguments.items() if name not in _OF_TRAINERS}
        settings = settings_of(type(self).__name__, own)
        settings["track.trackers"] = ["wandb"] if arguments["project_name"] else []
        self.config = checked_config(settings)
        self._eval_folder = Path(arguments["eval_save_dir"])
        self._write_down(
            Path(arguments["log_dir"] or self._eval_folder),
            arguments["rollout_log_file"],
            profile=arguments["enable_profiling"],
        )
        self._groups_joined: dict[str, Any] = {}
        self.policy_version = 0
        self._groups = self._prompts_done = self._microbatches_done = 0
        self._rolled: list[Group] = []  # made by `rollout` since the last microbatch
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, name="producer", daemon=True).start()
        self._wait(self._open())

    def _write_down(self, folder: Path, rollout_file: str | None, *, profile: bool) -> None:
        """Open what was asked for: metrics.jsonl and W&B, samples, the timeline that `penstock timeline` draws."""
        config, self._waits = self.config, Waits()
        self._rollouts = RolloutLog(
            Path(rollout_file or os.devnull),
            every_steps=config.track.rollouts_every_steps if rollout_file else 0,
            num_groups=sys.maxsize,
            system_prompts={"train": config.tasks["train"].system_prompt},
        )
        self._timeline: TimelineLog | None = None
        self._tracker = Fanout({})
        if profile or config.track.trackers:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if profile:
            (folder / CONFIG).write_text(to_toml(config))  # marks the folder as that of a run
            self._timeline = TimelineLog(folder / "timeline", self._waits)
        if config.track.trackers:
            info = RunInfo(
                config=config,
                folder=folder,
                name=config.run.name or folder.name,
                total_steps=0,
                first_step=0,
                live=lambda: "",
            )
            self._tracker = Fanout.from_info(info)

    @classmethod
    def options(cls, **ray_options: Any) -> Any:
        """This class as a Ray actor with these options; `.remote(...)` of it makes a producer."""
        try:
            from penstock.workers.ray.actor import as_actor

            return as_actor(cls, ray_options)
        except ImportError:
            raise UserError(
                f"{cls.__name__}.options: Ray is not installed; allowed: pip install 'penstock[ray]', or "
                f"{cls.__name__}(...) in this process"
            ) from None

    def setup(self) -> None:
        """Do nothing: a producer is ready as soon as it is made."""

    def _wait(self, work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()

    async def _open(self) -> None:
        from penstock.weights.in_process import InProcessSync

        config = self.config
        self._chat = ChatTemplate.from_config(config.model)
        self._dataset = load_dataset("train", config.tasks["train"], self._chat, config.seed)
        self._sampler = Sampler(
            self._dataset,
            task_name=f"producer-{self.producer_idx}",
            prompt_repeat_k=config.sampling.num_generations,
            seed=config.seed,
        )
        self._reward = build_reward(
            config.tasks["train"].rewards,
            max_tokens=config.sampling.max_tokens,
            waits=self._waits,
            lane=f"rewards of producer-{self.producer_idx}",
        )
        self._sync = InProcessSync()
        engine_class = load("backend", config.engine.name, ENGINES)
        self._engine = engine_class.from_config(
            config, fetch=self._sync.fetch, index=self.producer_idx
        )
        await self._engine.start()

    # ---- what a subclass defines

    def deliver(self, tensors: Tensors) -> None:
        """Take one microbatch of scored groups."""
        raise NotImplementedError

    def new_weights(self) -> Mapping[str, Any] | None:
        """The state dict to use after each `batch_size` prompts; None keeps the current one."""
        return None

    # ---- what a user calls

    def init_collective_group(
        self,
        world_size: int,
        rank: int,
        backend: str = "gloo",
        group_name: str = "default",
        init_method: str = "env://",
        gloo_timeout: float = 600_000,
    ) -> None:
        """Join a group (`join_group`); waits `gloo_timeout` milliseconds for the others."""
        timeout_s = gloo_timeout / 1000
        group = join_group(world_size, rank, backend, group_name, init_method, timeout_s)
        self._groups_joined[group_name] = group

    def receive_state_dict(self, group_name: str = "default") -> dict[str, Any]:
        """What rank 0 of a joined group sends next, for `new_weights` or `load_state_dict`."""
        if group_name not in self._groups_joined:
            joined = ", ".join(self._groups_joined) or "none: init_collective_group comes first"
            raise UserError(f"group_name: got {group_name!r}, allowed: {joined}")
        return receive_state_dict(self._groups_joined[group_name])

    def rollout(self, input_ids: Any, attention_mask: Any, **fields: Any) -> Tensors:
        """Generate and score `num_generations` responses to each prompt of a left-padded batch.

        `fields` are what the reward needs, with one entry for each prompt: gt_answer, test_cases, ...
        """
        ids, mask = np.asarray(input_ids), np.asarray(attention_mask).astype(bool)
        for key, values in fields.items():
            if len(values) != len(ids):
                raise UserError(f"rollout: {key} got {len(values)} entries, allowed: {len(ids)}")
        groups = [
            self._group(row[keep].astype(np.int32), {key: v[n] for key, v in fields.items()})
            for n, (row, keep) in enumerate(zip(ids, mask, strict=True))
        ]
        self._rolled += groups
        return self._wait(self._generate(groups))

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> str:
        """Load these weights into the engine; return the digest of what it then holds."""
        from penstock.weights.digest import digest_of

        digest = digest_of(state_dict.items())
        handle = self._sync.publish(self.policy_version + 1, digest, state_dict.items())
        with self._busy(WaitKind.SYNC):
            loaded: str = self._wait(self._engine.update_weights(handle.version, handle))
        self.policy_version += 1
        return loaded

    def loop(self) -> int:
        """Run all episodes over this producer's share of the prompts; return the number of prompts.

        Calls `rollout` for each microbatch, so a subclass may replace it; it gets what the dataset lines
        hold, and `prompts`, the records. Takes new weights after each batch. Producer 0 evaluates before
        the first batch and after every `eval_interval` batches.
        """
        self._prompts_done = batches = 0
        self._evaluate_if_due(batches)
        for prompts in self._microbatches():
            self._rolled.clear()
            tensors = self.rollout(**prompt_tensors(prompts, self._chat.pad_id))
            with self._busy(WaitKind.SEND):
                self.deliver(tensors)
            self._log_microbatch(tensors)
            self._prompts_done += len(prompts)
            if self._prompts_done % self.batch_size == 0:
                batches += 1
                with self._busy(WaitKind.WAIT):
                    weights = self.new_weights()
                if weights is not None:
                    self.load_state_dict(weights)
                self._evaluate_if_due(batches)
        if self._timeline is not None:
            self._timeline.flush()
        return self._prompts_done

    def evaluate(self, step: int) -> list[EvalResult]:
        """Evaluate every evaluation set once; samples go to `eval_save_dir`."""
        with self._busy(WaitKind.EVAL):
            return self._wait(self._evaluate(step))

    def close(self) -> None:
        self._wait(self._engine.close())
        self._wait(self._reward.close())
        if self._timeline is not None:
            self._timeline.close()
        self._tracker.close()
        self._loop.call_soon_threadsafe(self._loop.stop)

    # ---- private

    def _busy(self, what: WaitKind) -> AbstractContextManager[Any]:
        """Record what this producer does now, for its timeline."""
        return self._waits.wait(f"producer-{self.producer_idx}", what)

    def _log_microbatch(self, tensors: Tensors) -> None:
        """Log the metrics of one microbatch, and every so many its samples."""
        figures = {f"rollout/{n}": float(tensors[n].mean()) for n in _METRICS if n in tensors}
        if "action_mask" in tensors:
            lengths = tensors["action_mask"].float().sum(dim=-1)
            figures["rollout/response_length"] = float(lengths.mean())
        self._rollouts.write(Batch(step=self._microbatches_done, groups=tuple(self._rolled)))
        self._microbatches_done += 1
        self._tracker.log_step(self._microbatches_done, figures)

    def _evaluate_if_due(self, batches: int) -> None:
        if self.producer_idx == 0 and self.eval_interval > 0 and batches % self.eval_interval == 0:
            self.evaluate(batches)

    async def _evaluate(self, step: int) -> list[EvalResult]:
        results = []
        for name, table in self.config.eval.tasks.items():
            data = load_dataset(name, table, self._chat)
            sampling = self.config.eval_sampling(name)
            task = EvalTask(
                name=name,
                problems=[data[index] for index in range(len(data))],
                reward=self._reward,
                sampling=sampling,
                num_generations=sampling.num_generations,
                decode=self._chat.decode,
                seed=self.config.seed,
            )
            folder, version = self._eval_folder, self.policy_version
            result = await evaluate(self._engine, task, step=step, version=version, folder=folder)
            append_summary(folder, result)
            self._tracker.log_eval(step, result.metrics())
            results.append(result)
        return results

    def _microbatches(self) -> Iterator[list[Prompt]]:
        """Yield microbatches of every episode, each in its own order; the last of an episode may be short."""
        share = np.arange(self.producer_idx, len(self._dataset), self.num_producers)
        for episode in range(self.num_episodes):
            order = np.random.default_rng([self.config.seed, episode]).permutation(share)
            for start in range(0, len(order), self.microbatch_size):
                part = order[start : start + self.microbatch_size]
                yield [self._dataset[int(index)] for index in part]

    def _group(self, token_ids: np.ndarray, fields: dict[str, Any]) -> Group:
        if isinstance(record := fields.get("prompts"), Prompt):
            return self._new_group(record)
        answers = {key: fields.pop(key) for key in ("gt_answer", "test_cases") if key in fields}
        name = f"given:{self._groups}"
        return self._new_group(
            Prompt(prompt_id=name, messages=(), token_ids=token_ids, extra=fields, **answers)
        )

    def _new_group(self, prompt: Prompt) -> Group:
        group = self._sampler.group_of(self._groups, prompt)
        group.task = "train"
        for rollout in group.rollouts:
            rollout.issued_version = self.policy_version
        self._groups += 1
        return group

    async def _generate(self, groups: list[Group]) -> Tensors:
        with self._busy(WaitKind.GENERATE):
            # at the temperature that this producer's prompts have reached in its episodes
            sampling, anneal = self.config.sampling, self.config.sampling.anneal
            if anneal.end is not None and anneal.episodes:
                share = len(range(self.producer_idx, len(self._dataset), self.num_producers))
                done = min(1.0, self._prompts_done / (anneal.episodes * share))
                now = sampling.temperature + (anneal.end - sampling.temperature) * done
                sampling = sampling.model_copy(
                    update={"temperature": now, "anneal": AnnealConfig()}
                )
            agent = SingleTurn(
                engine=self._engine,
                reward=self._reward,
                sampling=sampling,
                decode=self._chat.decode,
            )
            await asyncio.gather(*(agent.generate_group(group.rollouts) for group in groups))
        for group in groups:
            failed = [r.error for r in group.rollouts if r.status is not Status.COMPLETED]
            if failed:
                raise RunError(f"{group.group_id}: {len(failed)} responses failed: {failed[0]}")
        settings = resolve_settings(self.config.algorithm)
        advantages = np.stack(
            [group_advantages(np.array([r.reward for r in g.rollouts]), settings) for g in groups]
        )
        return group_tensors(groups, advantages, self._chat.pad_id)


class SimpleProducer(BaseProducer):
    """A producer that passes every microbatch to a function, or keeps it in `delivered`."""

    def __init__(
        self, *args: Any, deliver: Callable[[Tensors], None] | None = None, **kwargs: Any
    ) -> None:
        self.delivered: list[Tensors] = []
        self._deliver = deliver or self.delivered.append
        super().__init__(*args, **kwargs)

    def deliver(self, tensors: Tensors) -> None:
        self._deliver(tensors)


# ---- groups as padded tensors


def _padded(rows: Iterable[Any], *, side: str = "right", fill: float = 0) -> Any:
    """Rows of different lengths as one tensor."""
    import torch
    from torch.nn.utils.rnn import pad_sequence

    tensors = [torch.as_tensor(row) for row in rows]
    return pad_sequence(tensors, batch_first=True, padding_value=fill, padding_side=side)


def prompt_tensors(prompts: list[Prompt], pad_id: int) -> dict[str, Any]:
    """The arguments of `rollout` for these prompts: left-padded ids, and one list per field."""
    ids = [prompt.token_ids.astype(np.int64) for prompt in prompts]
    fields: dict[str, Any] = {
        "input_ids": _padded(ids, side="left", fill=pad_id),
        "attention_mask": _padded(map(np.ones_like, ids), side="left"),
        "prompts": prompts,
    }
    for name in ("gt_answer", "test_cases"):
        values = [getattr(prompt, name) for prompt in prompts]
        if any(value is not None for value in values):
            fields[name] = values
    return fields


def group_tensors(groups: list[Group], advantages_PG: np.ndarray, pad_id: int) -> dict[str, Any]:
    """Tensors of [prompts, generations, length], prompts padded left and responses right.

    `response_idx` holds the first and the last index of a response in `input_ids`; action tensors
    cover the response only.
    """
    import torch

    rollouts = [rollout for group in groups for rollout in group.rollouts]
    prompt_ids = [rollout.prompt_ids.astype(np.int64) for rollout in rollouts]
    response_ids = [rollout.response_ids.astype(np.int64) for rollout in rollouts]
    prompts = _padded(prompt_ids, side="left", fill=pad_id)
    masks = (_padded(map(np.ones_like, prompt_ids), side="left"), map(np.ones_like, response_ids))
    first = prompts.shape[1]
    tensors = {
        "input_ids": torch.cat([prompts, _padded(response_ids, fill=pad_id)], dim=1),
        "attention_mask": torch.cat([masks[0], _padded(masks[1])], dim=1),
        "action_mask": _padded(rollout.loss_mask for rollout in rollouts),
        "action_log_probs": _padded(rollout.logprobs for rollout in rollouts),
        "response_idx": torch.tensor([[first, first + len(ids) - 1] for ids in response_ids]),
        "reward": torch.tensor([[rollout.reward] for rollout in rollouts]),
        "format_acc": torch.tensor([[_verdict(rollout, "format_ok")] for rollout in rollouts]),
        "ans_acc": torch.tensor([[_verdict(rollout, "answer_ok")] for rollout in rollouts]),
        "temperature": torch.tensor([[rollout.temperature] for rollout in rollouts]),
        "advantages": torch.from_numpy(advantages_PG).float().reshape(-1, 1),
    }
    return {name: tensor.unflatten(0, (len(groups), -1)) for name, tensor in tensors.items()}


def _verdict(rollout: Rollout, name: str) -> float:
    """The reward's verdict `name`; if it has none, whether the reward is above 0."""
    verdict = getattr(rollout.score, name)
    return float(rollout.reward > 0 if verdict is None else verdict)


# -- state dicts by broadcast -------------------------------------------------------------------


if TYPE_CHECKING:
    from penstock.weights.broadcast import WeightGroup


def join_group(
    world_size: int,
    rank: int,
    backend: str = "gloo",
    name: str = "default",
    where: str = "env://",
    timeout_s: float = 600.0,
) -> WeightGroup:
    """Join a group; wait up to `timeout_s` for the other members.

    `where` is the same for all members: env:// reads MASTER_ADDR and MASTER_PORT, or tcp://HOST:PORT
    of rank 0.
    """
    import torch.distributed as dist

    from penstock.weights.broadcast import WeightGroup

    if backend not in ("gloo", "nccl"):
        raise UserError(f"collective group {name}: backend got {backend!r}, allowed: gloo, nccl")
    if not 0 <= rank < world_size:
        raise UserError(f"collective group {name}: rank got {rank}, allowed: 0 to {world_size - 1}")
    limit = timedelta(seconds=timeout_s)
    if where.startswith("tcp://"):
        host, _, port = where.removeprefix("tcp://").rpartition(":")
        store = _store(host, int(port), first=rank == 0, timeout_s=timeout_s)
    else:
        store, _, _ = next(dist.rendezvous(where, rank, world_size, timeout=limit))
    return WeightGroup(rank, world_size, store, timeout_s, name=name, backend=backend)


_OPENED: WeakValueDictionary[tuple[str, int], Any] = WeakValueDictionary()


def _store(host: str, port: int, *, first: bool, timeout_s: float) -> Any:
    """Connect to rank 0's store; rank 0 opens it, or shares that of its other groups."""
    from penstock.weights.broadcast import connect_store, open_store

    if not first:
        return connect_store(host, port, timeout_s)
    store = _OPENED.get((host, port))
    if store is None:
        try:
            store = _OPENED[host, port] = open_store(host, timeout_s, port)
        except OSError as error:
            raise UserError(
                f"collective group: rank 0 got tcp://{host}:{port} ({error.strerror}), "
                "allowed: an address of its machine and a free port"
            ) from None
    return store


def send_state_dict(group: WeightGroup, state_dict: Mapping[str, Any]) -> None:
    """Send a state dict from rank 0 to all others; return when it is sent."""
    import torch

    shapes = [(name, str(t.dtype)[6:], list(t.shape)) for name, t in state_dict.items()]
    text = torch.frombuffer(bytearray(json.dumps(shapes).encode()), dtype=torch.uint8)
    group.send([torch.tensor([len(text)]), text, *state_dict.values()])


def receive_state_dict(group: WeightGroup, device: str = "cpu") -> dict[str, Any]:
    """The state dict that rank 0 sends next, on `device`."""
    size = int(group.receive([("size", "int64", [1])])["size"])
    text = group.receive([("text", "uint8", [size])])["text"]
    return group.receive(json.loads(bytes(text.tolist())), device)

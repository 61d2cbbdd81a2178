"""`BaseProducer` and `SimpleProducer`: generate and score from plain Python, here or as a Ray actor.

Thin faces of the run's own parts (engine, agent loop, reward, dataset) for users who drive producers
themselves; `ray.remote(SimpleProducer)` works. Methods block: an event loop of their own serves them.
A run needs none of this: its producing side is `produce/`, with staleness, journal and retries.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine, Iterator, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from penstock.agent.single_turn import SingleTurn
from penstock.algo.advantage import group_advantages
from penstock.algo.method import resolve_settings
from penstock.compat.producer_log import Names, ProducerLog
from penstock.compat.tensors import group_tensors, unpadded
from penstock.compat.weight_broadcast import join_group, receive_state_dict
from penstock.config import Config
from penstock.data import load_dataset
from penstock.data.chat import ChatTemplate, load_tokenizer
from penstock.data.sampler import rollout_seed
from penstock.engine import ENGINES
from penstock.engine.protocol import SamplingParams
from penstock.errors import RunError, UserError
from penstock.evaluation.evaluate import EvalResult, EvalTask, append_summary, evaluate
from penstock.plugins import load
from penstock.reward import build_reward
from penstock.types import Group, Prompt, Rollout, Status
from penstock.watch.waits import WaitKind

T = TypeVar("T")
Tensors = dict[str, Any]
_SAMPLING_NAMES = {"max_new_tokens": "max_tokens"}


class BaseProducer:
    """Generates, scores, hands on. A subclass says where to (`deliver`) and whence weights come."""

    def __init__(
        self,
        producer_idx: int,
        num_producers: int,
        num_consumer_procs: int,
        num_episodes: int,
        batch_size: int,
        train_dataset_config: Mapping[str, Any],
        model_config: Mapping[str, Any],
        generate_config: Mapping[str, Any],
        tokenizer_config: Mapping[str, Any] | None = None,
        microbatch_size: int = 1,
        backend: str = "transformers",
        num_generations: int = 8,
        grpo_config: Mapping[str, Any] | None = None,
        eval_dataset_config: Mapping[str, str] | None = None,
        eval_interval: int = -1,
        eval_generation_config: Mapping[str, Any] | None = None,
        eval_save_dir: str = "./eval",
        log_rollout_interval: int = 20,
        rollout_log_file: str | None = None,
        project_name: str = "",
        run_name: str = "",
        wandb_group_name: str = "",
        enable_profiling: bool = False,
        log_dir: str = "",
        seed: int = 0,
    ) -> None:
        """`project_name` turns W&B on; figures and the timeline go to `log_dir` (else eval_save_dir)."""
        if not 0 <= producer_idx < num_producers:
            raise UserError(
                f"producer_idx: got {producer_idx}, allowed: 0 to {num_producers - 1} (num_producers - 1)"
            )
        if batch_size % microbatch_size:
            raise UserError(
                f"microbatch_size: got {microbatch_size}, allowed: a divisor of batch_size = {batch_size}"
            )
        self.producer_idx, self.num_producers = producer_idx, num_producers
        self.num_consumer_procs, self.num_episodes = num_consumer_procs, num_episodes
        self.batch_size, self.microbatch_size = batch_size, microbatch_size
        self.config = producer_config(
            train_dataset_config,
            model_config,
            generate_config,
            tokenizer_config=tokenizer_config,
            backend=backend,
            num_generations=num_generations,
            grpo_config=grpo_config,
            seed=seed,
        )
        self.eval_interval, self._eval_folder = eval_interval, Path(eval_save_dir)
        self._eval_data = dict(eval_dataset_config or {})
        self._eval_sampling = _renamed(eval_generation_config or {}, _SAMPLING_NAMES)
        self._log = ProducerLog(
            self.config,
            Path(log_dir or eval_save_dir),
            Names(project=project_name, run=run_name, group=wandb_group_name),
            rollout_file=Path(rollout_log_file) if rollout_log_file else None,
            rollouts_every=log_rollout_interval,
            profile=enable_profiling,
        )
        self._groups_joined: dict[str, Any] = {}
        self.policy_version = 0
        self._groups = 0
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, name="producer", daemon=True).start()
        self._wait(self._open())

    def _wait(self, work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()

    async def _open(self) -> None:
        from penstock.weights.in_process import InProcessSync

        config = self.config
        tokenizer = load_tokenizer(config.model.tokenizer or config.model.path)
        self._chat = ChatTemplate(tokenizer)
        self._dataset = load_dataset("train", config.tasks["train"], self._chat, config.seed)
        self._reward = build_reward(
            config.tasks["train"].rewards,
            max_tokens=config.sampling.max_tokens,
            waits=self._log.waits,
            lane=f"rewards of producer-{self.producer_idx}",
        )
        self._sync = InProcessSync()
        engine_class = load("backend", config.engine.name, ENGINES)
        self._engine = engine_class.from_config(
            config, fetch=self._sync.fetch, index=self.producer_idx
        )
        await self._engine.start()
        self._agent = SingleTurn(
            engine=self._engine,
            reward=self._reward,
            sampling=config.sampling,
            decode=self._chat.decode,
        )

    # ---- what a subclass gives

    def deliver(self, tensors: Tensors) -> None:
        """Take one microbatch of scored groups."""
        raise NotImplementedError

    def new_weights(self) -> Mapping[str, Any] | None:
        """A state dict to go on with, asked for after each `batch_size` prompts; None: the same."""
        return None

    # ---- what a user calls

    def init_collective_group(
        self,
        world_size: int,
        rank: int,
        backend: str = "gloo",
        group_name: str = "default",
        init_method: str = "env://",
    ) -> None:
        """Join a group (`weight_broadcast.join_group`); waits for its other members."""
        group = join_group(world_size, rank, backend, group_name, init_method)
        self._groups_joined[group_name] = group

    def receive_state_dict(self, group_name: str = "default") -> dict[str, Any]:
        """What rank 0 of a joined group sends next, for `new_weights` or `load_state_dict`."""
        if group_name not in self._groups_joined:
            known = ", ".join(self._groups_joined) or "none: init_collective_group comes first"
            raise UserError(f"group_name: got {group_name!r}, allowed: {known}")
        return receive_state_dict(self._groups_joined[group_name])

    def rollout(self, input_ids: Any, attention_mask: Any, **fields: Any) -> Tensors:
        """Generate and score `num_generations` responses to each prompt of a left-padded batch.

        `fields` hold what the reward needs, one entry for each prompt: gt_answer, test_cases, ...
        """
        rows = unpadded(input_ids, attention_mask)
        groups = [self._group(row, _nth(fields, n, len(rows))) for n, row in enumerate(rows)]
        return self._wait(self._generate(groups))

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> str:
        """Go on with these weights; the digest of what the engine then holds."""
        from penstock.weights.model_weights import digest_of

        digest = digest_of(state_dict.items())
        handle = self._sync.publish(self.policy_version + 1, digest, state_dict.items())
        with self._busy(WaitKind.SYNC):
            loaded: str = self._wait(self._engine.update_weights(handle.version, handle))
        self.policy_version += 1
        return loaded

    def loop(self) -> int:
        """All episodes over this producer's share of the prompts; how many prompts that were.

        New weights are taken after each batch; producer 0 evaluates before the first and then after
        every `eval_interval` batches.
        """
        done = batches = 0
        self._evaluate_if_due(batches)
        for prompts in self._microbatches():
            groups = [self._new_group(prompt) for prompt in prompts]
            tensors = self._wait(self._generate(groups))
            with self._busy(WaitKind.SEND):
                self.deliver(tensors)
            self._log.microbatch(groups, tensors)
            done += len(prompts)
            if done % self.batch_size == 0:
                batches += 1
                with self._busy(WaitKind.WAIT):
                    weights = self.new_weights()
                if weights is not None:
                    self.load_state_dict(weights)
                self._evaluate_if_due(batches)
        self._log.flush()
        return done

    def evaluate(self, step: int) -> list[EvalResult]:
        """One exact pass over every evaluation set; samples go to `eval_save_dir`."""
        with self._busy(WaitKind.EVAL):
            return self._wait(self._evaluate(step))

    def close(self) -> None:
        self._wait(self._engine.close())
        self._wait(self._reward.close())
        self._log.close()
        self._loop.call_soon_threadsafe(self._loop.stop)

    # ---- inside

    def _busy(self, what: WaitKind) -> AbstractContextManager[Any]:
        """What this producer does now, for its timeline."""
        return self._log.waits.wait(f"producer-{self.producer_idx}", what)

    def _evaluate_if_due(self, batches: int) -> None:
        if self.producer_idx == 0 and self.eval_interval > 0 and batches % self.eval_interval == 0:
            self.evaluate(batches)

    async def _evaluate(self, step: int) -> list[EvalResult]:
        own = self.config.tasks["train"]
        results = []
        for name, path in self._eval_data.items():
            data = load_dataset(name, own.model_copy(update={"data": path}), self._chat)
            task = EvalTask(
                name=name,
                problems=[data[index] for index in range(len(data))],
                reward=self._reward,
                sampling=SamplingParams(**self._eval_fields()),
                num_generations=1,
                decode=self._chat.decode,
                seed=self.config.seed,
            )
            folder, version = self._eval_folder, self.policy_version
            result = await evaluate(self._engine, task, step=step, version=version, folder=folder)
            append_summary(folder, result)
            self._log.evaluation(step, result.metrics())
            results.append(result)
        return results

    def _eval_fields(self) -> dict[str, Any]:
        sampling = self.config.sampling
        fields = {"temperature": 0.0, "max_tokens": sampling.max_tokens, **self._eval_sampling}
        return {**fields, "stop": tuple(fields.get("stop", sampling.stop))}

    def _microbatches(self) -> Iterator[list[Prompt]]:
        """Whole passes in an order of their own; the last part of a pass may be short."""
        own = np.arange(self.producer_idx, len(self._dataset), self.num_producers)
        for episode in range(self.num_episodes):
            order = np.random.default_rng([self.config.seed, episode]).permutation(own)
            for start in range(0, len(order), self.microbatch_size):
                part = order[start : start + self.microbatch_size]
                yield [self._dataset[int(index)] for index in part]

    def _group(self, token_ids: np.ndarray, fields: dict[str, Any]) -> Group:
        known = {key: fields.pop(key) for key in ("gt_answer", "test_cases") if key in fields}
        name = f"given:{self._groups}"
        return self._new_group(
            Prompt(prompt_id=name, messages=(), token_ids=token_ids, extra=fields, **known)
        )

    def _new_group(self, prompt: Prompt) -> Group:
        group_id = f"producer-{self.producer_idx}:{self._groups}"
        self._groups += 1
        return Group(
            group_id=group_id,
            task="train",
            cursor=self._groups - 1,
            prompt=prompt,
            rollouts=[
                Rollout(
                    rollout_id=f"{group_id}.{index}",
                    prompt_ids=prompt.token_ids,
                    seed=rollout_seed(self.config.seed, group_id, index, 0),
                    issued_version=self.policy_version,
                )
                for index in range(self.config.sampling.num_generations)
            ],
        )

    async def _generate(self, groups: list[Group]) -> Tensors:
        with self._busy(WaitKind.GENERATE):
            await asyncio.gather(*(self._agent.generate_group(group.rollouts) for group in groups))
        for group in groups:
            failed = [r.error for r in group.rollouts if r.status is not Status.COMPLETED]
            if failed:
                raise RunError(f"{group.group_id}: {len(failed)} responses failed: {failed[0]}")
        settings = resolve_settings(self.config.algorithm)
        advantages = np.stack(
            [group_advantages(np.array([r.reward for r in g.rollouts]), settings) for g in groups]
        )
        return group_tensors(groups, advantages, _pad_id(self._chat.tokenizer))


class SimpleProducer(BaseProducer):
    """A producer that hands every microbatch to a function, or keeps it in `delivered`."""

    def __init__(
        self, *args: Any, deliver: Callable[[Tensors], None] | None = None, **kwargs: Any
    ) -> None:
        self.delivered: list[Tensors] = []
        self._deliver = deliver or self.delivered.append
        super().__init__(*args, **kwargs)

    def deliver(self, tensors: Tensors) -> None:
        self._deliver(tensors)


def producer_config(
    train_dataset_config: Mapping[str, Any],
    model_config: Mapping[str, Any],
    generate_config: Mapping[str, Any],
    *,
    tokenizer_config: Mapping[str, Any] | None = None,
    backend: str = "transformers",
    num_generations: int = 8,
    grpo_config: Mapping[str, Any] | None = None,
    seed: int = 0,
) -> Config:
    """The producing half of a config from the dictionaries that producers are given."""
    algorithm = dict(grpo_config or {})
    reward: dict[str, Any] = {"type": algorithm.pop("reward_fn_type", "think_answer_tags")}
    if "code_verifier_api_url" in algorithm:
        reward["options"] = {"urls": [algorithm.pop("code_verifier_api_url")]}
    data = _renamed(train_dataset_config, {"path": "data", "max_length": "max_prompt_tokens"})
    sampling = _renamed(generate_config, _SAMPLING_NAMES)
    if sampling.get("top_k") in (-1, None):
        sampling.pop("top_k", None)
    tree: dict[str, Any] = {
        "seed": seed,
        "model": {**model_config, "tokenizer": (tokenizer_config or {}).get("path", "")},
        "tasks": {"train": {**data, "rewards": [reward]}},
        "sampling": {**sampling, "num_generations": num_generations},
        "engine": {"name": backend},
        "algorithm": algorithm,
    }
    return validated(tree)


def validated(tree: dict[str, Any]) -> Config:
    from pydantic import ValidationError

    from penstock.config.source import explain

    try:
        return Config.model_validate(tree)
    except ValidationError as error:
        raise UserError(explain(error)) from None


def _pad_id(tokenizer: Any) -> int:
    known = (tokenizer.pad_token_id, tokenizer.eos_token_id, 0)
    return int(next(token for token in known if token is not None))


def _renamed(given: Mapping[str, Any], names: Mapping[str, str]) -> dict[str, Any]:
    return {names.get(key, key): value for key, value in given.items()}


def _nth(fields: Mapping[str, Any], number: int, count: int) -> dict[str, Any]:
    for key, values in fields.items():
        if len(values) != count:
            raise UserError(f"rollout: {key} got {len(values)} entries, allowed: {count}")
    return {key: values[number] for key, values in fields.items()}

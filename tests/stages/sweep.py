"""Random legal settings of a run, a batch that an engine sampled for them, and the gradients of their update.

A draw is a function of its number alone. What is drawn: algorithm, entropy bonus, teacher, correction, baseline and normalisation, KL, clips,
masks, sampling, agents' rows and rewards of turns, PTX, demonstrations of a second task, a third task with an
algorithm of its own, LoRA, updates per batch, ranks and model family.
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
import dataclasses
import functools
import itertools
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from pydantic import ValidationError

from penstock.config import Config
from penstock.engine.protocol import GenerationRequest, SamplingParams
from penstock.engine.transformers.engine import TransformersEngine
from penstock.engine.transformers.options import TransformersOptions
from penstock.errors import UserError
from penstock.training.adapters import add_adapters
from penstock.training.algo import ALGORITHMS
from penstock.training.algo.method import check_algorithm, run_settings, task_algorithms
from penstock.training.consumer import Consumer
from penstock.training.parallel.ranks import Ranks, rank_share
from penstock.training.ptx import text_group
from penstock.types import (
    Batch,
    Choices,
    Group,
    Prompt,
    Rollout,
    Row,
    Score,
    Status,
    VersionSegment,
    WeightHandle,
)
from stages.training_data import VOCABULARY, Gradients, exact_model

GROUPS, SIZE, MAX_TOKENS, END, STEP = 4, 3, 12, 2, 2
FAMILIES: dict[str, dict[str, Any]] = {
    "Qwen3": {},
    "Llama": {},
    "Qwen2": {},
    "Mistral": {"sliding_window": 4},
    "Qwen3Moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16},
    "SmolLM3": {"no_rope_layer_interval": 2},
}
Updates = list[dict[str, torch.Tensor]]


class Choice:
    """Choices of one draw."""

    def __init__(self, number: int, stream: int = 20) -> None:
        self.generator = np.random.default_rng([stream, number])

    def of(self, *options: Any) -> Any:
        return options[int(self.generator.integers(len(options)))]

    def sometimes(self, share: float) -> bool:
        return bool(self.generator.random() < share)

    def some(self, **options: Sequence[Any]) -> dict[str, Any]:
        """Each key with one of its values, in two of five cases."""
        chosen = {key: self.of(*values) for key, values in options.items()}
        return {key: value for key, value in chosen.items() if self.sometimes(0.4)}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Draw:
    """The settings of one run, and what its batch is like."""

    number: int
    fields: dict[str, Any]
    family: str
    ranks: int
    rows: bool  # some rollouts have several rows
    turns: bool  # some rollouts have rewards of turns
    continuous: bool  # rewards between 0 and 1, not 0 or 1
    shows: bool = False  # the last group is a demonstration of another task
    mixes: bool = False  # the second group is of a task with an algorithm of its own

    @functools.cached_property
    def config(self) -> Config:
        return Config.model_validate(self.fields)

    def with_fields(self, **sections: Any) -> Draw:
        fields = copy.deepcopy(self.fields)
        for name, section in sections.items():
            fields[name] = fields.get(name, {}) | section
        return dataclasses.replace(self, fields=fields)

    def without(self, key: str) -> Draw:
        """The same settings without one key of [algorithm]."""
        fields = copy.deepcopy(self.fields)
        del fields["algorithm"][key]
        return dataclasses.replace(self, fields=fields)


def drawn(number: int) -> Draw:
    """The draw of a number: the first of its random settings that are legal."""
    choice = Choice(number)
    while True:
        draw = _any_draw(number, choice)
        try:
            check_algorithm(draw.config)
        except (UserError, ValidationError):
            continue
        return draw


def _any_draw(number: int, choice: Choice) -> Draw:
    algorithm = {"name": choice.of(*ALGORITHMS)} | choice.some(
        clip_low=(0.1, 0.3),
        clip_high=(0.1, 0.4),
        dual_clip=(0, 1.5),
        aggregation=("token", "sequence", "constant"),
        baseline=("group_mean", "leave_one_out", "batch_mean", "none"),
        normalize=("group", "mean", "batch", "batch_rewards", "none"),
        kl_in=("loss", "reward"),
        kl_estimator=("k1", "k2", "k3", "k3_weighted"),
        kl_beta=(0.05, 0.5),
        entropy_beta=(0.05,),
        gamma=(0.9,),
        gae_lambda=(0.5, 0.0),
        mask_truncated=(True, False),
        overlong_penalty=(0.5, 0.0),
        decoupled=(True,),
        correction=(
            {"kind": "none"},
            *(
                {"kind": kind, "cap": cap, "floor": floor}
                for kind in ("token_truncate", "token_mask", "sequence_truncate", "sequence_mask")
                for cap, floor in ((1.2, 0.0), (3.0, 0.0), (3.0, 0.5))
                if floor == 0 or kind.endswith("mask")
            ),
        ),
    )
    if choice.sometimes(0.15):
        algorithm["correction"] = algorithm.get("correction", {}) | {"newest": "trainer"}
    sampling = {"num_generations": SIZE, "max_tokens": MAX_TOKENS} | choice.some(
        temperature=(0.6, 1.4), top_k=(6,), top_p=(0.8,), min_tokens=(4,)
    )
    train: dict[str, Any] = {"groups_per_step": GROUPS, "lr": 1e-2} | choice.some(
        mini_batches=(1, 2), num_epochs=(1, 1, 2), gradient_checkpointing=(False, False, True)
    )
    if choice.sometimes(0.15):
        train["ptx"] = {"coefficient": 0.3, "data": "texts.jsonl", "sequences_per_step": 2}
    fields = {"algorithm": algorithm, "sampling": sampling, "train": train}
    if choice.sometimes(0.25):
        fields["model"] = {"lora": {"rank": 2}}
    if choice.sometimes(0.2) or algorithm["name"] == "distill":
        algorithm["teacher"], fields["teachers"] = "big", {"big": {"path": "demo"}}
        algorithm["teacher_beta"] = choice.of(0.3, 1.0)
        algorithm["divergence"] = choice.of("sampled", "forward", "reverse", "jsd")
    rows, shows, mixes = choice.sometimes(0.4), choice.sometimes(0.2), choice.sometimes(0.25)
    tasks: dict[str, Any] = {"train": {}}
    if shows:
        tasks["shown"] = {"algorithm": {"name": "sft", "weight": 0.5}}
    if mixes:
        others = tuple(name for name in ALGORITHMS if name not in ("sft", "distill"))
        tasks["other"] = {"algorithm": {"name": choice.of(*others), "weight": choice.of(0.5, 1.0)}}
        tasks["other"]["algorithm"] |= choice.some(kl_beta=(0.2,), decoupled=(True,))
    if shows or mixes:
        fields["tasks"] = tasks
    return Draw(
        number=number,
        fields=fields,
        family=choice.of(*FAMILIES),
        ranks=choice.of(1, 1, 2),
        rows=rows,
        turns=rows and choice.sometimes(0.5),
        continuous=choice.sometimes(0.5),
        shows=shows,
        mixes=mixes,
    )


def richer(draw: Draw) -> Draw:
    """The draw with more settings, each of them where it is legal: what acts between updates and beside other tasks."""
    choice = Choice(draw.number, 23)
    settings = run_settings(draw.config)
    extras: list[dict[str, Any]] = [
        {"algorithm": {"kl_target": 0.05}} if settings.needs_reference else {},
        {"algorithm": {"entropy_target": 2.0}} if settings.entropy_beta else {},
        {"algorithm": {"overlong_window": 7}} if settings.overlong_penalty else {},
        {"train": {"reference_every": choice.of(1, 2), "reference_decay": choice.of(0.0, 0.7)}},
        {"train": {"mini_batches": 2}},
        {"train": {"num_epochs": 2}},
        {"train": {"critic_warmup_steps": STEP}},
        {"tasks": {"other": {"sampling": {"max_tokens": 5 * MAX_TOKENS}}}},
        {"tasks": {"train": {"rewards": [{"type": "math"}, {"type": "math", "weight": 0.5}]}}},
        {
            "teachers": {"big": {"path": "demo"}},
            "tasks": {
                "other": {
                    "algorithm": {
                        "teacher": "big",
                        "teacher_beta": 0.4,
                        "divergence": choice.of("sampled", "forward", "reverse", "jsd"),
                    }
                }
            },
        },
    ]
    for extra in extras:
        if not choice.sometimes(0.5) or ("other" in extra.get("tasks", {}) and not draw.mixes):
            continue
        fields = _merged(draw.fields, extra)
        other = dataclasses.replace(draw, fields=fields)
        with contextlib.suppress(UserError, ValidationError):
            check_algorithm(other.config)
            draw = other
    return draw


def _merged(fields: dict[str, Any], extra: dict[str, Any]) -> dict[str, Any]:
    """The fields with those of the second tree laid over them."""
    trees = {
        name: _merged(fields.get(name, {}), value) if isinstance(value, dict) else value
        for name, value in extra.items()
    }
    return fields | trees


# ---- consumers


def plain_model(family: str) -> Any:
    model = exact_model(family, eos_token_id=END, **FAMILIES[family])
    if "Moe" in family:
        model.set_experts_implementation("eager")  # the others have no float64
    return model


def model_of(draw: Draw, *, noise: float = 0.0) -> Any:
    model = plain_model(draw.family)
    if draw.config.model.lora.rank:
        torch.manual_seed(1)
        add_adapters(model, draw.config.model.lora)
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            scale = 0.2 if "lora_B" in name else noise
            if scale:
                parameter += scale * torch.randn(
                    parameter.shape, generator=generator, dtype=parameter.dtype
                )
    return model


def reference_of(draw: Draw) -> Any:
    """A model near the policy, if an algorithm needs one that does not move; None with LoRA: the base is."""
    config = draw.config
    needed = any(method.settings.needs_reference for method in task_algorithms(config).values())
    own = config.model.lora.rank or config.train.reference_moves
    return model_of(draw, noise=0.05) if needed and not own else None


def teachers_of(draw: Draw) -> dict[str, Any]:
    """Models further away from the policy."""
    teachers = {name: plain_model(draw.family) for name in draw.config.teachers}
    for teacher in teachers.values():
        torch.manual_seed(3)
        with torch.no_grad():
            for parameter in teacher.parameters():
                parameter += 0.1 * torch.randn_like(parameter)
    return teachers


def texts_of(draw: Draw) -> list[Group]:
    """The texts of train.ptx, if it is on."""
    if not draw.config.train.ptx.coefficient:
        return []
    generator = np.random.default_rng(1)
    ids = [generator.integers(3, VOCABULARY, n).astype(np.int32) for n in (5, 7, 4)]
    return [text_group(part) for part in ids]


def consumer_of(draw: Draw, ranks: Ranks | None = None) -> Consumer:
    """A trainer of the draw's settings."""
    return Consumer(
        draw.config,
        model_of(draw),
        total_steps=10,
        reference=reference_of(draw),
        teachers=teachers_of(draw),
        texts=texts_of(draw),
        ranks=ranks,
    )


def gradients_of(consumer: Consumer, batch: Batch) -> tuple[Updates, dict[str, float]]:
    """The gradient of each update on the batch, none of which is applied, and the metrics."""
    taken = Gradients(consumer)
    metrics = consumer.train(batch).metrics
    return taken.updates, metrics


def move(model: Any, gradients: dict[str, torch.Tensor]) -> None:
    """Move the parameters against the gradient, by a tenth of it and by no more than 0.1."""
    norm = sum(float(gradient.square().sum()) for gradient in gradients.values()) ** 0.5
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name in gradients:
                parameter -= 0.1 / max(norm, 1.0) * gradients[name]


class PairedRanks(Ranks):
    """One of two data-parallel ranks in threads of this process; each holds the whole model."""

    def __init__(self, rank: int, shared: list[Any], barrier: threading.Barrier) -> None:
        super().__init__()
        self.data_rank, self.data_world = rank, 2
        self._shared, self._barrier = shared, barrier

    def _exchange(self, values: np.ndarray) -> list[np.ndarray]:
        self._shared[self.data_rank] = values
        self._barrier.wait(timeout=60)
        both = list(self._shared)
        self._barrier.wait(timeout=60)
        return both

    def sum(self, values: np.ndarray) -> np.ndarray:
        left, right = self._exchange(values)
        return np.asarray(left + right)

    def max(self, values: np.ndarray) -> np.ndarray:
        return np.maximum(*self._exchange(values))


def gradients_of_two_ranks(draw: Draw, batch: Batch) -> Updates:
    """The sum of the gradients of two ranks, each with its share of the groups."""
    barrier, shared = threading.Barrier(2), [None, None]
    results: list[Any] = [None, None]
    ranks = [PairedRanks(rank, shared, barrier) for rank in range(2)]
    consumers = [consumer_of(draw, rank) for rank in ranks]
    shares = [
        dataclasses.replace(batch, groups=tuple(rank_share(batch.groups, rank))) for rank in ranks
    ]

    def run(rank: int) -> None:
        try:
            results[rank] = gradients_of(consumers[rank], shares[rank])[0]
        except BaseException as error:  # told by the thread that waits for both
            results[rank] = error
            barrier.abort()

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for result in results:
        if isinstance(result, BaseException) and not isinstance(
            result, threading.BrokenBarrierError
        ):
            raise result
    return [
        {name: left[name] + right[name] for name in left}
        for left, right in zip(*results, strict=True)
    ]


# ---- batches


def _attending(model: Any) -> Any:
    model.set_attn_implementation("penstock")
    return model


class Engines:
    """An engine of each family, which loads the weights of a trainer and samples for its draw."""

    def __init__(self) -> None:
        self._runner = asyncio.Runner()
        self._engines: dict[str, TransformersEngine] = {}
        self._weights: list[tuple[str, torch.Tensor]] = []
        self._version = 0

    def close(self) -> None:
        for engine in self._engines.values():
            self._runner.run(engine.close())
        self._runner.close()

    def sampled(self, draw: Draw, consumer: Consumer) -> Batch:
        """A batch that the trainer's published weights sampled through the engine."""
        self._weights = [(name, tensor.clone()) for name, tensor in consumer.weights()]
        return self._runner.run(self._sample(draw, consumer.digest()))

    async def _engine(self, family: str) -> TransformersEngine:
        if family not in self._engines:
            engine = TransformersEngine(
                lambda: _attending(plain_model(family)),
                fetch=self._fetch,
                options=TransformersOptions(max_slots=16, max_tokens_in_flight=1024, device="cpu"),
            )
            await engine.start()
            self._engines[family] = engine
        return self._engines[family]

    def _fetch(self, _: WeightHandle) -> Iterator[tuple[str, torch.Tensor]]:
        yield from self._weights

    async def _sample(self, draw: Draw, digest: str) -> Batch:
        engine = await self._engine(draw.family)
        self._version += 1
        await engine.update_weights(
            self._version, WeightHandle(version=self._version, digest=digest, kind="test")
        )
        generator = np.random.default_rng([21, draw.number])
        sampling = draw.config.task_sampling("train")
        prompts = [
            generator.integers(3, VOCABULARY, int(generator.integers(2, 6))).astype(np.int32)
            for _ in range(GROUPS)
        ]
        requests = [
            GenerationRequest(
                request_id=f"train:{group}.{member}",
                prompt_ids=prompts[group],
                sampling=SamplingParams.from_config(
                    sampling, max_tokens=int(generator.integers(5, MAX_TOKENS + 1))
                ),
                seed=int(generator.integers(1 << 30)),
            )
            for group in range(GROUPS)
            for member in range(SIZE)
        ]
        generations = await engine.generate_many(requests)
        rollouts = [
            Rollout(
                rollout_id=request.request_id,
                prompt_ids=request.prompt_ids,
                seed=request.seed,
                response_ids=generation.token_ids,
                logprobs=generation.logprobs,
                loss_mask=np.ones(len(generation.token_ids), dtype=bool),
                segments=(VersionSegment(STEP - 1, len(generation.token_ids)),),
                choices=generation.choices,
                temperature=sampling.temperature,
                min_tokens=sampling.min_tokens,
                finish_reason="stop",
                status=Status.COMPLETED,
                score=_score(draw, generator, number),
            )
            for number, (request, generation) in enumerate(zip(requests, generations, strict=True))
        ]
        groups = [
            Group(
                group_id=f"train:{number}",
                task="train",
                cursor=number,
                prompt=Prompt(f"data:{number}", (), prompt),
                rollouts=rollouts[number * SIZE : (number + 1) * SIZE],
            )
            for number, prompt in enumerate(prompts)
        ]
        if draw.shows:
            groups[-1].task = "shown"
            groups[-1].rollouts = groups[-1].rollouts[:1]
            groups[-1].rollouts[0].score = Score(1.0)
        if draw.mixes:
            groups[1].task = "other"
        return Batch(step=STEP, groups=tuple(groups))


def _score(draw: Draw, generator: np.random.Generator, number: int) -> Score:
    """The reward of a rollout; in the first group one of three is right."""
    value = generator.random() if draw.continuous else float(generator.integers(2))
    if number < SIZE:
        value = float(number == 0)
    return Score(float(value), answer_ok=value > 0.5)


def stale(draw: Draw, batch: Batch, *, attempt: int = 0) -> Batch:
    """The batch as older weights would have sampled it: log-probs moved, some responses cut, rows and turns."""
    generator = np.random.default_rng([22, draw.number, attempt])
    batch = copy.deepcopy(batch)
    for number, rollout in enumerate(batch.rollouts):
        length = len(rollout.response_ids)
        noise = generator.normal(0, 0.15, length)
        noise[generator.random(length) < 0.2] *= 10
        rollout.logprobs = (rollout.logprobs + noise).astype(np.float32)
        if length > 2:
            rollout.segments = (VersionSegment(STEP - 2, 2), VersionSegment(STEP - 1, length - 2))
        if number % 5 == 1:
            rollout.finish_reason = "length"
        if draw.rows and number % 2 == 0 and length > 4:
            _split(rollout)
            if draw.turns:
                earned = (0.0, 0.4 * rollout.reward, 0.9 * rollout.reward)
                lengths = [row.length for row in rollout.rows]
                rollout.earned = tuple(zip(lengths, earned, strict=True))
    return batch


def uneven(draw: Draw, batch: Batch) -> Batch:
    """The batch with other temperatures, smaller groups, a response without tokens, and named rewards."""
    generator = np.random.default_rng([24, draw.number])
    batch = copy.deepcopy(batch)
    for number, group in enumerate(batch.groups):
        if draw.config.task_algorithm(group.task).name == "sft":
            continue
        temperature = float(generator.choice([0.6, 1.0, 1.0, 1.5]))
        named = len(draw.config.tasks[group.task].rewards) > 1
        for rollout in group.rollouts:
            rollout.temperature = temperature
            if named:
                other = float(generator.random())
                parts = {"math": rollout.reward, "math.format": 0.3, "second": other}
                rollout.score = Score(rollout.reward + 0.5 * other, parts)
        if number == 2:
            del group.rollouts[int(generator.integers(1, SIZE)) :]
        if number == 3 and generator.random() < 0.5:
            group.rollouts[0].move_to(Status.ABORTED)
            empty, score = group.rollouts[0], group.rollouts[0].score
            empty.restart()
            empty.score, empty.finish_reason = score, "stop"
    return batch


def _split(rollout: Rollout) -> None:
    """Make three rows of the response; the second begins with a tool's result."""
    length, first = len(rollout.response_ids), len(rollout.prompt_ids)
    whole = np.concatenate([rollout.prompt_ids, rollout.response_ids])
    cuts = [0, 2, length - 1, length]
    rollout.rows = tuple(
        Row(whole[: first + start], stop - start) for start, stop in itertools.pairwise(cuts)
    )
    if rollout.choices is not None:
        passes = [first + stop - 1 for stop in cuts[1:]]
        rollout.choices = Choices.join([(rollout.choices[:count], count) for count in passes])
    rollout.loss_mask = rollout.loss_mask.copy()
    rollout.loss_mask[2] = False


def with_equal_rewards(batch: Batch) -> Batch:
    """The batch with one reward for all, the same in every turn."""
    batch = copy.deepcopy(batch)
    for rollout in batch.rollouts:
        rollout.score, rollout.earned, rollout.finish_reason = Score(0.7), (), "stop"
    return batch


def in_other_order(batch: Batch) -> Batch:
    """The groups from last to first, and the rollouts of each."""
    groups = [
        dataclasses.replace(group, rollouts=group.rollouts[::-1]) for group in batch.groups[::-1]
    ]
    return dataclasses.replace(batch, groups=tuple(groups))


def size_of(updates: Updates) -> float:
    """The largest norm of the gradients."""
    norms = [sum(float(g.square().sum()) for g in update.values()) ** 0.5 for update in updates]
    return max(norms)

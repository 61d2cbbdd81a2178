"""Fit: whether a run fits the memory of its devices, and the settings that make it fit, before anything is loaded.

`fitted` takes the first of `_chosen` that fits: settings that change no result before those that do, and none that
the user has decided. Packs and KV cache shrink by themselves to what is free. What cannot fit is refused with the nearest setting that can. A model that is not on this machine yet,
nodes of Ray, and GPUs that nvidia-smi does not list are not known before they start: nothing is said of them.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from pydantic import ValidationError
from rich.table import Table

from penstock.config import Config, SamplingConfig, TaskDataConfig
from penstock.config.memory import (
    LEAST_TOKENS,
    ModelShape,
    moment_bytes,
    read_shape,
    trainer_needs,
)
from penstock.config.source import with_overrides
from penstock.errors import UserError
from penstock.files import console, say
from penstock.rollout.agent import AGENTS
from penstock.rollout.agent.build import loop_class
from penstock.store.space import available_mib, size_text
from penstock.training.algo.method import task_algorithms

PROCESS = 100 * 2**20  # main memory of a process with torch, beside what processes share
_CUDA = 2**30  # device memory of a process for CUDA itself, its libraries and fragments
_LEAST_REQUESTS = 16  # that an engine on a GPU decodes together, as long as they can be
_BESIDE = 0.3  # of a GPU, which an engine beside a trainer takes at most for its KV cache
_PUBLISHED = 2  # versions of the weights in shared memory: the newest, and the one that engines may still read
_EASY = 0.95  # of a device: estimates are not exact
_TURNS, _AGAIN = "launch.colocate=true", "train.gradient_checkpointing=true"
_AWAY, _SHORT = "train.offload_moments=true", "train.moments=bfloat16"
_COLUMNS = ("weights", "masters", "grads", "moments", "packs", "KV", "other")
_WHY = {
    _TURNS: "engine and trainer take turns on the GPU",
    _AGAIN: "activations are computed again in the backward pass",
    _AWAY: "AdamW's moments stay in main memory",
    _SHORT: "AdamW's moments are rounded to 16 bits, at random",
}


@dataclass(slots=True, frozen=True, kw_only=True)
class Machine:
    """The memory that a run can have, in bytes."""

    gpus: tuple[int, ...] = ()
    host: int | None = None  # None: the system does not tell

    @classmethod
    def here(cls, config: Config) -> Machine | None:
        """This machine; None if it has GPUs whose memory is not known."""
        left = available_mib()
        host = None if left is None else int(left * 2**20)
        if config.model.device == "cpu" or not any(Path("/dev").glob("nvidia[0-9]*")):
            has_other_gpus = config.model.device != "cpu" and Path("/dev/kfd").exists()
            return None if has_other_gpus else cls(host=host)
        sizes = visible_gpus(os.environ.get("CUDA_VISIBLE_DEVICES"))
        if config.model.device.startswith("cuda:"):
            sizes = sizes[int(config.model.device[5:]) :][:1]
        return cls(gpus=tuple(sizes), host=host) if sizes else None


def visible_gpus(visible: str | None) -> list[int]:
    """The bytes of each GPU that CUDA would show; nvidia-smi is asked, since torch takes seconds to import."""
    command = ["nvidia-smi", "--query-gpu=uuid,memory.total", "--format=csv,noheader,nounits"]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
        rows = [line.split(", ") for line in answer.stdout.splitlines()]
        sizes = {uuid: int(mib) * 2**20 for uuid, mib in rows}
        if visible is None:
            return list(sizes.values())
        by_number = {str(number): size for number, size in enumerate(sizes.values())}
        return [(sizes | by_number)[word.strip()] for word in visible.split(",")]
    except (OSError, ValueError, KeyError, subprocess.SubprocessError):
        return []


@dataclass(slots=True, frozen=True, kw_only=True)
class Part:
    """What one part of the run needs on one device."""

    name: str
    sizes: dict[str, int]  # column of the table -> bytes

    @property
    def total(self) -> int:
        return sum(self.sizes.values())


@dataclass(slots=True, frozen=True, kw_only=True)
class Device:
    name: str
    total: int | None
    parts: tuple[Part, ...]
    in_turns: bool = False

    @property
    def need(self) -> int:
        """The most at one time; a process keeps what CUDA itself takes while the other side has the GPU."""
        whole = sum(part.total for part in self.parts)
        if not self.in_turns:
            return whole
        freed = {True: 0, False: 0}  # while the trainer has the GPU, and while an engine has it
        for part in self.parts:
            freed[part.name != "trainer"] += part.total - part.sizes["other"]
        return whole - min(freed.values())

    @property
    def place(self) -> str:
        return "main memory" if self.name == "host" else self.name

    def __str__(self) -> str:
        of = "" if self.total is None else f" of {size_text(self.total)}"
        return f"{self.name}: {size_text(self.need)}{of}{' in turns' * self.in_turns}"

    def fits(self, share: float = 1.0) -> bool:
        return self.total is None or self.need <= share * self.total


@dataclass(slots=True, frozen=True, kw_only=True)
class Fit:
    config: Config  # with what was chosen
    devices: tuple[Device, ...]  # empty: nothing is known
    choices: tuple[str, ...] = ()  # in one line each

    def crowded(self, share: float = 1.0) -> Device | None:
        """The first device of which more than this share is needed."""
        return next((device for device in self.devices if not device.fits(share)), None)

    def table(self) -> Table:
        """Every part's memory; below it, what each device has."""
        largest = max(device.need for device in self.devices)
        unit, name = (2**30, "GiB") if largest >= 2**30 else (2**20, "MiB")
        used = "; ".join(map(str, self.devices))
        table = Table(
            box=None,
            padding=(0, 1),
            collapse_padding=True,
            show_header=False,
            pad_edge=False,
            caption=f"{used}. Packs: activations of the smallest.",
            caption_justify="left",
        )
        table.add_column(no_wrap=True)
        for _ in (*_COLUMNS, "all"):
            table.add_column(justify="right", no_wrap=True)
        table.add_row(f"memory, {name}", *_COLUMNS, "all", style="dim")
        for device in self.devices:
            for part in device.parts:
                sizes = [part.sizes.get(column, 0) for column in _COLUMNS]
                cells = [f"{size / unit:.1f}" if size else "" for size in (*sizes, part.total)]
                table.add_row(f"{part.name}, {device.name}", *cells)
        return table


def fitted(config: Config, machine: Machine | None = None, shape: ModelShape | None = None) -> Fit:
    """The config that fits the machine, this one by default; raise a UserError if none does."""
    shape = shape or read_shape(config.model.path)
    if shape is None or config.launch.kind == "ray":
        return Fit(config=config, devices=())
    machine = machine or Machine.here(config)
    if machine is None:
        return Fit(config=config, devices=())
    fit = _first(config, [], shape, machine, _EASY) or _first(config, [], shape, machine)
    if fit is None:
        raise UserError(_refusal(config, shape, machine))
    return fit


def _first(
    config: Config, words: Sequence[str], shape: ModelShape, machine: Machine, share: float = 1.0
) -> Fit | None:
    """The first choice that, beside these settings, needs no more than this share of any device."""
    fits = _fits(config, words, shape, machine)
    return next((fit for fit in fits if fit.crowded(share) is None), None)


def _fits(
    config: Config, words: Sequence[str], shape: ModelShape, machine: Machine
) -> Iterator[Fit]:
    """Yield what the run needs with each choice, beside these settings."""
    place = _on_gpus if machine.gpus else _on_host
    for chosen in _chosen(config, machine):
        overrides = [*words, *chosen]
        with suppress(UserError):  # some do not go with others of the config
            changed = with_overrides(config, overrides) if overrides else config
            told = [f"{w}: {_WHY[w]}, so that the run fits" for w in overrides if w in _WHY]
            devices = tuple(place(changed, shape, machine))
            yield Fit(config=changed, devices=devices, choices=tuple(told))


def _chosen(config: Config, machine: Machine) -> Iterator[list[str]]:
    """Yield the settings that need less memory and are not decided yet, from none to all of them.

    Engine and trainer take turns where that helps. What waits for its turn needs main memory: where there is too little
    of it, they stay side by side.
    """
    yield []
    train, decided = config.train.model_fields_set, config.launch.model_fields_set
    turns = [_TURNS] if machine.gpus and "colocate" not in decided else []
    usable = (_AWAY, _AGAIN, _SHORT) if machine.gpus else (_AGAIN, _SHORT)
    free = [w for w in usable if w.partition("=")[0].removeprefix("train.") not in train]
    for place in (turns, []):
        for chosen in range(2 ** len(free)):
            yield [*place, *(words for bit, words in enumerate(free) if chosen >> bit & 1)]


def say_fit(fit: Fit) -> None:
    """Say what was chosen, with the table that it was chosen from."""
    if fit.choices:
        console(stderr=True).print(fit.table())
    for choice in fit.choices:
        say(f"note: {choice}", error=True)


def _refusal(config: Config, shape: ModelShape, machine: Machine) -> str:
    """What does not fit, and the nearest setting that does, beside those that are then chosen."""
    fits = _fits(config, [], shape, machine)
    over = [(each.need, each.total or 0, each.place) for fit in fits if (each := fit.crowded())]
    need, total, place = min(over, key=lambda each: each[0] / each[1])
    what = (
        f"memory: {config.model.path} needs at least {size_text(need)} of {place}, which has "
        f"{size_text(total)}"
    )
    for words in _nearest(config, machine):
        if _first(config, words, shape, machine) is not None:
            return f"{what}; allowed: {' '.join(words)}"
    return f"{what}; allowed: a smaller model (this one has {shape.parameters / 1e9:.1f} billion parameters)"


def _nearest(config: Config, machine: Machine) -> Iterator[list[str]]:
    """Settings that need less memory, the smallest change first."""
    decided = [*([_TURNS] if machine.gpus else []), _AWAY, _AGAIN, _SHORT]
    yield from ([words] for words in decided)
    yield decided
    if config.train.micro_batch_tokens > LEAST_TOKENS:
        yield [f"train.micro_batch_tokens={LEAST_TOKENS}"]
    fewer = config.launch.num_producers
    while fewer := fewer // 2:
        yield [f"launch.num_producers={fewer}"]
    for part in (2, 4, 8):
        yield [f"sampling.max_tokens={max(1, config.sampling.max_tokens // part)}"]
    for ranks in range(config.launch.num_consumers + 1, len(machine.gpus) + 1):
        yield [f"launch.num_consumers={ranks}", f"launch.num_producers={ranks}"]
    if not config.model.lora.rank:
        yield ["model.lora.rank=16"]


# ---- what each part needs


def _on_gpus(config: Config, shape: ModelShape, machine: Machine) -> Iterator[Device]:
    launch, count = config.launch, len(machine.gpus)
    each = 4 if config.model.dtype == "float32" else 2
    before = 0 if launch.colocate else launch.num_consumers
    trainers = [rank % count for rank in range(launch.num_consumers)]
    engines = [(before + number) % count for number in range(config.num_engines)]
    asleep, saved = dict.fromkeys(("weights", "masters", "moments"), 0), 0
    for gpu, total in enumerate(machine.gpus):
        parts = list[Part]()
        for _ in range(trainers.count(gpu)):
            part, checkpoint = _trainer(config, shape, each, total)
            saved += checkpoint
            if config.train.offload_moments:
                asleep["moments"] += part.sizes.pop("moments")
            parts.append(part)
        beside = bool(parts) and not launch.colocate
        cache = int(total * _BESIDE / max(1, engines.count(gpu))) if beside else 0
        engine = _engine(config, shape, each, on_gpu=True, cache=cache)
        parts += [engine] * engines.count(gpu)
        in_turns = launch.colocate and len({part.name for part in parts}) > 1
        if in_turns:
            for column in asleep:
                asleep[column] += sum(part.sizes.get(column, 0) for part in parts)
        if parts:
            yield Device(name=f"cuda:{gpu}", total=total, parts=tuple(parts), in_turns=in_turns)
    processes = (launch.num_consumers + config.num_engines) * PROCESS
    asleep["weights"] += _PUBLISHED * shape.parameters * each if launch.colocate else 0
    waiting = Part(name="waiting", sizes={**asleep, "other": processes})
    parts = [waiting, Part(name="checkpoint", sizes={"other": saved})]
    yield Device(name="host", total=machine.host, parts=tuple(parts))


def _on_host(config: Config, shape: ModelShape, machine: Machine) -> Iterator[Device]:
    each = 2 if config.model.dtype in ("bfloat16", "float16") else 4
    trainer, saved = _trainer(config, shape, each, None)
    engine = _engine(config, shape, each, on_gpu=False)
    ranks = config.launch.num_consumers
    parts = [trainer] * ranks + [Part(name="checkpoint", sizes={"other": saved * ranks})]
    engines = [engine] * config.num_engines
    if len(engines) > 3:  # one line for all of them
        sizes = {name: size * len(engines) for name, size in engine.sizes.items()}
        engines = [Part(name=f"{len(engines)} engines", sizes=sizes)]
    parts += engines
    yield Device(name="host", total=machine.host, parts=tuple(parts))


def _trainer(config: Config, shape: ModelShape, each: int, total: int | None) -> tuple[Part, int]:
    """A trainer rank, and the bytes of its checkpoint; `total` bytes of its GPU; None: on a CPU."""
    train, rank, ranks = config.train, config.model.lora.rank, config.launch.num_consumers
    algorithms = [method.settings for method in task_algorithms(config).values()]
    own_reference = rank > 0 and not train.reference
    refers = any(settings.needs_reference for settings in algorithms) and not own_reference
    # the largest pack that a step cannot do without; a longer sequence goes alone
    longest = _longest(config, shape, trained=True)
    samplings = [config.task_sampling(name).num_generations for name in config.tasks]
    step = train.groups_per_step * max(samplings, default=1) * longest
    pack = min(step, max(train.micro_batch_tokens or LEAST_TOKENS, longest))
    published = 0 if config.launch.kind == "inline" else _PUBLISHED  # that wait for engines
    if total is not None:
        published = int(not config.launch.colocate)
    needs = trainer_needs(
        shape,
        each=each,
        tokens=pack,
        rank=rank,
        checkpointing=train.gradient_checkpointing,
        joint=total is not None and each == 2 and not rank and ranks == 1,
        shards=ranks,
        zero=train.parallel.zero,
        learners=1 + any(settings.has_critic for settings in algorithms),
        averages=train.reference_moves + bool(train.ema_decay),
        scorers=(refers and not train.reference_moves)
        + sum(teacher.is_loaded for teacher in config.teachers.values()),
        published=published,
        moments=moment_bytes(train.moments),
    )
    part = Part(
        name="trainer",
        sizes={
            "weights": needs.weights,
            "masters": needs.masters,
            "grads": needs.gradients,
            "moments": needs.moments,
            "packs": needs.activations,
            "other": PROCESS if total is None else _CUDA,
        },
    )
    return part, needs.saved


def _longest(config: Config, shape: ModelShape, *, trained: bool) -> int:
    """The tokens of the longest row that is trained, or of the longest request to an engine.

    Evaluations and judges ask for more, which nobody trains; demonstrations are trained and ask for nothing.
    """
    tables: list[tuple[str, Mapping[str, TaskDataConfig], Callable[[str], SamplingConfig]]] = [
        ("tasks", config.tasks, config.task_sampling)
    ]
    if not trained:
        tables.append(("eval.tasks", config.eval.tasks, config.eval_sampling))
    lengths = [config.train.ptx.max_tokens] if trained and config.train.ptx.coefficient else []
    for table, tasks, sampling_of in tables:
        for name, task in tasks.items():
            if task.demonstrates and not trained:
                continue
            own_loop = task.agent not in AGENTS and loop_class(f"{table}.{name}", task) is not None
            if own_loop:  # its rows may have any length
                return _any_length(config, shape)
            sampling = sampling_of(name)
            lengths.append(task.max_prompt_tokens + sampling.max_tokens)
            lengths += [] if trained else _verdicts(task, sampling)
    longest = max(lengths, default=LEAST_TOKENS)
    return min(longest, shape.positions or longest)


def _any_length(config: Config, shape: ModelShape) -> int:
    lengths = (config.longest_sequence, shape.positions)
    return min(filter(None, lengths), default=LEAST_TOKENS)


def _verdicts(task: TaskDataConfig, sampling: SamplingConfig) -> Iterator[int]:
    """The tokens of a request to the policy as a judge; a text has no more tokens than characters."""
    for reward in task.rewards:
        if reward.type != "judge" or reward.options.get("url"):
            continue
        from penstock.reward.judge import INSTRUCTIONS, JudgeOptions

        with suppress(ValidationError):  # told where the judge is built
            judge = JudgeOptions(**reward.options)
            shown = {"score": 1, "pairwise": 2, "rank": sampling.num_generations}[judge.mode]
            words = len(INSTRUCTIONS) + len(judge.rubric)
            yield task.max_prompt_tokens + shown * sampling.max_tokens + words + judge.max_tokens


def _engine(config: Config, shape: ModelShape, each: int, *, on_gpu: bool, cache: int = 0) -> Part:
    """An engine with the smallest KV cache that is of use; beside a trainer with all that it may take.

    cache: how much that is, in bytes.
    """
    other = _CUDA if on_gpu else PROCESS
    if config.engine.name == "openai":
        return Part(name="engine", sizes={"other": other})
    token = shape.kv_bytes(each)
    kv = _longest(config, shape, trained=False) * token * (_LEAST_REQUESTS if on_gpu else 1)
    if cache:  # it does not know the agents
        request = _any_length(config, shape) * token
        samples = max(config.task_sampling(name).num_generations for name in config.tasks)
        ahead = 1 + max(config.task_produce(name).staleness_bound for name in config.tasks)
        kv = max(kv, min(cache, request * samples * config.train.groups_per_step * ahead))
    return Part(name="engine", sizes={"weights": shape.parameters * each, "KV": kv, "other": other})

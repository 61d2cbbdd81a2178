"""Fit: whether a run fits the memory of its devices, and the settings that make it fit, before anything is loaded.

`fitted` tries, in this order and only where the user has not decided: as it is, engine and trainer in turns
(`launch.colocate`), activations computed again (`train.gradient_checkpointing`). Packs and KV cache shrink by themselves
to what is free. What cannot fit is refused with the nearest setting that can. A model that is not on this machine yet,
nodes of Ray, and GPUs that nvidia-smi does not list are not known before they start: nothing is said of them.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.table import Table

from penstock.config import Config
from penstock.config.memory import LEAST_TOKENS, ModelShape, read_shape, trainer_needs
from penstock.config.source import with_overrides
from penstock.errors import UserError
from penstock.files import console, say
from penstock.store.space import available_mib, size_text
from penstock.training.algo.method import task_algorithms

PROCESS = 100 * 2**20  # main memory of a process with torch, beside what processes share
_CUDA = 2**30  # device memory of a process for CUDA itself, its libraries and fragments
_LEAST_REQUESTS = 16  # that an engine on a GPU decodes together, as long as they can be
_PUBLISHED = 2  # versions of the weights in shared memory: the newest, and the one that engines may still read
_EASY = 0.95  # of a device: estimates are not exact
_TURNS, _AGAIN = "launch.colocate=true", "train.gradient_checkpointing=true"
_COLUMNS = ("weights", "masters", "grads", "moments", "packs", "KV", "other")
_WHY = {
    _TURNS: "engine and trainer take turns on the GPU",
    _AGAIN: "activations are computed again in the backward pass",
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
        """The most at one time."""
        by_role = {True: 0, False: 0}
        for part in self.parts:
            by_role[part.name == "trainer"] += part.total
        return max(by_role.values()) if self.in_turns else sum(by_role.values())

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
    given = {
        _TURNS: "colocate" in config.launch.model_fields_set,
        _AGAIN: "gradient_checkpointing" in config.train.model_fields_set,
    }
    free = [choice for choice in (_TURNS, _AGAIN) if not given[choice]]
    for number in range(len(free) + 1):
        fit = _estimate(config, free[:number], shape, machine)
        if fit.crowded(_EASY) is None:
            return fit
    if fit.crowded() is None:
        return fit
    raise UserError(_refusal(fit, shape, machine))


def say_fit(fit: Fit) -> None:
    """Say what was chosen, with the table that it was chosen from."""
    if fit.choices:
        console(stderr=True).print(fit.table())
    for choice in fit.choices:
        say(f"note: {choice}", error=True)


def _estimate(config: Config, overrides: Sequence[str], shape: ModelShape, machine: Machine) -> Fit:
    if overrides:
        config = with_overrides(config, overrides)
    devices = tuple(
        _on_gpus(config, shape, machine) if machine.gpus else _on_host(config, shape, machine)
    )
    choices = tuple(
        f"{words}: {_WHY[words]}, so that the run fits" for words in overrides if words in _WHY
    )
    return Fit(config=config, devices=devices, choices=choices)


def _refusal(fit: Fit, shape: ModelShape, machine: Machine) -> str:
    """What does not fit, and the nearest setting that does."""
    crowded, config = fit.crowded(), fit.config
    assert crowded is not None
    assert crowded.total is not None
    what = (
        f"memory: {config.model.path} needs at least {size_text(crowded.need)} of {crowded.place}, which has "
        f"{size_text(crowded.total)}"
    )
    for words in _nearest(config, machine):
        if (
            all(_valid(config, words))
            and _estimate(config, words, shape, machine).crowded() is None
        ):
            return f"{what}; allowed: {' '.join(words)}"
    return f"{what}; allowed: a smaller model (this one has {shape.parameters / 1e9:.1f} billion parameters)"


def _valid(config: Config, words: Sequence[str]) -> Iterator[bool]:
    try:
        with_overrides(config, words)
    except UserError:
        yield False


def _nearest(config: Config, machine: Machine) -> Iterator[list[str]]:
    """Settings that need less memory, the smallest change first."""
    both = [_TURNS, _AGAIN] if machine.gpus else [_AGAIN]
    yield both
    if config.train.micro_batch_tokens > LEAST_TOKENS:
        yield [*both, f"train.micro_batch_tokens={LEAST_TOKENS}"]
    for fewer in (config.launch.num_producers // 2**n for n in range(1, 30)):
        if fewer:
            yield [f"launch.num_producers={fewer}"]
    for part in (2, 4, 8):
        yield [*both, f"sampling.max_tokens={max(1, config.sampling.max_tokens // part)}"]
    for ranks in range(config.launch.num_consumers + 1, len(machine.gpus) + 1):
        yield [*both, f"launch.num_consumers={ranks}", f"launch.num_producers={ranks}"]
    if not config.model.lora.rank:
        yield ["model.lora.rank=16"]
        yield ["model.lora.rank=16", *both]


# ---- what each part needs


def _on_gpus(config: Config, shape: ModelShape, machine: Machine) -> Iterator[Device]:
    launch, count = config.launch, len(machine.gpus)
    each = 4 if config.model.dtype == "float32" else 2
    before = 0 if launch.colocate else launch.num_consumers
    trainers = [rank % count for rank in range(launch.num_consumers)]
    engines = [(before + number) % count for number in range(config.num_engines)]
    asleep = 0
    for gpu, total in enumerate(machine.gpus):
        beside = 0 if launch.colocate else engines.count(gpu)
        parts = [_trainer(config, shape, each, total, beside) for _ in range(trainers.count(gpu))]
        parts += [_engine(config, shape, each, on_gpu=True) for place in engines if place == gpu]
        in_turns = launch.colocate and len({part.name for part in parts}) > 1
        if in_turns:
            asleep += sum(_resident(part) for part in parts)
        if parts:
            yield Device(name=f"cuda:{gpu}", total=total, parts=tuple(parts), in_turns=in_turns)
    processes = (launch.num_consumers + config.num_engines) * PROCESS
    laid_out = _PUBLISHED * shape.parameters * each if launch.colocate else 0
    waiting = Part(name="waiting", sizes={"weights": asleep + laid_out, "other": processes})
    yield Device(name="host", total=machine.host, parts=(waiting,))


def _resident(part: Part) -> int:
    """What goes to main memory while the other side has the GPU."""
    return sum(part.sizes.get(name, 0) for name in ("weights", "masters", "moments"))


def _on_host(config: Config, shape: ModelShape, machine: Machine) -> Iterator[Device]:
    each = 2 if config.model.dtype in ("bfloat16", "float16") else 4
    trainer = _trainer(config, shape, each, None, 0)
    engine = _engine(config, shape, each, on_gpu=False)
    parts = [trainer] * config.launch.num_consumers
    if config.num_engines > 3:  # one line for all of them
        each_size = {name: size * config.num_engines for name, size in engine.sizes.items()}
        parts.append(Part(name=f"{config.num_engines} engines", sizes=each_size))
    else:
        parts += [engine] * config.num_engines
    yield Device(name="host", total=machine.host, parts=tuple(parts))


def _trainer(config: Config, shape: ModelShape, each: int, total: int | None, engines: int) -> Part:
    """A trainer rank; `total` bytes of its GPU, where `engines` work at the same time; None: on a CPU."""
    train, rank, ranks = config.train, config.model.lora.rank, config.launch.num_consumers
    algorithms = [method.settings for method in task_algorithms(config).values()]
    own_reference = rank > 0 and not train.reference
    refers = any(settings.needs_reference for settings in algorithms) and not own_reference
    needs = trainer_needs(
        shape,
        each=each,
        tokens=_pack(config, shape),
        rank=rank,
        checkpointing=train.gradient_checkpointing,
        joint=total is not None and each == 2 and not rank and ranks == 1,
        shards=ranks,
        zero=train.parallel.zero,
        learners=1 + any(settings.has_critic for settings in algorithms),
        averages=train.reference_moves + bool(train.ema_decay),
        scorers=(refers and not train.reference_moves)
        + sum(not teacher.is_policy for teacher in config.teachers.values()),
        published=_published(config, total is not None),
    )
    return Part(
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


def _published(config: Config, on_gpu: bool) -> int:
    """Copies of the weights that wait for engines beside the trainer."""
    if on_gpu:
        return not config.launch.colocate
    return 0 if config.launch.kind == "inline" else _PUBLISHED


def _pack(config: Config, shape: ModelShape) -> int:
    """The tokens of the largest pack that a step cannot do without; a longer sequence goes alone."""
    longest = _longest(config, shape)
    samplings = [config.task_sampling(name).num_generations for name in config.tasks]
    step = config.train.groups_per_step * max(samplings, default=1) * longest
    return min(step, max(config.train.micro_batch_tokens or LEAST_TOKENS, longest))


def _longest(config: Config, shape: ModelShape) -> int:
    longest = config.longest_sequence or shape.positions or LEAST_TOKENS
    return min(longest, shape.positions or longest)


def _engine(config: Config, shape: ModelShape, each: int, *, on_gpu: bool) -> Part:
    """An engine with the smallest KV cache that is of use; it takes more where more is free."""
    other = _CUDA if on_gpu else PROCESS
    if config.engine.name == "openai":
        return Part(name="engine", sizes={"other": other})
    tokens = _longest(config, shape) * (_LEAST_REQUESTS if on_gpu else 1)
    sizes = {"weights": shape.parameters * each, "KV": tokens * shape.kv_bytes(each)}
    return Part(name="engine", sizes={**sizes, "other": other})

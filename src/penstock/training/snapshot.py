"""A consumer's part of a checkpoint folder. Training after a load continues bitwise.

    model/                           the policy (adapters merged) for transformers, and its tokenizer
    ema/                             the same of the running average, with train.ema_decay
    consumer.safetensors             counters, random state; one rank: also masters, averages, optimizer moments
    shards/rank-R-of-W.safetensors   several ranks: masters, averages, moments, the part that each rank holds
    config.toml                      the config that was in force

No file is a pickle, so that loading one executes nothing. Each rank writes and reads without the
others, and ranks of any number and layout can load what others wrote. `store/checkpoint.py` makes the folder
atomic and writes its manifest.
"""

from __future__ import annotations

import copy
import json
import os
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from penstock.config import Config, ModelConfig
from penstock.config.demo import resolve_model_path
from penstock.config.source import to_toml
from penstock.data.chat import load_tokenizer
from penstock.errors import RunError, UserError
from penstock.model.loading import quiet_transformers
from penstock.model.stored_weights import persistent_buffers
from penstock.model.transfer import to_host
from penstock.training.adapters import ADAPTER
from penstock.training.algo.controller import Controller
from penstock.training.average import EMA, REFERENCE, Average
from penstock.training.moments import StoredAdamW
from penstock.training.optimizer import LossScale, Masters
from penstock.training.parallel.ranks import Ranks
from penstock.training.parallel.sharding import Part, Sharding
from penstock.training.policy import Policy
from penstock.training.value import Critic
from penstock.weights.offload import HostOffload

FORMAT = 5
STATE = "consumer.safetensors"
Tensors = dict[str, Tensor]
Piece = tuple[tuple[int, int], Tensor]  # first row and column in the whole tensor, and the values
Pieces = dict[str, Piece]
_MASTER = "master/"
_CRITIC = "critic/"  # before the names of the value model's parameters
_PEFT = "base_model.model."  # before the names of a model's layers in peft


class TrainerState(Protocol):
    """The parts of a consumer that a checkpoint holds, and what copying them needs."""

    config: Config
    ranks: Ranks
    policy: Policy
    masters: Masters
    optimizer: StoredAdamW
    loss_scale: LossScale
    host_offload: HostOffload
    controllers: dict[str, Controller]
    averages: dict[str, Average]
    critic: Critic | None
    step: int
    policy_version: int
    bad_updates_in_a_row: int

    def weights(self) -> Iterator[tuple[str, Tensor]]: ...


def take_snapshot(
    consumer: TrainerState, folder: Path, *, with_model: bool = True
) -> Callable[[], None]:
    """Copy the state to host memory; return a function that writes the copy to `folder`.

    All ranks must take the snapshot together, because the model is gathered. The returned function
    runs in any thread beside training, and each rank writes without the others. Offloaded tensors
    are copied from where they are on the host. Without the model only a trainer can load it.
    """
    first, ranks = consumer.ranks.is_first, consumer.ranks
    weights, averaged = _gathered(consumer) if with_model else Tensors(), Tensors()
    if average := consumer.averages.get(EMA):
        with average.in_place(consumer.policy, consumer.host_offload.current):
            averaged = _gathered(consumer)
    pieces = _own_pieces(consumer)
    random_state = read_random_state(consumer)
    content: dict[str, Any] = {
        "format": FORMAT,
        "world": ranks.world,
        "step": consumer.step,
        "policy_version": consumer.policy_version,
        "bad_updates_in_a_row": consumer.bad_updates_in_a_row,
        "loss_scale": consumer.loss_scale.state_dict(),
        "controllers": {task: known.state_dict() for task, known in consumer.controllers.items()},
        "critic": None if consumer.critic is None else consumer.critic.loss_scale.state_dict(),
    }

    def write() -> None:
        try:
            alone = ranks.world == 1
            if not alone:
                _write(_shard_path(folder, ranks.rank, ranks.world), {}, pieces, random_state)
            if first and with_model:
                _save_model(consumer, weights, folder / "model")
                if averaged:
                    _save_model(consumer, averaged, folder / EMA)
            if first:
                _write(folder / STATE, content, pieces if alone else {}, random_state)
                (folder / "config.toml").write_text(to_toml(consumer.config), encoding="utf-8")
        except (RuntimeError, SafetensorError) as error:  # how the two formats report a full disk
            cause = error.__context__ if isinstance(error.__context__, OSError) else error
            raise OSError(f"{folder}: {cause}") from error

    return write


def load_snapshot(consumer: TrainerState, folder: Path) -> None:
    """Restore what a snapshot wrote into a consumer made from the same config.

    A run that has changed to an algorithm with a value model begins with a new one.
    """
    content = read_state(folder / STATE)
    if content["format"] != FORMAT:
        raise RunError(f"checkpoint {folder}: got format {content['format']}, allowed: {FORMAT}")
    world, ranks = content["world"], consumer.ranks
    shards = [content]
    if world > 1:  # rows stay on disk until they are copied
        shards = [read_state(_shard_path(folder, rank, world)) for rank in range(world)]
    learners = _learners(consumer, with_critic=content["critic"] is not None)
    _make_moments(learners)
    saved = [shard["pieces"] for shard in shards]
    known = {_kind(name) for pieces in saved for name in pieces}
    unused = {REFERENCE, EMA} - consumer.averages.keys()  # an average that was switched off since
    saved = [
        {
            n: piece
            for n, piece in pieces.items()
            if _kind(n) not in unused and _learner(n) in learners
        }
        for pieces in saved
    ]
    _fill(_tensors(consumer, learners), saved, consumer.policy.sharding, folder)
    for kind, average in consumer.averages.items():
        if kind not in known:  # switched on since
            average.restart()
    for prefix, learner in learners.items():
        learner.masters.write_back()
        learner.loss_scale.load_state_dict(content["critic" if prefix else "loss_scale"])
    consumer.step = content["step"]
    consumer.policy_version = content["policy_version"]
    consumer.bad_updates_in_a_row = content["bad_updates_in_a_row"]
    for task in consumer.controllers.keys() & content["controllers"].keys():
        consumer.controllers[task].load_state_dict(content["controllers"][task])
    set_random_state(consumer, shards[ranks.rank if ranks.world == world else 0]["random"])


def _gathered(consumer: TrainerState) -> Tensors:
    """What a model's files hold, on the host: weights gathered by all ranks, kept by the first."""
    first = consumer.ranks.is_first
    weights = {name: to_host(tensor) for name, tensor in consumer.weights() if first}
    policy = consumer.policy
    buffers = {**policy.stored_buffers, **persistent_buffers(policy.model)}
    return weights | {name: to_host(tensor) for name, tensor in buffers.items() if first}


def _shard_path(folder: Path, rank: int, world: int) -> Path:
    return folder / "shards" / f"rank-{rank}-of-{world}.safetensors"


def _write(path: Path, content: dict[str, Any], pieces: Pieces, random_state: Tensors) -> None:
    """Write tensors under `piece/` and `random/`; everything else as JSON in the file's metadata."""
    path.parent.mkdir(parents=True, exist_ok=True)
    tensors = {f"piece/{name}": values.contiguous() for name, (_, values) in pieces.items()}
    tensors |= {f"random/{name}": state for name, state in random_state.items()}
    header = {**content, "first": {name: first for name, (first, _) in pieces.items()}}
    save_file(tensors, path, metadata={"state": json.dumps(header)})


def read_state(path: Path) -> dict[str, Any]:
    """What was written; tensors stay on disk until they are used."""
    with safe_open(path, framework="pt", device="cpu") as file:
        content = json.loads(file.metadata()["state"])
        firsts = content.pop("first")
        names = [name for name in file.keys() if name.startswith("random/")]  # noqa: SIM118
        content["pieces"] = {
            name: (tuple(first), file.get_tensor(f"piece/{name}")) for name, first in firsts.items()
        }
        content["random"] = {name.removeprefix("random/"): file.get_tensor(name) for name in names}
    return content


def saved_masters(folder: Path) -> Tensors:
    """The masters that a snapshot of one rank holds."""
    pieces = read_state(folder / STATE)["pieces"]
    return {
        _owner(name): values for name, (_, values) in pieces.items() if name.startswith(_MASTER)
    }


def _save_model(consumer: TrainerState, weights: Tensors, folder: Path) -> None:
    """Write model and tokenizer as a folder that transformers' `from_pretrained` loads."""
    from transformers import GenerationConfig

    config, model = consumer.config.model, copy.copy(consumer.policy.model)
    # transformers refuses to write sampling settings that it reads, such as Llama 2's temperature
    generation, model.generation_config = model.generation_config, GenerationConfig()
    with quiet_transformers():
        model.save_pretrained(folder, state_dict=weights)
    if model.can_generate():
        generation.to_json_file(folder / "generation_config.json", keys_to_pop=["compile_config"])
    source = config.tokenizer or resolve_model_path(config.path)
    if Path(source).is_dir() and not (Path(source) / "tokenizer_config.json").is_file():
        return  # a folder of bare weights has no tokenizer
    tokenizer = load_tokenizer(source, trust_remote_code=config.trust_remote_code)
    tokenizer.save_pretrained(folder)


def read_random_state(consumer: TrainerState) -> Tensors:
    """The states of the random number generators of the CPU and of the policy's GPU."""
    state = {"cpu": torch.get_rng_state()}
    if consumer.policy.device.type == "cuda":
        state["cuda"] = torch.cuda.get_rng_state(consumer.policy.device)
    return state


def set_random_state(consumer: TrainerState, state: Tensors) -> None:
    """Set the generators to what `read_random_state` returned."""
    torch.set_rng_state(state["cpu"])
    if "cuda" in state and consumer.policy.device.type == "cuda":
        torch.cuda.set_rng_state(state["cuda"], consumer.policy.device)


Learners = dict[str, TrainerState | Critic]


def _learners(consumer: TrainerState, *, with_critic: bool = True) -> Learners:
    """What has masters and an optimizer, by the prefix of their names."""
    if consumer.critic is None or not with_critic:
        return {"": consumer}
    return {"": consumer, _CRITIC: consumer.critic}


def _learner(name: str) -> str:
    """The prefix of the learner that a saved tensor belongs to."""
    return _CRITIC if _owner(name).startswith(_CRITIC) else ""


def _tensors(consumer: TrainerState, learners: Learners) -> Tensors:
    """The live masters and optimizer moments by name; shards if the model is sharded."""
    tensors: Tensors = {}
    for prefix, learner in learners.items():
        for name, parameter in learner.masters.parameters.items():
            tensors[_MASTER + prefix + name] = parameter.detach()
            for key, value in learner.optimizer.state.get(parameter, {}).items():
                tensors[f"{key}/{prefix}{name}"] = value
    for kind, average in consumer.averages.items():
        tensors |= {f"{kind}/{name}": tensor for name, tensor in average.tensors.items()}
    return tensors


def _make_moments(learners: Learners) -> None:
    """Give new optimizers the zero moments that their first step would make, to load into."""
    for learner in learners.values():
        for parameter in learner.masters.parameters.values():
            learner.optimizer.moments_of(parameter)


def _own_pieces(consumer: TrainerState) -> Pieces:
    """Copy the parts that no other rank copies."""
    sharding, current = consumer.policy.sharding, consumer.host_offload.current
    pieces: Pieces = {}
    for name, tensor in _tensors(consumer, _learners(consumer)).items():
        if sharding.holds_alone(_owner(name), tensor):
            part = sharding.part(_owner(name), tensor)
            first = (part.first_row, part.first_column)
            pieces[name] = (first, to_host(current(part.values)))
    return pieces


def _kind(name: str) -> str:
    """Whether a saved tensor is a master, an average or a moment."""
    return name.partition("/")[0]


def _owner(name: str) -> str:
    """The parameter that a saved tensor belongs to."""
    return name.partition("/")[2]


def _fill(tensors: Tensors, saved: Iterable[Pieces], sharding: Sharding, folder: Path) -> None:
    """Copy the part that this rank holds out of the pieces that ranks of any layout saved.

    Moments that were not saved become zero: there had been no update.
    """
    pieces: dict[str, list[Piece]] = {}
    for rank_pieces in saved:
        for name, piece in rank_pieces.items():
            pieces.setdefault(name, []).append(piece)
    missing = [name for name in tensors if name.startswith(_MASTER) and name not in pieces]
    others = {
        name for name in pieces.keys() - tensors.keys() if _owner(name) in sharding.stages.owners
    }
    differing = sorted([*missing, *(pieces.keys() - tensors.keys() - others)])
    if differing:
        raise RunError(f"checkpoint {folder}: its weights are not the model's: {differing[:3]}")
    with torch.no_grad():
        for name, tensor in tensors.items():
            part = sharding.part(_owner(name), tensor)
            if name not in pieces:
                part.values.zero_()
            elif _copy_values(part, pieces[name]) != part.values.numel():
                raise RunError(f"checkpoint {folder}: {name} is not whole")


def _copy_values(target: Part, pieces: Iterable[Piece]) -> int:
    """Copy the target's rows and columns out of the pieces; return how many numbers were copied."""
    copied = 0
    for (row, column), saved in pieces:
        if not target.values.ndim:
            target.values.copy_(saved)
            return 1
        if not target.values.numel() or not saved.numel():
            continue
        into = target.values.view(len(target.values), -1)
        values = saved.view(len(saved), -1)
        rows = _common(target.first_row, len(into), row, len(values))
        columns = _common(target.first_column, into.shape[1], column, values.shape[1])
        block = values[rows[1], columns[1]]
        into[rows[0], columns[0]] = block.to(into)
        copied += block.numel()
    return copied


def _common(first: int, size: int, other: int, other_size: int) -> tuple[slice, slice]:
    """The overlap of two ranges, as a slice of each."""
    begin, end = max(first, other), min(first + size, other + other_size)
    end = max(begin, end)
    return slice(begin - first, end - first), slice(begin - other, end - other)


# ---- adapters of a checkpoint, for peft


def write_adapters(checkpoint: Path, config: ModelConfig, folder: Path) -> None:
    """Write adapter_model.safetensors and adapter_config.json of a checkpoint into `folder`."""
    if not config.lora.rank:
        raise UserError(
            "adapter: got a run that trained all weights, allowed: model.lora.rank above 0"
        )
    import peft

    tensors = read_adapters(checkpoint)
    base = Path(config.path).name if os.path.isabs(config.path) else config.path  # no local path
    layers = sorted({name.partition(".lora_")[0].removeprefix(_PEFT) for name in tensors})
    settings = peft.LoraConfig(
        r=config.lora.rank,
        lora_alpha=config.lora.alpha,  # type: ignore[arg-type]  # a float scales as well
        target_modules=layers,
        task_type="CAUSAL_LM",
        base_model_name_or_path=base,
    )
    _check_peft(settings, config)
    settings.inference_mode = True
    settings.save_pretrained(str(folder))
    save_file(tensors, folder / "adapter_model.safetensors", metadata={"format": "pt"})


def _check_peft(settings: Any, config: ModelConfig) -> None:
    """Refuse adapters that peft would load onto other layers, as it does for some mixtures of experts."""
    import peft
    from transformers import AutoConfig, AutoModelForCausalLM

    model_config = AutoConfig.from_pretrained(
        resolve_model_path(config.path), trust_remote_code=config.trust_remote_code
    )
    with torch.device("meta"):
        model: Any = AutoModelForCausalLM.from_config(
            model_config, trust_remote_code=config.trust_remote_code
        )
        peft.inject_adapter_in_model(copy.deepcopy(settings), model)
    adapted = {name for name, module in model.named_modules() if hasattr(module, "lora_A")}
    if missing := set(settings.target_modules) - adapted:
        names = ", ".join(sorted({name.rpartition(".")[2] for name in missing}))
        raise UserError(
            f"adapter: got adapters on {names}, which peft would load onto the experts of "
            f"{type(model).__name__}, allowed: the whole model, in which they are merged"
        )


def read_adapters(checkpoint: Path) -> dict[str, Tensor]:
    """The adapters of a checkpoint, averaged if it has an average, under peft's names and put together from all ranks."""
    rows: dict[str, list[Piece]] = {}
    kind = f"{EMA}/" if (checkpoint / EMA).is_dir() else _MASTER
    shards = sorted(checkpoint.glob("shards/*"))
    for path in (checkpoint / STATE, *shards):
        for name, piece in read_state(path)["pieces"].items():
            if name.startswith(kind) and ".lora_" in name and not _learner(name):
                rows.setdefault(name.removeprefix(kind), []).append(piece)
    return {
        _PEFT + name.replace(f".{ADAPTER}.weight", ".weight"): torch.cat(
            [part for _, part in sorted(pieces, key=lambda piece: piece[0])]
        ).contiguous()
        for name, pieces in rows.items()
    }

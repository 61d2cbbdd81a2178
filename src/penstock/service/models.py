"""The models that clients train, in the trainer's thread: made, trained, saved, and made again from the log.

Every model is a `Consumer`. Models with adapters share the tensors of one frozen base; one model of a service
may train all weights. A model that is not in memory is made from its newest snapshot, and the commands behind it
are done again: they must give the bits that the log has. That is recovery, and also how a model comes back that
was put away while its client was silent.
"""

from __future__ import annotations

import copy
import json
import math
import shutil
import time
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save
from torch import Tensor

from penstock.config import Config, LoraConfig
from penstock.data.sampler import stable_hash
from penstock.errors import DigestMismatch, UserError
from penstock.files import whole_folder
from penstock.model.arithmetic import use_threads
from penstock.model.loading import compute_dtype
from penstock.service.batches import NO_LOGPROB, Examples, Rows, readable
from penstock.service.prune import snapshots_of
from penstock.store import wire
from penstock.store.command_log import FORWARD_BACKWARD, OPTIM_STEP, Command, CommandLog
from penstock.training.adapters import ADAPTER, add_adapters
from penstock.training.consumer import Consumer
from penstock.training.optimizer import UpdateStep
from penstock.training.pack import Pack
from penstock.training.policy import load_policy, trainer_device
from penstock.training.snapshot import saved_masters, take_snapshot
from penstock.training.stats import PassLosses, UpdateLoss
from penstock.types import WeightHandle
from penstock.weights.digest import digest_of
from penstock.weights.model_weights import CONTENT

LOAD, SAVE, SAVE_SAMPLER = "load_weights", "save_weights", "save_weights_for_sampler"
SAVE_EXTERNAL = "save_weights_external"  # which is refused, but has a number of its model's
_ADAM = {
    "learning_rate": 1e-4,
    "beta1": 0.9,
    "beta2": 0.95,
    "eps": 1e-12,
    "weight_decay": 0.0,
    "grad_clip_norm": 0.0,
}
_SCORERS = 4  # models that are kept to score and to be sampled from
_SNAPSHOT_S = 60.0  # of commands that a recovery does again, at most, and a long one's time
_LOGITS = 1 << 22  # of one chunk


@dataclass(frozen=True, slots=True)
class ModelSettings:
    """What a client chooses when it creates a model."""

    rank: int  # 0: all weights
    seed: int
    train_attn: bool = True
    train_mlp: bool = True

    @classmethod
    @readable("create_model")
    def of(cls, create: Command, config: Config) -> ModelSettings:
        """The settings in a create_model command; its seed, if it gives none, is that of its name."""
        fields = create.fields
        lora = fields.get("lora_config") or {"rank": 0}
        if (family := (fields.get("optimizer_config") or {}).get("type", "adamw")) != "adamw":
            raise UserError(f"optimizer_config: got {family!r}, allowed: 'adamw'")
        rank, seed = lora.get("rank"), lora.get("seed")
        if type(rank) is not int or rank < 0:
            raise UserError(f"lora_config.rank: got {rank!r}, allowed: an integer from 0")
        if seed is None:
            seed = stable_hash(config.seed, create.request_id) % (1 << 31)
        parts = lora.get("train_attn", True), lora.get("train_mlp", True)
        if rank and not any(parts):
            raise UserError("lora_config: got no layers, allowed: train_attn or train_mlp")
        if not -(1 << 63) <= int(seed) < 1 << 63:
            raise UserError(f"lora_config.seed: got {seed}, allowed: a number of 64 bits")
        return cls(rank, int(seed), bool(parts[0]), bool(parts[1]))


@dataclass(slots=True)
class Trained:
    """A model in memory."""

    settings: ModelSettings
    consumer: Consumer
    losses: PassLosses = field(default_factory=PassLosses)  # since the last optim_step
    seq: int = 0  # of its last command
    has_gradients: bool = False
    seconds: float = 0.0  # spent on commands since its last snapshot


class Models:
    """Does the commands of models; its methods are for one thread."""

    def __init__(self, config: Config, folder: Path) -> None:
        # every sequence may be as long as the model takes
        tasks = {n: t.model_copy(update={"agent": "client"}) for n, t in config.tasks.items()}
        self.config, self._folder = config.model_copy(update={"tasks": tasks}), folder
        self._log = CommandLog(folder / "commands.db", readonly=True)
        self._base: Any = None
        self._trained: dict[str, Trained] = {}
        self._scorers: OrderedDict[str, Consumer] = OrderedDict()
        self.vocabulary = self.longest = 0  # tokens that the model knows, and takes at once

    def load_base(self) -> None:
        """Load the base model."""
        use_threads(self.config.train.threads)
        model = self.config.model
        self._base = load_policy(model.path, model, compute_dtype(model, trainer_device(model)))
        self._base.requires_grad_(False)
        self.vocabulary = int(self._base.get_input_embeddings().weight.shape[0])
        self.longest = self.scorer("").policy.longest or 1 << 30

    def _make(self, settings: ModelSettings) -> Consumer:
        """A new model. Parameters of the base are shared, everything else is its own."""
        widest = self._base.config.get_text_config().hidden_size
        if settings.rank > widest:
            raise UserError(
                f"lora_config.rank: got {settings.rank}, allowed: 0 (all weights) to {widest}"
            )
        torch.manual_seed(settings.seed)
        if not settings.rank:
            config = self._config(LoraConfig())
            model = load_policy(config.model.path, config.model, torch.float32)
            return Consumer(config, model, total_steps=1)
        config = self._config(
            LoraConfig(rank=settings.rank, target_modules=self._targets(settings))
        )
        shared = [*self._base.parameters(), *self._base.buffers()]
        model = copy.deepcopy(self._base, {id(tensor): tensor for tensor in shared})
        add_adapters(model, config.model.lora)
        return Consumer(config, model, total_steps=1)

    def _config(self, lora: LoraConfig) -> Config:
        model = self.config.model.model_copy(update={"lora": lora})
        return self.config.model_copy(update={"model": model})

    def _targets(self, settings: ModelSettings) -> list[str]:
        """The layers that get adapters; empty: all but the head."""
        if settings.train_attn and settings.train_mlp:
            return []
        names = [
            name
            for name, module in self._base.named_modules()
            if isinstance(module, torch.nn.Linear) and ("attn" in name) == settings.train_attn
        ]
        head = self._base.get_output_embeddings()
        return sorted(
            {n.rpartition(".")[2] for n in names if self._base.get_submodule(n) is not head}
        )

    # ---- a model and its commands

    def create(self, model_id: str, command: Command) -> str:
        """Make the model of a create_model command, which says whether it can be made; return its digest."""
        settings = ModelSettings.of(command, self.config)
        self._make_room(settings)
        trained = Trained(settings, self._make(settings))
        self._trained[model_id] = trained
        return self._digest(trained)

    def _make_room(self, settings: ModelSettings) -> None:
        """Only one model with all weights is in memory: another one waits for its next command."""
        for model_id, other in list(self._trained.items()):
            if not settings.rank and not other.settings.rank:
                self.put_away(model_id)

    def run(
        self, model_id: str, command: Command, source: dict[str, Any] | None = None
    ) -> tuple[Any, str | None]:
        """Do the next command of a model; return its result, and the digest of weights that it changed.

        source: of load_weights, the folder and the settings of the checkpoint.
        """
        trained, started = self._open(model_id), time.monotonic()
        if command.kind == FORWARD_BACKWARD:
            done: Any = self._forward_backward(trained, command.body), None
        elif command.kind == OPTIM_STEP:
            done = self._optim_step(trained, command.fields)
        elif command.kind == LOAD:
            done = self._load(trained, command.fields, source or {})
        else:
            done = self._save(trained, model_id, command)
        trained.seq, trained.seconds = command.seq, trained.seconds + time.monotonic() - started
        return done

    def _open(self, model_id: str) -> Trained:
        """The model, made again from its snapshot and the log if it is not in memory."""
        if (known := self._trained.get(model_id)) is not None:
            return known
        session, _, number = model_id.rpartition(":train:")
        create = self._log.find(f"{session}:train", int(number))
        if create is None or create.outcome != "done":
            raise UserError(f"model {model_id}: it was not created, allowed: a model that was")
        settings = ModelSettings.of(create, self.config)
        self._make_room(settings)
        trained = Trained(settings, self._make(settings))
        if (found := self._newest_snapshot(model_id)) is not None:
            trained.seq = int(found.name)
            trained.consumer.load(found)
        self._trained[model_id] = trained
        try:
            for command in self._log.select(
                "line = ? AND seq > ? AND outcome = 'done'", (model_id, trained.seq)
            ):
                self._redo(model_id, command)
        except BaseException:
            self.forget(model_id)
            raise
        return trained

    def _redo(self, model_id: str, command: Command) -> None:
        """Do an answered command again, if it changed the model; its answer must have the same bits."""
        if command.kind in (SAVE, SAVE_SAMPLER):
            self._trained[model_id].seq = command.seq
            return
        source = json.loads(command.result)["source"] if command.kind == LOAD else None
        result, digest = self.run(model_id, command, source)
        same = digest == command.digest
        if command.kind == FORWARD_BACKWARD:
            same = result == command.result
        if not same:
            raise DigestMismatch(
                f"model {model_id}: command {command.seq} ({command.kind}) gave other bits when it was "
                "done again; the log is kept as it is"
            )

    def replay(self, model_id: str, create: Command) -> Iterator[Command]:
        """Do all commands of a model again that are kept; yield each, or raise at the first difference."""
        settings, base = ModelSettings.of(create, self.config), self._log.emptied_to(model_id)
        trained = self._trained[model_id] = Trained(settings, self._make(settings))
        if base:
            trained.consumer.load(self._snapshots(model_id) / str(base))
        if self._digest(trained) != (self._log.digest_at(model_id, base) or create.digest):
            raise DigestMismatch(
                f"model {model_id}: its first weights have other bits than the log's"
            )
        where = "line = ? AND seq > ? AND outcome = 'done'"
        for command in self._log.select(where, (model_id, base)):
            self._redo(model_id, command)
            yield command

    def forget(self, model_id: str) -> None:
        """Free a model's memory; its state stays in snapshot and log."""
        self._trained.pop(model_id, None)

    def put_away(self, model_id: str) -> None:
        """Free a model's memory, after a snapshot that saves work when it comes back."""
        if model_id in self._trained:
            self.snapshot(model_id, wait_s=0.0)
            self.forget(model_id)

    def snapshot(self, model_id: str, *, wait_s: float = _SNAPSHOT_S) -> None:
        """Write a model's state, if commands of so many seconds would be done again and none is half done.

        Only after the answer of its last command is in the log: what a snapshot holds is never done again.
        """
        trained = self._trained.get(model_id)
        if trained is None or trained.has_gradients or not trained.seq:
            return
        target = self._snapshots(model_id) / str(trained.seq)
        if trained.seconds < wait_s or target.exists():
            return
        with whole_folder(target) as draft:
            take_snapshot(trained.consumer, draft, with_model=False)()
        trained.seconds = 0.0
        base = self._log.emptied_to(model_id)  # a replay begins there, and later at the next one
        later = [seq for seq in snapshots_of(target.parent) if seq > base]
        for seq in snapshots_of(target.parent):
            if seq not in (base, later[0], trained.seq):
                shutil.rmtree(target.parent / str(seq))

    def _snapshots(self, model_id: str) -> Path:
        return self._folder / "snapshots" / model_id

    def _newest_snapshot(self, model_id: str) -> Path | None:
        place = self._snapshots(model_id)
        return next((place / str(seq) for seq in reversed(snapshots_of(place))), None)

    # ---- commands

    def _forward_backward(self, trained: Trained, body: bytes) -> bytes:
        request = wire.decode("ForwardBackwardRequest", body)
        policy, backward = trained.consumer.policy, not request.get("forward_only", False)
        examples = Examples.of(request, vocabulary=self.vocabulary, longest=policy.longest)
        logprobs_N = np.zeros(len(examples.rows.targets_N), np.float32)
        losses: list[Tensor] = []

        def finish(pack: Pack, scored_N: Tensor, *_: Tensor) -> Tensor:
            loss = examples.loss_of(pack, scored_N)
            losses.append(loss.detach())
            logprobs_N[pack.token_N] = scored_N.detach().float().cpu().numpy()
            return loss

        self._pass(trained.consumer, examples.rows, finish, backward=backward)
        if backward:
            trained.has_gradients = True
            for loss in losses:
                trained.losses.add_loss(loss)
        total = sum(float(loss) for loss in losses)
        return examples.output(logprobs_N, total)

    def _pass(self, consumer: Consumer, rows: Rows, finish: Any, *, backward: bool) -> None:
        device = consumer.policy.device
        consumer.forward_backward(
            (rows.aimed(pack) for pack in consumer.packs_of(rows, rows.units)),
            lambda pack: (torch.ones(len(pack.target_N), device=device), None),
            finish,
            backward=backward,
        )
        consumer.policy.release()

    def _optim_step(self, trained: Trained, fields: dict[str, Any]) -> tuple[dict[str, Any], str]:
        """AdamW with the parameters of this call; what is not finite changes nothing and is counted."""
        adam = _adam(fields)
        consumer = trained.consumer
        for group in consumer.optimizer.param_groups:
            group["betas"] = (adam["beta1"], adam["beta2"])
            group["eps"], group["weight_decay"] = adam["eps"], adam["weight_decay"]
        largest = adam["grad_clip_norm"] or math.inf
        consumer.update_step = UpdateStep(consumer.masters, consumer.optimizer, largest)
        loss = UpdateLoss([(trained.losses, 1.0)], consumer.ranks)
        norm, finite = consumer.optim_step(adam["learning_rate"], loss)()
        trained.losses, trained.has_gradients = PassLosses(), False
        metrics = {"grad_norm": norm} if finite else {"skipped": 1.0}
        return {"metrics": metrics}, self._digest(trained)

    def _save(
        self, trained: Trained, model_id: str, command: Command
    ) -> tuple[dict[str, Any], None]:
        """Write the weights and moments of a model; a folder that a killed server has written is kept."""
        target = self._folder / "checkpoints" / model_id / str(command.seq)
        if not target.exists():
            with whole_folder(target) as draft:
                take_snapshot(trained.consumer, draft, with_model=False)()
        size = sum(path.stat().st_size for path in target.iterdir())
        masters, rank = trained.consumer.masters.parameters, trained.settings.rank
        digest = digest_of(self._layers(masters)) if rank else trained.consumer.digest()
        return {"digest": digest, "size_bytes": size}, None

    def _load(
        self, trained: Trained, fields: dict[str, Any], source: dict[str, Any]
    ) -> tuple[dict[str, Any], str]:
        """Read a checkpoint of a model with the same settings; gradients that were not applied are dropped."""
        folder, (rank, attn, mlp) = self._folder / source["folder"], source["shape"]
        own = trained.settings
        if (own.rank, own.train_attn, own.train_mlp) != (rank, attn, mlp):
            raise UserError(
                f"path: got weights of a model of rank {rank}, allowed: those of a model like this one, "
                f"of rank {own.rank}"
            )
        if not folder.is_dir():
            raise UserError(f"path: got {fields['path']}, which was deleted, allowed: a checkpoint")
        consumer = trained.consumer
        consumer.load(folder)
        consumer.drop_gradients()
        trained.losses, trained.has_gradients = PassLosses(), False
        trained.seconds = math.inf  # the next snapshot is due now: the checkpoint may be deleted
        if not fields.get("optimizer"):
            for moments in consumer.optimizer.state.values():
                for value in moments.values():
                    value.zero_()
        return {"path": fields["path"], "source": source}, self._digest(trained)

    def _digest(self, trained: Trained) -> str:
        """The digest of what is trained."""
        parameters = trained.consumer.masters.parameters
        return digest_of((name, tensor.detach()) for name, tensor in parameters.items())

    # ---- sampling and scores

    def adapter(self, name: str) -> WeightHandle:
        """The adapters of a checkpoint, FOLDER@DIGEST, as engines hold them; for any thread."""
        folder, _, digest = name.rpartition("@")
        layers = dict(self._layers(saved_masters(self._folder / folder)))
        return WeightHandle(version=0, digest=digest, kind=CONTENT, location=save(layers))

    def _layers(self, masters: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
        """Yield the two matrices of each adapted layer; the scale is in the second."""
        for name, matrix in masters.items():
            layer, _, side = name.removesuffix(f".{ADAPTER}.weight").rpartition(".lora_")
            if side == "A":
                scale = LoraConfig().alpha / len(matrix)
                yield f"{layer}.low", matrix.detach()
            else:
                yield f"{layer}.high", matrix.detach() * scale

    def scorer(self, folder: str, settings: ModelSettings | None = None) -> Consumer:
        """A model that is not trained: that of a checkpoint, or the base, as adapters that add nothing."""
        if folder in self._scorers:
            self._scorers.move_to_end(folder)
            return self._scorers[folder]
        consumer = self._make(settings or ModelSettings(rank=1, seed=0))
        if folder:
            consumer.load(self._folder / folder)
        self._scorers[folder] = consumer
        while len(self._scorers) > _SCORERS:
            self._scorers.popitem(last=False)
        return consumer

    def score(self, consumer: Consumer, rows: Rows) -> np.ndarray:
        """The log-prob of each target."""
        logprobs_N = np.zeros(len(rows.targets_N), np.float32)

        def keep(pack: Pack, scored_N: Tensor, *_: Tensor) -> None:
            logprobs_N[pack.token_N] = scored_N.float().cpu().numpy()

        self._pass(consumer, rows, keep, backward=False)
        return logprobs_N

    def most_likely(self, consumer: Consumer, rows: Rows, k: int) -> tuple[np.ndarray, np.ndarray]:
        """The k most likely tokens at each predictor, and their log-probs."""
        shape = (len(rows.targets_N), k)
        ids, logprobs = np.zeros(shape, np.int32), np.full(shape, NO_LOGPROB, np.float32)
        size = max(1, _LOGITS // self.vocabulary)
        consumer.policy.train(False)
        with torch.no_grad():
            for pack in consumer.packs_of(rows, rows.units):
                head = consumer.policy.head_inputs(pack)
                for start in range(0, len(pack.token_N), size):
                    best = head.log_probs(slice(start, start + size)).topk(min(k, self.vocabulary))
                    place = pack.token_N[start : start + size], slice(best.indices.shape[1])
                    ids[place], logprobs[place] = best.indices.cpu(), best.values.cpu()
        return ids, logprobs


@readable("optim_step")
def _adam(fields: dict[str, Any]) -> dict[str, float]:
    """The parameters of AdamW, checked."""
    other = fields.get("optimizer_params") or {}
    if other.get("type", "adamw") not in ("adam", "adamw"):
        raise UserError(f"optimizer_params: got {other['type']!r}, allowed: 'adamw'")
    given = {**_ADAM, **(fields.get("adam_params") or {}), **other}
    for name in _ADAM:
        value = given[name]
        limit = 1.0 if name.startswith("beta") else math.inf
        if not isinstance(value, int | float) or not 0 <= value < limit:
            raise UserError(f"adam_params.{name}: got {value!r}, allowed: from 0, below {limit:g}")
    if given["eps"] < 1e-38:  # 0 in float32: weights without a gradient would be 0 / 0
        raise UserError(f"adam_params.eps: got {given['eps']!r}, allowed: from 1e-38")
    return {name: float(given[name]) for name in _ADAM}

"""The service itself: who may do what, which command is next, and the answers; HTTP and Python both call it.

Runs on one event loop. Commands of a model run in the order of their numbers, in the trainer's thread, one at a
time. Samples run beside them, as many as keep the engines busy. For both owners take turns, and the models or samplers
of an owner. A restarted service begins with the commands that have no answer. Waits for: commands, the trainer's
thread, the engines.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import hashlib
import importlib.util
import json
import logging
import re
import time
import uuid
from collections import Counter, deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from penstock.config import Config
from penstock.config.demo import resolve_model_path
from penstock.config.plugins import load
from penstock.config.source import validate
from penstock.errors import EnginesLost, PenstockError, RunError, UserError
from penstock.run import preflight
from penstock.service.adapters import Adapters
from penstock.service.models import LOAD, SAVE, SAVE_EXTERNAL, SAVE_SAMPLER, Models, ModelSettings
from penstock.service.prune import prune, remove_weights, sweep
from penstock.service.samplers import Samplers
from penstock.service.turns import Seats, Turns
from penstock.store import trust
from penstock.store.command_log import FILE, Command, CommandLog
from penstock.store.run_folder import RunFolder
from penstock.waits import Waits
from penstock.workers import ENGINE_LAUNCHERS
from penstock.workers.pool.pool import UNKNOWN_SLOTS
from penstock.workers.rpc import append_to_log
from penstock.workers.supervise.supervised import SupervisionCallbacks
from penstock.workers.watchdog import Watchdog
from penstock.workers.workers import Engines, all_or_first_error

CREATE, SAMPLE = "create_model", "asample"
TRAINING = ("forward_backward", "optim_step", LOAD, SAVE, SAVE_SAMPLER)
MOST_WAITING, MOST_WAITING_BYTES = 4096, 512 << 20  # commands without an answer, of one owner
_MOST_RUNS = 3  # of a command that may be what all engines died of
_PRUNE_EVERY_S = 3600.0
SILENT_S = 300.0  # without a word of its client, a session's models leave the memory
Fields = dict[str, Any]
_ABOUT = ("user_metadata", "display_name")  # what a client says about its session
_NAME = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,199}")
_KINDS = {SAVE: "weights", SAVE_SAMPLER: "sampler_weights"}
_log = logging.getLogger(__name__)


class Busy(PenstockError):
    """The queue of this owner is full; the client waits and asks again."""


class NotFound(UserError):
    """There is no such thing, or it belongs to another key."""


@dataclass(slots=True)
class _Line:
    """The next number of a model, and the commands behind it that have come before it."""

    next_seq: int
    early: dict[int, Command] = field(default_factory=dict)


class ServiceCore:
    """Consumes commands, produces answers; see above."""

    def __init__(self, config: Config, folder: Path) -> None:
        _check_layout(config)
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        self._closing = contextlib.ExitStack()
        self._closing.enter_context(RunFolder(folder).lock())
        sweep(folder)
        self.log = CommandLog(folder / FILE)
        self._closing.callback(self.log.close)
        first = validate(json.loads(self.log.fact("config", config.model_dump_json())))
        if (first.model, first.seed) != (config.model, config.seed):
            self._closing.close()
            raise UserError(
                f"model: got {config.model.path!r} with these settings for {folder}, allowed: those it "
                f"began with ({first.model.path!r}), or another run.name"
            )
        trust.remember(folder, config)  # which the user gave: a replay of it asks nothing
        self.models = Models(config, folder)
        self.config = self.models.config
        self.samplers: Samplers
        self.adapters = Adapters(self.models.adapter)
        self._engines: Engines | None = None  # before `start`
        self._trainer = ThreadPoolExecutor(1, thread_name_prefix="trainer")
        self._lines: dict[str, _Line] = {}
        self._commands: Turns[Command] = Turns()
        self.seats = Seats(lambda sample: self._begin(self._do_samples(sample), sample.request_id))
        self._jobs: deque[Callable[[], None]] = deque()
        self._answers: dict[str, asyncio.Event] = {}
        self._waiting: Counter[str] = Counter()
        self._waiting_bytes: Counter[str] = Counter()
        self._timers: dict[str, asyncio.TimerHandle] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._wake = asyncio.Event()
        self.fault: BaseException | None = None  # of the service, which ends by it
        self.broken = asyncio.Event()

    async def start(self) -> None:
        """Load the model, start the engines, and go on with the commands that have no answer."""
        launch = self.config.launch
        here = launch.kind == "inline" or (launch.kind, launch.num_producers) == ("local", 1)
        try:
            if here:  # one process: imports must not race
                await self._in_trainer(self.models.load_base)
                engines = await self._launch("inline")
            else:
                loading = self._in_trainer(self.models.load_base)
                _, engines = await all_or_first_error(loading, self._launch(launch.kind))
            await engines.pool.start()
            engine = next(iter(engines.supervised.values()))
            stats = await engine.call("stats")
        except BaseException:
            await self.close()
            raise
        holds = stats.most_adapters > 0
        parts = self.models, engines, self._in_trainer, self.seats
        self.samplers = Samplers(*parts, holds_adapters=holds)
        self.seats.slots = (stats.slots or UNKNOWN_SLOTS) * launch.num_producers
        watchdog = Watchdog(
            engines.events.waits, self.config.watchdog, engines, note=engines.events.note
        )
        self._begin(watchdog.run(), "watchdog")
        self._begin(self._work(), "commands")
        for command in list(self.log.select("outcome IS NULL")):
            self.heard_of(command.owner, command.line.partition(":")[0])
            self._enqueue(command)
        self._prune()

    async def _launch(self, kind: str) -> Engines:
        """Start the engines in this process, in workers of this machine or on a cluster."""
        start = load("launch.kind", kind, ENGINE_LAUNCHERS)
        logs, generate = self.folder / "logs", self.adapters.generate
        events = SupervisionCallbacks(waits=Waits(), log=functools.partial(append_to_log, logs))
        engines = self._engines = await start(self.config, logs, events, generate)
        if kind != "inline":
            events.note(f"engines: {engines.description}")
        return engines

    def _prune(self) -> None:
        """Forget what nobody asks for any more, now and every hour."""
        self._timers[""] = asyncio.get_running_loop().call_later(_PRUNE_EVERY_S, self._prune)
        prune(self.log, self.folder, time.time())

    async def close(self) -> None:
        """Stop; commands without an answer are done by the next service of this folder."""
        for timer in self._timers.values():
            timer.cancel()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._engines is not None:
            await self._engines.close()
        await asyncio.to_thread(self._trainer.shutdown, wait=True)
        self._closing.close()

    async def _in_trainer(self, function: Callable[..., Any], *values: Any) -> Any:
        return await asyncio.get_running_loop().run_in_executor(self._trainer, function, *values)

    def _begin(self, work: Any, name: str) -> None:
        task = asyncio.create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        """Stop the service with the fault of a task: the log could not be written, or the code is wrong."""
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self.fault = self.fault or error
            self.broken.set()
            for answer in self._answers.values():  # which will not come
                answer.set()

    @property
    def base_names(self) -> list[str]:
        """The names by which clients may call the base model; the first is shown."""
        path = self.config.model.path
        return list(dict.fromkeys([path, resolve_model_path(path), Path(path).name]))

    def check_base(self, name: object, key: str = "base_model") -> None:
        if name not in self.base_names:
            raise UserError(f"{key}: got {name!r}, allowed: {self.base_names[0]!r}")

    # ---- sessions

    def create_session(self, owner: str, key: str = "", about: Fields | None = None) -> str:
        """A new session, or the one that the same request made before."""
        text = f"{owner}/{key}" if key else uuid.uuid4().hex
        session = hashlib.blake2b(text.encode(), digest_size=10).hexdigest()
        self.log.query(
            "INSERT OR IGNORE INTO sessions VALUES(?, ?, ?, NULL)", (session, owner, time.time())
        )
        if about:
            self.log.fact(
                f"session {session}", json.dumps({name: about.get(name) for name in _ABOUT})
            )
        self.heard_of(owner, session)
        return session

    def sessions(self, owner: str) -> list[str]:
        """The sessions of an owner, the newest first."""
        sql = "SELECT session_id FROM sessions WHERE owner = ? ORDER BY begun_at DESC"
        return [row[0] for row in self.log.query(sql, (owner,))]

    def session(self, owner: str, session: str) -> tuple[Fields, list[str]]:
        """What the client said about a session, and its samplers."""
        self._check_session(owner, session)
        about: Fields = json.loads(self.log.fact(f"session {session}") or "{}")
        sql = "SELECT sampler_id FROM samplers WHERE sampler_id LIKE ? ORDER BY sampler_id"
        return about, [row[0] for row in self.log.query(sql, (f"{session}:sample:%",))]

    def _check_session(self, owner: str, session: str) -> bool:
        """Refuse what is no session of this owner; False: it has ended."""
        rows = self.log.query(
            "SELECT owner, ended_at FROM sessions WHERE session_id = ?", (session,)
        )
        if not rows or rows[0][0] != owner:
            raise NotFound(f"session: got {session!r}, allowed: a session of this key")
        return rows[0][1] is None

    def heard_of(self, owner: str, session: str) -> bool:
        """Note that the client of a session is there; False: the session has ended."""
        goes_on = self._check_session(owner, session)
        if timer := self._timers.pop(session, None):
            timer.cancel()
        if goes_on:
            later = asyncio.get_running_loop().call_later
            self._timers[session] = later(SILENT_S, self._put_away, session)
        return goes_on

    def finish_session(self, owner: str, session: str) -> None:
        """End a session: its models leave the memory, and samplers without a name go."""
        self.heard_of(owner, session)
        self.log.query(
            "UPDATE sessions SET ended_at = ? WHERE session_id = ? AND ended_at IS NULL",
            (time.time(), session),
        )
        self._put_away(session)
        self._timers[""].cancel()
        self._prune()

    def _put_away(self, session: str) -> None:
        """Free the memory of a session's models that have nothing to do; `_work` frees the others after that."""
        if timer := self._timers.pop(session, None):
            timer.cancel()
        sql = "SELECT seq FROM commands WHERE line = ? AND outcome = 'done'"
        for (number,) in self.log.query(sql, (f"{session}:train",)):
            model_id = f"{session}:train:{number}"
            if not self._commands.holds(model_id):
                self._jobs.append(functools.partial(self.models.put_away, model_id))
        self._wake.set()

    # ---- commands

    def submit(self, owner: str, kind: str, line: str, seq: object, body: bytes) -> str:
        """Log a command, so that it will be done; return its request id. One that is known is not done again."""
        seq = _checked_seq("seq_id", seq, least=0 if kind in (CREATE, SAMPLE) else 1)
        self._check_owner(owner, kind, line)
        if (command := self.log.find(line, seq)) is None:
            size = self._waiting_bytes[owner] + len(body)
            if self._waiting[owner] >= MOST_WAITING or size > MOST_WAITING_BYTES:
                raise Busy(
                    f"queue: got {self._waiting[owner]} waiting commands, allowed: no more now"
                )
            command = self.log.add(line, seq, owner, kind, body)
            self._enqueue(command)
        elif not command.is_asked_by(kind, body):
            raise UserError(
                f"seq_id: got {seq} again for another request, allowed: the next number"
            )
        return command.request_id

    def _check_owner(self, owner: str, kind: str, line: str) -> None:
        """Refuse what belongs to another key, and what was never made."""
        if kind == SAMPLE:
            self.sampler(owner, line)
        elif kind == CREATE:
            self.heard_of(owner, line.removesuffix(":train"))
        else:
            self.heard_of(owner, self._creation(owner, line).line.removesuffix(":train"))

    def _creation(self, owner: str, model_id: str) -> Command:
        session, _, number = model_id.rpartition(":train:")
        command = self.log.find(f"{session}:train", _number(number))
        if command is None or command.owner != owner:
            raise NotFound(f"model: got {model_id!r}, allowed: a model of this key")
        return command

    def settings_of(self, owner: str, model_id: str) -> ModelSettings:
        return ModelSettings.of(self._creation(owner, model_id), self.config)

    def _enqueue(self, command: Command) -> None:
        self._waiting[command.owner] += 1
        self._waiting_bytes[command.owner] += len(command.body)
        self._answers.setdefault(command.request_id, asyncio.Event())
        if command.kind == SAMPLE:
            self.seats.add(command)
            return
        if command.kind == CREATE:
            self._commands.add(command)
        else:
            self._add_in_order(command)
        self._wake.set()

    def _add_in_order(self, command: Command) -> None:
        """Let a command of a model run, and those that have waited for it; or let it wait for an earlier one."""
        if command.line not in self._lines:
            sql = "SELECT max(seq) FROM commands WHERE line = ? AND outcome IS NOT NULL"
            ((last,),) = self.log.query(sql, (command.line,))
            self._lines[command.line] = _Line((last or 0) + 1)
        line = self._lines[command.line]
        line.early[command.seq] = command
        while (next_one := line.early.pop(line.next_seq, None)) is not None:
            self._commands.add(next_one)
            line.next_seq += 1

    async def _do_samples(self, command: Command) -> None:
        await self._do(command)
        self.seats.give(command.request_id)

    async def _work(self) -> None:
        """Do commands of models, one at a time; woken by each new one."""
        while True:
            while self._jobs:
                await self._in_trainer(self._jobs.popleft())
            command = self._commands.next()
            if command is None:
                self._wake.clear()
                await self._wake.wait()
                continue
            await self._do(command)
            model_id = f"{command.line}:{command.seq}" if command.kind == CREATE else command.line
            is_last = not self._commands.holds(model_id)
            has_gone = is_last and model_id.partition(":")[0] not in self._timers
            keep = self.models.put_away if has_gone else self.models.snapshot
            await self._in_trainer(keep, model_id)

    async def _do(self, command: Command) -> None:
        """Do a command and log its answer; whatever fails is an answer too."""
        runs = self.log.begin(command)
        outcome, digest = "failed", None
        try:
            if command.kind == SAVE_EXTERNAL:
                raise UserError(f"{SAVE_EXTERNAL}: not served here, allowed: {SAVE}")
            if command.kind in _KINDS:
                _check_checkpoint(command.fields)
            if command.kind == SAMPLE:
                result: Any = await self._sample(command)
            elif command.kind == CREATE:
                result, digest = await self._create(command)
            else:
                source = self._source(command) if command.kind == LOAD else None
                run = self.models.run
                result, digest = await self._in_trainer(run, command.line, command, source)
            outcome = "done"
        except UserError as error:
            result = {"error": str(error), "category": "user"}
        except Exception as error:  # the client hears of it; the model is made again from its log
            if isinstance(error, EnginesLost) and runs < _MOST_RUNS:
                raise  # the service ends, and the next one begins with this command
            _log.error("command %s failed", command.request_id, exc_info=error)
            if command.kind in TRAINING:
                await self._in_trainer(self.models.forget, command.line)
            text = (
                str(error)
                if isinstance(error, PenstockError)
                else f"{type(error).__name__}: {error}"
            )
            result = {"error": text, "category": "server"}
        with self.log.together():
            if outcome == "done" and command.kind in _KINDS:
                result = self._saved(command, result)
            octets = result if isinstance(result, bytes) else json.dumps(result).encode()
            self.log.answer(command, outcome, octets, digest)
        self._waiting[command.owner] -= 1
        self._waiting_bytes[command.owner] -= len(command.body)
        self._answers.pop(command.request_id).set()

    async def _create(self, command: Command) -> tuple[dict[str, str], str]:
        model_id = f"{command.line}:{command.seq}"
        self.check_base(command.fields.get("base_model"))
        digest = await self._in_trainer(self.models.create, model_id, command)
        return {"model_id": model_id}, digest

    async def answer(self, owner: str, request_id: str, wait_s: float) -> Command | None:
        """The command with its answer; None: it has none yet after this time."""
        command = self._known(owner, request_id)
        if command.outcome is None and (event := self._answers.get(request_id)) is not None:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(event.wait(), wait_s)
            if self.fault is not None:
                raise RunError(f"service: it has ended: {self.fault}")
            command = self._known(owner, request_id)
        if command.emptied:
            told = {"error": "request_id: its answer was kept for a day", "category": "user"}
            return replace(command, outcome="failed", result=json.dumps(told).encode())
        return command if command.outcome else None

    def _known(self, owner: str, request_id: str) -> Command:
        line, _, seq = request_id.rpartition("#")
        command = self.log.find(line, _number(seq))
        if command is None or command.owner != owner:
            raise NotFound(f"request_id: got {request_id!r}, allowed: a request of this key")
        return command

    # ---- checkpoints and samplers

    def _saved(self, command: Command, made: Fields) -> dict[str, str]:
        """Record a checkpoint that was written; the client's answer."""
        fields, owner = command.fields, command.owner
        folder = f"checkpoints/{command.line}/{command.seq}"
        if (name := fields.get("path")) is None and "sampling_session_seq_id" in fields:
            session = command.line.rpartition(":train:")[0]
            sampler = f"{session}:sample:{fields['sampling_session_seq_id']}"
            self._add_sampler(sampler, owner, None, folder, made["digest"])
            return {"sampling_session_id": sampler}
        kind, name = _KINDS[command.kind], name or f"step-{command.seq}"
        path, now = f"tinker://{command.line}/{kind}/{name}", time.time()
        about = _expiry(fields.get("ttl_seconds")), json.dumps(fields.get("user_metadata"))
        size, digest = made["size_bytes"], made["digest"]
        row = (path, command.line, owner, folder, digest, kind, size, now, *about)
        marks = ", ".join("?" * len(row))
        self.log.query(f"INSERT OR REPLACE INTO checkpoints VALUES({marks})", row)
        return {"path": path}

    def _add_sampler(self, sampler: str, *values: str | None) -> None:
        self.log.query("INSERT OR IGNORE INTO samplers VALUES(?, ?, ?, ?, ?)", (sampler, *values))

    def checkpoints(self, owner: str, model_id: str | None = None) -> list[Fields]:
        """The checkpoints of an owner, or of one model, the newest first; expired ones are removed."""
        sql = "SELECT * FROM checkpoints WHERE owner = ? AND model_id = ifnull(?, model_id) ORDER BY at DESC"
        found = []
        for checkpoint in self.log.records(sql, (owner, model_id)):
            if checkpoint["expires_at"] and checkpoint["expires_at"] < time.time():
                self.delete_checkpoint(owner, checkpoint["path"])
            else:
                found.append(checkpoint)
        return found

    def checkpoint(self, owner: str, path: object) -> Fields:
        for checkpoint in self.checkpoints(owner):
            if checkpoint["path"] == path:
                return checkpoint
        raise NotFound(f"path: got {path!r}, allowed: a checkpoint of this key")

    def delete_checkpoint(self, owner: str, path: str) -> None:
        rows = self.log.query(
            "DELETE FROM checkpoints WHERE owner = ? AND path = ? RETURNING folder", (owner, path)
        )
        if not rows:
            raise NotFound(f"path: got {path!r}, allowed: a checkpoint of this key")
        remove_weights(self.log, self.folder, rows[0][0])

    def keep_checkpoint(self, owner: str, path: str, ttl: object) -> None:
        """Let a checkpoint live so many seconds from now; None: until it is deleted."""
        self.checkpoint(owner, path)
        self.log.query("UPDATE checkpoints SET expires_at = ? WHERE path = ?", (_expiry(ttl), path))

    def _source(self, command: Command) -> Fields:
        """Where the checkpoint of a load_weights lies, and of what kind of model it is."""
        checkpoint = self.checkpoint(command.owner, command.fields.get("path"))
        settings = self.settings_of(command.owner, checkpoint["model_id"])
        shape = [settings.rank, settings.train_attn, settings.train_mlp]
        return {"folder": checkpoint["folder"], "shape": shape}

    def create_sampler(self, owner: str, fields: Fields) -> str:
        """A sampling session of the base model or of a checkpoint."""
        session, path = str(fields.get("session_id")), fields.get("model_path")
        name = "sampling_session_seq_id"
        seq = _checked_seq(name, fields.get(name, 0))
        self.heard_of(owner, session)
        sampler = f"{session}:sample:{seq}"
        if path is None:
            self.check_base(fields.get("base_model"))
            self._add_sampler(sampler, owner, None, None, None)
        else:
            checkpoint = self.checkpoint(owner, path)
            self._add_sampler(sampler, owner, path, checkpoint["folder"], checkpoint["digest"])
        kept = self.sampler(owner, sampler)
        if kept["model_path"] != path or (path is None and kept["folder"]):
            raise UserError(f"{name}: got {seq} again for other weights, allowed: the next number")
        return sampler

    def sampler(self, owner: str, sampler: str) -> Fields:
        sql = "SELECT * FROM samplers WHERE sampler_id = ? AND owner = ?"
        for row in self.log.records(sql, (sampler, owner)):
            return row
        raise NotFound(f"sampling_session_id: got {sampler!r}, allowed: a sampler of this key")

    async def _sample(self, command: Command) -> bytes:
        sampler = self.sampler(command.owner, command.line)
        folder, settings = sampler["folder"] or "", None
        if folder:
            settings = self.settings_of(command.owner, folder.split("/")[1])
            if not (self.folder / folder).is_dir():
                raise UserError(
                    f"sampling_session_id: got {command.line!r}, whose checkpoint was deleted, "
                    "allowed: one that has its checkpoint"
                )
        return await self.samplers.sample(command, folder, sampler["digest"] or "", settings)


def _check_layout(config: Config) -> None:
    """Refuse engines and trainers that a service cannot have, before anything is started."""
    launch = config.launch
    for key, value, allowed in (
        ("engine.name", config.engine.name, "transformers"),
        ("launch.num_consumers", launch.num_consumers, 1),
        ("launch.producer_kinds", launch.producer_kinds, []),
    ):
        if value != allowed:
            raise UserError(f"{key}: got {value!r}, allowed: {allowed!r} for a service")
    if importlib.util.find_spec("peft") is None:
        raise UserError(
            "service: peft is not installed; install it with: pip install 'penstock[lora]'"
        )
    preflight.check_launch(config)


def _checked_seq(name: str, seq: object, least: int = 0) -> int:
    if not isinstance(seq, int) or not least <= seq < 10**18:
        raise UserError(f"{name}: got {seq!r}, allowed: an integer from {least}, below 10**18")
    return seq


def _number(text: str) -> int:
    """A number of the log; -1, which none has, if the text is none."""
    return int(text) if text.isascii() and text.isdecimal() and len(text) < 19 else -1


def _check_checkpoint(fields: Fields) -> None:
    """Refuse a checkpoint whose name is no name of a file, or whose time to live is no time."""
    name = fields.get("path")
    if name is not None and not (isinstance(name, str) and _NAME.fullmatch(name)):
        raise UserError(f"path: got {name!r}, allowed: letters, digits, dot, dash, underscore")
    if name is None and (key := "sampling_session_seq_id") in fields:
        _checked_seq(key, fields[key])
    _expiry(fields.get("ttl_seconds"))


def _expiry(ttl: object) -> float | None:
    """When a checkpoint with this time to live from now is deleted; None: never."""
    if ttl is None:
        return None
    if not (isinstance(ttl, int | float) and 0 < ttl < 1e10):
        raise UserError(f"ttl_seconds: got {ttl!r}, allowed: seconds above 0")
    return time.time() + ttl


def iterate_models(log: CommandLog) -> Iterator[tuple[str, Command]]:
    """Yield (model id, its create_model command) of every model of a service."""
    for command in log.select("kind = ? AND outcome = 'done'", (CREATE,)):
        yield f"{command.line}:{command.seq}", command

"""A service's folder as `penstock serve` leaves it, without a model: its log, written command by command."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

from penstock.config.source import load_config
from penstock.store.command_log import FILE, Command, CommandLog
from penstock.store.wire import encode


class MadeService:
    """Writes a log; `close` it before it is copied."""

    def __init__(self, folder: Path, model: str = "demo") -> None:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "lock").touch()
        self.log = CommandLog(folder / FILE)
        config = load_config(None, [f"model.path={model}"]).config
        self.log.fact("config", config.model_dump_json())
        self._numbers = itertools.count()

    def model(self, owner: str, *, rank: int = 8) -> str:
        """A new model; its id."""
        line, seq = "5e55101:train", next(self._numbers)
        body = json.dumps({"lora_config": {"rank": rank}}).encode()
        command = self.log.add(line, seq, owner, "create_model", body)
        self.log.answer(command, "done", b"{}", "digest")
        return f"{line}:{seq}"

    def step(self, model: str, seq: int, owner: str, loss: float, norm: float) -> None:
        """A forward_backward and an optim_step, both done."""
        command = self.wait(model, seq, owner, "forward_backward")
        answer = {"metrics": {"loss:sum": loss}}
        self.log.answer(command, "done", encode("ForwardBackwardOutput", answer), None)
        command = self.wait(model, seq + 1, owner, "optim_step")
        answer = {"metrics": {"grad_norm": norm}}
        self.log.answer(command, "done", json.dumps(answer).encode(), "digest")

    def wait(self, model: str, seq: int, owner: str, kind: str) -> Command:
        """A command without an answer."""
        return self.log.add(model, seq, owner, kind, b"{}")

    def fail(self, model: str, seq: int, owner: str, kind: str, why: str) -> None:
        command = self.wait(model, seq, owner, kind)
        self.log.answer(command, "failed", json.dumps({"error": why}).encode(), None)

    def close(self) -> None:
        self.log.close()

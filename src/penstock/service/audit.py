"""`penstock audit` and `penstock replay` of a service's folder: is the log whole, and do its commands give its bits."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING

from penstock.config.source import validate
from penstock.files import say
from penstock.store import trust
from penstock.store.command_log import FILE, Command, CommandLog

if TYPE_CHECKING:
    from penstock.service.models import Models


def service_folder(run: str) -> Path | None:
    """The folder of a service by its path, or by its name in runs/; None: it is a run."""
    return next((p for p in (Path(run), Path("runs") / run) if (p / FILE).is_file()), None)


def audit_service(folder: Path, *, as_json: bool = False) -> int:
    """Print what the log holds and what is wrong with it; 1 if anything is."""
    with CommandLog.look(folder / FILE) as log:
        counts = Counter({outcome or "waiting": count for outcome, count in log.query(_COUNTS)})
        ((emptied,),) = log.query("SELECT sum(emptied) FROM commands")
        faults = [*_faults(log, folder)]
    if as_json:
        say(json.dumps({"commands": counts, "faults": faults, "balanced": not faults}))
        return int(bool(faults))
    listed = ", ".join(f"{count} {outcome}" for outcome, count in sorted(counts.items()))
    say(f"service {folder}: commands: {listed or 'none'}")
    if emptied:
        say(f"the bodies and answers of {emptied} were kept for their time; their digests are here")
    for fault in faults:
        say(f"fault: {fault}")
    if not faults:
        say("every command is what was written and has one answer, in the order of its model")
    return int(bool(faults))


_COUNTS = "SELECT outcome, COUNT(*) FROM commands GROUP BY outcome"
_ORDERED = "kind NOT IN ('asample', 'create_model')"


def _faults(log: CommandLog, folder: Path) -> Iterator[str]:
    for name in log.damaged():
        yield f"command {name} is not what was written"
    gaps = log.query(
        f"SELECT line FROM commands WHERE {_ORDERED} AND outcome IS NOT NULL "
        "GROUP BY line HAVING max(seq) != COUNT(*) OR min(seq) != 1"
    )
    for (line,) in gaps:
        yield f"model {line}: a command was answered before an earlier one"
    for path, place in log.query("SELECT path, folder FROM checkpoints"):
        if not (folder / place).is_dir():
            yield f"checkpoint {path} is not on the disk"


def replay_service(folder: Path, *, trusted: bool = False) -> None:
    """Do the commands of every model again, and compare all answers with the log's; raise at the first difference."""
    from penstock.service.core import iterate_models
    from penstock.service.models import Models

    with closing(CommandLog(folder / FILE, readonly=True)) as log:
        config = validate(json.loads(log.fact("config")))
        trust.check(folder, [config], trust=trusted)
        models = Models(config, folder)
        with ThreadPoolExecutor(1) as trainer:  # which counts its own threads
            trainer.submit(models.load_base).result()
            for model_id, create in iterate_models(log):
                count = trainer.submit(_replay, models, model_id, create).result()
                say(
                    f"model {model_id}: {count} commands done again: every answer is the logged one"
                )


def _replay(models: Models, model_id: str, create: Command) -> int:
    try:
        return sum(1 for _ in models.replay(model_id, create))
    finally:
        models.forget(model_id)

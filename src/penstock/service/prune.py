"""What a service forgets, so that its folder does not grow for ever: answers that were kept for long enough.

A command's body and answer are emptied a day after the answer was given, or once its session has ended; its number,
kind, metrics and digest stay, so that it is never done again. The commands of a model are emptied up to a snapshot,
which stays: a replay begins there. Weights go with the last that names them: a checkpoint, a sampler of that
day, or a load that may be done again.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable
from pathlib import Path

from penstock.store.command_log import CommandLog, Values

KEPT_S = 24 * 3600.0
_OVER = (  # its answer was given long ago, or its session has ended
    "outcome IS NOT NULL AND (done_at < :before OR substr(line, 1, instr(line, ':') - 1) IN "
    "(SELECT session_id FROM sessions WHERE ended_at IS NOT NULL))"
)
_FOLDER = "'checkpoints/' || line || '/' || seq"  # of the weights that a command saved


def prune(log: CommandLog, folder: Path, now: float) -> None:
    """Forget what may be forgotten at this time."""
    before = {"before": now - KEPT_S}
    with log.together():
        log.empty(f"kind = 'asample' AND {_OVER}", before)
        for place in (folder / "snapshots").glob("*"):
            line = {"line": place.name, "base": log.emptied_to(place.name), **before}
            for seq in snapshots_of(place):
                of_line = {**line, "last": seq}
                own = f"line = :line AND seq > :base AND {_OVER}"
                if log.query(f"SELECT 1 FROM commands WHERE {own} AND seq = :last", of_line):
                    log.empty(f"{own} AND seq <= :last", of_line)
        over = f"SELECT {_FOLDER} FROM commands WHERE kind LIKE 'save_weights%' AND {_OVER}"
        log.query(f"DELETE FROM samplers WHERE model_path IS NULL AND folder IN ({over})", before)
        log.query("DELETE FROM checkpoints WHERE expires_at < ?", (now,))
        used = {*_loaded(log), *_column(log, "SELECT folder FROM checkpoints")}
        used |= {*_column(log, f"SELECT folder FROM samplers WHERE folder NOT IN ({over})", before)}
        done = {
            *_column(
                log,
                f"SELECT {_FOLDER} FROM commands WHERE kind LIKE 'save_weights%' AND outcome IS NOT NULL",
            )
        }
    for place in (folder / "checkpoints").glob("*/*"):
        if (name := place.relative_to(folder).as_posix()) in done - used:
            shutil.rmtree(folder / name, ignore_errors=True)


def sweep(folder: Path) -> None:
    """Remove what a killed service has not written to its end; no other may write here."""
    for draft in folder.glob("*/*/.*.draft-*"):
        shutil.rmtree(draft, ignore_errors=True)


def remove_weights(log: CommandLog, folder: Path, name: str) -> None:
    """Remove the weights of a checkpoint that was deleted, now or when no load needs them."""
    if name not in _loaded(log):
        shutil.rmtree(folder / name, ignore_errors=True)


def snapshots_of(place: Path) -> list[int]:
    """The commands after which a model's snapshots were taken, the oldest first."""
    return sorted(int(path.name) for path in place.glob("[0-9]*"))


def _loaded(log: CommandLog) -> list[str]:
    """The folders that loads have read which may be done again."""
    where = "kind = 'load_weights' AND outcome = 'done' AND NOT emptied"
    return [json.loads(command.result)["source"]["folder"] for command in log.select(where)]


def _column(log: CommandLog, sql: str, values: Values = ()) -> Iterable[str]:
    return (row[0] for row in log.query(sql, values))

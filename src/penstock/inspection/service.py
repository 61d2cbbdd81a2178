"""What the command log of a service's folder tells: its models, the queues of their owners, every model's losses.

The log is foreign data: one with other tables than a service makes is refused when it is opened, values of any
type become those that the page shows, and of everything there is a bounded number. Of requests only the rank of
a model is read, of answers why a command failed.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from penstock.inspection.record import CREATED, RunRecord, as_number, model_of
from penstock.store.command_log import OPTIM_STEP, CommandLog
from penstock.store.run_folder import RunFolder

MOST_MODELS = 32  # the newest
_CURVES = ("loss:sum", "grad_norm")  # of a forward_backward, of an optim_step
_MOST_OWNERS, _MOST_WAITING, _NEWEST = 32, 8, 40  # queues, commands of each, commands at all
_MOST_TEXT = 200  # characters of a name
_MOST_JSON = 1 << 20  # bytes
_WHY = f"""CASE WHEN outcome = 'failed' AND length(result) BETWEEN 1 AND {_MOST_JSON}
    THEN json_extract(CAST(result AS TEXT), '$.error') END"""
_COMMAND = f"line, seq, owner, kind, outcome, coalesce(done_at, at), {_WHY}"
_WAITING = f"""SELECT * FROM (SELECT {_COMMAND}, COUNT(*) OVER (PARTITION BY owner),
        row_number() OVER (PARTITION BY owner ORDER BY number) AS place FROM commands WHERE outcome IS NULL)
    WHERE place <= {_MOST_WAITING} ORDER BY owner, place LIMIT {_MOST_OWNERS * _MOST_WAITING}"""


def read_service(folder: RunFolder) -> dict[str, Any]:
    """What the page of a service shows: its settings, models, queues by owner, and newest commands."""
    with CommandLog.look(folder.commands) as log:
        ((created,),) = log.query(f"SELECT COUNT(*) FROM commands WHERE {CREATED}")
        models = list(_models(log))
        newest = f"SELECT {_COMMAND} FROM commands ORDER BY number DESC LIMIT {_NEWEST}"
        queues: dict[str, dict[str, Any]] = {}
        for *row, count, _ in log.query(_WAITING):
            command = _command(*row)
            queue = {"owner": command["owner"], "waiting": count, "first": []}
            queues.setdefault(_text(row[2]), queue)["first"].append(command)
        return {
            "settings": {"model": model_of(log), "folder": str(folder.path)},
            "models": models,
            "older_models": created - len(models),
            "queues": list(queues.values()),
            "commands": [_command(*row) for row in log.query(newest)],
        }


def _models(log: CommandLog) -> Iterator[dict[str, Any]]:
    """Yield what was asked of each model, the newest first, and its record, whose steps are commands."""
    body = f"CASE WHEN length(body) < {_MOST_JSON} THEN CAST(body AS TEXT) END"
    for line, seq, owner, rank in log.query(
        f"SELECT line, seq, owner, json_extract({body}, '$.lora_config.rank') FROM commands "
        f"WHERE {CREATED} ORDER BY number DESC LIMIT {MOST_MODELS}"
    ):
        name = f"{line}:{seq}"
        (counts,) = log.query(
            f"SELECT COUNT(*) FILTER (WHERE kind = '{OPTIM_STEP}' AND outcome = 'done'), "
            "COUNT(*) FILTER (WHERE outcome = 'done'), COUNT(*) FILTER (WHERE outcome = 'failed'), "
            "COUNT(*) FILTER (WHERE outcome IS NULL) FROM commands WHERE line = ?",
            (name,),
        )
        newest = f"SELECT {_COMMAND} FROM commands WHERE line = ? ORDER BY number DESC LIMIT 1"
        last = [_command(*row) for row in log.query(newest, (name,))]
        yield {
            "record": _record(log, name),
            "owner": _owner(owner),
            "rank": _whole(rank),  # 0: all weights
            **dict(zip(("optimizer_steps", "done", "failed", "waiting"), counts, strict=True)),
            "last": last[0] if last else None,
        }


def _record(log: CommandLog, name: str) -> RunRecord:
    """The curves of a model."""
    columns = ", ".join(f"""json_extract(metrics, '$."{curve}"')""" for curve in _CURVES)
    rows = log.query(
        f"SELECT seq, {columns} FROM commands WHERE line = ? AND metrics IS NOT NULL ORDER BY seq",
        (name,),
    )
    record = RunRecord(name=_text(name), path="", steps=[_whole(row[0]) for row in rows])
    for place, curve in enumerate(_CURVES, start=1):
        record.curves[curve] = [as_number(row[place]) for row in rows]
    return record


def _command(
    line: object, seq: object, owner: object, kind: object, outcome: object, at: object, why: object
) -> dict[str, Any]:
    named = {"name": f"{_text(line)}#{_whole(seq)}", "owner": _owner(owner), "kind": _text(kind)}
    moment = at if isinstance(at, float) and math.isfinite(at) else 0.0
    return named | {"outcome": _text(outcome or "waiting"), "why": _text(why or ""), "at": moment}


def _text(value: object) -> str:
    return str(value)[:_MOST_TEXT]


def _owner(value: object) -> str:
    """An owner is the digest of a key: its beginning tells it from the others."""
    return str(value)[:8]


def _whole(value: object) -> int:
    return value if isinstance(value, int) else 0

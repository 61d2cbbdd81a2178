"""A timeline for a made run: its groups on engines of known speeds, its steps with known times."""

from __future__ import annotations

import contextlib
import json

from penstock.run.twin.engine import Rows
from penstock.run.twin.profile import DecodeModel
from penstock.store.journal import Journal
from penstock.store.run_folder import RunFolder

ENGINE = DecodeModel(step_s=0.02, row_s=0.001, prefill_s=0.005, slots=256)
REWARD_S, TRAIN_FIXED_S, TRAIN_TOKEN_S, PUBLISH_S, SYNC_S = 0.25, 0.5, 0.002, 0.03, 0.04


def make_timeline(folder: RunFolder, *models: DecodeModel) -> None:
    """Write RUN/timeline/events.jsonl: each step's groups come together and are trained when all have ended.

    models: of the engines, which take turns; without one, ENGINE.
    """
    models = models or (ENGINE,)
    with contextlib.closing(Journal.open(folder.journal, readonly=True)) as journal:
        rows = journal.query(
            "SELECT g.step, g.group_id, r.num_tokens FROM groups g JOIN rollouts r USING(group_id)"
            " WHERE g.state = 'trained' ORDER BY g.step, g.cursor, r.number"
        )
    steps: dict[int, dict[str, list[int]]] = {}
    for step, group, tokens in rows:
        steps.setdefault(step, {}).setdefault(group, []).append(tokens)
    events = [{"lane": "run", "what": "session", "start": 0.0, "end": 0.0}]

    def add(lane: str, what: str, start: float, end: float, detail: str = "") -> None:
        events.append({"lane": lane, "what": what, "start": start, "end": end, "detail": detail})

    now = 0.0
    for step, groups in steps.items():
        engine = step % len(models)
        ends = _decode(models[engine], list(groups.values()))
        for (group, lengths), end in zip(groups.items(), ends, strict=True):
            add(f"engine-{engine}", "generate", now, now + end)
            scored = now + end + 1e-4
            for number in range(len(lengths)):
                add("rewards of train", "reward", scored, scored + REWARD_S, f"{group}.{number}")
            add("journal", "send", scored + REWARD_S, scored + REWARD_S + 0.001, group)
        ready = now + max(ends) + REWARD_S + 0.002
        add("loop", "wait", now, ready, f"groups of step {step}")
        tokens = sum(sum(lengths) for lengths in groups.values())
        trained = ready + 0.001 + TRAIN_FIXED_S + TRAIN_TOKEN_S * tokens
        add("trainer", "train", ready + 0.001, trained)
        add("trainer", "publish", trained, trained + PUBLISH_S)
        add("engine-0", "sync", trained, trained + SYNC_S)
        now = trained + SYNC_S
    path = folder.path / "timeline" / "events.jsonl"
    path.parent.mkdir(exist_ok=True)
    path.write_text("".join(f"{json.dumps(event)}\n" for event in events), encoding="utf-8")


def _decode(model: DecodeModel, groups: list[list[int]]) -> list[float]:
    """Return when each group ends if all of them come at time 0."""
    rows = Rows(model)
    owners = [place for place, lengths in enumerate(groups) for _ in lengths]
    for row, tokens in enumerate(tokens for lengths in groups for tokens in lengths):
        rows.waiting[str(row)] = tokens
    rows.stall(model.prefill_s * len(groups))
    rows.admit()
    ends = [0.0] * len(groups)
    while (end := rows.next_end()) is not None:
        rows.advance(end)
        for row in rows.take_ended():
            ends[owners[int(row)]] = end
        rows.admit()
    return ends

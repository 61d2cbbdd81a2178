"""A run folder in which every text that a model, a dataset or a stranger can fill attacks the reader."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from penstock.config.source import load_config, to_toml
from penstock.inspection.track.logs import JsonlTracker, RolloutLog
from penstock.store.checkpoint import _write_manifest
from penstock.store.journal import Journal
from penstock.store.run_folder import RunFolder
from penstock.types import (
    Batch,
    Group,
    ModelCall,
    Prompt,
    Rollout,
    Score,
    Status,
    StepReport,
    VersionSegment,
)

# clears the screen, sets the window's title and the clipboard, moves up, overrides the direction of text
TERMINAL = "\x1b[2J\x1b]0;pwned\x07\x1b]52;c;cHduZWQ=\x07\x9b1A\r\x08\u202epwned[/][red][/dim]"
MARK = "document.documentElement.dataset.pwned=1"
MARKUP = (
    f"</script ><script>{MARK}</script><!--<script></title></style></textarea>"
    f"<img id=pwned src=x onerror='{MARK}'>\"'><svg onload='{MARK}'><iframe srcdoc='<script>parent."
    f"{MARK}</script>'></iframe><a href='javascript:{MARK}'>{{{{script}}}}</a>"
    f"<base href='http://127.0.0.1:9/'><meta http-equiv=refresh content='0;url=http://127.0.0.1:9/'>"
)
PAYLOAD = TERMINAL + MARKUP
NAME = PAYLOAD.replace("/", "|").replace(":", ";")  # for names that allow no : and no /
KEYS = ("__proto__", "constructor", "toString", PAYLOAD)


def make_hostile_run(parent: Path, responses: Sequence[str] = (PAYLOAD,)) -> RunFolder:
    """Write the run below `parent`, of two steps with these responses each; its name attacks too."""
    path = parent / NAME.encode()[:200].decode(errors="ignore")
    path.mkdir(parents=True)
    folder = RunFolder(path)
    overrides = ["train.steps=2", "eval.tasks={}"]
    config = load_config(None, overrides).config
    tree = config.model_dump(mode="json")
    tree["tasks"] = {NAME: {**tree["tasks"]["train"], "system_prompt": PAYLOAD}}
    tree["track"]["wandb"] = {"tags": [PAYLOAD]}
    tree["algorithm"]["name"] = f"{PAYLOAD}:{PAYLOAD}"
    hostile = type(config).model_validate(tree)
    (path / "config.toml").write_text(to_toml(hostile), encoding="utf-8")
    asyncio.run(_write(folder, hostile.model_dump_json(), responses))
    (path / "timeline").mkdir()
    event = {"lane": PAYLOAD, "what": PAYLOAD, "start": 1.0, "end": 2.0, "detail": PAYLOAD}
    (path / "timeline" / "events.jsonl").write_text(json.dumps(event) + "\n")
    _write_evaluations(folder)
    add_checkpoint(folder)
    return folder


def add_checkpoint(folder: RunFolder) -> None:
    """Write a checkpoint of step 2 with a model of one file."""
    model = folder.checkpoints / "step-2" / "model"
    model.mkdir(parents=True)
    (model / "config.json").write_text("{}")
    _write_manifest(model.parent, 2, f"{2:032x}")


async def _write(folder: RunFolder, config: str, responses: Sequence[str]) -> None:
    journal = Journal.open(folder.journal)
    journal.record_identity({"config": config, "accepted after step 1": PAYLOAD})
    tracker = JsonlTracker(folder.metrics)
    log = RolloutLog(folder.path / "rollouts.jsonl", every_steps=1, num_groups=9)
    for step in (1, 2):
        group = _group(step, responses)
        journal.drawn(group)
        await journal.record_call(group.rollouts[0], _call())
        await journal.landed(group)
        await journal.begin_step(step, [group])
        metrics = {"reward/mean": 0.5, "time/step_s": 1.0, **dict.fromkeys(KEYS, 1.0)}
        await journal.commit_step(
            StepReport(step=step, policy_version=step, digest=f"{step:032x}", metrics=metrics)
        )
        tracker.log_step(step, metrics)
        log.write(Batch(step=step, groups=(group,)))
    failed = _group(3, (PAYLOAD,))
    journal.drawn(failed)
    failed.rollouts[0].move_to(Status.FAILED)
    failed.rollouts[0].error = PAYLOAD
    failed.error = PAYLOAD
    await journal.failed(failed)
    journal.dropped(failed, PAYLOAD, detail=PAYLOAD)
    await journal.flush()
    tracker.close()
    journal.close()


def _call() -> ModelCall:
    """Return a call of an agent, with tool calls of the policy and of its past."""
    call = {"id": PAYLOAD, "function": {"name": PAYLOAD, "arguments": PAYLOAD}}
    said = {"role": "assistant", "content": PAYLOAD, "tool_calls": [call]}
    return ModelCall(
        number=0,
        parent=None,
        context_ids=np.arange(1, 6, dtype=np.int32),
        token_ids=np.arange(4, dtype=np.int32),
        logprobs=np.zeros(4, dtype=np.float32),
        segments=(VersionSegment(0, 4),),
        finish_reason="stop",
        messages=(
            {"role": PAYLOAD, "content": PAYLOAD},
            said,
            {"role": "tool", "content": PAYLOAD},
        ),
        answer={**said, "reasoning_content": PAYLOAD},
    )


def _group(number: int, responses: Sequence[str]) -> Group:
    call = {"id": PAYLOAD, "function": {"name": PAYLOAD, "arguments": PAYLOAD}}
    messages: tuple[dict[str, Any], ...] = (
        {"role": PAYLOAD, "content": PAYLOAD, "name": PAYLOAD},
        {"role": "assistant", "content": [{"type": "text", "text": PAYLOAD}], "tool_calls": [call]},
        {"role": "tool", "content": PAYLOAD, "tool_call_id": PAYLOAD},
    )
    ids = np.arange(1, 6)
    prompt = Prompt(
        f"{PAYLOAD}:{number}",
        messages,
        ids,
        gt_answer=PAYLOAD,
        test_cases={PAYLOAD: [PAYLOAD]},
        extra={PAYLOAD: PAYLOAD},
    )
    group_id = f"{PAYLOAD}:{number}"
    rollouts = [
        _rollout(f"{group_id}.{place}", number, ids, text) for place, text in enumerate(responses)
    ]
    return Group(
        group_id=group_id, task=NAME, cursor=number, prompt=prompt, rollouts=rollouts, tries=1
    )


def _rollout(rollout_id: str, number: int, ids: np.ndarray, text: str) -> Rollout:
    rollout = Rollout(rollout_id=rollout_id, prompt_ids=ids, seed=number)
    rollout.append(np.arange(4), np.full(4, -0.4), [VersionSegment(number - 1, 4)])
    rollout.text, rollout.finish_reason, rollout.extra = text, "stop", {PAYLOAD: PAYLOAD}
    rollout.score = Score(1.0, dict.fromkeys(KEYS, 1.0), True, True, PAYLOAD)
    rollout.move_to(Status.COMPLETED)
    return rollout


def _write_evaluations(folder: RunFolder) -> None:
    folder.evaluations.mkdir()
    lines = [
        json.dumps({"task": task, "step": step, "accuracy": 0.5, "low": 0.4, "high": 0.6})
        for task in KEYS
        for step in (0, 2)
    ]
    (folder.evaluations / "summary.jsonl").write_text("\n".join(lines) + "\n")

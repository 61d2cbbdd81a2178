"""`penstock rollouts`: each rollout with its prompt, response, reward, versions and outcome.

Reads the journal through its public views, read-only, also while the run is under way. Chooses,
reads and prints rollouts; `audit.py` checks them.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from rich.console import Console
from rich.rule import Rule
from rich.segment import Segment, Segments
from rich.text import Text

from penstock import files
from penstock.data.chat import ChatTemplate, load_tokenizer
from penstock.errors import RunError, UserError
from penstock.inspection.compare import evaluations, read_samples
from penstock.rollout.agent.tree import CallTree
from penstock.store.journal import Journal
from penstock.store.run_folder import RunFolder
from penstock.types import ModelCall

Render = Callable[[np.ndarray], str]

DEFAULT_LIMIT = 10
EVALUATED = "eval/"  # before the name of an evaluation task
COLUMNS = (
    "rollout_id, group_id, number, task, prompt_id, status, finish_reason, num_tokens, oldest_version, "
    "newest_version, temperature, reward, step, drop_reason, text, error"
)


@dataclass(slots=True, frozen=True, kw_only=True)
class RolloutView:
    """One rollout as a person reads it, with its prompt and its outcome."""

    rollout_id: str
    group_id: str
    task: str
    prompt_id: str
    prompt: list[dict[str, Any]]  # chat messages
    response: str
    gt_answer: str | None
    reward: float | None
    parts: dict[str, float]
    format_ok: bool | None
    answer_ok: bool | None
    note: str
    versions: list[tuple[int, int]]  # (policy version, tokens), in their order
    num_tokens: int
    temperature: float
    finish_reason: str
    status: str
    state: str  # of its group: in_flight | buffered | taken | trained | dropped; or evaluated
    step: int | None  # the step that trained it, or before its evaluation
    error: str
    turns: list[dict[str, Any]]  # of an agent, as `turns_of` makes them
    rendered_prompt: str | None = None  # as the model got it; None without the run's tokenizer
    staleness: int | None = None  # staleness at that step, by the group's oldest token
    drop_reason: str | None = None

    @property
    def fate(self) -> str:
        """The outcome of the rollout as a phrase."""
        if self.state == "trained":
            return f"trained in step {self.step}, staleness {self.staleness}"
        if self.state == "evaluated":
            return f"evaluated after step {self.step}"
        if self.state == "taken":
            return f"taken for step {self.step}, which is not finished"
        if self.state == "dropped":
            return f"dropped: {self.drop_reason}"
        waiting = {"buffered": "waiting in the buffer", "in_flight": "in flight"}
        return waiting.get(self.state, self.state)

    def plain(self) -> dict[str, Any]:
        """The fields as JSON values; a number that is not finite becomes None."""
        return _finite(asdict(self))


def read_rollouts(
    folder: RunFolder,
    *,
    where: str | None = None,
    step: int | None = None,
    task: str | None = None,
    limit: int = DEFAULT_LIMIT,
) -> list[RolloutView]:
    """The rollouts of a run that match, trained ones first, in the order of training.

    A task `eval/NAME` stands for the run's evaluation of that name.
    """
    if limit < 1:
        raise UserError(f"limit: got {limit}, allowed: at least 1")
    if task is not None and task.startswith(EVALUATED):
        return find_evaluated(folder, task, where=where, step=step, limit=limit)
    with closing(Journal.look(folder.journal)) as journal:
        rows = journal.query("SELECT DISTINCT task FROM groups ORDER BY task")
        names = [name for (name,) in rows]
        if task is not None and names and task not in names:
            raise UserError(f"task: got {task!r}, allowed: {', '.join(names)}")
        matching, render = _matching(journal, where, step, task, limit), _renderer(folder)
        return [
            sample
            for group_id, rollout_ids in matching.items()
            for sample in views_of_group(journal, group_id, render)
            if sample.rollout_id in rollout_ids
        ]


def _matching(
    journal: Journal, where: str | None, step: int | None, task: str | None, limit: int
) -> dict[str, set[str]]:
    """The ids of the rollouts that match, by group."""
    known = {"step = ?": step, "task = ?": task}
    values = {text: value for text, value in known.items() if value is not None}
    conditions, parameters = [*values], [*values.values()]
    if where is not None and where.strip():
        conditions.append(f"({where}\n)")  # the newline ends a comment in the condition
    condition = " AND ".join(conditions) or "1"
    sql = (
        f"SELECT group_id, rollout_id FROM rollouts WHERE {condition}"
        " ORDER BY step IS NULL, step, group_id, number LIMIT ?"
    )
    try:
        rows = journal.query(sql, [*parameters, limit])
    except RunError as error:
        if where is None or error.__cause__ is None:
            raise
        raise UserError(
            f"where: got {where!r}: {error.__cause__}; allowed: an SQL condition on {COLUMNS}"
        ) from None
    matching: dict[str, set[str]] = {}
    for group_id, rollout_id in rows:
        matching.setdefault(group_id, set()).add(rollout_id)
    return matching


def views_of_group(
    journal: Journal, group_id: str, render: Render | None = None
) -> list[RolloutView]:
    """Every rollout of a group; raise a RunError that names a payload that cannot be decoded."""
    [(state, step, staleness, drop_reason)] = journal.query(
        "SELECT state, step, staleness, drop_reason FROM groups WHERE group_id = ?", (group_id,)
    )
    try:
        group = journal.group(group_id)
    except (struct.error, ValueError, KeyError, IndexError, TypeError) as error:
        raise RunError(f"journal: the payload of group {group_id} is damaged: {error}") from error
    calls, prompt = journal.calls(group_id), group.prompt
    views = []
    for rollout in group.rollouts:
        model_calls = calls.get((rollout.rollout_id, rollout.seed), [])
        # an agent's request may add tools to the prompt: the first row has what the model got
        token_ids, _ = rollout.sequences()[0]
        score = rollout.score
        views.append(
            RolloutView(
                rollout_id=rollout.rollout_id,
                group_id=group.group_id,
                task=group.task,
                prompt_id=prompt.prompt_id,
                prompt=list(prompt.messages),
                response=rollout.text,
                gt_answer=prompt.gt_answer,
                reward=score.value if score else None,
                parts=dict(score.parts) if score else {},
                format_ok=score.format_ok if score else None,
                answer_ok=score.answer_ok if score else None,
                note=score.note if score else "",
                versions=[(segment.version, segment.length) for segment in rollout.segments],
                num_tokens=rollout.num_sampled,
                temperature=rollout.temperature,
                finish_reason=rollout.finish_reason,
                status=rollout.status.value,
                state=state,
                step=step,
                error=rollout.error,
                turns=turns_of(model_calls, rollout.earned, rollout.extra.get("unheard", ())),
                rendered_prompt=None if render is None else render(token_ids),
                staleness=staleness,
                drop_reason=drop_reason,
            )
        )
    return views


def turns_of(
    calls: Sequence[ModelCall],
    earned: Sequence[tuple[int, float]] = (),
    unheard: Collection[int] = (),
) -> list[dict[str, Any]]:
    """The messages of an agent's calls in turn.

    `parent` is the call that a message's call continues, `tools` are its tool calls, and `earned` is the
    reward that the rollout had before its call, from the rollout's `earned`. `unheard` calls are left out:
    the agent never got their answer.
    """
    tree = CallTree(list(calls))
    order = [call.number for leaf in tree.leaves(unheard) for call in tree.path(leaf)]
    before = dict(zip(order, (value for _, value in earned), strict=False))
    return [
        {
            "call": call.number,
            "parent": call.parent,
            "role": str(message.get("role", "")),
            "text": _said(message),
            "tools": [_tool(tool) for tool in message.get("tool_calls") or ()],
            "earned": before.get(call.number, 0.0),
        }
        for call in calls
        if call.number not in unheard
        for message in (*call.messages, call.answer)
    ]


def _said(message: Mapping[str, Any]) -> str:
    """The text of a message, with its reasoning."""
    thought = message.get("reasoning_content")
    parts = [f"<think>{thought}</think>" if thought else "", message_text(dict(message))]
    return "\n".join(part for part in parts if part)


def _tool(call: Mapping[str, Any]) -> dict[str, str]:
    """A tool call as name and arguments; arguments that are no text become JSON."""
    function = call.get("function") or {}
    arguments = function.get("arguments", "")
    text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
    return {"name": str(function.get("name")), "arguments": text}


def transcript(turns: Sequence[Mapping[str, Any]]) -> str:
    """Turns as text, with a line where a call starts a branch or a reward was earned."""
    lines, last, earned = [], None, 0.0
    for turn in turns:
        number, parent = turn["call"], turn["parent"]
        if number != last and number and parent != number - 1:
            where = "a new conversation" if parent is None else f"continues call {parent}"
            lines.append(f"-- call {number}: {where}")
        if turn["earned"] != earned:
            earned = turn["earned"]
            lines.append(f"-- reward {earned:g} so far")
        said = f"{turn['role']}: {turn['text']}" if turn["text"] or not turn["tools"] else ""
        calls = [f"{turn['role']} calls {t['name']}({t['arguments']})" for t in turn["tools"]]
        lines += [line for line in (said, *calls) if line]
        last = number
    return "\n".join(lines)


def find_evaluated(
    folder: RunFolder, task: str, *, where: str | None, step: int | None, limit: int
) -> list[RolloutView]:
    """The samples of an evaluation, `eval/NAME`, after that step or the newest one."""
    if where is not None:
        raise UserError(
            f"where: got {where!r} with {task}, allowed: --step; it is not in the journal"
        )
    name = task.removeprefix(EVALUATED)
    by_task = evaluations(folder)
    if name not in by_task:
        allowed = ", ".join(f"{EVALUATED}{known}" for known in sorted(by_task))
        raise UserError(f"task: got {task!r}, allowed: {allowed or 'no evaluation ran'}")
    files_by_step = dict(by_task[name])
    step = max(files_by_step) if step is None else step
    if step not in files_by_step:
        raise UserError(f"step: got {step}, allowed: {', '.join(map(str, files_by_step))}")
    lines = read_samples(files_by_step[step])
    return [
        _evaluated(line, f"{task} {number}", task, step)
        for number, line in enumerate(lines[:limit])
    ]


def _evaluated(line: dict[str, Any], rollout_id: str, task: str, step: int) -> RolloutView:
    version, length = line["policy_version"], line["response_length"]
    none = np.zeros(0)
    calls = [
        ModelCall(
            number=call["number"],
            parent=call["parent"],
            context_ids=none,
            token_ids=none,
            logprobs=none,
            segments=(),
            finish_reason=call["finish_reason"],
            messages=tuple(call["messages"]),
            answer=call["answer"],
        )
        for call in line.get("calls", ())
    ]
    return RolloutView(
        rollout_id=rollout_id,
        group_id="",
        task=task,
        prompt_id=line["prompt_id"],
        prompt=line["prompt"],
        response=line["prediction"],
        gt_answer=line["gold"],
        reward=line["reward"],
        parts={},
        format_ok=line["format_valid"],
        answer_ok=line["ans_valid"],
        note=line["note"],
        versions=[] if version is None else [(version, length)],
        num_tokens=length,
        temperature=line.get("temperature", 0.0),
        finish_reason=line["finish_reason"],
        status="failed" if line["error"] else "completed",
        state="evaluated",
        step=step,
        error=line["error"],
        turns=turns_of(calls),
    )


def show_rollouts(
    folder: RunFolder,
    *,
    where: str | None = None,
    step: int | None = None,
    task: str | None = None,
    limit: int = DEFAULT_LIMIT,
    as_json: bool = False,
    console: Console | None = None,
) -> int:
    """Print the rollouts that match, for a person or as one JSON object per line; return their number."""
    console = console or files.console()
    samples = read_rollouts(folder, where=where, step=step, task=task, limit=limit)
    if as_json:
        for sample in samples:
            console.file.write(json.dumps(sample.plain()) + "\n")
        console.file.flush()
        return len(samples)
    for sample in samples:
        _print(console, sample)
    if not samples:
        console.print("no sample matches", style="dim")
    elif len(samples) == limit:
        console.print(f"the first {limit}; more with --limit", style="dim", highlight=False)
    return len(samples)


def _renderer(folder: RunFolder) -> Render | None:
    """The decoder of the run's tokenizer; None if the tokenizer is not on this machine."""
    try:
        model = folder.config().model
        # a look executes no code and asks no server
        tokenizer = load_tokenizer(model.tokenizer or model.path, download=False)
    except UserError:
        return None
    return ChatTemplate(tokenizer).decode_prompt


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(key): _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def message_text(message: dict[str, Any]) -> str:
    """The text of one chat message; join content that comes in pieces."""
    content = message.get("content", "")
    if isinstance(content, str):
        return content
    pieces: Iterable[Any] = content if isinstance(content, Sequence) else [content]
    return "\n".join(
        str(piece.get("text", piece)) if isinstance(piece, dict) else str(piece) for piece in pieces
    )


def _print(console: Console, sample: RolloutView) -> None:
    console.print(Rule(Text(sample.rollout_id, style="bold"), align="left", style="dim"))
    if sample.rendered_prompt is not None:
        _line(console, "prompt", sample.rendered_prompt, "cyan")
    else:
        for message in sample.prompt:
            _line(console, str(message.get("role", "prompt")), message_text(message), "cyan")
    if sample.turns:
        _line(console, "turns", transcript(sample.turns), "")
    else:
        _line(console, "response", sample.response, "")
    if sample.gt_answer is not None:
        _line(console, "expected", sample.gt_answer, "")
    if sample.reward is None:
        _line(console, "reward", "none", "dim")
    else:
        parts = ", ".join(f"{name} {value:g}" for name, value in sample.parts.items())
        text = f"{sample.reward:g}{f' ({parts})' if parts else ''}"
        note = f"  {sample.note}" if sample.note else ""
        _line(console, "reward", f"{text}{note}", "green" if sample.reward > 0 else "red")
    _line(console, "tokens", f"{sample.num_tokens} ({sample.finish_reason or 'not ended'})", "")
    versions = ", ".join(f"v{version} x{length}" for version, length in sample.versions)
    _line(console, "versions", versions or "none", "")
    _line(console, "fate", sample.fate, "yellow" if sample.state == "dropped" else "")
    if sample.error:
        _line(console, "error", sample.error, "red")
    console.print()


def _line(console: Console, name: str, value: str, style: str) -> None:
    """Print one labelled value; further lines of it are indented.

    As segments: a Text of a hundred thousand lines is copied line by line, many times.
    """
    label = Segment(f"{' '.join(name.split()):>9}  ", console.get_style("dim"))
    indented = Segment(value.replace("\n", "\n" + " " * 11), console.get_style(style))
    console.print(Segments([label, indented, Segment.line()]), soft_wrap=True)

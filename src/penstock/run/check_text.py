"""What `penstock check` prints: prompts, responses with their scores, placement, memory and time."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table
from rich.text import Text

from penstock.inspection.summary import duration
from penstock.inspection.track.console import finding_table
from penstock.run.check import Rehearsal, memory, placement
from penstock.types import Group, Rollout

_RESPONSES = 3  # of each prompt: the best, the worst, one between
_CHARACTERS = 1200


def print_rehearsal(console: Console, seen: Rehearsal) -> int:
    """Print what was seen; return 1 if a response could not be sampled or scored, else 0."""
    for group in seen.groups:
        _print_group(console, seen.prompts[group.group_id], group)
    table = Table.grid(padding=(0, 2))
    table.add_column(style="dim", justify="right", no_wrap=True)
    table.add_column(overflow="fold")
    for task, lengths in seen.lengths.items():
        table.add_row(f"tasks.{task}", Text(lengths))
    for task, here in seen.cut.items():
        run = seen.config.task_sampling(task)
        said = (
            f"{here.num_generations} responses a prompt of at most {here.max_tokens} tokens here, "
            f"{run.num_generations} of {run.max_tokens} in the run: this machine is slow"
        )
        table.add_row("", Text(said))
    table.add_row("placement", Text("; ".join(placement(seen))))
    table.add_row("memory", Text("; ".join(memory(seen))))
    if seen.groups and not seen.errors:
        table.add_row("a step", Text(_step(seen)))
        table.add_row("the run", Text(_run(seen)))
    console.print(table)
    if seen.errors:
        console.print()
        said = f"{len(seen.errors)} responses failed, the first one: "
        console.print(Text.assemble((said, "bold red"), seen.errors[0]), soft_wrap=True)
    if found := seen.findings():
        console.print()
        console.print(Text("If the run stays like these prompts:", style="dim"))
        console.print(finding_table(found))
    return int(bool(seen.errors))


def _print_group(console: Console, prompt: str, group: Group) -> None:
    expected = "" if group.prompt.gt_answer is None else f"   expected {group.prompt.gt_answer}"
    console.print(Text.assemble((group.group_id, "bold"), (expected, "dim")))
    console.print(Text(_clip(prompt), style="cyan"), soft_wrap=True)
    ranked = sorted(group.rollouts, key=_worth, reverse=True)
    shown = (
        ranked if len(ranked) <= _RESPONSES else [ranked[0], ranked[len(ranked) // 2], ranked[-1]]
    )
    for rollout in shown:
        console.print(
            Text.assemble((f"  {_judged(rollout)}  ", "bold"), _clip(rollout.text) or "(empty)"),
            soft_wrap=True,
        )
    console.print()


def _worth(rollout: Rollout) -> float:
    return float("-inf") if rollout.score is None else rollout.score.value


def _judged(rollout: Rollout) -> str:
    if rollout.score is None:
        return "failed"
    cut = ", cut off" if rollout.finish_reason == "length" else ""
    note = f", {rollout.score.note}" if rollout.score.note else ""
    return f"reward {rollout.score.value:g} ({len(rollout.response_ids)} tokens{cut}{note})"


def _clip(text: str) -> str:
    return (
        text if len(text) <= _CHARACTERS else f"{text[:_CHARACTERS]} [cut: {len(text)} characters]"
    )


def _step(seen: Rehearsal) -> str:
    generating, training, both = seen.seconds_per_step()
    tokens = (
        seen.mean_length * seen.config.train.groups_per_step * seen.config.sampling.num_generations
    ) * seen.stretch
    said = f"{tokens:,.0f} tokens are generated in {duration(generating)}"
    if seen.token_s is None:
        return f"at least {duration(both)}: {said}; training was not measured"
    return f"about {duration(both)}: {said} and trained in {duration(training)}"


def _run(seen: Rehearsal) -> str:
    seconds = seen.seconds_per_step()[2] * seen.total_steps
    length = "are as long as they may be" if seen.stretch > 1 else "keep their length"
    return f"{seen.total_steps} steps, about {duration(seconds)} without evaluations, if responses {length}"

"""Rules about the prompts, from facts that are known at the start."""

from __future__ import annotations

from penstock.config import TaskDataConfig
from penstock.data.identity import OVERLAP, TEMPLATE
from penstock.inspection.findings.observed import Observed
from penstock.types import Finding


def skipped(o: Observed) -> Finding | None:
    """Prompts are left out because they are too long."""
    tasks: dict[str, TaskDataConfig] = {
        f"tasks.{name}": task for name, task in o.config.tasks.items()
    }
    tasks |= {f"eval.tasks.{name}": task for name, task in o.config.eval.tasks.items()}
    for key, task in tasks.items():
        fact = o.fact(f"{key}.data")
        if left := fact.get("skipped", 0):
            kept, limit = fact["prompts"], task.max_prompt_tokens
            return Finding(
                name="skipped",
                what="Prompts are left out because they are too long",
                since=0,
                evidence=f"{left} of {left + kept} prompts of {key} are longer than {limit} tokens, up to {fact['longest']}",
                advice="Allow longer prompts",
                change=(f"{key}.max_prompt_tokens={fact['longest']}",),
            )
    return None


def no_template(o: Observed) -> Finding | None:
    """The tokenizer has no chat template, as that of a base model."""
    if o.fact(TEMPLATE).get("present", 1):
        return None
    return Finding(
        name="no_template",
        what="The tokenizer has no chat template: the model gets the text of the messages alone",
        since=0,
        evidence="Messages are joined by line breaks, without roles",
        advice="Right for a base model; for a chat model name a tokenizer that has its template: model.tokenizer=NAME",
    )


def overlap(o: Observed) -> Finding | None:
    """Evaluation problems are trained on."""
    for name, fact in o.facts_of(OVERLAP):
        judged, trained = name.removeprefix(OVERLAP).split(" and ")
        return Finding(
            name="overlap",
            what="Evaluation problems are also training prompts: their score may show what was learned by heart",
            since=0,
            evidence=f"{fact['found']} of {fact['problems']} problems of {judged} are prompts of {trained}",
            advice=f"Take other problems for {judged}",
        )
    return None

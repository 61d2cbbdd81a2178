"""Settings that are legal but probably a mistake: one line for each, shown when a run starts.

What cannot work at all is refused in `tree.py` and in the checks before a run.
"""

from __future__ import annotations

from penstock.config import Config


def doubts(config: Config) -> list[str]:
    """Return a line for each setting that is legal but probably a mistake."""
    found = []
    for task in config.tasks:
        produce, sampling = config.task_produce(task), config.task_sampling(task)
        if sampling.cuts_tokens:
            found.append(
                f"tasks.{task}: top_k {sampling.top_k} and top_p {sampling.top_p} cut tokens that the trainer "
                "counts, and importance weights have to make up for it: leave both off, or watch mismatch/kl"
            )
        if (
            produce.enable_partial_rollout
            and produce.max_staleness == 0
            and config.sync.every_steps == 1
        ):
            found.append(
                f"tasks.{task}: enable_partial_rollout has no effect with max_staleness 0 and "
                "sync.every_steps 1: every partial response has expired before it can continue"
            )
    if config.launch.colocate and config.launch.kind == "inline":
        found.append(
            "launch.colocate has no effect with launch.kind inline: one process holds both sides"
        )
    trained = [name for name, task in config.tasks.items() if task.system_prompt]
    found += [
        f"eval.tasks.{name}: evaluated without a system prompt, but trained with that of "
        f"tasks.{trained[0]}: set eval.tasks.{name}.system_prompt"
        for name, task in config.eval.tasks.items()
        if trained and not task.system_prompt
    ]
    return found

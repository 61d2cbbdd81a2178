"""Rules about learning: rewards without a signal, responses that degenerate, updates that go wrong."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator

from penstock.config import TaskConfig
from penstock.inspection.findings.observed import WINDOW, Observed, mean
from penstock.types import Finding

_ALL = 0.98  # a share of groups or responses from which a step has practically no exception
_MOST = 0.8  # a share that is too high, though not everything is lost
_SHOWN = 160  # characters of an example
_SOLVED = 0.9
_FORMS = {  # reward -> what a response without the right form lacks, and how to ask for it
    "boxed": (
        "have no \\boxed{}",
        "Reason step by step and put the final answer in \\\\boxed{}.",
    ),
    "think_answer_tags": (
        "do not have the form <think>...</think><answer>...</answer>",
        "Reason in <think></think>, then give only the final answer in <answer></answer>.",
    ),
    "code": ("have no fenced Python block", "Answer with one Python program in a fenced block."),
}


# -- no signal ---------------------------------------------------------------------------------


def equal_rewards(o: Observed) -> Finding | None:
    """Nothing can be learned: responses that are compared have the same reward."""
    if o.settings.overlong_penalty:  # length alone may teach
        return None
    spread, name = o.now("reward/std"), "groups/zero_variance"
    if o.settings.group_relative:
        since = o.since(name, lambda share: share >= _ALL)
    else:
        since = o.since("reward/std", lambda std: std < 1e-9)
    if since is None:
        return None
    reward = o.now("reward/mean")
    if spread < 1e-9:
        what = f"Nothing can be learned: all rewards are {reward:g}"
    else:
        what = "Nothing can be learned: all responses to a prompt have the same reward"
    cause, advice, change = _cause(o)
    evidence = f"Steps {since} to {o.last_step}: {cause}{_example(o)}"
    return Finding(
        name="equal_rewards",
        what=what,
        since=since,
        evidence=evidence,
        advice=advice,
        change=change,
    )


def _cause(o: Observed) -> tuple[str, str, tuple[str, ...]]:
    """Return why rewards are equal: (the figures, what to do, settings)."""
    form, right, cut = o.now("format/mean"), o.now("accuracy/mean"), o.now("truncated/share")
    if o.now("empty/share") >= _MOST:
        return _empty(o)
    if cut >= _MOST:
        return f"{cut:.0%} of the responses are cut off at max_tokens", *_longer(o)
    if form <= 1 - _MOST:
        for task, lacks, ask in _forms(o):
            return (
                f"{1 - form:.0%} of the responses {lacks}",
                "Ask for the form in the prompt",
                (f'tasks.{task}.system_prompt="{ask}"',),
            )
    if right >= _ALL:
        return (
            f"{right:.0%} of the answers are right",
            "Take harder prompts, or stop: this data is learned",
            (),
        )
    if right <= 1 - _ALL:
        more = o.config.sampling.num_generations * 2
        return (
            f"{right:.0%} of the answers are right",
            "Take easier prompts or a stronger model, or sample more responses to each prompt",
            (f"sampling.num_generations={more}",),
        )
    if _has_improved(o):
        return (
            f"the mean reward rose from {o.at_start('reward/mean'):.3g} to {o.now('reward/mean'):.3g}",
            "Take harder prompts, or stop if no response can earn more",
            (),
        )
    return (
        f"the mean reward is {o.now('reward/mean'):.3g}",
        f"Check the reward on samples of the run: penstock rollouts {o.run}",
        (),
    )


def _forms(o: Observed) -> Iterator[tuple[str, str, str]]:
    """Yield (task, what a response lacks, how to ask for it) of tasks whose reward asks for a form."""
    for name, task in o.config.tasks.items():
        for reward in task.rewards:
            if reward.type in _FORMS and _asks_for_form(task):
                yield name, *_FORMS[reward.type]


def _asks_for_form(task: TaskConfig) -> bool:
    return all(reward.options.get("format", "gate") != "ignore" for reward in task.rewards)


def _example(o: Observed) -> str:
    if o.batch is None or not o.batch.groups:
        return ""
    group = o.batch.groups[0]
    answer = group.prompt.gt_answer
    expected = "" if answer is None else f", expected answer {_short(answer)}"
    return f"; for example the response {_short(group.rollouts[0].text)}{expected}"


def _short(text: str) -> str:
    """Quote a text in one line; of a long one, its end, where answers are."""
    line = " ".join(text.split())
    return repr(line if len(line) <= _SHOWN else f"...{line[-_SHOWN:]}")


def refused_groups(o: Observed) -> Finding | None:
    """Dynamic sampling, or the user's rule, refuses nearly every group."""
    if not (o.settings.filter_groups or o.config.produce.is_valid_sample):
        return None
    wanted = o.config.train.groups_per_step
    since = o.since("produced/groups", lambda made: made >= 10 * wanted)
    if since is None:
        return None
    made, reward = o.now("produced/groups"), o.now("produced/reward")
    return Finding(
        name="refused_groups",
        what="Nearly every group is generated in vain: the validity rule refuses it",
        since=since,
        evidence=f"A step trains {wanted} groups and {made:.0f} are generated for it (mean reward {reward:.3g})",
        advice="Take prompts that the model answers right sometimes, or sample more responses to each",
        change=(f"sampling.num_generations={2 * o.config.sampling.num_generations}",),
    )


# -- responses ---------------------------------------------------------------------------------


def empty_responses(o: Observed) -> Finding | None:
    since = o.since("empty/share", lambda share: share >= _MOST)
    if since is None:
        return None
    cause, advice, change = _empty(o)
    return Finding(
        name="empty_responses",
        what="The responses are empty",
        since=since,
        evidence=f"Steps {since} to {o.last_step}: {cause}",
        advice=advice,
        change=change,
    )


def _empty(o: Observed) -> tuple[str, str, tuple[str, ...]]:
    share = o.now("empty/share")
    change = ("sampling.stop=[]",) if o.config.sampling.stop else ("sampling.min_tokens=8",)
    advice = "Look at the prompts as the model gets them (penstock check), then change the sampling"
    return f"{share:.0%} of the responses have no text", advice, change


def truncated(o: Observed) -> Finding | None:
    since = o.since("truncated/share", lambda share: share >= _MOST)
    if since is None:
        return None
    advice, change = _longer(o)
    limit = max(o.config.task_sampling(task).max_tokens for task in o.config.tasks)
    return Finding(
        name="truncated",
        what="The responses are cut off before they end",
        since=since,
        evidence=f"{o.now('truncated/share'):.0%} of the responses reach the limit of {limit} tokens",
        advice=advice,
        change=change,
    )


def _longer(o: Observed) -> tuple[str, tuple[str, ...]]:
    advice = "Let responses be longer, or check that the model ends its answers"
    own = [name for name, task in o.config.tasks.items() if "max_tokens" in task.sampling]
    keys = [f"tasks.{name}.sampling.max_tokens" for name in own] or ["sampling.max_tokens"]
    limits = [o.config.task_sampling(name).max_tokens for name in own]
    limits = limits or [o.config.sampling.max_tokens]
    pairs = zip(keys, limits, strict=True)
    return advice, tuple(f"{key}={2 * limit}" for key, limit in pairs)


def length_collapse(o: Observed) -> Finding | None:
    before = o.at_start("response_length/mean")
    since = o.since("response_length/mean", lambda length: length < before / 4)
    if since is None or _has_improved(o):
        return None
    return Finding(
        name="length_collapse",
        what="The responses became short, and no better",
        since=since,
        evidence=_from_to(o, "response_length/mean", "tokens"),
        advice="Look at what the reward pays for, then lower the learning rate",
        change=(_slower(o),),
    )


def length_explosion(o: Observed) -> Finding | None:
    before = o.at_start("response_length/mean")
    since = o.since("response_length/mean", lambda length: length > 3 * before)
    if since is None or _has_improved(o):
        return None
    return Finding(
        name="length_explosion",
        what="The responses became long, and no better",
        since=since,
        evidence=_from_to(o, "response_length/mean", "tokens"),
        advice="Give long responses a penalty",
        change=("algorithm.overlong_penalty=1.0",),
    )


def _has_improved(o: Observed) -> bool:
    """Return whether the reward is higher than at the start."""
    return o.now("reward/mean") > o.at_start("reward/mean") + 0.01


def _from_to(o: Observed, name: str, unit: str) -> str:
    rewards = f"the reward from {o.at_start('reward/mean'):.3f} to {o.now('reward/mean'):.3f}"
    return f"From {o.at_start(name):.3g} to {o.now(name):.3g} {unit}, {rewards}"


def entropy_collapse(o: Observed) -> Finding | None:
    """The policy answers always the same, though it has not learned the task."""
    start = o.at_start("entropy/mean")
    since = o.since("entropy/mean", lambda entropy: entropy <= 0.02 and entropy <= 0.1 * start)
    score = o.now("accuracy/mean")
    score = o.now("reward/mean") if math.isnan(score) else score
    if since is None or score >= _SOLVED or not o.now("groups/zero_variance") >= 0.5:
        return None
    return Finding(
        name="entropy_collapse",
        what="The policy gives always the same answers, and many are wrong",
        since=since,
        evidence=f"{_from_to(o, 'entropy/mean', 'nats of entropy a token')}; "
        f"{o.now('groups/zero_variance'):.0%} of the groups have no variance",
        advice="Clip rises of rare tokens less, and go back to a checkpoint before the collapse",
        change=("algorithm.clip_high=0.28", _slower(o)),
    )


# -- updates -----------------------------------------------------------------------------------


def bad_gradients(o: Observed) -> Finding | None:
    """Gradients that are not finite, or are again and again far above the usual."""
    recent = o.rows[-50:]
    skipped = [int(row["step"]) for row in recent if (row.get("updates/skipped") or 0) > 0]
    if skipped:
        return Finding(
            name="bad_gradients",
            what="Updates were skipped because their gradient was not finite",
            since=skipped[0],
            evidence=f"{len(skipped)} of the last {len(recent)} steps, the newest is step {skipped[-1]}",
            advice="Lower the learning rate",
            change=(_slower(o),),
        )
    norms = [value for value in o.newest("grad_norm", 50) if value > 0]
    if len(norms) < 4 * WINDOW:
        return None
    usual = statistics.median(norms)
    spikes = [int(row["step"]) for row in recent if (row.get("grad_norm") or 0) > 10 * usual]
    if len(spikes) < 3:
        return None
    return Finding(
        name="bad_gradients",
        what="The gradient is again and again far above the usual",
        since=spikes[0],
        evidence=f"In {len(spikes)} of the last {len(recent)} steps it was above 10 times its median of {usual:.3g}, "
        f"up to {max(norms):.3g}",
        advice="Lower the learning rate",
        change=(_slower(o),),
    )


def lost_updates(o: Observed) -> Finding | None:
    """Updates are too small for the number format of the weights."""
    since = o.since("update/arrived", lambda share: share < 0.1, window=2 * WINDOW)
    if since is None or not any(value > 0 for value in o.newest("grad_norm", 2 * WINDOW)):
        return None
    plain = o.config.train.masters == "plain"
    return Finding(
        name="lost_updates",
        what="The updates do not reach the weights: they are lost in the rounding",
        since=since,
        evidence=f"{o.now('update/arrived'):.0%} of an update arrives",
        advice="Start the masters inside the rounding cells" if plain else "Take larger updates",
        change=("train.masters=dithered" if plain else f"train.lr={10 * o.config.train.lr:.3g}",),
    )


def kl_drift(o: Observed) -> Finding | None:
    """The policy leaves its reference, and the reward does not rise any more."""
    since = o.since("kl/mean", lambda kl: kl > 0.3)
    rewards = o.newest("reward/mean", 20)
    if since is None or len(rewards) < 20:
        return None
    if mean(rewards[-10:]) > mean(rewards[-20:-10]) + 0.01:
        return None
    return Finding(
        name="kl_drift",
        what="The policy moves away from its reference, and gains nothing by it",
        since=since,
        evidence=_from_to(o, "kl/mean", "nats of KL a token"),
        advice="Hold it closer to the reference",
        change=(f"algorithm.kl_beta={max(2 * o.settings.kl_beta, 1e-3):.3g}",),
    )


def _slower(o: Observed) -> str:
    return f"train.lr={o.config.train.lr / 2:.3g}"

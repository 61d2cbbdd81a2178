"""The table of findings: when something is wrong with a run, how it shows, and which setting to change.

A row is a condition and four texts. The condition returns the figures that the texts need, or None. Texts
may also name any metric, "{reward/mean:.3f}", which is its mean over the newest steps, and its mean over
the first steps, "{first reward/mean}". A new finding is one row and a case in tests/inspection/findings.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from penstock.config import TaskDataConfig
from penstock.data.identity import MACHINE, OVERLAP, TEMPLATE
from penstock.files import pasted
from penstock.inspection.findings.observed import WINDOW, Observed, mean
from penstock.inspection.track.logs import Finding
from penstock.store.space import LONG_LOG, size_text

Figures = dict[str, Any]  # for the texts; always with `since`; `change` stands in for the row's

_ALL = 0.98  # a share of groups or responses from which a step has practically no exception
_MOST = 0.8  # a share that is too high, though not everything is lost
_SOLVED = 0.9  # an accuracy from which equal answers are no illness
_LONG = 20  # steps over which shares of time and of groups are taken
_GRADIENTS = 50  # steps in which bad gradients are counted
_WORTH = 0.1  # a remedy that saves a smaller share of the time is not offered
_SHOWN = 160  # characters of an example
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


@dataclass(slots=True, frozen=True)
class Rule:
    """One row of the table."""

    name: str
    condition: Callable[[Observed], Figures | None]
    what: str  # one sentence without a full stop
    evidence: str  # the figures that show it
    advice: str = "{advice}"  # what to do
    change: tuple[str, ...] | Callable[[Observed], tuple[str, ...]] = ()  # settings to paste
    after: int = WINDOW  # steps that a run has before the condition can hold


class _Texts(dict[str, Any]):
    """The values that texts of a row may name: figures of its condition, settings and metrics."""

    def __init__(self, o: Observed, figures: Figures) -> None:
        staleness = o.config.produce.max_staleness
        super().__init__(
            last=o.last_step,
            run=o.run,
            slower=o.config.train.lr / 2,
            groups=o.config.train.groups_per_step,
            more_responses=2 * o.config.sampling.num_generations,
            staleness=staleness,
            lower_staleness=staleness // 2,
            higher_staleness=staleness + 1,
            higher_beta=max(2 * o.settings.kl_beta, 1e-3),
            limit=max(o.config.task_sampling(task).max_tokens for task in o.config.tasks),
            producers_wait=o.share("time/producer_wait_s", _LONG),
            looked_at=min(len(o.rows), _GRADIENTS),
        )
        self.update(figures)
        self._observed = o

    def __missing__(self, name: str) -> float:
        at_start = name.removeprefix("first ")
        return self._observed.now(name) if at_start == name else self._observed.at_start(at_start)


def find(observed: Observed, rules: Sequence[Rule] | None = None) -> list[Finding]:
    """What is wrong with a run now, the worst first; one finding for each remedy.

    rules: None for all of them.
    """
    findings: list[Finding] = []
    for rule in RULES if rules is None else rules:
        finding = _apply(rule, observed) if len(observed.rows) >= rule.after else None
        if finding is None:
            continue
        if finding.change and any(set(finding.change) <= set(other.change) for other in findings):
            continue  # another finding has already said so
        findings.append(finding)
    return findings


def _apply(rule: Rule, o: Observed) -> Finding | None:
    try:
        figures = rule.condition(o)
        if figures is None:
            return None
        values = _Texts(o, figures)
        change = rule.change if isinstance(rule.change, tuple) else rule.change(o)
        return Finding(
            name=rule.name,
            what=rule.what.format_map(values),
            since=figures["since"],
            evidence=rule.evidence.format_map(values),
            advice=rule.advice.format_map(values),
            change=figures.get("change") or tuple(text.format_map(values) for text in change),
        )
    except Exception as error:  # advice must never end a run: a broken rule becomes a finding
        return Finding(
            name=f"broken_rule_{rule.name}",
            what=f"A check of Penstock failed: {rule.name}",
            since=o.last_step,
            evidence=f"{type(error).__name__}: {error}",
            advice="The run is not affected; please report it",
        )


def _held(
    name: str,
    holds: Callable[[Observed, float], bool],
    unless: Callable[[Observed], bool] = lambda o: False,
) -> Callable[[Observed], Figures | None]:
    """The condition that a metric's mean over some steps holds until now."""

    def condition(o: Observed) -> Figures | None:
        since = o.since(name, lambda value: holds(o, value))
        return None if since is None or unless(o) else {"since": since}

    return condition


# -- no signal ---------------------------------------------------------------------------------


def _equal_rewards(o: Observed) -> Figures | None:
    """Nothing can be learned: responses that are compared have the same reward."""
    if o.settings.overlong_penalty:  # length alone may teach
        return None
    if o.settings.group_relative:
        since = o.since("groups/zero_variance", lambda share: share >= _ALL)
    else:
        since = o.since("reward/std", lambda std: std < 1e-9)
    if since is None:
        return None
    which = "all responses to a prompt have the same reward"
    if o.now("reward/std") < 1e-9:
        which = f"all rewards are {o.now('reward/mean'):g}"
    cause, advice, change = _cause(o)
    if o.batch is not None and o.batch.groups:
        group = o.batch.groups[0]
        cause += f"; for example the response {_quote(group.rollouts[0].text)}"
        if group.prompt.gt_answer is not None:
            cause += f", expected answer {_quote(group.prompt.gt_answer)}"
    return {"since": since, "which": which, "cause": cause, "advice": advice, "change": change}


def _cause(o: Observed) -> tuple[str, str, tuple[str, ...]]:
    """Why rewards are equal: the figures, what to do, settings."""
    form, right, cut = o.now("format/mean"), o.now("accuracy/mean"), o.now("truncated/share")
    empty, reward = o.now("empty/share"), o.now("reward/mean")
    if empty >= _MOST:
        return f"{empty:.0%} of the responses have no text", _LOOK_AT_PROMPTS, _other_sampling(o)
    if cut >= _MOST:
        return f"{cut:.0%} of the responses are cut off at max_tokens", _LET_GROW, _longer(o)
    if form <= 1 - _MOST and (missed := _missed_form(o)):
        lacks, change = missed
        return f"{1 - form:.0%} of the responses {lacks}", "Ask for the form in the prompt", change
    if right >= _ALL:
        advice = "Take harder prompts, or stop: this data is learned"
        return f"{right:.0%} of the answers are right", advice, ()
    if right <= 1 - _ALL:
        advice = "Take easier prompts or a stronger model, or sample more responses to each prompt"
        change = (f"sampling.num_generations={2 * o.config.sampling.num_generations}",)
        return f"{right:.0%} of the answers are right", advice, change
    if _has_improved(o):
        advice = "Take harder prompts, or stop if no response can earn more"
        rise = f"from {o.at_start('reward/mean'):.3g} to {reward:.3g}"
        return f"the mean reward rose {rise}", advice, ()
    advice = f"Check the reward on samples of the run: penstock rollouts {pasted(o.run)}"
    return f"the mean reward is {reward:.3g}", advice, ()


def _missed_form(o: Observed) -> tuple[str, tuple[str, ...]] | None:
    """What responses lack, and a system prompt, for the first task whose reward asks for a form."""
    for name, task in o.config.tasks.items():
        for reward in task.rewards:
            ignored = any(other.options.get("format") == "ignore" for other in task.rewards)
            if reward.type in _FORMS and not ignored:
                lacks, request = _FORMS[reward.type]
                return lacks, (f'tasks.{name}.system_prompt="{request}"',)
    return None


def _quote(text: str) -> str:
    """Quote a text in one line; of a long one, its end, where answers are."""
    line = " ".join(text.split())
    return repr(line if len(line) <= _SHOWN else f"...{line[-_SHOWN:]}")


# -- responses ---------------------------------------------------------------------------------

_LOOK_AT_PROMPTS = (
    "Look at the prompts as the model gets them (penstock check), then change the sampling"
)
_LET_GROW = "Let responses be longer, or check that the model ends its answers"


def _other_sampling(o: Observed) -> tuple[str, ...]:
    return ("sampling.stop=[]",) if o.config.sampling.stop else ("sampling.min_tokens=8",)


def _longer(o: Observed) -> tuple[str, ...]:
    limits = {
        f"tasks.{name}.sampling.max_tokens": o.config.task_sampling(name).max_tokens
        for name, task in o.config.tasks.items()
        if "max_tokens" in task.sampling
    } or {"sampling.max_tokens": o.config.sampling.max_tokens}
    return tuple(f"{key}={2 * limit}" for key, limit in limits.items())


def _has_improved(o: Observed) -> bool:
    """Whether the reward is higher than at the start."""
    return o.now("reward/mean") > o.at_start("reward/mean") + 0.01


def _is_solved(o: Observed) -> bool:
    """Whether answers may be equal because they are right, or still differ."""
    score = o.now("accuracy/mean")
    score = o.now("reward/mean") if math.isnan(score) else score
    return score >= _SOLVED or not o.now("groups/zero_variance") >= 0.5


# -- updates -----------------------------------------------------------------------------------


def _skipped_updates(o: Observed) -> Figures | None:
    steps = o.steps_above("updates/skipped", 0, _GRADIENTS)
    if not steps:
        return None
    return {"since": steps[0], "number": len(steps), "newest": steps[-1]}


def _gradient_spikes(o: Observed) -> Figures | None:
    norms = [norm for norm in o.newest("grad_norm", _GRADIENTS) if norm > 0]
    if len(norms) < 4 * WINDOW:
        return None
    usual = statistics.median(norms)
    steps = o.steps_above("grad_norm", 10 * usual, _GRADIENTS)
    if len(steps) < 3:
        return None
    largest = max(norms)
    return {"since": steps[0], "number": len(steps), "usual": usual, "largest": largest}


def _lost_updates(o: Observed) -> Figures | None:
    """Updates are too small for the number format of the weights."""
    since = o.since("update/arrived", lambda share: share < 0.1, window=2 * WINDOW)
    if not any(norm > 0 for norm in o.newest("grad_norm", 2 * WINDOW)):
        return None
    if o.config.train.masters == "plain":
        advice, change = "Start the masters inside the rounding cells", "train.masters=dithered"
    else:
        advice, change = "Take larger updates", f"train.lr={10 * o.config.train.lr:.3g}"
    return None if since is None else {"since": since, "advice": advice, "change": (change,)}


def _still_rises(o: Observed) -> bool:
    """Whether the reward rises, or the run is too young to say."""
    rewards = o.newest("reward/mean", 20)
    return len(rewards) < 20 or mean(rewards[-10:]) > mean(rewards[-20:-10]) + 0.01


# -- the pipeline ------------------------------------------------------------------------------


def _failures(o: Observed) -> Figures | None:
    """Groups fail, most often because of the reward."""
    failed, completed = o.total("groups/failed", _LONG), o.total("produced/groups", _LONG)
    if failed < 3 or failed < 0.05 * (failed + completed):
        return None
    error = " ".join(o.last_failure().split())
    what = "Groups fail and are generated again"
    advice = f"Look into the logs of the workers: {o.run}/logs"
    if "reward" in error:
        what = "The reward fails"
        advice = "Mend the reward: penstock check shows its error with file and line"
    return {
        "since": o.steps_above("groups/failed", 0, _LONG)[0],
        "what": what,
        "counts": f"{failed:.0f} groups failed while {completed:.0f} were completed",
        "error": f"; the last error: {error[:200]}" if error else "",
        "advice": advice,
    }


def _mismatch(o: Observed) -> Figures | None:
    """Engine and trainer give the same tokens other probabilities."""
    fresh, staleness = not o.now("staleness/mean") > 0, o.config.produce.max_staleness
    bound = 0.01 if fresh else 0.05
    since = o.since("mismatch/kl", lambda kl: kl > bound)
    if since is None:
        return None
    advice, change = "Compute with more digits", ["model.dtype=float32"]
    if any(map(o.config.hides_cuts, o.config.tasks)):
        advice = "Sample from all tokens, as the trainer does"
        change = ["sampling.top_k=0", "sampling.top_p=1.0"]
    elif not fresh and staleness > 1:
        advice, change = "Train fresher samples", [f"produce.max_staleness={staleness // 2}"]
    elif o.settings.correction == "none":
        advice = "Weigh tokens by their importance"
        change = ["algorithm.correction.kind=token_truncate"]
    worth = o.now("importance/ess")
    weights = f"; the importance weights are worth {worth:.0%} of the samples"
    shown = "" if math.isnan(worth) else weights
    return {"since": since, "weights": shown, "advice": advice, "change": tuple(change)}


def _expired(o: Observed) -> Figures | None:
    """Groups become too old before a step takes them, and are generated again."""
    expired, completed = o.total("groups/expired", _LONG), o.total("produced/groups", _LONG)
    if not expired or expired < 0.2 * completed:
        return None
    advice = "Allow older samples"
    change = f"produce.max_staleness={o.config.produce.max_staleness + 1}"
    if o.config.produce.over_sample_threshold:
        advice, change = "Generate less ahead", "produce.over_sample_threshold=0.0"
    return {
        "since": o.steps_above("groups/expired", 0, _LONG)[0],
        "expired": expired,
        "completed": completed,
        "advice": advice,
        "change": (change,),
    }


def _needs_age(o: Observed) -> bool:
    """Whether the bound is narrow, or the producers work all the time."""
    narrow = o.config.produce.max_staleness < 2
    return narrow or not o.share("time/producer_wait_s", _LONG) >= 0.2


def _slow_reward(o: Observed) -> Figures | None:
    """The trainer waits, and a response waits longest for its reward."""
    reward_s, step_s = o.now("time/reward_s", _LONG), o.now("time/step_s", _LONG)
    if not (reward_s > 0.3 * step_s and o.share("time/consumer_wait_s", _LONG) > 0.3):
        return None
    return {"since": int(o.rows[-_LONG]["step"]), "reward_s": reward_s, "step_s": step_s}


def _trainer_idle(o: Observed) -> Figures | None:
    """Generation is the bottleneck, and there is a remedy."""
    waits, launch = o.share("time/consumer_wait_s", _LONG), o.config.launch
    spare, engines = _spare_devices(o), launch.num_producers
    sync = any(o.config.task_produce(task).strategy == "sync" for task in o.config.tasks)
    if not waits > 0.5:
        return None
    if sync or o.config.produce.max_staleness == 0:
        strategy = ("produce.strategy=async",) if sync else ()
        change = (*strategy, "produce.max_staleness=1")
        advice, left = "Generate the next step while this one trains", max(waits, 1 - waits)
    elif spare and launch.kind != "inline":
        change = (f"launch.num_producers={engines + spare}",)
        advice, left = "Start more engines", max(1 - waits, engines / (engines + spare))
    else:
        return None
    return _idle(o, waits, left, advice, change)


def _producer_idle(o: Observed) -> Figures | None:
    """Training is the bottleneck, and there is a remedy."""
    waits, launch = o.share("time/producer_wait_s", _LONG), o.config.launch
    copies, groups = o.config.train.parallel.copies, o.config.train.groups_per_step
    ranks = launch.num_consumers + _spare_devices(o)
    while ranks > launch.num_consumers and (ranks % copies or groups % (ranks // copies)):
        ranks -= 1
    if not waits > 0.6 or launch.kind == "inline" or ranks == launch.num_consumers:
        return None
    left = max(1 - waits, launch.num_consumers / ranks)
    return _idle(o, waits, left, "Train on more ranks", (f"launch.num_consumers={ranks}",))


def _idle(
    o: Observed, waits: float, left: float, advice: str, change: tuple[str, ...]
) -> Figures | None:
    """The figures of a side that waits, if the remedy saves enough; `left`: of a step's time."""
    if 1 - left < _WORTH or o.config.launch.colocate:
        return None
    step = o.now("time/step_s", _LONG)
    gain = f"a step of {step:.2g} s would take about {left * step:.2g} s"
    return {
        "since": int(o.rows[-_LONG]["step"]),
        "waits": waits,
        "advice": f"{advice}: {gain}",
        "change": change,
    }


def _spare_devices(o: Observed) -> int:
    """The GPUs, or on a machine without one the cores, that no worker uses."""
    machine, launch = o.fact(MACHINE), o.config.launch
    if not machine or launch.kind == "ray":
        return 0
    if machine.get("gpus") and o.config.model.device != "cpu":
        return max(0, int(machine["gpus"]) - launch.num_producers - launch.num_consumers)
    used = launch.num_producers * o.config.engine.threads
    used += launch.num_consumers * o.config.train.threads
    return max(0, int(machine.get("cpus", 0)) - used)


# -- before the first step ---------------------------------------------------------------------


def _full_disk(o: Observed) -> Figures | None:
    if o.disk is None or not o.disk.is_short:
        return None
    advice, change = "Make room", tuple[str, ...]()
    if o.config.checkpoint.keep > 1:
        advice, change = "Make room, or keep fewer checkpoints", ("checkpoint.keep=1",)
    return {"since": o.last_step, "disk": o.disk, "advice": advice, "change": change}


def _long_log(o: Observed) -> Figures | None:
    if o.disk is None or o.disk.log <= LONG_LOG:
        return None
    return {"since": o.last_step, "log": size_text(o.disk.log)}


def _skipped(o: Observed) -> Figures | None:
    tasks: dict[str, TaskDataConfig] = {f"tasks.{name}": t for name, t in o.config.tasks.items()}
    tasks |= {f"eval.tasks.{name}": task for name, task in o.config.eval.tasks.items()}
    for key, task in tasks.items():
        fact = o.fact(f"{key}.data")
        if fact.get("skipped"):
            whole, limit = fact["skipped"] + fact["prompts"], task.max_prompt_tokens
            return {"since": 0, **fact, "key": key, "whole": whole, "limit": limit}
    return None


def _overlap(o: Observed) -> Figures | None:
    for name in o.facts:
        if name.startswith(OVERLAP):
            judged, trained = name.removeprefix(OVERLAP).split(" and ")
            return {"since": 0, **o.fact(name), "judged": judged, "trained": trained}
    return None


_LOWER_RATE = ("train.lr={slower:.3g}",)
_REWARDS = "the reward from {first reward/mean:.3f} to {reward/mean:.3f}"
_LENGTHS = "From {first response_length/mean:.3g} to {response_length/mean:.3g} tokens, " + _REWARDS
_ENTROPIES = (
    "From {first entropy/mean:.3g} to {entropy/mean:.3g} nats of entropy a token, " + _REWARDS
)

# fmt: off
AFTER_STEP: tuple[Rule, ...] = (  # the worst first
    Rule("equal_rewards", _equal_rewards,
         "Nothing can be learned: {which}",
         "Steps {since} to {last}: {cause}"),
    Rule("refused_groups",
         _held("produced/groups", lambda o, number: number >= 10 * o.config.train.groups_per_step,
               unless=lambda o: not (o.settings.filter_groups or o.config.produce.is_valid_sample)),
         "Nearly every group is generated in vain: the validity rule refuses it",
         "A step trains {groups} groups and {produced/groups:.0f} are generated for it (mean reward {produced/reward:.3g})",
         "Take prompts that the model answers right sometimes, or sample more responses to each",
         ("sampling.num_generations={more_responses}",)),
    Rule("empty_responses", _held("empty/share", lambda o, share: share >= _MOST),
         "The responses are empty",
         "{empty/share:.0%} of the responses have no text",
         _LOOK_AT_PROMPTS, _other_sampling),
    Rule("truncated", _held("truncated/share", lambda o, share: share >= _MOST),
         "The responses are cut off before they end",
         "{truncated/share:.0%} of the responses reach the limit of {limit} tokens",
         _LET_GROW, _longer),
    Rule("failures", _failures, "{what}", "{counts}{error}", after=1),
    Rule("bad_gradients", _skipped_updates,
         "Updates were skipped because their gradient was not finite",
         "{number} of the last {looked_at} steps, the newest is step {newest}",
         "Lower the learning rate", _LOWER_RATE, after=1),
    Rule("bad_gradients", _gradient_spikes,
         "The gradient is again and again far above the usual",
         "In {number} of the last {looked_at} steps it was above 10 times its median of {usual:.3g}, up to {largest:.3g}",
         "Lower the learning rate", _LOWER_RATE, after=4 * WINDOW),
    Rule("lost_updates", _lost_updates,
         "The updates do not reach the weights: they are lost in the rounding",
         "{update/arrived:.0%} of an update arrives", after=2 * WINDOW),
    Rule("length_collapse",
         _held("response_length/mean", lambda o, length: length < o.at_start("response_length/mean") / 4,
               unless=_has_improved),
         "The responses became short, and no better", _LENGTHS,
         "Look at what the reward pays for, then lower the learning rate", _LOWER_RATE),
    Rule("length_explosion",
         _held("response_length/mean", lambda o, length: length > 3 * o.at_start("response_length/mean"),
               unless=_has_improved),
         "The responses became long, and no better", _LENGTHS,
         "Give long responses a penalty", ("algorithm.overlong_penalty=1.0",)),
    Rule("entropy_collapse",
         _held("entropy/mean", lambda o, nats: nats <= 0.02 and nats <= 0.1 * o.at_start("entropy/mean"),
               unless=_is_solved),
         "The policy gives always the same answers, and many are wrong",
         _ENTROPIES + "; {groups/zero_variance:.0%} of the groups have no variance",
         "Pay for entropy, clip rises of rare tokens less, and go back to a checkpoint before the collapse",
         ("algorithm.entropy_beta=0.01", "algorithm.entropy_target=0.1", "algorithm.clip_high=0.28", *_LOWER_RATE)),
    Rule("kl_drift", _held("kl/mean", lambda o, kl: kl > 0.3, unless=_still_rises),
         "The policy moves away from its reference, and gains nothing by it",
         "From {first kl/mean:.3g} to {kl/mean:.3g} nats of KL a token, " + _REWARDS,
         "Hold it closer to the reference", ("algorithm.kl_beta={higher_beta:.3g}",)),
    Rule("mismatch", _mismatch,
         "Engine and trainer disagree about the probability of tokens",
         "mismatch/kl is {mismatch/kl:.3g}{weights}"),
    Rule("full_disk", _full_disk,
         "The disk will soon be full, and the run will stop (what was journalled is never lost)",
         "{disk}", after=0),
    Rule("long_log", _long_log,
         "Another program has the journal open and lets its log grow",
         "journal.db-wal has {log}; SQLite empties it when nobody reads what is older",
         "End the program that reads journal.db", after=0),
    Rule("expired", _expired,
         "Groups are generated in vain: they are too old when their step comes",
         "{expired:.0f} groups expired while {completed:.0f} were completed, with a bound of {staleness}", after=1),
    Rule("too_stale",
         _held("staleness/mean", lambda o, age: age >= 0.9 * o.config.produce.max_staleness, unless=_needs_age),
         "The samples are as old as allowed, and nothing is gained by it",
         "Staleness {staleness/mean:.2f} of at most {staleness}, while the producers wait {producers_wait:.0%} of the time",
         "Train fresher samples at the same speed", ("produce.max_staleness={lower_staleness}",)),
    Rule("slow_reward", _slow_reward,
         "The reward is slow, and the trainer waits for it",
         "A response waits {reward_s:.2g} s for its reward; a step takes {step_s:.2g} s",
         "Make the reward faster, or generate further ahead of the trainer",
         ("produce.max_staleness={higher_staleness}",), after=_LONG),
    Rule("trainer_idle", _trainer_idle,
         "The trainer waits for responses most of the time",
         f"It waited {{waits:.0%}} of the last {_LONG} steps", after=_LONG),
    Rule("producer_idle", _producer_idle,
         "The producers wait for the trainer most of the time",
         f"It waited {{waits:.0%}} of the last {_LONG} steps", after=_LONG),
)
AT_START: tuple[Rule, ...] = (  # what they look at does not change in a run
    Rule("skipped", _skipped,
         "Prompts are left out because they are too long",
         "{skipped} of {whole} prompts of {key} are longer than {limit} tokens, up to {longest}",
         "Allow longer prompts", ("{key}.max_prompt_tokens={longest}",), after=0),
    Rule("no_template", lambda o: None if o.fact(TEMPLATE).get("present", 1) else {"since": 0},
         "The tokenizer has no chat template: the model gets the text of the messages alone",
         "Messages are joined by line breaks, without roles",
         "Right for a base model; for a chat model name a tokenizer that has its template: model.tokenizer=NAME", after=0),
    Rule("overlap", _overlap,
         "Evaluation problems are also training prompts: their score may show what was learned by heart",
         "{found} of {problems} problems of {judged} are prompts of {trained}",
         "Take other problems for {judged}", after=0),
)
# fmt: on
RULES = (*AFTER_STEP, *AT_START)

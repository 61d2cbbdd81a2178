"""`penstock check`: rehearse a run on three prompts, and estimate what the whole run will take.

Loads the data, renders the first prompts of the run as the model gets them, samples and scores a group
for each, and trains on them; then measures as much of a step as a few seconds allow. The updates are
thrown away. Writes nothing outside a temporary folder. `check_agents` tries the agents alone.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field, replace
from functools import partial

import numpy as np
from rich.console import Console
from rich.text import Text

from penstock.config import Config, EvalConfig, SamplingConfig
from penstock.config.demo import context_length
from penstock.config.source import with_overrides
from penstock.data.identity import MACHINE, measure
from penstock.data.sampler import Sampler
from penstock.engine.protocol import GenerationRequest, InferenceEngine, SamplingParams
from penstock.errors import UserError
from penstock.files import ScratchFolder, count
from penstock.inspection.findings import Observed, find
from penstock.inspection.findings.observed import WINDOW, looked_at_settings
from penstock.inspection.summary import duration
from penstock.inspection.track.console import fact_table, finding_table
from penstock.inspection.track.logs import Finding
from penstock.rollout.agent import AgentLoop
from penstock.rollout.agent.build import CheckResult, check_agent, try_agent
from penstock.rollout.agent.single_turn import ask_policy
from penstock.rollout.taught import taught
from penstock.run.fit import Fit, fitted
from penstock.run.job import open_agent, open_reward, open_trainer, serve_agents
from penstock.run.run_data import RunData, count_steps, duplicates, overlaps
from penstock.store.journal import Journal
from penstock.types import Batch, Group, Status
from penstock.waits import Waits
from penstock.workers.inline import opened_engine

_PROMPTS = 3
_FEW = 4  # responses to a prompt on a machine that would take too long for all of them
_LONGEST_S = 15.0  # a slower first sampling leaves out the update: a check takes half a minute
_MEASURED_S = 5.0  # what may be spent on each measurement, after a first pass that warms up
_SAMPLING_S = 6.0  # a machine that would sample longer makes fewer and shorter responses
_UPDATE_S = 15.0  # what a first update of two responses may promise for all; they take about half
_TRIED_TOKENS, _FEWEST_TOKENS = 3, 16
_SHOWN = 3  # responses of each prompt: the best, the worst, one between
_CHARACTERS = 1200  # of a text that is shown
_TRIED_RESPONSES = 24  # more at once take no longer for each of them


@dataclass(slots=True, kw_only=True)
class Rehearsal:
    """What was seen."""

    config: Config
    total_steps: int
    fit: Fit | None = None
    # group id -> the prompt as the model gets it
    prompts: dict[str, str] = field(default_factory=dict)
    groups: list[Group] = field(default_factory=list)  # of these prompts
    measured: list[Group] = field(default_factory=list)  # as many groups of a step as time allows
    lengths: dict[str, str] = field(default_factory=dict)  # task -> of its prompts, in words
    # task -> how it is sampled here, where that is less than in the run
    cut: dict[str, SamplingConfig] = field(default_factory=dict)
    whole_s: float = 0.0  # what the groups would take as the run samples them
    sampling_s: float = 0.0  # what they took
    token_s: float | None = None  # of training; None: not measured
    digest_s: float = 0.0  # of the new weights, once a step
    trained: int = 0  # groups of the last update
    metrics: dict[str, float] = field(default_factory=dict)  # of the last update
    facts: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)  # of agents and end tokens

    @property
    def errors(self) -> list[str]:
        rollouts = (rollout for group in self.groups for rollout in group.rollouts)
        return [rollout.error for rollout in rollouts if rollout.status is Status.FAILED]

    @property
    def responses(self) -> float:
        """Of a step, by the weights of the tasks."""
        tasks, number = self.config.tasks, self.config.task_sampling
        each = sum(task.weight * number(name).num_generations for name, task in tasks.items())
        all_weights = sum(task.weight for task in tasks.values())
        return self.config.train.groups_per_step * each / all_weights

    @property
    def stretch(self) -> float:
        """How many times longer a response may be in the run than here."""
        most = self.config.task_sampling
        shares = (most(task).max_tokens / here.max_tokens for task, here in self.cut.items())
        return max(shares, default=1.0)

    def findings(self) -> list[Finding]:
        """What would be found if the run stayed as these prompts are."""
        steps = range(1, WINDOW + 1)
        # what ends early here ends later in the run
        if self.cut or self.trained < len(self.groups) or not self.metrics:
            steps = range(0)
        return find(
            Observed(
                run="RUN",
                config=self.config,
                settings=looked_at_settings(self.config),
                rows=[{"step": step, **self.metrics} for step in steps],
                facts=self.facts,
                batch=Batch(step=1, groups=tuple(self.groups)),
            )
        )

    def seconds_per_step(self) -> tuple[float, float, float]:
        """(generation, training, both as they overlap) of one step."""
        config = self.config
        groups = self.measured or self.groups
        rollouts = sum(len(group.rollouts) for group in groups)
        share = self.responses / max(1, rollouts) * self.stretch
        if self.cut:
            generating = self.whole_s * config.train.groups_per_step / max(1, len(self.groups))
        else:
            generating = self.sampling_s * share
        generating /= config.launch.num_producers
        prompts = sum(len(group.prompt.token_ids) for group in groups)
        tokens = (_trained_tokens(groups) - prompts) * share
        tokens += prompts * config.train.groups_per_step / max(1, len(groups))
        training = (self.token_s or 0.0) * tokens / config.launch.num_consumers + self.digest_s
        in_turn = config.launch.colocate or config.produce.staleness_bound == 0
        return generating, training, generating + training if in_turn else max(generating, training)


def rehearse(config: Config) -> Rehearsal:
    """Sample, score and train on the first prompts of each task; a UserError names what cannot work."""
    return asyncio.run(_rehearse(fitted(config)))


async def _rehearse(fit: Fit) -> Rehearsal:
    config = fit.config
    data = await RunData.read(config)
    seen = Rehearsal(config=config, total_steps=count_steps(config, data.train))
    asked = {name: list(dataset.messages()) for name, dataset in data.evaluation.items()}
    seen.facts = measure(config, data.by_key()) | overlaps(data.train, asked)
    seen.notes += duplicates(data.train)
    seen.notes += data.chat.end_tokens.difference(data.chat.tokenizer)
    for name, dataset in data.train.items():
        lengths = sorted(len(dataset[index].token_ids) for index in range(min(len(dataset), 1000)))
        seen.lengths[name] = (
            f"{count(len(dataset), 'prompt')} of {lengths[0]} to {dataset.longest} tokens (median "
            f"{lengths[len(lengths) // 2]}); responses of at most {config.task_sampling(name).max_tokens}"
        )
    seen.fit = fit
    seen.notes += fit.choices
    for name, dataset in data.train.items():  # each reward that asks a server is tried once
        async with AsyncExitStack() as closing:
            sampling, task = config.task_sampling(name), config.tasks[name]
            await open_reward(task, sampling, dataset.is_chat, closing).probe()
    await _sample(seen, data)
    if not seen.errors and seen.sampling_s < _LONGEST_S:
        await _train(seen)
    return seen


async def _sample(seen: Rehearsal, data: RunData) -> None:
    config, each = seen.config, max(1, _PROMPTS // len(data.train))
    async with AsyncExitStack() as closing:
        engine = await closing.enter_async_context(opened_engine(config))
        scratch = closing.enter_context(ScratchFolder.new("check"))
        journal = Journal.open(scratch / "journal.db")
        closing.callback(journal.close)
        endpoint = await serve_agents(config.tasks.values(), closing)
        agents: dict[str, tuple[AgentLoop, Sampler]] = {}
        for name, dataset in data.train.items():
            whole = config.task_sampling(name)
            prompts = each * len(data.train)
            sampling, seconds = await bearable_sampling(
                engine, whole, dataset[0].token_ids, prompts
            )
            seen.whole_s = max(seen.whole_s, seconds)
            if sampling is not whole:
                seen.cut[name] = sampling
            agent = open_agent(
                config,
                name,
                sampling,
                data,
                closing,
                engine=engine,
                reward=open_reward(
                    config.tasks[name],
                    sampling,
                    dataset.is_chat,
                    closing,
                    ask_policy=partial(ask_policy, engine, data.chat),
                ),
                recorder=journal,
                endpoint=endpoint,
                note=seen.notes.append,
            )
            agent = await taught(config, name, agent, dataset, data.chat, closing, Waits())
            size = sampling.num_generations
            sampler = Sampler(dataset, task_name=name, prompt_repeat_k=size, seed=config.seed)
            agents[name] = agent, sampler
        drawn = range(each)
        seen.groups, seen.sampling_s = await _generate(agents, drawn)
        for group in seen.groups:
            seen.prompts[group.group_id] = data.chat.decode_prompt(group.prompt.token_ids)
        most = config.train.groups_per_step // len(agents)
        more = min(most, int(each * _MEASURED_S / max(seen.sampling_s, 1e-3)))
        if more > each and not seen.errors and not seen.cut:
            seen.measured, seen.sampling_s = await _generate(agents, range(each, each + more))


async def bearable_sampling(
    engine: InferenceEngine, sampling: SamplingConfig, prompt_ids: np.ndarray, prompts: int
) -> tuple[SamplingConfig, float]:
    """The sampling, and the seconds that it takes for so many prompts at once.

    On a machine where that is too long, the sampling has fewer and shorter responses.
    """
    few = min(_FEW, sampling.num_generations)
    few_s = await _token_s(engine, sampling, prompt_ids, prompts * few)  # warms the engine up
    count = prompts * sampling.num_generations
    tried = min(count, _TRIED_RESPONSES)
    tried_s = await _token_s(engine, sampling, prompt_ids, tried)
    whole_s = tried_s * count / tried * sampling.max_tokens
    if whole_s <= _SAMPLING_S:
        return sampling, whole_s
    tokens = max(_FEWEST_TOKENS, int(_SAMPLING_S / min(few_s, tried_s)))
    most = min(tokens, sampling.max_tokens)
    least = min(sampling.min_tokens, most)
    fewer = {"num_generations": few, "max_tokens": most, "min_tokens": least}
    return sampling.model_copy(update=fewer), whole_s


async def _token_s(
    engine: InferenceEngine, sampling: SamplingConfig, prompt_ids: np.ndarray, count: int
) -> float:
    """The seconds that `count` responses at once take for each of their tokens."""
    params = SamplingParams.from_config(sampling, max_tokens=_TRIED_TOKENS, min_tokens=0)
    tried = [
        GenerationRequest(request_id=f"try-{n}", prompt_ids=prompt_ids, sampling=params, seed=n)
        for n in range(count)
    ]
    started = time.monotonic()
    await asyncio.gather(*map(engine.generate, tried))
    return (time.monotonic() - started) / _TRIED_TOKENS


async def _generate(
    agents: Mapping[str, tuple[AgentLoop, Sampler]], cursors: range
) -> tuple[list[Group], float]:
    """The groups of these cursors of every task, and the seconds that they took."""
    groups, working = list[Group](), []
    started = time.monotonic()
    for agent, sampler in agents.values():
        drawn = [sampler.group_at(cursor) for cursor in cursors]
        groups += drawn
        working += [agent.generate_group(group.rollouts) for group in drawn]
    await asyncio.gather(*working)
    return groups, time.monotonic() - started


async def _train(seen: Rehearsal) -> None:
    """Do updates of growing size, as far as a few seconds allow, on one rank, and forget them.

    Where responses were cut, one group gives the time of a token, and nothing else is taken from an
    update. The first update warms up a GPU; a CPU needs none.
    """
    overrides = ["launch.num_consumers=1", "launch.kind=inline", "train.mini_batches=1"]
    overrides += [f"train.parallel.{axis}=1" for axis in ("tensor", "pipeline", "context")]
    small = with_overrides(
        seen.config, [*overrides, f"train.groups_per_step={len(seen.groups)}", "sync.kind=auto"]
    )
    first = seen.groups[0]
    pair = [replace(first, rollouts=first.rollouts[:2])]
    with ScratchFolder.new("check") as folder:
        async with open_trainer(small, folder, seen.total_steps) as workers:

            def is_short(groups: Sequence[Group], most: float) -> bool:
                return (seen.token_s or 0.0) * _trained_tokens(groups) < most

            async def update(step: int, groups: Sequence[Group]) -> None:
                started = time.monotonic()
                report = await workers.trainer.train(Batch(step=step, groups=tuple(groups)))
                seen.digest_s = report.metrics["time/digest_s"]
                seconds = time.monotonic() - started - seen.digest_s
                seen.token_s = seconds / _trained_tokens(groups)
                seen.trained, seen.metrics = len(groups), report.metrics

            from penstock.model.loading import choose_device  # imports torch

            if seen.cut and choose_device(seen.config.model.device, 0).type == "cpu":
                await update(1, [first])
                return
            await update(1, pair)
            enough = [first] if seen.cut else seen.groups
            await update(2, enough if is_short(enough, _UPDATE_S) else pair)
            fits = all(group.status is Status.COMPLETED for group in seen.measured)
            if seen.measured and fits and is_short(seen.measured, 2 * _MEASURED_S):
                await update(3, seen.measured)


def _trained_tokens(groups: Sequence[Group]) -> int:
    """The tokens that an update computes: each prompt once, and every response."""
    return sum(len(group.prompt.token_ids) + group.num_response_tokens for group in groups)


def _placement(seen: Rehearsal) -> Iterator[str]:
    """Yield which part runs on which device."""
    config, launch = seen.config, seen.config.launch
    gpus = json.loads(seen.facts[MACHINE])["gpus"]

    def device(index: int) -> str:
        if config.model.device not in ("auto", "cuda") or not gpus:
            return "cpu" if config.model.device == "auto" else config.model.device
        return f"cuda:{index % gpus}"

    if launch.kind == "ray":
        yield "by Ray, when the run starts"
        return
    ranks = ", ".join(device(rank) for rank in range(launch.num_consumers))
    yield f"trainer on {ranks}"
    if not config.num_engines:  # demonstrations alone
        return
    if config.engine.name == "openai":
        yield "engine: the servers that engine.options names"
        return
    before = 0 if launch.colocate else launch.num_consumers
    engines = ", ".join(device(before + index) for index in range(launch.num_producers))
    yield f"engine ({config.engine.name}) on {engines}"


async def check_agents(config: Config) -> dict[str, list[CheckResult]]:
    """Try the agent of every task that has one on its first prompt; return the findings by task."""
    tasks = {name: task for name, task in config.tasks.items() if task.agent != "single_turn"}
    if not tasks:
        raise UserError(
            "tasks: got no task with an agent, allowed: a task whose agent is a function"
        )
    for name, task in tasks.items():
        check_agent(f"tasks.{name}", task, config.task_sampling(name))
    config = config.model_copy(update={"eval": EvalConfig()})
    data = await RunData.read(config)
    return {
        name: await try_agent(
            f"tasks.{name}",
            task,
            config.task_sampling(name),
            data.chat,
            data.train[name][0],
            context_length(config.model.path),
        )
        for name, task in tasks.items()
    }


# ---- what the command prints


def print_rehearsal(console: Console, seen: Rehearsal) -> int:
    """Print what was seen; return 1 if a response could not be sampled or scored, else 0."""
    for group in seen.groups:
        _print_group(console, seen.prompts[group.group_id], group)
    table = fact_table()
    for task, lengths in seen.lengths.items():
        table.add_row(f"tasks.{task}", Text(lengths))
    for task, here in seen.cut.items():
        run = seen.config.task_sampling(task)
        said = (
            f"{here.num_generations} responses a prompt of at most {here.max_tokens} tokens here, "
            f"{run.num_generations} of {run.max_tokens} in the run: this machine is slow"
        )
        table.add_row("", Text(said))
    table.add_row("placement", Text("; ".join(_placement(seen))))
    if peak := seen.metrics.get("memory/peak_mib"):
        table.add_row("memory", f"the trainer's peak in this check {peak:,.0f} MiB")
    if seen.groups and not seen.errors:
        seconds = seen.seconds_per_step()[2] * seen.total_steps
        length = "are as long as they may be" if seen.stretch > 1 else "keep their length"
        whole = f"{count(seen.total_steps, 'step')}, about {duration(seconds)} without evaluations"
        table.add_row("a step", Text(_step(seen)))
        table.add_row("the run", Text(f"{whole}, if responses {length}"))
    console.print(table)
    if seen.fit is not None and seen.fit.devices:
        console.print(seen.fit.table())
    for note in seen.notes:
        console.print(Text(note), soft_wrap=True)
    if seen.errors:
        console.print()
        said = f"{count(len(seen.errors), 'response')} failed, the first one: "
        console.print(Text.assemble((said, "bold red"), seen.errors[0]), soft_wrap=True)
    if findings := seen.findings():
        console.print()
        console.print(Text("If the run stays like these prompts:", style="dim"))
        console.print(finding_table(findings))
    return int(bool(seen.errors))


def _print_group(console: Console, prompt: str, group: Group) -> None:
    expected = "" if group.prompt.gt_answer is None else f"   expected {group.prompt.gt_answer}"
    line = group.prompt.prompt_id.partition("@")[0].rpartition(":")[2]
    console.print(Text.assemble((f"{group.task}, line {line}", "bold"), (expected, "dim")))
    console.print(Text(_clip(prompt), style="cyan"), soft_wrap=True)
    ranked = sorted(
        group.rollouts,
        key=lambda rollout: float("-inf") if rollout.score is None else rollout.score.value,
        reverse=True,
    )
    shown = ranked if len(ranked) <= _SHOWN else [ranked[0], ranked[len(ranked) // 2], ranked[-1]]
    for rollout in shown:
        judged = "failed"
        if rollout.score is not None:
            cut = ", cut off" if rollout.finish_reason == "length" else ""
            note = f", {rollout.score.note}" if rollout.score.note else ""
            tokens = len(rollout.response_ids)
            judged = f"reward {rollout.score.value:g} ({tokens} tokens{cut}{note})"
        response = Text.assemble((f"  {judged}  ", "bold"), _clip(rollout.text) or "(empty)")
        console.print(response, soft_wrap=True)
    console.print()


def _clip(text: str) -> str:
    return (
        text if len(text) <= _CHARACTERS else f"{text[:_CHARACTERS]} [cut: {len(text)} characters]"
    )


def _step(seen: Rehearsal) -> str:
    generating, training, both = seen.seconds_per_step()
    groups, samples = seen.measured or seen.groups, seen.config.num_engines > 0
    tokens = sum(group.num_response_tokens for group in groups) * seen.stretch * seen.responses
    tokens /= max(1, sum(len(group.rollouts) for group in groups))
    said = f"{tokens:,.0f} tokens"
    if samples:
        said += f" are generated in {duration(generating)}"
    if seen.token_s is None:
        return f"at least {duration(both)}: {said}; training was not measured"
    verb = "and" if samples else "are"
    return f"about {duration(both)}: {said} {verb} trained in {duration(training)}"

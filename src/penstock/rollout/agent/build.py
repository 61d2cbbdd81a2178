"""Makes the agent loop that a task names: a class with `generate_group`, a function, or a command line.

`penstock agent check` tries a task's agent against a made-up policy (`AgentCheck`), before a model is trained
with it. The policy answers by a script: ordinary text, calls of the agent's tools, malformed calls, odd unicode.
Every check plays whole rollouts of the real agent through the real session; no model is loaded. What is
not checked: whether the task can be learned, and the speed of its environment.
"""

from __future__ import annotations

import asyncio
import inspect
import json
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from penstock.config import SamplingConfig, TaskConfig, TaskDataConfig, plugins
from penstock.config.plugins import check_name
from penstock.data.chat import ChatTemplate
from penstock.data.dataset import gives_own_reward
from penstock.data.sampler import stable_hash
from penstock.engine.protocol import Generation, GenerationRequest, InferenceEngine
from penstock.errors import UserError
from penstock.reward import build_reward
from penstock.reward.protocol import Reward
from penstock.rollout.agent import AGENTS, AgentLoop
from penstock.rollout.agent.bridge import Bridge
from penstock.rollout.agent.demonstration import Demonstrations
from penstock.rollout.agent.function import (
    AgentOptions,
    Command,
    CommandOptions,
    FunctionAgent,
    FunctionOptions,
    FunctionPool,
    InterruptedCalls,
    Pool,
    check_function,
    read_options,
)
from penstock.rollout.agent.session import Function, KeptCalls, Recorder
from penstock.types import ModelCall, Prompt, Rollout, Score, Status, VersionSegment

if TYPE_CHECKING:
    from penstock.rollout.agent.endpoint import Endpoint

_WORDS = ("7", "yes", "I do not know.", "higher", "<answer>12</answer>", "4 + 5 = 9", "no")
_ODD = ("\u202e\u0000 \U0001f600 \ufffd e\u0301", "x" * 5000, "", "\n\n\n", '{"a": [')
_MALFORMED = ('<tool_call>{"name": "a", "argum', "<tool_call>[1, 2]</tool_call>", "</tool_call>")


def check_agent(where: str, task: TaskDataConfig, sampling: SamplingConfig) -> None:
    """Raise a UserError for the first thing that the task's agent cannot use."""
    check_name(f"{where}.agent", task.agent, AGENTS)
    if loop_class(where, task) is not None:
        return
    if isinstance(task, TaskConfig) and task.agent_actors:
        raise UserError(
            f"{where}.agent_actors: got {task.agent_actors} with the agent {task.agent!r}, which runs in "
            "processes of its own, allowed: 0, or an agent that is the class of an agent loop"
        )
    if sampling.min_tokens:
        raise UserError(
            f"{where}: sampling.min_tokens got {sampling.min_tokens} with an agent, allowed: 0"
        )
    _function(where, task)
    read_options(f"{where}.agent_options", AgentOptions, task.agent_options)
    if not gives_own_reward(task) and build_reward(task.rewards, max_tokens=1).needs_group:
        raise UserError(
            f"{where}.rewards: got a reward that compares the rollouts of a group, allowed with an "
            "agent: rewards of one rollout"
        )


def loop_class(where: str, task: TaskDataConfig) -> Any:
    """The class of an agent loop, if the task names one."""
    if task.agent_options.get("python") or task.agent == "command":
        return None  # nothing of it is imported here
    agent = plugins.load(f"{where}.agent", task.agent, AGENTS)
    return agent if inspect.isclass(agent) else None


def build_agent(
    where: str,
    task: TaskDataConfig,
    sampling: SamplingConfig,
    *,
    engine: InferenceEngine,
    reward: Reward,
    chat: ChatTemplate,
    recorder: Recorder,
    endpoint: Endpoint | None,
    positions: int | None,
    note: Callable[[str], None] = lambda text: None,
    interrupted: InterruptedCalls | None = None,
) -> AgentLoop:
    """The task's agent loop; `positions` is the model's context, if it is known."""
    if task.demonstrates:
        return Demonstrations(
            chat,
            system_prompt=task.system_prompt,
            arguments=task.chat_template_kwargs,
            max_tokens=sampling.max_tokens,
            positions=positions,
        )
    if loop_class(where, task) is not None:
        return build_loop(where, task, sampling, engine=engine, reward=reward, decode=chat.decode)
    bridge = Bridge(chat, task.chat_template_kwargs)
    for turns, reason in bridge.rendered_whole():
        note(f"note: {where}: {turns}: {reason}")
    make = _function_agent(
        where, task, sampling, bridge=bridge, reward=reward, endpoint=endpoint, positions=positions
    )
    return make(engine=engine, decode=chat.decode, recorder=recorder, interrupted=interrupted)


def _function_agent(
    where: str,
    task: TaskDataConfig,
    sampling: SamplingConfig,
    *,
    bridge: Bridge,
    reward: Reward,
    endpoint: Endpoint | None,
    positions: int | None,
) -> partial[FunctionAgent]:
    """What makes the loop of a task's function for an engine and a recorder."""
    function, options = _function(where, task)
    return partial(
        FunctionAgent,
        function,
        sampling=sampling,
        bridge=bridge,
        settings=read_options(f"{where}.agent_options", AgentOptions, task.agent_options),
        max_context=task.max_prompt_tokens,
        max_positions=positions or 1 << 30,
        endpoint=endpoint,
        reward=None if gives_own_reward(task) else reward,
        options=options,
        system_prompt=task.system_prompt,
    )


def build_loop(
    where: str, task: TaskDataConfig, sampling: SamplingConfig, **parts: Any
) -> AgentLoop:
    """The agent loop of a task that names a class; `parts`: its engine, reward and decode."""
    loop: AgentLoop = loop_class(where, task)(sampling=sampling, **parts, **task.agent_options)
    return loop


async def try_agent(
    where: str,
    task: TaskDataConfig,
    sampling: SamplingConfig,
    chat: ChatTemplate,
    prompt: Prompt,
    positions: int | None,
) -> list[CheckResult]:
    """Check the task's agent against a made-up policy."""
    if loop_class(where, task) is not None:
        raise UserError(
            f"{where}.agent: got {task.agent!r}, allowed: a function, tools, gym, command"
        )
    from penstock.rollout.agent.endpoint import Endpoint  # lazily: most runs serve no agents

    endpoint, bridge = Endpoint(), Bridge(chat, task.chat_template_kwargs)
    make = _function_agent(
        where,
        task,
        sampling,
        bridge=bridge,
        reward=NoReward(),
        endpoint=endpoint,
        positions=positions,
    )
    await endpoint.start()
    try:
        return await AgentCheck(make, chat=chat, bridge=bridge, prompt=prompt).run()
    finally:
        await endpoint.close()


def _function(where: str, task: TaskDataConfig) -> tuple[Function | FunctionPool, dict[str, Any]]:
    """The agent's function, and the options that it is called with."""
    options, key = task.agent_options, f"{where}.agent_options"
    if task.agent == "command":
        command = read_options(key, CommandOptions, options)
        return Command(command.command, command.processes), {}
    if task.agent in ("tools", "gym"):
        return plugins.load(f"{where}.agent", task.agent, AGENTS)(key, options), {}
    settings = read_options(key, FunctionOptions, options)
    arguments = dict(settings.model_extra or {})
    if settings.python:
        _refuse_own(where, task, f"the option python = {settings.python!r}")
        return Pool(task.agent, settings.processes, settings.python), arguments
    function = plugins.load(f"{where}.agent", task.agent, AGENTS)
    check_function(f"{where}.agent", function, arguments)
    if inspect.iscoroutinefunction(function) and "processes" not in options:
        return function, arguments
    _refuse_own(where, task, f"processes = {settings.processes}")
    return Pool(task.agent, settings.processes), arguments


def _refuse_own(where: str, task: TaskDataConfig, why: str) -> None:
    """Refuse a function of the Python program that began the run where other processes would import it."""
    if task.agent.startswith(plugins.PYTHON):
        raise UserError(
            f"{where}.agent: got {task.agent!r}, a function of this program that is not async or has {why}, so that "
            "other processes import it; allowed: an async function, or one of a file: FILE.py:NAME"
        )


# -- trying an agent before a model is trained with it ---------------------------------------------


@dataclass(slots=True, frozen=True)
class CheckResult:
    """The outcome of one check."""

    name: str
    verdict: str  # ok | FAIL | note: it costs speed, and the run works
    detail: str = ""


class TrialRollout(KeptCalls):
    """One rollout of a check, and its engine: answers by the seed of a request, keeps what the agent did."""

    def __init__(self, rollout: Rollout, chat: ChatTemplate, words: Sequence[str]) -> None:
        super().__init__()
        self.rollout, self._chat, self._words = rollout, chat, words
        self.sampled = 0  # answers that were not taken from a record

    @property
    def asked(self) -> list[ModelCall]:
        return self.calls.get(self.rollout.rollout_id, [])

    async def generate(self, request: GenerationRequest) -> Generation:
        self.sampled += 1
        words = self._words[request.seed % len(self._words)]
        ids = self._chat.encode_text(words)[: request.sampling.max_tokens - 1]
        token_ids = np.concatenate([ids, self._chat.eos_ids[:1]]).astype(np.int32)
        if not len(token_ids):
            token_ids = np.zeros(1, dtype=np.int32)
        return Generation(
            request_id=request.request_id,
            token_ids=token_ids,
            logprobs=np.zeros(len(token_ids), dtype=np.float32),
            segments=(VersionSegment(0, len(token_ids)),),
            finish_reason="stop",
        )

    async def abort(self, request_id: str) -> None:
        """Do nothing: an answer takes no time."""


class AgentCheck:
    """Plays rollouts of one task's agent and compares them."""

    def __init__(
        self,
        make: Callable[..., FunctionAgent],
        *,
        chat: ChatTemplate,
        bridge: Bridge,
        prompt: Prompt,
    ) -> None:
        self._make = make  # makes the loop for an engine and a recorder
        self._agent: FunctionAgent | None = None  # the newest
        self._chat, self._bridge, self._prompt = chat, bridge, prompt

    async def run(self) -> list[CheckResult]:
        """The findings, in the order in which they were made."""
        malformed, odd = range(len(_MALFORMED)), range(len(_ODD))
        checks: Sequence[tuple[str, Callable[[], Awaitable[str]]]] = (
            ("ends with a finite reward", lambda: self._ends((1, 2, 3), _WORDS)),
            ("the same seed and answers give the same observations", self._repeats),
            ("two rollouts share nothing", self._shares_nothing),
            (
                "survives malformed tool calls",
                lambda: self._ends(map(stable_hash, malformed), _MALFORMED),
            ),
            (
                "survives odd unicode, long and empty answers",
                lambda: self._ends(map(stable_hash, odd), _ODD),
            ),
            ("continues from its record after a crash", self._continues),
        )
        results = [
            CheckResult(f"the chat template continues a {turn} turn", "ok", "")
            for turn, why in self._bridge.proof.items()
            if not why
        ]
        results += [CheckResult(name, "note", why) for name, why in self._bridge.rendered_whole()]
        try:
            for name, check in checks:
                why = await check()
                if not why or all(result.detail != why for result in results):  # told once
                    results.append(CheckResult(name, "FAIL" if why else "ok", why))
        finally:
            if self._agent is not None:
                await self._agent.close()  # with the processes of the function, if it has any
        return results

    async def _play(
        self,
        seed: int,
        words: Sequence[str] = _WORDS,
        before: TrialRollout | None = None,
        keep: int = 0,
    ) -> TrialRollout:
        """Play one rollout; with `before`, as a resume does after `keep` of its calls."""
        rollout = Rollout(
            rollout_id=f"check:0.{seed}", prompt_ids=self._prompt.token_ids, seed=seed
        )
        rollout.prompt = self._prompt
        trial, interrupted = TrialRollout(rollout, self._chat, words), InterruptedCalls()
        if before is not None:
            kept, results = before.asked[:keep], before.tools.get(rollout.rollout_id, {})
            tool_calls = [call.answer.get("tool_calls") or () for call in kept]
            call_ids = {tool["id"] for tools in tool_calls for tool in tools}
            interrupted.calls[rollout.rollout_id, seed] = kept
            interrupted.tools[rollout.rollout_id, seed] = [
                tool for key, tool in results.items() if key in call_ids or key.startswith("step")
            ][:keep]
        self._agent = self._make(
            engine=trial, decode=self._chat.decode, recorder=trial, interrupted=interrupted
        )
        await self._agent.generate_group([rollout])
        return trial

    async def _ends(self, seeds: Iterable[int], words: Sequence[str]) -> str:
        for seed in seeds:
            trial = await self._play(seed, words)
            if trial.rollout.status is not Status.COMPLETED:
                return trial.rollout.error
        return ""

    async def _repeats(self) -> str:
        first, second = await self._play(5), await self._play(5)
        return _difference(first, second)

    async def _shares_nothing(self) -> str:
        alone = [await self._play(seed) for seed in (6, 7)]
        together = await asyncio.gather(*(self._play(seed) for seed in (6, 7)))
        return next(filter(None, map(_difference, alone, together)), "")

    async def _continues(self) -> str:
        before = await self._play(8)
        keep = max(1, len(before.asked) // 2)
        after = await self._play(8, before=before, keep=keep)
        if after.rollout.status is not Status.COMPLETED:
            return after.rollout.error
        if after.sampled != len(before.asked) - keep:
            return (
                f"it had made {keep} of {len(before.asked)} calls, and {after.sampled} were sampled again: "
                "its requests differ from the recorded ones"
            )
        return ""


class NoReward(Reward):
    """Stands in for the task's rewards, which need no check here."""

    async def score(self, rollout: Rollout, prompt: Prompt) -> Score:
        return Score(0.0)


def _difference(first: TrialRollout, second: TrialRollout) -> str:
    """Where two rollouts of the same seed differ."""
    if first.rollout.error or second.rollout.error:
        return first.rollout.error or second.rollout.error
    for number, calls in enumerate(zip(first.asked, second.asked, strict=False)):
        # the messages of a request, with the parts of a tree that an equal run repeats
        request, other = ((call.parent, call.messages, call.tools) for call in calls)
        if request != other:
            return f"request {number}: {_short(request)} and {_short(other)}"
    if len(first.asked) != len(second.asked):
        return f"{len(first.asked)} and {len(second.asked)} model calls"
    reward, other_reward = first.rollout.reward, second.rollout.reward
    return "" if reward == other_reward else f"rewards {reward:g} and {other_reward:g}"


def _short(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False, default=str)
    return text if len(text) <= 120 else f"{text[:120]}..."

"""`penstock agent check`: try a task's agent against a made-up policy, before a model is trained with it.

The policy answers by a script: ordinary text, calls of the agent's tools, malformed calls, odd unicode.
Every check plays whole rollouts of the real agent through the real session; no model is loaded. What is
not checked: whether the task can be learned, and the speed of its environment.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from penstock.data.chat import ChatTemplate
from penstock.data.sampler import stable_hash
from penstock.engine.protocol import Generation, GenerationRequest
from penstock.reward.protocol import Reward
from penstock.rollout.agent.bridge import Bridge
from penstock.rollout.agent.function import FunctionAgent, InterruptedCalls
from penstock.rollout.agent.session import KeptCalls
from penstock.types import Group, ModelCall, Prompt, Rollout, Score, Status, VersionSegment

_WORDS = ("7", "yes", "I do not know.", "higher", "<answer>12</answer>", "4 + 5 = 9", "no")
_ODD = ("\u202e\u0000 \U0001f600 \ufffd e\u0301", "x" * 5000, "", "\n\n\n", '{"a": [')
_MALFORMED = ('<tool_call>{"name": "a", "argum', "<tool_call>[1, 2]</tool_call>", "</tool_call>")


@dataclass(slots=True, frozen=True)
class CheckResult:
    """The outcome of one check."""

    name: str
    verdict: str  # ok | FAIL | note: it costs speed, and the run works
    detail: str = ""


class TrialRollout(KeptCalls):
    """One rollout of a check: what the agent asked, what its tools gave, and how it ended."""

    def __init__(self, rollout: Rollout) -> None:
        super().__init__()
        self.rollout, self.sampled = rollout, 0

    def count_answer(self) -> None:
        """Count an answer that was sampled, not taken from a record."""
        self.sampled += 1

    @property
    def asked(self) -> list[ModelCall]:
        return self.calls.get(self.rollout.rollout_id, [])

    @property
    def requests(self) -> list[Any]:
        """The messages of every request, with the parts of a tree that an equal run repeats."""
        return [(call.parent, call.messages, call.tools) for call in self.asked]


class _ScriptedEngine:
    """An engine whose answer to a request is written in a script, by the request's seed."""

    def __init__(self, chat: ChatTemplate, say: Callable[[int], str], trial: TrialRollout) -> None:
        self._chat, self._say, self._trial = chat, say, trial

    async def generate(self, request: GenerationRequest) -> Generation:
        self._trial.count_answer()
        ids = self._chat.encode_text(self._say(request.seed))[: request.sampling.max_tokens - 1]
        ends = np.array(self._chat.eos_ids[:1], dtype=np.int32)
        token_ids = np.concatenate([ids, ends]).astype(np.int32)
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
        checks: Sequence[tuple[str, Callable[[], Awaitable[str]]]] = (
            ("ends with a finite reward", self._ends),
            ("the same seed and answers give the same observations", self._repeats),
            ("two rollouts share nothing", self._shares_nothing),
            ("survives malformed tool calls", lambda: self._survives(_MALFORMED)),
            ("survives odd unicode, long and empty answers", lambda: self._survives(_ODD)),
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
        group = Group(
            group_id="check:0", task="check", cursor=0, prompt=self._prompt, rollouts=[rollout]
        )
        trial, interrupted = TrialRollout(rollout), InterruptedCalls()
        if before is not None:
            kept, results = before.asked[:keep], before.tools.get(rollout.rollout_id, {})
            tool_calls = [call.answer.get("tool_calls") or () for call in kept]
            call_ids = {tool["id"] for tools in tool_calls for tool in tools}
            interrupted.calls[rollout.rollout_id, seed] = kept
            interrupted.tools[rollout.rollout_id, seed] = [
                tool for key, tool in results.items() if key in call_ids or key.startswith("step")
            ][:keep]
        self._agent = self._make(
            engine=_ScriptedEngine(self._chat, lambda number: words[number % len(words)], trial),
            decode=self._chat.decode,
            recorder=trial,
            interrupted=interrupted,
        )
        await self._agent.generate_group(group.rollouts)
        return trial

    async def _ends(self) -> str:
        for seed in range(1, 4):
            trial = await self._play(seed)
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

    async def _survives(self, words: Sequence[str]) -> str:
        for seed in range(len(words)):
            trial = await self._play(stable_hash(seed), words)
            if trial.rollout.status is not Status.COMPLETED:
                return trial.rollout.error
        return ""

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
    for number, (request, other) in enumerate(zip(first.requests, second.requests, strict=False)):
        if request != other:
            return f"request {number}: {_short(request)} and {_short(other)}"
    if len(first.requests) != len(second.requests):
        return f"{len(first.requests)} and {len(second.requests)} model calls"
    reward, other = first.rollout.reward, second.rollout.reward
    return "" if reward == other else f"rewards {reward:g} and {other:g}"


def _short(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False, default=str)
    return text if len(text) <= 120 else f"{text[:120]}..."

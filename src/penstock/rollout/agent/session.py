"""The session of one rollout: it answers an agent's model calls and records each of them in a tree.

A request finds its place in the tree, its new messages become ids (`bridge.py`), an engine samples, and
the call is kept before its answer leaves. A call that the journal already holds is answered from there.
Called in the driver's event loop, in process (`Model`) or over HTTP (`endpoint.py`).
"""

from __future__ import annotations

import asyncio
import copy
import hashlib
import inspect
import json
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Protocol

import numpy as np

from penstock.data.sampler import stable_hash
from penstock.engine.protocol import Generation, GenerationRequest, InferenceEngine, SamplingParams
from penstock.errors import EngineError, EnginesLost, RunError, UserError
from penstock.reward.call_threads import CallThreads, CallTimeout
from penstock.rollout.agent.bridge import Bridge
from penstock.rollout.agent.inside import use_tool
from penstock.rollout.agent.tree import CallTree, Message, Place
from penstock.store.journal.calls import ToolResult
from penstock.types import ModelCall, Prompt, Rollout


class Recorder(Protocol):
    """Keeps what agents do; each method returns when the record is durable. A `Journal` is one."""

    async def record_call(self, rollout: Rollout, call: ModelCall) -> None: ...

    async def begin_tool(self, rollout: Rollout, call_id: str, name: str) -> None: ...

    async def end_tool(self, rollout: Rollout, call_id: str, outcome: str, result: str) -> None: ...


class KeptCalls:
    """A `Recorder` in memory, by rollout; of rollouts that no journal holds."""

    def __init__(self) -> None:
        self.calls: dict[str, list[ModelCall]] = {}
        self.tools: dict[str, dict[str, ToolResult]] = {}  # by call id

    async def record_call(self, rollout: Rollout, call: ModelCall) -> None:
        self.calls.setdefault(rollout.rollout_id, []).append(call)

    async def begin_tool(self, rollout: Rollout, call_id: str, name: str) -> None:
        begun = ToolResult(call_id=call_id, name=name, outcome=None, result=None)
        self.tools.setdefault(rollout.rollout_id, {})[call_id] = begun

    async def end_tool(self, rollout: Rollout, call_id: str, outcome: str, result: str) -> None:
        tools = self.tools[rollout.rollout_id]
        tools[call_id] = replace(tools[call_id], outcome=outcome, result=result)


Function = Callable[..., Awaitable[Any]]  # an agent: of (task, model) and its own options
POLICIES = ("fail", "retry", "rebuild")  # for a tool call that was only begun
Unknown = str | Callable[[str], Any]


class AgentFault(RunError):
    """What an agent raised in a process of its own, with its type and its place."""


class ToolUnknown(RunError):
    """A tool was begun before a crash, and nobody knows whether it ended."""


TOOL_THREADS = 32  # blocking tools that run at once


class ContextOverflow(RunError):
    """A call's context is longer than the policy takes; OpenAI's code: context_length_exceeded."""


class TurnsExceeded(RunError):
    """The agent asked for more model calls than max_turns."""


@dataclass(slots=True, frozen=True, kw_only=True)
class Limits:
    """What one rollout of an agent may use."""

    max_turns: int = 16  # model calls of a rollout
    max_context: int = 2048  # tokens of a call's context
    max_positions: int = 1 << 30  # tokens of a call's context and answer together
    turn_timeout_s: float = 300.0  # for one model call
    tool_timeout_s: float = 60.0  # for one tool call


class Session:
    """Consumes an agent's requests, produces recorded calls; ends with its rollout."""

    def __init__(
        self,
        rollout: Rollout,
        *,
        engine: InferenceEngine,
        bridge: Bridge,
        sampling: SamplingParams,
        limits: Limits,
        recorder: Recorder,
        calls: Sequence[ModelCall] = (),
        tools: Sequence[ToolResult] = (),
        threads: CallThreads | None = None,
        thinking: str = "keep",
    ) -> None:
        self.rollout = rollout
        # with the seed of this try, also when the next one has begun
        self._try = copy.copy(rollout)
        self.tree = CallTree(list(calls))
        self.limits = limits
        self.refused = ""  # why a call was refused: its length or its number
        # an engine was told to end a call: the rollout is interrupted, not failed
        self.aborted = False
        self.fault: EnginesLost | None = None  # it ends the run, whatever the agent made of it
        self.earned = 0.0  # the rewards of turns so far
        self.earned_before: dict[int, float] = {}  # by call, where it is not 0
        self.notes: dict[str, Any] = {}  # what a dialect of the endpoint remembers
        self._engine, self._bridge, self._sampling = engine, bridge, sampling
        self._recorder, self._threads = recorder, threads
        self.tools = {tool.call_id: tool for tool in tools}  # what the journal knows of them
        self._before = dict(self.tools)  # of the interrupted try
        self._keeps_thinking = thinking == "keep"
        left_out = rollout.extra.get("unheard", ())  # a recorded rollout that is played again
        self._unclaimed = [call.number for call in calls if call.number not in left_out]
        self._heard: set[int] = set()  # calls whose answer the agent got
        self._ended = False
        self._asked: Counter[tuple] = Counter()  # requests by place, to tell repeated ones apart
        # by place and choice: what a retry gets
        self._latest: dict[tuple, asyncio.Future[ModelCall]] = {}
        self._running: dict[asyncio.Task[ModelCall], str] = {}  # with its engine request, if any
        self._turns = 0

    @property
    def truncated(self) -> bool:
        """Whether the policy ran into a limit: a call was refused, or the last answer was cut."""
        unheard = self.unheard()
        calls = [call for call in self.tree.calls if call.number not in unheard]
        return bool(self.refused) or bool(calls and calls[-1].finish_reason == "length")

    def hear(self, calls: Sequence[ModelCall]) -> None:
        """Note that the agent has the answers of these calls."""
        self._heard.update(call.number for call in calls)

    def unheard(self) -> list[int]:
        """The calls that had no part in the rollout: the agent never got their answer.

        Its client hung up, or gave the call up, or, after a crash, did not ask again.
        """
        return self.tree.unheard(self._heard)

    async def call(
        self,
        messages: Sequence[Message],
        tools: Sequence[Any] = (),
        *,
        max_tokens: int | None = None,
        is_retry: bool = False,
        choice: int = 0,
    ) -> ModelCall:
        """Answer one request; a client's retry gets the call of the request it repeats.

        choice: its number among the answers of a request for several. Whoever brings the answer to the agent
        tells `hear`.
        """
        if self._ended:
            raise EngineError("the rollout has ended")
        messages = [_plain(message) for message in messages]
        if not messages:
            raise UserError("messages: got none, allowed: at least one")
        tools_json = json.dumps(list(tools), ensure_ascii=False) if tools else ""
        place = self.tree.place(messages, tools_json)
        parent_ids = self.tree.ids(place.parent)
        place, context_ids = self._context(place, parent_ids, messages, tools_json)
        if place.parent is None:
            parent_ids = parent_ids[:0]
        number = None if place.parent is None else place.parent.number
        key = (number, context_ids.tobytes())
        answer = self._latest.get((key, choice)) if is_retry else None
        if answer is None or (answer.done() and (answer.cancelled() or answer.exception())):
            claimed = self._claim(key)
            if claimed is not None:
                answer = asyncio.get_running_loop().create_future()
                answer.set_result(claimed)
            else:
                answer = task = asyncio.create_task(
                    self._sample(place, parent_ids, context_ids, tools_json, key, max_tokens)
                )
                self._running[task] = ""
                task.add_done_callback(self._forget)
            self._latest[key, choice] = answer
        try:
            return await asyncio.shield(answer)
        except asyncio.CancelledError:
            if not answer.cancelled():
                raise
            raise EngineError("the rollout has ended") from None  # `close`, not whoever waits

    def _context(
        self, place: Place, parent_ids: np.ndarray, messages: Sequence[Message], tools: str
    ) -> tuple[Place, np.ndarray]:
        """The place, and the ids that follow its parent's; without a bridge, a new root."""
        if place.parent is not None:
            added = None
            if self._keeps_thinking:
                added = self._bridge.suffix(place.parent, place.messages)
            else:
                whole = self._bridge.render(messages, json.loads(tools or "[]"))
                if np.array_equal(whole[: len(parent_ids)], parent_ids):
                    added = whole[len(parent_ids) :]
            if added is not None:
                return place, added
        whole = self._bridge.render(messages, json.loads(tools or "[]"))
        return Place(None, tuple(messages)), whole

    def _claim(self, key: tuple) -> ModelCall | None:
        """The recorded call of this place that no request of this session has got yet."""
        for number in self._unclaimed:
            call = self.tree.calls[number]
            if (call.parent, call.context_ids.tobytes()) == key:
                self._unclaimed.remove(number)
                self._note_earned(number, self.earned)
                self._asked[key] += 1
                self._turns += 1
                return call
        return None

    async def _sample(
        self,
        place: Place,
        parent_ids: np.ndarray,
        context_ids: np.ndarray,
        tools: str,
        key: tuple,
        max_tokens: int | None,
    ) -> ModelCall:
        """Sample one answer, and keep the call."""
        earned = self.earned
        prompt_ids = np.concatenate([parent_ids, context_ids]).astype(np.int32, copy=False)
        room = self._room(len(prompt_ids))
        self._turns += 1
        repeat, self._asked[key] = self._asked[key], self._asked[key] + 1
        # by content, not by order: parallel calls get the same tokens whichever comes first
        digest = hashlib.blake2b(prompt_ids.tobytes(), digest_size=16).hexdigest()
        seed = stable_hash(self.rollout.seed, digest, repeat)
        limit = min(room, self._sampling.max_tokens, max_tokens or room)
        request = GenerationRequest(
            request_id=f"{self.rollout.rollout_id}/{seed:x}",
            prompt_ids=prompt_ids,
            sampling=replace(self._sampling, max_tokens=limit),
            seed=seed,
            session=self.rollout.rollout_id,
        )
        try:
            generation = await self._generate(request)
        except Exception:
            self._turns -= 1  # a fault of an engine is not a turn of the policy
            raise
        call = ModelCall(
            number=len(self.tree.calls),
            parent=None if place.parent is None else place.parent.number,
            context_ids=context_ids,
            token_ids=generation.token_ids,
            logprobs=generation.logprobs,
            segments=generation.segments,
            finish_reason=generation.finish_reason,
            messages=tuple(map(dict, place.messages)),
            answer=self._bridge.parse(
                generation.token_ids, prompt_ids, json.loads(tools or "[]"), seed
            ),
            tools=tools,
            choices=None
            if generation.choices is None
            else generation.choices[max(len(parent_ids) - 1, 0) :],
        )
        self.tree.calls.append(call)
        self._note_earned(call.number, earned)
        await self._recorder.record_call(self._try, call)
        return call

    async def tool(
        self, call: Mapping[str, Any], function: Callable[..., Any], *, unknown: Unknown = "fail"
    ) -> str:
        """Call a tool at most once, whatever happens to this process; return its result as text.

        After a crash, a call that ended has its result, or its error, from the journal. One that was only
        begun raises ToolUnknown, or is made again with `unknown="retry"`, or has the result that
        `unknown(call_id)` returns (None: it is made again). With `unknown="rebuild"` every call is made
        again, for an environment inside this process, and must give the recorded result.
        """
        if not callable(unknown) and unknown not in POLICIES:
            raise UserError(
                f"unknown: got {unknown!r}, allowed: {', '.join(POLICIES)} or a function of the id"
            )
        return await use_tool(self._told, self._apply, call, function, unknown)

    async def _told(self, message: Mapping[str, Any]) -> dict[str, str]:
        answer = await self.answer_tool(message)
        if "unknown" in answer:
            raise ToolUnknown(answer["unknown"])
        if "error" in answer:
            raise RunError(answer["error"])
        return answer

    async def answer_tool(self, message: Mapping[str, Any]) -> dict[str, str]:
        """Answer a message of `use_tool` before or after a tool call, once the journal has it."""
        call_id = str(message["id"])
        if message["tool"] == "begin":
            return await self._begin_tool(call_id, str(message["name"]), str(message["unknown"]))
        return await self._end_tool(call_id, str(message["outcome"]), str(message["result"]))

    async def _begin_tool(self, call_id: str, name: str, unknown: str) -> dict[str, str]:
        before = self._before.get(call_id)
        if before is not None and unknown != "rebuild":
            if before.outcome in ("done", "failed"):
                del self._before[call_id]
                return {before.outcome: before.result or ""}
            if unknown == "fail":
                return {
                    "unknown": f"tool {name}: call {call_id} was begun before a crash, "
                    "its end is unknown"
                }
            if unknown == "ask":
                return {"asks": ""}
            del self._before[call_id]
        self.tools[call_id] = ToolResult(call_id=call_id, name=name, outcome=None, result=None)
        await self._recorder.begin_tool(self._try, call_id, name)
        return {}

    async def _end_tool(self, call_id: str, outcome: str, result: str) -> dict[str, str]:
        before, begun = self._before.pop(call_id, None), self.tools[call_id]
        if before is not None and before.outcome == outcome == "done" and result != before.result:
            return {
                "error": f"tool {begun.name}: the environment is not deterministic: call {call_id} "
                f"gave {_short(before.result or '')} before a crash and now {_short(result)}"
            }
        self.tools[call_id] = replace(begun, outcome=outcome, result=result)
        await self._recorder.end_tool(self._try, call_id, outcome, result)
        return {}

    async def give_up_tools(self) -> None:
        """Record that nobody will know the end of a call of this try: whoever made it is gone."""
        begun = [call for call in self.tools.values() if call.outcome is None]
        for call in (call for call in begun if call.call_id not in self._before):
            await self._end_tool(call.call_id, "unknown", "whoever made the call ended before it")

    async def _apply(
        self, function: Callable[..., Any], /, *positional: Any, **keywords: Any
    ) -> Any:
        return await self.apply(partial(function, *positional, **keywords))

    async def apply(self, function: Callable[[], Any], threads: CallThreads | None = None) -> Any:
        """Call a user's function for a bounded time, in a thread if it is not async."""
        limit = self.limits.tool_timeout_s
        late = TimeoutError(f"no result after {limit:g} s (tool_timeout_s)")
        if self._threads is None:
            self._threads = CallThreads("tool", TOOL_THREADS, limit)
        deadline = asyncio.timeout(limit)
        try:
            if inspect.iscoroutinefunction(function):
                result = function()
            else:
                result = await (threads or self._threads).run(function)
            if not inspect.isawaitable(result):
                return result
            async with deadline:
                return await result
        except CallTimeout:
            raise late from None
        except TimeoutError:
            if deadline.expired():
                raise late from None
            raise

    def _note_earned(self, number: int, earned: float) -> None:
        if earned:
            self.earned_before[number] = earned

    def _room(self, context: int) -> int:
        """The tokens that an answer may have; refuse a call past the rollout's limits."""
        limits = self.limits
        if self._turns >= limits.max_turns:
            self.refused = f"got call {self._turns + 1}, allowed: max_turns = {limits.max_turns}"
            raise TurnsExceeded(self.refused)
        room = limits.max_positions - context
        if context > limits.max_context or room < 1:
            most, whose = limits.max_context, "max_prompt_tokens"
            if limits.max_positions <= most:
                most, whose = limits.max_positions - 1, "the model's positions"
            self.refused = f"got a context of {context} tokens, allowed: at most {most} ({whose})"
            raise ContextOverflow(self.refused)
        return room

    async def _generate(self, request: GenerationRequest) -> Generation:
        """The engine's answer. A request that takes longer than turn_timeout_s is ended and not recorded."""
        task = asyncio.current_task()
        assert task is not None
        self._running[task] = request.request_id
        deadline = asyncio.timeout(self.limits.turn_timeout_s)
        try:
            async with deadline:
                generation = await self._engine.generate(request)
        except TimeoutError:
            if not deadline.expired():
                raise
            await self._engine.abort(request.request_id)
            raise EngineError(
                f"no answer after {self.limits.turn_timeout_s:g} s (turn_timeout_s)"
            ) from None
        except EnginesLost as error:
            self.fault = error
            raise
        self.aborted = self.aborted or generation.finish_reason == "abort"
        if generation.finish_reason not in ("stop", "length"):
            raise EngineError(
                generation.error or f"the engine ended it: {generation.finish_reason}"
            )
        return generation

    def _forget(self, task: asyncio.Task[ModelCall]) -> None:
        self._running.pop(task, None)
        if not task.cancelled():
            task.exception()  # the request that waits for it raises it

    async def close(self) -> None:
        """End the calls that still run, at the engine too; there are no more after them."""
        self._ended = True
        running = dict(self._running)
        for task in running:
            task.cancel()
        aborts = (self._engine.abort(request_id) for request_id in running.values() if request_id)
        await asyncio.gather(*aborts, *running, return_exceptions=True)


@dataclass(slots=True, frozen=True, kw_only=True)
class Task:
    """What a rollout is about: one line of the dataset."""

    prompt_id: str
    messages: list[dict[str, Any]]  # with the task's system prompt
    gt_answer: str | None = None
    test_cases: dict[str, Any] | None = None
    extra: dict[str, Any] = field(default_factory=dict)  # every other field of the line

    @classmethod
    def of(cls, prompt: Prompt, system_prompt: str) -> Task:
        """Copy the prompt, so that no rollout changes what another one sees."""
        messages = [copy.deepcopy(dict(message)) for message in prompt.messages]
        if system_prompt and not any(message.get("role") == "system" for message in messages):
            messages.insert(0, {"role": "system", "content": system_prompt})
        return cls(
            prompt_id=prompt.prompt_id,
            messages=messages,
            gt_answer=prompt.gt_answer,
            test_cases=copy.deepcopy(prompt.test_cases),
            extra=copy.deepcopy(prompt.extra),
        )


class Model:
    """What an agent's function gets: an endpoint of its own, and the same without HTTP."""

    def __init__(self, session: Session, *, base_url: str, api_key: str, name: str) -> None:
        self.base_url, self.api_key, self.name = base_url, api_key, name
        self.seed = session.rollout.seed
        self._session = session

    async def chat(
        self,
        messages: Sequence[Message],
        tools: Sequence[Any] | None = None,
        *,
        max_tokens: int | None = None,
    ) -> dict[str, Any]:
        """The assistant's message (content, and tool_calls if it has any)."""
        call = await self._session.call(messages, tools or (), max_tokens=max_tokens)
        self._session.hear([call])
        return json.loads(json.dumps(call.answer))

    async def tool(
        self, call: Mapping[str, Any], function: Callable[..., Any], *, unknown: Unknown = "fail"
    ) -> str:
        """The result of a tool call as text; the journal has it before and after the call."""
        return await self._session.tool(call, function, unknown=unknown)

    def reward(self, value: float) -> None:
        """Reward the turns so far: calls after this one are not credited with it."""
        self._session.earned += float(value)


def session_of(model: Model) -> Session:
    """The session behind a model, for agents that run outside the driver."""
    return model._session


def _short(text: str) -> str:
    return repr(text if len(text) <= 60 else f"{text[:60]}...")


def _plain(message: Any) -> dict[str, Any]:
    """A copy of a message as JSON holds it; it may be an object of a client library.

    Half a character, which no tokenizer reads, becomes a question mark. Raise UserError for calls of another form.
    """
    table = message if isinstance(message, Mapping) else message.model_dump(exclude_none=True)
    text = json.dumps({name: value for name, value in table.items() if value is not None})
    plain: dict[str, Any] = json.loads(text)
    if "\\ud" in text:  # an escape of half a character, or of two halves
        whole = json.dumps(plain, ensure_ascii=False)
        plain = json.loads(whole.encode("utf-8", "replace"))
    calls = plain.get("tool_calls") or []
    if not isinstance(calls, list) or not all(map(_is_call, calls)):
        raise UserError(
            f"messages: got the tool_calls {calls!r:.100}, allowed: a list of objects with a function"
        )
    return plain


def _is_call(call: Any) -> bool:
    return isinstance(call, dict) and isinstance(call.get("function"), dict)

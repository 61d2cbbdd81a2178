"""A user's function as an agent: `async def rollout(task, model)`, called once per rollout, or a command line.

Each call gets a session of its own and ends with a reward. What the function raises, or a time-out,
fails its rollout only; what the policy caused (a context that overflows, too many turns) truncates the
rollout instead. The group runner retries failed rollouts and keeps the finished ones of their group.

Outside the driver a function runs in a pool of processes, also under another Python. A process makes one rollout
at a time, asks the endpoint over HTTP, and tells the session of its tool calls over its pipes. It is killed,
with the processes it started, when its rollout ends late, is cancelled, or when the run ends; the next rollout
gets a new one.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
import json
import os
import sys
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager, nullcontext
from dataclasses import asdict, dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol, Self, TypeVar, runtime_checkable

from pydantic import Field, ValidationError, field_validator, model_validator

from penstock.config import SamplingConfig, Section
from penstock.config.mistakes import explain
from penstock.config.plugins import place_of
from penstock.engine.protocol import InferenceEngine, SamplingParams
from penstock.errors import RewardError, RunError, UserError
from penstock.reward.call_threads import CallThreads
from penstock.reward.line_process import LineProcess, ProcessPool
from penstock.reward.protocol import Reward
from penstock.reward.user import as_score, check_size
from penstock.rollout.agent.bridge import Bridge
from penstock.rollout.agent.session import (
    TOOL_THREADS,
    AgentFault,
    Function,
    Limits,
    Model,
    Recorder,
    Session,
    Task,
    session_of,
)
from penstock.rollout.agent.single_turn import annealed_temperature
from penstock.rollout.agent_loop import AgentLoop
from penstock.store.journal.calls import ToolResult
from penstock.types import ModelCall, Rollout, Score, Status

if TYPE_CHECKING:
    from penstock.rollout.agent.endpoint import Endpoint


MODEL_NAME = "policy"  # what agents ask the endpoint for
S = TypeVar("S", bound=Section)


@runtime_checkable
class FunctionPool(Protocol):
    """Lends a function that runs outside the driver. A rollout's time begins when it has one."""

    def lend(self) -> AbstractAsyncContextManager[Function]: ...


class AgentOptions(Section, extra="allow"):
    """The options that every agent takes. A kind of agent adds its own; other options are a function's arguments."""

    timeout_s: float = Field(600.0, gt=0)
    """Of a rollout."""
    turn_timeout_s: float | None = Field(None, gt=0)
    """Of a model call; None: 300, or half of timeout_s if that is less."""
    tool_timeout_s: float | None = Field(None, gt=0)
    """Of a tool call; None: 60, or half of turn_timeout_s if that is less."""
    max_turns: int = Field(16, ge=1)
    """Most model calls of a rollout."""
    thinking: Literal["keep", "template"] = "keep"
    """keep: tokens only grow; template: as the chat template rewrites them."""
    truncated_reward: float = 0.0
    """If a limit stopped the policy and the function raised."""

    @model_validator(mode="after")
    def _check_times(self) -> Self:
        times = {"timeout_s": self.timeout_s, **self._inner_times()}
        for (outer, longer), (inner, shorter) in pairwise(times.items()):
            if shorter >= longer:
                raise ValueError(f"{inner}: got {shorter:g}, allowed: below {outer} = {longer:g}")
        return self

    def _inner_times(self) -> dict[str, float]:
        turn_s = self.turn_timeout_s or min(300.0, self.timeout_s / 2)
        tool_s = self.tool_timeout_s or min(60.0, turn_s / 2)
        return {"turn_timeout_s": turn_s, "tool_timeout_s": tool_s}

    def limits(self, *, max_context: int, max_positions: int) -> Limits:
        """What one rollout may use; max_context, max_positions: tokens of a call (see `Limits`)."""
        return Limits(
            max_turns=self.max_turns,
            max_context=max_context,
            max_positions=max_positions,
            **self._inner_times(),
        )


def read_options(where: str, kind: type[S], options: Mapping[str, Any]) -> S:
    """The options of an agent; raise a UserError for the first mistake."""
    try:
        return kind.model_validate(dict(options))
    except ValidationError as error:
        raise UserError(explain(error, kind, place=where)) from None


@dataclass(slots=True, kw_only=True)
class InterruptedCalls:
    """What rollouts had done when they were interrupted, by (rollout, seed)."""

    calls: dict[tuple[str, int], list[ModelCall]] = field(default_factory=dict)
    tools: dict[tuple[str, int], list[ToolResult]] = field(default_factory=dict)


class FunctionAgent(AgentLoop):
    """An agent loop: consumes rollouts to make, produces them with their rows and scores."""

    def __init__(
        self,
        function: Function | FunctionPool,
        *,
        engine: InferenceEngine,
        sampling: SamplingConfig,
        bridge: Bridge,
        settings: AgentOptions,
        max_context: int,
        max_positions: int = 1 << 30,
        decode: Callable[[Sequence[int]], str],
        recorder: Recorder,
        endpoint: Endpoint | None = None,
        reward: Reward | None = None,
        options: Mapping[str, Any] | None = None,
        system_prompt: str = "",
        interrupted: InterruptedCalls | None = None,
    ) -> None:
        self._function = function
        self._engine, self._sampling, self._bridge = engine, sampling, bridge
        self._settings, self._decode, self._recorder = settings, decode, recorder
        self._limits = settings.limits(max_context=max_context, max_positions=max_positions)
        self._options, self._system_prompt = dict(options or {}), system_prompt
        self._interrupted = interrupted or InterruptedCalls()
        self._endpoint = endpoint
        self._threads: CallThreads | None = None
        self._reward = reward  # scores the last answer if the function returns None

    async def generate(self, rollout: Rollout, *, enable_partial_rollout: bool = False) -> Rollout:
        """Call the function for one rollout; it ends COMPLETED, ABORTED or FAILED.

        One that is interrupted keeps the calls that it has made.
        """
        session = self._open(rollout, enable_partial_rollout)
        try:
            await self._run(session)
        except asyncio.CancelledError:
            await session.close()
            self._set_aside(session)
            raise
        finally:
            await session.close()
        return rollout

    async def close(self) -> None:
        """End the threads of tools, and the processes of the function if it has any."""
        if self._threads is not None:
            self._threads.close()
        close = getattr(self._function, "close", None)
        if close is not None:
            await close()

    def _open(self, rollout: Rollout, keep_partial: bool) -> Session:
        """A session for the rollout, with the calls that an interrupted try left."""
        if rollout.status is Status.ABORTED and not keep_partial:
            rollout.restart()
        rollout.move_to(Status.INIT)
        rollout.error, rollout.finish_reason, rollout.score = "", "", None
        key = (rollout.rollout_id, rollout.seed)
        calls = self._interrupted.calls.pop(key, [])
        versions = [segment.version for call in calls for segment in call.segments]
        rollout.issued_version = min([rollout.issued_version, *versions])
        rollout.temperature = annealed_temperature(self._sampling, rollout.issued_version)
        if self._threads is None or self._threads.loop is not asyncio.get_running_loop():
            self._threads = CallThreads("tool", TOOL_THREADS, self._limits.tool_timeout_s)
        return Session(
            rollout,
            engine=self._engine,
            bridge=self._bridge,
            sampling=SamplingParams.from_config(self._sampling, temperature=rollout.temperature),
            limits=self._limits,
            recorder=self._recorder,
            calls=calls,
            tools=self._interrupted.tools.pop(key, []),
            threads=self._threads,
            thinking=self._settings.thinking,
        )

    def _set_aside(self, session: Session) -> None:
        """Give an interrupted rollout the tokens of its calls, and keep them for its next try."""
        rollout = session.rollout
        self._interrupted.calls[rollout.rollout_id, rollout.seed] = session.tree.calls
        self._interrupted.tools[rollout.rollout_id, rollout.seed] = list(session.tools.values())
        session.tree.fill(rollout)
        rollout.move_to(Status.ABORTED)

    async def _run(self, session: Session) -> None:
        """Run the function to its end, and give the rollout its rows, its score and its status."""
        rollout = session.rollout
        try:
            with self._model(session) as model:
                result = await self._result_of(session, model)
            await session.close()  # what the agent no longer waits for
            self._take_calls(session)
            rollout.score = await self._score(rollout, result, session.earned)
        except Exception as error:  # whatever the user's function raises is the rollout's outcome
            if session.fault is not None:
                raise session.fault from error
            if session.aborted:
                self._set_aside(session)
                return
            await session.give_up_tools()
            rollout.restart()  # its calls are spent: a retry needs another seed
            is_told = isinstance(error, RewardError | AgentFault)
            reason = error if is_told else f"{type(error).__name__}: {error}{place_of(error)}"
            rollout.fail(f"agent: {reason}")
            return
        rollout.move_to(Status.COMPLETED)

    def _take_calls(self, session: Session) -> None:
        """Give the rollout the rows of its calls, and the last answer as its text."""
        rollout, unheard = session.rollout, session.unheard()
        calls = [call for call in session.tree.calls if call.number not in unheard]
        if not calls:
            refused = f": {session.refused}" if session.refused else ""
            raise RewardError(f"it ended without an answer of the model{refused}")
        session.tree.fill(rollout, session.earned_before, unheard)
        rollout.finish_reason = "length" if session.truncated else "stop"
        rollout.text = self._decode(calls[-1].token_ids.tolist())
        rollout.extra = {**rollout.extra, "turns": len(calls)}
        rollout.extra.pop("unheard", None)
        if unheard:
            rollout.extra["unheard"] = unheard

    async def _score(self, rollout: Rollout, result: Any, earned: float) -> Score:
        """What the function's result and the turns' rewards are worth."""
        if result is None and self._reward is not None:
            assert rollout.prompt is not None, "a group gives its prompt to its rollouts"
            score = await self._reward.score(rollout, rollout.prompt)
        elif result is None:
            raise RewardError(
                "it returned None and the task has no rewards, allowed: a number, a bool, a dict with "
                "the fields of a score, or rewards in the config"
            )
        else:
            score = as_score(result)
        total = score.value + earned
        check_size("reward", total)
        return replace(score, value=total)

    @contextmanager
    def _model(self, session: Session) -> Iterator[Model]:
        """Lend the function its model; the key of the endpoint ends with the block."""
        endpoint = self._endpoint
        if endpoint is None:
            yield Model(session, base_url="", api_key="", name=MODEL_NAME)
            return
        key = endpoint.open(session)
        try:
            yield Model(session, base_url=endpoint.base_url, api_key=key, name=MODEL_NAME)
        finally:
            endpoint.shut(key)

    async def _result_of(self, session: Session, model: Model) -> Any:
        """What the function returns in time; the reward of a truncated rollout if it raised at a limit."""
        settings, prompt = self._settings, session.rollout.prompt
        assert prompt is not None, "a group gives its prompt to its rollouts"
        task = Task.of(prompt, self._system_prompt)
        pool = self._function
        lent = pool.lend() if isinstance(pool, FunctionPool) else nullcontext(pool)
        async with lent as function:
            deadline = asyncio.timeout(settings.timeout_s)
            try:
                async with deadline:
                    return await function(task, model, **self._options)
            # of the user's function: what it means depends on the limits
            except Exception as error:
                if deadline.expired():
                    raise RewardError(
                        f"no result after {settings.timeout_s:g} s (timeout_s)"
                    ) from error
                if not session.truncated or session.fault is not None:
                    raise
                return settings.truncated_reward


def check_function(where: str, function: Any, options: Mapping[str, Any]) -> None:
    """Refuse a function that cannot be called with (task, model) and these options."""
    if not callable(function):
        raise UserError(f"{where}: got {function!r}, allowed: a function of (task, model)")
    try:
        inspect.signature(function).bind(None, None, **options)
    except TypeError as error:
        raise UserError(
            f"{where}: got a function that cannot be called with (task, model) and the options "
            f"{', '.join(options) or 'none'}: {error}; allowed options of every agent: "
            f"{', '.join(AgentOptions.model_fields)}"
        ) from None


INSIDE = Path(__file__).with_name("inside.py")
_START_TIMEOUT_S = 120.0


class FunctionOptions(AgentOptions):
    """The options of a function; those that are not named here are its arguments."""

    python: str = ""
    """The path of another Python, which runs it."""
    processes: int = Field(4, ge=1)
    """Processes that it runs in, one rollout each; an async function without `python` runs in none by default."""

    @field_validator("python")
    @classmethod
    def _can_run(cls, python: str) -> str:
        if python and not os.access(python, os.X_OK):
            raise ValueError(f"got {python!r}, allowed: the path of a Python")
        return python


class CommandOptions(AgentOptions, extra="forbid"):
    """The options of the agent `command`."""

    command: list[str] = Field(min_length=1)
    """Its words, such as ["node", "agent.js"]."""
    processes: int = Field(4, ge=1)
    """Commands that run at once."""


class Pool:
    """Calls a function in one of `size` processes: `async with pool.lend() as call`, `await call(task, model)`."""

    def __init__(self, target: str, size: int, python: str = "") -> None:
        # another Python may have other versions of the driver's packages
        paths = ("PYTHONPATH", "PYTHONHOME")
        environment = {name: value for name, value in os.environ.items() if name not in paths}
        self._processes = ProcessPool(
            guarded(python or sys.executable, "serve", target),
            size,
            name="the agent's process",
            start_timeout_s=_START_TIMEOUT_S,
            environment=environment if python else None,
        )

    @asynccontextmanager
    async def lend(self) -> AsyncIterator[Function]:
        """Lend a process that is ready, as a function. A rollout's time begins when it is lent."""
        async with self._processes.lend() as process:
            yield functools.partial(_call, process)

    async def close(self) -> None:
        await self._processes.close()


async def _call(process: LineProcess, task: Task, model: Model, **options: Any) -> Any:
    """Make one rollout in the process; its tools ask the session in between."""
    session = session_of(model)
    request = {
        "task": asdict(task),
        "base_url": model.base_url,
        "api_key": model.api_key,
        "name": model.name,
        "seed": model.seed,
        "tool_timeout_s": session.limits.tool_timeout_s,
        "options": options,
    }
    answer = await process.ask(request)
    while "tool" in answer:
        try:
            permission = await session.answer_tool(answer)
        except BaseException:  # the process is in the middle of its rollout
            await process.kill()
            raise
        answer = await process.ask(permission)
    if "error" in answer:
        raise AgentFault(answer["error"])
    model.reward(answer["earned"])
    return answer["result"]


class Command:
    """Runs a command line per rollout: the task on stdin, the reward is the last line of its output."""

    def __init__(self, words: Sequence[str], size: int) -> None:
        self._command = guarded(sys.executable, "exec", *words)
        self._slots = asyncio.Semaphore(size)
        self._running: set[LineProcess] = set()

    async def __call__(self, task: Task, model: Model) -> Any:
        environment = {
            **os.environ,
            "OPENAI_BASE_URL": model.base_url,
            "OPENAI_API_KEY": model.api_key,
            "OPENAI_MODEL": model.name,
            "PENSTOCK_SEED": str(model.seed),
        }
        process = await LineProcess.start(self._command, environment=environment)
        self._running.add(process)
        try:
            code, output = await process.finish(json.dumps(asdict(task)))
        finally:
            self._running.discard(process)
        lines = output.strip().splitlines()
        if code:
            raise RunError(f"the command ended with code {code}: {process.last_words}")
        try:
            return float(lines[-1])
        except (IndexError, ValueError):
            last = lines[-1] if lines else "no output"
            raise RewardError(f"the command's last line: got {last!r}, allowed: a number") from None

    @asynccontextmanager
    async def lend(self) -> AsyncIterator[Function]:
        """Lend this function. A rollout's time begins when it is lent, before the command starts."""
        async with self._slots:
            yield self

    async def close(self) -> None:
        for process in list(self._running):
            await process.kill()


def guarded(python: str, *words: str) -> tuple[str, ...]:
    """The command line of a process that ends, with those it starts, when this one has ended."""
    return (python, str(INSIDE), str(os.getpid()), *words)

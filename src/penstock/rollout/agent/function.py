"""A user's function as an agent: `async def rollout(task, model)`, called once per rollout.

Each call gets a session of its own and ends with a reward. What the function raises, or a time-out,
fails its rollout only; what the policy caused (a context that overflows, too many turns) truncates the
rollout instead. The group runner retries failed rollouts and keeps the finished ones of their group.
"""

from __future__ import annotations

import asyncio
import inspect
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from penstock.config import SamplingConfig
from penstock.config.plugins import place_of
from penstock.engine.protocol import InferenceEngine, SamplingParams
from penstock.errors import RewardError, UserError
from penstock.reward.call_threads import CallThreads
from penstock.reward.protocol import Reward
from penstock.reward.user import as_score
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
)
from penstock.rollout.agent.single_turn import annealed_temperature
from penstock.rollout.agent_loop import AgentLoop
from penstock.store.journal.calls import ToolResult
from penstock.types import ModelCall, Rollout, Score, Status

if TYPE_CHECKING:
    from penstock.rollout.agent.endpoint import Endpoint

_TIMES = ("timeout_s", "turn_timeout_s", "tool_timeout_s")
_LONGEST_S = (600.0, 300.0, 60.0)  # of rollout, turn and tool, if the options name none
MODEL_NAME = "policy"  # what agents ask the endpoint for
OWN_OPTIONS = (*_TIMES, "max_turns", "thinking", "truncated_reward")


@runtime_checkable
class FunctionPool(Protocol):
    """Lends a function that runs outside the driver. A rollout's time begins when it has one."""

    def lend(self) -> AbstractAsyncContextManager[Function]: ...


@dataclass(slots=True, frozen=True, kw_only=True)
class AgentSettings:
    """The options of a task's agent that Penstock itself reads."""

    limits: Limits
    timeout_s: float
    thinking: str = "keep"  # keep: tokens only grow; template: as the chat template rewrites them
    truncated_reward: float = 0.0  # if a limit stopped the policy and the function raised

    @classmethod
    def read(cls, where: str, options: Mapping[str, Any], limits: Limits) -> AgentSettings:
        """Check the options; refuse time-outs that contradict each other."""
        times = _read_times(where, options)
        turns = options.get("max_turns", limits.max_turns)
        if not isinstance(turns, int) or isinstance(turns, bool) or turns < 1:
            raise UserError(f"{where}.max_turns: got {turns!r}, allowed: a whole number from 1")
        thinking = options.get("thinking", "keep")
        if thinking not in ("keep", "template"):
            raise UserError(f"{where}.thinking: got {thinking!r}, allowed: 'keep' or 'template'")
        reward = options.get("truncated_reward", 0.0)
        if not isinstance(reward, int | float) or not math.isfinite(reward):
            raise UserError(f"{where}.truncated_reward: got {reward!r}, allowed: a finite number")
        return cls(
            limits=Limits(
                max_turns=turns,
                max_context=limits.max_context,
                max_positions=limits.max_positions,
                turn_timeout_s=times[1],
                tool_timeout_s=times[2],
            ),
            timeout_s=times[0],
            thinking=thinking,
            truncated_reward=float(reward),
        )


def _read_times(where: str, options: Mapping[str, Any]) -> list[float]:
    """The time-outs of rollout, turn and tool; those not given are shorter than the outer one."""
    times: list[float] = []
    for name, longest in zip(_TIMES, _LONGEST_S, strict=True):
        outer = times[-1] if times else math.inf
        value = options.get(name, min(longest, outer / 2))
        if not isinstance(value, int | float) or isinstance(value, bool) or not value > 0:
            raise UserError(f"{where}.{name}: got {value!r}, allowed: a number above 0")
        if value >= outer:
            before = _TIMES[len(times) - 1]
            raise UserError(f"{where}.{name}: got {value:g}, allowed: below {before} = {outer:g}")
        times.append(float(value))
    return times


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
        settings: AgentSettings,
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

    def _tool_threads(self) -> CallThreads:
        """The threads that blocking tools run on, for all rollouts of this loop."""
        if self._threads is None or self._threads.loop is not asyncio.get_running_loop():
            self._threads = CallThreads("tool", TOOL_THREADS, self._settings.limits.tool_timeout_s)
        return self._threads

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
        return Session(
            rollout,
            engine=self._engine,
            bridge=self._bridge,
            sampling=SamplingParams.from_config(self._sampling, temperature=rollout.temperature),
            limits=self._settings.limits,
            recorder=self._recorder,
            calls=calls,
            tools=self._interrupted.tools.pop(key, []),
            threads=self._tool_threads(),
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
        if not math.isfinite(total):
            raise RewardError(f"got the reward {total}, allowed: a finite number")
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
        async with _lend(self._function) as function:
            deadline = asyncio.timeout(settings.timeout_s)
            try:
                async with deadline:
                    return await function(task, model, **self._options)
            except (
                Exception
            ) as error:  # of the user's function: what it means depends on the limits
                if deadline.expired():
                    raise RewardError(
                        f"no result after {settings.timeout_s:g} s (timeout_s)"
                    ) from error
                if not session.truncated or session.fault is not None:
                    raise
                return settings.truncated_reward


def _lend(function: Function | FunctionPool) -> AbstractAsyncContextManager[Function]:
    """The function to call: one that a pool lends, or the function itself."""
    return function.lend() if isinstance(function, FunctionPool) else nullcontext(function)


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
            f"{', '.join(OWN_OPTIONS)}"
        ) from None

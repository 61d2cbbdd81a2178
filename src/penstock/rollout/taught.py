"""Teachers behind a server: the log-probs of sampled tokens, asked for before a group is journalled.

    group generated and scored -> the token ids of each row -> /v1/completions with `echo` -> log-probs of its response

What a server answers cannot be had again, so it is journalled with the group: redo, replay and forks need no server.
Ids are sent and no text is read but once, to compare the tokenizers. Any other answer is a failure, and is retried.
"""

from __future__ import annotations

import asyncio
import json
from contextlib import AsyncExitStack
from typing import Any

import numpy as np

from penstock.config import Config, TeacherConfig
from penstock.config.secrets import from_environment
from penstock.data.chat import ChatTemplate
from penstock.data.sampler import PromptSource
from penstock.errors import RewardError, UserError
from penstock.reward.retrying_client import RetryingClient
from penstock.rollout.agent_loop import AgentLoop
from penstock.types import Rollout, Status
from penstock.waits import WaitKind, Waits

ROUTE = "/v1/completions"
_COMPARED, _MOST_COMPARED = 8, 4000  # prompts and characters by which two tokenizers are compared
_ID = "token_id:"  # how a server names a token that it was sent by its id, if it can
_LEAST = -1000.0  # a log-prob below this stands for no chance at all


class TeacherServer:
    """The client of one teacher."""

    def __init__(self, name: str, config: TeacherConfig) -> None:
        self.name, self._config = f"teachers.{name}", config
        self._client = RetryingClient(
            self.name,
            [config.base_url.rstrip("/").removesuffix("/v1")],
            ROUTE,
            token=from_environment(f"{self.name}.api_key_variable", config.api_key_variable),
            request_timeout_s=config.timeout_s,
        )

    async def logprobs(self, token_ids: np.ndarray) -> np.ndarray:
        """The log-probs of all tokens but the first, given those before it."""
        names, values = await self._echo(token_ids.tolist())
        sent = [f"{_ID}{token}" for token in token_ids]
        if str(names[0]).startswith(_ID) and names[: len(sent)] != sent:
            raise RewardError(
                f"{self.name}: got the log-probs of other tokens, allowed: those of the tokens that were sent"
            )
        values = values[1 : len(token_ids)]
        if len(values) != len(token_ids) - 1 or not all(map(_is_logprob, values)):
            raise RewardError(
                f"{self.name}: got {len(values)} values, allowed: the log-probs of {len(token_ids) - 1} tokens"
            )
        return np.array(values, np.float32)

    async def teach(self, rollout: Rollout) -> None:
        """Give a finished rollout the log-probs of its tokens."""
        parts = []
        for prompt_ids, place in rollout.sequences():
            ids = np.concatenate([prompt_ids, rollout.response_ids[place]])
            parts.append((await self.logprobs(ids))[len(prompt_ids) - 1 :])
        taught = np.concatenate(parts)
        if (taught[rollout.loss_mask] < _LEAST).any():  # not of what tools said
            raise RewardError(
                f"{self.name}: got the log-prob {taught[rollout.loss_mask].min():g} for a sampled token, allowed: "
                f"{_LEAST:g} and more"
            )
        rollout.teacher_logprobs = taught

    async def check_tokens(self, chat: ChatTemplate, prompts: PromptSource) -> None:
        """Refuse a server whose tokenizer reads some prompts as other tokens than the policy's."""
        numbers = range(min(len(prompts), _COMPARED))
        texts = [chat.decode_prompt(prompts[number].token_ids) for number in numbers]
        text = "".join(texts)[:_MOST_COMPARED]
        own_ids = chat.encode_text(text).tolist()
        own, _ = await self._echo(own_ids)
        read, _ = await self._echo(text)
        own = own[: len(own_ids)]
        begins = (read[: len(own)], read[1 : len(own) + 1])  # it may add a token at the beginning
        if own not in begins or len(read) > len(own) + 2:
            raise UserError(
                f"{self.name}: got the model {self._config.model!r}, which reads {text[:40]!r} as other tokens than "
                "the policy, allowed: a model with the policy's tokenizer"
            )

    async def _echo(self, prompt: list[int] | str) -> tuple[list[Any], list[Any]]:
        """(the server's names of the prompt's tokens, their log-probs), and those of one more token."""
        body = {
            "model": self._config.model,
            "prompt": prompt,
            "echo": True,
            "logprobs": 1,
            "max_tokens": 1,
            "temperature": 1.0,
            "add_special_tokens": False,
            "return_tokens_as_token_ids": True,
        }
        _, reply = await self._client.ask(body)
        try:
            told = json.loads(reply)["choices"][0]["logprobs"]
            names, values = told["tokens"], told["token_logprobs"]
        except (ValueError, TypeError, KeyError, IndexError, RecursionError):
            names = values = None
        if not names or not isinstance(names, list) or not isinstance(values, list):
            raise RewardError(
                f"{self.name}: got no log-probs of a prompt, allowed: a server with `echo`"
            )
        return names, values

    async def close(self) -> None:
        """End the connections."""
        await self._client.close()


def _is_logprob(value: Any) -> bool:
    return isinstance(value, int | float) and -1e30 < value < 1e-3


class TaughtLoop(AgentLoop):
    """An agent loop whose rollouts are completed when a teacher has scored their tokens."""

    def __init__(self, loop: AgentLoop, teacher: TeacherServer, waits: Waits) -> None:
        self._loop, self._teacher, self._waits = loop, teacher, waits

    async def generate_group(
        self, rollouts: list[Rollout], *, enable_partial_rollout: bool = False
    ) -> list[Rollout]:
        """Generate and score what is missing, then ask the teacher; its failure is that of the rollout."""
        for rollout in rollouts:
            if rollout.status is Status.INIT and rollout.is_finished and rollout.score is not None:
                rollout.move_to(Status.COMPLETED)  # but for the teacher
        if any(rollout.status is not Status.COMPLETED for rollout in rollouts):
            rollouts = await self._loop.generate_group(
                rollouts, enable_partial_rollout=enable_partial_rollout
            )
        waiting = [
            rollout
            for rollout in rollouts
            if rollout.status is Status.COMPLETED and rollout.teacher_logprobs is None
        ]
        for rollout in waiting:
            rollout.move_to(Status.ABORTED)  # what a pause would find
        await asyncio.gather(*map(self._teach, waiting))
        return rollouts

    async def _teach(self, rollout: Rollout) -> None:
        lane = self._teacher.name
        with self._waits.wait(lane, WaitKind.REWARD, rollout.rollout_id, responder=lane):
            try:
                await self._teacher.teach(rollout)
            except RewardError as error:
                rollout.fail(str(error))
                return
        rollout.move_to(Status.COMPLETED)

    async def pause(self) -> None:
        """Abort what is being generated."""
        await self._loop.pause()


async def taught(
    config: Config,
    task: str,
    loop: AgentLoop,
    prompts: PromptSource,
    chat: ChatTemplate,
    closing: AsyncExitStack,
    waits: Waits,
) -> AgentLoop:
    """The agent loop of a task, whose rollouts its teacher scores, if that is behind a server."""
    if not config.asks_server(task):
        return loop
    return TaughtLoop(loop, await connected(config, task, prompts, chat, closing), waits)


async def connected(
    config: Config, task: str, prompts: PromptSource, chat: ChatTemplate, closing: AsyncExitStack
) -> TeacherServer:
    """The client of a task's teacher until `closing` ends, whose tokens are those of the policy."""
    name = config.task_algorithm(task).teacher or ""
    teacher = TeacherServer(name, config.teachers[name])
    closing.push_async_callback(teacher.close)
    await teacher.check_tokens(chat, prompts)
    return teacher

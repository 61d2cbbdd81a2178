"""`penstock generate` and `penstock chat`: sample a policy with the config's engine, and keep nothing.

`generate` shows each token with its log-prob. `chat` talks turn by turn: a response is sampled in pieces, each
of which continues the one before, so that it is shown while it grows. A first question that is a record of
the config's tasks is scored with that task's rewards.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable
from dataclasses import dataclass

import numpy as np

from penstock.config import Config, TaskDataConfig
from penstock.config.demo import context_length
from penstock.data.chat import ChatTemplate
from penstock.data.dataset import first_prompts, gives_own_reward
from penstock.engine.protocol import GenerationRequest, InferenceEngine, SamplingParams
from penstock.errors import EngineError, RewardError, UserError
from penstock.reward import build_reward
from penstock.rollout.evaluation.score import answered
from penstock.types import Prompt
from penstock.workers.inline import opened_engine

HELP = "/reset begins a new conversation, /exit ends"
_PIECE = 8  # tokens that are sampled before they are shown
_MOST_RECORDS = 20_000  # of a task, that a question is looked for in


@dataclass(slots=True, frozen=True, kw_only=True)
class Sample:
    """One response, token by token."""

    prompt: str
    text: str
    tokens: tuple[str, ...]
    logprobs: tuple[float, ...]
    finish_reason: str

    @property
    def mean_logprob(self) -> float:
        return sum(self.logprobs) / len(self.logprobs) if self.logprobs else 0.0


def generate_samples(
    config: Config, prompts: list[str], *, num_generations: int = 1, raw: bool = False
) -> list[Sample]:
    """Sample each prompt `num_generations` times with [sampling]; `raw` skips the chat template.

    The system prompt, and the template's variables, are those of the config's first task, as in a chat.
    """
    if others := [prompt for prompt in prompts if not isinstance(prompt, str)]:
        raise UserError(f"prompts: got {others[0]!r}, allowed: strings")
    return asyncio.run(_generate(config, prompts, num_generations, raw))


async def _generate(
    config: Config, prompts: list[str], num_generations: int, raw: bool
) -> list[Sample]:
    chat = ChatTemplate.from_config(config.model)
    how, requests = SamplingParams.from_config(config.sampling), list[GenerationRequest]()
    task = next(iter(config.tasks.values()), TaskDataConfig())
    for i, prompt in enumerate(prompts):
        if raw:
            ids = chat.encode_plain(prompt)
        else:
            asked = [{"role": "user", "content": prompt}]
            ids = chat.encode(asked, task.system_prompt, task.chat_template_kwargs)
        for k in range(num_generations):
            seed = config.seed + i * num_generations + k
            requests.append(
                GenerationRequest(request_id=f"{i}.{k}", prompt_ids=ids, sampling=how, seed=seed)
            )
    async with opened_engine(config) as engine:
        generations = await engine.generate_many(requests)
    samples = []
    for number, generation in enumerate(generations):
        if generation.finish_reason == "error":
            raise EngineError(f"generate: {generation.error}")
        ids = generation.token_ids.tolist()
        samples.append(
            Sample(
                prompt=prompts[number // num_generations],
                text=chat.decode(ids),
                tokens=tuple(chat.decode_prompt([token]) for token in ids),
                logprobs=tuple(map(float, generation.logprobs)),
                finish_reason=generation.finish_reason,
            )
        )
    return samples


def describe(samples: Iterable[Sample]) -> Iterable[str]:
    """Yield lines for a terminal: the text, then each token with its log-prob."""
    for sample in samples:
        yield f"prompt: {sample.prompt}"
        yield (
            f"  {sample.text!r}  [{sample.finish_reason}, {len(sample.tokens)} tokens, "
            f"mean log-prob {sample.mean_logprob:.3f}]"
        )
        pairs = zip(sample.tokens, sample.logprobs, strict=True)
        yield "  " + " ".join(f"{token!r}:{logprob:.2f}" for token, logprob in pairs)


async def talk(
    config: Config, questions: Iterable[str], write: Callable[[str], None], *, scored: bool
) -> None:
    """Answer the questions, in one conversation until `/reset`; `write` gets text as it comes.

    scored: the config has tasks of its own, whose rewards are shown.
    """
    chat = ChatTemplate.from_config(config.model)
    tasks = {**config.tasks, **config.eval.tasks} if scored else {}
    known = _known_prompts(tasks.values(), config.seed)
    async with opened_engine(config) as engine:
        conversation = Conversation(config, chat, engine, next(iter(tasks.values()), None))
        for question in questions:
            if question == "/reset":
                conversation.messages.clear()
                write("a new conversation\n")
            elif question.startswith("/"):
                write(f"{HELP}\n")
            elif question.strip():
                record = None if conversation.messages else known.get(question.strip())
                try:
                    async for piece in conversation.answer(question):
                        write(piece)
                except UserError as error:  # it has no room left: /reset makes some
                    write(f"{error}\n")
                    continue
                write("\n")
                if record is not None:
                    write(f"{await _reward(*record, conversation)}\n")


class Conversation:
    """The messages so far, and the engine that answers."""

    def __init__(
        self,
        config: Config,
        chat: ChatTemplate,
        engine: InferenceEngine,
        task: TaskDataConfig | None,
    ) -> None:
        self.messages: list[dict[str, str]] = []
        self.response_ids = np.zeros(0, np.int32)  # of the newest answer
        self._config, self._chat, self._engine = config, chat, engine
        self._system_prompt = task.system_prompt if task else ""
        self._arguments = task.chat_template_kwargs if task else {}
        self._context = context_length(config.model.path) or 1 << 30

    async def answer(self, question: str) -> AsyncIterator[str]:
        """Yield the pieces of the answer to a question, which then belongs to the conversation."""
        asked = [*self.messages, {"role": "user", "content": question}]
        prompt_ids = self._chat.encode(asked, self._system_prompt, self._arguments)
        most = min(self._config.sampling.max_tokens, self._context - len(prompt_ids))
        if most < 1:
            raise UserError(
                f"chat: got a conversation of {len(prompt_ids)} tokens, allowed: fewer than the model's "
                f"context of {self._context}; /reset begins a new one"
            )
        ids, shown = np.zeros(0, np.int32), ""
        ended = False
        while not ended:
            size = min(most, len(ids) + _PIECE)
            request = GenerationRequest(
                request_id=f"{len(self.messages)}.{len(ids)}",
                prompt_ids=prompt_ids,
                sampling=SamplingParams.from_config(
                    self._config.sampling, max_tokens=size, min_tokens=0
                ),
                seed=self._config.seed + len(self.messages),
                response_ids=ids,
            )
            [piece] = await self._engine.generate_many([request])
            if piece.finish_reason == "error":
                raise EngineError(f"chat: {piece.error}")
            ids = np.concatenate([ids, piece.token_ids]).astype(np.int32)
            ended = piece.finish_reason != "length" or len(ids) >= most
            text = self._chat.decode(ids.tolist())
            if ended or not text.endswith("\ufffd"):  # a character may have several tokens
                yield text[len(shown) :]
                shown = text
        self.response_ids = ids
        self.messages = [*asked, {"role": "assistant", "content": shown}]


def _known_prompts(
    tasks: Iterable[TaskDataConfig], seed: int
) -> dict[str, tuple[TaskDataConfig, Prompt, bool]]:
    """The one-message prompts of the tasks that can be scored, by their text."""
    known: dict[str, tuple[TaskDataConfig, Prompt, bool]] = {}
    for task in tasks:
        if gives_own_reward(task):
            continue
        try:
            build_reward(task.rewards, max_tokens=1)
            prompts, is_chat = first_prompts(task, _MOST_RECORDS, seed)
        except UserError:  # data or functions that are not on this machine
            continue
        for prompt in prompts:
            if len(prompt.messages) == 1:
                known[str(prompt.messages[0]["content"]).strip()] = (task, prompt, is_chat)
    return known


async def _reward(
    task: TaskDataConfig, prompt: Prompt, is_chat: bool, conversation: Conversation
) -> str:
    """What the task's rewards give the newest answer, as a line."""
    text, length = conversation.messages[-1]["content"], len(conversation.response_ids)
    rollout = answered("chat", prompt, text, length)
    judge = build_reward(task.rewards, max_tokens=max(1, length), is_chat=is_chat)
    try:
        [score] = await judge.score_group([rollout], [prompt])
    except RewardError as error:
        return f"reward: none: {error}"
    finally:
        await judge.close()
    expected = f", expected {prompt.gt_answer}" if prompt.gt_answer is not None else ""
    return f"reward {score.value:g}{expected}"

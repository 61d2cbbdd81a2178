"""`penstock generate`: sample a policy and show each token with its log-prob.

Loads the config's engine and returns the samples; scores and keeps nothing.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from dataclasses import dataclass

from penstock.config import Config
from penstock.data.chat import ChatTemplate
from penstock.engine.protocol import Generation, GenerationRequest, SamplingParams
from penstock.errors import EngineError
from penstock.workers.inline import opened_engine


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
    """Sample each prompt `num_generations` times with [sampling]; `raw` skips the chat template."""
    return asyncio.run(_generate(config, prompts, num_generations, raw))


async def _generate(
    config: Config, prompts: list[str], num_generations: int, raw: bool
) -> list[Sample]:
    chat = ChatTemplate.from_config(config.model)
    requests = _requests(config, prompts, num_generations, raw, chat)
    async with opened_engine(config) as engine:
        generations = await engine.generate_many(requests)
    repeated = [prompt for prompt in prompts for _ in range(num_generations)]
    return [
        _sample(prompt, generation, chat)
        for prompt, generation in zip(repeated, generations, strict=True)
    ]


def _requests(
    config: Config, prompts: list[str], num_generations: int, raw: bool, chat: ChatTemplate
) -> list[GenerationRequest]:
    import numpy as np

    how = SamplingParams.from_config(config.sampling)
    requests = []
    for i, prompt in enumerate(prompts):
        if raw:
            ids = np.asarray(chat.tokenizer(prompt)["input_ids"], np.int32)
        else:
            ids = chat.encode([{"role": "user", "content": prompt}])
        for k in range(num_generations):
            seed = config.seed + i * num_generations + k
            requests.append(
                GenerationRequest(request_id=f"{i}.{k}", prompt_ids=ids, sampling=how, seed=seed)
            )
    return requests


def _sample(prompt: str, generation: Generation, chat: ChatTemplate) -> Sample:
    if generation.finish_reason == "error":
        raise EngineError(f"generate: {generation.error}")
    ids = generation.token_ids.tolist()
    return Sample(
        prompt=prompt,
        text=chat.decode(ids),
        tokens=tuple(chat.decode_prompt([token]) for token in ids),
        logprobs=tuple(float(value) for value in generation.logprobs),
        finish_reason=generation.finish_reason,
    )


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

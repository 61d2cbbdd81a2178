"""A tiny policy with a chat template that renders tools, and an engine that answers by a script."""

from __future__ import annotations

import string
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from small_policy import EOS, small_model, word_tokenizer
from tokenizers import Tokenizer, models, normalizers, processors
from transformers import PreTrainedTokenizerFast

from penstock.data.chat import ChatTemplate
from penstock.engine.protocol import Generation, GenerationRequest
from penstock.types import ModelCall, Rollout, VersionSegment

TEMPLATE = (
    "{% if tools %}<turn>tools\n{{ tools | tojson }}<eos>{% endif %}"
    "{% for m in messages %}<turn>{{ m.role }}\n{{ m.content }}"
    "{% for c in m.tool_calls or [] %}<tool_call>{{ c.function | tojson }}</tool_call>{% endfor %}"
    "<eos>{% endfor %}{% if add_generation_prompt %}<turn>assistant\n{% endif %}"
)
FORGETFUL = (  # drops the thoughts of every answer but the last, as Qwen3 does
    "{% for m in messages %}<turn>{{ m.role }}\n"
    "{% if loop.last %}{{ m.content }}{% else %}{{ m.content.split('</think>')[-1] }}{% endif %}"
    "<eos>{% endfor %}{% if add_generation_prompt %}<turn>assistant\n{% endif %}"
)
NO_END = "{% for m in messages %}<turn>{{ m.content }}{% endfor %}<turn>"


def chat_tokenizer(template: str = TEMPLATE) -> Any:
    """Return a tokenizer with one token per printable character."""
    return word_tokenizer(string.printable, roles=["<turn>"], template=template)


def spaced_tokenizer() -> Any:
    """Return a tokenizer that begins every text with a space and <s>, and ends none, as Llama 2's."""
    letters = {
        token: number for number, token in enumerate(["<s>", "</s>", *string.printable, "▁"])
    }
    backend = Tokenizer(models.BPE(letters, [], unk_token="</s>"))
    backend.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    backend.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", 0)]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        bos_token="<s>",
        eos_token="</s>",
        additional_special_tokens=["<turn>"],
    )


@cache
def chat_template(template: str = TEMPLATE) -> ChatTemplate:
    return ChatTemplate(chat_tokenizer(template))


def save_chat_policy(folder: Path, template: str = TEMPLATE) -> Path:
    """Write a random policy with its tokenizer to a folder."""
    tokens = chat_tokenizer(template)
    model = small_model(
        len(tokens),
        seed=7,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=512,
        initializer_range=0.2,
    )
    model.save_pretrained(folder)
    tokens.save_pretrained(folder)
    return folder


class ScriptedEngine:
    """Answers each request with the text that `say` gives for the prompt's text."""

    def __init__(self, say: Callable[[str], str], *, end: bool = True, version: int = 0) -> None:
        self._say, self._end = say, end
        self.version = version
        self.requests: list[GenerationRequest] = []

    async def generate(self, request: GenerationRequest) -> Generation:
        self.requests.append(request)
        chat = chat_template()
        text = self._say(chat.decode_prompt(request.prompt_ids))
        ids = chat.encode_text(text + ("<eos>" if self._end else ""))
        ids = ids[: request.sampling.max_tokens]
        is_cut = not len(ids) or ids[-1] != EOS
        return Generation(
            request_id=request.request_id,
            token_ids=ids,
            logprobs=-np.arange(1, len(ids) + 1, dtype=np.float32) / 100,
            segments=(VersionSegment(self.version, len(ids)),),
            finish_reason="length" if is_cut else "stop",
        )

    async def abort(self, request_id: str) -> None: ...


class Kept:
    """Keeps what a journal would record of an agent."""

    def __init__(self) -> None:
        self.calls: list[ModelCall] = []
        self.tools: list[tuple[str, str]] = []  # (what, name or result)

    async def record_call(self, rollout: Rollout, call: ModelCall) -> None:
        self.calls.append(call)

    async def begin_tool(self, rollout: Rollout, call_id: str, name: str) -> None:
        self.tools.append(("begun", name))

    async def end_tool(self, rollout: Rollout, call_id: str, outcome: str, result: str) -> None:
        self.tools.append((outcome, result))


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}

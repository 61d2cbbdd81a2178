"""The bridge over every chat template in TRL's package: what follows an answer is what the whole conversation has there."""

from __future__ import annotations

import json
import re
from functools import cache
from importlib.resources import files
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pytest

from penstock.data.chat import ChatTemplate
from penstock.errors import UserError
from penstock.rollout.agent.bridge import Bridge
from penstock.types import ModelCall, VersionSegment

FOLDER = files("trl") / "chat_templates"
TEMPLATES = {
    path.name.removesuffix(".jinja"): path.read_text("utf-8")
    for path in sorted(FOLDER.iterdir(), key=lambda path: path.name)
    if path.name.endswith(".jinja")
}
ENDS = {  # by the beginning of a template's name: what its models end an answer with
    "cohere": ("<|END_OF_TURN_TOKEN|>",),
    "deepseek": ("<｜end▁of▁sentence｜>",),
    "diffusion_gemma": ("<turn|>", "<|tool_response>"),
    "gemma4": ("<turn|>", "<|tool_response>"),
    "gemma": ("<end_of_turn>",),
    "glm4moe": ("<|endoftext|>", "<|user|>", "<|observation|>"),
    "gptoss": ("<|return|>", "<|call|>"),
    "idefics3": ("<end_of_utterance>",),
    "lfm2": ("<|im_end|>",),
    "llama3": ("<|eot_id|>", "<|eom_id|>"),
    "llava_next": ("</s>",),
    "muse_glimmer": ("<|eot|>", "<|eom|>"),
    "nemotron": ("<|im_end|>",),
    "phi3": ("<|endoftext|>", "<|end|>"),
    "qwen": ("<|im_end|>", "<|endoftext|>"),
    "smolvlm": ("<end_of_utterance>",),
}
_SPECIAL = re.compile(r"<\|[^<>\s'\"]+?\|?>|<[^<>\s'\"]+?\|>|<｜[^<>\s'\"]+?｜>|</?[a-z_]+>")
TOOL_TAGS = {  # tokens of their own that are not special, as Qwen's tokenizer has them
    f"<{slash}{name}>" for slash in ("", "/") for name in ("tool_call", "tool_response")
}
TOOL = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Add two numbers.",
        "parameters": {
            "type": "object",
            "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
            "required": ["a", "b"],
        },
    },
}


def said(text: str, *ids: str) -> dict[str, Any]:
    """Return an answer with a call of the tool per id."""
    calls = [
        {
            "id": one,
            "type": "function",
            "function": {"name": "add", "arguments": json.dumps({"a": 70 + n, "b": 8})},
        }
        for n, one in enumerate(ids)
    ]
    return {"role": "assistant", "content": text, **({"tool_calls": calls} if calls else {})}


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def result(text: str, call_id: str) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": call_id, "content": text}


# name: the answer, what follows it, whether the request has tools
TURNS = {
    "a question": (said("forty two"), [user("why so?")], False),
    "a question beside tools": (said("forty two"), [user("why so?")], True),
    "a question after thinking": (
        {**said("forty two"), "reasoning_content": "hm, six by seven"},
        [user("why so?")],
        False,
    ),
    "a result": (said("", "c00000001"), [result("78", "c00000001")], True),
    "a result after words": (said("I add.", "c00000001"), [result("78", "c00000001")], True),
    "an order and a question": (
        said("forty two"),
        [{"role": "system", "content": "be brief"}, user("why so?")],
        False,
    ),
    "two results": (
        said("", "c00000001", "c00000002"),
        [result("78", "c00000001"), result("79", "c00000002")],
        True,
    ),
    "a result and a question": (
        said("", "c00000001"),
        [result("78", "c00000001"), user("is it so?")],
        True,
    ),
}


def ends_of(name: str) -> tuple[str, ...]:
    return next(ends for start, ends in ENDS.items() if name.startswith(start))


@cache
def core() -> Any:
    """Return a byte-level tokenizer with merges, learnt from the templates, and their special tokens."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    special = {token for text in TEMPLATES.values() for token in _SPECIAL.findall(text)}
    special |= {end for ends in ENDS.values() for end in ends}
    special -= TOOL_TAGS
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=1500, initial_alphabet=alphabet, show_progress=False)
    made.train_from_iterator(
        (line for text in TEMPLATES.values() for line in text.split("\n")), trainer
    )
    made.add_special_tokens(sorted({*special, "<pad>"}))
    made.add_tokens(sorted(TOOL_TAGS))
    return made


@cache
def chat_of(name: str) -> ChatTemplate:
    from transformers import PreTrainedTokenizerFast

    first, *others = ends_of(name)
    made = PreTrainedTokenizerFast(
        tokenizer_object=core(), pad_token="<pad>", eos_token=first, bos_token="<bos>"
    )
    made.chat_template = TEMPLATES[name]
    with TemporaryDirectory() as model:
        ends = {"eos_token_id": made.convert_tokens_to_ids(others)}
        (Path(model) / "generation_config.json").write_text(json.dumps(ends))
        chat = ChatTemplate(made, model)
        assert chat.eos_ids  # read while the folder is there
    return chat


@cache
def outcome(name: str, turn: str) -> str:
    """Return exact, whole (not continued), refused (by the template) or wrong."""
    answer, added, has_tools = TURNS[turn]
    chat, tools = chat_of(name), [TOOL] if has_tools else []
    bridge = Bridge(chat)
    before = [user("one and one?"), said("two"), user("six by seven?")]
    try:
        first = bridge.render(before, tools)
        whole = bridge._text([*before, answer, *added], tools)
    except UserError:
        return "refused"
    found = set()
    for end in ends_of(name):
        token_ids = np.concatenate(
            [chat.encode_text("the sampled words"), [chat.tokenizer.convert_tokens_to_ids(end)]]
        ).astype(np.int32)
        call = ModelCall(
            number=0,
            parent=None,
            context_ids=first,
            token_ids=token_ids,
            logprobs=np.zeros(len(token_ids), np.float32),
            segments=(VersionSegment(0, len(token_ids)),),
            finish_reason="stop",
            messages=tuple(before),
            answer=answer,
            tools=json.dumps(tools) if tools else "",
        )
        suffix = bridge.suffix(call, added)
        if suffix is not None:
            found.add(judge(chat, whole, end, suffix, answer, added))
    if "wrong" in found:
        return "wrong"
    return "exact" if found else "whole"


def judge(
    chat: ChatTemplate,
    whole: str,
    end: str,
    suffix: np.ndarray,
    answer: dict[str, Any],
    added: list[dict[str, Any]],
) -> str:
    """Compare a suffix with the whole conversation: it follows the answer's one end token."""
    text = chat.decode_prompt(suffix)
    head = whole.removesuffix(text)
    if not whole.endswith(text):
        return "wrong"
    calls = answer.get("tool_calls")
    last = str(69 + len(calls)) if calls else answer["content"]
    tail = head[head.rindex(last) + len(last) :]
    if tail.count(end) != 1 or not tail.endswith(end) or any(m["content"] in tail for m in added):
        return "wrong"
    ids = np.concatenate([chat.encode_rendered(head), suffix])
    return "exact" if np.array_equal(ids, chat.encode_rendered(whole)) else "wrong"


# turns that are not continued: the template writes them otherwise in a whole conversation, or refuses them
WORDS, TOOLS = ("a result after words",), tuple(turn for turn in TURNS if "a result" in turn)
ORDER, TWO = ("an order and a question",), ("two results",)
QUESTIONS = tuple(turn for turn in TURNS if turn.startswith("a question"))
WHOLE = {
    "diffusion_gemma": WORDS,  # writes the words of an answer behind the result of its call
    "gemma4": WORDS,
    "glm4moe": ORDER,  # an answer ends with the next role: the order would come before the end
    "gptoss": (*QUESTIONS, *ORDER, *TWO),  # writes another end than was sampled; one call an answer
    "lfm2": (*TOOLS, *TWO),  # writes no calls
    "lfm2_training": (*TOOLS, *TWO),
    "lfm2_2_5": (),
    "lfm2_v2": (),
}
REFUSED = {
    "cohere": ORDER,
    "cohere2": (),
    "gemma": ORDER,
    "gemma4": (),
    "llama3_1": TWO,
    "llama3_2": TWO,
    "qwen3_5": ORDER,
    "qwen3_6": ORDER,
    "qwen3_8": ORDER,
}


def of(table: dict[str, tuple[str, ...]], name: str) -> tuple[str, ...]:
    """Return the entry with the longest beginning of the name."""
    starts = [start for start in table if name.startswith(start)]
    return table[max(starts, key=len)] if starts else ()


def family(name: str) -> str:
    return max((start for start in ENDS if name.startswith(start)), key=len)


FIRST = {family(name): name for name in reversed(TEMPLATES)}  # the others: `make test-long`


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[] if name in FIRST.values() else [pytest.mark.slow])
        for name in TEMPLATES
    ],
)
def test_a_continuation_is_what_the_whole_conversation_has_there(name: str) -> None:
    found = {turn: outcome(name, turn) for turn in TURNS}
    expected = dict.fromkeys(TURNS, "exact")
    expected |= dict.fromkeys(of(WHOLE, name), "whole") | dict.fromkeys(
        of(REFUSED, name), "refused"
    )
    assert found == expected


def test_the_templates_are_all_there() -> None:
    """A new version of TRL may bring templates."""
    assert len(TEMPLATES) == 72


@pytest.mark.slow
def test_the_figures_in_docs_agents_md_are_these() -> None:
    turns = [outcome(name, turn) for name in TEMPLATES for turn in TURNS]
    assert {kind: turns.count(kind) for kind in set(turns)} == {
        "exact": 533,
        "whole": 27,
        "refused": 16,
    }

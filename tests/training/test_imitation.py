"""Supervised fine-tuning: what of a demonstration is learned, its loss beside TRL's, wrong records."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from penstock.config import TaskConfig
from penstock.data import load_dataset
from penstock.data.chat import ChatTemplate, load_tokenizer
from penstock.data.dataset import check_context
from penstock.data.demonstration import shown_rows
from penstock.errors import UserError
from penstock.rollout.agent.demonstration import Demonstrations
from penstock.training.algo.method import check_algorithm
from penstock.types import Batch, Group, Rollout, Status
from stages.chat_policy import chat_template, spaced_tokenizer
from stages.training_data import config_of, consumer_of, gradient_of, relative_gap, tiny_model
from stages.trl_run import END, word_tokenizer

KEEPS = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% if m.role == 'assistant' %}<eos>{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)
# as templates do that drop the thoughts of earlier turns
FORGETS = KEEPS.replace("{{ m.content }}", "{{ m.content if loop.last else m.content[-1:] }}")
TALK = [
    {"role": "user", "content": "1+1="},
    {"role": "assistant", "content": "so2"},
    {"role": "user", "content": "2+2="},
    {"role": "assistant", "content": "so4"},
]


def chat_of(template: str) -> ChatTemplate:
    tokenizer = load_tokenizer("demo")
    tokenizer.chat_template = template
    return ChatTemplate(tokenizer)


def shown(chat: ChatTemplate, row: Any) -> tuple[str, str]:
    """The whole row, and what of it is learned, as text."""
    ids = np.concatenate([row.prompt_ids, row.token_ids])
    return chat.decode_prompt(ids), chat.decode_prompt(row.token_ids[row.learned])


def test_assistant_turns_are_learned_and_nothing_else() -> None:
    chat = chat_of(KEEPS)
    (row,) = shown_rows(chat, TALK[:1], TALK[1:])
    whole, learned = shown(chat, row)
    assert whole == "<user>1+1=<assistant>so2<eos><user>2+2=<assistant>so4<eos>"
    assert learned == "so2<eos>so4<eos>"


TOOL = {"function": {"name": "f", "arguments": {}}}


@pytest.mark.parametrize(
    ("answer", "text"),
    [
        ({"content": "e"}, "e<eos>"),  # letters of the end token
        ({"content": "eos"}, "eos<eos>"),
        ({"content": ""}, "<eos>"),
        (
            {"content": "", "tool_calls": [TOOL]},
            '<tool_call>{"name": "f", "arguments": {}}</tool_call><eos>',
        ),
        (
            {"content": "f", "tool_calls": [TOOL]},
            'f<tool_call>{"name": "f", "arguments": {}}</tool_call><eos>',
        ),
    ],
)
def test_an_answer_is_learned_up_to_its_end_whatever_it_says(
    answer: dict[str, Any], text: str
) -> None:
    chat = chat_template()
    (row,) = shown_rows(chat, [{"role": "user", "content": "q"}], [{"role": "assistant", **answer}])
    assert chat.decode_prompt(row.token_ids) == text
    assert row.learned.all()


def test_a_template_that_rewrites_earlier_turns_gets_a_row_for_each_answer() -> None:
    chat = chat_of(FORGETS)
    rows = shown_rows(chat, TALK[:1], TALK[1:])
    assert [shown(chat, row)[1] for row in rows] == ["so2<eos>", "so4<eos>"]
    assert chat.decode_prompt(rows[1].prompt_ids).startswith("<user>=<assistant>2<eos>")


REWRITES = (
    "{% for m in messages %}<turn>{{ m.role }}\n{{ WORDS }}<eos>{% endfor %}"
    "{% if add_generation_prompt %}<turn>assistant\nBEGIN{% endif %}"
)


SPACED, DROPPED = "m.content | replace('>', '> ')", "m.content.split('</think>')[-1]"


@pytest.mark.parametrize(
    ("words", "begin", "learned"),
    [
        (SPACED, "", "<think> 1</think> 2<eos>"),  # as Qwen3 does
        (SPACED, "<think> ", "1</think> 2<eos>"),
        (SPACED, "<think>\n", "1</think>2<eos>"),
        (DROPPED, "", "<think>1</think>2<eos>"),
        (DROPPED, "<think>\n", "1</think>2<eos>"),  # as DeepSeek-R1 does
        ("m.content", "<think>\n", "1</think>2<eos>"),
        ("m.content", "<think>", "1</think>2<eos>"),
    ],
)
def test_an_answer_that_the_template_rewrites_is_learned_once_with_its_thought(
    words: str, begin: str, learned: str
) -> None:
    chat = chat_template(REWRITES.replace("WORDS", words).replace("BEGIN", begin))
    answer = {"role": "assistant", "content": "<think>1</think>2"}
    (row,) = shown_rows(chat, [{"role": "user", "content": "q"}], [answer])
    assert chat.decode_prompt(row.prompt_ids) == f"<turn>user\nq<eos><turn>assistant\n{begin}"
    assert chat.decode_prompt(row.token_ids) == learned


@pytest.mark.parametrize("template", ["[{{ m.content }}] ", "<turn>{{ m.content }}\n", None])
def test_the_tokens_of_an_answer_are_those_of_the_whole_text(template: str | None) -> None:
    """The tokenizers of Llama 2, Gemma's kin and Mistral begin a text by itself with a space."""
    tokenizer = spaced_tokenizer()
    if template:
        tokenizer.chat_template = "{% for m in messages %}" + template + "{% endfor %}"
    user, answer = {"role": "user", "content": "12+3="}, {"role": "assistant", "content": "15 ok"}
    chat = ChatTemplate(tokenizer)
    (row,) = shown_rows(chat, [user], [answer])
    text = chat.render([user]) + chat.render_answer([user, answer])[1]
    whole = np.concatenate([row.prompt_ids, row.token_ids])[:-1]
    assert whole.tolist() == tokenizer(text, add_special_tokens=template is None)["input_ids"]
    assert tokenizer.convert_ids_to_tokens(int(row.token_ids[-1])) == "</s>"


def demonstrations(tmp_path: Path, *records: dict[str, Any], **fields: Any) -> list[Any]:
    path = tmp_path / "shown.jsonl"
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    task = TaskConfig(data=str(path), agent="demonstration", **fields)
    return list(load_dataset("train", task, chat_of(KEEPS)))


@pytest.mark.parametrize(
    "record",
    [
        {"messages": [{"role": "user", "content": "1+1="}, {"role": "assistant", "content": "2"}]},
        {"prompt": "1+1=", "completion": "2"},
        {"prompt": "1+1=", "completion": [{"role": "assistant", "content": "2"}]},
        {"question": "1+1=", "answer": "2"},
        {"question": "1+1=", "answer": 2},
        {"messages": [{"role": "user", "content": "1+1="}], "gt_answer": "2"},
        {"conversations": [{"from": "human", "value": "1+1="}, {"from": "gpt", "value": "2"}]},
    ],
)
def test_every_layout_of_a_record_is_one_demonstration(tmp_path: Path, record: Any) -> None:
    (prompt,) = demonstrations(tmp_path, record)
    rollout = Rollout(rollout_id="g.0", prompt_ids=prompt.token_ids, seed=0, prompt=prompt)
    loop = Demonstrations(chat_of(KEEPS), system_prompt="", arguments={}, max_tokens=8)
    asyncio.run(loop.generate_group([rollout]))
    assert rollout.status is Status.COMPLETED
    assert (rollout.text, rollout.finish_reason, rollout.reward) == ("2", "stop", 1.0)
    assert chat_of(KEEPS).decode_prompt(rollout.prompt_ids) == "<user>1+1=<assistant>"


CALLS = {"role": "assistant", "content": None, "tool_calls": [TOOL]}
WRITTEN = {"function": {"name": "f", "arguments": "{}"}}  # as OpenAI writes arguments
TOOLS = [{"type": "function", "function": {"name": "f"}}]


@pytest.mark.parametrize("tools", [TOOLS, json.dumps(TOOLS)])
@pytest.mark.parametrize("call", [TOOL, WRITTEN])
def test_tools_and_calls_without_words_reach_the_chat_template(
    tmp_path: Path, tools: Any, call: dict[str, Any]
) -> None:
    chat, path = chat_template(), tmp_path / "shown.jsonl"
    turns = [{"role": "user", "content": "q"}, {**CALLS, "tool_calls": [call]}]
    path.write_text(json.dumps({"messages": turns, "tools": tools}))
    (prompt,) = load_dataset("train", TaskConfig(data=str(path), agent="demonstration"), chat)
    rollout = Rollout(rollout_id="g.0", prompt_ids=prompt.token_ids, seed=0, prompt=prompt)
    loop = Demonstrations(chat, system_prompt="", arguments={}, max_tokens=99)
    asyncio.run(loop.generate_group([rollout]))
    assert chat.decode_prompt(rollout.prompt_ids) == (
        '<turn>tools\n[{"type": "function", "function": {"name": "f"}}]<eos>'
        "<turn>user\nq<eos><turn>assistant\n"
    )
    assert chat.decode(rollout.response_ids) == (
        '<tool_call>{"name": "f", "arguments": {}}</tool_call>'
    )


def test_tools_that_the_chat_template_leaves_out_are_refused(tmp_path: Path) -> None:
    with pytest.raises(
        UserError, match=r"tasks\.train: a record: got 'tools', allowed: a variable"
    ):
        demonstrations(tmp_path, {"messages": TALK, "tools": TOOLS})


def test_calls_that_the_chat_template_leaves_out_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"a record: got 'tool_calls', allowed: a variable"):
        demonstrations(tmp_path, {"messages": [TALK[0], CALLS]})


def test_a_solution_is_imitated_as_a_whole(tmp_path: Path) -> None:
    (prompt,) = demonstrations(tmp_path, {"question": "1+1=", "answer": "1 and 1\n#### 2"})
    assert prompt.extra["demonstration"][0]["content"] == "1 and 1\n#### 2"


def test_a_long_demonstration_is_cut_and_counted(tmp_path: Path) -> None:
    (prompt,) = demonstrations(tmp_path, {"prompt": "1+1=", "completion": "22222"})
    rollout = Rollout(rollout_id="g.0", prompt_ids=prompt.token_ids, seed=0, prompt=prompt)
    loop = Demonstrations(chat_of(KEEPS), system_prompt="", arguments={}, max_tokens=3)
    asyncio.run(loop.generate_group([rollout]))
    assert (rollout.text, rollout.finish_reason) == ("222", "length")


@pytest.mark.parametrize("template", [KEEPS, FORGETS])
def test_a_demonstration_is_cut_at_the_models_context(tmp_path: Path, template: str) -> None:
    (prompt,) = demonstrations(tmp_path, {"messages": TALK})
    loop = Demonstrations(
        chat_of(template), system_prompt="", arguments={}, max_tokens=99, positions=9
    )
    rollout = Rollout(rollout_id="g.0", prompt_ids=prompt.token_ids, seed=0, prompt=prompt)
    asyncio.run(loop.generate_group([rollout]))
    assert len(prompt.token_ids) + len(rollout.response_ids) == 9
    assert rollout.finish_reason == "length"


def test_a_prompt_that_fills_the_context_is_refused(tmp_path: Path) -> None:
    (tmp_path / "data.jsonl").write_text(json.dumps({"prompt": "1" * 300, "answer": "2"}))
    fields = {"data": str(tmp_path / "data.jsonl"), "max_prompt_tokens": 400}
    config = config_of(tasks={"train": fields | {"agent": "demonstration"}})
    dataset = load_dataset("train", config.tasks["train"], chat_of(KEEPS))
    with pytest.raises(
        UserError, match=r"tasks\.train: a prompt of 302 tokens, allowed: less than"
    ):
        check_context(config, {"train": dataset})


@pytest.mark.parametrize(
    ("record", "said"),
    [
        ({"messages": [{"role": "user", "content": "1+1="}]}, "no answer to imitate"),
        ({"prompt": "1+1="}, "allowed: messages with an assistant turn, or one of completion"),
        ({"prompt": "1+1=", "completion": {"text": "2"}}, "a turn to imitate without role or text"),
        ({"prompt": "1+1=", "completion": [{"content": "2"}]}, "imitate without role or text"),
        ({"prompt": "1+1=", "completion": []}, "no answer to imitate"),
        ({"prompt": "1", "completion": [{"role": "user", "content": "2"}]}, "no answer to imitate"),
        ({"prompt": "1", "completion": [{**CALLS, "tool_calls": [1]}]}, "got other tool_calls"),
        (
            {"messages": [{"role": "assistant", "content": "2"}]},
            "an assistant turn first, allowed: a prompt",
        ),
    ],
)
def test_a_record_without_a_demonstration_is_named(tmp_path: Path, record: Any, said: str) -> None:
    with pytest.raises(UserError, match=said) as error:
        demonstrations(tmp_path, record)
    assert "line 1" in str(error.value)


@pytest.mark.parametrize(("name", "agent"), [("sft", "single_turn"), ("grpo", "demonstration")])
def test_the_algorithm_and_the_data_must_agree(name: str, agent: str) -> None:
    config = config_of(algorithm={"name": name}, tasks={"train": {"agent": agent}})
    with pytest.raises(UserError, match="demonstration with algorithm sft"):
        check_algorithm(config)


def imitation_batch(records: list[tuple[list[int], list[int]]]) -> Batch:
    """A batch of one group for each (prompt, answer)."""
    groups = []
    for number, (prompt, answer) in enumerate(records):
        batch = _random_group(number)
        rollout = batch.rollouts[0]
        rollout.prompt_ids = np.array(prompt, np.int32)
        rollout.response_ids = np.array(answer, np.int32)
        rollout.logprobs = np.zeros(len(answer), np.float32)
        rollout.loss_mask = np.ones(len(answer), np.bool_)
        rollout.segments = (type(rollout.segments[0])(0, len(answer)),)
        groups.append(batch)
    return Batch(step=1, groups=tuple(groups))


def _random_group(number: int) -> Group:
    from penstock.types import Score
    from stages.training_data import random_group

    group = random_group(number, np.random.default_rng(number), size=1)
    group.rollouts[0].score = Score(1.0)
    group.rollouts[0].finish_reason = "stop"
    return group


def test_loss_and_gradient_are_those_of_trl(tmp_path: Path, monkeypatch: Any) -> None:
    pytest.importorskip("trl.trainer.sft_trainer", reason="TRL is not installed")
    from datasets import Dataset
    from trl import SFTConfig, SFTTrainer

    monkeypatch.setenv("TRL_EXPERIMENTAL_SILENCE", "1")
    generator = np.random.default_rng(0)
    records = [
        (
            generator.integers(3, 23, 2 + number % 3).tolist(),
            [*generator.integers(3, 23, 1 + 2 * number).tolist(), END],
        )
        for number in range(5)
    ]
    config = config_of(algorithm={"name": "sft"}, tasks={"train": {"agent": "demonstration"}})
    model = tiny_model(dtype=torch.float32)
    model.save_pretrained(tmp_path / "policy")
    batch = imitation_batch(records)
    consumer = consumer_of(config, model=tiny_model(dtype=torch.float32))
    loss = consumer.train(batch).metrics["loss/demonstration"]
    gradient = gradient_of(config, batch, model=tiny_model(dtype=torch.float32))
    rows = [
        {"input_ids": prompt + answer, "completion_mask": [0] * len(prompt) + [1] * len(answer)}
        for prompt, answer in records
    ]
    settings = SFTConfig(
        output_dir=str(tmp_path), use_cpu=True, bf16=False, report_to="none", max_steps=1, disable_tqdm=True,
        per_device_train_batch_size=len(rows), gradient_checkpointing=False, model_init_kwargs={"dtype": "float32"},
        completion_only_loss=True, logging_strategy="no", save_strategy="no",
    )  # fmt: skip
    trainer = SFTTrainer(
        model=str(tmp_path / "policy"),
        args=settings,
        train_dataset=Dataset.from_list(rows),
        processing_class=word_tokenizer(),
    )
    inputs = trainer.data_collator([trainer.train_dataset[n] for n in range(len(rows))])
    theirs = trainer.compute_loss(trainer.model, inputs)
    theirs.backward()
    wanted = {n: p.grad for n, p in trainer.model.named_parameters() if p.grad is not None}
    assert loss == pytest.approx(float(theirs.detach()), rel=1e-5)
    assert relative_gap(gradient, wanted) < 1e-5

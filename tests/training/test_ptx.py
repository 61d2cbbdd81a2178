"""The texts of PTX: their tokens, their weight in the loss, and which of them an update learns."""

import json

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedTokenizerFast

from penstock.config import PtxConfig
from penstock.config.demo import context_length
from penstock.data.chat import ChatTemplate, load_tokenizer
from penstock.errors import UserError
from penstock.training.parallel.ranks import Ranks
from penstock.training.ptx import read_texts, text_group, texts_of, texts_of_update
from penstock.types import Group
from stages.training_data import (
    config_of,
    consumer_of,
    exact_model,
    gradient_of,
    random_batch,
    relative_gap,
)


def some_texts(count: int = 5) -> list[Group]:
    generator = np.random.default_rng(3)
    lengths = generator.integers(3, 9, count)
    return [text_group(generator.integers(1, 23, n)) for n in lengths]


def ids_of(text: Group) -> np.ndarray:
    (rollout,) = text.rollouts
    return np.concatenate([rollout.prompt_ids, rollout.response_ids])


def ptx(coefficient: float, **fields):
    settings = {"coefficient": coefficient, "data": "texts.jsonl", "sequences_per_step": 3}
    return config_of(train={"lr": 1e-2, "ptx": settings} | fields)


def test_the_loss_is_a_mix_of_policy_loss_and_cross_entropy() -> None:
    texts, batch = some_texts(), random_batch()
    model = exact_model()
    losses, num_tokens = 0, 0
    for text in texts[:3]:
        ids = torch.from_numpy(ids_of(text)).long()
        log_all = torch.log_softmax(model(ids[None]).logits[0], -1)[:-1]
        losses = losses - log_all.gather(-1, ids[1:, None]).sum()
        num_tokens += len(ids) - 1
    (losses / num_tokens).backward()
    policy = gradient_of(config_of(), batch, model=exact_model())
    expected = {n: 0.75 * policy[n] + 0.25 * p.grad for n, p in model.named_parameters()}
    for tokens in (1, 10_000):
        config = ptx(0.25, micro_batch_tokens=tokens)
        got = gradient_of(config, batch, model=exact_model(), texts=texts)
        assert relative_gap(got, expected) < 1e-12


def test_the_texts_go_round_and_a_resumed_run_continues(tmp_path) -> None:
    consumer = consumer_of(ptx(0.5), texts=some_texts())
    first = consumer.train(random_batch(1)).metrics["ptx/loss"]
    assert first > 0
    consumer.snapshot(tmp_path)()
    expected = consumer.train(random_batch(2))
    assert expected.metrics["ptx/loss"] != first
    resumed = consumer_of(ptx(0.5), texts=some_texts())
    resumed.load(tmp_path)
    assert resumed.train(random_batch(2)).digest == expected.digest


def test_each_update_learns_the_next_texts() -> None:
    """Three texts an update, and two updates a step; the loss of a step is the mean of its updates'."""
    texts = some_texts()

    def loss(chosen: list[Group], step: int, num_epochs: int) -> float:
        config = ptx(1.0, num_epochs=num_epochs, lr=1e-9)
        return consumer_of(config, texts=chosen).train(random_batch(step)).metrics["ptx/loss"]

    alone = [loss(texts_of_update(texts, update, 3, Ranks()), 1, 1) for update in (2, 3)]
    assert alone[0] != pytest.approx(alone[1])
    assert loss(texts, 2, 2) == pytest.approx(np.mean(alone), rel=1e-6)


def test_ranks_share_the_texts_of_an_update() -> None:
    texts = some_texts()
    whole = texts_of_update(texts, 1, 3, Ranks())
    assert [text is texts[number] for text, number in zip(whole, (3, 4, 0), strict=True)] == [
        True
    ] * 3
    shares = [texts_of_update(texts, 1, 3, Ranks(rank, 2)) for rank in range(2)]
    assert [text for pair in zip(*shares, strict=False) for text in pair] == whole[:2]
    assert shares[0][1] is whole[2]


def test_a_text_is_cut_at_the_models_context(tmp_path) -> None:
    path = tmp_path / "texts.jsonl"
    path.write_text(json.dumps({"text": "7" * 900}))
    settings = {"coefficient": 0.5, "data": str(path), "max_tokens": 512}
    config = config_of(model={"path": "demo"}, train={"ptx": settings})
    (text,) = texts_of(config)
    assert len(ids_of(text)) == context_length("demo")
    assert texts_of(config_of()) == []


def test_lines_become_tokens(tmp_path) -> None:
    path = tmp_path / "texts.jsonl"
    lines = [
        {"text": "1+2=3"},
        {"messages": [{"role": "user", "content": "1+2="}, {"role": "assistant", "content": "3"}]},
    ]
    path.write_text("\n".join(json.dumps(line) for line in lines) + "\n\n")
    template = ChatTemplate(load_tokenizer("demo"))
    whole, answer = read_texts(PtxConfig(coefficient=0.1, data=str(path)), template)
    assert template.decode(ids_of(whole)) == "1+2=3"
    assert len(whole.rollouts[0].prompt_ids) == 1
    learned = answer.rollouts[0].response_ids
    assert template.decode(learned) == "3"
    assert learned[-1] == template.eos_ids[0]
    short = read_texts(PtxConfig(coefficient=0.1, data=str(path), max_tokens=3), template)
    assert len(ids_of(short[0])) == 3


@pytest.mark.parametrize(
    ("after", "taught"),
    [
        ("<system>\n", "3<system>"),  # Gemma, Qwen: an end of turn, and a line break behind it
        ("<system>\n<eos>", "3<system>"),  # Phi-3: the end of the text follows
        ("<eos>", "3<eos>"),
        ("", "3<eos>"),  # the template ends no turn
    ],
)
def test_an_answer_ends_as_the_template_ends_a_turn(tmp_path, after, taught) -> None:
    tokenizer = load_tokenizer("demo")
    tokenizer.chat_template = (
        "{% for m in messages %}<{{ m.role }}>{{ m.content | trim }}{% if m.role == 'assistant' %}"
        + after
        + "{% endif %}{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
    )
    path = tmp_path / "texts.jsonl"
    turns = [("user", "1+1="), ("assistant", "2"), ("user", "1+2="), ("assistant", " 3 ")]
    messages = [{"role": role, "content": content} for role, content in turns]
    path.write_text(json.dumps({"messages": messages}))
    template = ChatTemplate(tokenizer)
    (text,) = read_texts(PtxConfig(coefficient=0.1, data=str(path)), template)
    assert template.decode_prompt(text.rollouts[0].response_ids) == taught
    prompt = template.encode(messages[:-1])
    assert text.rollouts[0].prompt_ids.tolist() == prompt.tolist()


@pytest.mark.parametrize("adds", [True, False])
def test_a_text_begins_as_the_tokenizer_begins_one(tmp_path, adds) -> None:
    """Llama's and Gemma's tokenizers add a beginning-of-sequence token, GPT-2's has one and does not."""
    core = Tokenizer(models.WordLevel({"<s>": 0, "</s>": 1, "one": 2, "two": 3}, unk_token="<s>"))
    core.pre_tokenizer = pre_tokenizers.Whitespace()
    if adds:
        core.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, bos_token="<s>", eos_token="</s>")
    path = tmp_path / "texts.jsonl"
    path.write_text('{"text": "one two"}\n')
    (text,) = read_texts(PtxConfig(coefficient=0.1, data=str(path)), ChatTemplate(tokenizer))
    assert ids_of(text).tolist() == ([0] if adds else []) + [2, 3, 1]
    assert len(text.rollouts[0].prompt_ids) == 1


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b'{"question": "x"}\n',
        b'{"text": "cut off',
        b'["text"]',
        b'{"messages": ["1+2=", "3"]}',
        b'{"messages": [{"role": "user"}, {"role": "assistant"}]}',
        b'{"messages": [{"role": "user", "content": "1"}, {"role": "assistant", "content": null}]}',
        b'{"messages": [{"role": "user", "content": "1"}, {"role": "assistant", "content": ["2"]}]}',
        b'{"messages": [{"role": "assistant", "content": "1"}, {"role": "user", "content": "2"}]}',
        b'{"text": "\xff"}',
    ],
)
def test_a_stream_without_texts_is_refused(tmp_path, content) -> None:
    path = tmp_path / "texts.jsonl"
    path.write_bytes(content)
    template = ChatTemplate(load_tokenizer("demo"))
    with pytest.raises(UserError, match=r"train\.ptx\.data"):
        read_texts(PtxConfig(coefficient=0.1, data=str(path)), template)
    with pytest.raises(UserError, match="exists"):
        read_texts(PtxConfig(coefficient=0.1, data=str(tmp_path / "none")), template)

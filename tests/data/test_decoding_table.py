"""Tests of decoding by a table: the same text as the tokenizer's own, for every kind that has a table."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from penstock.data.chat import ChatTemplate, load_tokenizer
from penstock.data.decoding_table import TokenText, has_table

ADDED = ["<|im_end|>", "<think>", "a b", "▁x", "你好", "✓"]


def byte_level() -> Tokenizer:
    """Return a tokenizer of all bytes and of random pieces of them; many pieces are no UTF-8."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    random = np.random.default_rng(0)
    pieces = {"".join(random.choice(letters, random.integers(2, 6))) for _ in range(500)}
    vocabulary = {piece: place for place, piece in enumerate([*letters, *sorted(pieces)])}
    made = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    made.decoder = decoders.ByteLevel()
    made.add_tokens([AddedToken(word, special=place < 2) for place, word in enumerate(ADDED)])
    return made


@pytest.mark.parametrize("seed", range(8))
def test_a_byte_level_table_gives_the_text_of_the_tokenizer(seed: int) -> None:
    tokenizer, random = byte_level(), np.random.default_rng(seed)
    table, size = TokenText(tokenizer, ()), tokenizer.get_vocab_size()
    for text in ("", "a", "naïve 你好 🙂 <think>", "\n\t "):
        ids = [tokenizer.token_to_id(letter) for letter in _letters(text)]
        assert table.join(ids) == tokenizer.decode(ids, skip_special_tokens=False) == text
    for _ in range(300):
        ids = random.integers(0, size + 3, random.integers(0, 40)).tolist()
        assert table.join(ids) == tokenizer.decode(ids, skip_special_tokens=False)


def _letters(text: str) -> list[str]:
    """Return the letters that stand for the bytes of a text in a byte-level vocabulary."""
    split = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False).pre_tokenize_str(text)
    return [letter for word, _ in split for letter in word]


def test_every_byte_has_its_letter() -> None:
    tokenizer = byte_level()
    table = TokenText(tokenizer, ())
    parts = [table[number] for number in range(256)]
    assert sorted(parts) == [bytes([byte]) for byte in range(256)]


def test_dropped_and_unknown_ids_have_no_text_and_a_token_that_is_added_later_has() -> None:
    tokenizer = byte_level()
    size = tokenizer.get_vocab_size()
    table = TokenText(tokenizer, [size - 1])
    assert table.join([size - 1, size, size - 2]) == ADDED[-2]
    tokenizer.add_tokens(["later"])
    assert table.join([size]) == "later"


@pytest.mark.parametrize("text", ["1+1=2", "<think>7</think>", ""])
def test_the_demo_tokenizer_has_a_table_that_gives_its_text(text: str) -> None:
    chat = ChatTemplate(load_tokenizer("demo"))
    assert has_table(chat.tokenizer.backend_tokenizer)
    ids = chat.encode_text(text)
    assert chat.decode(ids) == chat.tokenizer.decode(ids) == text


class Shouting(PreTrainedTokenizerFast):
    def _decode(self, *args: Any, **kwargs: Any) -> str:
        return super()._decode(*args, **kwargs).upper()


@pytest.mark.parametrize("kind", [PreTrainedTokenizerFast, Shouting])
def test_a_tokenizer_of_another_kind_is_asked_itself(kind: type[PreTrainedTokenizerFast]) -> None:
    words = Tokenizer(models.WordLevel({"the": 0, "cat": 1, "##s": 2, "[END]": 3}, unk_token="the"))
    words.decoder = decoders.WordPiece(cleanup=False)
    if kind is Shouting:
        words.decoder = decoders.Fuse()
    chat = ChatTemplate(kind(tokenizer_object=words, eos_token="[END]"))
    assert chat.decode([0, 1, 2, 3]) == ("THECAT##S" if kind is Shouting else "the cats")

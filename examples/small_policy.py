"""Makes small policies: a tokenizer of whole words, a Qwen3 of some 10,000 weights, and its first lessons.

Used by `make_policy.py` of the recipes, and by the tests.
"""

from __future__ import annotations

import functools
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

SPECIAL = ("<pad>", "<eos>", "<unk>")
EOS = 1
CHAT = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}"
    "{% for c in m.tool_calls or [] %}<tool_call>{{ c.function | tojson }}</tool_call>{% endfor %}"
    "<eos>{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)
Conversation = list[tuple[str, bool]]  # parts, and whether the policy said each


def word_tokenizer(
    characters: Sequence[str],
    *,
    roles: Sequence[str] = (),
    words: Sequence[str] = (),
    template: str = "",
) -> Any:
    """Return a tokenizer with one token per role, per word and per character."""
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    names = (*SPECIAL, *roles, *words, *characters)
    vocabulary = {name: number for number, name in enumerate(names)}
    core = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    core.add_tokens([AddedToken(word, normalized=False) for word in words])
    core.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    core.decoder = decoders.Fuse()
    made = PreTrainedTokenizerFast(
        tokenizer_object=core,
        pad_token="<pad>",
        eos_token="<eos>",
        unk_token="<unk>",
        extra_special_tokens=list(roles),
    )
    if template:
        made.chat_template = template
    return made


def small_model(vocabulary: int, *, seed: int, attention: str = "sdpa", **shape: Any) -> Any:
    """Return a random Qwen3 with tied embeddings in float32; `shape` overrides its sizes."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(seed)
    sizes = {
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 64,
        "tie_word_embeddings": True,
        "eos_token_id": EOS,
        **shape,
    }
    config = Qwen3Config(vocab_size=vocabulary, **sizes)
    return Qwen3ForCausalLM._from_config(config, attn_implementation=attention).float()


def teach(
    model: nn.Module,
    tokens: Any,
    conversation: Callable[[random.Random], Conversation],
    *,
    steps: int = 1500,
    batch: int = 64,
    rate: float = 3e-3,
) -> float:
    """Train the model on made conversations, on what the policy said in them; return the last loss."""
    choice = random.Random(0)
    encode = functools.cache(lambda text: tokens(text, add_special_tokens=False)["input_ids"])
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    loss = torch.zeros(())
    for _ in range(steps):
        ids, labels = [], []
        for _ in range(batch):
            row, target = [], []
            for text, is_said in conversation(choice):
                part = encode(text)
                row += part
                target += part if is_said else [-100] * len(part)
            ids.append(torch.tensor(row))
            labels.append(torch.tensor(target))
        rows = nn.utils.rnn.pad_sequence(ids, batch_first=True)
        wanted = nn.utils.rnn.pad_sequence(labels, batch_first=True, padding_value=-100)
        loss = model(input_ids=rows, labels=wanted).loss
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
    return float(loss.detach())


def save(folder: Path, model: Any, tokens: Any) -> None:
    """Write the policy, with weights in bfloat16, as `model.path` takes it."""
    model.eval().to(torch.bfloat16).save_pretrained(folder)
    tokens.save_pretrained(folder)

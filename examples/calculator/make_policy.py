"""Makes the policy that the recipe starts from: it calls the calculator in one rollout of four, else it guesses.

    python examples/calculator/make_policy.py

Trains a model of 70,000 weights from nothing on made conversations, in about a minute on a CPU. It copies
digits well and cannot add: a direct answer is random in its training data.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import torch
from torch import nn

CALL = ('<tool_call>{"name": "add", "arguments": {"a": ', ', "b": ', "}}</tool_call>")
ROLES = ("<user>", "<assistant>", "<tool>", "<tools>", "<system>")
NAMES = ("<pad>", "<eos>", "<unk>", *ROLES, *CALL, *"0123456789+")
TEMPLATE = (
    "{% if tools %}<tools>{% endif %}{% for m in messages %}<{{ m.role }}>{{ m.content }}"
    "{% for c in m.tool_calls or [] %}<tool_call>{{ c.function | tojson }}</tool_call>{% endfor %}"
    "<eos>{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)
SHARE_OF_CALLS = 0.25
STEPS, BATCH, RATE = 1500, 64, 3e-3


def tokenizer() -> Any:
    """Return a tokenizer with one token per digit, and one per fixed part of a call."""
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {name: number for number, name in enumerate(NAMES)}
    core = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    core.add_tokens([AddedToken(part, normalized=False) for part in CALL])
    core.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    core.decoder = decoders.Fuse()
    made = PreTrainedTokenizerFast(
        tokenizer_object=core,
        pad_token="<pad>",
        eos_token="<eos>",
        unk_token="<unk>",
        extra_special_tokens=list(ROLES),
    )
    made.chat_template = TEMPLATE
    return made


def conversation(choice: random.Random) -> list[tuple[str, bool]]:
    """Return the parts of one conversation, and whether the policy said each."""
    a, b = choice.randint(100, 499), choice.randint(100, 499)
    asked = [(f"<tools><user>{a}+{b}<eos><assistant>", False)]
    if choice.random() < SHARE_OF_CALLS:
        call = f"{CALL[0]}{a}{CALL[1]}{b}{CALL[2]}<eos>"
        result = f"<tool>{a + b}<eos><assistant>"
        return [*asked, (call, True), (result, False), (f"{a + b}<eos>", True)]
    return [*asked, (f"{choice.randint(200, 998)}<eos>", True)]


def train(model: nn.Module, encode: Any) -> float:
    """Train the model on conversations; return the last loss."""
    choice = random.Random(0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS)
    loss = torch.zeros(())
    for _ in range(STEPS):
        ids, labels = [], []
        for _ in range(BATCH):
            row, target = [], []
            for text, is_said in conversation(choice):
                part = encode(text)
                row += part
                target += part if is_said else [-100] * len(part)
            ids.append(torch.tensor(row))
            labels.append(torch.tensor(target))
        batch = nn.utils.rnn.pad_sequence(ids, batch_first=True)
        wanted = nn.utils.rnn.pad_sequence(labels, batch_first=True, padding_value=-100)
        loss = model(input_ids=batch, labels=wanted).loss
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
    return float(loss.detach())


def main() -> None:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    torch.set_num_threads(1)
    tokens = tokenizer()
    config = Qwen3Config(
        vocab_size=len(NAMES),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=64,
        tie_word_embeddings=True,
        eos_token_id=NAMES.index("<eos>"),
        pad_token_id=NAMES.index("<pad>"),
        bos_token_id=None,
    )
    model = Qwen3ForCausalLM(config)
    loss = train(model, lambda text: tokens(text, add_special_tokens=False)["input_ids"])
    folder = Path(__file__).parent / "policy"
    model.eval().to(torch.bfloat16).save_pretrained(folder)
    tokens.save_pretrained(folder)
    print(f"loss {loss:.3f}, {sum(p.numel() for p in model.parameters())} weights, in {folder}")


if __name__ == "__main__":
    main()

"""Makes the policy that the recipe starts from: it calls the calculator in one rollout of four, else it guesses.

    python examples/calculator/make_policy.py

Trains a model of 75,000 weights from nothing on made conversations, in about a minute on a CPU. It copies
digits well and cannot add: a direct answer is random in its training data.
"""

from __future__ import annotations

import random
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from small_policy import CHAT, SPECIAL, Conversation, save, small_model, teach, word_tokenizer

CALL = ('<tool_call>{"name": "add", "arguments": {"a": ', ', "b": ', "}}</tool_call>")
ROLES = ("<user>", "<assistant>", "<tool>", "<tools>", "<system>")
CHARACTERS = "0123456789+"
SHARE_OF_CALLS = 0.25


def conversation(choice: random.Random) -> Conversation:
    """Return one sum, with a call of the calculator or without."""
    a, b = choice.randint(100, 499), choice.randint(100, 499)
    asked = [(f"<tools><user>{a}+{b}<eos><assistant>", False)]
    if choice.random() < SHARE_OF_CALLS:
        call = f"{CALL[0]}{a}{CALL[1]}{b}{CALL[2]}<eos>"
        result = f"<tool>{a + b}<eos><assistant>"
        return [*asked, (call, True), (result, False), (f"{a + b}<eos>", True)]
    return [*asked, (f"{choice.randint(200, 998)}<eos>", True)]


def main() -> None:
    torch.set_num_threads(1)
    template = "{% if tools %}<tools>{% endif %}" + CHAT
    tokens = word_tokenizer(CHARACTERS, roles=ROLES, words=CALL, template=template)
    size = len(SPECIAL) + len(ROLES) + len(CALL) + len(CHARACTERS)
    model = small_model(size, seed=0, pad_token_id=0, bos_token_id=None)
    loss = teach(model, tokens, conversation)
    folder = Path(__file__).parent / "policy"
    save(folder, model, tokens)
    print(f"loss {loss:.3f}, {sum(p.numel() for p in model.parameters())} weights, in {folder}")


if __name__ == "__main__":
    main()

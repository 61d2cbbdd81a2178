"""Makes the policy that the recipe starts from: it heeds the hints and mostly counts up.

    python examples/guess/make_policy.py

Trains a model of 75,000 weights from nothing on made games, in two to three minutes on a CPU. A guess in them is the
lowest number that the hints allow, or, in two of five cases, any number that they allow.
"""

from __future__ import annotations

import random
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parent))
from guess import MOST, NUMBERS
from small_policy import CHAT, SPECIAL, Conversation, save, small_model, teach, word_tokenizer

ROLES = ("<user>", "<assistant>", "<tool>", "<system>")
WORDS = ("guess", "higher", "lower", *NUMBERS)
SHARE_OF_JUMPS = 0.4  # guesses that are any number that the hints allow, not the lowest one


def conversation(choice: random.Random) -> Conversation:
    """Return one game."""
    secret, low, high = choice.randint(1, MOST), 1, MOST
    parts: Conversation = [("<user>guess<eos><assistant>", False)]
    for _ in range(MOST):
        guess = choice.randint(low, high) if choice.random() < SHARE_OF_JUMPS else low
        parts.append((f"{guess}<eos>", True))
        if guess == secret:
            break
        hint = "higher" if guess < secret else "lower"
        low, high = (guess + 1, high) if guess < secret else (low, guess - 1)
        parts.append((f"<user>{hint}<eos><assistant>", False))
    return parts


def main() -> None:
    torch.set_num_threads(1)
    tokens = word_tokenizer((), roles=ROLES, words=WORDS, template=CHAT)
    size = len(SPECIAL) + len(ROLES) + len(WORDS)
    model = small_model(
        size, seed=0, max_position_embeddings=128, pad_token_id=0, bos_token_id=None
    )
    loss = teach(model, tokens, conversation, steps=800, batch=48)
    folder = Path(__file__).parent / "policy"
    save(folder, model, tokens)
    print(f"loss {loss:.3f}, {sum(p.numel() for p in model.parameters())} weights, in {folder}")


if __name__ == "__main__":
    main()

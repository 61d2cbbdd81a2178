"""Makes the demo's starting policy: `python scripts/make_demo_policy.py [--out FOLDER]`.

A small Qwen3-shaped model is pre-trained, from a seed and on one CPU thread, to answer two-digit sums in
three styles. It seldom thinks (and is then right), mostly answers at once without
carries, and sometimes omits the think tags. Reinforcement learning has to find the style that pays.
Held-out sums (penstock.data.builtin.is_heldout) are never in this corpus.
"""

from __future__ import annotations

import argparse
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from penstock.data import builtin
from penstock.data.chat import ChatTemplate

SPECIAL_TOKENS = [
    "<pad>", "<eos>", "<unk>", "<user>", "<assistant>", "<system>",
    "<think>", "</think>", "<answer>", "</answer>",
]  # fmt: skip
CHARACTERS = ["\n", *(chr(code) for code in range(32, 127))]
CHAT_TEMPLATE = (
    "{% for message in messages %}<{{ message.role }}>{{ message.content }}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
STYLES = ("think", "hasty", "untagged")


@dataclass(frozen=True)
class Recipe:
    """All settings that decide the weights."""

    seed: int = 0
    steps: int = 800
    batch_size: int = 192
    lr: float = 3e-3
    even_share: float = 0.7  # of the steps with all styles equally likely; then `style_shares`
    style_shares: tuple[float, ...] = (0.16, 0.64, 0.20)  # think, hasty, untagged
    hidden_size: int = 128
    num_layers: int = 3
    mlp_size: int = 320


def response(a: int, b: int, style: str) -> str:
    """Return an answer to a+b in one of the three styles."""
    if style == "think":
        units, carry = a % 10 + b % 10, (a % 10 + b % 10) // 10
        tens = a // 10 + b // 10 + carry
        carried = "+1" if carry else ""
        steps = f"{a % 10}+{b % 10}={units} {a // 10}+{b // 10}{carried}={tens}"
        return f"<think>{steps}</think><answer>{a + b}</answer>"
    answer = f"<answer>{without_carries(a, b)}</answer>"
    return f"<think></think>{answer}" if style == "hasty" else answer


def without_carries(a: int, b: int) -> int:
    """Add digit by digit and forget every carry, as a hasty answer does."""
    return (a // 10 + b // 10) % 10 * 10 + (a + b) % 10


def build_tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer with one token per printable character and one per tag."""
    vocabulary = {token: i for i, token in enumerate(SPECIAL_TOKENS + CHARACTERS)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        eos_token="<eos>",
        unk_token="<unk>",
        additional_special_tokens=SPECIAL_TOKENS[3:],
        model_max_length=256,
        clean_up_tokenization_spaces=False,
    )
    fast.chat_template = CHAT_TEMPLATE
    return fast


def build_model(recipe: Recipe, tokenizer: PreTrainedTokenizerFast) -> Qwen3ForCausalLM:
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=recipe.hidden_size,
        intermediate_size=recipe.mlp_size,
        num_hidden_layers=recipe.num_layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=recipe.hidden_size // 4,
        max_position_embeddings=256,
        rope_theta=10000.0,
        tie_word_embeddings=True,
        attention_dropout=0.0,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
        bos_token_id=None,
        dtype="float32",
    )
    torch.manual_seed(recipe.seed)
    return Qwen3ForCausalLM(config)


class Corpus:
    """An endless sample of training sums in three styles; every text is tokenised once."""

    def __init__(self, chat: ChatTemplate) -> None:
        records = builtin.addition("train")
        prompts = chat.encode_many([record["messages"] for record in records])
        eos = chat.eos_ids[0]
        self.pad = chat.pad_id
        self.rows: dict[str, list[tuple[np.ndarray, int]]] = {style: [] for style in STYLES}
        sums = [record["messages"][0]["content"].split("+") for record in records]
        pairs = [(int(a), int(b)) for a, b in sums]
        assert not any(builtin.is_heldout(a, b) for a, b in pairs)
        for style in STYLES:
            texts = [response(a, b, style) for a, b in pairs]
            answers = chat.tokenizer(texts, add_special_tokens=False)["input_ids"]
            for prompt, answer in zip(prompts, answers, strict=True):
                self.rows[style].append((np.array([*prompt, *answer, eos]), len(prompt)))

    def batch(
        self, rng: np.random.Generator, size: int, shares: tuple[float, ...]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return ids and labels [size, length]; labels are -100 outside responses."""
        styles = rng.choice(len(STYLES), size=size, p=np.asarray(shares))
        picks = rng.integers(len(self.rows[STYLES[0]]), size=size)
        rows = [self.rows[STYLES[s]][i] for s, i in zip(styles, picks, strict=True)]
        length = max(len(ids) for ids, _ in rows)
        ids_BT = np.full((size, length), self.pad, dtype=np.int64)
        labels_BT = np.full((size, length), -100, dtype=np.int64)
        for row, (ids, start) in enumerate(rows):
            ids_BT[row, : len(ids)] = ids
            labels_BT[row, start : len(ids)] = ids[start:]
        return torch.from_numpy(ids_BT), torch.from_numpy(labels_BT)


def pretrain(model: Qwen3ForCausalLM, corpus: Corpus, recipe: Recipe) -> None:
    rng = np.random.default_rng(recipe.seed)
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=recipe.lr, betas=(0.9, 0.98), weight_decay=0.01
    )
    warmup = 100
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer,
        lambda step: min((step + 1) / warmup, 0.5 * (1 + np.cos(np.pi * step / recipe.steps))),
    )
    even = (1 / len(STYLES),) * len(STYLES)
    started = time.monotonic()
    model.train()
    for step in range(1, recipe.steps + 1):
        shares = even if step <= recipe.even_share * recipe.steps else recipe.style_shares
        ids_BT, labels_BT = corpus.batch(rng, recipe.batch_size, shares)
        logits = model(ids_BT[:, :-1]).logits  # right padding and a causal mask: no mask needed
        loss = torch.nn.functional.cross_entropy(
            logits.flatten(0, 1), labels_BT[:, 1:].flatten(), ignore_index=-100
        )
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        if step % 100 == 0:
            print(
                f"step {step} loss {loss.item():.4f} {time.monotonic() - started:.0f} s", flush=True
            )
    model.eval()


def is_right(text: str, gold: str) -> bool:
    """Return whether a response has the required form and the right sum."""
    head, _, tail = text.partition("</think>")
    well_formed = head.startswith("<think>") and all(
        text.count(tag) == 1 for tag in SPECIAL_TOKENS[6:]
    )
    return well_formed and tail == f"<answer>{gold}</answer>"


@torch.no_grad()
def measure(model: Qwen3ForCausalLM, chat: ChatTemplate, size: int = 0) -> dict[str, float]:
    """Return the accuracy on held-out sums: greedy, sampled, and sampled after a forced thought."""
    records = builtin.addition("heldout", size=size)
    prompts = chat.encode_many([record["messages"] for record in records])
    prompt_BT = torch.from_numpy(np.stack(prompts).astype(np.int64))
    golds = [record["gt_answer"] for record in records]
    think_id = chat.tokenizer.convert_tokens_to_ids("<think>")
    first_digit = prompt_BT[:, 2:3]  # <user> a a + b b <assistant>: the units of a begin a thought
    forced_BT = torch.cat([torch.full((len(records), 1), think_id), first_digit], dim=1)
    results: dict[str, float] = {}
    torch.manual_seed(0)
    for name, prefix_BT, sample in (
        ("greedy", None, False),
        ("sampled", None, True),
        ("thinking", forced_BT, True),
    ):
        texts = _generate(model, chat, prompt_BT, prefix_BT, sample)
        results[f"{name} accuracy"] = float(
            np.mean([is_right(t, g) for t, g in zip(texts, golds, strict=True)])
        )
        if name == "sampled":
            thought = [t.startswith("<think>") and not t.startswith("<think></") for t in texts]
            results["thinking share"] = float(np.mean(thought))
    return results


def _generate(
    model: Qwen3ForCausalLM,
    chat: ChatTemplate,
    prompt_BT: torch.Tensor,
    prefix_BT: torch.Tensor | None,
    sample: bool,
) -> list[str]:
    ids_BT = prompt_BT if prefix_BT is None else torch.cat([prompt_BT, prefix_BT], dim=1)
    options: dict[str, Any] = {"do_sample": True, "top_k": 0} if sample else {"do_sample": False}
    out_BT = model.generate(
        ids_BT, attention_mask=torch.ones_like(ids_BT), max_new_tokens=28, **options
    )
    return [chat.decode(row) for row in out_BT[:, prompt_BT.shape[1] :].tolist()]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    default_out = Path(__file__).parents[1] / "src" / "penstock" / "config" / "demo" / "policy"
    parser.add_argument("--out", type=Path, default=default_out)
    parser.add_argument("--seed", type=int, default=Recipe.seed)
    parser.add_argument("--steps", type=int, default=Recipe.steps)
    arguments = parser.parse_args()
    torch.set_num_threads(1)  # one thread: the same sums in the same order
    recipe = Recipe(seed=arguments.seed, steps=arguments.steps)
    tokenizer = build_tokenizer()
    chat = ChatTemplate(tokenizer)
    model = build_model(recipe, tokenizer)
    print(f"{model.num_parameters():,} parameters")
    pretrain(model, Corpus(chat), recipe)
    for name, value in measure(model, chat).items():
        print(f"{name}: {value:.3f}")
    model.save_pretrained(arguments.out)
    tokenizer.save_pretrained(arguments.out)
    for path in arguments.out.iterdir():
        path.chmod(0o644)  # safetensors writes for the owner alone; a package is for everyone
    print(f"wrote {arguments.out}")


if __name__ == "__main__":
    main()

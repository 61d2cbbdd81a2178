"""How many tokens a step exact speculation would make: drafts from a response's own text and from its siblings.

    python benchmarks/speculation.py MODEL PROMPTS.jsonl [--prompts 24] [--generations 8] [--tokens 160]

Samples groups at temperature 1 with the transformers engine, then replays them: before each step the longest earlier
place with the same last tokens (four to two) proposes what followed there. A proposed token counts if it is the one
that was sampled, so the distribution of tokens is exact whatever is proposed. `own` looks in the prompt and the
response so far, `siblings` also in the group's other responses as far as they are at that step, `finished` in all of
them, as for the last response of a group. Prints tokens per step: 1 is decoding without drafts.
"""

from __future__ import annotations

import argparse
import asyncio
import json
from pathlib import Path

import numpy as np
import torch

from penstock.data.chat import load_tokenizer
from penstock.engine.protocol import GenerationRequest, SamplingParams
from penstock.engine.transformers.engine import TransformersEngine
from penstock.engine.transformers.options import TransformersOptions
from penstock.model.loading import load_causal_lm

LONGEST, SHORTEST = 4, 2  # tokens that must be the same before a draft
DRAFTS = (1, 2, 4)  # tokens


def sample_groups(args: argparse.Namespace) -> list[tuple[list[int], list[list[int]]]]:
    """Return (prompt, responses) of each group."""
    tokenizer = load_tokenizer(args.model)
    lines = args.data.read_text("utf-8").splitlines()[: args.prompts]
    prompts = [
        tokenizer.apply_chat_template(
            _messages(json.loads(line)), add_generation_prompt=True, return_dict=False
        )
        for line in lines
    ]
    engine = TransformersEngine(
        lambda: load_causal_lm(
            str(args.model),
            dtype=torch.bfloat16 if args.device.startswith("cuda") else torch.float32,
            device=torch.device(args.device),
            trust_remote_code=False,
            attention="penstock",
        ),
        fetch=lambda _: [],
        options=TransformersOptions(device=args.device, max_slots=64, threads=args.threads),
    )
    requests = [
        GenerationRequest(
            request_id=f"{group}.{member}",
            prompt_ids=np.array(prompt, np.int32),
            sampling=SamplingParams(max_tokens=args.tokens),
            seed=1000 * group + member,
        )
        for group, prompt in enumerate(prompts)
        for member in range(args.generations)
    ]

    async def run() -> list[list[int]]:
        await engine.start()
        made = await engine.generate_many(requests)
        await engine.close()
        return [one.token_ids.tolist() for one in made]

    responses = asyncio.run(run())
    size = args.generations
    return [
        (list(prompt), responses[size * n : size * (n + 1)]) for n, prompt in enumerate(prompts)
    ]


def _messages(record: dict) -> list[dict]:
    if "messages" in record:
        return record["messages"]
    return [{"role": "user", "content": record.get("question") or record["prompt"]}]


def propose(text: list[int], others: list[list[int]], count: int) -> list[int]:
    """Return what followed the latest place where the last tokens of `text` stood before."""
    for length in range(LONGEST, SHORTEST - 1, -1):
        end = text[-length:]
        for source in (text[:-1], *others):
            for at in range(len(source) - length, -1, -1):
                if source[at : at + length] == end and (found := source[at + length :][:count]):
                    return found
    return []


def tokens_per_step(groups: list[tuple[list[int], list[list[int]]]], how: str, count: int) -> float:
    steps = tokens = 0
    for prompt, responses in groups:
        for member, response in enumerate(responses):
            at = 0
            while at < len(response):
                others = [one for n, one in enumerate(responses) if n != member]
                if how == "own":
                    others = []
                elif how == "siblings":
                    others = [one[:at] for one in others]
                accepted = 0
                for guess in propose(prompt + response[:at], others, count):
                    if at + accepted >= len(response) - 1 or guess != response[at + accepted]:
                        break
                    accepted += 1
                at, steps, tokens = at + accepted + 1, steps + 1, tokens + accepted + 1
    return tokens / max(steps, 1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("data", type=Path)
    parser.add_argument("--prompts", type=int, default=24)
    parser.add_argument("--generations", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=160)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args()
    groups = sample_groups(args)
    lengths = [len(response) for _, responses in groups for response in responses]
    print(f"{len(groups)} groups of {args.generations}, {np.mean(lengths):.0f} tokens on average")
    for how in ("own", "siblings", "finished"):
        cells = (f"{count} drafts {tokens_per_step(groups, how, count):.2f}" for count in DRAFTS)
        print(f"{how:9} tokens per step: {', '.join(cells)}")


if __name__ == "__main__":
    main()

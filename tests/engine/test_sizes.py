"""Slots and KV cache of an engine on a GPU, on numbers worked out by hand."""

from __future__ import annotations

import pytest

from penstock.config.source import load_config
from penstock.engine.transformers.options import Load, Sizes, choose_sizes, describe
from penstock.errors import UserError

GIB = 2**30
# SmolLM2-135M in bfloat16: 30 layers, keys and values, 3 heads of 64, 2 bytes
SMALL = 30 * 2 * 3 * 64 * 2
# Qwen2.5-7B: 28 layers, 4 heads of 128
LARGE = 28 * 2 * 4 * 128 * 2


@pytest.mark.parametrize(
    ("load", "given", "wanted"),
    [
        # an H200: all 1024 requests fit, the KV cache is what they need and not 60 % of the memory
        (Load(requests=1024, longest=384), {}, Sizes(slots=1024, tokens=1024 * 386)),
        # sessions: as much again for what the next turns go on from
        (
            Load(requests=1024, longest=384, sessions=True),
            {},
            Sizes(slots=1024, tokens=2 * 1024 * 386),
        ),
        # no more slots than requests, but never fewer than 16
        (Load(requests=200, longest=384), {}, Sizes(slots=200, tokens=200 * 386)),
        (Load(requests=4, longest=384), {}, Sizes(slots=16, tokens=16 * 386)),
        # no more than 1024
        (Load(requests=5000, longest=384), {}, Sizes(slots=1024, tokens=1024 * 386)),
        # the model's 2048 positions bound the longest request
        (Load(requests=100, longest=9000), {}, Sizes(slots=100, tokens=100 * 2050)),
        (Load(requests=100), {}, Sizes(slots=100, tokens=100 * 2050)),
        # settings win
        (Load(requests=1024, longest=384), {"max_slots": 7}, Sizes(slots=7, tokens=7 * 386)),
        (
            Load(requests=1024, longest=384),
            {"max_slots": 64, "max_tokens_in_flight": 10_000},
            Sizes(slots=64, tokens=10_128),
        ),
    ],
)
def test_a_small_model_on_a_large_gpu(load: Load, given: dict, wanted: Sizes) -> None:
    found = choose_sizes(
        load, free=138 * GIB, total=140 * GIB, bytes_per_token=SMALL, positions=2048, **given
    )
    assert found == wanted


@pytest.mark.parametrize(
    ("load", "share", "usable"),
    [
        (Load(requests=1024, longest=3072), 0.6, 60),
        (Load(requests=1024, longest=3072), 0.3, 60),
        # a trainer beside it keeps half of the 80 GiB
        (Load(requests=1024, longest=3072, beside_trainer=True), 0.6, 40),
        # two engines on the device, without and with a trainer
        (Load(requests=1024, longest=3072, engines=2), 0.6, 40),
        (Load(requests=1024, longest=3072, engines=2, beside_trainer=True), 0.6, 20),
    ],
)
def test_memory_bounds_slots_and_kv_cache(load: Load, share: float, usable: int) -> None:
    """60 of 80 GiB are free; a token takes 56 KiB, the longest request 3074 tokens."""
    found = choose_sizes(
        load,
        free=60 * GIB,
        total=80 * GIB,
        bytes_per_token=LARGE,
        positions=32768,
        kv_memory_share=share,
    )
    fits = int(usable * GIB * share) // (56 * 1024)
    assert found == Sizes(slots=4 * fits // 3074, tokens=fits)
    assert (
        found.slots
        == {(60, 0.6): 877, (60, 0.3): 438, (40, 0.6): 584, (20, 0.6): 292}[usable, share]
    )


def test_a_token_budget_that_does_not_fit_is_refused() -> None:
    with pytest.raises(
        UserError, match=r"engine.options.max_tokens_in_flight: got 9000000, allowed: about"
    ):
        choose_sizes(
            Load(),
            free=60 * GIB,
            total=80 * GIB,
            bytes_per_token=LARGE,
            positions=4096,
            max_tokens_in_flight=9_000_000,
        )


@pytest.mark.parametrize(
    ("words", "index", "gpus", "wanted"),
    [
        # 32 groups of 8, one step ahead; prompts of at most 2048 and responses of at most 100 tokens
        ([], 0, 2, Load(requests=512, longest=2148)),
        (["produce.strategy=sync"], 0, 2, Load(requests=256, longest=2148)),
        (["produce.over_sample_threshold=0.5"], 0, 2, Load(requests=640, longest=2148)),
        (["sync.every_steps=3", "produce.max_staleness=0"], 0, 2, Load(requests=768, longest=2148)),
        (
            ["tasks.train.agent=mine.py:rollout"],
            0,
            2,
            Load(requests=512, longest=0, sessions=True),  # an agent's contexts have any length
        ),
        (["launch.num_producers=3"], 0, 4, Load(requests=171, longest=2148)),
        # two engines on one of three GPUs: the trainer has the first, engines 0 and 2 share the second
        (
            ["launch.num_producers=3"],
            0,
            3,
            Load(requests=171, longest=2148, engines=1),
        ),
        (
            ["launch.num_producers=4"],
            0,
            3,
            Load(requests=128, longest=2148, engines=2),
        ),
        # the only GPU is the trainer's too, unless they take turns
        ([], 0, 1, Load(requests=512, longest=2148, beside_trainer=True)),
        (["launch.colocate=true"], 0, 1, Load(requests=512, longest=2148)),
        (["model.device=cuda:1"], 0, 4, Load(requests=512, longest=2148, beside_trainer=True)),
        # Ray reserves a GPU for each actor, which sees no other
        (["launch.kind=ray", "launch.num_producers=2"], 1, 1, Load(requests=256, longest=2148)),
    ],
)
def test_the_load_of_a_config(words: list[str], index: int, gpus: int, wanted: Load) -> None:
    common = [
        "train.groups_per_step=32",
        "sampling.num_generations=8",
        "sampling.max_tokens=100",
        "eval.tasks={}",
    ]
    config = load_config(None, [*common, *words], bare=True).config
    assert Load.of(config, index, gpus) == wanted


def test_the_line_of_the_log() -> None:
    line = describe(
        Sizes(slots=512, tokens=1_098_752),
        Load(requests=512, longest=2146, beside_trainer=True),
        free=100 * GIB,
        bytes_per_token=SMALL,
    )
    assert line == (
        "512 slots, KV cache of 1,098,752 tokens (23.6 GiB of 100.0 GiB free, beside a trainer) "
        "for 512 requests of at most 2146 tokens"
    )

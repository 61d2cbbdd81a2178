"""KV caches: regions never overlap, and buckets keep every sequence's rows."""

from __future__ import annotations

import asyncio
import gc
import weakref

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.engine.transformers.cpu.buckets import BucketedKV
from penstock.engine.transformers.cuda.regions import Regions
from penstock.engine.transformers.kv_attention import KVShape
from penstock.engine.transformers.prefix_tree import StoredKV
from penstock.weights.model_weights import model_digest, named_weights

SHAPE = KVShape(layers=2, heads=1, key_size=2, value_size=2, dtype=torch.float32)


@settings(max_examples=200, deadline=None)
@given(st.lists(st.integers(1, 40), max_size=60), st.randoms(use_true_random=False))
def test_regions_never_overlap_and_nothing_is_lost(sizes: list[int], random: object) -> None:
    regions, held = Regions(100), {}
    for size in sizes:
        start = regions.reserve(size)
        if start is None:
            assert 100 - sum(held.values()) < size or len(held) > 0
            gone = random.choice(sorted(held))  # type: ignore[attr-defined]
            regions.free(gone, held.pop(gone))
            continue
        assert all(start + size <= s or s + n <= start for s, n in held.items())
        assert start + size <= 100
        held[start] = size
        if held and size % 3 == 0 and regions.extend(start, size, 2):
            held[start] += 2
            assert all(start + size + 2 <= s or s <= start for s in held)
    for start, size in held.items():
        regions.free(start, size)
    assert regions.reserve(100) == 0


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 5), st.integers(1, 200)), max_size=40))
def test_buckets_keep_every_row_through_moves(events: list[tuple[int, int]]) -> None:
    """Each event adds a sequence, or removes it if it is stored; all others grow by a token."""
    kv, length, content = BucketedKV(SHAPE), np.zeros(6, np.int64), {}
    for slot, size in events:
        if slot in content:
            kv.remove(slot)
            del content[slot]
        else:
            rows = torch.rand(2, size, 1, 2)
            kv.add(slot, size, [(StoredKV(rows, rows + 1, rows[:, :, 0, :0]), size)])
            content[slot], length[slot] = rows, size
        kv.make_room(length)
        for bucket in kv.in_use:
            for row, owner in enumerate(bucket.slots):
                assert length[owner] < bucket.capacity
                stored = int(length[owner])
                assert torch.equal(bucket.keys[:, row, :stored], content[owner])
                assert torch.equal(bucket.values[:, row, :stored], content[owner] + 1)
                bucket.keys[:, row, stored] = 5.0
                bucket.values[:, row, stored] = 6.0
                content[owner] = torch.cat([content[owner], torch.full((2, 1, 1, 2), 5.0)], 1)
        for owner in content:
            length[owner] += 1
    assert sorted(s for b in kv.in_use for s in b.slots) == sorted(content)


def test_tied_weights_count_once_and_joint_weights_change_no_digest() -> None:
    from penstock.model.decoder_weights import read_weights
    from penstock.model.families import family_of
    from penstock.model.joint_weights import JointProducts
    from stages import tiny_policy as tiny

    model = tiny.tiny_model(0)
    names = [name for name, _ in named_weights(model)]
    assert "model.embed_tokens.weight" in names
    assert "lm_head.weight" not in names
    before = model_digest(model)
    ids = torch.tensor([[5, 6, 7]])
    with torch.no_grad():
        plain = model(ids).logits
        weights = read_weights(model, family_of(model.config), JointProducts())
        assert [len(layer.heads.weight) for layer in weights.layers] == [256] * 2
        assert torch.equal(model(ids).logits, plain)
    assert [name for name, _ in named_weights(model)] == names
    assert model_digest(model) == before


def test_bfloat16_travels_as_bits() -> None:
    model = torch.nn.Linear(3, 2, bias=False).to(torch.bfloat16)
    assert model_digest(model) != model_digest(model.float())


def test_a_sleeping_engine_holds_no_keys_and_wakes_to_the_newest_weights() -> None:
    from stages import tiny_policy as tiny
    from stages.tiny_engine import make_engine

    async def main() -> None:
        engine = make_engine()
        await engine.start()
        before = await engine.generate(tiny.request("before", max_tokens=20, min_tokens=20))
        buckets = list(engine._runner._kv._buckets.values())
        held = [
            weakref.ref(tensor) for bucket in buckets for tensor in (bucket.keys, bucket.values)
        ]
        assert held
        del buckets
        await engine.pause("wait")
        waiting = asyncio.create_task(engine.generate(tiny.request("meanwhile", max_tokens=20)))
        await engine.sleep()
        gc.collect()
        assert [one() for one in held] == [None] * len(held)
        assert (await engine.stats()).paused  # it answers during sleep
        await engine.wake()
        digest = await engine.update_weights(3, tiny.handle(3))
        await engine.resume()
        assert digest == tiny.handle(3).digest
        assert [segment.version for segment in (await waiting).segments] == [3]
        after = await engine.generate(tiny.request("before", max_tokens=20, min_tokens=20))
        assert not np.array_equal(after.token_ids, before.token_ids)
        await engine.close()
        fresh = make_engine()
        await fresh.start()
        await fresh.update_weights(3, tiny.handle(3))
        same = await fresh.generate(tiny.request("before", max_tokens=20, min_tokens=20))
        assert np.array_equal(after.token_ids, same.token_ids)
        await fresh.close()

    asyncio.run(main())

# mypy: disable-error-code="no-untyped-def,untyped-decorator"
"""SHA-256 of many equal pieces of device memory at once, in Triton.

One lane hashes one leaf, so a model's weights are hashed where they are: nothing but 32 bytes a leaf
travels to the host. The same bits as `hashlib.sha256`, which `digest.py` uses on a CPU.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

BLOCK_BYTES = 64  # what SHA-256 takes at a time
_LANES = 32


def _primes(count: int) -> list[int]:
    found: list[int] = []
    candidate = 2
    while len(found) < count:
        if all(candidate % prime for prime in found):
            found.append(candidate)
        candidate += 1
    return found


def _cube_root_bits(prime: int) -> int:
    """The first 32 bits of the fraction of its cube root: a round constant of SHA-256."""
    scaled, root = prime << 96, 0
    for bit in reversed(range(36)):
        if (root | 1 << bit) ** 3 <= scaled:
            root |= 1 << bit
    return root & 0xFFFFFFFF


_ROUND_CONSTANTS = [_cube_root_bits(prime) for prime in _primes(64)]


@triton.jit
def _turned(x, BITS: tl.constexpr):
    return (x >> BITS) | (x << (32 - BITS))


@triton.jit
def _round(a, b, c, d, e, f, g, h, w, k):
    """The two words that a round changes: the new `d` and the new `h`."""
    mixed_e = _turned(e, 6) ^ _turned(e, 11) ^ _turned(e, 25)
    mixed_a = _turned(a, 2) ^ _turned(a, 13) ^ _turned(a, 22)
    first = h + mixed_e + (g ^ (e & (f ^ g))) + k + w
    return d + first, first + mixed_a + ((a & b) | (c & (a | b)))


@triton.jit
def _next_word(w, w_1, w_9, w_14):
    """The message word 16 places on, from those 0, 1, 9 and 14 places on."""
    near = _turned(w_1, 7) ^ _turned(w_1, 18) ^ (w_1 >> 3)
    far = _turned(w_14, 17) ^ _turned(w_14, 19) ^ (w_14 >> 10)
    return w + near + w_9 + far


@triton.jit
def _word(pointer, AT: tl.constexpr, mask):
    """A message word: four bytes, the first one highest."""
    x = tl.load(pointer + AT, mask=mask, other=0).to(tl.uint32, bitcast=True)
    return (x << 24) | ((x & 0xFF00) << 8) | ((x >> 8) & 0xFF00) | (x >> 24)


@triton.jit
def _compress(
    a0, b0, c0, d0, e0, f0, g0, h0,
    w0, w1, w2, w3, w4, w5, w6, w7, w8, w9, w10, w11, w12, w13, w14, w15, Constants,
):  # fmt: skip
    """One block into the state: 4 times 16 rounds, the message words renewed between them."""
    a, b, c, d, e, f, g, h = a0, b0, c0, d0, e0, f0, g0, h0
    for turn in range(4):
        K = Constants + turn * 16
        d, h = _round(a, b, c, d, e, f, g, h, w0, tl.load(K).to(tl.uint32, bitcast=True))
        c, g = _round(h, a, b, c, d, e, f, g, w1, tl.load(K + 1).to(tl.uint32, bitcast=True))
        b, f = _round(g, h, a, b, c, d, e, f, w2, tl.load(K + 2).to(tl.uint32, bitcast=True))
        a, e = _round(f, g, h, a, b, c, d, e, w3, tl.load(K + 3).to(tl.uint32, bitcast=True))
        h, d = _round(e, f, g, h, a, b, c, d, w4, tl.load(K + 4).to(tl.uint32, bitcast=True))
        g, c = _round(d, e, f, g, h, a, b, c, w5, tl.load(K + 5).to(tl.uint32, bitcast=True))
        f, b = _round(c, d, e, f, g, h, a, b, w6, tl.load(K + 6).to(tl.uint32, bitcast=True))
        e, a = _round(b, c, d, e, f, g, h, a, w7, tl.load(K + 7).to(tl.uint32, bitcast=True))
        d, h = _round(a, b, c, d, e, f, g, h, w8, tl.load(K + 8).to(tl.uint32, bitcast=True))
        c, g = _round(h, a, b, c, d, e, f, g, w9, tl.load(K + 9).to(tl.uint32, bitcast=True))
        b, f = _round(g, h, a, b, c, d, e, f, w10, tl.load(K + 10).to(tl.uint32, bitcast=True))
        a, e = _round(f, g, h, a, b, c, d, e, w11, tl.load(K + 11).to(tl.uint32, bitcast=True))
        h, d = _round(e, f, g, h, a, b, c, d, w12, tl.load(K + 12).to(tl.uint32, bitcast=True))
        g, c = _round(d, e, f, g, h, a, b, c, w13, tl.load(K + 13).to(tl.uint32, bitcast=True))
        f, b = _round(c, d, e, f, g, h, a, b, w14, tl.load(K + 14).to(tl.uint32, bitcast=True))
        e, a = _round(b, c, d, e, f, g, h, a, w15, tl.load(K + 15).to(tl.uint32, bitcast=True))
        w0 = _next_word(w0, w1, w9, w14)
        w1 = _next_word(w1, w2, w10, w15)
        w2 = _next_word(w2, w3, w11, w0)
        w3 = _next_word(w3, w4, w12, w1)
        w4 = _next_word(w4, w5, w13, w2)
        w5 = _next_word(w5, w6, w14, w3)
        w6 = _next_word(w6, w7, w15, w4)
        w7 = _next_word(w7, w8, w0, w5)
        w8 = _next_word(w8, w9, w1, w6)
        w9 = _next_word(w9, w10, w2, w7)
        w10 = _next_word(w10, w11, w3, w8)
        w11 = _next_word(w11, w12, w4, w9)
        w12 = _next_word(w12, w13, w5, w10)
        w13 = _next_word(w13, w14, w6, w11)
        w14 = _next_word(w14, w15, w7, w12)
        w15 = _next_word(w15, w0, w8, w13)
    return a0 + a, b0 + b, c0 + c, d0 + d, e0 + e, f0 + f, g0 + g, h0 + h


@triton.jit
def _hash_leaves(Addresses, Out, Constants, count, BLOCKS: tl.constexpr, LANES: tl.constexpr):
    leaf = tl.program_id(0) * LANES + tl.arange(0, LANES)
    inside = leaf < count
    start = tl.load(Addresses + leaf, mask=inside, other=0).to(tl.pointer_type(tl.int32))
    a = tl.full((LANES,), 0x6A09E667, tl.uint32)
    b = tl.full((LANES,), 0xBB67AE85, tl.uint32)
    c = tl.full((LANES,), 0x3C6EF372, tl.uint32)
    d = tl.full((LANES,), 0xA54FF53A, tl.uint32)
    e = tl.full((LANES,), 0x510E527F, tl.uint32)
    f = tl.full((LANES,), 0x9B05688C, tl.uint32)
    g = tl.full((LANES,), 0x1F83D9AB, tl.uint32)
    h = tl.full((LANES,), 0x5BE0CD19, tl.uint32)
    for block in range(BLOCKS):
        at = start + block * 16
        a, b, c, d, e, f, g, h = _compress(
            a, b, c, d, e, f, g, h,
            _word(at, 0, inside), _word(at, 1, inside), _word(at, 2, inside), _word(at, 3, inside),
            _word(at, 4, inside), _word(at, 5, inside), _word(at, 6, inside), _word(at, 7, inside),
            _word(at, 8, inside), _word(at, 9, inside), _word(at, 10, inside),
            _word(at, 11, inside), _word(at, 12, inside), _word(at, 13, inside),
            _word(at, 14, inside), _word(at, 15, inside), Constants,
        )  # fmt: skip
    none = tl.full((LANES,), 0, tl.uint32)  # the last block: the end's mark, and the length in bits
    mark = tl.full((LANES,), 0x80000000, tl.uint32)
    bits = tl.full((LANES,), BLOCKS * 512, tl.uint32)
    a, b, c, d, e, f, g, h = _compress(
        a, b, c, d, e, f, g, h, mark, none, none, none, none, none, none, none,
        none, none, none, none, none, none, none, bits, Constants,
    )  # fmt: skip
    out = Out + leaf.to(tl.int64) * 8
    tl.store(out, a.to(tl.int32, bitcast=True), mask=inside)
    tl.store(out + 1, b.to(tl.int32, bitcast=True), mask=inside)
    tl.store(out + 2, c.to(tl.int32, bitcast=True), mask=inside)
    tl.store(out + 3, d.to(tl.int32, bitcast=True), mask=inside)
    tl.store(out + 4, e.to(tl.int32, bitcast=True), mask=inside)
    tl.store(out + 5, f.to(tl.int32, bitcast=True), mask=inside)
    tl.store(out + 6, g.to(tl.int32, bitcast=True), mask=inside)
    tl.store(out + 7, h.to(tl.int32, bitcast=True), mask=inside)


def hash_leaves(addresses: list[int], leaf_bytes: int, device: torch.device) -> torch.Tensor:
    """[leaves, 8] words of SHA-256, on the device; each address is of `leaf_bytes` bytes there.

    Addresses are multiples of four; `leaf_bytes` is one of 64.
    """
    assert leaf_bytes % BLOCK_BYTES == 0
    count = len(addresses)
    words = torch.empty(count, 8, dtype=torch.int32, device=device)
    if count:
        where = torch.tensor(addresses, dtype=torch.int64).to(device)
        constants = torch.tensor(_ROUND_CONSTANTS, dtype=torch.int64).to(device, torch.int32)
        launch: Any = _hash_leaves
        launch[(triton.cdiv(count, _LANES),)](
            where, words, constants, count,
            BLOCKS=leaf_bytes // BLOCK_BYTES, LANES=_LANES, num_warps=1,
        )  # fmt: skip
    return words

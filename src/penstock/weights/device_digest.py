# mypy: disable-error-code="no-untyped-def,untyped-decorator"
"""Digests of tensors that lie on a GPU, computed there in Triton.

The same digests as `digest.py` computes from the same bytes on a CPU. One lane hashes one leaf, so only
32 bytes a leaf travel to the host. Imported only where Triton is installed (`model_weights.can_hash_on`).
"""

from __future__ import annotations

import functools
import hashlib
from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl

from penstock.weights.digest import LEAF_BYTES, LEAF_DIGEST_BYTES, combine_leaves

HELD_BYTES = 1 << 30  # hashed in one launch: enough leaves for a large GPU
Shaped = tuple[str, str, tuple[int, ...]]  # name, dtype, shape
BLOCK_BYTES = 64  # one block of SHA-256
_LANES = 32


class DeviceDigests:
    """Consumes the tensors of one device by `add`; `finish` returns the digest of each.

    Runs on a stream of its own. The rest of a tensor that fills no leaf is hashed on the host.
    """

    def __init__(self, device: torch.device, *, leaf_bytes: int = LEAF_BYTES) -> None:
        self._device, self._leaf_bytes = device, leaf_bytes
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._held: list[tuple[Shaped, torch.Tensor]] = []
        self._held_bytes = 0
        self.digests: dict[str, bytes] = {}

    def add(self, name: str, tensor: torch.Tensor) -> None:
        dtype = str(tensor.dtype).removeprefix("torch.")
        tensor = tensor.detach().contiguous()
        if tensor.data_ptr() % 4:  # an unaligned view; the kernel reads words
            tensor = tensor.clone()
        self._held.append(((name, dtype, tuple(tensor.shape)), tensor))
        self._held_bytes += tensor.nbytes
        if self._held_bytes >= HELD_BYTES:
            self.finish()

    def finish(self) -> dict[str, bytes]:
        """Hash the held tensors and let go of them; return every digest so far."""
        held, self._held, self._held_bytes = self._held, [], 0
        sizes = [tensor.nbytes for _, tensor in held]
        addresses, tails = [], []
        for (_, tensor), size in zip(held, sizes, strict=True):
            over, start = size % self._leaf_bytes, tensor.data_ptr()
            addresses.append(np.arange(start, start + size - over, self._leaf_bytes))
            if over:
                tails.append(tensor.view(-1).view(torch.uint8)[-over:])
        leaves = np.concatenate(addresses) if addresses else np.empty(0, np.int64)
        if self._stream is None:
            words, ends = hash_leaves(leaves, self._leaf_bytes, self._device), _joined(tails)
        else:
            with torch.cuda.device(self._device):
                self._stream.wait_stream(torch.cuda.current_stream())
                with torch.cuda.stream(self._stream):
                    words = hash_leaves(leaves, self._leaf_bytes, self._device).cpu()
                    ends = _joined(tails).cpu()
        self._combine([shaped for shaped, _ in held], sizes, words, ends)
        return self.digests

    def _combine(
        self, shaped: list[Shaped], sizes: list[int], words: torch.Tensor, ends: torch.Tensor
    ) -> None:
        leaves = words.numpy().astype(np.uint32).astype(">u4").tobytes()
        rests = ends.numpy().tobytes()
        leaf = rest = 0
        for (name, dtype, shape), size in zip(shaped, sizes, strict=True):
            count, over = divmod(size, self._leaf_bytes)
            own = leaves[LEAF_DIGEST_BYTES * leaf : LEAF_DIGEST_BYTES * (leaf + count)]
            if over:
                own += hashlib.sha256(rests[rest : rest + over]).digest()
            self.digests[name] = combine_leaves(name, dtype, shape, own)
            leaf, rest = leaf + count, rest + over


def _joined(tails: list[torch.Tensor]) -> torch.Tensor:
    return torch.cat(tails) if tails else torch.empty(0, dtype=torch.uint8)


def _primes(count: int) -> list[int]:
    found: list[int] = []
    candidate = 2
    while len(found) < count:
        if all(candidate % prime for prime in found):
            found.append(candidate)
        candidate += 1
    return found


def _cube_root_bits(prime: int) -> int:
    """Return the first 32 bits of the fraction of its cube root: a round constant of SHA-256."""
    scaled, root = prime << 96, 0
    for bit in reversed(range(36)):
        if (root | 1 << bit) ** 3 <= scaled:
            root |= 1 << bit
    return root & 0xFFFFFFFF


_ROUND_CONSTANTS = [_cube_root_bits(prime) for prime in _primes(64)]


@triton.jit
def _rotate(x, BITS: tl.constexpr):
    return (x >> BITS) | (x << (32 - BITS))


@triton.jit
def _round(a, b, c, d, e, f, g, h, w, k):
    """Return the two words that a round changes: the new `d` and the new `h`."""
    mixed_e = _rotate(e, 6) ^ _rotate(e, 11) ^ _rotate(e, 25)
    mixed_a = _rotate(a, 2) ^ _rotate(a, 13) ^ _rotate(a, 22)
    first = h + mixed_e + (g ^ (e & (f ^ g))) + k + w
    return d + first, first + mixed_a + ((a & b) | (c & (a | b)))


@triton.jit
def _next_word(w, w_1, w_9, w_14):
    """Return the message word 16 ahead, from those 0, 1, 9 and 14 ahead."""
    near = _rotate(w_1, 7) ^ _rotate(w_1, 18) ^ (w_1 >> 3)
    far = _rotate(w_14, 17) ^ _rotate(w_14, 19) ^ (w_14 >> 10)
    return w + near + w_9 + far


@triton.jit
def _word(pointer, AT: tl.constexpr, mask):
    """Return a message word: four bytes, big-endian."""
    x = tl.load(pointer + AT, mask=mask, other=0).to(tl.uint32, bitcast=True)
    return (x << 24) | ((x & 0xFF00) << 8) | ((x >> 8) & 0xFF00) | (x >> 24)


@triton.jit
def _compress(
    a0, b0, c0, d0, e0, f0, g0, h0,
    w0, w1, w2, w3, w4, w5, w6, w7, w8, w9, w10, w11, w12, w13, w14, w15, Constants,
):  # fmt: skip
    """Fold one block into the state: 4 times 16 rounds, with new message words after each 16."""
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
    none = tl.full((LANES,), 0, tl.uint32)  # the last block: the end mark and the length in bits
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


@functools.cache
def _constants_on(device: torch.device) -> torch.Tensor:
    return torch.tensor(_ROUND_CONSTANTS, dtype=torch.int64).to(device, torch.int32)


def hash_leaves(addresses: np.ndarray, leaf_bytes: int, device: torch.device) -> torch.Tensor:
    """Return the SHA-256 of `leaf_bytes` bytes at each device address, as [leaves, 8] words there.

    Addresses are multiples of four, `leaf_bytes` is a multiple of 64.
    """
    assert leaf_bytes % BLOCK_BYTES == 0
    count = len(addresses)
    words = torch.empty(count, 8, dtype=torch.int32, device=device)
    if count:
        where = torch.from_numpy(addresses.astype(np.int64)).to(device)
        launch: Any = _hash_leaves
        launch[(triton.cdiv(count, _LANES),)](
            where, words, _constants_on(device), count,
            BLOCKS=leaf_bytes // BLOCK_BYTES, LANES=_LANES, num_warps=1,
        )  # fmt: skip
    return words

# mypy: disable-error-code="no-untyped-def,untyped-decorator,assignment"
"""Triton kernels for the matrix products of a decode step with few rows, each with its neighbours.

A product of few rows takes as long as its weights take to arrive. A program computes a few columns for up to 16
rows and asks for all of its weights at once: a tile [SPLIT, COLUMNS, BLOCK], whose warps compute dot products side by
side; their sums are added at the end. The norm before a product and the rotation, gate or residual after it belong to the
same program. With `PDL` a kernel starts, and loads its weights, while the kernel before it still runs. The norms and gates at
the end of this file are for products of many rows, which are the library's.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
import triton
import triton.language as tl

from penstock.model.kernels.row_tiles import Norm, Tiles, cdiv, next_power_of_2

ROWS = 16  # of a program: the least of a tensor core's dot product
ACTIVATIONS = ("silu", "gelu_pytorch_tanh", "gelu")  # names of a config that `activate` computes
_COLUMNS = 1024  # of a gated activation, per program


@functools.cache
def overlapped(device: torch.device) -> dict[str, bool]:
    """The arguments with which a kernel may start before the last one on its stream has ended.

    A kernel that takes them must wait (`gdc_wait`) before it reads what another kernel wrote and before it writes.
    """
    able = device.type == "cuda" and torch.version.hip is None
    able = able and torch.cuda.get_device_capability(device)[0] >= 9
    able = able and hasattr(tl.extra.cuda, "gdc_wait")
    return {"PDL": True, "launch_pdl": True} if able else {"PDL": False}


@triton.jit
def wait_for_last(PDL: tl.constexpr):
    """Let the next kernel start, and wait for what the last one wrote."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()


@triton.jit
def _product(
    X, Weight, NormWeight, row, rows, column, inside, eps, K: tl.constexpr, NORMED: tl.constexpr,
    OFFSET: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, SPLIT: tl.constexpr,
    BLOCK: tl.constexpr, CHUNKS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    # Return x of these rows times these rows of the weight, [ROWS, COLUMNS] in float32.
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    at = tl.arange(0, SPLIT)[:, None, None] * BLOCK + tl.arange(0, BLOCK)[None, None, :]
    weights, inputs = (), ()
    for chunk in tl.static_range(CHUNKS):
        k = at + chunk * SPLIT * BLOCK
        tile = tl.load(
            Weight + column[None, :, None] * K + k, mask=inside[None, :, None] & (k < K), other=0.0
        )
        weights = weights + (tile,)  # noqa: RUF005 (the form that Triton takes)
    if PDL:  # weights are constant; what earlier kernels write is read from here on
        tl.extra.cuda.gdc_wait()
    here = (row < rows)[None, :, None]
    for chunk in tl.static_range(CHUNKS):
        k = at + chunk * SPLIT * BLOCK
        x = tl.load(X + row[None, :, None] * K + k, mask=here & (k < K), other=0.0)
        if NORMED:  # the whole row is one chunk
            x = _normed(x, NormWeight, at, eps, K, OFFSET)
        inputs = inputs + (x,)  # noqa: RUF005
    total = tl.zeros((SPLIT, ROWS, COLUMNS), tl.float32)
    for chunk in tl.static_range(CHUNKS):
        x, tile = inputs[chunk], weights[chunk]
        if PDL and CHUNKS > 1:
            x, tile = _at_last(x), _at_last(tile)
        total = tl.dot(x, tl.trans(tile, (0, 2, 1)), total, input_precision="ieee")
    return tl.sum(total, 0)


@triton.jit
def _at_last(tile):
    # Return the tile, unseen by the compiler, which else lets each tile arrive before it asks for the next one.
    if tile.dtype.primitive_bitwidth == 16:
        tile = tl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [tile], tile.dtype, False, 2)
    return tile


@triton.jit
def _normed(x, NormWeight, at, eps, K: tl.constexpr, OFFSET: tl.constexpr):
    # Return the RMS norm of whole rows, [SPLIT, ROWS, BLOCK], rounded once.
    wide = x.to(tl.float32)
    mean = tl.sum(tl.sum(wide * wide, 2), 0) / K
    scale = tl.load(NormWeight + at, mask=at < K, other=0.0).to(tl.float32) + OFFSET
    return (wide * tl.rsqrt(mean + eps)[None, :, None] * scale).to(x.dtype)


@triton.jit
def halves(both, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """The first and the second half of the columns."""
    return tl.split(tl.permute(tl.reshape(both, (ROWS, 2, COLUMNS // 2)), (0, 2, 1)))


@triton.jit(do_not_specialize=["rows"])
def _heads_rows(
    X, Weight, Bias, NormWeight, Cos, Sin, Query, Keys, Values, Target, rows, eps, turn_row,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, HALF: tl.constexpr, BIASED: tl.constexpr,
    OFFSET: tl.constexpr, K: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, SPLIT: tl.constexpr,
    BLOCK: tl.constexpr, CHUNKS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    # Half of the columns lie in the lower half of a head, the others HALF above them.
    C: tl.constexpr = COLUMNS // 2
    PARTS: tl.constexpr = (HALF + C - 1) // C
    head, first = tl.program_id(0) // PARTS, tl.program_id(0) % PARTS * C
    both = tl.arange(0, COLUMNS)
    at = first + both % C
    column = head * 2 * HALF + at + both // C * HALF
    row = tl.program_id(1).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    product = _product(
        X, Weight, NormWeight, row, rows, column, at < HALF, eps, K, True, OFFSET, ROWS, COLUMNS,
        SPLIT, BLOCK, CHUNKS, PDL,
    )  # fmt: skip
    if BIASED:
        product += tl.load(Bias + column, mask=at < HALF, other=0.0).to(tl.float32)[None, :]
    kind = Query.dtype.element_ty
    low, high = halves(product.to(kind), ROWS, COLUMNS)
    at = (first + tl.arange(0, C))[None, :]
    here = (row < rows)[:, None] & (at < HALF)
    if head < HEADS + KV_HEADS:
        turn = row[:, None] * turn_row + at
        cos = tl.load(Cos + turn, mask=here, other=0.0).to(tl.float32)
        sin = tl.load(Sin + turn + HALF, mask=here, other=0.0).to(
            tl.float32
        )  # the lower half is negated
        wide_low, wide_high = low.to(tl.float32), high.to(tl.float32)
        turned_low = (wide_low * cos - wide_high * sin).to(kind)
        turned_high = (wide_high * cos + wide_low * sin).to(kind)
        if head < HEADS:
            target = Query + (row[:, None] * HEADS + head) * 2 * HALF + at
        else:
            token = tl.load(Target + row, mask=row < rows, other=0).to(tl.int64)[:, None]
            target = Keys + (token * KV_HEADS + head - HEADS) * 2 * HALF + at
        tl.store(target, turned_low, mask=here)
        tl.store(target + HALF, turned_high, mask=here)
    else:
        token = tl.load(Target + row, mask=row < rows, other=0).to(tl.int64)[:, None]
        target = Values + (token * KV_HEADS + head - HEADS - KV_HEADS) * 2 * HALF + at
        tl.store(target, low, mask=here)
        tl.store(target + HALF, high, mask=here)


@triton.jit
def activate(gate, ACTIVATION: tl.constexpr):
    """A config's activation of float32 numbers."""
    if ACTIVATION == "silu":
        active = gate / (1.0 + tl.exp(-gate))
    elif ACTIVATION == "gelu":
        active = 0.5 * gate * (1.0 + tl.erf(gate * 0.7071067811865476))
    else:  # gelu_pytorch_tanh: 1 + tanh(z) is 2 sigmoid(2z)
        inner = 1.5957691216057308 * (gate + 0.044715 * gate * gate * gate)
        active = gate / (1.0 + tl.exp(-inner))
    return active


@triton.jit(do_not_specialize=["rows"])
def _gate_rows(
    X, Weight, NormWeight, Out, rows, eps, WIDTH: tl.constexpr, ACTIVATION: tl.constexpr,
    OFFSET: tl.constexpr, K: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, SPLIT: tl.constexpr,
    BLOCK: tl.constexpr, CHUNKS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    # Half of the columns are of the gate, the others are the same ones of up.
    C: tl.constexpr = COLUMNS // 2
    first, both = tl.program_id(0) * C, tl.arange(0, COLUMNS)
    at = first + both % C
    row = tl.program_id(1).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    product = _product(
        X, Weight, NormWeight, row, rows, at + both // C * WIDTH, at < WIDTH, eps, K, True, OFFSET,
        ROWS, COLUMNS, SPLIT, BLOCK, CHUNKS, PDL,
    )  # fmt: skip
    kind = Out.dtype.element_ty
    gate, up = halves(product.to(kind).to(tl.float32), ROWS, COLUMNS)
    active = activate(gate, ACTIVATION).to(kind).to(tl.float32)
    at = (first + tl.arange(0, C))[None, :]
    tl.store(
        Out + row[:, None] * WIDTH + at, (active * up).to(kind),
        mask=(row < rows)[:, None] & (at < WIDTH),
    )  # fmt: skip


@triton.jit(do_not_specialize=["rows"])
def _add_rows(
    X, Weight, Bias, Total, rows, WIDTH: tl.constexpr, BIASED: tl.constexpr,
    K: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, SPLIT: tl.constexpr,
    BLOCK: tl.constexpr, CHUNKS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    row = tl.program_id(1).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    product = _product(
        X, Weight, X, row, rows, column, column < WIDTH, 0.0, K, False, 0.0, ROWS, COLUMNS, SPLIT,
        BLOCK, CHUNKS, PDL,
    )  # fmt: skip
    if BIASED:
        product += tl.load(Bias + column, mask=column < WIDTH, other=0.0).to(tl.float32)[None, :]
    here = (row < rows)[:, None] & (column < WIDTH)[None, :]
    target = Total + row[:, None] * WIDTH + column[None, :]
    product += tl.load(target, mask=here, other=0.0).to(tl.float32)
    tl.store(target, product.to(Total.dtype.element_ty), mask=here)


def _how(tiles: Tiles, x_BK: torch.Tensor) -> dict[str, Any]:
    """The keyword arguments that all three kernels take."""
    inputs = x_BK.shape[1]
    return {
        "K": inputs, "ROWS": ROWS, "COLUMNS": tiles.columns, "SPLIT": tiles.split,
        "BLOCK": tiles.block, "CHUNKS": cdiv(inputs, tiles.split * tiles.block),
        "num_warps": tiles.warps, "num_stages": 1, **overlapped(x_BK.device),
    }  # fmt: skip


def project_and_store(
    x_BD: torch.Tensor,
    norm: Norm,
    weight_ND: torch.Tensor,
    bias_N: torch.Tensor | None,
    turn: tuple[torch.Tensor, torch.Tensor],
    keys_TGD: torch.Tensor,
    values_TGD: torch.Tensor,
    target_B: torch.Tensor,
    tiles: Tiles,
) -> torch.Tensor:
    """The query heads of the normed rows, turned; store turned keys and values at `target_B`.

    `turn` holds cosines and signed sines [rows, 1, head size].
    """
    rows, width = x_BD.shape
    kv_heads, size = keys_TGD.shape[1:]
    heads = len(weight_ND) // size - 2 * kv_heads
    assert x_BD.is_contiguous()
    assert weight_ND.is_contiguous()
    assert width <= tiles.split * tiles.block
    query_BHD = x_BD.new_empty(rows, heads, size)
    how = _how(tiles, x_BD)
    parts = cdiv(size // 2, tiles.columns // 2)
    kernel: Any = _heads_rows
    kernel[((heads + 2 * kv_heads) * parts, cdiv(rows, ROWS))](
        x_BD, weight_ND, weight_ND if bias_N is None else bias_N, norm.weight, *turn, query_BHD,
        keys_TGD, values_TGD, target_B, rows, norm.epsilon, turn[0].stride(0), HEADS=heads,
        KV_HEADS=kv_heads, HALF=size // 2, BIASED=bias_N is not None, OFFSET=norm.offset, **how,
    )  # fmt: skip
    return query_BHD


def gate_product(
    x_BD: torch.Tensor, norm: Norm, weight_FD: torch.Tensor, activation: str, tiles: Tiles
) -> torch.Tensor:
    """activation(gate) * up of the normed rows; the weight holds the gate's rows, then those of up."""
    rows, inputs = x_BD.shape
    width = len(weight_FD) // 2
    assert x_BD.is_contiguous()
    assert weight_FD.is_contiguous()
    assert inputs <= tiles.split * tiles.block
    gated_BF = x_BD.new_empty(rows, width)
    kernel: Any = _gate_rows
    kernel[(cdiv(width, tiles.columns // 2), cdiv(rows, ROWS))](
        x_BD, weight_FD, norm.weight, gated_BF, rows, norm.epsilon, WIDTH=width,
        ACTIVATION=activation, OFFSET=norm.offset, **_how(tiles, x_BD),
    )  # fmt: skip
    return gated_BF


def add_product(
    total_BD: torch.Tensor,
    x_BK: torch.Tensor,
    weight_DK: torch.Tensor,
    bias_D: torch.Tensor | None,
    tiles: Tiles,
) -> torch.Tensor:
    """Add x times the weight, and the bias, to the total in place; return the total."""
    rows, width = total_BD.shape
    assert total_BD.is_contiguous()
    assert x_BK.is_contiguous()
    assert weight_DK.is_contiguous()
    kernel: Any = _add_rows
    kernel[(cdiv(width, tiles.columns), cdiv(rows, ROWS))](
        x_BK, weight_DK, weight_DK if bias_D is None else bias_D, total_BD, rows, WIDTH=width,
        BIASED=bias_D is not None, **_how(tiles, x_BK),
    )  # fmt: skip
    return total_BD


@triton.jit
def _norm_rows(
    X, NormWeight, Out, eps, scale, x_row, out_row, WIDTH: tl.constexpr, WIDTH_PAD: tl.constexpr,
    OFFSET: tl.constexpr, ADDS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    wait_for_last(PDL)
    row, at = tl.program_id(0).to(tl.int64), tl.arange(0, WIDTH_PAD)
    x = tl.load(X + row * x_row + at, mask=at < WIDTH, other=0.0).to(tl.float32)
    weight = tl.load(NormWeight + at, mask=at < WIDTH, other=0.0).to(tl.float32) + OFFSET
    kind = Out.dtype.element_ty
    normed = (x * tl.rsqrt(tl.sum(x * x, 0) / WIDTH + eps) * weight).to(kind)
    target = Out + row * out_row + at
    if ADDS:
        total = tl.load(target, mask=at < WIDTH, other=0.0).to(tl.float32)
        normed = (total + (normed.to(tl.float32) * scale).to(kind).to(tl.float32)).to(kind)
    tl.store(target, normed, mask=at < WIDTH)


def _launch_norm(
    x_RD: torch.Tensor, norm: Norm, output_RD: torch.Tensor, scale: float | None
) -> None:
    rows, width = x_RD.shape
    assert x_RD.stride(1) == output_RD.stride(1) == 1
    pad = next_power_of_2(width)
    kernel: Any = _norm_rows
    kernel[(rows,)](
        x_RD, norm.weight, output_RD, norm.epsilon, 1.0 if scale is None else scale,
        x_RD.stride(0), output_RD.stride(0), WIDTH=width, WIDTH_PAD=pad, OFFSET=norm.offset,
        ADDS=scale is not None, num_warps=min(16, max(1, pad // 256)), **overlapped(x_RD.device),
    )  # fmt: skip


def norm_rows(
    x_RD: torch.Tensor, norm: Norm, output_RD: torch.Tensor | None = None
) -> torch.Tensor:
    """The rows' norm; the output may be the rows themselves."""
    if output_RD is None:
        output_RD = torch.empty_like(x_RD)
    _launch_norm(x_RD, norm, output_RD, None)
    return output_RD


def add_norm(total_RD: torch.Tensor, x_RD: torch.Tensor, norm: Norm, scale: float) -> torch.Tensor:
    """Add the rows' norm times `scale` to the total in place; return the total."""
    _launch_norm(x_RD, norm, total_RD, scale)
    return total_RD


@triton.jit
def _gate_values(
    Product, Out, WIDTH, ACTIVATION: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr
):  # fmt: skip
    wait_for_last(PDL)
    row, at = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    source = Product + row * 2 * WIDTH + at
    gate = tl.load(source, mask=at < WIDTH, other=0.0).to(tl.float32)
    up = tl.load(source + WIDTH, mask=at < WIDTH, other=0.0).to(tl.float32)
    kind = Out.dtype.element_ty
    active = activate(gate, ACTIVATION).to(kind).to(tl.float32)
    tl.store(Out + row * WIDTH + at, (active * up).to(kind), mask=at < WIDTH)


def gate_values(product_RG: torch.Tensor, activation: str) -> torch.Tensor:
    """The activation of the first half of each row, times the second half."""
    rows, width = len(product_RG), product_RG.shape[1] // 2
    assert product_RG.is_contiguous()
    output_RF = product_RG.new_empty(rows, width)
    kernel: Any = _gate_values
    kernel[(rows, cdiv(width, _COLUMNS))](
        product_RG, output_RF, width, ACTIVATION=activation, BLOCK=_COLUMNS, num_warps=4,
        **overlapped(product_RG.device),
    )  # fmt: skip
    return output_RF

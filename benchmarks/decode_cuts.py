"""Times of attention and of the experts' products in a decode step, over ways to cut them, on one GPU.

    python benchmarks/decode_cuts.py attention [--shape qwen0.5b-long] [--rows 128] [--context 4096]
    python benchmarks/decode_cuts.py experts [--shape qwen3-moe-1b] [--rows 8 64 256 4096]

Prints microseconds of one layer and the bytes per second that this takes, the best cut first. What the engine
does by itself is marked; change `row_tiles.py`, `decode_kernels.py` or `expert_kernels.py` where another wins.
"""

from __future__ import annotations

import argparse
import functools
import itertools
from collections.abc import Callable
from typing import Any

import torch
from shapes import SHAPES

from penstock.model.joint_weights import LinearStack
from penstock.model.kernels import decode_kernels, expert_kernels, row_tiles

REPEATS = 20


def microseconds(work: Callable[[], Any]) -> float:
    """The time of one call within a graph of several, as the engine runs it."""
    work()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(REPEATS):
            work()
    times = []
    for _ in range(5):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(1e3 * begin.elapsed_time(end) / REPEATS)
    return min(times)


def show(title: str, rows: list[tuple[float, str]], needed_bytes: float) -> None:
    print(title, flush=True)
    for time, name in sorted(rows)[:8]:
        print(f"  {time:8.1f} us  {needed_bytes / time / 1e6:5.2f} TB/s  {name}", flush=True)
    ours = next((row for row in rows if row[1].endswith("*")), None)
    if ours is not None:
        print(f"  {ours[0]:8.1f} us  {needed_bytes / ours[0] / 1e6:5.2f} TB/s  {ours[1]}")


def attention(args: argparse.Namespace) -> None:
    shape = SHAPES[args.shape]
    heads, kv_heads = shape["num_attention_heads"], shape["num_key_value_heads"]
    size = shape.get("head_dim", shape["hidden_size"] // heads)
    for rows, context in itertools.product(args.rows, args.context):
        found = attention_cuts(rows, context, heads, kv_heads, size)
        needed = rows * context * kv_heads * size * 4
        show(f"attention {args.shape}: {rows} rows of {context} tokens", found, needed)


def attention_cuts(
    rows: int, context: int, heads: int, kv_heads: int, size: int
) -> list[tuple[float, str]]:
    how: dict[str, Any] = {"dtype": torch.bfloat16, "device": "cuda"}
    # several layers, so that no cache holds the keys
    layers = max(2, (1 << 28) // (rows * context * kv_heads * size * 4) + 1)
    keys, values = torch.randn(2, layers, rows * context, kv_heads, size, **how)
    query = torch.randn(rows, heads, size, **how)
    start = torch.arange(rows, device="cuda") * context
    length, layer = torch.full_like(start, context), itertools.cycle(range(layers))
    usual = row_tiles.PROGRAMS
    own, bytes_at_once, found = decode_kernels._ATTEND, decode_kernels._BLOCK_BYTES, []

    def work(programs: int) -> None:
        n = next(layer)
        decode_kernels.decode_attention(
            query, keys[n], values[n], start, length, size**-0.5, None, None, None, programs
        )

    for programs, block, warps, stages in itertools.product(
        (256, 512, 1024, 2048, 4096), (16384, 32768), (1, 2, 4), (2, 3, 4)
    ):
        decode_kernels._ATTEND = {"num_warps": warps, "num_stages": stages}
        decode_kernels._BLOCK_BYTES = block
        cut = f"programs {programs} block {block} warps {warps} stages {stages}"
        try:
            time = microseconds(functools.partial(work, programs))
        except Exception as error:  # a cut that does not fit the device is no candidate
            print(f"  {cut}: {type(error).__name__}")
            continue
        ours = (programs, block, decode_kernels._ATTEND) == (usual, bytes_at_once, own)
        found.append((time, cut + " *" * ours))
    decode_kernels._ATTEND, decode_kernels._BLOCK_BYTES = own, bytes_at_once
    return found


def experts(args: argparse.Namespace) -> None:
    shape = SHAPES[args.shape]
    count, experts = shape["num_experts_per_tok"], shape["num_experts"]
    width, inner = shape["hidden_size"], shape["moe_intermediate_size"]
    how: dict[str, Any] = {"dtype": torch.bfloat16, "device": "cuda"}
    layers = 12  # so that no cache holds the weights
    gates = [
        LinearStack(torch.randn(experts, 2 * inner, width, **how), None) for _ in range(layers)
    ]
    down = [LinearStack(torch.randn(experts, width, inner, **how), None) for _ in range(layers)]
    choose, layer = expert_kernels.choose_tiles, itertools.cycle(range(layers))
    for rows in args.rows:
        x, total = torch.randn(2, rows, width, **how)
        routes = expert_kernels.route(torch.randn(rows, experts, **how), count, renormalises=True, rounds=True)  # fmt: skip
        usual, found = choose(rows * count, experts, torch.bfloat16), []

        def work(routes: Any = routes, x: Any = x, total: Any = total) -> None:
            n = next(layer)
            gated = expert_kernels.expert_gates(x, routes, gates[n], "silu", None)
            expert_kernels.add_expert_outputs(total, gated, routes, down[n])

        warps = 8 if usual.rows == 128 else 4
        for tile_rows, columns, block, stages in itertools.product(
            {usual.rows, max(16, usual.rows // 2)}, (32, 64, 128), (64, 128), (3, 4)
        ):
            tiles = expert_kernels.Tiles(tile_rows, columns, block, warps, stages)
            expert_kernels.choose_tiles = lambda *_, tiles=tiles: tiles
            try:
                found.append((microseconds(work), f"{tiles}{' *' if tiles == usual else ''}"))
            except Exception as error:  # a cut that does not fit the device is no candidate
                print(f"  {tiles}: {type(error).__name__}")
        expert_kernels.choose_tiles = choose
        used = min(experts, rows * count)
        show(f"experts {args.shape}: {rows} rows", found, used * 3 * inner * width * 2)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=["attention", "experts"])
    parser.add_argument("--shape", choices=list(SHAPES), default="")
    parser.add_argument("--rows", type=int, nargs="+", default=[])
    parser.add_argument("--context", type=int, nargs="+", default=[4096])
    args = parser.parse_args()
    if args.what == "attention":
        args.shape, args.rows = args.shape or "qwen0.5b-long", args.rows or [128]
        attention(args)
    else:
        args.shape, args.rows = args.shape or "qwen3-moe-1b", args.rows or [8, 64, 256, 4096]
        experts(args)


if __name__ == "__main__":
    main()

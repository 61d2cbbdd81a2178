"""Every decoder family through the GPU engine's operations, against plain torch: on a GPU, else by Triton's interpreter."""

from __future__ import annotations

import os
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from penstock.model.decoder import hidden_states, logits
from penstock.model.decoder_weights import ModuleProducts, read_weights
from penstock.model.families import family_of
from penstock.model.ops import TorchOps
from stages import decode_reference as reference
from stages.decoder_cases import CASES, make_decoder, make_image_model, shorten

pytestmark = pytest.mark.gpu(stand_in=True)
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
pytest.importorskip("triton")
from penstock.engine.transformers.cuda import cuda_steps  # noqa: E402
from penstock.engine.transformers.cuda.cuda_decoder import CudaDecoder  # noqa: E402
from penstock.engine.transformers.cuda.cuda_steps import (  # noqa: E402
    DecodeStep,
    PrefillStep,
    Prompt,
)
from penstock.engine.transformers.cuda.regions import KVPool  # noqa: E402
from penstock.engine.transformers.kv_attention import KVShape  # noqa: E402
from penstock.errors import UserError  # noqa: E402
from penstock.model.attention import (  # noqa: E402
    AttentionCall,
    OneSequence,
    causal_attention,
)
from penstock.model.kernels import decode_kernels, row_tiles  # noqa: E402
from penstock.model.kernels.decode_kernels import sample_rows  # noqa: E402
from penstock.training.exact import CudaArithmetic, ExactForward  # noqa: E402
from penstock.training.pack import make_pack  # noqa: E402
from penstock.training.policy import Policy  # noqa: E402

DEVICE = torch.device("cpu" if INTERPRETED else "cuda")
DTYPES = [torch.float32] if INTERPRETED else [torch.float32, torch.bfloat16]
LONGEST = 80  # beyond every original length of the cases
ROWS = 14  # longer than every window
QUICK = {("gemma 3", True), ("qwen 3 moe", False)}
SERVED = [*CASES, "image"]


def make(case: str, dtype: torch.dtype = torch.float32) -> Any:
    model = make_image_model() if case == "image" else make_decoder(case, dtype)
    return (shorten(model) if INTERPRETED else model).to(DEVICE)


def plain_logits(model: Any, family: Any, ids_T: torch.Tensor) -> torch.Tensor:
    weights = read_weights(model, family, ModuleProducts())
    positions_T = torch.arange(len(ids_T), device=DEVICE)
    hidden = hidden_states(TorchOps(), family, weights, OneSequence(), ids_T, positions_T)
    return logits(family, weights, hidden)


def draw_ids(count: int, seed: int = 1) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, 97, (count,), generator=generator).to(DEVICE)


def assert_close(actual: torch.Tensor, wanted: torch.Tensor) -> None:
    limit = 1e-5 if wanted.dtype is torch.float32 else 0.3
    scores = [logits_RV.float().log_softmax(-1) for logits_RV in (actual, wanted)]
    torch.testing.assert_close(*scores, rtol=0, atol=limit)


@pytest.fixture(autouse=True)
def quick_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    if INTERPRETED:  # the kernel has tests of its own
        monkeypatch.setattr(cuda_steps, "decode_attention", reference.decode_attention)


@torch.inference_mode()
@pytest.mark.parametrize(
    ("case", "few"),
    [
        pytest.param(case, few, marks=[] if (case, few) in QUICK else [pytest.mark.slow])
        for case in SERVED
        for few in (True, False)
    ],
)
def test_prompts_and_decode_steps_have_the_logits_of_plain_torch(
    case: str, few: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A prompt and decoded rows, then one step whose rows are looked up; `few`: by the kernels of few rows."""
    monkeypatch.setattr(row_tiles, "MOST_ROWS", 16 if few else 0)
    plain, model = make(case), make(case)
    family = family_of(model.config, LONGEST)
    ids_T = draw_ids(ROWS + 1)
    wanted = plain_logits(plain, family, ids_T)
    decoder = CudaDecoder(model, family)
    decoder.open(LONGEST)
    pool = KVPool.allocate(decoder.shape, 40, DEVICE)
    positions_T = torch.arange(ROWS, device=DEVICE)
    kept = torch.tensor([4, ROWS - 1], device=DEVICE)
    prefill = PrefillStep(pool, [Prompt(np.arange(ROWS), 0, [20])])
    assert_close(decoder.logits(prefill, ids_T[:-1], positions_T, kept), wanted[kept])
    begin = torch.full_like(positions_T, 2)
    decode = DecodeStep(pool, begin, begin + positions_T, positions_T + 1)
    assert_close(decoder.logits(decode, ids_T[:-1], positions_T, None), wanted[:-1])
    torch.testing.assert_close(pool.keys[:, 2 : 2 + ROWS], pool.keys[:, 20 : 20 + ROWS])
    torch.testing.assert_close(pool.values[:, 2 : 2 + ROWS], pool.values[:, 20 : 20 + ROWS])
    state = SimpleNamespace(
        token=ids_T[[ROWS, ROWS]].contiguous(),
        position=torch.tensor([ROWS, ROWS], device=DEVICE),
        start=torch.tensor([2, 20], device=DEVICE),
    )
    slots = torch.tensor([1, 0], device=DEVICE)
    got = decoder.decode(state, pool, slots)
    assert_close(got, wanted[[ROWS, ROWS]])


@torch.inference_mode()
@pytest.mark.parametrize(
    "case",
    [
        "llama",
        *(pytest.param(c, marks=pytest.mark.slow) for c in ("mistral", "gemma 2", "gpt oss")),
    ],
)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_long_prompt_in_parts_has_the_logits_of_the_whole(case: str, dtype: torch.dtype) -> None:
    """Parts of 6, 6 and 2 rows; windows are longer than a part. In half precision by the flash kernel."""
    plain, model = make(case, dtype), make(case, dtype)
    family = family_of(model.config, LONGEST)
    ids_T = draw_ids(ROWS)
    wanted = plain_logits(plain, family, ids_T)
    decoder = CudaDecoder(model, family)
    decoder.open(LONGEST)
    pool = KVPool.allocate(decoder.shape, 20, DEVICE)
    for first in range(0, ROWS, 6):
        part = ids_T[first : first + 6]
        positions = first + torch.arange(len(part), device=DEVICE)
        step = PrefillStep(pool, [Prompt(np.arange(first + len(part)), first, [3])])
        assert_close(decoder.logits(step, part, positions, None), wanted[positions])


@pytest.mark.parametrize(
    "case",
    [
        c if c == "qwen 3" else pytest.param(c, marks=pytest.mark.slow)
        for c in ("qwen 3", "gpt oss", "gemma 3")
        + (() if INTERPRETED else ("mixtral", "phi 4 mini"))
    ],
)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_an_exact_row_has_the_same_bits_in_a_prompt_its_parts_a_decode_step_and_a_trainer(
    case: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cuda_steps, "decode_attention", decode_kernels.decode_attention)
    engine, trained = make(case, dtype), make(case, dtype)
    family = family_of(engine.config, LONGEST)
    ids_T = draw_ids(ROWS)
    ids, positions_T = ids_T.cpu().numpy(), torch.arange(ROWS, device=DEVICE)
    with torch.inference_mode():
        decoder = CudaDecoder(engine, family, exact=True)
        decoder.open(LONGEST)
        pool = KVPool.allocate(decoder.shape, 80, DEVICE)
        whole = PrefillStep(pool, [Prompt(ids, 0, [20])], exact=True)
        wanted = decoder.logits(whole, ids_T, positions_T, None)
        for first in (0, 6):
            prompt = Prompt(ids[: first + 6], first, [40])
            rows_T = positions_T[first : first + 6]
            step = PrefillStep(pool, [prompt], exact=True)
            assert torch.equal(decoder.logits(step, ids_T[rows_T], rows_T, None), wanted[rows_T])
        some_T = torch.tensor([ROWS - 1, 3, 8], device=DEVICE)
        start_T = torch.full_like(some_T, 20)
        step = DecodeStep(pool, start_T, start_T + some_T, some_T + 1, exact=True)
        assert torch.equal(decoder.logits(step, ids_T[some_T], some_T, None), wanted[some_T])
        key_T, temperature_T = torch.zeros_like(ids_T), torch.ones(ROWS, device=DEVICE)
        _, wanted_T = sample_rows(wanted[:-1].contiguous(), key_T, key_T, temperature_T, ids_T[1:])
    policy = Policy(trained, longest=LONGEST)
    policy.exact = ExactForward(trained, policy.family, CudaArithmetic(trained, policy.family))
    other = np.concatenate([ids[:9], ids[:3]])  # shares a prompt of nine tokens
    predictors = [np.arange(8, ROWS - 1), np.arange(8, len(other) - 1)]
    pack = make_pack([0, 1], [ids, other], predictors, [0, len(predictors[0])], DEVICE)
    assert pack.layout.shared is not None
    actual_N, _ = policy(pack, torch.ones(len(pack.target_N), device=DEVICE))
    known = pack.token_N < len(predictors[0])
    assert torch.equal(actual_N[known], wanted_T[8 + torch.from_numpy(pack.token_N[known])])


@pytest.mark.slow
@torch.inference_mode()
def test_a_kernel_that_is_off_is_refused_with_the_difference(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from penstock.engine.transformers.cuda import cuda_ops

    model = make("qwen 2")
    decoder = CudaDecoder(model, family_of(model.config, 12))
    decoder.check(12)
    right = cuda_ops.turn_heads
    monkeypatch.setattr(cuda_ops, "turn_heads", lambda rows, *how: right(rows.mul_(1.1), *how))
    with pytest.raises(UserError, match=r"Qwen2ForCausalLM, whose log-probs differ by [0-9.]+"):
        decoder.check(12)


@torch.inference_mode()
def test_joint_weights_follow_an_update_under_the_checkpoints_names() -> None:
    from penstock.weights.model_weights import load_weights, model_digest, named_weights

    model = make("llama with biases")
    names, digest = [name for name, _ in named_weights(model)], model_digest(model)
    family = family_of(model.config, LONGEST)
    decoder = CudaDecoder(model, family)
    decoder.open(LONGEST)
    assert [name for name, _ in named_weights(model)] == names
    assert model_digest(model) == digest
    new = {name: weight * 1.5 for name, weight in named_weights(model)}
    load_weights(model, new)
    plain = make("llama with biases")
    load_weights(plain, new)
    ids_T = draw_ids(5)
    pool = KVPool.allocate(decoder.shape, 5, DEVICE)
    step = PrefillStep(pool, [Prompt(np.arange(5), 0, [0])])
    got = decoder.logits(step, ids_T, torch.arange(5, device=DEVICE), None)
    assert_close(got, plain_logits(plain, family, ids_T))


@pytest.mark.parametrize("window", [None, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_packed_prompts_attend_as_each_by_itself(dtype: torch.dtype, window: int | None) -> None:
    """Three prompts of 6, 1 and 9 tokens; on a GPU in half precision by the flash kernel."""
    lengths = np.array([6, 1, 9])
    shape = KVShape(layers=1, heads=2, key_size=16, value_size=16, dtype=dtype)
    pool = KVPool.allocate(shape, 40, DEVICE)
    starts = [20, 0, 30]
    prompts = [Prompt(np.arange(n), 0, [start]) for n, start in zip(lengths, starts, strict=True)]
    step = PrefillStep(pool, prompts)
    draw = torch.Generator().manual_seed(0)
    query, key, value = (
        torch.randn(1, heads, 16, 16, generator=draw).to(DEVICE, dtype) for heads in (4, 2, 2)
    )
    call = AttentionCall(query, key, value, 0.3, window, None, None)
    got = step.attend(0, call)
    wanted = torch.cat(
        [
            causal_attention(AttentionCall(*parts, 0.3, window, None, None))
            for parts in zip(
                *(x.split(lengths.tolist(), 2) for x in (query, key, value)), strict=True
            )
        ],
        dim=2,
    )
    tolerance = 1e-5 if dtype is torch.float32 else 2e-2
    torch.testing.assert_close(got, wanted.transpose(1, 2), rtol=tolerance, atol=tolerance)
    step.store(0, key, value)
    assert torch.equal(pool.keys[0, 20:26], key[0, :, :6].transpose(0, 1))
    assert torch.equal(pool.values[0, 30:39], value[0, :, 7:].transpose(0, 1))

"""Products in the layout of the CPU's library: the same numbers as plain ones, new ones after an update."""

from __future__ import annotations

import platform

import pytest
import torch
from engine_contract import CHECKS

from penstock.engine.transformers.cpu import packed_linear
from penstock.engine.transformers.cpu.packed_linear import (
    BlasLinear,
    ModelLinears,
    choose_linear,
    packed_kind,
    small_kind,
)
from penstock.model.attention import OneSequence
from penstock.model.decoder import hidden_states, logits
from penstock.model.decoder_weights import read_weights
from penstock.model.families import family_of
from penstock.model.joint_weights import PlainLinear
from penstock.model.ops import TorchOps
from penstock.weights.model_weights import load_weights, model_digest, named_weights
from stages import tiny_policy as tiny
from stages.engine_case import EngineCase, run
from stages.tiny_engine import make_engine, same_bits

PACKED = packed_kind()
needs_library = pytest.mark.skipif(PACKED is PlainLinear, reason="neither MKL nor oneDNN on ARM")


@pytest.fixture
def small_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pack even models as small as the test's."""
    monkeypatch.setattr(packed_linear, "LEAST_BYTES", 0)
    monkeypatch.setattr(packed_linear, "MEMORY_SHARE", packed_linear.MEMORY_SHARE)


@pytest.mark.parametrize("kind", [pytest.param(PACKED, marks=needs_library), BlasLinear])
@pytest.mark.parametrize("biased", [True, False])
def test_a_packed_product_is_the_plain_one(biased: bool, kind: type[PlainLinear]) -> None:
    torch.manual_seed(0)
    weight, bias = torch.randn(96, 64), torch.randn(96) if biased else None
    plain, packed = PlainLinear(weight, bias), kind(weight, bias)
    for rows in (1, 2, 7, 16, 40, 130):
        x = torch.randn(1, rows, 64)
        assert torch.allclose(packed(x), plain(x), atol=1e-4)
    before = packed(x)
    weight.add_(1.0)
    assert torch.equal(packed(x), before)
    packed.refresh()
    assert torch.allclose(packed(x), plain(x), atol=1e-4)


@needs_library
def test_products_of_a_model_follow_its_weights() -> None:
    model, ids = tiny.tiny_model(0), torch.tensor([5, 6, 7])
    family = family_of(model.config)
    linears = ModelLinears(PACKED)
    names, digest = [name for name, _ in named_weights(model)], model_digest(model)
    weights = read_weights(model, family, linears)
    assert [name for name, _ in named_weights(model)] == names
    assert model_digest(model) == digest
    load_weights(model, dict(tiny.reference(1).named_parameters()))
    linears.refresh()
    with torch.no_grad():
        hidden = hidden_states(TorchOps(), family, weights, OneSequence(), ids, torch.arange(3))
        expected = tiny.reference(1)(ids[None]).logits[0]
        assert torch.allclose(logits(family, weights, hidden), expected, atol=1e-4)


@needs_library
@pytest.mark.usefixtures("small_too")
def test_what_is_packed() -> None:
    assert choose_linear(tiny.tiny_model(0)) is PACKED
    assert choose_linear(tiny.tiny_model(0).to(torch.bfloat16)) is PlainLinear
    packed_linear.LEAST_BYTES = 16 * 2**20  # the fixture restores both
    assert choose_linear(tiny.tiny_model(0)) is small_kind()
    packed_linear.MEMORY_SHARE = 0.0
    assert choose_linear(tiny.tiny_model(0)) is PlainLinear


@pytest.mark.skipif(platform.machine() != "aarch64", reason="oneDNN gets such products on ARM only")
def test_on_arm_small_products_do_not_pass_through_onednn(
    capfd: pytest.CaptureFixture[str],
) -> None:
    """A product of oneDNN takes 60 us more, and more than 500 us beside threads that spin."""
    assert small_kind() is BlasLinear
    x, weight = torch.randn(64, 128), torch.randn(128, 128)
    mkldnn = torch.backends.mkldnn
    # enabled: torch turns oneDNN off after a product that it cannot do, such as another test's in bfloat16
    with mkldnn.flags(enabled=True), mkldnn.verbose(mkldnn.VERBOSE_ON):
        PlainLinear(weight, None)(x)
        assert "matmul" in capfd.readouterr().out
        BlasLinear(weight, None)(x)
        BlasLinear(weight, torch.randn(128))(x)
        assert "matmul" not in capfd.readouterr().out


@needs_library
@pytest.mark.usefixtures("small_too")
@pytest.mark.parametrize("check", ["update_changes_every_weight", "group_and_many"])
@pytest.mark.parametrize(
    "options", [{}, pytest.param({"fuse": False}, marks=pytest.mark.slow)], ids=str
)
def test_the_engine_serves_packed(check: str, options: dict[str, bool]) -> None:
    CHECKS[check](EngineCase("transformers", lambda: make_engine(**options)))


@needs_library
@pytest.mark.usefixtures("small_too")
def test_a_packed_rollout_has_the_same_bits_in_any_batch() -> None:
    async def main() -> None:
        engine = make_engine(max_slots=5)
        await engine.start()
        if not (await engine.stats()).batch_invariant:
            await engine.close()
            pytest.skip("this machine's matrix library is not row invariant")
        asked = [
            tiny.request(str(i), [5 + i % 3, 6, 7], seed=i, max_tokens=6 + 5 * i) for i in range(9)
        ]
        together = await engine.generate_many(asked)
        for request, made in zip(asked, together, strict=True):
            assert same_bits(await engine.generate(request), made)
        await engine.close()

    run(main)

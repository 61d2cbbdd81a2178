"""One decoder: every family's logits are those of the unchanged model with eager attention."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from penstock.errors import UserError
from penstock.model.attention import AttentionCall, OneSequence, Step
from penstock.model.decoder import hidden_states, logits
from penstock.model.decoder_weights import ModuleProducts, read_weights
from penstock.model.families import FAMILIES, family_of
from penstock.model.loading import load_causal_lm
from penstock.model.ops import TorchOps
from stages.decoder_cases import CASES, LENGTH, make_decoder, make_image_model


def decoder_logits(model: Any, ids: torch.Tensor, step: Step | None = None) -> torch.Tensor:
    family = family_of(model.config, len(ids))
    assert family is not None
    weights = read_weights(model, family, ModuleProducts())
    positions = torch.arange(len(ids))
    hidden = hidden_states(TorchOps(), family, weights, step or OneSequence(), ids, positions)
    return logits(family, weights, hidden)


def test_every_family_has_a_case() -> None:
    assert {model_type for model_type, _ in CASES.values()} == set(FAMILIES)


def some_ids() -> torch.Tensor:
    return torch.randint(3, 97, (LENGTH,), generator=torch.Generator().manual_seed(1))


def eager_logits(model: Any, ids: torch.Tensor) -> torch.Tensor:
    return model(ids[None], use_cache=False).logits[0]


@pytest.mark.parametrize("case", CASES)
@torch.no_grad()
def test_logits_are_those_of_the_eager_model(case: str) -> None:
    model, ids = make_decoder(case), some_ids()
    torch.testing.assert_close(
        decoder_logits(model, ids), eager_logits(model, ids), rtol=0, atol=1e-5
    )


@torch.no_grad()
def test_the_text_part_of_an_image_model_is_a_family() -> None:
    model, ids = make_image_model(), some_ids()
    torch.testing.assert_close(
        decoder_logits(model, ids), eager_logits(model, ids), rtol=0, atol=1e-5
    )


class EagerSequence(OneSequence):
    """Attends with the operations of transformers' eager attention, in the model's format."""

    def attend(self, layer: int, call: AttentionCall) -> torch.Tensor:
        groups = call.query.shape[1] // call.key.shape[1]
        key, value = (
            part.repeat_interleave(groups, 1).contiguous() for part in (call.key, call.value)
        )
        scores = torch.matmul(call.query.contiguous(), key.transpose(2, 3)) * call.scale
        if call.softcap is not None:
            scores = torch.tanh(scores / call.softcap) * call.softcap
        distance = torch.arange(LENGTH)[:, None] - torch.arange(LENGTH)
        seen = (distance >= 0) & (distance < (call.window or LENGTH))
        scores = scores + torch.where(seen, 0.0, torch.finfo(scores.dtype).min).to(scores.dtype)
        weights = scores.softmax(-1, dtype=torch.float32).to(value.dtype)
        return torch.matmul(weights, value).transpose(1, 2)


@pytest.mark.parametrize("case", [case for case in CASES if case != "gpt oss"])
@torch.no_grad()
def test_half_precision_rounds_where_the_model_rounds(case: str) -> None:
    """A norm that rounds elsewhere, or another order of a product, shows in bfloat16 only."""
    model, ids = make_decoder(case, torch.bfloat16), some_ids()
    assert torch.equal(decoder_logits(model, ids, EagerSequence()), eager_logits(model, ids))


def load_changed(folder: Path, case: str, drop: str = "", add: tuple[str, ...] = ()) -> Any:
    """Load the checkpoint of a case without one of its weights, or with more."""
    make_decoder(case).save_pretrained(folder)
    weights = load_file(folder / "model.safetensors")
    weights.pop(drop, None)
    weights |= {name: torch.zeros(32) for name in add}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    cpu = torch.device("cpu")
    return load_causal_lm(str(folder), dtype=torch.float32, device=cpu, trust_remote_code=False)


@pytest.mark.parametrize(
    ("case", "how", "message"),
    [
        ("qwen 3 moe", {"drop": "model.layers.0.mlp.experts.0.gate_proj.weight"}, "cannot be loaded"),
        ("llama", {"drop": "lm_head.weight"}, r"lack 1 weights of LlamaForCausalLM \(lm_head.weight\)"),
        ("llama", {"add": ("model.layers.0.self_attn.q_proj.bias",)}, "that its config.json knows nothing of"),
    ],
)  # fmt: skip
def test_a_checkpoint_that_contradicts_its_config_is_one_line(
    case: str, how: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(UserError, match=message) as caught:
        load_changed(tmp_path, case, **how)
    assert "\n" not in str(caught.value)


def test_weights_beside_the_layers_are_left_out_and_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Layers for more tokens, and a head of values; transformers' own table of them is not shown."""
    more = ("model.layers.9.mlp.gate.weight", "mtp.fc.weight", "v_head.weight")
    load_changed(tmp_path, "qwen 3", add=more)
    (line,) = [record.getMessage() for record in caplog.records if "weights" in record.getMessage()]
    assert line.endswith("3 weights are not used: " + ", ".join(more))

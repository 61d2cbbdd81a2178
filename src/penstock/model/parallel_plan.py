"""What transformers knows about dividing a model over ranks, and the check of `train.parallel` against it.

Reads a model's config, never its weights, so that the check runs before anything heavy starts.
"""

from __future__ import annotations

from typing import Any

from penstock.config import Config
from penstock.config.demo import resolve_model_path
from penstock.errors import UserError

COLUMNS, GATHERED = "colwise", "colwise_gather_output"
ROWS, SPLIT_ROWS = "rowwise", "rowwise_split_input"
SUMMED = "replicated_with_grad_allreduce"
_STYLES = (COLUMNS, GATHERED, ROWS, SPLIT_ROWS, SUMMED)
_VOCABULARY_STYLES = ("embedding_rowwise", "vocab_rowwise")  # embeddings are cut in any case


def check_parallel(config: Config) -> None:
    """Refuse a layout of trainer ranks that the policy or its reference cannot be divided into."""
    parallel, model = config.train.parallel, config.model
    if parallel.copies == 1:
        return
    from transformers import AutoConfig

    for path in filter(None, (model.path, config.train.reference)):
        try:
            settings = AutoConfig.from_pretrained(
                resolve_model_path(path), trust_remote_code=model.trust_remote_code
            )
        except (OSError, ValueError) as error:
            reason = str(error).strip().splitlines()[0]
            raise UserError(
                f"model.path: got {path!r}, whose config cannot be loaded ({reason}); "
                "allowed: a folder or hub name of a transformers causal LM"
            ) from error
        if parallel.tensor > 1:
            tensor_plan(settings, parallel.tensor, path)
        if parallel.pipeline > 1:
            check_stages(settings, parallel.pipeline, path)


def check_stages(settings: Any, size: int, path: str) -> None:
    """Refuse a pipeline if transformers has no plan for the architecture, or it has too few layers."""
    text, key = settings.get_text_config(), f"train.parallel.pipeline: got {size}"
    plan = getattr(text, "base_model_pp_plan", None) or {}
    if set(plan) != {"embed_tokens", "layers", "norm"}:
        raise UserError(
            f"{key}, but transformers has no pipeline plan of an embedding, layers and a norm for {path!r} "
            f"({text.model_type}), allowed: 1"
        )
    if text.num_hidden_layers < size:
        raise UserError(
            f"{key}, allowed: at most the model's num_hidden_layers = {text.num_hidden_layers} ({path!r})"
        )


def tensor_plan(settings: Any, size: int, path: str) -> dict[str, str]:
    """transformers' plan of an architecture (layer pattern -> style); refuse what cannot be cut."""
    text, key = settings.get_text_config(), f"train.parallel.tensor: got {size}"
    plan: dict[str, str] = getattr(text, "base_model_tp_plan", None) or {}
    if not plan:
        raise UserError(
            f"{key}, but transformers has no tensor-parallel plan for {path!r} ({text.model_type}), "
            "allowed: 1"
        )
    styles = (*_STYLES, *_VOCABULARY_STYLES)
    unknown = sorted({style for style in plan.values() if style not in styles})
    if unknown:
        raise UserError(
            f"{key}, but the plan of {path!r} ({text.model_type}) has {', '.join(unknown)}, "
            f"allowed: 1, or a model whose plan has only {', '.join(_STYLES)}"
        )
    for name in ("num_attention_heads", "num_key_value_heads", "intermediate_size"):
        count = getattr(text, name, None) or text.num_attention_heads
        if not isinstance(count, int) or count % size:
            raise UserError(f"{key}, allowed: a divisor of the model's {name} = {count} ({path!r})")
    return {pattern: style for pattern, style in plan.items() if style in _STYLES}

"""Groups as padded tensors by name, for users who take rollouts into a trainer of their own."""

from __future__ import annotations

from typing import Any

import numpy as np

from penstock.types import Group, Rollout


def unpadded(input_ids: Any, attention_mask: Any) -> list[np.ndarray]:
    """The prompts of a padded batch, each without its padding."""
    ids, mask = np.asarray(input_ids), np.asarray(attention_mask).astype(bool)
    return [row[keep].astype(np.int32) for row, keep in zip(ids, mask, strict=True)]


def group_tensors(groups: list[Group], advantages_PG: np.ndarray, pad_id: int) -> dict[str, Any]:
    """[prompts, generations, length]: prompts padded on the left, responses on the right.

    `response_idx` holds the first and the last place of a response in `input_ids`; action tensors
    speak of the response's places alone.
    """
    import torch

    prompts, generations = len(groups), len(groups[0].rollouts)
    width = max(len(group.prompt.token_ids) for group in groups)
    longest = max(len(r.response_ids) for group in groups for r in group.rollouts)
    shape, actions = (prompts, generations, width + longest), (prompts, generations, longest)
    made = {
        "input_ids": torch.full(shape, pad_id, dtype=torch.long),
        "attention_mask": torch.zeros(shape, dtype=torch.long),
        "action_mask": torch.zeros(actions, dtype=torch.bool),
        "action_log_probs": torch.zeros(actions),
        "response_idx": torch.zeros((prompts, generations, 2), dtype=torch.long),
    }
    for p, group in enumerate(groups):
        for g, rollout in enumerate(group.rollouts):
            size, start = len(rollout.response_ids), width - len(rollout.prompt_ids)
            whole = np.concatenate([rollout.prompt_ids, rollout.response_ids])
            made["input_ids"][p, g, start : width + size] = torch.from_numpy(whole).long()
            made["attention_mask"][p, g, start : width + size] = 1
            made["action_mask"][p, g, :size] = torch.from_numpy(rollout.loss_mask)
            made["action_log_probs"][p, g, :size] = torch.from_numpy(rollout.logprobs)
            made["response_idx"][p, g] = torch.tensor([width, width + size - 1])

    def column(value: Any) -> Any:
        rows = [[[float(value(rollout))] for rollout in group.rollouts] for group in groups]
        return torch.tensor(rows)

    return {
        **made,
        "reward": column(lambda r: r.reward),
        "format_acc": column(lambda r: _said(r, "format_ok")),
        "ans_acc": column(lambda r: _said(r, "answer_ok")),
        "temperature": column(lambda r: r.temperature),
        "advantages": torch.from_numpy(advantages_PG).float().unsqueeze(-1),
    }


def _said(rollout: Rollout, what: str) -> bool:
    """What the reward says of it; where it does not judge, whether the reward is above 0."""
    said = getattr(rollout.score, what)
    return rollout.reward > 0 if said is None else bool(said)

"""The settings of other systems and the keys that mean the same here: the rows of `systems/SYSTEM.csv`.

`penstock convert` translates whole configs by these tables; a config with such a word in it is told the key.
"""

from __future__ import annotations

import csv
from functools import cache
from importlib.resources import files

SYSTEMS = ("trl", "verl", "openrlhf", "colossalai", "xtuner")
# Words that have no key of their own there, or that several systems use.
COMMON = {
    "model_name": "model.path",
    "train_dataset": "tasks.NAME.data",
    "dataset": "tasks.NAME.data",
    "reward_function": "tasks.NAME.rewards",
    "custom_reward_function": "tasks.NAME.rewards",
    "reward_weights": "tasks.NAME.rewards",
    "max_new_tokens": "sampling.max_tokens",
    "rollout_n": "sampling.num_generations",
    "group_size": "sampling.num_generations",
    "warmup_ratio": "train.warmup_steps",
    "epochs": "train.episodes",
    "batch_size": "train.groups_per_step",
    "per_device_train_batch_size": "train.groups_per_step",
    "generation_batch_size": "train.groups_per_step",
    "gradient_accumulation_steps": "train.micro_batch_tokens",
    "ppo_micro_batch_size_per_gpu": "train.micro_batch_tokens",
    "ppo_max_token_len_per_gpu": "train.micro_batch_tokens",
    "ppo_mini_batch_size": "train.mini_batches",
    "adam_beta1": "train.betas",
    "adam_epsilon": "train.eps",
    "adam_beta2": "train.betas",
    "ref_model": "train.reference",
    "loss_type": "algorithm.name",
    "scale_rewards": "algorithm.normalize",
    "kl_penalty": "algorithm.kl_estimator",
    "use_kl_in_reward": "algorithm.kl_in",
    "cliprange": "algorithm.clip_low",
    "overlong_buffer": "algorithm.overlong_penalty",
    "logger": "track.trackers",
    "n_gpus_per_node": "launch.num_consumers",
    "nnodes": "launch.kind",
}


def rows(system: str) -> list[dict[str, str]]:
    """The rows of a system's table, with the columns word, key, value and note."""
    text = (files(__package__) / "systems" / f"{system}.csv").read_text("utf-8")
    return list(csv.DictReader(text.splitlines()))


def key_of_word(word: str) -> str:
    """The key that means the same as a word of TRL, verl or OpenRLHF; empty if it is none."""
    return _keys().get(word, "")


@cache
def _keys() -> dict[str, str]:
    tables = [row for system in ("openrlhf", "verl", "trl") for row in reversed(rows(system))]
    words = {row["word"].rsplit(".", 1)[-1]: row["key"] for row in tables if row["key"]}
    return words | COMMON

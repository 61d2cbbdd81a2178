"""What is said of a key that the config does not have: a removed one, a word of another system, a misspelt one."""

from __future__ import annotations

import difflib
import re
from collections.abc import Sequence
from fnmatch import fnmatchcase

_RAY_NAMES = "by Ray's own names: num_cpus, num_gpus, accelerator_type, label_selector, resources"
_LONG_PROMPTS = "leave it out: prompts above max_prompt_tokens are left out and counted"
# Keys that were removed (`*` stands for any text), and what to do instead.
REMOVED = {
    "*produce.failure_window": "leave it out: max_failure_share is taken over the last 32 attempts",
    "*produce.retry_backoff_s": "leave it out: the first retry waits 0.1 s, each further one twice as long",
    "*produce.max_refused_in_a_row": "leave it out: the run stops after 1000 refused groups in a row",
    "train.max_bad_updates": "leave it out: the run stops after 3 skipped updates in a row",
    "launch.restart_window_s": "leave it out: launch.max_restarts counts over the last 600 s",
    "sync.backend": "leave it out: weights go from node to node over TCP",
    "launch.producers": f"write launch.ray_options.producers, {_RAY_NAMES}",
    "launch.consumers": f"write launch.ray_options.consumers, {_RAY_NAMES}",
    "launch.agents": f"write launch.ray_options.agents, {_RAY_NAMES}",
    "launch.producer_kinds.place": f"write ray_options in its place, {_RAY_NAMES}",
    "tasks.*.long_prompts": _LONG_PROMPTS,
    "eval.tasks.*.long_prompts": _LONG_PROMPTS,
    "engine.max_tokens_in_flight": "write engine.options.max_tokens_in_flight, of the transformers engine",
    "eval.num_generations": "write eval.sampling.num_generations",
    "eval.temperature": "write eval.sampling.temperature",
    "eval.top_p": "write eval.sampling.top_p",
    "eval.max_tokens": "write eval.sampling.max_tokens",
    "run.group": "write track.wandb.group",
    "run.tags": "write track.wandb.tags",
    "track.project": "write track.wandb.project",
    "track.rollouts_per_log": "leave it out: 4 groups are written each time; `penstock rollouts` shows all",
}
# Words of TRL's and verl's settings, and the key that means the same here.
FOREIGN = {
    "model_name_or_path": "model.path",
    "model_name": "model.path",
    "torch_dtype": "model.dtype",
    "bf16": "model.dtype",
    "fp16": "model.dtype",
    "lora_r": "model.lora.rank",
    "lora_rank": "model.lora.rank",
    "lora_alpha": "model.lora.alpha",
    "lora_target_modules": "model.lora.target_modules",
    "train_dataset": "tasks.NAME.data",
    "dataset_name": "tasks.NAME.data",
    "dataset": "tasks.NAME.data",
    "train_files": "tasks.NAME.data",
    "eval_dataset": "eval.tasks.NAME.data",
    "val_files": "eval.tasks.NAME.data",
    "reward_funcs": "tasks.NAME.rewards",
    "reward_function": "tasks.NAME.rewards",
    "custom_reward_function": "tasks.NAME.rewards",
    "reward_weights": "tasks.NAME.rewards",
    "max_prompt_length": "tasks.NAME.max_prompt_tokens",
    "max_completion_length": "sampling.max_tokens",
    "max_response_length": "sampling.max_tokens",
    "max_new_tokens": "sampling.max_tokens",
    "rollout_n": "sampling.num_generations",
    "n": "sampling.num_generations",
    "group_size": "sampling.num_generations",
    "use_vllm": "engine.name",
    "vllm_mode": "launch.colocate",
    "gpu_memory_utilization": "engine.options",
    "vllm_gpu_memory_utilization": "engine.options",
    "tensor_model_parallel_size": "engine.options",
    "learning_rate": "train.lr",
    "lr_scheduler_type": "train.schedule",
    "warmup_ratio": "train.warmup_steps",
    "lr_warmup_steps": "train.warmup_steps",
    "max_steps": "train.steps",
    "total_training_steps": "train.steps",
    "epochs": "train.episodes",
    "num_train_epochs": "train.episodes",
    "total_epochs": "train.episodes",
    "batch_size": "train.groups_per_step",
    "train_batch_size": "train.groups_per_step",
    "per_device_train_batch_size": "train.groups_per_step",
    "generation_batch_size": "train.groups_per_step",
    "gradient_accumulation_steps": "train.micro_batch_tokens",
    "ppo_micro_batch_size_per_gpu": "train.micro_batch_tokens",
    "ppo_max_token_len_per_gpu": "train.micro_batch_tokens",
    "ppo_mini_batch_size": "train.mini_batches",
    "ppo_epochs": "train.num_epochs",
    "num_iterations": "train.num_epochs",
    "grad_clip": "train.max_grad_norm",
    "adam_beta1": "train.betas",
    "adam_beta2": "train.betas",
    "ref_model": "train.reference",
    "adv_estimator": "algorithm.name",
    "loss_type": "algorithm.name",
    "loss_agg_mode": "algorithm.aggregation",
    "scale_rewards": "algorithm.normalize",
    "norm_adv_by_std_in_grpo": "algorithm.normalize",
    "beta": "algorithm.kl_beta",
    "kl_coef": "algorithm.kl_beta",
    "kl_loss_coef": "algorithm.kl_beta",
    "init_kl_coef": "algorithm.kl_beta",
    "kl_loss_type": "algorithm.kl_estimator",
    "kl_penalty": "algorithm.kl_estimator",
    "use_kl_loss": "algorithm.kl_in",
    "use_kl_in_reward": "algorithm.kl_in",
    "epsilon": "algorithm.clip_low",
    "cliprange": "algorithm.clip_low",
    "clip_ratio": "algorithm.clip_low",
    "clip_ratio_low": "algorithm.clip_low",
    "epsilon_high": "algorithm.clip_high",
    "clip_ratio_high": "algorithm.clip_high",
    "clip_ratio_c": "algorithm.dual_clip",
    "delta": "algorithm.dual_clip",
    "mask_truncated_completions": "algorithm.mask_truncated",
    "overlong_buffer": "algorithm.overlong_penalty",
    "eval_steps": "eval.every_steps",
    "test_freq": "eval.every_steps",
    "val_before_train": "eval.at_start",
    "save_steps": "checkpoint.every_steps",
    "save_freq": "checkpoint.every_steps",
    "save_total_limit": "checkpoint.keep",
    "report_to": "track.trackers",
    "logger": "track.trackers",
    "project_name": "track.wandb",
    "output_dir": "run.dir",
    "run_name": "run.name",
    "experiment_name": "run.name",
    "n_gpus_per_node": "launch.num_consumers",
    "nnodes": "launch.kind",
}


def removed_key(key: str) -> str:
    """Say what to do instead of a key that was removed; empty if it was not."""
    name = re.sub(r"\[\d+\]", "", key)  # of a list, whichever of its tables
    advice = (advice for pattern, advice in REMOVED.items() if fnmatchcase(name, pattern))
    return next((f"{key}: this key was removed; {text}" for text in advice), "")


def nearest_key(key: str, valid: Sequence[str], *, with_foreign: bool) -> str:
    """The valid key that an unknown one probably means; empty if none is near."""
    last = key.rsplit(".", 1)[-1]
    if with_foreign and last.lower() in FOREIGN:
        return FOREIGN[last.lower()]
    near = difflib.get_close_matches(key, valid, n=1, cutoff=0.5)
    if not near:  # a misspelt table, or the right name in the wrong table
        near = [other for other in valid if other.rsplit(".", 1)[-1] == last]
    return near[0] if near else ""

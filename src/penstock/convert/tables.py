"""What each word of another system means here.

`WORDS[system]` maps a word to a `Rule`; `DEFAULTS[system]` lists defaults of theirs that differ from ours and
so must be written down. A rule without a key has no counterpart; its note says why.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


def read(value: Any) -> Any:
    """Return a number, bool or text as it was meant."""
    if not isinstance(value, str):
        return value
    lowered = value.strip().lower()
    if lowered in ("true", "false"):
        return lowered == "true"
    if lowered in ("none", "null"):
        return None
    for kind in (int, float):
        try:
            return kind(value)
        except ValueError:
            continue
    return value


@dataclass(slots=True, frozen=True)
class Rule:
    """The key that a word sets; `note` is written beside it."""

    key: str = ""
    note: str = ""
    value: Callable[[Any], Any] = read
    is_secret: bool = False  # the word's value is not shown


def named(names: dict[str, Any], otherwise: Any = None) -> Callable[[Any], Any]:
    """Return a translation of values by name; unknown names stay, or become `otherwise`."""

    def translate(value: Any) -> Any:
        given = str(value).strip().lower()
        return names.get(given, value if otherwise is None else otherwise)

    return translate


def reward_list(value: Any) -> list[dict[str, Any]]:
    names = value if isinstance(value, list) else str(value).split()
    return [{"type": str(name)} for name in names]


def words_list(value: Any) -> list[str]:
    """Return the names of a list; "all-linear" means all, which an empty list means here."""
    names = value if isinstance(value, list) else str(value).strip("[]").replace(",", " ").split()
    return [] if names == ["all-linear"] else [str(name) for name in names]


def trackers(value: Any) -> list[str]:
    """Return the console and the trackers that are named."""
    return ["console", *(name for name in ("tensorboard", "wandb") if name in str(value).lower())]


SCHEDULES = named(
    {
        "cosine_with_min_lr": "cosine",
        "constant_with_warmup": "constant",
        "warmup_stable_decay": "linear",
    }
)
PER_TOKEN = "a token budget of a forward pass, chosen from memory; it never changes the gradient"
NO_PARALLEL = Rule(note="the trainer shards with FSDP2 over launch.num_consumers ranks")
BUILT_IN = Rule(note="always so here")
TASK, EVAL = "tasks.train", "eval.tasks.heldout"

TRL = {
    "model_name_or_path": Rule("model.path"),
    "torch_dtype": Rule("model.dtype", value=named({"auto": "auto"})),
    "dtype": Rule("model.dtype"),
    "bf16": Rule("model.dtype", value=lambda on: "bfloat16" if read(on) else "auto"),
    "fp16": Rule("model.dtype", value=lambda on: "float16" if read(on) else "auto"),
    "trust_remote_code": Rule("model.trust_remote_code"),
    "lora_r": Rule("model.lora.rank"),
    "lora_alpha": Rule("model.lora.alpha", value=lambda v: float(v)),
    "lora_dropout": Rule("model.lora.dropout", value=lambda v: float(v)),
    "lora_target_modules": Rule("model.lora.target_modules", value=words_list),
    "use_peft": Rule(note="model.lora.rank above 0 trains adapters"),
    "dataset_name": Rule(f"{TASK}.data", "a hub name, a folder or a file"),
    "dataset_train_split": Rule(f"{TASK}.data_options.split"),
    "dataset_config": Rule(f"{TASK}.data_options.config"),
    "reward_funcs": Rule(f"{TASK}.rewards", "file.py:function; TRL's signature works", reward_list),
    "max_prompt_length": Rule(f"{TASK}.max_prompt_tokens", "longer prompts are skipped, never cut"),
    "max_completion_length": Rule("sampling.max_tokens"),
    "num_generations": Rule("sampling.num_generations"),
    "temperature": Rule("sampling.temperature"),
    "top_p": Rule("sampling.top_p"),
    "top_k": Rule("sampling.top_k"),
    "learning_rate": Rule("train.lr", value=float),
    "lr_scheduler_type": Rule("train.schedule", "linear and cosine end at min_lr_ratio", SCHEDULES),
    "warmup_steps": Rule("train.warmup_steps"),
    "weight_decay": Rule("train.weight_decay"),
    "max_grad_norm": Rule("train.max_grad_norm"),
    "max_steps": Rule("train.steps"),
    "num_train_epochs": Rule("train.episodes"),
    "num_iterations": Rule("train.num_epochs"),
    "steps_per_generation": Rule("train.mini_batches"),
    "gradient_checkpointing": Rule("train.gradient_checkpointing"),
    "beta": Rule("algorithm.kl_beta"),
    "epsilon": Rule("algorithm.clip_low"),
    "epsilon_high": Rule("algorithm.clip_high"),
    "delta": Rule("algorithm.dual_clip", "bounds negative advantages, as delta does"),
    "mask_truncated_completions": Rule("algorithm.mask_truncated"),
    "use_vllm": Rule("engine.name", value=lambda on: "vllm" if read(on) else "transformers"),
    "vllm_mode": Rule("launch.colocate", value=lambda mode: mode == "colocate"),
    "vllm_gpu_memory_utilization": Rule("engine.options.gpu_memory_utilization"),
    "vllm_tensor_parallel_size": Rule("engine.options.tensor_parallel_size"),
    "seed": Rule("seed"),
    "eval_steps": Rule("eval.every_steps"),
    "save_steps": Rule("checkpoint.every_steps"),
    "save_total_limit": Rule("checkpoint.keep"),
    "output_dir": Rule("run.dir", "a folder of run folders"),
    "run_name": Rule("run.name"),
    "report_to": Rule("track.trackers", value=trackers),
    "logging_steps": Rule(note="metrics.jsonl has every step"),
    "log_completions": Rule(note="RUN/rollouts.jsonl; `penstock rollouts RUN` shows them"),
    "attn_implementation": BUILT_IN,
    "remove_unused_columns": Rule(note="columns reach the reward by name"),
}

VERL = {
    "actor_rollout_ref.model.path": Rule("model.path"),
    "actor_rollout_ref.model.lora_rank": Rule("model.lora.rank"),
    "actor_rollout_ref.model.lora_alpha": Rule("model.lora.alpha", value=float),
    "actor_rollout_ref.model.target_modules": Rule("model.lora.target_modules", value=words_list),
    "actor_rollout_ref.model.trust_remote_code": Rule("model.trust_remote_code"),
    "actor_rollout_ref.model.enable_gradient_checkpointing": Rule("train.gradient_checkpointing"),
    "actor_rollout_ref.model.use_remove_padding": Rule(note="batches are always packed"),
    "data.train_files": Rule(f"{TASK}.data"),
    "data.val_files": Rule(f"{EVAL}.data"),
    "data.train_batch_size": Rule("train.groups_per_step", "prompts per update"),
    "data.max_prompt_length": Rule(
        f"{TASK}.max_prompt_tokens", "longer prompts are skipped, never cut"
    ),
    "data.max_response_length": Rule("sampling.max_tokens"),
    "data.filter_overlong_prompts": Rule(f"{TASK}.long_prompts", value=lambda _: "skip"),
    "data.truncation": Rule(note="prompts are never cut"),
    "data.shuffle": Rule(note="every pass has its own order, from the seed"),
    "data.seed": Rule("seed"),
    "actor_rollout_ref.rollout.n": Rule("sampling.num_generations"),
    "actor_rollout_ref.rollout.temperature": Rule("sampling.temperature"),
    "actor_rollout_ref.rollout.top_p": Rule("sampling.top_p"),
    "actor_rollout_ref.rollout.top_k": Rule("sampling.top_k", "0 is off", lambda k: max(0, int(k))),
    "actor_rollout_ref.rollout.name": Rule(
        "engine.name", value=named({"hf": "transformers", "sglang": "openai"})
    ),
    "actor_rollout_ref.rollout.tensor_model_parallel_size": Rule(
        "engine.options.tensor_parallel_size"
    ),
    "actor_rollout_ref.rollout.gpu_memory_utilization": Rule(
        "engine.options.gpu_memory_utilization"
    ),
    "actor_rollout_ref.rollout.val_kwargs.n": Rule("eval.num_generations"),
    "actor_rollout_ref.rollout.val_kwargs.temperature": Rule("eval.temperature"),
    "actor_rollout_ref.rollout.val_kwargs.top_p": Rule("eval.top_p"),
    "actor_rollout_ref.actor.optim.lr": Rule("train.lr", value=float),
    "actor_rollout_ref.actor.optim.weight_decay": Rule("train.weight_decay"),
    "actor_rollout_ref.actor.optim.lr_warmup_steps": Rule(
        "train.warmup_steps", value=lambda steps: max(0, int(steps))
    ),
    "actor_rollout_ref.actor.grad_clip": Rule("train.max_grad_norm"),
    "actor_rollout_ref.actor.ppo_epochs": Rule("train.num_epochs"),
    "actor_rollout_ref.actor.clip_ratio": Rule("algorithm.clip_low"),
    "actor_rollout_ref.actor.clip_ratio_low": Rule("algorithm.clip_low"),
    "actor_rollout_ref.actor.clip_ratio_high": Rule("algorithm.clip_high"),
    "actor_rollout_ref.actor.clip_ratio_c": Rule("algorithm.dual_clip"),
    "actor_rollout_ref.actor.loss_agg_mode": Rule(
        "algorithm.aggregation",
        value=named(
            {
                "token-mean": "token",
                "seq-mean-token-mean": "sequence",
                "seq-mean-token-sum": "constant",
                "seq-mean-token-sum-norm": "constant",
            }
        ),
    ),
    "actor_rollout_ref.actor.kl_loss_coef": Rule("algorithm.kl_beta"),
    "actor_rollout_ref.actor.kl_loss_type": Rule(
        "algorithm.kl_estimator",
        value=named({"low_var_kl": "k3", "kl": "k1", "mse": "k2", "abs": "k1"}),
    ),
    "actor_rollout_ref.actor.entropy_coeff": Rule(note="no entropy bonus"),
    "algorithm.kl_ctrl.kl_coef": Rule("algorithm.kl_beta"),
    "algorithm.adv_estimator": Rule(
        "algorithm.name",
        "there is no critic: gae becomes grpo",
        named(
            {
                "gae": "grpo",
                "reinforce_plus_plus": "reinforce_pp",
                "reinforce_plus_plus_baseline": "reinforce_pp_baseline",
                "grpo_passk": "grpo",
                "remax": "reinforce",
            }
        ),
    ),
    "algorithm.norm_adv_by_std_in_grpo": Rule(
        "algorithm.normalize", value=lambda on: "group" if read(on) else "none"
    ),
    "trainer.total_epochs": Rule("train.episodes"),
    "trainer.total_training_steps": Rule("train.steps"),
    "trainer.save_freq": Rule("checkpoint.every_steps", value=lambda n: max(0, int(n))),
    "trainer.test_freq": Rule("eval.every_steps", value=lambda n: max(0, int(n))),
    "trainer.val_before_train": Rule("eval.at_start"),
    "trainer.project_name": Rule("track.project"),
    "trainer.experiment_name": Rule("run.name"),
    "trainer.default_local_dir": Rule("run.dir", "a folder of run folders"),
    "trainer.critic_warmup": Rule(note="there is no critic"),
}
_MICRO = (
    "actor.ppo_micro_batch_size_per_gpu",
    "actor.ppo_max_token_len_per_gpu",
    "actor.use_dynamic_bsz",
    "rollout.log_prob_micro_batch_size_per_gpu",
    "ref.log_prob_micro_batch_size_per_gpu",
)
VERL |= {f"actor_rollout_ref.{name}": Rule(note=PER_TOKEN) for name in _MICRO}
_SHARDS = ("actor.fsdp_config.param_offload", "actor.fsdp_config.optimizer_offload")
VERL |= {f"actor_rollout_ref.{name}": NO_PARALLEL for name in _SHARDS}

OPENRLHF = {
    "pretrain": Rule("model.path"),
    "lora_rank": Rule("model.lora.rank"),
    "lora_alpha": Rule("model.lora.alpha", value=float),
    "target_modules": Rule("model.lora.target_modules", value=words_list),
    "prompt_data": Rule(f"{TASK}.data"),
    "prompt_split": Rule(f"{TASK}.data_options.split"),
    "input_key": Rule(f"{TASK}.columns.prompt"),
    "label_key": Rule(f"{TASK}.columns.gt_answer"),
    "eval_dataset": Rule(f"{EVAL}.data"),
    "prompt_max_len": Rule(f"{TASK}.max_prompt_tokens", "longer prompts are skipped, never cut"),
    "generate_max_len": Rule("sampling.max_tokens"),
    "n_samples_per_prompt": Rule("sampling.num_generations"),
    "temperature": Rule("sampling.temperature"),
    "top_p": Rule("sampling.top_p"),
    "rollout_batch_size": Rule("train.groups_per_step", "prompts"),
    "max_epochs": Rule("train.num_epochs"),
    "num_episodes": Rule("train.episodes"),
    "actor_learning_rate": Rule("train.lr", value=float),
    "lr_scheduler": Rule("train.schedule", value=SCHEDULES),
    "l2": Rule("train.weight_decay"),
    "max_norm": Rule("train.max_grad_norm"),
    "gradient_checkpointing": Rule("train.gradient_checkpointing"),
    "init_kl_coef": Rule("algorithm.kl_beta"),
    "kl_estimator": Rule("algorithm.kl_estimator"),
    "use_kl_loss": Rule("algorithm.kl_in", value=lambda on: "loss" if read(on) else "reward"),
    "advantage_estimator": Rule(
        "algorithm.name",
        "there is no critic: gae becomes grpo",
        named(
            {
                "gae": "grpo",
                "group_norm": "grpo",
                "reinforce": "reinforce_pp",
                "reinforce_baseline": "reinforce_pp_baseline",
            }
        ),
    ),
    "dynamic_filtering": Rule("algorithm.filter_groups"),
    "vllm_num_engines": Rule("launch.num_producers"),
    "vllm_tensor_parallel_size": Rule("engine.options.tensor_parallel_size"),
    "vllm_gpu_memory_utilization": Rule("engine.options.gpu_memory_utilization"),
    "colocate_all_models": Rule("launch.colocate"),
    "async_train": Rule("produce.strategy", value=lambda on: "async" if read(on) else "sync"),
    "seed": Rule("seed"),
    "eval_steps": Rule("eval.every_steps", value=lambda n: max(0, int(n))),
    "eval_temperature": Rule("eval.temperature"),
    "eval_n_samples_per_prompt": Rule("eval.num_generations"),
    "save_steps": Rule("checkpoint.every_steps", value=lambda n: max(0, int(n))),
    "max_ckpt_num": Rule("checkpoint.keep"),
    "save_path": Rule(note="`penstock export RUN --to FOLDER` writes the model"),
    "ckpt_path": Rule("run.dir", "checkpoints are in the run folder"),
    "use_wandb": Rule(
        "track.trackers",
        "the key belongs in the environment variable WANDB_API_KEY",
        lambda _: ["console", "wandb"],
        is_secret=True,
    ),
    "wandb_project": Rule("track.project"),
    "wandb_run_name": Rule("run.name"),
    "remote_rm_url": Rule(note="write rewards = [{ type = 'file.py:function' }] and ask it there"),
    "reward_pretrain": Rule(
        f"{TASK}.rewards",
        "a reward model",
        lambda path: [{"type": "reward_model", "options": {"path": str(path)}}],
    ),
    "bf16": Rule("model.dtype", value=lambda _: "bfloat16"),
    "gamma": Rule(note="1: a response is one action"),
    "normalize_reward": Rule(note="advantages are normalised by algorithm.normalize"),
    "apply_chat_template": BUILT_IN,
    "packing_samples": BUILT_IN,
    "flash_attn": BUILT_IN,
    "enable_prefix_caching": BUILT_IN,
    "vllm_enable_sleep": Rule(note="launch.colocate = true takes turns"),
    "deepspeed_enable_sleep": Rule(note="launch.colocate = true takes turns"),
    "micro_train_batch_size": Rule(note=PER_TOKEN),
    "micro_rollout_batch_size": Rule(note="continuous batching needs none"),
    "zero_stage": NO_PARALLEL,
    "adam_offload": NO_PARALLEL,
    "load_checkpoint": Rule(note="`penstock resume RUN`"),
}

COLOSSALAI = {
    "m": Rule("model.path"),
    "d": Rule(f"{TASK}.data"),
    "ed": Rule(f"{EVAL}.data"),
    "p": Rule("track.project"),
    "e": Rule("train.episodes"),
    "t": Rule("launch.num_consumers"),
    "i": Rule("launch.num_producers"),
    "g": Rule("sampling.num_generations"),
    "ibs": Rule(note="producers have no shares: each draws what is missing"),
    "imbs": Rule(note="continuous batching needs none; engine.max_slots bounds it"),
    "tbs": Rule("train.groups_per_step", "there: of one rank; here: of all ranks together"),
    "tMbs": Rule(note=PER_TOKEN),
    "tmbs": Rule(note=PER_TOKEN),
    "tp": NO_PARALLEL,
    "pp": NO_PARALLEL,
    "zero": NO_PARALLEL,
    "ptp": Rule("engine.options.tensor_parallel_size"),
    "b": Rule("engine.name"),
    "temp": Rule("sampling.temperature"),
    "topk": Rule("sampling.top_k"),
    "topp": Rule("sampling.top_p"),
    "s": Rule(f"{TASK}.system_prompt", value=str),
    "mnt": Rule("sampling.max_tokens"),
    "mpt": Rule(f"{TASK}.max_prompt_tokens", "longer prompts are skipped, never cut"),
    "a": Rule(
        "algorithm.name",
        value=named(
            {
                "reinforce_ppb": "reinforce_pp_baseline",
                "grpo": "grpo",
                "dapo": "dapo",
                "rloo": "rloo",
            }
        ),
    ),
    "lr": Rule("train.lr", value=float),
    "kl": Rule("algorithm.kl_beta", "there: DAPO forces 0"),
    "rt": Rule(f"{TASK}.rewards", "a right answer is 1 here, 10 there", reward_list),
    "ei": Rule("eval.every_steps", value=lambda n: max(0, int(n))),
    "nb": Rule("produce.max_staleness"),
    "cbsl": Rule("produce.max_buffered_groups"),
    "si": Rule("checkpoint.every_steps"),
    "sd": Rule("run.dir", "checkpoints are in the run folder"),
    "esd": Rule(note="RUN/eval"),
    "rsd": Rule(note="RUN/rollouts.jsonl"),
    "enable_profiling": Rule(note="RUN/timeline is always written; `penstock timeline RUN`"),
    "master_address": Rule(note="launch.kind = 'ray' and launch.address"),
    "master_port": Rule(note="chosen by Ray"),
}
_LONG = {
    "model": "m", "dataset": "d", "eval_dataset": "ed", "project": "p", "num_episodes": "e",
    "num_trainers": "t", "num_inferencer": "i", "num_generations": "g", "inference_batch_size": "ibs",
    "inference_microbatch_size": "imbs", "train_batch_size": "tbs", "train_minibatch_size": "tMbs",
    "train_microbatch_size": "tmbs", "tensor_parallel_size": "tp", "pipeline_parallel_size": "pp",
    "zero_stage": "zero", "producer_tensor_parallel_size": "ptp", "backend": "b", "temperature": "temp",
    "top_k": "topk", "top_p": "topp", "system_prompt": "s", "max_new_tokens": "mnt",
    "max_prompt_tokens": "mpt", "algo": "a", "learning_rate": "lr", "kl_coeff": "kl",
    "reward_type": "rt", "eval_interval": "ei", "num_behind": "nb", "n_behind": "nb",
    "save_interval": "si", "save_dir": "sd", "eval_save_dir": "esd", "rollout_save_dir": "rsd",
}  # fmt: skip
COLOSSALAI |= {long: COLOSSALAI[short] for long, short in _LONG.items()}

WORDS = {"trl": TRL, "verl": VERL, "openrlhf": OPENRLHF, "colossalai": COLOSSALAI}

# Their defaults that differ from ours: key, value, note.
DEFAULTS: dict[str, list[tuple[str, Any, str]]] = {
    "trl": [
        ("algorithm.aggregation", "token", "TRL's default loss, dapo"),
        ("train.betas", [0.9, 0.999], "TRL's default"),
        ("train.lr", 1e-6, "TRL's default"),
        ("train.schedule", "linear", "TRL's default"),
        ("train.min_lr_ratio", 0.0, "as TRL's linear schedule"),
        ("produce.max_staleness", 0, "TRL is on-policy; 1 overlaps generation and training"),
        ("sampling.max_tokens", 256, "TRL's default"),
        ("train.episodes", 3, "TRL's default; not with train.steps"),
    ],
    "verl": [
        ("algorithm.aggregation", "token", "verl's default"),
        ("train.betas", [0.9, 0.999], "verl's default"),
        ("train.lr", 1e-6, "verl's default"),
        ("produce.max_staleness", 0, "verl's trainer is on-policy; 1 overlaps"),
        ("sampling.max_tokens", 512, "verl's default"),
        ("train.episodes", 30, "verl's default; not with train.steps"),
    ],
    "openrlhf": [
        ("algorithm.kl_beta", 0.01, "OpenRLHF's default"),
        ("train.lr", 1e-6, "OpenRLHF's default"),
        ("train.schedule", "cosine", "OpenRLHF's default"),
        ("engine.name", "vllm", "OpenRLHF generates with vLLM"),
        ("produce.max_staleness", 0, "OpenRLHF waits for each rollout; 1 overlaps"),
        ("sampling.max_tokens", 1024, "OpenRLHF's default"),
        ("train.episodes", 1, "OpenRLHF's default; not with train.steps"),
    ],
    "colossalai": [
        ("algorithm.kl_beta", 0.01, "its default"),
        ("train.lr", 1e-6, "its default"),
        ("train.schedule", "cosine", "its only schedule"),
        ("produce.max_staleness", 0, "its default n_behind"),
        ("sampling.max_tokens", 3584, "its default"),
        (f"{TASK}.max_prompt_tokens", 512, "its default"),
        ("train.groups_per_step", 32, "its default"),
        ("sampling.num_generations", 8, "its default"),
        ("train.episodes", 1, "its default; not with train.steps"),
        ("eval.temperature", 0.6, "its default; 0 is greedy"),
    ],
}

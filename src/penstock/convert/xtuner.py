"""What each field of XTuner's RL config means here; a word is a class and its field (`python_config.py`)."""

from __future__ import annotations

from penstock.convert.rules import (
    BUILT_IN,
    EVAL,
    NO_PARALLEL,
    PER_TOKEN,
    TASK,
    Rule,
    named,
    trackers,
)


def _joined(note: str) -> Rule:
    """Return the rule of a word that is translated together with others, in `write.py`."""
    return Rule(note=note, is_joined=True)


IN_ONE_PART = Rule(
    note="a part of the config; its fields are listed by their class", is_joined=True
)
NOT_SAMPLED = Rule(
    note="the trainer computes ratios of the distribution that was sampled from; not offered"
)
XTUNER = {
    "Trainer": Rule(
        "launch.colocate", value=lambda name: name == "RLColocateTrainerConfig", note="the class"
    ),
    "Trainer.load_from": Rule("model.path"),
    "Trainer.tokenizer_path": _joined("model.tokenizer, if it is not the model's own"),
    "Trainer.enable_evaluate": _joined("eval.every_steps = 0 if it is off"),
    "Trainer.evaluate_step": _joined("eval.every_steps"),
    "Trainer.total_train_steps": Rule("train.steps"),
    "Trainer.total_epochs": Rule("train.episodes"),
    "Trainer.train_batch_size": Rule("train.groups_per_step", "prompts per update"),
    "Trainer.sync_weights_interval": Rule("sync.every_steps"),
    "Trainer.enable_initial_evaluate": Rule("eval.at_start"),
    "Trainer.work_dir": Rule("run.dir", "a folder of run folders"),
    "Trainer.seed": Rule("seed"),
    "Trainer.checkpoint_interval": Rule(
        "checkpoint.every_steps", "0: by minutes only", lambda n: max(0, int(n or 0))
    ),
    "Trainer.checkpoint_maxkeep": Rule(
        "checkpoint.keep", "-1 keeps all there", lambda n: int(n) if int(n or 0) > 0 else None
    ),
    "Trainer.exp_tracker": Rule("track.trackers", "metrics.jsonl is always written", trackers),
    "Trainer.advantage_estimator_config": Rule(
        "algorithm.name",
        "OPO and pass@k advantages: write your own algorithm, docs/algorithms.md",
        named(
            {
                "grpoadvantageconfig": "grpo",
                "drgrpoadvantageconfig": "dr_grpo",
                "rlooadvantageconfig": "rloo",
            },
            otherwise="grpo",
        ),
    ),
    "Trainer.hf_interval": Rule(note="`penstock export RUN --to FOLDER` writes the model"),
    "Trainer.hf_max_keep": Rule(note="`penstock export RUN --to FOLDER` writes the model"),
    "Trainer.auto_resume": Rule(note="`penstock resume RUN`"),
    "Trainer.load_checkpoint_cfg": Rule(note="`penstock resume RUN`"),
    "Trainer.checkpoint_no_save_optimizer": Rule(
        note="a checkpoint is whole: a resumed run is exact"
    ),
    "Trainer.checkpoint_no_save_replay_buffer": Rule(note="the journal keeps every group"),
    "Trainer.skip_checkpoint_validation": Rule(note="a checkpoint's digest is always checked"),
    "Trainer.log_dir": Rule(note="RUN/logs"),
    "Trainer.debug_rollout": Rule(
        note="`penstock check CONFIG` generates and scores, and trains nothing"
    ),
    "Trainer.debug_rollout_dir": Rule(note="`penstock check CONFIG`"),
    "Trainer.debug_train": Rule(note="`penstock replay RUN` trains on recorded groups"),
    "Trainer.trace_config": Rule(note="RUN/timeline is always written; `penstock timeline RUN`"),
    "Trainer.replay_buffer_config": Rule(note="one buffer, over the journal, for both strategies"),
    "WorkerConfig.load_from": Rule("model.path"),
    "WorkerConfig.ref_load_from": Rule("train.reference"),
    "WorkerConfig.optimizer_steps": Rule("train.mini_batches"),
    "WorkerConfig.pack_max_length": Rule("train.micro_batch_tokens", PER_TOKEN),
    "WorkerConfig.sp_size": Rule("train.parallel.context"),
    "WorkerConfig.model_cfg": Rule(note="read from the model's own config.json"),
    "WorkerConfig.fsdp_cfg": NO_PARALLEL,
    "WorkerConfig.ref_model_fsdp_cfg": NO_PARALLEL,
    "WorkerConfig.sft_dataloader_cfg": Rule(note="train.ptx mixes a text stream into the loss"),
    "WorkerConfig.sft_global_batch_size": Rule(note="train.ptx mixes a text stream into the loss"),
    "WorkerConfig.rollout_steps_per_sft": Rule(note="train.ptx.coefficient, in every update"),
    "WorkerConfig.profile_step": Rule(
        note="RUN/timeline is always written; `penstock timeline RUN`"
    ),
    "WorkerConfig.update_weight_bucket_size_in_gb": Rule(
        note="weights go through shared memory or a broadcast"
    ),
    "AdamWConfig.lr": Rule("train.lr", value=float),
    "AdamWConfig.weight_decay": Rule("train.weight_decay"),
    "AdamWConfig.betas": Rule("train.betas", value=lambda pair: [float(one) for one in pair]),
    "AdamWConfig.max_grad_norm": Rule("train.max_grad_norm"),
    "AdamWConfig.eps": Rule(note="1e-8, as there"),
    "AdamWConfig.foreach": BUILT_IN,
    "AdamWConfig.skip_grad_norm_threshold": Rule(
        note="a non-finite gradient is skipped: train.max_bad_updates"
    ),
    "LRConfig.lr_type": Rule("train.schedule"),
    "LRConfig.warmup_ratio": _joined("train.warmup_steps; 0.03 of the steps if it is not said"),
    "LRConfig.lr_min": _joined("train.min_lr_ratio, a share of train.lr"),
    "GRPOAdvantageConfig.eps": Rule(note="1e-4"),
    "DrGRPOAdvantageConfig.max_length": Rule(note="sampling.max_tokens"),
    "FSDPConfig.tp_size": Rule("train.parallel.tensor"),
    "FSDPConfig.torch_compile": Rule("train.compile"),
    "FSDPConfig.recompute_ratio": Rule(
        "train.gradient_checkpointing", "all blocks or none", lambda share: float(share) > 0
    ),
    "GRPOLossConfig.policy_loss_cfg.cliprange_low": Rule("algorithm.clip_low"),
    "GRPOLossConfig.policy_loss_cfg.cliprange_high": Rule("algorithm.clip_high"),
    "GRPOLossConfig.policy_loss_cfg.clip_ratio_c": Rule("algorithm.dual_clip"),
    "GRPOLossConfig.policy_loss_cfg.loss_type": Rule(
        note="the method of algorithm.name; vanilla is grpo's"
    ),
    "GRPOLossConfig.policy_loss_cfg.log_prob_diff_min": BUILT_IN,
    "GRPOLossConfig.policy_loss_cfg.log_prob_diff_max": BUILT_IN,
    "GRPOLossConfig.kl_loss_type": Rule(
        "algorithm.kl_estimator",
        value=named({"low_var_kl": "k3", "kl": "k1", "mse": "k2", "abs": "k1"}),
    ),
    "GRPOLossConfig.use_kl_loss": _joined("algorithm.kl_beta above 0"),
    "GRPOLossConfig.kl_loss_coef": _joined("algorithm.kl_beta"),
    "GRPOLossConfig.rollout_is.rollout_is_level": _joined("algorithm.correction.kind"),
    "GRPOLossConfig.rollout_is.rollout_is_mode": _joined("algorithm.correction.kind"),
    "GRPOLossConfig.rollout_is.rollout_is_threshold": _joined("algorithm.correction.cap and floor"),
    "GRPOLossConfig.rollout_is.rollout_is_mask_threshold": Rule(
        note="one kind of correction at a time"
    ),
    "GRPOLossConfig.rollout_is.rollout_is_veto_threshold": Rule(
        note="sequence_mask leaves out whole responses"
    ),
    "GRPOLossConfig.ignore_idx": BUILT_IN,
    "GRPOLossConfig.mode": Rule(note=PER_TOKEN),
    "GRPOLossConfig.chunk_size": Rule(note=PER_TOKEN),
    "RolloutConfig.model_path": Rule("model.path"),
    "RolloutConfig.dtype": Rule("model.dtype"),
    "RolloutConfig.tensor_parallel_size": Rule("engine.options.tensor_parallel_size"),
    "RolloutConfig.gpu_memory_utilization": Rule("engine.options.gpu_memory_utilization"),
    "RolloutConfig.rollout_max_batch_size_per_instance": Rule("engine.max_slots"),
    "RolloutConfig.max_retry_per_sample": Rule("produce.max_tries"),
    "RolloutConfig.context_length": Rule(note="max_prompt_tokens + max_tokens"),
    "RolloutConfig.expert_parallel_size": NO_PARALLEL,
    "RolloutConfig.data_parallel_size": Rule(note="launch.num_producers engines"),
    "RolloutConfig.random_seed": Rule(note="from seed, by prompt and sample"),
    "RolloutConfig.rollout_timeout": Rule(note="watchdog.stall_s"),
    "RolloutConfig.max_retry_per_worker": Rule(note="launch.max_restarts"),
    "RolloutConfig.health_check_interval_seconds": Rule(
        note="a dead engine is noticed at once; watchdog.stall_s for a hang"
    ),
    "RolloutConfig.weight_transport_type": Rule(note="sync.kind = 'auto'"),
    "RolloutConfig.enable_prefix_caching": BUILT_IN,
    "RolloutConfig.enable_chunked_prefill": BUILT_IN,
    "RolloutConfig.enable_float8": Rule(
        note="not offered: ratios are taken in the trainer's number format"
    ),
    "RolloutConfig.enable_return_routed_experts": Rule(
        note="experts are not replayed; algorithm.correction bounds the gap"
    ),
    "RolloutConfig.api_key": Rule(note="a key belongs in an environment variable", is_secret=True),
    "RolloutConfig.env": Rule(note="a label"),
    "RolloutConfig.device": Rule(note="model.device"),
    "SampleParams.max_tokens": Rule("sampling.max_tokens"),
    "SampleParams.temperature": Rule("sampling.temperature"),
    "SampleParams.top_p": Rule("sampling.top_p"),
    "SampleParams.top_k": Rule("sampling.top_k"),
    "SampleParams.min_tokens": Rule("sampling.min_tokens"),
    "SampleParams.stops": Rule("sampling.stop", value=list),
    "SampleParams.n": Rule(note="sampling.num_generations"),
    "SampleParams.repetition_penalty": NOT_SAMPLED,
    "SampleParams.presence_penalty": NOT_SAMPLED,
    "SampleParams.frequency_penalty": NOT_SAMPLED,
    "SampleParams.stop_token_ids": Rule(note="the model's own generation config names them"),
    "SampleParams.return_logprob": BUILT_IN,
    "SampleParams.return_token_ids": BUILT_IN,
    "SampleParams.stream": BUILT_IN,
    "SamplerConfig.prompt_repeat_k": Rule("sampling.num_generations"),
    "DatasetConfig.anno_path": Rule(f"{TASK}.data"),
    "DatasetConfig.name": Rule(note="a label"),
    "DatasetConfig.sample_ratio": Rule(note="every prompt is drawn once in a pass"),
    "RLTextTokenizeFnConfig.max_length": Rule(
        f"{TASK}.max_prompt_tokens", "longer prompts are skipped"
    ),
    "RLTextTokenizeFnConfig.system_prompt": Rule(f"{TASK}.system_prompt", value=str),
    "RLTextTokenizeFnConfig.tools_schema": Rule(note="agent = 'tools', docs/agents.md"),
    "DataloaderConfig.pack_max_length": Rule(
        note="prompts are not packed; the trainer packs by micro_batch_tokens"
    ),
    "DataloaderConfig.collator": BUILT_IN,
    "DataloaderConfig.pack_level": BUILT_IN,
    "AsyncProduceStrategyConfig.over_sample_threshold": Rule("produce.over_sample_threshold"),
    "AsyncProduceStrategyConfig.enable_partial_rollout": Rule("produce.enable_partial_rollout"),
    "AsyncProduceStrategyConfig.max_staleness": Rule("produce.max_staleness"),
    "AsyncProduceStrategyConfig.tail_batch_trigger_size": Rule(
        "produce.tail_batch_trigger_size", "-1 and 0 are off", lambda n: max(0, int(n))
    ),
    "AsyncProduceStrategyConfig.max_token_staleness": Rule(
        note="staleness always counts from the oldest token"
    ),
    "AsyncProduceStrategyConfig.is_valid_sample_fn": Rule(
        note="produce.is_valid_sample = 'file.py:function'"
    ),
    "AsyncProduceStrategyConfig.should_continue_fn": Rule(
        note="produce.should_continue = 'file.py:function'"
    ),
    "SyncProduceStrategyConfig.is_valid_sample_fn": Rule(
        note="produce.is_valid_sample = 'file.py:function'"
    ),
    "SyncProduceStrategyConfig.should_continue_fn": Rule(
        note="produce.should_continue = 'file.py:function'"
    ),
    "TaskSpecConfig.produce_strategy_config": Rule(
        "produce.strategy",
        value=lambda name: "async" if "Async" in str(name) else "sync",
    ),
    "TaskSpecConfig.task_name": Rule(note="the task is named train here"),
    "TaskSpecConfig.weight": Rule(f"{TASK}.weight"),
    "TaskSpecConfig.judger_config": Rule(
        note=f"{TASK}.rewards: boxed, code or your own file.py:function"
    ),
    "JudgerConfig.judger_name": Rule(note="a label"),
    "JudgerConfig.request_timeout": Rule(note="an option of the reward, docs/rewards.md"),
    "JudgerConfig.cpu_resources": Rule(note="rewards run with their agent loop, in its actors"),
    "JudgerConfig.cpu_resources.num_workers": Rule(note="tasks.NAME.agent_actors"),
    "JudgerConfig.cpu_resources.num_cpus_per_worker": Rule(note="launch.agents.cpus"),
    "JudgerConfig.reward_handler": Rule(note="rewards = [{ type = 'file.py:function' }]"),
    "JudgerConfig.extra_info": Rule(note="options of the reward"),
    "AgentLoopConfig.cpu_resources.num_workers": Rule(f"{TASK}.agent_actors"),
    "AgentLoopConfig.cpu_resources.num_cpus_per_worker": Rule(note="launch.agents.cpus"),
    "AgentLoopConfig.hf_checkpoint": Rule(note="the run's own tokenizer"),
    "AgentLoopConfig.enable_batch_judge": Rule(
        note="a reward that compares a group says so itself"
    ),
    "eval:SampleParams.temperature": Rule("eval.temperature"),
    "eval:SampleParams.top_p": Rule("eval.top_p"),
    "eval:SampleParams.max_tokens": Rule(f"{EVAL}.sampling.max_tokens"),
    "eval:SampleParams.top_k": Rule(note="temperature 0 is greedy"),
    "eval:SampleParams.min_tokens": Rule(note="none in an evaluation"),
    "eval:SamplerConfig.prompt_repeat_k": Rule("eval.num_generations"),
    "eval:DatasetConfig.anno_path": Rule(f"{EVAL}.data"),
    "eval:RLTextTokenizeFnConfig.max_length": Rule(note="as in training"),
    "EvaluatorConfig.eval_sample_num": Rule("eval.max_problems", "0: all"),
    "EvaluatorConfig.eval_sample_ratio": Rule(note="eval.max_problems takes a number"),
    "EvaluatorConfig.compute_metric_func": Rule(
        note="mean reward, accuracy and pass@k, with intervals"
    ),
}
_OVERLONG = "the reward soft_overlong, or algorithm.overlong_penalty"
for _field in (
    "enable_overlong_buffer",
    "max_response_len",
    "overlong_buffer_len",
    "overlong_penalty_factor",
):
    XTUNER[f"JudgerConfig.{_field}"] = Rule(note=_OVERLONG)
for _field in ("score", "format_score", "eos_token", "tokenizer"):
    XTUNER[f"JudgerConfig.{_field}"] = Rule(note="options of the reward, docs/rewards.md")
for _field in (
    "skip_load_weights",
    "extra_rollout_config",
    "max_prefill_token_num",
    "fp32_lm_head",
):
    XTUNER[f"RolloutConfig.{_field}"] = Rule(note="engine.options, docs/engines.md")
for _resources in ("resources", "train_resources", "rollout_resources"):
    XTUNER |= {
        f"Trainer.{_resources}.accelerator": Rule(note="model.device"),
        f"Trainer.{_resources}.num_workers": _joined("launch.num_consumers, launch.num_producers"),
        f"Trainer.{_resources}.num_cpus_per_worker": Rule(
            note="launch.consumers.cpus, launch.producers.cpus, on Ray"
        ),
        f"Trainer.{_resources}.cpu_memory_per_worker": Rule(note="not reserved"),
    }
for _shards in ("ep_size", "cpu_offload", "reshard_after_forward", "hsdp_sharding_size"):
    XTUNER[f"FSDPConfig.{_shards}"] = NO_PARALLEL
_HOLDERS = (
    "Trainer.train_worker_cfg", "Trainer.rollout_config", "Trainer.agent_loop_manager_cfg",
    "Trainer.eval_agent_loop_manager_cfg", "Trainer.evaluator_config", "Trainer.resources",
    "Trainer.train_resources", "Trainer.rollout_resources", "WorkerConfig.optim_cfg",
    "WorkerConfig.loss_cfg", "WorkerConfig.lr_cfg", "AgentLoopManagerConfig.tasks",
    "TaskSpecConfig.agent_loop_config", "TaskSpecConfig.sampler_config",
    "SamplerConfig.dataloader_cfg", "AgentLoopConfig.sample_params", "AgentLoopConfig.cpu_resources",
    "DataloaderConfig.dataset_config_list.dataset",
    "DataloaderConfig.dataset_config_list.tokenize_fn", "GRPOLossConfig.rollout_is",
)  # fmt: skip
XTUNER |= dict.fromkeys(_HOLDERS, IN_ONE_PART)

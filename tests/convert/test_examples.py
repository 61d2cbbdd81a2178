"""An example of each system as its users write it: converted, then `penstock check`, changed in paths alone.

Only what this machine lacks is replaced: vLLM and further devices.
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from penstock import cli
from penstock.config import Config
from penstock.config.source import load_config
from penstock.convert.tables import DEFAULTS, WORDS, Rule
from penstock.convert.write import convert
from penstock.training.algo.method import check_algorithm

TRL = """
#!/bin/bash
export OUT=runs
accelerate launch --config_file zero2.yaml --num_processes 2 train_grpo.py \\
    --model_name_or_path demo --dataset_name data.jsonl --reward_funcs reward.py:right \\
    --per_device_train_batch_size 2 --gradient_accumulation_steps 2 --num_generations 2 \\
    --max_completion_length 8 --learning_rate 1e-5 --beta 0.01 --max_steps 2 --output_dir $OUT --bf16 false
"""
VERL = """
set -x
train_files=${TRAIN_FILES_OF_NOBODY:-"['data.jsonl']"}
answer=8
prompt=$((answer * (4 + 4)))
rollout="
    actor_rollout_ref.rollout.name=vllm
    actor_rollout_ref.rollout.n=2"
python3 -m verl.trainer.main_ppo \\
    algorithm.adv_estimator=grpo algorithm.use_kl_in_reward=False \\
    data.train_files="$train_files" data.val_files="$train_files" data.train_batch_size=8 \\
    data.max_prompt_length=$prompt data.max_response_length=${answer} data.filter_overlong_prompts=True \\
    data.truncation='error' actor_rollout_ref.model.path=demo \\
    actor_rollout_ref.model.use_remove_padding=True actor_rollout_ref.actor.optim.lr=1e-6 \\
    actor_rollout_ref.actor.ppo_mini_batch_size=4 actor_rollout_ref.actor.use_kl_loss=True \\
    actor_rollout_ref.actor.kl_loss_coef=0.001 actor_rollout_ref.actor.kl_loss_type=low_var_kl \\
    actor_rollout_ref.actor.entropy_coeff=0 actor_rollout_ref.rollout.tensor_model_parallel_size=2 \\
    $rollout actor_rollout_ref.rollout.top_p=0.9 actor_rollout_ref.actor.ulysses_sequence_parallel_size=2 \\
    actor_rollout_ref.actor.fsdp_config.param_offload=False actor_rollout_ref.ref.fsdp_config.fsdp_size=-1 \\
    actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=2 critic.optim.betas=[0.9,0.99] \\
    reward_model.reward_kwargs.overlong_buffer_cfg.enable=True trainer.device=${DEVICE_OF_NOBODY} \\
    reward_model.reward_kwargs.overlong_buffer_cfg.len=$((answer / 3)) \\
    custom_reward_function.path=reward.py trainer.logger='["console"]' trainer.n_gpus_per_node=8 \\
    trainer.nnodes=1 trainer.save_freq=20 trainer.test_freq=5 trainer.total_epochs=15 $@
"""
OPENRLHF = """
#!/bin/bash
SCRIPT_DIR="$(dirname "$0")"
SAVE_PATH="${SCRIPT_DIR}/exp"
CKPT_ARGS=(
   --actor.model_name_or_path demo
   # --reward.model_name_or_path another
   --ckpt.output_dir ${SAVE_PATH}
   --ckpt.path "${SAVE_PATH}/ckpt"
   --ckpt.save_steps 10
)
ROLLOUT_ARGS=(
   --data.prompt_dataset data.jsonl
   --data.input_key question
   --data.label_key gt_answer
   --rollout.max_new_tokens 8
   --rollout.batch_size 8
   --rollout.n_samples_per_prompt 2
   --train.batch_size 8
   --algo.dynamic_filtering_enable
   --algo.dynamic_filtering_range 0.0 1.0
)
OPTIMIZER_ARGS=(
   --algo.advantage.estimator reinforce_baseline
   --actor.adam.lr 5e-7
   --actor.adam.betas 0.9 0.98
   --algo.kl.init_coef 1e-5
   --algo.kl.use_loss
   --algo.kl.estimator k2
   --algo.advantage.is_correction_enable
   --algo.advantage.is_correction_type icepop
)
ray job submit --address="http://127.0.0.1:8265" \\
   -- python3 -m openrlhf.cli.train_ppo_ray \\
   --vllm.num_engines 2 --vllm.tensor_parallel_size 2 --actor.num_gpus_per_node 4 --ds.zero_stage 3 \\
   ${CKPT_ARGS[@]} ${ROLLOUT_ARGS[@]} ${OPTIMIZER_ARGS[@]}
"""
COLOSSALAI = """
python rl_example.py --dataset data.jsonl --model demo -t 4 -i 4 -b vllm -ibs 8 -tbs 2 -tMbs 2 -tmbs 2 \\
    -g 2 -mnt 8 -mpt 64 -rt boxed -a GRPO -e 2 -ei 5 -ed '{"heldout": "data.jsonl"}' -p GRPO-example
"""
XTUNER = """
import os
from pathlib import Path

model_path = os.environ["MODEL_PATH"]
NODES = int(os.environ.get("NODES_OF_NOBODY", "1"))
batch = int(os.environ.get("BATCH_OF_NOBODY", 8 * NODES))
resources = AcceleratorResourcesConfig(accelerator="GPU", num_workers=8 * NODES, cpu_memory_per_worker=16 * 1024**3)
rollout_config = RolloutConfig(
    env="gsm8k", device=resources.accelerator, model_path=model_path, tensor_parallel_size=2,
    gpu_memory_utilization=0.8, context_length=64 + 8,
)
model_cfg = get_model_config_from_hf(Path(model_path))
if hasattr(model_cfg, "z_loss_cfg"):
    model_cfg.z_loss_cfg = None
worker = WorkerConfig(
    model_cfg=model_cfg, load_from=model_path, optim_cfg=AdamWConfig(lr=1e-6, foreach=False, weight_decay=0.1),
    loss_cfg=GRPOLossConfig(policy_loss_cfg=dict(
        cliprange_high=0.28, cliprange_low=0.2, loss_type=os.environ.get("LOSS_OF_NOBODY", "vanilla"))),
    lr_cfg=LRConfig(lr_type="constant", warmup_ratio=0, lr_min=1e-6),
    fsdp_cfg=FSDPConfig(torch_compile=False), optimizer_steps=2, pack_max_length=1024,
)

def tasks_of(name):
    return name

def no_use():
    pass

data = DataloaderConfig(dataset_config_list=[
    {"dataset": DatasetConfig(name="g", anno_path="data.jsonl"), "tokenize_fn": RLTextTokenizeFnConfig(max_length=64)}])
loop = SingleTurnAgentLoopConfig(
    hf_checkpoint=model_path, sample_params=SampleParams(max_tokens=8, top_k=0, top_p=1.0, temperature=1.0))
sampler = SamplerConfig(dataloader_cfg=data, prompt_repeat_k=2)
strategy = AsyncProduceStrategyConfig(
    over_sample_threshold=0.8, enable_partial_rollout=os.environ.get("PARTIAL_OF_NOBODY", "1") == "1",
    max_staleness=1, tail_batch_trigger_size=4)
judger = GSM8KJudgerConfig(judger_name="openai/gsm8k")
trainer = RLColocateTrainerConfig(
    resources=resources, train_worker_cfg=worker, rollout_config=rollout_config, tokenizer_path=model_path,
    replay_buffer_config=AsyncReplayBufferConfig(), load_from=model_path, total_train_steps=4,
    agent_loop_manager_cfg=AgentLoopManagerConfig(tasks=[
        TaskSpecConfig(task_name="a", weight=2.0, agent_loop_config=loop, judger_config=judger,
                       produce_strategy_config=strategy, sampler_config=sampler),
        TaskSpecConfig(task_name="b", weight=1.0, agent_loop_config=loop, judger_config=judger,
                       produce_strategy_config=strategy, sampler_config=sampler)]),
    eval_agent_loop_manager_cfg=AgentLoopManagerConfig(tasks=[
        TaskSpecConfig(task_name="c", weight=1.0, agent_loop_config=loop, judger_config=judger, sampler_config=sampler),
        TaskSpecConfig(task_name="d", weight=1.0, agent_loop_config=loop, judger_config=judger, sampler_config=sampler)]),
    evaluator_config=EvaluatorConfig(compute_metric_func=None), evaluate_step=4, train_batch_size=batch,
    advantage_estimator_config=GRPOAdvantageConfig(eps=1e-8), work_dir="runs", seed=123,
)
"""
EXAMPLES = {
    "trl": TRL,
    "verl": VERL,
    "openrlhf": OPENRLHF,
    "colossalai": COLOSSALAI,
    "xtuner": XTUNER,
}
REWARD = """
def right(completions, gt_answer, **kwargs):
    return [float(len(text) % 2) for text in completions]

def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    return float(len(solution_str) % 2)
"""
MACHINE = ["engine={name='transformers'}", "model.device=cpu", "launch={kind='inline'}"]
MACHINE += ["train.parallel={}"]


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MODEL_PATH", "demo")
    lines = [
        json.dumps({"question": f"{n}+1", "prompt": f"{n}+1", "gt_answer": f"{n + 1}"})
        for n in range(12)
    ]
    Path("data.jsonl").write_text("\n".join(lines))
    Path("reward.py").write_text(REWARD)
    return tmp_path


def converted(system: str, text: str = "", *words: str) -> tuple[Config, str]:
    file = Path(f"{system}.py" if system == "xtuner" else f"{system}.sh")
    file.write_text(text or EXAMPLES[system])
    toml = Path(f"{system}.toml")
    toml.write_text(convert(system, file))
    return load_config(toml, list(words)).config, toml.read_text()


@pytest.mark.parametrize("system", EXAMPLES)
def test_a_converted_example_passes_the_check(system: str) -> None:
    file = Path(f"{system}.py" if system == "xtuner" else f"{system}.sh")
    file.write_text(EXAMPLES[system])
    done = CliRunner().invoke(cli.app, ["convert", system, str(file)])
    assert done.exit_code == 0, done.output
    unknown = Path(f"{system}.toml").read_text().count("not known to this conversion")
    assert unknown == (system == "verl")  # trainer.device
    done = CliRunner().invoke(cli.app, ["check", f"{system}.toml", "--trust", *MACHINE])
    assert done.exit_code == 0, (done.output, done.exception)


def test_words_of_openrlhf_may_have_dots() -> None:
    config, text = converted("openrlhf")
    assert (config.algorithm.name, config.algorithm.kl_in) == ("reinforce_pp_baseline", "loss")
    assert (config.algorithm.filter_groups, config.algorithm.filter_range) == (True, (0.0, 1.0))
    correction = config.algorithm.correction
    assert (correction.kind, correction.floor, correction.cap) == ("token_mask", 0.5, 5.0)
    assert correction.newest == "engine"  # the trainer's own log-probs would weigh every token 1
    assert (config.train.betas, config.train.mini_batches) == ((0.9, 0.98), 2)
    assert config.launch.num_consumers == 4
    assert (
        "ckpt_path = ${SCRIPT_DIR}/exp/ckpt: code, or a variable that is not set; set run.dir"
        in text
    )


def test_a_flag_without_words_leaves_the_defaults_of_openrlhf() -> None:
    config, text = converted(
        "openrlhf", "python -m openrlhf.cli.train_ppo_ray --actor.adam.lr 1e-6"
    )
    assert (config.algorithm.name, config.train.critic_lr) == ("ppo", 9e-6)
    assert (config.train.groups_per_step, config.train.mini_batches) == (1024, 64)  # 8192 / 128
    assert (config.sampling.max_tokens, config.seed, config.checkpoint.keep) == (2048, 42, 3)
    assert (config.train.parallel.zero, config.eval.at_start) == (2, False)
    assert "the group is compared" not in text  # each token pays its KL, as there


def test_the_value_model_of_openrlhf_and_verl() -> None:
    words = "--algo.advantage.estimator gae --algo.advantage.lambd 0.95 --critic.value_clip 0.2"
    config, _ = converted("openrlhf", f"python -m openrlhf.cli.train_ppo_ray {words}")
    algorithm = config.algorithm
    assert (algorithm.name, algorithm.gae_lambda, algorithm.value_clip) == ("ppo", 0.95, 0.2)
    words = (
        "algorithm.adv_estimator=gae algorithm.lam=0.9 critic.optim.lr=2e-5 trainer.critic_warmup=3"
    )
    config, _ = of_verl(words)
    assert (config.algorithm.name, config.algorithm.gae_lambda) == ("ppo", 0.9)
    assert (config.train.critic_lr, config.train.critic_warmup_steps) == (2e-5, 3)
    check_algorithm(config)
    config, _ = of_verl("algorithm.adv_estimator=grpo algorithm.lam=0.9 trainer.critic_warmup=0")
    assert (config.algorithm.name, config.algorithm.gae_lambda) == ("grpo", None)


def test_kl_in_the_reward_of_a_group_is_not_that_of_openrlhf() -> None:
    words = "--advantage_estimator group_norm"
    text = converted("openrlhf", f"python -m openrlhf.cli.train_ppo_ray {words}")[1]
    assert "there each token pays it after the group is compared" in text


def test_openrlhf_overlaps_as_far_as_its_queue_is_long() -> None:
    words = "--train.async_enable --train.async_queue_size 2 --actor.policy_loss_type gspo"
    config, _ = converted("openrlhf", f"python -m openrlhf.cli.train_ppo_ray {words}")
    assert (config.produce.strategy, config.produce.max_staleness) == ("async", 2)
    algorithm = config.algorithm
    assert (algorithm.name, algorithm.clip_low, algorithm.aggregation) == ("gspo", 0.2, "sequence")


def test_the_engine_correction_of_openrlhf_belongs_to_its_loss() -> None:
    words = "--advantage_estimator group_norm --algo.advantage.is_correction_enable "
    command = f"python -m openrlhf.cli.train_ppo_ray {words}"
    correction = converted("openrlhf", f"{command} --policy_loss_type gspo")[0].algorithm.correction
    assert (correction.kind, correction.newest) == ("none", "engine")
    kind = "--algo.advantage.is_correction_type seq-mask-tis"
    config, text = converted("openrlhf", f"{command} {kind}")
    assert config.algorithm.correction.kind == "token_truncate"
    assert "is_correction_type = seq-mask-tis: it masks responses too" in text


def of_verl(words: str) -> tuple[Config, str]:
    return converted("verl", f"python -m verl.trainer.main_ppo {words}")


def test_what_the_shell_of_a_verl_script_computes() -> None:
    config, text = converted("verl")
    task = config.tasks["train"]
    assert (task.data, task.max_prompt_tokens, config.sampling.max_tokens) == ("data.jsonl", 64, 8)
    assert (config.algorithm.overlong_window, config.algorithm.overlong_penalty) == (2, 1.0)
    launch = config.launch
    assert (launch.colocate, launch.num_consumers, launch.num_producers) == (True, 8, 4)
    assert config.train.parallel.context == 2
    assert "trainer.device = ${DEVICE_OF_NOBODY}: not known" in text
    doubled = "A=aaaaaaaaaa\n" + "A=$A$A\n" * 60  # takes neither memory nor time
    assert converted("verl", f"{doubled}python -m verl.trainer.main_ppo data.seed=3")[0].seed == 3


def test_engines_and_ranks_of_verl() -> None:
    words = "trainer.n_gpus_per_node=8 actor_rollout_ref.rollout.name=sglang"
    assert of_verl(words)[0].engine.name == "vllm"
    actor = "actor_rollout_ref.actor.megatron"
    words = "tensor_model_parallel_size pipeline_model_parallel_size context_parallel_size"
    config, text = of_verl(" ".join(f"{actor}.{word}=2" for word in words.split()))
    assert (config.train.parallel.copies, config.launch.num_consumers) == (4, 4)
    assert "context_parallel_size = 2: not with pipeline ranks here" in text


def test_the_clip_ratio_of_verl_is_that_of_its_two_bounds() -> None:
    actor = "actor_rollout_ref.actor"
    assert of_verl(f"{actor}.clip_ratio=0.3")[0].algorithm.clip_low is None  # 0.2, as there
    words = f"{actor}.clip_ratio_low=0.1 {actor}.clip_ratio_high=0.3"
    algorithm = of_verl(words)[0].algorithm
    assert (algorithm.clip_low, algorithm.clip_high) == (0.1, 0.3)


def test_the_weight_of_the_kl_term_of_verl_is_that_of_its_place() -> None:
    actor = "actor_rollout_ref.actor"
    both = (
        f"{actor}.kl_loss_coef=0.5 algorithm.kl_ctrl.kl_coef=0.25 algorithm.kl_penalty=low_var_kl"
    )
    in_loss = of_verl(f"{both} {actor}.use_kl_loss=True")[0].algorithm
    assert (in_loss.kl_beta, in_loss.kl_in) == (0.5, "loss")
    in_reward = of_verl(f"{both} algorithm.use_kl_in_reward=True")[0].algorithm
    assert (in_reward.kl_beta, in_reward.kl_in, in_reward.kl_estimator) == (0.25, "reward", "k3")
    assert of_verl(both)[0].algorithm.kl_beta == 0


def test_an_entropy_bonus_stays_one() -> None:
    word = "actor_rollout_ref.actor.entropy_coeff"
    assert of_verl(f"{word}=0.01")[0].algorithm.entropy_beta == 0.01
    assert of_verl(f"{word}=0")[0].algorithm.entropy_beta is None
    command = "python -m openrlhf.cli.train_ppo_ray --actor.entropy_coef 0.02"
    assert converted("openrlhf", command)[0].algorithm.entropy_beta == 0.02


def test_schedule_and_losses_of_verl() -> None:
    optimizer, actor = "actor_rollout_ref.actor.optim", "actor_rollout_ref.actor"
    words = f"{optimizer}.lr_scheduler_type=cosine {optimizer}.lr_warmup_steps_ratio=0.1"
    config, _ = of_verl(
        f"{words} trainer.total_training_steps=50 {actor}.policy_loss.loss_mode=gspo"
    )
    train = config.train
    assert (train.schedule, train.min_lr_ratio, train.warmup_steps) == ("cosine", 0.0, 5)
    assert (config.algorithm.name, config.algorithm.clip_high) == ("gspo", 0.2)
    assert config.tasks["train"].max_prompt_tokens == 512
    correction = of_verl("algorithm.rollout_correction.rollout_is=sequence")[0].algorithm.correction
    assert (correction.kind, correction.cap) == ("sequence_truncate", 2.0)
    assert correction.newest == "engine"


def test_of_several_files_of_verl_the_first_is_the_task() -> None:
    files = "\"['a.parquet', 'b.parquet']\""
    config, text = of_verl(f"data.train_files={files} data.val_files=$HOME/c.parquet")
    assert config.tasks["train"].data == "a.parquet"
    assert config.eval.tasks["heldout"].data == str(Path.home() / "c.parquet")
    assert "data.train_files: b.parquet: a task of its own, tasks.NAME.data" in text


def test_evaluations_of_xtuner_have_no_weight() -> None:
    config, text = converted("xtuner")
    assert set(config.eval.tasks) == {"heldout", "d"}
    assert config.produce.enable_partial_rollout  # a comparison of an environment variable
    assert "code, or a variable" not in text


def test_advantages_of_xtuner_that_are_no_method_here_are_told() -> None:
    text = converted(
        "xtuner", XTUNER.replace("GRPOAdvantageConfig(eps", "DrGRPOAdvantageConfig(eps")
    )[1]
    assert 'name = "grpo"  # Trainer.advantage_estimator_config = DrGRPOAdvantageConfig' in text
    assert "DrGRPO, OPO and pass@k advantages: write your own algorithm" in text


def test_defaults_of_trl_are_those_of_its_config() -> None:
    trl = pytest.importorskip("trl")
    theirs = {field.name: field.default for field in dataclasses.fields(trl.GRPOConfig)}
    rules: dict[str, Rule] = WORDS["trl"]
    ours: dict[str, Any] = {key: value for key, value, _ in DEFAULTS["trl"]}
    words = {
        rule.key: word for word, rule in rules.items() if word in theirs and not rule.is_joined
    }
    compared = [key for key in ours if key in words and theirs[words[key]] is not None]
    assert {"sampling.max_tokens", "train.lr", "seed", "train.episodes"} <= set(compared)
    for key in compared:
        assert rules[words[key]].value(theirs[words[key]]) == ours[key], key

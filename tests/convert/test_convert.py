"""`penstock convert`: command lines and config files of other systems become configs that load and train."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from penstock import cli
from penstock.config import Config
from penstock.config.source import load_config
from penstock.convert import write
from penstock.convert.tables import DEFAULTS, WORDS
from penstock.errors import UserError
from stages.tiny_policy import save_policy

TRL = """
accelerate launch --num_processes 2 train.py --model_name_or_path POLICY --dataset_name DATA \\
    --per_device_train_batch_size 2 --gradient_accumulation_steps 2 --num_generations 2 \\
    --max_completion_length 8 --loss_type grpo --beta 0.04 --scale_rewards batch --max_steps 1 \\
    --learning_rate 1e-5 --warmup_ratio 0.1 --reward_funcs REWARD --logging_steps 1 --new_word 3
"""
VERL = """
set -x
MODEL=POLICY
python3 -m verl.trainer.main_ppo \\
    algorithm.adv_estimator=grpo data.train_files=DATA data.val_files=DATA \\
    data.train_batch_size=4 data.max_prompt_length=64 data.max_response_length=8 \\
    actor_rollout_ref.model.path=$MODEL actor_rollout_ref.actor.optim.lr=1e-5 \\
    actor_rollout_ref.actor.ppo_mini_batch_size=2 actor_rollout_ref.actor.use_kl_loss=True \\
    actor_rollout_ref.actor.kl_loss_coef=0.001 actor_rollout_ref.actor.kl_loss_type=low_var_kl \\
    actor_rollout_ref.rollout.n=2 +actor_rollout_ref.rollout.temperature=0.9 \\
    custom_reward_function.path=FOLDER/reward.py custom_reward_function.name=compute_score \\
    trainer.total_training_steps=1 trainer.logger='["console","wandb"]' $@
"""
OPENRLHF = """
ray job submit --address="http://127.0.0.1:8265" -- python3 -m openrlhf.cli.train_ppo_ray \\
    --pretrain POLICY --prompt_data DATA --input_key question --label_key gt_answer \\
    --rollout_batch_size 4 --train_batch_size 4 --n_samples_per_prompt 2 --generate_max_len 8 \\
    --advantage_estimator group_norm --use_kl_loss --init_kl_coef 1e-3 --eps_clip_low_high 0.2 0.28 \\
    --actor_learning_rate 5e-7 --zero_stage 3 --use_wandb my-own-key
"""
COLOSSALAI = """
python rl_example.py -m POLICY -d DATA -t 1 -i 1 -b transformers -a DAPO -tbs 2 -g 2 -rt boxed \\
    -mnt 8 -mpt 64 -nb 1 -s 'Think first.' --enable_profiling
"""
XTUNER = """
import os
from xtuner.v1.train.rl_trainer import RLColocateTrainerConfig  # is never imported

model_path = os.environ["START_MODEL"]
work_dir = os.environ.get("WORK_DIR", "runs")
repeat, nodes = 2, 1
batch = 2 * int(os.environ.get("WORLD_SIZE_OF_NOBODY", "1"))
length = 4 * 2
if nodes > 1:
    length = 1 << 20
loss_cfg = GRPOLossConfig(
    policy_loss_cfg=dict(cliprange_low=0.2, cliprange_high=0.28, clip_ratio_c=10.0),
    use_kl_loss=False, kl_loss_coef=0.001,
    rollout_is=RolloutImportanceSampling(rollout_is_level="token", rollout_is_threshold=(0, 3.0)),
)
tokenize = RLTextTokenizeFnConfig(max_length=512)
dataloader = DataloaderConfig(
    dataset_config_list=[{"dataset": DatasetConfig(name="n", anno_path="DATA"), "tokenize_fn": tokenize}],
    collator="fake_collator",
)
loop = SingleTurnAgentLoopConfig(
    hf_checkpoint=model_path, sample_params=SampleParams(max_tokens=8, temperature=0.9, top_k=0),
)
strategy = AsyncProduceStrategyConfig(
    over_sample_threshold=0.5, enable_partial_rollout=True, max_staleness=1,
    tail_batch_trigger_size=-1, is_valid_sample_fn=lambda samples: True,
)
trainer = RLColocateTrainerConfig(
    resources=AcceleratorResourcesConfig(num_workers=1),
    train_worker_cfg=WorkerConfig(
        load_from=model_path, optim_cfg=AdamWConfig(lr=1e-6 * 10, betas=(0.9, 0.99)),
        loss_cfg=loss_cfg, lr_cfg=LRConfig(lr_type="cosine", lr_min=1e-6), pack_max_length=length * 16,
    ),
    rollout_config=RolloutConfig(model_path=model_path, dtype="float32", api_key=os.environ["HOME"]),
    agent_loop_manager_cfg=AgentLoopManagerConfig(
        tasks=TaskSpecConfig(
            task_name="t", agent_loop_config=loop, judger_config=GSM8KJudgerConfig(),
            produce_strategy_config=strategy,
            sampler_config=SamplerConfig(dataloader_cfg=dataloader, prompt_repeat_k=2),
        ),
    ),
    load_from=model_path, total_train_steps=1, train_batch_size=batch,
    advantage_estimator_config=RLOOAdvantageConfig(), work_dir=work_dir, new_word=3, evaluate_step=5,
)
"""
COMMANDS = {
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
SMALL = [
    "launch.kind=inline",
    "launch.num_producers=1",
    "launch.num_consumers=1",
    "engine={name='transformers',max_slots=8}",
    "eval.max_problems=2",
    "track.trackers=[]",
    "run.name=tried",
    "algorithm.filter_groups=false",
]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    row = {"prompt": "1+1", "question": "1+1", "gt_answer": "2"}
    lines = [json.dumps({**row, "n": number}) for number in range(8)]
    Path("data.jsonl").write_text("\n".join(lines))
    Path("reward.py").write_text(REWARD)
    for system, command in COMMANDS.items():
        text = command.replace("POLICY", str(tmp_path / "policy")).replace("DATA", "data.jsonl")
        text = text.replace("FOLDER", str(tmp_path)).replace("REWARD", "reward.py:right")
        Path(file_of(system)).write_text(text)
    monkeypatch.setenv("START_MODEL", str(tmp_path / "policy"))
    return tmp_path


def file_of(system: str) -> str:
    return f"{system}.py" if system == "xtuner" else f"{system}.sh"


def convert(system: str, file: str, *words: str) -> tuple[int, str]:
    done = CliRunner().invoke(cli.app, ["convert", system, file, *words])
    return done.exit_code, done.output


def converted(system: str) -> tuple[Config, str]:
    code, output = convert(system, file_of(system))
    assert code == 0, output
    path = Path(f"{system}.toml")
    return load_config(str(path), []).config, path.read_text()


@pytest.mark.parametrize(
    "system",
    [
        pytest.param(system, marks=[] if system in ("trl", "xtuner") else [pytest.mark.slow])
        for system in COMMANDS
    ],
)
def test_a_converted_command_trains(system: str, folder: Path) -> None:
    save_policy(folder / "policy")
    converted(system)
    overrides = [word for word in SMALL if system == "openrlhf" or "engine" not in word]
    words = ["train", f"{system}.toml", "--trust", *overrides]
    if system in ("verl", "colossalai"):
        words.append("engine.name=transformers")
    if system == "xtuner":
        words += ["launch.colocate=false", "tasks.train.rewards=[{type='reward.py:right'}]"]
    done = CliRunner().invoke(cli.app, words)
    assert done.exit_code == 0, done.output
    lines = Path("runs/tried/metrics.jsonl").read_text().splitlines()
    steps = [json.loads(line)["step"] for line in lines if "reward/mean" in line]
    assert steps == list(range(1, {"openrlhf": 2, "colossalai": 4}.get(system, 1) + 1))


@pytest.mark.usefixtures("folder")
def test_trl() -> None:
    config, text = converted("trl")
    assert config.train.groups_per_step == 4  # 2 processes x 2 x 2 responses / 2
    assert config.sampling.num_generations == 2
    assert (config.algorithm.kl_beta, config.algorithm.aggregation) == (0.04, "sequence")
    assert config.algorithm.normalize == "batch_rewards"
    assert config.train.betas == (0.9, 0.999)  # TRL's default is written down
    assert config.produce.max_staleness == 0
    assert "lr = 1e-05  # learning_rate\n" in text
    assert "#   new_word = 3: not known to this conversion" in text


@pytest.mark.usefixtures("folder")
def test_verl() -> None:
    config, text = converted("verl")
    assert (config.train.groups_per_step, config.train.mini_batches) == (4, 2)
    assert (config.algorithm.kl_beta, config.algorithm.kl_estimator) == (0.001, "k3")
    assert config.sampling.temperature == 0.9
    assert config.train.steps == 1
    assert config.train.episodes is None
    assert config.track.trackers == ["console", "wandb"]
    assert config.eval.tasks["heldout"].rewards == config.tasks["train"].rewards
    assert 'kl_estimator = "k3"  # actor_rollout_ref.actor.kl_loss_type = low_var_kl\n' in text


@pytest.mark.usefixtures("folder")
def test_openrlhf() -> None:
    config, text = converted("openrlhf")
    assert config.train.mini_batches == 2  # 4 prompts x 2 responses / 4
    assert (config.algorithm.clip_low, config.algorithm.clip_high) == (0.2, 0.28)
    assert config.tasks["train"].columns == {"prompt": "question", "gt_answer": "gt_answer"}
    assert config.engine.name == "vllm"
    assert "my-own-key" not in text


@pytest.mark.usefixtures("folder")
def test_colossalai() -> None:
    config, text = converted("colossalai")
    assert config.algorithm.name == "dapo"
    assert config.algorithm.kl_beta == 0
    assert config.tasks["train"].system_prompt == "Think first."
    assert (config.train.schedule, config.produce.max_staleness) == ("cosine", 1)
    assert config.algorithm.filter_range == (0.01, 0.99)
    assert config.tasks["train"].rewards[0].weight == 10
    assert config.sync.every_steps == 32  # 64 prompts of one producer, 2 an update
    assert "a right answer is 1 here, 10 there" in text


def of_colossalai(words: str) -> tuple[Config, str]:
    Path("colossalai.sh").write_text(f"python rl_example.py {words}")
    return converted("colossalai")


@pytest.mark.usefixtures("folder")
def test_colossalai_without_words_says_its_defaults() -> None:
    config, text = of_colossalai("-b vllm")
    assert (config.launch.num_consumers, config.launch.num_producers) == (2, 2)
    assert (config.train.groups_per_step, config.sync.every_steps) == (64, 2)
    assert (config.algorithm.aggregation, config.algorithm.dual_clip) == ("sequence", 0)
    assert (config.train.weight_decay, config.train.betas) == (0.01, (0.9, 0.999))
    assert (config.sampling.anneal.end, config.sampling.anneal.episodes) == (0.9, 1.0)
    assert config.sampling.stop == ["</answer>"]
    assert "<answer>" in config.tasks["train"].system_prompt
    assert (config.sampling.top_k, config.eval.at_start) == (0, False)
    assert "Without a counterpart" not in text


@pytest.mark.usefixtures("folder")
def test_the_zero_bubble_example_of_colossalai_overlaps() -> None:
    Path("colossalai.sh").write_text("python rl_example_zero_bubble.py -a DAPO -b vllm -zero 2")
    config, _ = converted("colossalai")
    assert (config.produce.max_staleness, config.eval.every_steps) == (1, 100)
    assert config.algorithm.filter_range == (0.01, 0.7)


@pytest.mark.usefixtures("folder")
def test_every_evaluation_set_of_colossalai_is_a_task() -> None:
    sets = """'{"math": "data.jsonl", "a.b c": "data.jsonl"}'"""
    config, _ = of_colossalai(f"-ed {sets} -s 'Be brief.' -ei 10 -rt boxed -mpt 64")
    assert set(config.eval.tasks) == {"math", "a-b-c"}
    for task in config.eval.tasks.values():
        assert (task.data, task.system_prompt) == ("data.jsonl", "Be brief.")
        assert (task.rewards[0].type, task.max_prompt_tokens) == ("boxed", 64)
    assert (config.eval.every_steps, config.eval.at_start) == (10, True)
    assert config.sampling.stop == []
    assert list(of_colossalai_again("-ed data.jsonl").eval.tasks) == ["heldout"]


def of_colossalai_again(words: str) -> Config:
    Path("colossalai.toml").unlink()
    return of_colossalai(words)[0]


@pytest.mark.usefixtures("folder")
def test_words_of_colossalai_with_more_than_one_meaning() -> None:
    config, text = of_colossalai(
        "-m base --checkpoint-path saved --ray_dir /tmp/ray -b transformers -ptp 1 -topk -1 -t 4 -tp 2 -i 3"
        " -tbs 8 -ibs 16 -rt code --code-verifier-api-url http://judge:8000"
    )
    assert (config.model.path, config.model.tokenizer) == ("saved", "base")
    assert (config.engine.name, config.engine.options) == ("transformers", {})
    assert config.sampling.top_k == 0
    assert (config.train.groups_per_step, config.sync.every_steps) == (16, 3)  # 2 ranks of data
    assert (config.launch.num_consumers, config.launch.num_producers) == (4, 3)
    assert config.tasks["train"].rewards[0].options == {"servers": ["http://judge:8000"]}
    assert "not known" not in text
    config = of_colossalai_again("-m base --tokenizer-path other -b async-vllm -ptp 2")
    assert (config.model.path, config.model.tokenizer) == ("base", "other")
    assert (config.engine.name, config.engine.options) == ("vllm", {"tensor_parallel_size": 2})


def test_xtuner(folder: Path) -> None:
    config, text = converted("xtuner")
    assert config.model.path == str(folder / "policy")  # an environment variable
    assert config.train.groups_per_step == 2  # the default of one that is not set
    assert (config.algorithm.baseline, config.algorithm.aggregation) == ("leave_one_out", "token")
    assert (config.algorithm.clip_high, config.algorithm.dual_clip) == (0.28, 10.0)
    correction = config.algorithm.correction
    assert (correction.kind, correction.cap) == ("token_truncate", 3.0)
    assert config.algorithm.kl_beta == 0
    assert config.train.betas == (0.9, 0.99)
    assert config.train.lr == pytest.approx(1e-5)
    assert config.train.min_lr_ratio == pytest.approx(0.1)
    assert (config.produce.strategy, config.produce.max_staleness) == ("async", 1)
    assert config.produce.tail_batch_trigger_size == 0
    assert config.sync.on_update == "abort"  # what it does at a weight update is written down
    assert (config.eval.every_steps, config.eval.at_start) == (5, False)
    assert config.launch.colocate
    assert "pack_max_length = length * 16: code, or a variable that is not set" in text
    assert "is_valid_sample_fn = lambda samples: True: produce.is_valid_sample" in text
    assert "api_key = ...: a key belongs in an environment variable" in text
    assert "Trainer.new_word = 3: not known" in text


SECOND = """
longer = SingleTurnAgentLoopConfig(sample_params=SampleParams(max_tokens=16, temperature=0.9))
other = TaskSpecConfig(
    task_name="code.second", agent_loop_config=longer, produce_strategy_config=strategy, weight=2.0,
    sampler_config=SamplerConfig(dataloader_cfg=dataloader, prompt_repeat_k=4),
)
trainer ="""


def test_a_second_task_of_xtuner_is_a_second_task(folder: Path) -> None:
    text = (folder / "xtuner.py").read_text().replace("trainer =", SECOND, 1)
    text = text.replace("tasks=TaskSpecConfig(", "tasks=[TaskSpecConfig(")
    text = text.replace(
        "prompt_repeat_k=2),\n        ),", "prompt_repeat_k=2),\n        ), other],"
    )
    (folder / "xtuner.py").write_text(text)
    config, text = converted("xtuner")
    assert set(config.tasks) == {"train", "code-second"}
    second = config.tasks["code-second"]
    assert (second.data, second.weight, second.max_prompt_tokens) == ("data.jsonl", 2.0, 512)
    sampling = config.task_sampling("code-second")
    assert (sampling.max_tokens, sampling.num_generations) == (16, 4)
    assert config.task_sampling("train").max_tokens == 8
    assert config.task_produce("code-second").max_staleness == 1
    assert "not known to this conversion" not in text.replace("Trainer.new_word = 3: not known", "")


def test_a_strategy_alone_is_told_what_it_needs(folder: Path) -> None:
    (folder / "alone.py").write_text("strategy = AsyncProduceStrategyConfig(max_staleness=1)\n")
    with pytest.raises(UserError) as refused:
        write.convert("xtuner", folder / "alone.py")
    assert "that holds AsyncProduceStrategyConfig; add it" in str(refused.value)


def test_the_ranks_of_xtuner_that_share_a_layer_share_it_here(folder: Path) -> None:
    text = (folder / "xtuner.py").read_text()
    text = text.replace("num_workers=1", "num_workers=4").replace("2 * int(", "4 * int(")
    text = text.replace("loss_cfg=loss_cfg,", "loss_cfg=loss_cfg, fsdp_cfg=FSDPConfig(tp_size=2),")
    (folder / "xtuner.py").write_text(text)
    config, text = converted("xtuner")
    assert (config.launch.num_consumers, config.train.parallel.tensor) == (4, 2)
    assert "tensor = 2  # FSDPConfig.tp_size" in text


@pytest.mark.parametrize(
    "line",
    ["open('made', 'w')", "__import__('os').mkdir('made')", "[open('made', 'w') for _ in [1]]"],
)
def test_a_python_config_is_not_executed(line: str, folder: Path) -> None:
    text = (folder / "xtuner.py").read_text()
    (folder / "xtuner.py").write_text(
        text.replace("model_path = os", f"x = {line}\nmodel_path = os")
    )
    converted("xtuner")
    assert not (folder / "made").exists()


def test_the_text_of_a_variable_is_not_shown(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HUB_TOKEN", "hf_secret")
    text = (folder / "xtuner.py").read_text()
    words = """header=f"Bearer {os.environ['HUB_TOKEN']}", more="Bearer " + os.environ["HUB_TOKEN"],
    seed=os.environ["HUB_TOKEN"], checkpoint_interval=os.environ["HUB_TOKEN"], new_word=3"""
    (folder / "xtuner.py").write_text(text.replace("new_word=3", words))
    shown = write.convert("xtuner", folder / "xtuner.py").splitlines()
    assert [line for line in shown if "hf_secret" in line] == ['seed = "hf_secret"  # Trainer.seed']


@pytest.mark.parametrize("line", ["'x' * 1000000000000", "'%999999999999d' % 1", "2 ** 'x'"])
def test_a_config_computes_no_endless_text(line: str, folder: Path) -> None:
    text = (folder / "xtuner.py").read_text()
    (folder / "xtuner.py").write_text(text.replace("new_word=3", f"new_word={line}"))
    assert f"Trainer.new_word = {line}: not known" in converted("xtuner")[1]


@pytest.mark.usefixtures("folder")
def test_a_config_file_is_read_like_a_command() -> None:
    Path("grpo.yaml").write_text("learning_rate: 1.0e-6\nreport_to: [wandb]\nnum_generations: 16\n")
    assert convert("trl", "grpo.yaml")[0] == 0
    config = load_config("grpo.toml", []).config
    assert (config.train.lr, config.sampling.num_generations) == (1e-6, 16)
    assert "SAY HERE" in Path("grpo.toml").read_text()


@pytest.mark.usefixtures("folder")
@pytest.mark.parametrize(
    ("words", "said"),
    [
        (
            ["nemo", "trl.sh"],
            "convert: got 'nemo', allowed: trl, verl, openrlhf, colossalai, xtuner",
        ),
        (
            ["trl", "none.sh"],
            "convert: got 'none.sh', allowed: a text file that can be read (No such file",
        ),
        (
            ["xtuner", "reward.py"],
            "convert: got reward.py without a trainer, allowed: trainer = RL",
        ),
        (
            ["trl", "reward.py"],
            "reward.py without a call of GRPOTrainer or GRPOConfig, allowed: one",
        ),
        (["verl", "trl.sh"], "did you mean: penstock convert trl trl.sh?"),
        (["trl", "verl.sh"], "trl knows 0 of the "),
        (["trl", "data.jsonl"], "convert: got data.jsonl without a setting, allowed: a command"),
        (["trl", "trl.sh", "--out", "reward.py"], "convert: cannot write reward.py: File exists"),
    ],
)
def test_mistakes_are_one_line(words: list[str], said: str) -> None:
    done = CliRunner().invoke(cli.app, ["convert", *words])
    assert isinstance(done.exception, UserError)  # the command line prints it, and ends with 2
    assert said in str(done.exception)
    assert "\n" not in str(done.exception)


TRL_SCRIPT = """
from datasets import load_dataset
from peft import LoraConfig
from trl import GRPOConfig, GRPOTrainer
from mine.rewards import tidy as neat

def right(completions, gt_answer, **kwargs):
    return [float(c == a) for c, a in zip(completions, gt_answer)]

def main():
    dataset = load_dataset("openai/gsm8k", "main")["train"].map(lambda row: row)
    args = GRPOConfig(output_dir="$HOME/out", learning_rate=1e-5, num_generations=4, max_steps=30)
    trainer = GRPOTrainer(
        model="Qwen/Qwen2-0.5B-Instruct",
        reward_funcs=[right, neat],
        args=args,
        train_dataset=dataset,
        peft_config=LoraConfig(r=8, target_modules="all-linear"),
    )
    trainer.train()

if __name__ == "__main__":
    main()
"""


def test_a_script_that_calls_trl_is_read(folder: Path) -> None:
    (folder / "script.py").write_text(TRL_SCRIPT)
    code, said = convert("trl", "script.py", "--out", "new.toml")
    assert code == 0, said
    config, text = load_config("new.toml").config, Path("new.toml").read_text()
    task = config.tasks["train"]
    assert (task.data, task.data_options) == (
        "openai/gsm8k",
        {"config": "main", "split": "train"},
    )
    assert [reward.type for reward in task.rewards] == ["script.py:right", "mine.rewards:tidy"]
    assert (config.model.path, config.model.lora.rank) == ("Qwen/Qwen2-0.5B-Instruct", 8)
    assert (config.train.lr, config.train.steps, config.train.groups_per_step) == (1e-5, 30, 2)
    assert config.run.dir == f"{Path.home()}/out"
    assert "penstock check new.toml" in text
    assert "train_dataset = load_dataset('openai/gsm8k', 'main')['train'].map(" in text
    assert "keep its own calls under `if __name__" in text


def test_a_file_that_a_script_of_trl_loads_is_the_data(folder: Path) -> None:
    (folder / "mine.jsonl").write_text('{"prompt": "1+1=", "answer": "2"}\n')
    loads = 'load_dataset("json", data_files="mine.jsonl")["train"]'
    (folder / "script.py").write_text(f"GRPOTrainer(model='demo', train_dataset={loads})")
    code, said = convert("trl", "script.py", "--out", "new.toml")
    assert code == 0, said
    task = load_config("new.toml").config.tasks["train"]
    assert (task.data, task.data_options) == ("mine.jsonl", {})


def test_a_config_in_another_folder_finds_the_files_of_this_one(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder / "reward.py").write_text(
        "def reward_func(queries, prompts, labels):\n    return [1.0]\n"
    )
    (folder / "data.jsonl").write_text('{"prompt": "1+1=", "answer": "2"}\n')
    words = "--remote_rm_url reward.py --prompt_data data.jsonl --pretrain owner/name"
    (folder / "rm.sh").write_text(f"python -m openrlhf.cli.train_ppo_ray {words}")
    (folder / "deep" / "er").mkdir(parents=True)
    code, said = convert("openrlhf", "rm.sh", "--out", "deep/er/new.toml")
    assert code == 0, said
    monkeypatch.chdir(folder / "deep")
    loaded = load_config("er/new.toml")
    loaded.require_files()
    task = loaded.config.tasks["train"]
    assert Path(task.data).read_text() == (folder / "data.jsonl").read_text()
    assert task.rewards[0].type == "er/../../reward.py:reward_func"
    assert loaded.config.model.path == "owner/name"


def test_a_reward_function_of_openrlhf_is_taken_as_it_is(folder: Path) -> None:
    for place, words in (("reward.py", "reward.py:reward_func"), ("http://rm:5000", "SAY HERE")):
        (folder / "rm.sh").write_text(
            f"python -m openrlhf.cli.train_ppo_ray --remote_rm_url {place}"
        )
        code, said = convert("openrlhf", "rm.sh", "--out", f"{len(place)}.toml")
        assert code == 0, said
        text = Path(f"{len(place)}.toml").read_text()
        assert words in text
        assert ("cannot be read" in text) == place.startswith("http")


def test_every_key_of_the_tables_exists() -> None:
    keys = {rule.key for table in WORDS.values() for rule in table.values() if rule.key}
    keys |= {key for defaults in DEFAULTS.values() for key, _, _ in defaults}
    for key in keys:
        section: object = Config.model_construct()
        if key.startswith(
            ("tasks.", "eval.tasks.", "eval.sampling.", "engine.options.", "track.wandb.")
        ):
            continue  # tables of the user's names: loading the converted commands checks them
        for name in key.split("."):
            assert name in type(section).model_fields, key  # type: ignore[attr-defined]
            section = getattr(section, name)


@pytest.mark.parametrize("system", WORDS)
def test_the_page_of_a_system_is_the_table_of_its_words(system: str) -> None:
    root = Path(__file__).parents[2]
    spec = importlib.util.spec_from_file_location("draw_words", root / "scripts/draw_words.py")
    assert spec is not None
    assert spec.loader is not None
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    written = (root / "docs" / "coming-from" / f"{system}.md").read_text("utf-8")
    drawn = written.partition(script.BY_HAND)[0]
    assert drawn == script.page(system), "write it again: python scripts/draw_words.py --write"


def of_trl_script(text: str) -> tuple[Config, str]:
    Path("odd.py").write_bytes(text.encode())
    Path("odd.toml").unlink(missing_ok=True)
    code, said = convert("trl", "odd.py")
    assert code == 0, said
    return load_config("odd.toml").config, Path("odd.toml").read_text()


MADE = "GRPOConfig(learning_rate=lr, num_generations=4, max_steps=30)"


@pytest.mark.usefixtures("folder")
@pytest.mark.parametrize(
    "text",
    [
        f"lr = 1e-5\nargs = {MADE}\nGRPOTrainer('o/m', right, args)",
        f"lr = 1e-5\nargs = trl.{MADE}",  # no trainer in this file
        f"\ufefflr: float = 1e-5\r\nargs = {MADE}\r\n",
        "cfg = dict(learning_rate=1e-5, num_generations=4)\n"
        "def main():\n    more = {'max_steps': 30}\n    args = GRPOConfig(**cfg, **more)\n"
        "    GRPOTrainer('o/m', right, args)",
        f"lr = 1\nargs = {MADE}\nargs.learning_rate = 1e-5\n"
        "class Mine(GRPOTrainer):\n    pass\nMine('o/m', right, args)",
        f"try:\n    lr = 1e-5\nexcept ValueError:\n    pass\nif __name__ == '__main__':\n    args = {MADE}",
    ],
)
def test_however_a_script_writes_its_settings_for_trl_they_are_read(text: str) -> None:
    config, _ = of_trl_script(text)
    assert (config.train.lr, config.train.steps) == (1e-5, 30)
    assert config.sampling.num_generations == 4


@pytest.mark.usefixtures("folder")
@pytest.mark.parametrize(
    ("text", "left"),
    [
        (f"lr = 1e-4\nif big:\n    lr = 1e-5\nargs = {MADE}", "learning_rate = if big:"),
        (f"lr = 1e-4\nlr /= 2\nargs = {MADE}", "learning_rate = lr /= 2"),
        (
            f"lr = 1\nargs = {MADE}\nargs.learning_rate /= 2",
            "learning_rate = args.learning_rate /= 2",
        ),
        ("args = GRPOConfig('out', max_steps=30, **given())", "**given() = given()"),
    ],
)
def test_a_setting_of_a_script_that_only_its_code_knows_is_said(text: str, left: str) -> None:
    config, written = of_trl_script(text)
    assert config.train.steps == 30
    assert left in written.partition("# Without a counterpart:")[2]


def test_words_without_their_numbers_or_files_are_told(tmp_path: Path) -> None:
    file = tmp_path / "run.sh"
    file.write_text("python train.py --top_k many")
    with pytest.raises(UserError, match="its numbers cannot be read"):
        write.convert("trl", file)
    file.write_text(
        "python train.py --rollout_batch_size 8 --n_samples_per_prompt 2 --remote_rm_url"
    )
    assert "remote_rm_url = True: cannot be read" in write.convert("openrlhf", file)

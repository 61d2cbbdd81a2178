"""`penstock convert`: command lines and config files of other systems become configs that load and train."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest
from tests.stages.tiny_policy import save_policy
from typer.testing import CliRunner

from penstock import cli
from penstock.config import Config
from penstock.config.source import load_config
from penstock.convert.tables import DEFAULTS, WORDS
from penstock.errors import UserError

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
COMMANDS = {"trl": TRL, "verl": VERL, "openrlhf": OPENRLHF, "colossalai": COLOSSALAI}
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
        Path(f"{system}.sh").write_text(text)
    return tmp_path


def convert(system: str, file: str, *words: str) -> tuple[int, str]:
    done = CliRunner().invoke(cli.app, ["convert", system, file, *words])
    return done.exit_code, done.output


def converted(system: str) -> tuple[Config, str]:
    code, output = convert(system, f"{system}.sh")
    assert code == 0, output
    path = Path(f"{system}.toml")
    return load_config(str(path), []).config, path.read_text()


@pytest.mark.parametrize("system", COMMANDS)
def test_a_converted_command_trains(system: str, folder: Path) -> None:
    save_policy(folder / "policy")
    converted(system)
    overrides = [word for word in SMALL if system == "openrlhf" or "engine" not in word]
    words = ["train", f"{system}.toml", "--trust", *overrides]
    if system in ("verl", "colossalai"):
        words.append("engine.name=transformers")
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
    assert config.algorithm.normalize == "batch"
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
    assert "a right answer is 1 here, 10 there" in text


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
        (["nemo", "trl.sh"], "convert: got 'nemo', allowed: trl, verl, openrlhf, colossalai"),
        (
            ["trl", "none.sh"],
            "convert: got 'none.sh', allowed: a text file that can be read (No such file",
        ),
        (["trl", "reward.py"], "convert: got reward.py without a setting, allowed: a command"),
        (["trl", "trl.sh", "--out", "reward.py"], "convert: cannot write reward.py: File exists"),
    ],
)
def test_mistakes_are_one_line(words: list[str], said: str) -> None:
    done = CliRunner().invoke(cli.app, ["convert", *words])
    assert isinstance(done.exception, UserError)  # the command line prints it, and ends with 2
    assert said in str(done.exception)
    assert "\n" not in str(done.exception)


def test_every_key_of_the_tables_exists() -> None:
    keys = {rule.key for table in WORDS.values() for rule in table.values() if rule.key}
    keys |= {key for defaults in DEFAULTS.values() for key, _, _ in defaults}
    for key in keys:
        section: object = Config.model_construct()
        if key.startswith(("tasks.", "eval.tasks.", "engine.options.")):
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
    assert written == script.page(system), "write it again: python scripts/draw_words.py --write"

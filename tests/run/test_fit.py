"""Fit as a user meets it: a model and a machine, and what is chosen, said or refused before anything is loaded."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from penstock import cli
from penstock.config import Config
from penstock.config.demo import policy_path
from penstock.config.memory import ModelShape
from penstock.config.source import load_config
from penstock.errors import UserError
from penstock.reward.judge import INSTRUCTIONS
from penstock.run.fit import Fit, Machine, fitted, visible_gpus

GIB = 2**30
_QWEN = {"max_position_embeddings": 32768, "vocab_size": 151936, "num_hidden_layers": 28}
SEVEN = {
    **_QWEN,
    "vocab_size": 152064,
    "hidden_size": 3584,
    "intermediate_size": 18944,
    "num_attention_heads": 28,
    "num_key_value_heads": 4,
}
ONE_AND_A_HALF = {
    **_QWEN,
    "hidden_size": 1536,
    "intermediate_size": 8960,
    "num_attention_heads": 12,
    "num_key_value_heads": 2,
    "tie_word_embeddings": True,
}
THREE = {
    **_QWEN,
    "num_hidden_layers": 36,
    "hidden_size": 2048,
    "intermediate_size": 11008,
    "num_attention_heads": 16,
    "num_key_value_heads": 2,
    "tie_word_embeddings": True,
}
TURNS = "launch.colocate=true: engine and trainer take turns on the GPU, so that the run fits"
AGAIN = "train.gradient_checkpointing=true: activations are computed again in the backward pass, so that the run fits"
AWAY = "train.offload_moments=true: AdamW's moments stay in main memory, so that the run fits"
SHORT = "train.moments=bfloat16: AdamW's moments are rounded to 16 bits, at random, so that the run fits"


def config_of(*words: str) -> Config:
    return load_config(None, words).config


def fit_of(model: dict, gib: int, *words: str, gpus: int = 1, host: int = 256) -> Fit:
    machine = Machine(gpus=(gib * GIB,) * gpus, host=host * GIB)
    return fitted(config_of(*words), machine, ModelShape.of(model))


def test_a_small_model_stays_as_it_is() -> None:
    fit = fit_of(ONE_AND_A_HALF, 139)
    assert (fit.choices, fit.config.launch.colocate) == ((), False)
    (gpu, _) = fit.devices
    assert [part.name for part in gpu.parts] == ["trainer", "engine"]


def test_seven_billion_on_139_gib_are_trained_in_turns() -> None:
    """7.62 billion x (2 + 4 + 4) bytes are 71 GiB, 28 layers x 62,464 numbers of each of 2,048 tokens 7 GiB."""
    fit = fit_of(SEVEN, 139)
    assert fit.choices == (TURNS, AWAY)
    assert fit.config.launch.colocate
    assert fit.config.train.offload_moments
    (gpu, host) = fit.devices
    assert gpu.need / GIB == pytest.approx(71 + 7 + 2, rel=0.02)
    # what waits: weights, masters and moments of the trainer, weights of the engine, two published versions;
    # and a checkpoint: weights, masters, moments
    waits, saved = 2 + 4 + 8 + 2 + 4, 2 + 4 + 8
    assert host.need / GIB == pytest.approx(7.62e9 * (waits + saved) / GIB, rel=0.02)


@pytest.mark.parametrize(
    ("model", "gib", "host", "words", "choices"),
    [
        (SEVEN, 24, 128, ["model.lora.rank=16"], (TURNS, AGAIN)),
        (ONE_AND_A_HALF, 24, 64, [], (TURNS, AWAY)),
        (THREE, 40, 128, [], (TURNS, AWAY)),
        (SEVEN, 80, 256, [], (TURNS, AWAY, AGAIN)),
        # with less main memory: shorter moments, then nothing that waits there for its turn
        (ONE_AND_A_HALF, 24, 48, [], (TURNS, AWAY, SHORT)),
        (SEVEN, 139, 128, [], (AWAY, SHORT)),
        # what the user has decided stays as it is
        (SEVEN, 139, 256, ["launch.colocate=false"], (AWAY,)),
        (ONE_AND_A_HALF, 24, 64, ["train.offload_moments=false"], (TURNS, AGAIN, SHORT)),
    ],
)
def test_settings_are_chosen_with_which_a_model_fits(
    model: dict, gib: int, host: int, words: list[str], choices: tuple[str, ...]
) -> None:
    fit = fit_of(model, gib, *words, host=host)
    assert fit.choices == choices
    assert all(device.fits() for device in fit.devices)


@pytest.mark.parametrize(
    ("model", "gib", "words", "gpus", "host", "line"),
    [
        # 3.09 billion x 10 bytes are 28.7 GiB
        (THREE, 24, [], 1, 256, "of cuda:0, which has 24 GiB; allowed: model.lora.rank=16"),
        (
            SEVEN,
            24,
            [],
            8,
            512,
            "allowed: launch.num_consumers=8 launch.num_producers=8",
        ),
        # what the user has decided is not changed, but advised
        (
            ONE_AND_A_HALF,
            24,
            ["train.offload_moments=false", "train.moments=float32"],
            1,
            256,
            "allowed: train.offload_moments=true",
        ),
        (
            ONE_AND_A_HALF,
            24,
            ["train.micro_batch_tokens=65536"],
            1,
            256,
            "allowed: train.micro_batch_tokens=2048",
        ),
        # what waits for its turn has no place in main memory
        (SEVEN, 139, [], 1, 64, "of main memory, which has 64 GiB; allowed: model.lora.rank=16"),
        (SEVEN, 8, [], 1, 64, "allowed: a smaller model (this one has 7.6 billion parameters)"),
    ],
)
def test_what_cannot_fit_is_refused_with_the_nearest_setting_that_can(
    model: dict, gib: int, words: list[str], gpus: int, host: int, line: str
) -> None:
    if "micro_batch" in "".join(words):
        words = [*words, "tasks.addition.max_prompt_tokens=4096", "sampling.max_tokens=4096"]
    with pytest.raises(UserError) as refused:
        fit_of(model, gib, *words, gpus=gpus, host=host)
    assert str(refused.value).endswith(line)


def test_a_machine_without_gpus_is_its_main_memory() -> None:
    """1.54 billion x (4 + 4 + 8) bytes of a trainer, twice 4 in shared memory and 4 of an engine."""
    with pytest.raises(UserError, match=r"of main memory, which has 32 GiB; allowed: model\.lora"):
        fitted(config_of(), Machine(host=32 * GIB), ModelShape.of(ONE_AND_A_HALF))
    fit = fitted(config_of(), Machine(host=80 * GIB), ModelShape.of(ONE_AND_A_HALF))
    trainer, checkpoint, engine = fit.devices[0].parts
    assert checkpoint.total == (4 + 4 + 8) * ModelShape.of(ONE_AND_A_HALF).parameters
    assert trainer.sizes["masters"] == 0
    assert trainer.sizes["moments"] == 8 * ModelShape.of(ONE_AND_A_HALF).parameters
    assert trainer.sizes["weights"] == 3 * engine.sizes["weights"]


LOOPS = """
from penstock.rollout import AgentLoop

async def play(task, model):
    return 1.0

class Loop(AgentLoop):
    pass
"""


@pytest.mark.parametrize(
    ("words", "tokens"),
    [
        ([], 2048),
        (["tasks.addition.max_prompt_tokens=4000"], 4256),
        # what is generated and not trained
        (["eval.tasks.sums.data=addition", "eval.sampling.max_tokens=8192"], 2048),
        (["tasks.addition.rewards=[{type='judge', options={model='policy', rubric='r'}}]"], 2048),
        # an agent's contexts have at most max_prompt_tokens; those of an agent loop any number
        (["tasks.addition.agent=agents.py:play"], 2048),
        (["tasks.addition.agent=agents.py:Loop"], 32768),
        # what is trained and not generated
        (["tasks.addition.agent=demonstration", "algorithm.name=sft"], 2048),
        (["train.ptx={coefficient=0.5, data='texts.jsonl', max_tokens=8192}"], 8192),
    ],
)
def test_packs_count_the_tokens_that_are_trained(
    words: list[str], tokens: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("agents.py").write_text(LOOPS)
    shape = ModelShape.of(ONE_AND_A_HALF)
    short = ["sampling.max_tokens=256", "tasks.addition.max_prompt_tokens=256"]
    given = ["train.gradient_checkpointing=false", "train.groups_per_step=64"]
    (gpu, _) = fit_of(ONE_AND_A_HALF, 1024, *short, *given, *words, host=1024).devices
    each = shape.bytes_per_token(2, checkpointing=False, joint=True) + 2 * shape.vocabulary
    assert gpu.parts[0].sizes["packs"] == tokens * each


JUDGE = "tasks.addition.rewards=[{type='judge', options={model='policy', rubric='r', mode='%s', max_tokens=100}}]"
WORDS = len(INSTRUCTIONS) + 1  # a text has no more tokens than characters


@pytest.mark.parametrize(
    ("words", "tokens"),
    [
        ([], 512),
        (["tasks.addition.agent=agents.py:play"], 512),
        (["tasks.addition.agent=tools", "tasks.addition.agent_options={tools=['m:f']}"], 512),
        (["tasks.addition.agent=agents.py:Loop"], 32768),
        ([JUDGE % "score"], 612 + WORDS),
        ([JUDGE % "rank", "sampling.num_generations=4"], 4 * 256 + 256 + 100 + WORDS),
        (["eval.tasks.sums={data='addition', max_prompt_tokens=256}"], 512),
        (
            [
                "eval.tasks.sums={data='addition', agent='agents.py:play', max_prompt_tokens=512}",
                "eval.sampling.max_tokens=1024",
            ],
            1536,
        ),
        (
            [
                "tasks.addition.agent=demonstration",
                "algorithm.name=sft",
                "eval.tasks.sums={data='addition', max_prompt_tokens=512}",
            ],
            768,
        ),
    ],
)
def test_an_engine_counts_the_tokens_that_a_request_can_have(
    words: list[str], tokens: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("agents.py").write_text(LOOPS)
    shape = ModelShape.of(ONE_AND_A_HALF)
    short = ["sampling.max_tokens=256", "tasks.addition.max_prompt_tokens=256"]
    (_, gpu, _) = fit_of(ONE_AND_A_HALF, 1024, *short, *words, gpus=2, host=1024).devices
    assert gpu.parts[0].sizes["KV"] == 16 * tokens * shape.kv_bytes(2)


def big_model(folder: Path) -> Path:
    """A model whose config.json alone says that nothing here can hold it."""
    shutil.copytree(policy_path(), folder)
    (folder / "model.safetensors").unlink()
    settings = json.loads((folder / "config.json").read_text())
    settings |= {"hidden_size": 65536, "num_hidden_layers": 200, "intermediate_size": 262144}
    (folder / "config.json").write_text(json.dumps(settings))
    return folder


@pytest.mark.parametrize("command", ["train", "check"])
def test_a_model_that_is_too_large_is_refused_before_it_is_loaded(
    command: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    words = [f"model.path={big_model(tmp_path / 'big')}", "launch.kind=inline"]
    monkeypatch.setattr("sys.argv", ["penstock", command, *words])
    with pytest.raises(SystemExit) as left:
        cli.main()
    assert left.value.code == 2
    assert "error: memory: " in capsys.readouterr().err
    assert not list(tmp_path.glob("runs/*"))


def test_the_memory_of_gpus_is_asked_of_the_driver(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = tmp_path / "nvidia-smi"
    program.write_text("#!/bin/sh\necho 'GPU-a, 24576'\necho 'GPU-b, 143771'\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    small, large = 24576 * 2**20, 143771 * 2**20
    assert visible_gpus(None) == [small, large]
    assert visible_gpus("1, 0") == [large, small]
    assert visible_gpus("GPU-b") == [large]
    assert visible_gpus("MIG-c") == visible_gpus("") == []  # not known, so nothing is refused
    program.unlink()
    monkeypatch.setenv("PATH", str(tmp_path))
    assert visible_gpus(None) == []

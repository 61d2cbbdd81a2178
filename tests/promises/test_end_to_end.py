"""The whole machine on the demo policy: sync and async, stopped, killed and resumed."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from functools import partial
from pathlib import Path

import pytest

from penstock.config.demo import policy_path
from penstock.config.source import load_config
from penstock.errors import UserError
from penstock.inspection.rollout_viewer import show_rollouts
from penstock.run import entry
from penstock.run.session import replay_run, train_new
from penstock.store.journal import Journal
from penstock.store.run_folder import RunFolder
from stages.rewards import ODD_REWARD
from stages.step_pipe import STEP_PIPE
from stages.tiny_run import SMALL_POLICY, SUMS, CrashServer

SMALL = [
    "train.groups_per_step=4",
    "sampling.num_generations=4",
    "engine.max_slots=16",
    "eval.max_problems=8",
    "eval.every_steps=0",
    "checkpoint.every_steps=2",
    "track.trackers=[]",
    "train.lr=1e-3",
    f"tasks.train.data={SUMS}",  # the demo's thousands would be tokenised for every run
]
PROMISED_METRICS = [
    "step",
    "policy_version",
    "reward/mean",
    "accuracy/mean",
    "response_length/mean",
    "loss/policy",
    "entropy/mean",
    "ratio/mean",
    "clip/fraction",
    "grad_norm",
    "update/arrived",
    "lr",
    "staleness/mean",
    "staleness/max",
    "mismatch/kl",
    "tokens/generated",
    "tokens/trained",
    "time/step_s",
    "time/consumer_wait_s",
    "time/producer_wait_s",
    "time/produce_s",
    "produced/groups",
    "produced/tokens",
    "produced/reward",
    "workers/restarts",
]


def train(folder: Path, name: str, *overrides: str) -> RunFolder:
    """Train inside this process; return the run folder."""
    inline = ["launch.kind=inline", f"run.dir={folder}", f"run.name={name}"]
    train_new(load_config(None, [*SMALL, *inline, *overrides]).config)
    return RunFolder(folder / name)


def digests(run: RunFolder) -> list[str]:
    journal = Journal.open(run.journal, readonly=True)
    try:
        return [report.digest for report in journal.steps()]
    finally:
        journal.close()


def metrics(run: RunFolder) -> list[dict[str, float]]:
    return [json.loads(line) for line in run.metrics.read_text().splitlines()]


@pytest.fixture(scope="module")
def sync_run(tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    return train(tmp_path_factory.mktemp("runs"), "sync", "train.steps=4", "produce.strategy=sync")


def test_a_run_leaves_what_it_promises(sync_run: RunFolder) -> None:
    lines = metrics(sync_run)
    assert [line["step"] for line in lines] == [1, 2, 3, 4]
    assert set(PROMISED_METRICS) <= set(lines[0])
    assert {path.name for path in sync_run.checkpoints.iterdir()} == {"step-2", "step-4"}
    kept = load_config(sync_run.checkpoints / "step-4" / "config.toml").config
    assert kept == sync_run.config()
    evaluations = [
        json.loads(t) for t in (sync_run.evaluations / "summary.jsonl").read_text().splitlines()
    ]
    assert [(e["step"], e["policy_version"]) for e in evaluations] == [(0, 0), (4, 4)]
    assert (sync_run.path / "report.html").exists()


def test_on_policy_means_on_policy(sync_run: RunFolder) -> None:
    for line in metrics(sync_run):
        assert line["staleness/max"] == 0
        assert line["ratio/mean"] == pytest.approx(1.0, abs=1e-5)
        assert line["mismatch/kl"] < 1e-8


def test_async_with_staleness_0_is_sync_bitwise(sync_run: RunFolder, tmp_path: Path) -> None:
    other = train(
        tmp_path,
        "async",
        "train.steps=4",
        "produce.strategy=async",
        "produce.max_staleness=0",
        "eval.tasks={}",
    )
    assert digests(other) == digests(sync_run)


def test_another_seed_is_another_run(sync_run: RunFolder, tmp_path: Path) -> None:
    words = ("train.steps=1", "produce.strategy=sync", "eval.tasks={}")
    other = train(tmp_path, "seed", *words, "seed=1")
    assert digests(other)[0] != digests(sync_run)[0]


def test_a_reward_that_raises_stops_the_run_with_its_name(tmp_path: Path) -> None:
    from penstock.errors import TooManyFailures

    bad = tmp_path / "bad_reward.py"
    bad.write_text("def score(rollout, prompt):\n    raise RuntimeError('judge is down')\n")
    words = ("train.steps=2", "eval.tasks={}")
    with pytest.raises(TooManyFailures, match="judge is down"):
        train(tmp_path, "bad", *words, f"tasks.train.rewards=[{{type='{bad}:score'}}]")


class Driver:
    """A run in processes of its own, started from nothing or forked from a warm server."""

    def __init__(self, folder: Path, *overrides: str, server: CrashServer | None = None) -> None:
        os.mkfifo(folder / "steps")
        places = [f"run.dir={folder}", f"track.trackers=['{STEP_PIPE}']"]
        words = ["train", *SMALL, *places, *overrides]
        self._steps = folder / "steps"
        work = self._start if server is None else partial(self._fork, server)
        self._ended = ThreadPoolExecutor(1).submit(work, words)
        self._ended.add_done_callback(self._wake_reader)

    def _start(self, words: list[str]) -> tuple[int, str]:
        command = [sys.executable, "-m", "penstock.cli", *words]
        done = subprocess.run(command, stderr=subprocess.PIPE, text=True, start_new_session=True)
        return done.returncode, done.stderr

    def _fork(self, server: CrashServer, words: list[str]) -> tuple[int, str]:
        return server.run(*words), server.output()

    def _wake_reader(self, _: object) -> None:
        """Open and close the pipe, so that no reader waits for a run that never opened it."""
        with suppress(OSError):
            os.close(os.open(self._steps, os.O_WRONLY | os.O_NONBLOCK))

    def signal_after(self, step: int, number: signal.Signals) -> tuple[int, str]:
        """Send the signal once the step is done; return the exit code and what the run printed."""
        with self._steps.open() as pipe:
            for line in pipe:
                done, pid = map(int, line.split())
                if done == step:
                    os.kill(pid, number)
                    return self._ended.result()
        raise AssertionError(f"the run ended early: {self._ended.result()[1]}")


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["sync", "async"])
def test_killed_and_resumed_it_trains_every_group_once(
    strategy: str, sync_run: RunFolder, tmp_path: Path, server: CrashServer
) -> None:
    settings = ["run.name=killed", "train.steps=4", "checkpoint.every_steps=0"]
    settings.append(f"produce.strategy={strategy}")
    driver = Driver(tmp_path, *settings, server=server if strategy == "async" else None)
    run = RunFolder(tmp_path / "killed")
    assert driver.signal_after(2, signal.SIGKILL)[0] == -signal.SIGKILL
    before = digests(run)
    entry.resume(run, ["launch.kind=inline", "track.trackers=[]"])
    after = digests(run)
    assert after[: len(before)] == before
    assert [line["step"] for line in metrics(run)] == [1, 2, 3, 4]
    if strategy == "sync":
        assert after == digests(sync_run)
    assert_balanced(run)


def assert_balanced(run: RunFolder) -> None:
    journal = Journal.open(run.journal, readonly=True)
    try:
        trained = journal.query(
            "SELECT step, COUNT(*) FROM groups WHERE state = 'trained' GROUP BY step"
        )
        counts = journal.counts()["train"]
    finally:
        journal.close()
    assert trained == [(step, 4) for step in (1, 2, 3, 4)]
    assert counts["drawn"] == sum(number for state, number in counts.items() if state != "drawn")


def test_a_ratio_is_one_where_min_tokens_bans_the_end(tmp_path: Path) -> None:
    """The policy's responses have 19 to 23 tokens, so its end token has most of its chance banned."""
    words = ("train.steps=1", "produce.strategy=sync", "eval.tasks={}")
    run = train(tmp_path, "long", *words, "sampling.min_tokens=24")
    first = metrics(run)[0]
    assert first["response_length/mean"] == 24
    assert first["mismatch/kl"] < 1e-8
    assert first["clip/fraction"] == 0
    assert first["ratio/max"] == pytest.approx(1.0, abs=1e-3)
    with closing(Journal.open(run.journal, readonly=True)) as journal:
        group = journal.group(journal.query("SELECT group_id FROM groups LIMIT 1")[0][0])
    assert {rollout.min_tokens for rollout in group.rollouts} == {24}


def test_a_ratio_is_one_where_top_k_and_top_p_cut_the_distribution(tmp_path: Path) -> None:
    """The trainer scores among the tokens that were left, also after the journal: a replay is exact."""
    words = ("train.steps=2", "produce.strategy=sync", "eval.tasks={}", "sampling.temperature=1.5")
    run = train(tmp_path, "cut", *words, "sampling.top_k=12", "sampling.top_p=0.9")
    for line in metrics(run):
        assert line["mismatch/kl"] < 1e-8
        assert line["ratio/max"] == pytest.approx(1.0, abs=1e-3)
        assert line["ratio/mean"] == pytest.approx(1.0, abs=1e-5)
    with closing(Journal.open(run.journal, readonly=True)) as journal:
        group = journal.group(journal.query("SELECT group_id FROM groups LIMIT 1")[0][0])
    for rollout in group.rollouts:
        assert rollout.choices is not None
        assert not rollout.choices.num_kept[: len(rollout.prompt_ids) - 1].any()
        assert rollout.choices.num_kept[-len(rollout.response_ids) :].min() > 0
        assert rollout.choices.num_kept.max() <= 12
    replay_run(run, to_step=None, algorithm=None, overrides=[])


def small_experts(folder: Path) -> list[str]:
    """Settings for a random Qwen3-MoE with the demo's tokenizer, whose experts are recorded."""
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    experts = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
    plain = AutoConfig.from_pretrained(SMALL_POLICY).to_dict()
    kept = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "head_dim")
    fields = {name: plain[name] for name in (*kept, "eos_token_id", "max_position_embeddings")}
    config = AutoConfig.for_model("qwen3_moe", **fields, **experts, num_key_value_heads=2)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    AutoTokenizer.from_pretrained(SMALL_POLICY).save_pretrained(folder)
    words = [f"model.path={folder}", "engine.options={router_replay=true}", "sampling.top_k=40"]
    words += ["sampling.max_tokens=8", f"tasks.train.rewards=[{{type='{ODD_REWARD}'}}]"]
    return [*words, "eval.tasks={}", "produce.strategy=sync", "train.steps=4", "train.lr=1e-2"]


def test_experts_are_recorded_and_taken(tmp_path: Path) -> None:
    """In the second update of a batch the routers have moved, and take the recorded experts all the same."""
    words = small_experts(tmp_path / "experts")
    run = train(tmp_path, "run", *words, "train.mini_batches=2")
    assert all(line["mismatch/kl"] < 1e-8 for line in metrics(run))
    assert all(line["grad_norm"] > 0 for line in metrics(run))
    with closing(Journal.open(run.journal, readonly=True)) as journal:
        group = journal.group(journal.query("SELECT group_id FROM groups LIMIT 1")[0][0])
    for rollout in group.rollouts:
        assert rollout.choices is not None
        assert rollout.choices.experts.shape == (len(rollout.choices), 4)  # 2 layers, 2 experts
        assert 0 < rollout.choices.experts[:, :2].min() <= rollout.choices.experts.max() <= 6
    replay_run(run, to_step=None, algorithm=None, overrides=[])
    replay_run(run, to_step=2, algorithm="rloo", overrides=["run.name=fork"])
    other = train(tmp_path, "other", *words, "train.mini_batches=2", "engine.options={}")
    assert digests(other)[0] != digests(run)[0]  # it took others


@pytest.mark.slow
def test_killed_and_resumed_it_takes_the_recorded_experts(
    tmp_path: Path, server: CrashServer
) -> None:
    words = small_experts(tmp_path / "experts")
    whole = train(tmp_path, "whole", *words)
    driver = Driver(tmp_path, *words, "run.name=killed", "checkpoint.every_steps=0", server=server)
    run = RunFolder(tmp_path / "killed")
    assert driver.signal_after(2, signal.SIGKILL)[0] == -signal.SIGKILL
    entry.resume(run, ["launch.kind=inline", "track.trackers=[]"])
    assert digests(run) == digests(whole)
    assert_balanced(run)


def test_what_a_user_should_know_is_said_once_before_the_first_step(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Of the 3 evaluated problems one is trained on; dynamic sampling draws more than one episode."""
    lines = [{"prompt": f"{a}+11", "answer": a + 11} for a in range(20, 24)]
    other = [{"prompt": " 20+11\n", "answer": 31}] + [
        {"prompt": f"{a}+12", "answer": a + 12} for a in (20, 21)
    ]
    for name, records in (("train", lines), ("test", other)):
        text = "".join(f"{json.dumps(record)}\n" for record in records)
        (tmp_path / f"{name}.jsonl").write_text(text)
    train(
        tmp_path,
        "notes",
        "train={episodes=1, groups_per_step=4}",
        "algorithm.filter_groups=true",
        "sampling.max_tokens=6",
        f"tasks.train.rewards=[{{type='{ODD_REWARD}'}}]",  # it differs in every group: none is refused
        f"tasks.train.data={tmp_path / 'train.jsonl'}",
        f"eval.tasks.heldout.data={tmp_path / 'test.jsonl'}",
    )
    said = capfd.readouterr().err
    assert said.count("1 of 3 problems of eval.tasks.heldout are prompts of tasks.train") == 1
    assert said.count("note: train.episodes 1 is 1 steps") == 1


THINKING = (
    "{% for message in messages %}<{{ message.role }}>{{ message.content }}{% endfor %}<assistant>"
    "{% if enable_thinking is defined and not enable_thinking %}<think></think>{% endif %}"
)


def test_arguments_of_the_chat_template_reach_training_evaluation_and_the_rollouts_shown(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = shutil.copytree(policy_path(), tmp_path / "model")
    (model / "chat_template.jinja").write_text(THINKING)
    words = ["train.steps=1", f"model.path={model}", "tasks.train.max_prompt_tokens=24"]
    words += ["eval.tasks.heldout.max_prompt_tokens=24", "eval.max_problems=2"]
    with pytest.raises(UserError, match=r"tasks.train: chat_template_kwargs: got 'enable_thinkin'"):
        train(tmp_path, "wrong", *words, "tasks.train.chat_template_kwargs={enable_thinkin=false}")
    run = train(
        tmp_path, "quiet", *words, "tasks.train.chat_template_kwargs={enable_thinking=false}"
    )
    assert run.config().eval.tasks["heldout"].chat_template_kwargs == {"enable_thinking": False}
    capsys.readouterr()
    show_rollouts(run, limit=1)
    shown = capsys.readouterr().out
    assert re.search(r"prompt  <user>\d+\+\d+<assistant><think></think>\n", shown), shown


GROUP_REWARD = """
async def shortest(rollouts, prompt):
    assert len(rollouts) == 4 and "content" in prompt.messages[-1]
    lengths = [len(rollout.text) for rollout in rollouts]
    return [place == lengths.index(min(lengths)) for place in range(4)]
"""


def test_a_reward_that_compares_a_group_trains_and_evaluates(tmp_path: Path) -> None:
    """One response of each group of four is the shortest: the mean reward is exactly 1/4."""
    (tmp_path / "own.py").write_text(GROUP_REWARD)
    rewards = f"[{{type='{tmp_path / 'own.py'}:shortest'}}]"
    run = train(
        tmp_path,
        "group",
        "train.steps=1",
        f"tasks.train.rewards={rewards}",
        f"eval.tasks.heldout.rewards={rewards}",
        "eval.tasks.heldout.sampling={num_generations=4, temperature=1.0}",
    )
    assert metrics(run)[-1]["reward/mean"] == pytest.approx(0.25)
    summary = [json.loads(line) for line in (run.evaluations / "summary.jsonl").open()]
    assert [line["reward"] for line in summary] == pytest.approx([0.25, 0.25])
    assert not any(line["failures"] for line in summary)
    # every problem has one right sample of four: the interval is no point, and no wider than Wilson's
    assert all(0.05 < line["low"] < 0.25 < line["high"] < 0.6 for line in summary)


def test_a_small_update_of_a_bfloat16_run_arrives(tmp_path: Path) -> None:
    """The policy's file is float32; rounded to bfloat16 it is what most checkpoints are."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = tmp_path / "model"
    small = AutoModelForCausalLM.from_pretrained(SMALL_POLICY, dtype="bfloat16")  # slow on a CPU
    small.save_pretrained(folder)
    AutoTokenizer.from_pretrained(SMALL_POLICY).save_pretrained(folder)
    (tmp_path / "own.py").write_text(GROUP_REWARD)
    run = train(
        tmp_path,
        "rounded",
        f"model.path={folder}",
        "model.dtype=bfloat16",
        "produce.strategy=sync",
        "train.steps=1",
        "train.lr=1e-5",
        "train.groups_per_step=1",
        "sampling.max_tokens=4",
        f"tasks.train.rewards=[{{type='{tmp_path / 'own.py'}:shortest'}}]",
        "eval.tasks={}",
    )
    assert metrics(run)[0]["grad_norm"] > 0
    assert 0.9 < metrics(run)[0]["update/arrived"] < 1.1  # with plain masters far below

"""Penstock from Python: a run as the documentation shows it, its resume, and mistakes in one line."""

from __future__ import annotations

import asyncio
import json
import os
import pydoc
import shutil
import signal
import subprocess
import sys
import threading
import traceback
import types
from pathlib import Path
from typing import Any

import pytest

import penstock
from penstock import api, cli
from penstock.config import Config, plugins
from penstock.data.source import write_rows
from penstock.errors import UserError
from penstock.inspection.track import console
from penstock.run import generate
from penstock.run.session import StopSignals, outside_a_loop
from stages import rewards as stage_rewards
from stages.made_run import make_run

ROWS = [{"prompt": f"{a}+{b}", "gt_answer": str(a + b)} for a in (10, 11) for b in (20, 21, 22)]
SMALL: dict[str, Any] = {
    "launch.kind": "inline",
    "engine.max_slots": 8,
    "checkpoint.every_steps": 1,
    "track.trackers": [],
}
TINY: dict[str, Any] = {"groups_per_step": 2, "num_generations": 2, "max_tokens": 6}


@pytest.fixture(autouse=True)
def in_an_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.mark.slow
def test_a_lambda_and_a_list_train_and_resume(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def answers(offset: float) -> Any:
        return lambda completions, gt_answer, **_: [
            offset + float(a in c) + len(c) for c, a in zip(completions, gt_answer, strict=True)
        ]

    rows = [*ROWS, {"prompt": "1" * 3000, "gt_answer": "1"}]
    run = penstock.train(
        "demo", rows, answers(0.0), steps=1, lr=1e-4, name="mine", settings=SMALL, **TINY
    )
    assert "prompts of tasks.train are longer than 2048 tokens" in capsys.readouterr().err
    (first,) = run.metrics
    assert first["step"] == 1
    assert first["reward/mean"] > 0
    assert (run.path / "data" / "tasks.train.jsonl").read_text().count("\n") == len(rows)
    assert (run.model_path / "config.json").is_file()
    assert run.report().is_file()
    sample = run.samples(limit=1)[0]
    assert sample["prompt"][0]["content"] in {row["prompt"] for row in ROWS}
    assert sample["parts"] == {"reward": sample["reward"]}
    moved = shutil.move(run.path, tmp_path / "moved")  # its data goes with it
    with pytest.raises(UserError, match=r"got 'python:reward', a function .* penstock.resume\(RUN"):
        penstock.resume(moved, settings={"train.steps": 2})
    later = penstock.resume(moved, reward=answers(1.0), settings={"train.steps": 2})
    assert [row["step"] for row in later.metrics] == [1, 2]
    told = " ".join(capsys.readouterr().out.split())
    assert "with starts and evaluations" in told
    assert f"model: {later.model_path}" in told
    assert repr(later).startswith(f"Run('{tmp_path / 'moved'}', 2 steps, reward ")
    data = (tmp_path / "moved" / "config.toml").read_text()
    assert 'data = "RUN/data/tasks.train.jsonl"' in data
    (answer,) = penstock.generate(later, "12+34", max_tokens=3, temperature=0)
    assert len(answer.tokens) <= 3
    (result,) = penstock.evaluate(later, ROWS[:2], answers(0.0), max_tokens=4)
    assert (result.task, result.samples, result.failures) == ("heldout", 2, 0)


def test_an_argument_of_generate_holds_beside_a_table_of_settings(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    used = list[Config]()
    monkeypatch.setattr(generate, "generate_samples", lambda config, *_, **__: used.append(config))
    penstock.generate("demo", "1+1", max_tokens=4, settings={"sampling": {"top_k": 3}})
    (config,) = used
    assert (config.sampling.max_tokens, config.sampling.top_k) == (4, 3)


def test_a_run_inside_a_running_event_loop_is_stopped_by_an_interrupt() -> None:
    """As in a notebook: the cell's thread runs an event loop, and Ctrl-C reaches that thread."""

    called = list[str]()

    def reward(response: str) -> float:
        called.append(response)
        if len(called) > 1:  # the first call tries the reward
            os.kill(os.getpid(), signal.SIGINT)
        return float(len(response))

    async def cell() -> penstock.Run:
        return penstock.train("demo", ROWS, reward, steps=50, name="cell", settings=SMALL, **TINY)

    with pytest.raises(penstock.StopRequested, match=r'penstock.resume\("runs/cell", reward=...\)'):
        asyncio.run(cell())
    assert len(penstock.open_run("cell").metrics) < 50  # it did not go on to its end


EXITS = """
import sys
from penstock.rollout import ProduceBatchStatus, ProduceStrategy

class Exits(ProduceStrategy):
    async def produce_batch(self, ctx):
        while await ctx.available_count() < ctx.target_abs:
            group = await ctx.sample_group()
            if group.cursor == 3:
                sys.exit("enough")
            await ctx.put_generated_group(await ctx.generate_group(group))
        return ProduceBatchStatus.NORMAL
"""


def test_an_exit_in_a_strategy_of_ones_own_ends_the_run(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(EXITS)
    settings = {**SMALL, "produce.strategy": "own.py:Exits"}
    with pytest.raises(SystemExit, match="enough"):
        penstock.train("demo", ROWS, "boxed", steps=3, name="own", settings=settings, **TINY)
    with penstock.open_run("own")._folder.lock():  # the run has let go of it
        assert len(penstock.open_run("own").metrics) < 3


def test_an_interrupt_before_the_run_is_open_is_kept() -> None:
    told = list[str]()
    stopping = StopSignals("on", told.append)

    async def work() -> None:
        StopSignals.interrupt()  # as the main thread's handler does
        with stopping:
            assert await stopping.run(asyncio.Event().wait(), "closing") is None

    async def cell() -> None:
        outside_a_loop(lambda: asyncio.run(work()), saves=True)

    asyncio.run(cell())
    assert told == ["stop requested: closing"]
    assert not StopSignals._early


def test_other_work_in_a_notebook_is_left_behind_by_an_interrupt() -> None:
    going = threading.Event()

    def work() -> None:
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
        going.wait(60)

    async def cell() -> None:
        signal.signal(signal.SIGINT, signal.default_int_handler)  # as a kernel has it
        outside_a_loop(work)

    before = signal.getsignal(signal.SIGINT)
    try:
        with pytest.raises(KeyboardInterrupt):
            asyncio.run(cell())
    finally:
        going.set()
        signal.signal(signal.SIGINT, before)


def test_a_function_that_can_be_imported_needs_no_program() -> None:
    own = stage_rewards.odd_reward
    (table,), objects = api.name_rewards(own) or ([], {})
    assert (table, objects) == ({"type": "stages.rewards:odd_reward"}, {})
    local = [lambda response: 1.0, {"type": lambda response: 2.0, "weight": 0.5}, "boxed"]
    tables, objects = api.name_rewards(local)
    assert tables is not None
    assert [one["type"] for one in tables] == ["python:reward", "python:reward_2", "boxed"]
    with plugins.python_objects(objects):
        assert plugins.load("reward", "python:reward_2", {})("") == 2.0
        assert plugins.fingerprint("python:reward") != ""
    assert plugins.fingerprint("python:reward") == ""


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({}, "data: got nothing, allowed: rows, a file"),
        ({"data": 5}, "data: got int, allowed: a path or name, a list of dicts"),
        ({"data": [5]}, "data: row 1: got int, allowed: a dict or a string"),
        ({"data": []}, "got rows from Python with no problem in it"),
        ({"data": [{"text": "a"}]}, "tasks.train: data from Python, row 1: got no prompt"),
        ({"data": ["1+1"]}, "row 1: got neither an answer nor test_cases"),
        ({"data": {"prompt": ["a"], "answer": []}}, "allowed: a list of dicts, or columns of one"),
        ({"data": ROWS, "reward": 5}, "reward: got 5, allowed: a name, a function"),
        ({"data": ROWS, "reward": lambda x: x}, r"reward reward: got a function of \(x\)"),
        (
            {"data": ROWS, "reward": lambda response, level: 0},
            "row 1: got no 'level', which reward reward reads; the record has: gt_answer",
        ),
        ({"data": ROWS, "learning_rate": 1e-5}, "train: got learning_rate=1e-05.* mean lr\\?"),
        ({"data": ROWS, "max_steps": 5}, "did you mean steps\\?"),
        ({"data": ROWS, "reward_funcs": []}, "did you mean reward\\?"),
        ({"data": ROWS, "top_p": 0.9}, r"did you mean settings=\{'sampling.top_p': 0.9\}\?"),
        ({"data": ROWS, "settings": {"trian.lr": 1}}, "unknown key 'trian"),
        ({"data": ROWS, "settings": {"train.lr": object()}}, "settings: got <object"),
        ({"data": ROWS, "steps": 0}, "train.steps: got 0"),
        ({"data": ROWS, "steps": None}, "train.steps: got nothing"),
    ],
)
def test_a_mistake_is_one_line_and_makes_no_run(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message) as caught:
        penstock.train(**{"model": "demo", "steps": 1, **arguments})
    assert "\n" not in str(caught.value)
    assert not Path("runs").exists()


def test_a_config_file_is_a_start(tmp_path: Path) -> None:
    (tmp_path / "two.toml").write_text("[tasks.a]\n[tasks.b]\n[train]\nsteps = 1\n")
    with pytest.raises(UserError, match=r"got data beside two.toml with the tasks a, b"):
        penstock.train(data=ROWS, config="two.toml")
    (tmp_path / "one.toml").write_text("[tasks.math]\n[eval.tasks.test]\n")
    assert api._task_names(ROWS, "one.toml") == ("tasks.math", "eval.tasks.test")


class Frame:
    """What a data frame of pandas looks like."""

    iloc = None

    def to_dict(self, kind: str) -> list[dict[str, Any]]:
        assert kind == "records"
        return [{"prompt": "1+1", "gt_answer": float("nan")}]


@pytest.mark.parametrize(
    ("source", "rows"),
    [
        (["1+1"], [{"prompt": "1+1"}]),
        (iter(ROWS[:1]), ROWS[:1]),
        (
            {"prompt": ["1+1", "2+2"], "n": [1, 2]},
            [{"prompt": "1+1", "n": 1}, {"prompt": "2+2", "n": 2}],
        ),
        (Frame(), [{"prompt": "1+1", "gt_answer": None}]),
    ],
)
def test_rows_of_any_kind_become_lines(tmp_path: Path, source: Any, rows: list[Any]) -> None:
    write_rows(tmp_path / "rows.jsonl", source)
    lines = (tmp_path / "rows.jsonl").read_text().splitlines()
    assert [json.loads(line) for line in lines] == rows


def test_a_dataset_is_rows_and_its_splits_are_refused(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    dataset = datasets.Dataset.from_list(ROWS)
    write_rows(tmp_path / "rows.jsonl", dataset)
    assert len((tmp_path / "rows.jsonl").read_text().splitlines()) == len(ROWS)
    with pytest.raises(UserError, match=r"got the splits train, allowed: one of them, as in data="):
        write_rows(tmp_path / "rows.jsonl", datasets.DatasetDict(train=dataset))


@pytest.mark.slow
def test_a_one_line_program_trains_in_workers(tmp_path: Path) -> None:
    """`python -c`: no file has the lambda, and the workers are processes of their own."""
    code = (
        "import penstock; run = penstock.train('demo', [{'prompt': '1+1'}] * 4, "
        "lambda response: float(len(response)), steps=1, groups_per_step=2, num_generations=2, "
        "max_tokens=6, name='line'); print(len(run.metrics), run.model_path)"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=environment
    )
    assert done.stdout.splitlines()[-1] == "1 runs/line/checkpoints/step-1/model", done.stderr


def test_score_takes_rows_and_a_function() -> None:
    rows = [{"response": "it is 4", "gt_answer": "4"}, {"response": "five", "gt_answer": "4"}]
    scored = penstock.score(rows, lambda response, gt_answer: gt_answer in response)
    assert [row["reward"] for row in scored] == [1.0, 0.0]
    assert penstock.score(rows, "boxed", options={"wrong": -1})[0]["reward"] == -1.0
    with pytest.raises(UserError, match=r"^data from Python, row 1: neither `gt_answer` nor"):
        penstock.score([{"response": "5"}], "boxed")
    with pytest.raises(UserError, match=r"^score: got no line in rows from Python, allowed"):
        penstock.score([])
    chats = [{**row, "prompt": [{"role": "user", "content": "2+2"}]} for row in rows]
    scored = penstock.score(chats, lambda completions: [len(c[0]["content"]) for c in completions])
    assert [row["reward"] for row in scored] == [7.0, 4.0]


def test_help_is_a_page_that_names_every_function() -> None:
    page = pydoc.plain(pydoc.render_doc(penstock))
    for name in ("train", "resume", "evaluate", "generate", "score", "open_run", "class Run"):
        assert name in page
    assert "penstock.train(" in page
    assert len(page.splitlines()) < 250  # two screens of functions, one of the class


# -- the plot of a notebook --------------------------------------------------------------------


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A stand-in for IPython; what its cell shows, in order."""
    shown: list[str] = []
    fake = types.ModuleType("IPython")
    fake.get_ipython = lambda: types.SimpleNamespace(kernel=object())  # type: ignore[attr-defined]
    display = types.ModuleType("IPython.display")
    display.HTML = str  # type: ignore[attr-defined]

    def show(page: str, display_id: bool) -> types.SimpleNamespace:
        shown.append(page)
        return types.SimpleNamespace(update=shown.append)

    display.display = show  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "IPython", fake)
    monkeypatch.setitem(sys.modules, "IPython.display", display)
    return shown


def test_a_notebook_shows_a_plot_that_grows(kernel: list[str], tmp_path: Path) -> None:
    lines = [{"step": step, "reward/mean": step / 10} for step in (1, 2)]
    (tmp_path / "metrics.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    info: Any = types.SimpleNamespace(name="a<b", total_steps=4, first_step=2, folder=tmp_path)
    tracker = console.make_display(info)
    tracker.log_step(3, {"reward/mean": 0.75})
    tracker.log_eval(4, {"eval/math/accuracy": 0.5, "eval/math/reward": 0.5})
    tracker.log_step(4, {"reward/mean": 0.8})
    tracker.close()
    assert "step 2 of 4" in kernel[0]
    last = kernel[-1]
    assert "a&lt;b: step 4 of 4, reward 0.100 → 0.800" in last
    assert last.count("<polyline") == 2
    assert last.count("<circle") == 1
    reward = last.split('points="')[1].split('"')[0].split()
    heights = [float(point.split(",")[1]) for point in reward]
    assert len(heights) == 4
    assert heights == sorted(heights, reverse=True)  # a higher reward is drawn higher


def test_without_a_kernel_the_console_is_used() -> None:
    assert not console.in_notebook()


def test_a_default_that_does_not_fit_the_model_is_lowered_and_said(
    capsys: pytest.CaptureFixture[str],
) -> None:
    shape = {"groups_per_step": 2, "num_generations": 2}
    run = penstock.train(
        "demo", ROWS, lambda response: len(response), steps=1, settings=SMALL, **shape
    )
    assert run.config.sampling.max_tokens == 128
    said = (
        "sampling.max_tokens = 128, lowered from 256: the context of the model demo has 256 tokens"
    )
    assert said in " ".join(capsys.readouterr().err.split())
    with pytest.raises(UserError, match=r"sampling\.max_tokens = 256 are"):
        penstock.train("demo", ROWS, "boxed", steps=1, settings=SMALL, max_tokens=256, **shape)


def lines_of(error: BaseException) -> list[str]:
    return "".join(traceback.format_exception(error)).splitlines()


def test_a_reward_that_cannot_work_is_told_before_anything_starts() -> None:
    def broken(response: str) -> float:
        return 1 / 0

    with pytest.raises(UserError) as caught:
        penstock.train("demo", ROWS, broken, steps=1, settings=SMALL, **TINY)
    line = broken.__code__.co_firstlineno + 1
    assert f"ZeroDivisionError: division by zero ({__file__}:{line})" in str(caught.value)
    assert not Path("runs").exists()


@pytest.mark.slow
def test_a_fault_of_a_run_has_no_inner_traceback() -> None:
    def picky(response: str) -> float:
        raise KeyError("judge")  # of a response, perhaps: the trial lets it pass

    with pytest.raises(
        penstock.PenstockError, match=r"32 groups failed.*KeyError: 'judge'"
    ) as caught:
        penstock.train("demo", ROWS, picky, steps=1, name="ill", settings=SMALL, **TINY)
    assert len(lines_of(caught.value)) < 12
    assert "Exception Group" in Path("runs/ill/logs/traceback.txt").read_text()


def test_a_function_is_an_agent_and_its_prompt_is_shown_with_its_tools() -> None:
    schema = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}

    async def play(task: Any, model: Any) -> float:
        said = await model.chat(list(task.messages), tools=[schema])
        return float(len(said["content"] or ""))

    policy = Path(__file__).parents[1] / "examples" / "calculator" / "policy"
    settings = {**SMALL, "tasks.train.max_prompt_tokens": 40}
    run = penstock.train(policy, ROWS, agent=play, steps=1, name="a", settings=settings, **TINY)
    (sample,) = run.samples(limit=1)
    assert "<tools>" in sample["rendered_prompt"]
    with pytest.raises(UserError, match=r"penstock.resume\(RUN, agent=FUNCTION\)"):
        penstock.resume(run.path, settings={"train.steps": 2})
    later = penstock.resume(run, agent=play, settings={"train.steps": 2})
    assert len(later.metrics) == 2
    shorter = {"eval.tasks.heldout.max_prompt_tokens": 40}
    (judged,) = penstock.evaluate(run.path, ROWS[:1], agent=play, settings=shorter)
    assert judged.turns == 1


def test_a_run_tells_its_findings_its_audit_and_its_table(tmp_path: Path) -> None:
    run = penstock.open_run(make_run(tmp_path / "made", steps=6).path)
    assert isinstance(run.findings(), list)
    assert run.audit()["committed_steps"] == 6
    frame = pytest.importorskip("pandas") and run.to_pandas()
    assert list(frame.index) == [1, 2, 3, 4, 5, 6]
    assert frame["reward/mean"].iloc[0] == run.metrics[0]["reward/mean"]
    assert "<table>" in run._repr_html_()
    assert "made" in run._repr_html_()


def test_demonstrations_come_from_a_config_whose_reward_reads_the_answer() -> None:
    """`penstock sft my-run/train.toml` of a config that `penstock init` wrote missed the field gt_answer."""
    source = "def right(response, gt_answer):\n    return gt_answer in response\n"
    Path("mine.py").write_text(source)
    task = {"tasks.train.rewards": [{"type": "mine.py:right"}]}
    run = penstock.sft("demo", ROWS, steps=1, groups_per_step=1, settings={**SMALL, **task})
    assert "1 step" in repr(run)


def test_a_run_of_demonstrations_counts_its_steps() -> None:
    shown = [{"prompt": "1+1=", "completion": "2"}]
    run = penstock.sft("demo", shown, steps=2, groups_per_step=1, settings=SMALL)
    assert "2 steps" in repr(run)
    again = penstock.train(run, ROWS, steps=1, settings=SMALL, **TINY)
    assert again.config.model.path == str(run.model_path.absolute())


def test_an_on_step_that_fails_is_said_with_its_line(capsys: pytest.CaptureFixture[str]) -> None:
    def on_step(metrics: dict[str, float]) -> None:
        raise RuntimeError("mine")

    penstock.train("demo", ROWS, steps=1, on_step=on_step, settings=SMALL, **TINY)
    line = on_step.__code__.co_firstlineno + 1
    assert f"RuntimeError: mine ({__file__}:{line})" in capsys.readouterr().err


@pytest.mark.slow
def test_an_on_step_that_interrupts_leaves_a_run_that_goes_on() -> None:
    def on_step(metrics: dict[str, float]) -> None:
        raise KeyboardInterrupt

    with pytest.raises(penstock.StopRequested, match=r"^stopped; continue with: penstock resume"):
        penstock.train("demo", ROWS, "boxed", steps=2, name="a", on_step=on_step, settings=SMALL)
    assert len(penstock.resume("a").metrics) == 2


@pytest.mark.slow
def test_a_run_keeps_its_best_checkpoint_and_ends_early(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    worth, steps = {"now": 0.0}, list[float]()

    def on_step(metrics: dict[str, float]) -> None:
        steps.append(metrics["step"])
        worth["now"] = {1: 0.9, 2: 0.5}.get(int(metrics["step"]), 0.4)

    def reward(response: str) -> float:
        return worth["now"]

    run = penstock.train(
        *("demo", ROWS, reward),
        eval_data=ROWS[:2],
        keep_best="heldout/reward",
        early_stop=["heldout/reward >= 1", "heldout/reward stalls 2"],
        on_step=on_step,
        steps=9,
        name="early",
        settings={**SMALL, "eval.every_steps": 1, "eval.blocking": True, "checkpoint.keep": 1},
        **TINY,
    )
    assert steps == [1, 2, 3] == [row["step"] for row in run.metrics]
    assert "ended after step 3: heldout/reward stalls 2" in capsys.readouterr().err
    kept = sorted(path.name for path in (run.path / "checkpoints").iterdir())
    assert kept == ["step-1", "step-3"]
    assert "step 1" in (run.export("best", step="best") / "README.md").read_text()
    with pytest.raises(UserError, match=r"--step: got 2, allowed: .*\(1, 3\)"):
        run.export("other", step=2)
    penstock.resume(run, reward=reward)
    assert "was ended by train.stop_when" in capsys.readouterr().err
    later = penstock.resume(run, reward=reward, settings={"train.stop_when": [], "train.steps": 4})
    assert len(later.metrics) == 4
    capsys.readouterr()
    penstock.resume(run)  # this program has given it the reward
    assert "is finished (4 of 4 steps); go on with: penstock resume" in capsys.readouterr().err
    assert [result.failures for result in penstock.evaluate(run)] == [0]
    monkeypatch.setattr("sys.argv", ["penstock", "generate", "early", "--prompt", "12+34"])
    with pytest.raises(SystemExit) as left:
        cli.main()
    assert not left.value.code
    assert "prompt: 12+34" in capsys.readouterr().out


def test_keeping_the_best_by_a_score_that_no_reward_gives_ends_at_the_first_evaluation() -> None:
    with pytest.raises(UserError, match=r"got 'heldout/accuracy', but .* allowed: heldout/reward"):
        penstock.train(
            *("demo", ROWS, lambda completions, **_: [0.5] * len(completions)),
            eval_data=ROWS[:2],
            keep_best="heldout/accuracy",
            steps=2,
            settings={**SMALL, "eval.every_steps": 1, "eval.blocking": True},
            **TINY,
        )


def test_a_run_that_a_metric_ends_is_evaluated_and_known_to_a_resume(
    capsys: pytest.CaptureFixture[str],
) -> None:
    rule = {"early_stop": "reward/mean <= 1", "eval_data": ROWS[:2]}
    run = penstock.train(*("demo", ROWS, "boxed"), steps=3, settings=SMALL, **rule, **TINY)
    assert [row["step"] for row in run.evaluations] == [0, 1]  # the start and the end
    assert len(penstock.resume(run).metrics) == 1
    assert "was ended by train.stop_when (reward/mean <= 1)" in capsys.readouterr().err


def test_an_agent_of_this_program_that_other_processes_would_import_is_refused() -> None:
    async def waits(task: Any, model: Any) -> float:
        return 1.0

    for agent, options in ((lambda task, model: 1.0, {}), (waits, {"processes": 2})):
        with pytest.raises(UserError, match=r"tasks.train.agent: got 'python:.* allowed: an async"):
            penstock.train(
                "demo", ROWS, agent=agent, steps=1, settings={"tasks.train.agent_options": options}
            )

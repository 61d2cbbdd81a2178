"""A run folder of a stranger is safe to look at, and executes nothing that the user did not allow."""

from __future__ import annotations

import contextlib
import os
import pty
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from penstock import cli
from penstock.config import plugins
from penstock.config.source import load_config, to_toml
from penstock.errors import UserError
from penstock.store import trust
from penstock.store.journal import Journal
from penstock.store.run_folder import RunFolder, create
from stages.dashboard_server import serving
from stages.hostile_run import add_checkpoint
from stages.made_run import make_run
from stages.made_timeline import make_timeline
from stages.tiny_run import TINY

PWNED = "from pathlib import Path\nPath(__file__).with_name('pwned').touch()\n"
LOOKS = [
    "audit",
    "doctor",
    "report",
    "rollouts",
    "timeline",
    "backup",
    "export",
    "config",
    "generate",
    "score",
    "scale",
    "runs",
    "compare",
    "dashboard",
    "simulate",
]


def penstock(monkeypatch: pytest.MonkeyPatch, *words: str) -> int:
    monkeypatch.setattr("sys.argv", ["penstock", *words])
    with pytest.raises(SystemExit) as left:
        cli.main()
    return int(left.value.code or 0)


def strangers_run(path: Path) -> RunFolder:
    """Return a run whose every part is code of its own, with the code beside it."""
    folder = make_run(path, steps=2, groups_per_step=2)
    evil = path / "evil.py"
    evil.write_text(f"{PWNED}def score(rollout, prompt):\n    return 1.0\nThing = score\n")
    model = path / "model"
    shutil.copytree(Path(cli.__file__).parent / "config" / "demo" / "policy", model)
    (model / "modeling.py").write_text(PWNED)
    own = f"{evil}:Thing"
    words = [
        f"algorithm.name={own}",
        f"produce.strategy={own}",
        f"produce.is_valid_sample={own}",
        f"tasks.train.agent={own}",
        f"tasks.train.rewards=[{{type='{evil}:score'}}]",
        f"eval.tasks.train.rewards=[{{type='{evil}:score'}}]",
        f"track.trackers=['{own}']",
        f"engine.name={own}",
        f"model.path={model}",
        "model.trust_remote_code=true",
        "launch.kind=inline",
    ]
    config = load_config(folder.path / "config.toml", words).config
    (path / "config.toml").write_text(to_toml(config))
    journal = Journal.open(folder.journal)
    journal.record_identity({"config": config.model_dump_json()})
    journal.close()
    add_checkpoint(folder)
    make_timeline(folder)
    (folder.checkpoints / "step-2" / "consumer.pt").write_bytes(b"a pickle")
    return folder


@pytest.fixture
def stranger(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunFolder:
    monkeypatch.chdir(tmp_path)
    return strangers_run(tmp_path / "theirs")


def was_executed(folder: RunFolder) -> bool:
    return bool(list(folder.path.rglob("pwned")))


@pytest.mark.parametrize("command", LOOKS)
def test_no_look_executes_code_of_the_run(
    stranger: RunFolder, command: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, file = str(stranger.path), str(stranger.path / "config.toml")
    more = {
        "generate": [file, "--prompt", "1+1"],
        "config": [file],
        "scale": [run, "producers=2"],
        "score": [run, "--reward", "boxed"],
        "runs": [str(stranger.path.parent)],
        "compare": [run, run],
        "simulate": ["--profile", run, "--steps", "2"],
        "export": [run, "--to", str(stranger.path.parent / "exported"), "--adapter"],
    }
    monkeypatch.setattr(torch, "load", lambda *_, **__: pytest.fail("loaded a pickle"))
    if command == "dashboard":
        look_at_every_view(stranger.path.parent)
    else:
        penstock(monkeypatch, command, *more.get(command, [run]))
    assert not was_executed(stranger)


def test_a_look_asks_no_server_for_the_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A run's config may name any model; its tokenizer is not asked of a server."""
    folder = make_run(tmp_path / "theirs", steps=1, groups_per_step=1)
    config = load_config(None, ["model.path=stranger/model"]).config
    (folder.path / "config.toml").write_text(to_toml(config))
    connected: list[object] = []
    monkeypatch.setattr(socket, "getaddrinfo", lambda *words, **_: connected.append(words) or [])
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    assert penstock(monkeypatch, "rollouts", str(folder.path)) == 0, capsys.readouterr().err
    assert len(connected) <= 1  # huggingface_hub asks for a list of its own


def look_at_every_view(folder: Path) -> None:
    with serving(folder) as client:
        run = client.lines()["theirs"]["id"]
        for view in ("overview", "samples", "pairs", "journal", "timeline"):
            client.read(f"/api/run/{run}/{view}")
        assert client.read(f"/api/compare?runs={run},{run}")["comparisons"]
        assert client.ask(f"/report/{run}")[0] == 200


def test_every_command_is_a_look_or_asks() -> None:
    from stages.command_line import commands, options

    asks = {words for words, command in commands().items() if "--trust" in options(command)}
    assert asks == {
        *("train", "check", "resume", "replay", "eval", "agent check", "generate", "chat", "sft"),
        "serve",
    }
    others = {words for words in commands() if not words.startswith("sandbox")} - asks
    assert others <= set(LOOKS) | set(READS_NO_RUN)


READS_NO_RUN = ("init", "convert", "rm", "version")


def test_a_service_of_a_strangers_config_asks(
    stranger: RunFolder, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert penstock(monkeypatch, "serve", str(stranger.path / "config.toml")) == 2
    assert f"execute {stranger.path}/evil.py" in capsys.readouterr().err
    assert not was_executed(stranger)


@pytest.mark.slow
@pytest.mark.parametrize("command", ["train", "check", "resume", "replay", "eval"])
def test_a_command_that_would_execute_it_names_it_and_stops(
    stranger: RunFolder,
    command: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    what = stranger.path / "config.toml" if command in ("train", "check", "eval") else stranger.path
    assert penstock(monkeypatch, command, str(what)) == 2
    said = capsys.readouterr().err
    assert f"execute {stranger.path}/evil.py" in said
    assert "--trust" in said
    assert len(said.strip().splitlines()) == 1
    assert not was_executed(stranger)
    with contextlib.suppress(AttributeError):  # what it names is no engine
        penstock(monkeypatch, command, str(what), "--trust")
    assert was_executed(stranger)


ODD_NAMES = [  # how a name can hide that it is one
    "{file}:sc-ore",
    "{file}:score.more",
    "{file}:sc ore",
    "{file}:",
    "{folder}/ev\nil.py:score",
    " evil:score",
]


@pytest.mark.parametrize("name", ODD_NAMES)
def test_an_odd_name_is_refused_before_it_is_imported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.chdir(tmp_path)
    for file in (tmp_path / "evil.py", tmp_path / "ev\nil.py"):
        file.write_text(PWNED)
    with pytest.raises(UserError, match="allowed"):
        plugins.load("reward", name.format(file=tmp_path / "evil.py", folder=tmp_path), {})
    assert not (tmp_path / "pwned").exists()


NAMES = st.tuples(
    st.text("aé./ -\n", max_size=9), st.sampled_from(["", ".py"]), st.text("aé. -", max_size=5)
).map(lambda parts: f"{parts[0]}{parts[1]}:{parts[2]}")


DEMO = load_config(None, []).config


@pytest.mark.slow
@given(st.one_of(st.text(max_size=30), NAMES))
def test_what_can_be_loaded_is_asked_about(name: str) -> None:
    """Every name that `load` would import is listed, so no stranger's name is imported unasked."""
    if name.startswith(plugins.PYTHON):
        return  # an object that the program itself gives
    try:
        plugins.check_name("reward", name, {})
    except UserError:
        return
    task = DEMO.tasks["train"]
    rewards = [task.rewards[0].model_copy(update={"type": name})]
    tasks = {"train": task.model_copy(update={"rewards": rewards})}
    assert f"execute {name}" in trust.acts_of(DEMO.model_copy(update={"tasks": tasks}))


def own_run(tmp_path: Path, *overrides: str) -> RunFolder:
    code = tmp_path / "mine.py"
    code.write_text("def score(rollout, prompt):\n    return 1.0\n")
    words = [f"run.dir={tmp_path}", f"tasks.train.rewards=[{{type='{code}:score'}}]", *overrides]
    return create(load_config(None, words).config)


def is_own(folder: RunFolder) -> bool:
    try:
        trust.check(folder.path, [era.config for era in folder.eras()])
    except UserError:
        return False
    return True


def test_a_run_of_ones_own_stays_so_after_an_edit_of_its_code_a_move_or_a_copy(
    tmp_path: Path,
) -> None:
    data = tmp_path / "rows.jsonl"
    data.write_text('{"prompt": "1+1", "answer": "2"}\n')
    config = load_config(None, [f"run.dir={tmp_path}", f"tasks.train.data={data}"]).config
    folder = create(config, own_data=[data])
    assert is_own(folder)
    assert is_own(own_run(tmp_path))
    (tmp_path / "mine.py").write_text("def score(rollout, prompt):\n    return 2.0\n")
    moved = RunFolder(folder.path.rename(tmp_path / "moved"))
    assert is_own(moved)
    shutil.copytree(moved.path, tmp_path / "copied")
    assert is_own(RunFolder(tmp_path / "copied"))


def test_another_user_or_machine_is_asked_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = own_run(tmp_path)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "other home"))
    assert not is_own(folder)
    trust.check(folder.path, [folder.config()], trust=True)
    assert is_own(RunFolder(folder.path.rename(tmp_path / "renamed")))
    state = tmp_path / "other home" / "penstock" / "own-runs"
    assert state.stat().st_mode & 0o777 == 0o600
    assert state.parent.stat().st_mode & 0o777 == 0o700


def test_without_a_state_folder_a_run_can_be_made_and_is_asked_about(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "file"))
    folder = own_run(tmp_path)
    assert not is_own(folder)
    trust.check(folder.path, [folder.config()], trust=True)


@pytest.mark.parametrize(
    ("overrides", "act"),
    [
        (["algorithm.name=os:system"], "execute os:system"),
        (["launch.kind=ray", "launch.address=evil:6379"], "join the Ray cluster evil:6379"),
        (["engine.options.urls=['http://evil:1']"], "connect to http://evil:1"),
        (["engine.options.api_key_variable=MY_KEY"], "send the environment variable MY_KEY"),
        (["engine.options.weights_folder=/home/me"], "write to the folder /home/me"),
        (["tasks.train.agent_options.tools=['stages.rewards:x']"], "execute stages.rewards:x"),
        (
            ["tasks.train.agent=command", "tasks.train.agent_options.command=['rm', 'a b']"],
            "run rm 'a b'",
        ),
        (["tasks.train.agent_options.python=/theirs/bin/python"], "run /theirs/bin/python"),
        (["model.path=a/b", "model.trust_remote_code=true"], "code that comes with the model a/b"),
    ],
)
def test_what_a_changed_copy_of_ones_own_run_adds_is_asked_about(
    tmp_path: Path, overrides: list[str], act: str
) -> None:
    folder = own_run(tmp_path)
    changed = load_config(folder.path / "config.toml", overrides).config
    (folder.path / "config.toml").write_text(to_toml(changed))
    with pytest.raises(UserError) as refused:
        trust.check(folder.path, [folder.config()])
    assert act in str(refused.value)


CODE_INSIDE = [
    "reward.py",
    "helper.py",
    "pkg/__init__.py",
    "pkg/more.py",
    "pkg/native.so",
    "tool/x",
]


@pytest.mark.parametrize("changed", CODE_INSIDE)
@pytest.mark.parametrize("how", ["changed", "added"])
def test_all_code_inside_the_folder_is_part_of_what_was_allowed(
    tmp_path: Path, changed: str, how: str
) -> None:
    folder = own_run(tmp_path)
    for name in CODE_INSIDE:
        (folder.path / name).parent.mkdir(exist_ok=True)
        (folder.path / name).write_text("x = 1")
    words = [
        f"tasks.train.rewards=[{{type='{folder.path}/reward.py:f'}}]",
        f"tasks.train.agent_options.command=['sh', '{folder.path}/tool/x']",
    ]
    config = load_config(None, words).config
    (folder.path / "config.toml").write_text(to_toml(config))
    trust.remember(folder.path, config)
    assert is_own(folder)
    file = folder.path / changed
    (file if how == "changed" else file.with_stem(f"{file.stem}2")).write_text(PWNED)
    assert not is_own(folder)


def test_a_module_of_another_working_folder_is_asked_about(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stranger's project with an unchanged copy of one's own run beside another module of that name."""
    mine, theirs = tmp_path / "mine", tmp_path / "theirs"
    for folder in (mine, theirs):
        folder.mkdir()
        (folder / "rewards.py").write_text(PWNED)
    monkeypatch.chdir(mine)
    run = own_run(mine, "tasks.train.rewards=[{type='rewards:score'}]")
    assert is_own(run)
    monkeypatch.chdir(theirs)
    assert not is_own(run)
    monkeypatch.chdir(tmp_path)
    assert is_own(run)


def test_copies_of_the_models_code_in_checkpoints_are_ones_own(tmp_path: Path) -> None:
    model = tmp_path / "model"
    shutil.copytree(Path(cli.__file__).parent / "config" / "demo" / "policy", model)
    (model / "modeling.py").write_text("x = 1")
    folder = own_run(tmp_path, f"model.path={model}", "model.trust_remote_code=true")
    shutil.copytree(model, folder.checkpoints / "step-1" / "model")
    assert is_own(folder)
    (folder.checkpoints / "step-1" / "model" / "modeling.py").write_text(PWNED)
    assert not is_own(folder)


# -- the whole way, as a user goes it ----------------------------------------------------------


@pytest.mark.slow
def test_train_and_resume_with_code_of_ones_own_ask_nothing_and_a_foreign_copy_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("mine.py").write_text("def score(rollout, prompt):\n    return float(rollout.seed % 2)\n")
    words = [word for word in TINY if "rewards" not in word]
    own = "tasks.train.rewards=[{type='mine.py:score'}]"
    assert penstock(monkeypatch, "train", *words, own, "train.steps=1", "run.name=r") == 0
    assert penstock(monkeypatch, "resume", "r", "train.steps=2") == 0
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "elsewhere"))
    capsys.readouterr()
    assert penstock(monkeypatch, "resume", "r", "train.steps=3") == 2
    assert f"would execute {tmp_path / 'mine.py'}:score" in capsys.readouterr().err
    assert penstock(monkeypatch, "resume", "r", "train.steps=3", "--trust") == 0
    assert (
        penstock(monkeypatch, "eval", "r", "eval.tasks.e.data=addition", "eval.max_problems=1") == 0
    )


@pytest.mark.parametrize(
    ("answer", "executed"), [pytest.param("y\n", True, marks=pytest.mark.slow), ("\n", False)]
)
def test_on_a_terminal_the_user_is_asked(stranger: RunFolder, answer: str, executed: bool) -> None:
    ours, theirs = pty.openpty()
    config = stranger.path / "config.toml"
    words = [sys.executable, "-m", "penstock.cli", "train", str(config)]
    process = subprocess.Popen(words, stdin=theirs, stderr=theirs, stdout=subprocess.DEVNULL)
    os.close(theirs)
    said = b""
    while b"[y/N]" not in said:
        said += os.read(ours, 4096)
    assert f"execute {stranger.path}/evil.py".encode() in said
    os.write(ours, answer.encode())
    while True:  # until the process has closed its end
        try:
            if not os.read(ours, 4096):
                break
        except OSError:
            break
    process.wait()
    os.close(ours)
    assert was_executed(stranger) == executed


# -- links and odd files -----------------------------------------------------------------------


@pytest.fixture
def victim(tmp_path: Path) -> Path:
    (tmp_path / "home").mkdir()
    path = tmp_path / "home" / "precious"
    path.write_text("precious")
    return path


@pytest.mark.parametrize("name", ["report.html", ".report.html.draft", ".report.html.partial"])
def test_a_report_is_never_written_through_a_link(
    tmp_path: Path, victim: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = make_run(tmp_path / "run", steps=2, groups_per_step=2)
    (folder.path / name).symlink_to(victim)
    assert penstock(monkeypatch, "report", str(folder.path)) == 0
    assert victim.read_text() == "precious"
    assert "<html" in (folder.path / "report.html").read_text()


@pytest.mark.parametrize("name", ["timeline/trace.json", "timeline/.trace.json.draft", "timeline"])
def test_a_trace_is_never_written_through_a_link(
    tmp_path: Path, victim: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = make_run(tmp_path / "run", steps=2, groups_per_step=2)
    events = victim.parent if name == "timeline" else folder.path / "timeline"
    events.mkdir(exist_ok=True)
    (events / "events.jsonl").write_text('{"lane": "a", "what": "b", "start": 1, "end": 2}\n')
    (folder.path / name).symlink_to(victim.parent if name == "timeline" else victim)
    code = penstock(monkeypatch, "timeline", str(folder.path))
    assert code == (2 if name == "timeline" else 0)
    assert victim.read_text() == "precious"
    assert not (victim.parent / "trace.json").exists()


@pytest.mark.parametrize("name", ["lock", "metrics.jsonl", "logs", "checkpoints", "control"])
@pytest.mark.parametrize("command", ["resume", "replay"])
def test_a_run_whose_links_lead_out_is_not_continued(
    tmp_path: Path,
    victim: Path,
    name: str,
    command: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    folder = make_run(tmp_path / "run", steps=2, groups_per_step=2)
    (folder.path / name).unlink(missing_ok=True)
    (folder.path / name).symlink_to(victim.parent if name in ("logs", "checkpoints") else victim)
    assert penstock(monkeypatch, command, str(folder.path)) == 2
    assert name in capsys.readouterr().err
    assert victim.read_text() == "precious"
    assert os.listdir(victim.parent) == ["precious"]


def test_a_backup_copies_a_link_as_a_link(
    tmp_path: Path, victim: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = make_run(tmp_path / "run", steps=2, groups_per_step=2)
    (folder.path / "rollouts.jsonl").unlink()
    (folder.path / "rollouts.jsonl").symlink_to(victim)
    assert penstock(monkeypatch, "backup", str(folder.path), str(tmp_path / "copy")) == 0
    assert (tmp_path / "copy" / "rollouts.jsonl").is_symlink()


def test_a_pipe_in_a_run_folder_does_not_hang_a_look(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = make_run(tmp_path / "run", steps=2, groups_per_step=2)
    folder.metrics.unlink()
    os.mkfifo(folder.metrics)
    assert penstock(monkeypatch, "report", str(folder.path)) == 2
    assert "is a pipe" in capsys.readouterr().err


def test_scale_talks_only_to_a_socket_of_this_user(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import socket

    folder = make_run(tmp_path / "run", steps=2, groups_per_step=2)
    foreign = tmp_path / "foreign"
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(foreign))
        listening.listen()
        (folder.path / "control").write_text(str(foreign))
        assert penstock(monkeypatch, "scale", str(folder.path), "producers=2") == 2
        listening.setblocking(False)
        with pytest.raises(BlockingIOError):
            listening.accept()
    assert "no driver that answers" in capsys.readouterr().err

"""The dashboard's server: what it tells of runs, whom it refuses, and that a look changes nothing."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
import shutil
import signal
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from penstock.errors import UserError
from penstock.inspection.compare import TRAINING, first_and_last
from penstock.inspection.dashboard import views
from penstock.inspection.dashboard.server import TOKEN_VARIABLE, serve
from penstock.inspection.dashboard.views import ShownRun, ShownRuns, odd_file
from penstock.inspection.record import RunLine, RunRecord, read_run
from penstock.store.journal import Journal
from penstock.store.run_folder import RunFolder
from stages.dashboard_server import Client, serving
from stages.made_run import GROUP_SIZE, make_run, metrics_of
from stages.made_service import MadeService


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("runs")
    make_run(root / "a", steps=4, groups_per_step=3)
    make_run(root / "b", steps=3, groups_per_step=2, seed=5)
    return root


@pytest.fixture
def client(folder: Path) -> Iterator[Client]:
    with serving(folder) as client:
        yield client


def path_of(client: Client, name: str, view: str) -> str:
    return f"/api/run/{client.lines()[name]['id']}/{view}"


# -- the list ----------------------------------------------------------------------------------


def test_the_list_tells_how_each_run_is_and_then_every_change(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(views, "_REST", 0)
    runs = tmp_path / "runs"
    shutil.copytree(folder, runs)
    for name in ("killed", "stopped"):
        shutil.copytree(runs / "a", runs / name)
        (runs / name / "metrics.jsonl").write_text('{"step": 2, "reward/mean": 0.5}\n')
    (runs / "killed" / "lock").write_text("4711")
    (runs / "stopped" / "lock").write_text("")
    (runs / "no-run").mkdir()
    with RunFolder(runs / "b").lock(), serving(runs) as client:
        lines = client.lines()
        states = {name: line["state"] for name, line in lines.items()}
        expected = {"a": "finished", "b": "training", "killed": "killed", "stopped": "stopped"}
        assert states == expected
        assert lines["a"]["held_out"].startswith("heldout accuracy 0.3")
        assert lines["a"]["rewards"] == [
            pytest.approx(row["reward/mean"], abs=1e-4) for row in metrics_of(RunFolder(runs / "a"))
        ]
        with (runs / "stopped" / "metrics.jsonl").open("a") as file:
            file.write('{"step": 3, "reward/mean": 0.75}\n')
        stopped = client.lines()["stopped"]
        assert (stopped["steps"], stopped["reward"]) == (3, 0.75)
        (runs / "killed").rename(tmp_path / "gone")
        assert client.lines().keys() == {"a", "b", "stopped"}


def test_many_runs_are_listed_a_second_at_a_time(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(views, "_LOOK_S", -1.0)
    runs = ShownRuns(folder)
    assert runs.look() == {"runs": [], "complete": False}
    monkeypatch.setattr(views, "_LOOK_S", 60.0)
    assert [line["name"] for line in runs.look()["runs"]] == ["b", "a"]


def test_a_run_that_is_removed_while_it_is_read_is_gone_and_not_half_a_run(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(folder, tmp_path / "runs")
    runs = ShownRuns(tmp_path / "runs")
    assert {line["name"] for line in runs.look()["runs"]} == {"a", "b"}

    def read(run: RunFolder) -> RunLine:
        if run.path.name == "b":
            run.path.rename(tmp_path / "gone")
        return RunLine(name=run.name, state="training")

    monkeypatch.setattr(views, "_REST", 0)
    monkeypatch.setattr(views, "read_line", read)
    for name in ("a", "b"):
        with (tmp_path / "runs" / name / "metrics.jsonl").open("a") as file:
            file.write('{"step": 99, "reward/mean": 0.5}\n')
    for _ in range(2):
        assert [line["name"] for line in runs.look()["runs"]] == ["a"]


def test_a_folder_that_is_a_run_is_shown_alone(folder: Path) -> None:
    with serving(folder / "b") as client:
        assert client.lines().keys() == {"b"}


def test_a_value_is_read_again_only_after_a_change_and_a_rest(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = ShownRun("id", RunFolder(folder / "a"))
    now, worked, versions = [100.0], [0.0], ["1"]
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    monkeypatch.setattr("time.thread_time", lambda: worked[0])
    monkeypatch.setattr(ShownRun, "version", lambda self: versions[0])
    read: list[float] = []

    def reading(_: RunFolder) -> int:
        worked[0] += 0.5
        read.append(now[0])
        return len(read)

    assert run.value("x", reading) == (1, 0.0)
    assert run.value("x", reading) == (1, 0.0)
    versions[0] = "2"
    now[0] += 4.0
    assert run.value("x", reading) == (1, 6.0)  # it took 0.5 s: it rests for 10 s
    now[0] += 6.0
    assert run.value("x", reading) == (2, 0.0)


# -- views -------------------------------------------------------------------------------------


def test_the_overview_is_the_record_of_the_run(client: Client, folder: Path) -> None:
    found = client.read(path_of(client, "a", "overview"))
    record = read_run(RunFolder(folder / "a"))
    assert found["curves"] == record.curves
    assert found["steps"] == record.steps == [1, 2, 3, 4]
    assert {int(k): v for k, v in found["staleness"].items()} == record.staleness
    assert found["figures"]["dropped"] == 3


def test_a_long_run_is_thinned_and_keeps_its_means_and_extremes() -> None:
    values: list[float | None] = [float(i % 7) for i in range(10_001)]
    values[5000], values[17] = 99.0, None
    steps = list(range(1, 10_002))
    record = RunRecord(name="", path="", steps=steps, curves={"reward/mean": values})
    thinned, curves, spread = views.thin(record)
    low, high = spread["reward/mean"]
    assert len(thinned) == len(curves["reward/mean"]) == len(low) == views.MOST_POINTS
    assert thinned[-1] == 10_001
    assert max(value for value in high if value is not None) == 99.0
    assert min(value for value in low if value is not None) == 0.0
    mean = sum(value for value in curves["reward/mean"] if value is not None) / views.MOST_POINTS
    assert mean == pytest.approx(3.0, abs=0.05)
    short = RunRecord(name="", path="", steps=steps[:9], curves={"reward/mean": values[:9]})
    assert views.thin(short) == (steps[:9], {"reward/mean": values[:9]}, {})


def test_samples_are_grouped_by_prompt_ranked_and_can_be_chosen(client: Client) -> None:
    path = path_of(client, "a", "samples")
    found = client.read(f"{path}?step=2")
    assert len(found["groups"]) == 3
    assert (found["more"], found["last_step"], found["tasks"]) == (False, 4, ["train"])
    for group in found["groups"]:
        rewards = [answer["reward"] for answer in group["answers"]]
        assert rewards == sorted(rewards, reverse=True)
        assert len(rewards) == GROUP_SIZE
        assert {answer["step"] for answer in group["answers"]} == {2}
    first = client.read(path)
    rest = client.read(f"{path}?offset={len(first['groups'])}")
    ids = [group["group_id"] for group in (*first["groups"], *rest["groups"])]
    assert first["more"]
    assert len(set(ids)) == 12
    answer = found["groups"][0]["answers"][0]["response"]
    words = answer[answer.index("<answer>") :].upper()
    chosen = client.read(f"{path}?words={words.replace('<', '%3C').replace('>', '%3E')}")
    texts = [[a["response"] for a in group["answers"]] for group in chosen["groups"]]
    assert texts
    assert all(any(words.lower() in text for text in group) for group in texts)
    dropped = client.read(f"{path}?state=dropped")["groups"]
    assert [group["answers"][0]["state"] for group in dropped] == ["dropped"] * 3
    assert client.read(f"{path}?state='%20OR%201=1--&order=;DROP")["groups"] == first["groups"]


def test_the_first_and_the_last_answer_to_a_prompt_are_paired(folder: Path, tmp_path: Path) -> None:
    runs = tmp_path / "runs"
    shutil.copytree(folder, runs)
    for step, right in ((0, [0, 1, 0]), (2, [1, 1, 1]), (4, [1, 0, 0])):
        lines = [
            {
                "prompt_id": f"p{number}",
                "prompt": [{"role": "user", "content": f"question {number}"}],
                "prediction": f"answer at {step}",
                "ans_valid": bool(one),
                "reward": float(one),
            }
            for number, one in enumerate(right)
        ]
        text = "".join(f"{json.dumps(line)}\n" for line in lines)
        (runs / "a" / "eval" / f"heldout-step-{step}.jsonl").write_text(text)
    with serving(runs) as client:
        [found] = client.read(path_of(client, "a", "pairs"))["comparisons"]
    assert (found["task"], found["pairs"]) == ("heldout", 3)
    assert (found["second_wins"], found["first_wins"]) == (1, 1)
    better, worse, equal = found["examples"]
    assert [answer["step"] for answer in better] == [0, 4]
    assert better[0]["prompt"] == "question 0"
    assert better[1]["response"] == "answer at 4"
    assert (worse[0]["prompt"], equal[0]["prompt"]) == ("question 1", "question 2")


def test_prompts_that_were_trained_twice_are_paired(folder: Path, tmp_path: Path) -> None:
    run = RunFolder(shutil.copytree(folder / "a", tmp_path / "a"))
    with sqlite3.connect(run.journal) as database:  # the second epoch of one prompt
        database.execute(
            "UPDATE group_rows SET prompt_id = 'addition:0' WHERE step = 4 AND position = 0"
        )
    [found] = first_and_last(run)
    [(first, last)] = found.examples
    assert (found.task, first.step, last.step) == (TRAINING, 1, 4)
    assert first.prompt == last.prompt


def test_the_journal_view_balances_and_names_the_newest_events(client: Client) -> None:
    found = client.read(path_of(client, "a", "journal"))
    counts = found["counts"]["train"]
    states = ("in_flight", "buffered", "trained", "dropped")
    assert counts["drawn"] == sum(counts[state] for state in states) == 17
    assert found["drops"]["train"] == {"filtered": 1, "expired": 1, "failed": 1}
    assert found["events"][0]["at"] >= found["events"][-1]["at"]


def test_the_timeline_shows_busy_and_waiting_shares_and_zooms(folder: Path, tmp_path: Path) -> None:
    run = RunFolder(shutil.copytree(folder / "a", tmp_path / "a"))
    assert views.timeline(*views.read_lanes(run), 0, 0) == {"lanes": []}
    (run.path / "timeline").mkdir()
    events = [
        {"lane": "run", "what": "session", "start": 100.0, "end": 100.0},
        {"lane": "trainer", "what": "train", "start": 100.0, "end": 120.0},
        {"lane": "trainer", "what": "train", "start": 110.0, "end": 130.0},
        {"lane": "engine-0", "what": "generate", "start": 100.0, "end": 140.0},
        {"lane": "engine-0", "what": "wait", "start": 140.0, "end": 160.0},
    ]
    lines = [*map(json.dumps, events), '{"lane": "tra']
    (run.path / "timeline" / "events.jsonl").write_text("\n".join(lines))
    read = views.read_lanes(run)
    whole = views.timeline(*read, 0, 0)
    assert (whole["start"], whole["end"], whole["total"]) == (0.0, 60.0, 60.0)
    trainer, engine = whole["lanes"]
    slots = len(trainer["busy"])
    assert (trainer["name"], trainer["busy"]) == (
        "trainer",
        [100] * (slots // 2) + [0] * (slots // 2),
    )
    assert engine["waiting"].count(100) == slots // 3
    part = views.timeline(*read, 25.0, 35.0)
    assert part["lanes"][0]["busy"] == [100] * (slots // 2) + [0] * (slots // 2)
    assert part["lanes"][1]["busy"] == [100] * slots


def test_the_timeline_leaves_out_the_pause_between_two_sessions(
    folder: Path, tmp_path: Path
) -> None:
    run = RunFolder(shutil.copytree(folder / "a", tmp_path / "a"))
    (run.path / "timeline").mkdir()
    events = [
        {"lane": "run", "what": "session", "start": 100.0, "end": 100.0},
        {"lane": "trainer", "what": "train", "start": 100.0, "end": 130.0},
        {"lane": "run", "what": "session", "start": 90_000.0, "end": 90_000.0},
        {"lane": "trainer", "what": "train", "start": 90_000.0, "end": 90_030.0},
    ]
    (run.path / "timeline" / "events.jsonl").write_text("\n".join(map(json.dumps, events)))
    whole = views.timeline(*views.read_lanes(run), 0, 0)
    assert (whole["total"], whole["sessions"]) == (60.0, 2)
    assert set(whole["lanes"][0]["busy"]) == {100}


def test_runs_are_compared_with_the_settings_that_differ(client: Client) -> None:
    ids = [line["id"] for _, line in sorted(client.lines().items())]
    found = client.read(f"/api/compare?runs={','.join(ids)}")
    settings = {row["key"]: row["values"] for row in found["settings"]}
    assert settings == {
        "seed": ["0", "5"],
        "train.groups_per_step": ["3", "2"],
        "train.steps": ["4", "3"],
    }
    [one] = found["comparisons"]
    assert (one["run"], one["task"]) == (1, "training prompts")


def test_a_report_is_made_without_a_file(client: Client, folder: Path) -> None:
    with serving(folder) as other:
        run = other.lines()["a"]["id"]
    status, body, headers = client.ask(f"/report/{run}")  # the address was kept
    assert status == 200
    assert b"Penstock report" in body
    assert headers["Content-Type"].startswith("text/html")
    assert not (folder / "a" / "report.html").exists()


def test_damage_is_a_sentence_and_the_other_runs_are_shown(folder: Path, tmp_path: Path) -> None:
    runs = tmp_path / "runs"
    shutil.copytree(folder, runs)
    (runs / "a" / "journal.db").write_bytes(b"SQLite format 3\0" + b"x" * 9000)
    with serving(runs) as client:
        lines = client.lines()
        assert {name: line["state"] for name, line in lines.items()} == {
            "a": "damaged",
            "b": "finished",
        }
        status, body, _ = client.ask(f"/api/run/{lines['a']['id']}/samples")
        assert status == 409
        assert b"damaged" in body
        assert client.read(f"/api/run/{lines['b']['id']}/samples")["groups"]


@pytest.mark.parametrize(
    ("row", "state"),
    [
        ('{"step": 4, "reward/mean": NaN, "findings/open": Infinity}', "finished"),
        ('{"step": 4, "findings/open": "many"}', "finished"),
        ("[" * 100_000, "stopped"),
    ],
)
def test_numbers_that_are_none_do_not_end_the_list(
    folder: Path, tmp_path: Path, row: str, state: str
) -> None:
    runs = tmp_path / "runs"
    shutil.copytree(folder, runs)
    (runs / "a" / "metrics.jsonl").write_text(f"{row}\n")
    with serving(runs) as client:
        lines = client.lines()
        assert (lines["a"]["state"], lines["b"]["state"]) == (state, "finished")
        json.dumps(lines, allow_nan=False)  # a browser reads no NaN
        assert client.lines().keys() == {"a", "b"}  # the server is alive


def test_a_run_may_go_while_it_is_read(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):  # which the list takes for "gone"
        ShownRun("id", RunFolder(tmp_path / "gone")).renew()


# -- services ----------------------------------------------------------------------------------


def test_a_service_is_listed_and_its_page_has_models_queues_and_losses(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also those whose requests and answers were emptied, and nothing is written by looking."""
    monkeypatch.setattr(views, "_REST", 0)
    runs = tmp_path / "runs"
    folder = RunFolder(runs / "mine")
    made = MadeService(folder.path)
    key, other = "a" * 16, "b" * 16
    first, second = made.model(key), made.model(other, rank=0)
    made.step(first, 1, key, loss=9.5, norm=3.0)
    made.step(first, 3, key, loss=float("nan"), norm=2.0)
    made.log.empty("line = ?", (first,))
    made.fail(second, 1, other, "load_weights", "path: got nothing")
    for seq in range(2, 14):
        made.wait(second, seq, other, "forward_backward")
    with folder.lock(), serving(runs) as client:
        before = everything(runs)
        line = client.lines()["mine"]
        assert (line["state"], line["rewards"]) == ("serving", [])
        assert line["service"] == {
            **{"model": "demo", "models": 2, "waiting": 12, "last": "forward_backward"}
        }
        path = path_of(client, "mine", "overview")
        found = client.read(path)
        newest, oldest = found["models"]
        shown = ("name", "owner", "rank", "optimizer_steps", "done", "failed", "waiting")
        assert [newest[name] for name in shown] == [second, "b" * 8, 0, 0, 0, 1, 12]
        assert [oldest[name] for name in shown] == [first, "a" * 8, 8, 2, 4, 0, 0]
        assert oldest["steps"] == [1, 2, 3, 4]
        assert oldest["curves"] == {
            "loss:sum": [9.5, None, None, None],
            "grad_norm": [None, 3.0, None, 2.0],
        }
        [queue] = found["queues"]
        assert (queue["owner"], queue["waiting"], len(queue["first"])) == ("b" * 8, 12, 8)
        assert queue["first"][0]["name"] == f"{second}#2"
        failed = [row["why"] for row in found["commands"] if row["outcome"] == "failed"]
        assert failed == ["path: got nothing"]
        after = everything(runs)
        before.pop("mine/commands.db-shm"), after.pop("mine/commands.db-shm")
        assert after == before
        made.step(first, 5, key, loss=8.0, norm=1.0)
        assert client.lines()["mine"]["version"] != line["version"]
        assert client.read(path)["models"][1]["curves"]["loss:sum"][-2:] == [8.0, None]
        for query in (f"/report/{line['id']}", path.replace("overview", "journal")):
            assert client.ask(query)[0] == 409
    made.close()
    with serving(folder.path) as client:  # alone
        assert client.lines()["mine"]["state"] == "stopped"


@pytest.mark.parametrize(
    "change",
    [
        "CREATE VIEW endless AS SELECT 1",
        "UPDATE facts SET value = '{'",
        "PRAGMA user_version = 7",
    ],
)
def test_a_log_that_no_service_wrote_is_a_sentence(tmp_path: Path, change: str) -> None:
    made = MadeService(tmp_path / "runs" / "mine")
    made.close()
    with sqlite3.connect(tmp_path / "runs" / "mine" / "commands.db") as database:
        database.execute(change)
    with serving(tmp_path / "runs") as client:
        line = client.lines()["mine"]
        assert line["state"] == "damaged"
        assert line["note"].startswith("command log ")
        assert client.ask(path_of(client, "mine", "overview"))[0] == 409


def test_a_log_with_values_of_other_types_is_shown(tmp_path: Path) -> None:
    folder = tmp_path / "runs" / "mine"
    made = MadeService(folder)
    model = made.model("k")
    made.step(model, 1, "k", loss=1.0, norm=1.0)
    made.close()
    with sqlite3.connect(folder / "commands.db") as database:
        database.execute(
            "UPDATE commands SET at = 9e999, done_at = x'00', kind = 7, owner = x'ff00'"
        )
        database.execute(
            f"UPDATE commands SET metrics = '{{\"loss:sum\": 9e999}}' WHERE line = '{model}'"
        )
        database.execute(f"UPDATE commands SET kind = 'create_model' WHERE line != '{model}'")
    with serving(tmp_path / "runs") as client:
        [model_row] = client.read(path_of(client, "mine", "overview"))["models"]
        assert model_row["curves"]["loss:sum"] == [None, None]
        (folder / "commands.db").rename(tmp_path / "away.db")
        (folder / "commands.db").symlink_to(tmp_path / "away.db")
        assert client.lines()["mine"]["state"] == "refused"


# -- who may look ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"Host": "evil.example:8090"}, 421),
        ({"Origin": "http://evil.example"}, 403),
        ({"Sec-Fetch-Site": "cross-site"}, 403),
    ],
)
def test_pages_of_others_are_refused(client: Client, headers: dict[str, str], status: int) -> None:
    for path in ("/api/runs", "/api/compare?runs=a", "/api/run/x/overview"):
        assert client.ask(path, **headers)[0] == status


def test_only_reading_is_possible_and_unknown_paths_are_refused(client: Client) -> None:
    assert client.ask("/", "POST", Content_Length="0")[0] == 405
    assert client.ask("/", "DELETE")[0] == 405
    paths = ("/static/app.js", "/../server.py", "/api/run/..%2Fa/overview", "/report/nope", "/a")
    assert [client.ask(path)[0] for path in paths] == [404] * len(paths)


def test_the_page_allows_no_script_but_its_own(client: Client) -> None:
    status, body, headers = client.ask("/")
    assert status == 200
    assert headers["Content-Security-Policy"] == "frame-ancestors 'none'"
    [policy] = re.findall(r'Content-Security-Policy" content="([^"]*)"', body.decode())
    assert policy.startswith("default-src 'none'; style-src 'sha256-")
    assert "unsafe" not in policy
    assert headers["X-Content-Type-Options"] == "nosniff"
    assert "default-src 'none'" in client.ask("/api/compare")[2]["Content-Security-Policy"]


def test_with_a_token_only_its_holder_looks(folder: Path) -> None:
    with serving(folder, "s3cret") as client:
        for path in ("/", "/api/runs", "/api/run/x/overview", "/?token=wrong"):
            assert client.ask(path)[0] == 401
        status, _, headers = client.ask("/?token=s3cret")
        assert (status, headers["Location"]) == (303, "/")
        cookie = headers["Set-Cookie"]
        assert "HttpOnly" in cookie
        assert "SameSite=strict" in cookie
        assert client.ask("/", Cookie=f"other=1; {cookie.partition(';')[0]}")[0] == 200
        assert client.ask("/", Cookie="penstock=wrong")[0] == 401


@pytest.mark.parametrize("host", ["0.0.0.0", "127.0.0.1"])
def test_a_token_is_made_where_others_could_connect(
    folder: Path, host: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    tokens: list[str] = []
    monkeypatch.delenv(TOKEN_VARIABLE, raising=False)
    monkeypatch.setattr(
        "penstock.inspection.dashboard.server.Dashboard",
        lambda _, token, hosts: tokens.append(token) or (_ for _ in ()).throw(KeyboardInterrupt),
    )
    with pytest.raises(KeyboardInterrupt):
        serve(folder, host=host, port=0)
    said = capsys.readouterr().out
    assert (len(tokens[0]) > 20) == (host == "0.0.0.0")
    assert (f"/?token={tokens[0]}" in said) == (host == "0.0.0.0")


def test_a_port_that_is_taken_is_a_mistake(folder: Path) -> None:
    with serving(folder) as client, pytest.raises(UserError, match="allowed: a free port"):
        serve(folder, port=client.port)


# -- a look changes nothing --------------------------------------------------------------------


def everything(folder: Path) -> dict[str, bytes]:
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


@pytest.mark.parametrize("kind", ["ended", "killed", "live"])
def test_a_look_writes_nothing(folder: Path, tmp_path: Path, kind: str) -> None:
    """SQLite would make an index beside the journal, and write to one that is there."""
    runs = tmp_path / "runs"
    run = RunFolder(shutil.copytree(folder / "a", runs / "a"))
    for end in ("-wal", "-shm"):
        run.journal.with_name(f"journal.db{end}").unlink(missing_ok=True)
    writing = None
    if kind != "ended":
        writing = Journal.open(run.journal)
        writing.record_published(9, "d")
        writing.sync()
    if kind == "killed":
        run = RunFolder(shutil.copytree(runs / "a", tmp_path / "copy" / "a"))
        runs = tmp_path / "copy"
    before = everything(runs)
    with serving(runs) as client:
        base = f"/api/run/{client.lines()['a']['id']}"
        for view in ("overview", "samples", "pairs", "journal", "timeline"):
            client.read(f"{base}/{view}")
        weights = client.read(f"{base}/journal")["weights"]
        client.ask(f"/report/{base.rpartition('/')[2]}")
    found = everything(runs)
    if kind == "live":  # the marks of readers, in memory that the writer shares
        before.pop("a/journal.db-shm"), found.pop("a/journal.db-shm")
    assert found == before
    assert [row["version"] for row in weights] == ([] if kind == "ended" else [9])
    if writing is not None:
        writing.record_published(10, "d")
        writing.close()


def test_links_and_pipes_are_not_followed(folder: Path, tmp_path: Path) -> None:
    runs = tmp_path / "runs"
    for name in ("good", "metrics", "eval", "pipe", "sample"):
        shutil.copytree(folder / "a", runs / name)
    secret = tmp_path / "secret.jsonl"
    secret.write_text('{"step": 1, "reward/mean": 4711.0}\n')
    (runs / "link").symlink_to(folder / "b")
    (runs / "metrics" / "metrics.jsonl").unlink()
    (runs / "metrics" / "metrics.jsonl").symlink_to(secret)
    shutil.rmtree(runs / "eval" / "eval")
    (runs / "eval" / "eval").symlink_to(tmp_path)
    (runs / "pipe" / "config.toml").unlink()
    os.mkfifo(runs / "pipe" / "config.toml")
    (runs / "sample" / "eval" / "x-step-1.jsonl").symlink_to(secret)
    with serving(runs) as client:
        lines = client.lines()
        assert lines.keys() == {"good", "metrics", "eval", "pipe", "sample"}
        for name, line in lines.items():
            refused = name != "good"
            assert (line["state"] == "refused") == refused
            assert bool(line["note"]) == refused
            assert client.ask(f"/api/run/{line['id']}/overview")[0] == (404 if refused else 200)
        assert "4711" not in json.dumps(lines)
    assert odd_file(runs / "metrics").startswith("metrics.jsonl is a link")


def test_a_run_begins_although_somebody_looks_at_its_lock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A look takes the lock, shared, for a moment; a run that begins just then was refused."""
    run, path = RunFolder(tmp_path), tmp_path / "lock"
    path.touch()
    real, tries = fcntl.flock, []
    with path.open("rb") as look:
        real(look, fcntl.LOCK_SH)

        def flock(descriptor: int, kind: int) -> None:
            tries.append(kind)
            if len(tries) == 6:
                real(look, fcntl.LOCK_UN)  # the look is over
            real(descriptor, kind)

        monkeypatch.setattr("penstock.store.run_folder.flock", flock)
        with run.lock():
            assert len(tries) > 6
            with pytest.raises(UserError), run.lock():  # another run holds it
                pass


def test_a_run_that_ends_by_an_error_was_not_killed(tmp_path: Path) -> None:
    run = RunFolder(tmp_path)
    with contextlib.suppress(UserError), run.lock():
        assert run.owner() == "alive"
        raise UserError("stop")
    assert run.owner() == "none"
    (tmp_path / "lock").write_text("1")
    assert run.owner() == "killed"


def test_the_command_serves_until_it_is_stopped(folder: Path) -> None:
    """Started as a user starts it; SIGTERM ends it without a traceback."""
    words = [sys.executable, "-m", "penstock.cli", "dashboard", str(folder), "--port", "0"]
    process = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None
    said = process.stdout.readline()
    port = int(said.partition("http://127.0.0.1:")[2].partition("/")[0])
    client = Client(port, None)  # type: ignore[arg-type]
    assert client.lines().keys() == {"a", "b"}
    process.send_signal(signal.SIGTERM)
    _, error = process.communicate()
    assert (process.returncode, error) == (0, "")

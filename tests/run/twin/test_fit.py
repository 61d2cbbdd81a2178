"""A profile is what a run recorded: the fit finds the speeds that made a timeline."""

from __future__ import annotations

import asyncio
import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from penstock import cli
from penstock.engine.protocol import GenerationRequest, SamplingParams
from penstock.errors import UserError
from penstock.run.twin.engine import ModelledEngine
from penstock.run.twin.fit import Call, fit, fit_decode, read_profile, read_recording
from penstock.run.twin.plan import check, measured
from penstock.run.twin.profile import DecodeModel, Profile
from penstock.run.twin.simulate import simulate
from penstock.run.twin.virtual_time import VirtualClock
from penstock.waits import loop_time
from stages.made_run import make_run
from stages.made_timeline import (
    ENGINE,
    REWARD_S,
    SYNC_S,
    TRAIN_FIXED_S,
    TRAIN_TOKEN_S,
    make_timeline,
)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = make_run(tmp_path_factory.mktemp("twin") / "made", steps=8, groups_per_step=12)
    make_timeline(folder)
    return folder.path


def test_the_fit_finds_what_made_the_timeline(run: Path) -> None:
    profile = read_profile(str(run))
    for rows in (8, 24, 48):
        assert profile.decode.seconds(rows) == pytest.approx(ENGINE.seconds(rows), rel=0.15)
    assert profile.train.fixed_s == pytest.approx(TRAIN_FIXED_S, rel=0.2)
    assert profile.train.token_s == pytest.approx(TRAIN_TOKEN_S, rel=0.1)
    assert profile.reward_s == pytest.approx(REWARD_S)
    assert profile.sync_s == pytest.approx(SYNC_S)
    recorded = read_recording_of(run)
    assert sum(sum(group.lengths) for group in profile.groups) >= sum(recorded.step_tokens.values())
    assert any(group.refused for group in profile.groups)


def test_the_fit_finds_the_speed_of_an_engine_at_which_calls_wait_for_slots() -> None:
    """The median call lasts twice as long as it decodes; from there a fit went 7 % astray."""
    true = DecodeModel(step_s=0.08, row_s=5e-5, prefill_s=0.002, slots=32)
    starts = [0.0] * 24 + [6.2] * 8 + [3.2 * turn for turn in range(3, 9) for _ in range(8)]
    clock = VirtualClock()
    engine = ModelledEngine(true, lambda name: 40)

    async def ask(number: int, start: float) -> Call:
        await asyncio.sleep(start)
        await engine.generate_many([request_of(f"{number}.{n}") for n in range(4)])
        return Call(start, loop_time(), (40, 40, 40, 40))

    async def ask_all() -> list[Call]:
        return await asyncio.gather(*(ask(*entry) for entry in enumerate(starts)))

    try:
        lane = sorted(clock.run(ask_all()), key=lambda call: call.start)
    finally:
        clock.close()
    assert fit_decode([lane], 32).seconds(32) == pytest.approx(true.seconds(32), rel=0.02)


def request_of(name: str) -> GenerationRequest:
    return GenerationRequest(
        request_id=name, prompt_ids=np.zeros(1, np.int32), sampling=SamplingParams(), seed=0
    )


def read_recording_of(run: Path):  # type: ignore[no-untyped-def]
    from penstock.store.run_folder import find

    return read_recording(find(run))


def test_a_profile_survives_its_file(run: Path, tmp_path: Path) -> None:
    profile = read_profile(str(run))
    (tmp_path / "profile.json").write_text(profile.to_json())
    assert read_profile(str(tmp_path / "profile.json")) == profile
    for wrong in (b'{"groups": 3}', b"\xff\xfe"):
        (tmp_path / "wrong.json").write_bytes(wrong)
        with pytest.raises(UserError, match="--save-profile"):
            read_profile(str(tmp_path / "wrong.json"))


def test_calls_that_took_no_time_are_fitted(tmp_path: Path) -> None:
    """A clock of coarse ticks shows none for a call of a tiny model."""
    folder = make_run(tmp_path / "made", steps=2)
    make_timeline(folder)
    path = folder.path / "timeline" / "events.jsonl"
    events = [json.loads(line) for line in path.read_text().splitlines()]
    for event in events:
        event["start"] = event["end"] if event["what"] == "generate" else event["start"]
    path.write_text("".join(f"{json.dumps(event)}\n" for event in events))
    assert 0 < read_profile(str(folder.path)).decode.seconds(1) < 1e-6


def test_a_run_is_predicted_from_its_own_profile(run: Path) -> None:
    """The made run takes turns, as a run without staleness does."""
    recording = read_recording_of(run)
    from penstock.config.source import with_overrides

    recording = type(recording)(
        with_overrides(recording.config, ["produce.max_staleness=0"]),
        recording.groups,
        recording.events,
        recording.step_tokens,
    )
    profile = fit(recording, "made")
    seconds, trainer_idle, engine_idle = measured(recording)
    config = with_overrides(
        recording.config, ["sampling.num_generations=4", "engine.max_slots=256"]
    )
    predicted = simulate(config, profile, steps=8)
    assert predicted.seconds == pytest.approx(seconds, rel=0.1)
    assert predicted.trainer_idle == pytest.approx(trainer_idle, abs=0.1)
    assert predicted.engine_idle == pytest.approx(engine_idle, abs=0.1)


def test_the_pause_before_a_resume_is_no_time_of_training(run: Path, tmp_path: Path) -> None:
    """A run of 8 steps that was stopped after the fourth and resumed a day later."""
    paused = Path(shutil.copytree(run, tmp_path / "paused"))
    path = paused / "timeline" / "events.jsonl"
    events = [json.loads(line) for line in path.read_text().splitlines()]
    updates = [event for event in events if event["what"] == "train"]
    cut = updates[3]["end"] + SYNC_S
    for event in events:
        if event["start"] >= cut:
            event["start"], event["end"] = event["start"] + 86_400, event["end"] + 86_400
    mark = {"lane": "run", "what": "session", "start": cut + 86_390, "end": cut + 86_390}
    path.write_text("".join(f"{json.dumps(event)}\n" for event in [*events, mark]))
    whole, resumed = read_recording_of(run), read_recording_of(paused)
    assert measured(resumed)[0] == pytest.approx(measured(whole)[0], rel=0.02)
    predicted = [
        simulate(whole.config, fit(recording, "made"), steps=8).seconds
        for recording in (whole, resumed)
    ]
    assert predicted[1] == pytest.approx(predicted[0], rel=0.02)


def test_a_run_that_never_trained_is_refused(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "made", steps=2)
    with pytest.raises(UserError, match="allowed: a run that wrote one"):
        read_profile(str(folder.path))
    (folder.path / "timeline").mkdir()
    (folder.path / "timeline" / "events.jsonl").write_text("")
    with pytest.raises(UserError, match="0 updates, allowed: a run that trained"):
        read_profile(str(folder.path))
    with pytest.raises(UserError, match="allowed"):
        check(str(folder.path), Profile.from_json(json.dumps(_SMALL), "small"))


_SMALL = {
    "source": "small",
    "groups": [{"lengths": [3], "rewards": [0.0], "refused": False, "task": ""}],
    "decode": {"step_s": 0.1, "row_s": 0.0, "prefill_s": 0.0, "slots": 4},
    "train": {"fixed_s": 1.0, "token_s": 0.0},
}


def penstock(monkeypatch: pytest.MonkeyPatch, *words: str) -> int:
    monkeypatch.setattr("sys.argv", ["penstock", "simulate", *words])
    with pytest.raises(SystemExit) as left:
        cli.main()
    return int(left.value.code or 0)


@pytest.mark.slow
def test_the_command_answers_as_table_json_and_picture(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    words = ["--profile", str(run), "--steps", "2", "--nodes", "1x4", "train.groups_per_step=4"]
    words += ["--vary", "produce.max_staleness=0,2"]
    assert penstock(monkeypatch, *words, "--picture", "plan.svg", "--save-profile", "p.json") == 0
    shown = capsys.readouterr().out
    for phrase in ("tokens/s", "idle: trainer", "staleness: 0 behind", "GPU hours", "<- best"):
        assert phrase in shown
    assert "produce.max_staleness=2" in shown
    assert (tmp_path / "plan.svg").read_text().startswith("<svg")
    assert penstock(monkeypatch, "--profile", "p.json", "--steps", "2", "--json") == 0
    figures = json.loads(capsys.readouterr().out)
    assert figures["as_it_is"]["steps"] == 2
    assert set(figures["as_it_is"]["staleness"]) <= {"0", "1"}
    assert penstock(monkeypatch, "--check", str(run)) == 0
    assert "points" in capsys.readouterr().out
    for option in ("--picture", "--save-profile"):
        assert penstock(monkeypatch, "--profile", "p.json", "--steps", "1", option, "p.json/x") == 2
        assert "cannot write p.json/x" in capsys.readouterr().err  # p.json is no folder
    assert penstock(monkeypatch, "--profile", "p.json", "--nodes", "none") == 2
    assert penstock(monkeypatch, "--profile", "p.json", "--vary", "max_staleness") == 2


def test_a_check_refuses_what_it_would_ignore(
    run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for words in (["--nodes", "2x8"], ["--steps", "3"], ["produce.max_staleness=2"]):
        assert penstock(monkeypatch, "--check", str(run), *words) == 2
        assert "too, allowed: --profile, --json and --save-profile" in capsys.readouterr().err


@pytest.mark.slow
def test_the_command_simulates_engines_of_different_speeds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Four engines, three of them four times slower: they generate as much as 1.75 of the fast one."""
    monkeypatch.chdir(tmp_path)
    engine = {"step_s": 0.1, "row_s": 0.0, "prefill_s": 0.0, "slots": 8}
    seen = {"lengths": [40, 40], "rewards": [0.0, 1.0], "refused": False, "task": ""}
    train = {"fixed_s": 0.0, "token_s": 0.0}
    Path("p.json").write_text(
        json.dumps({**_SMALL, "groups": [seen], "decode": engine, "train": train})
    )
    Path("c.toml").write_text(
        "[launch]\nnum_producers = 4\n[[launch.producer_kinds]]\ncount = 3\nray_options = {accelerator_type = 'L4'}\n"
        "[train]\ngroups_per_step = 64\nsteps = 10\n[sampling]\nnum_generations = 2\nmax_tokens = 64\n"
        "[produce]\nmax_staleness = 2\n[engine]\nmax_slots = 8\n[eval]\ntasks = {}\n"
    )

    def rate(*words: str) -> float:
        assert penstock(monkeypatch, "c.toml", "--profile", "p.json", "--json", *words) == 0
        return float(json.loads(capsys.readouterr().out)["as_it_is"]["tokens_per_s"])

    assert rate("--vary", "seed=1") == pytest.approx(4 * 8 / 0.1, rel=0.1)
    assert rate("--vary", "seed=1", "--kind-speed", "0.25") == pytest.approx(
        1.75 * 8 / 0.1, rel=0.1
    )
    assert penstock(monkeypatch, "c.toml", "--profile", "p.json", "--steps", "2") == 0
    assert "launch.producer_kinds[0] are taken to be as fast" in capsys.readouterr().out
    assert penstock(monkeypatch, "c.toml", "--profile", "p.json", "--kind-speed", "0") == 2
    assert "allowed: a number above 0 for each of the 1" in capsys.readouterr().err


def test_the_speed_of_each_kind_is_read_out_of_a_run_that_has_several(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "made", steps=16, groups_per_step=12)
    slow = ENGINE.at_speed(0.25)
    make_timeline(folder, slow, ENGINE)  # engine-0 is of the kind
    with (folder.path / "config.toml").open("a") as config:
        config.write("\n[[launch.producer_kinds]]\nray_options = {accelerator_type = 'L4'}\n")
    text = (folder.path / "config.toml").read_text()
    text = text.replace("producer_kinds = []\n", "").replace(
        "num_producers = 1", "num_producers = 2"
    )
    (folder.path / "config.toml").write_text(text)
    profile = read_profile(str(folder.path))
    ((name, found),) = profile.kinds.items()
    assert "L4" in name
    for rows in (8, 24):
        assert found.seconds(rows) == pytest.approx(slow.seconds(rows), rel=0.15)
        assert profile.decode.seconds(rows) == pytest.approx(ENGINE.seconds(rows), rel=0.15)
    config = read_recording_of(folder.path).config
    assert profile.decode_of(config, 0).step_s == found.step_s
    assert profile.decode_of(config, 1).step_s == profile.decode.step_s
    assert not any("producer_kinds" in note for note in simulate(config, profile, steps=2).notes)

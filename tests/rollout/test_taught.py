"""Teachers behind a server: a run over a real socket, what the journal keeps of them, and what is refused."""

from __future__ import annotations

import asyncio
import json
import random
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from penstock.config import Config, TeacherConfig
from penstock.config.changes import allowed_changes
from penstock.config.demo import policy_path
from penstock.errors import RewardError, UserError
from penstock.reward import retrying_client
from penstock.rollout.agent_loop import AgentLoop
from penstock.rollout.taught import TaughtLoop, TeacherServer
from penstock.store.journal import Journal
from penstock.store.journal.codec import decode_rollout, encode_rollout
from penstock.training.algo.method import check_algorithm
from penstock.types import Group, Prompt, Rollout, Row, Score, Status, VersionSegment
from penstock.waits import Waits
from stages.command_runs import CommandRun, penstock, train
from stages.teacher_server import EchoServer
from stages.tiny_run import (
    KILLED,
    SEED,
    SMALL_POLICY,
    CrashServer,
    assert_went_on,
    death,
    digests,
)

IN_ORDER = "produce.strategy=sync"
DISTILL = ("algorithm.name=distill", "algorithm.teacher=far", IN_ORDER)
NONSENSE = ('{"choices": []}', "<html>", '{"choices": [{"logprobs": null}]}')


def far(server: EchoServer) -> str:
    return f"teachers.far={{base_url='{server.url}', model='big'}}"


@pytest.fixture(scope="module")
def taught_run(tmp_path_factory: pytest.TempPathFactory) -> tuple[CommandRun, EchoServer]:
    """A run that the demo's policy taught over HTTP, whose server failed five times and is gone by now."""
    folder = tmp_path_factory.mktemp("taught")
    with EchoServer(policy_path(), "demo", 503, *NONSENSE, 500) as server:
        run = train(folder, "far", *DISTILL, far(server))
    return run, server


@pytest.mark.slow
def test_a_server_teaches_what_a_model_beside_the_trainer_does(
    taught_run: tuple[CommandRun, EchoServer], tmp_path: Path
) -> None:
    run, server = taught_run
    assert run.code == 0, run.told
    near = train(tmp_path, "near", *DISTILL, "teachers.far={path='demo'}")
    assert len(run.metrics) == len(near.metrics) == 4
    for one, other in zip(run.metrics, near.metrics, strict=True):
        for name in ("teacher/kl", "loss/teacher", "grad_norm", "tokens/trained"):
            assert one[name] == pytest.approx(other[name], rel=1e-3), name
        assert one["teacher/kl"] > 0.1
    assert run.query("SELECT COUNT(*) FROM groups WHERE state = 'trained'") == [(8,)]
    failures = run.query("SELECT DISTINCT reason FROM events WHERE status = 'failed'")
    assert failures == [
        ("teachers.far: got no log-probs of a prompt, allowed: a server with `echo`",)
    ]  # while a server that is busy is asked again at once
    assert server.keys == [None] * len(server.keys)
    assert "16 bytes a token" in run.told


def test_a_run_is_replayed_and_forked_without_its_server(
    taught_run: tuple[CommandRun, EchoServer], capfd: pytest.CaptureFixture[str]
) -> None:
    run, _ = taught_run
    assert penstock("replay", str(run.folder.path)) == 0
    assert capfd.readouterr().out.count("  equal") == 4
    assert penstock("replay", str(run.folder.path), "--algo", "distill", "train.lr=1e-2") == 0
    fork = CommandRun(type(run.folder)(run.folder.path.with_name("far-distill")), 0, "")
    assert [line["teacher/kl"] > 0.1 for line in fork.metrics] == [True] * 4
    assert digests(fork.folder) != digests(run.folder)
    for folder in (run.folder, fork.folder):
        assert penstock("audit", str(folder.path)) == 0


@pytest.mark.parametrize("number", [0, *(pytest.param(n, marks=pytest.mark.slow) for n in (1, 2))])
def test_a_killed_run_that_a_server_teaches_ends_in_the_same_bits(
    server: CrashServer, taught_run: tuple[CommandRun, EchoServer], number: int
) -> None:
    expected = digests(taught_run[0].folder)
    with EchoServer(policy_path(), "demo") as teacher:
        whole, code = server.train(f"whole-{number}", *DISTILL, far(teacher))
        assert (code, digests(whole)) == (0, expected), server.output()
        place = death(random.Random(1000 * SEED + number), server.counts())
        killed, code = server.train(f"killed-far-{number}", *DISTILL, far(teacher), **place)
        assert code in (KILLED, 0), server.output()
        if killed.journal.exists():
            assert server.run("resume", str(killed.path)) == 0, server.output()
            assert_went_on(server, killed, expected)


@pytest.fixture
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """No back-off between the attempts to reach a server."""
    monkeypatch.setattr(retrying_client, "MAX_BACKOFF_S", 0.0)


@pytest.mark.slow
@pytest.mark.usefixtures("at_once")
def test_a_server_teaches_a_fork_of_a_run_without_teacher(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    run = train(tmp_path, "plain", "train.steps=2")
    words = ("--algo", "distill", "algorithm.teacher=far")
    with EchoServer(policy_path(), "demo") as server:
        assert penstock("replay", str(run.folder.path), *words, far(server)) == 0
    fork = CommandRun(type(run.folder)(tmp_path / "plain-distill"), 0, "")
    assert [line["teacher/kl"] > 0.1 for line in fork.metrics] == [True] * 2
    capfd.readouterr()
    assert penstock("replay", str(fork.folder.path)) == 0
    assert capfd.readouterr().out.count("  equal") == 2
    dead = "teachers.far={base_url='http://localhost:9', model='big'}"
    assert penstock("replay", str(run.folder.path), *words, dead) == 1
    assert "no teachers.far answered after" in capfd.readouterr().err


def test_a_fork_asks_a_server_once_for_each_response(server: CrashServer) -> None:
    """Whatever kills it; a fork of the fork asks another server, and no longer the first one."""
    plain, code = server.train("untaught", IN_ORDER)
    assert code == 0, server.output()
    words = ("--algo", "distill", "algorithm.teacher=far")

    def asked(teacher: EchoServer) -> int:
        """Responses; when it connects a fork asks for the tokens of prompts, as text too."""
        prompts = [body["prompt"] for body in teacher.bodies]
        return len(prompts) - 2 * sum(isinstance(prompt, str) for prompt in prompts)

    with EchoServer(policy_path(), "demo") as teacher:
        place = {"point": "before step", "number": 3}
        names = (far(teacher), "run.name=far-fork")
        assert server.run("replay", str(plain.path), *words, *names, **place) == KILLED
        forked = type(plain)(plain.path.with_name("far-fork"))
        assert server.run("resume", str(forked.path)) == 0, server.output()
        with closing(Journal.open(forked.journal, readonly=True)) as journal:
            rollouts = [
                rollout for step in (1, 2, 3, 4) for rollout in journal.batch(step).rollouts
            ]
        assert asked(teacher) == len(rollouts)
    with EchoServer(SMALL_POLICY, "demo") as other:
        again = ("replay", str(forked.path), far(other), "run.name=other-fork")
        assert server.run(*again) == 0, server.output()
        assert asked(other) == len(rollouts)


def test_a_server_with_another_tokenizer_is_refused_before_the_first_step(tmp_path: Path) -> None:
    from stages.trl_run import word_tokenizer

    word_tokenizer().save_pretrained(tmp_path / "words")
    with EchoServer(SMALL_POLICY, str(tmp_path / "words")) as server:
        run = train(tmp_path, "refused", *DISTILL, far(server))
    assert run.code == 2
    assert "as other tokens than the policy, allowed: a model with the policy's" in run.told
    assert "Traceback" not in run.told


@pytest.mark.usefixtures("at_once")
def test_a_server_that_does_not_answer_is_one_line(tmp_path: Path) -> None:
    run = train(
        tmp_path, "dead", *DISTILL, "teachers.far={base_url='http://localhost:9', model='b'}"
    )
    assert run.code == 1
    assert "no teachers.far answered after" in run.told
    assert "Traceback" not in run.told


def config_of(**fields: Any) -> Config:
    tree: dict[str, Any] = {
        "teachers": {"far": {"base_url": "http://localhost:9", "model": "big"}},
        "algorithm": {"name": "distill", "teacher": "far"},
    }
    return Config.model_validate(tree | fields)


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        (
            {"algorithm": {"name": "distill", "teacher": "far", "divergence": "reverse"}},
            r"algorithm\.divergence: got reverse with teachers\.far, a server",
        ),
        ({"sampling": {"temperature": 0.7}}, r"tasks\.train\.sampling: got other settings than"),
        ({"sampling": {"top_k": 5}}, r"tasks\.train\.sampling: got other settings than"),
        ({"sampling": {"min_tokens": 2}}, r"tasks\.train\.sampling: got other settings than"),
    ],
)
def test_what_a_server_cannot_tell_is_refused(fields: dict[str, Any], said: str) -> None:
    check_algorithm(config_of())
    with pytest.raises(UserError, match=said):
        check_algorithm(config_of(**fields))


@pytest.mark.parametrize(
    "table", [{}, {"path": "demo", "base_url": "http://a", "model": "b"}, {"base_url": "http://a"}]
)
def test_a_teacher_is_in_one_place(table: dict[str, str]) -> None:
    with pytest.raises(ValueError, match="allowed: a path, or a base_url and"):
        TeacherConfig(**table)


def test_a_resumed_run_gets_no_server_that_its_groups_do_not_know() -> None:
    near = config_of(teachers={"far": {"path": "demo"}})
    with pytest.raises(UserError, match=r"tasks\.train: got a teacher behind a server"):
        allowed_changes(near, config_of())
    moved = {"far": {"base_url": "http://localhost:10", "model": "big"}}
    assert len(allowed_changes(config_of(), config_of(teachers=moved))) == 1
    assert allowed_changes(config_of(), near)


# -- one rollout


def rollout_of(**fields: Any) -> Rollout:
    """Two rows: 1 2 | 3 4 and 1 2 3 4 5 | 6."""
    rows = (Row(np.array([1, 2]), 2), Row(np.array([1, 2, 3, 4, 5]), 1))
    prompt = Prompt("p", (), np.array([1, 2]))
    settings: dict[str, Any] = {
        "rollout_id": "r.0",
        "prompt_ids": prompt.token_ids,
        "seed": 0,
        "response_ids": np.array([3, 4, 6], np.int32),
        "logprobs": np.zeros(3, np.float32),
        "loss_mask": np.ones(3, bool),
        "segments": (VersionSegment(0, 3),),
        "rows": rows,
        "prompt": prompt,
    }
    return Rollout(**settings | fields)


class TokensAsLogprobs(TeacherServer):
    """Gives each token a log-prob of minus itself, over the reader of real answers."""

    def __init__(self, *faults: str) -> None:
        super().__init__("far", TeacherConfig(base_url="http://localhost:9", model="big"))
        self._client = self  # type: ignore[assignment]
        self.faults = list(faults)

    async def ask(self, body: dict[str, Any]) -> tuple[str, bytes]:
        if self.faults:
            return "", self.faults.pop(0).encode()
        ids = [*body["prompt"], 7]
        values = [None, *(-float(token) for token in ids[1:])]
        logprobs = {"tokens": list(map(str, ids)), "token_logprobs": values}
        return "", json.dumps({"choices": [{"logprobs": logprobs}]}).encode()


class Done(AgentLoop):
    """Counts its calls, and completes what it gets."""

    calls = 0

    async def generate_group(
        self, rollouts: list[Rollout], *, enable_partial_rollout: bool = False
    ) -> list[Rollout]:
        self.calls += 1
        for rollout in rollouts:
            rollout.finish_reason, rollout.score = "stop", Score(1.0)
            rollout.move_to(Status.COMPLETED)
        return rollouts


def test_each_token_of_a_response_has_its_own_log_prob_and_a_retry_asks_the_teacher_alone() -> None:
    short = json.dumps({"choices": [{"logprobs": {"tokens": ["1"], "token_logprobs": [None]}}]})
    inner, rollout = Done(), rollout_of()
    loop = TaughtLoop(inner, TokensAsLogprobs(short), Waits())
    asyncio.run(loop.generate_group([rollout]))
    assert (rollout.status, rollout.error) == (
        Status.FAILED,
        "teachers.far: got 0 values, allowed: the log-probs of 3 tokens",
    )
    rollout.move_to(Status.INIT)
    asyncio.run(loop.generate_group([rollout]))
    assert (rollout.status, inner.calls) == (Status.COMPLETED, 1)
    assert rollout.teacher_logprobs is not None
    assert rollout.teacher_logprobs.tolist() == [-3.0, -4.0, -6.0]
    rollout.move_to(Status.EXPIRED)
    rollout.restart()
    assert rollout.teacher_logprobs is None


def test_the_log_probs_of_other_tokens_are_a_failure() -> None:
    """A server or a proxy may mix up its answers, or have been started again with another tokenizer."""
    told = {"tokens": ["token_id:1", "token_id:3", "token_id:7"], "token_logprobs": [None, -1, -2]}
    text = json.dumps({"choices": [{"logprobs": told}]})
    with pytest.raises(RewardError, match="got the log-probs of other tokens"):
        asyncio.run(TokensAsLogprobs(text).logprobs(np.array([1, 2])))
    assert asyncio.run(TokensAsLogprobs(text).logprobs(np.array([1, 3]))).tolist() == [-1.0]


@pytest.mark.parametrize("value", ["NaN", "-Infinity", "0.5", "null", '"-1"', f"-{10**400}"])
def test_a_value_that_is_no_log_prob_is_a_failure(value: str) -> None:
    text = f'{{"choices": [{{"logprobs": {{"tokens": ["1", "2"], "token_logprobs": [null, {value}]}}}}]}}'
    with pytest.raises(RewardError, match="allowed: the log-probs of 1 tokens"):
        asyncio.run(TokensAsLogprobs(text).logprobs(np.array([1, 2])))


def test_a_sampled_token_without_any_chance_is_a_failure() -> None:
    """vLLM writes -9999 for a probability of 0."""
    told = {"tokens": list("1234"), "token_logprobs": [None, -9999.0, -9999.0, -1.0]}
    text = json.dumps({"choices": [{"logprobs": told}]})
    with pytest.raises(RewardError, match="got the log-prob -9999 for a sampled token"):
        asyncio.run(TokensAsLogprobs(text).teach(rollout_of()))
    said_by_tool = rollout_of(loss_mask=np.array([False, True, True]))
    asyncio.run(TokensAsLogprobs(text).teach(said_by_tool))
    assert said_by_tool.teacher_logprobs is not None
    assert said_by_tool.teacher_logprobs.tolist() == [-9999.0, -1.0, -6.0]


def test_the_journal_keeps_them_and_a_fingerprint_covers_them() -> None:
    taught = np.array([-0.5, -1.25, -2.0], np.float32)
    rollout, plain = rollout_of(teacher_logprobs=taught), rollout_of()
    data = encode_rollout(rollout, text="", key="k")
    assert rollout.prompt is not None
    read = decode_rollout(data, "r.0", rollout.prompt, text="", key="k")
    np.testing.assert_array_equal(read.teacher_logprobs, taught)
    assert read.rows[1].prompt_ids.tolist() == [1, 2, 3, 4, 5]
    groups = [
        Group(group_id="g", task="t", cursor=0, prompt=rollout.prompt, rollouts=[each])
        for each in (rollout, read, plain)
    ]
    one, other, without = (group.fingerprint() for group in groups)
    assert one == other != without
    with pytest.raises(ValueError, match="teacher_logprobs"):
        rollout_of(teacher_logprobs=taught[:2])

"""Random legal combinations of what can teach a run: each is killed somewhere, ends in the same bits, and replays.

Each draw is a function of its number. A failure names its test, which one command runs again:
    .venv/bin/python -m pytest "tests/promises/durability/test_taught_runs.py::test_a_run_of_any_teachers[NUMBER]"
"""

from __future__ import annotations

import json
import math
import random
from pathlib import Path
from typing import Any

import pytest

from penstock.config.source import load_config
from penstock.errors import UserError
from penstock.training.algo import ALGORITHMS
from penstock.training.algo.method import check_algorithm
from stages.tiny_run import KILLED, SEED, SUMS, CrashServer, assert_went_on, death, digests

DRAWS, QUICK = 24, 1
IN_ORDER = "produce.strategy=sync"  # else the order in which groups land decides what a step trains
# what a resume may not change
FIXED = ("model.", "sampling.num_generations", "tasks.other", "tasks.shown", "train.ptx")
TEMPLATE = "{prompt} = {answer}"
SHARED = {
    *("loss/policy", "loss/teacher", "loss/demonstration", "ptx/loss", "teacher/kl", "kl/mean"),
    *("grad_norm", "entropy/mean", "reward/mean", "value/loss", "tokens/trained", "advantage/std"),
}
SHOWN = [
    {"prompt": "1+2", "completion": "3"},
    {"messages": [{"role": "user", "content": "2+2"}, {"role": "assistant", "content": "4"}]},
    {"question": "3+4", "answer": "7"},
]


class Draw:
    """The settings of one run, as words of the command line."""

    def __init__(self, number: int) -> None:
        self.random = random.Random(1000 * SEED + number)
        self.words = [IN_ORDER]
        while not self._is_legal():
            self.words = [IN_ORDER, *self._any_words()]

    def _is_legal(self) -> bool:
        try:
            config = load_config(None, self.words).config
            check_algorithm(config)
        except UserError:
            return False
        return len(self.words) > 1

    def sometimes(self, share: float = 0.3) -> bool:
        return self.random.random() < share

    def some(self, **options: tuple[Any, ...]) -> dict[str, Any]:
        """Each key with one of its values, in three of ten cases."""
        return {
            key: self.random.choice(values) for key, values in options.items() if self.sometimes()
        }

    def _algorithm(self, names: tuple[str, ...]) -> dict[str, Any]:
        """A table [algorithm] of one of these names."""
        chosen: dict[str, Any] = {"name": self.random.choice(names)} | self.some(
            weight=(0.0, 0.5),
            kl_beta=(0.1,),
            kl_in=("loss", "reward"),
            kl_estimator=("k1", "k2", "k3", "k3_weighted"),
            entropy_beta=(0.01,),
            mask_truncated=(True, False),
            aggregation=("token", "sequence", "constant"),
            decoupled=(True,),
            overlong_penalty=(0.5,),
            correction=(
                {"kind": "token_mask"},
                {"kind": "sequence_truncate"},
                {"newest": "trainer"},
            ),
            filter_groups=(False,),
        )
        if "kl_beta" in chosen:
            chosen |= self.some(kl_target=(0.05,))
        if "entropy_beta" in chosen:
            chosen |= self.some(entropy_target=(2.0,))
        if chosen["name"] == "ppo":
            chosen |= self.some(gamma=(0.9,), gae_lambda=(0.0, 0.8), value_clip=(0.0, 0.1))
        if chosen["name"] == "distill" or self.sometimes(0.2):
            chosen["teacher"] = self.random.choice(("big", "self"))
            chosen["teacher_beta"] = self.random.choice((0.3, 1.0))
            if chosen["teacher"] == "big":
                chosen |= self.some(divergence=("sampled", "forward", "reverse", "jsd"))
        return chosen

    def _any_words(self) -> list[str]:
        sampled = tuple(name for name in ALGORITHMS if name != "sft")
        tables: dict[str, Any] = {"algorithm": self._algorithm(sampled)}
        tables["sampling"] = self.some(
            num_generations=(1, 3), temperature=(0.7,), top_k=(50,), min_tokens=(3,)
        )
        train = self.some(
            mini_batches=(2,),
            num_epochs=(2,),
            micro_batch_tokens=(16,),
            gradient_checkpointing=(True,),
            ema_decay=(0.5,),
            schedule=("cosine",),
            weight_decay=(0.1,),
        )
        if self.sometimes():
            train |= self.some(reference_every=(2, 3), reference_decay=(0.5,), reference=("demo",))
        if tables["algorithm"]["name"] == "ppo":
            train |= self.some(critic_lr=(1e-2,), critic_warmup_steps=(1, 2))
        if self.sometimes(0.15):
            train["ptx"] = {"coefficient": 0.3, "data": "texts.jsonl", "sequences_per_step": 2}
        tables["train"] = train
        if self.sometimes(0.25):
            tables["model"] = {"lora.rank": 2}
        elif self.sometimes(0.15):
            tables["model"] = {"dtype": "bfloat16"}
        algorithms = [tables["algorithm"]]
        task = self._task(tables["algorithm"])
        if self.sometimes():
            task |= {"sampler": "difficulty"} | self.some(retire_solved=(3,))
        tables["tasks.train"] = task
        if self.sometimes():
            algorithms.append({"name": "sft"} | self.some(weight=(0.5,), aggregation=("sequence",)))
            tables["tasks.shown"] = {"data": "shown.jsonl", "algorithm": algorithms[-1]}
        if self.sometimes(0.4):
            algorithms.append(self._algorithm(sampled))
            other = self._task(algorithms[-1]) | {"algorithm": algorithms[-1]}
            other |= {"data": str(SUMS), "rewards": [{"type": "right.py:right"}]}
            tables["tasks.other"] = other
        teachers = {known.get("teacher") for known in algorithms}
        for name, path in (("big", "demo"), ("self", "policy")):
            if name in teachers:
                tables[f"teachers.{name}"] = {"path": path}
        return [
            f"{table}.{key}={_toml(value)}"
            for table, fields in tables.items()
            for key, value in fields.items()
        ]

    def _task(self, algorithm: dict[str, Any]) -> dict[str, Any]:
        return {"teacher_template": TEMPLATE} if algorithm.get("teacher") == "self" else {}


def _toml(value: Any) -> str:
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key} = {_toml(part)}" for key, part in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(_toml, value)) + "]"
    return json.dumps(value)


@pytest.fixture(scope="module")
def folder(server: CrashServer) -> Path:
    """Where the runs lie, with the files that they name."""
    place = server.folder
    (place / "shown.jsonl").write_text("\n".join(map(json.dumps, SHOWN)))
    (place / "texts.jsonl").write_text('{"text": "1+1=2"}\n{"text": "12"}\n{"text": "3+3=6!"}\n')
    (place / "right.py").write_text("def right(response):\n    return float(len(response) % 3)\n")
    return place


@pytest.mark.parametrize(
    "number",
    [pytest.param(n, marks=[] if n < QUICK else [pytest.mark.slow]) for n in range(DRAWS)],
)
def test_a_run_of_any_teachers(server: CrashServer, folder: Path, number: int) -> None:
    draw = Draw(number)
    print(*draw.words, sep="\n")  # shown on failure
    run, code = server.train(f"taught-{number}", *draw.words)
    assert code == 0, server.output()
    assert "Traceback" not in server.output()
    for line in run.metrics.read_text().splitlines():
        assert all(math.isfinite(v) for v in json.loads(line).values() if isinstance(v, float)), (
            line
        )
    expected, counts = digests(run), server.counts()
    assert server.run("replay", str(run.path)) == 0, server.output()
    assert server.output().count("  equal") == len(expected)
    killed, code = server.train(
        f"taught-{number}-killed", *draw.words, **death(draw.random, counts)
    )
    assert code in (KILLED, 0), server.output()  # how often a journal commits depends on the time
    if killed.journal.exists():
        assert server.run("resume", str(killed.path)) == 0, server.output()
        assert_went_on(server, killed, expected)


@pytest.mark.parametrize(
    "number",
    [pytest.param(n, marks=[] if n < QUICK else [pytest.mark.slow]) for n in range(DRAWS)],
)
def test_a_run_may_change_to_other_teachers(server: CrashServer, folder: Path, number: int) -> None:
    """A resume with any other settings is refused in one line, or goes on with them; either way the run replays."""
    draw, other = Draw(number), Draw(10_000 + number)
    changes = [word for word in other.words if not word.startswith(FIXED)]
    print(*draw.words, "then", *changes, sep="\n")  # shown on failure
    run, code = server.train(f"changes-{number}", *draw.words, "train.steps=2")
    assert code == 0, server.output()
    before = digests(run)
    code = server.run("resume", str(run.path), *changes, "train.steps=4")
    assert code in (0, 2), server.output()
    assert "Traceback" not in server.output()
    if code == 2:
        print(server.output())
        assert digests(run) == before
        assert server.run("resume", str(run.path), "train.steps=4") == 0, server.output()
    assert len(digests(run)) == 4
    assert digests(run)[:2] == before
    assert server.run("replay", str(run.path)) == 0, server.output()
    assert server.run("audit", str(run.path)) == 0, server.output()


@pytest.mark.usefixtures("warm_workers")
@pytest.mark.parametrize(
    "number",
    [pytest.param(n, marks=[] if n < 1 else [pytest.mark.slow]) for n in range(DRAWS // 4)],
)
def test_two_ranks_teach_what_one_does(server: CrashServer, folder: Path, number: int) -> None:
    """The first step has the same metrics, but for rounding; killed ranks end in the same bits."""
    draw = Draw(20_000 + number)
    words = [word for word in draw.words if not word.startswith("train.mini_batches")]
    ranks = ("launch.kind=local", "launch.num_consumers=2")
    print(*words, sep="\n")  # shown on failure
    alone, code = server.train(f"alone-{number}", *words, "train.steps=1")
    assert code == 0, server.output()
    run, code = server.train(f"ranks-{number}", *words, *ranks)
    assert code == 0, server.output()
    expected, counts = digests(run), server.counts()
    one, two = (json.loads(each.metrics.read_text().splitlines()[0]) for each in (alone, run))
    for name in SHARED & one.keys():
        assert two[name] == pytest.approx(one[name], rel=2e-3, abs=1e-5), name
    assert server.run("replay", str(run.path)) == 0, server.output()
    place = death(draw.random, counts)
    killed, code = server.train(f"taught-ranks-{number}-killed", *words, *ranks, **place)
    assert code in (KILLED, 0), server.output()
    if killed.journal.exists():
        assert server.run("resume", str(killed.path)) == 0, server.output()
        assert_went_on(server, killed, expected)

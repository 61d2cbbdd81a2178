"""Every illness is found in a made run that has it; runs that learn stay silent."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from penstock.config.source import with_overrides
from penstock.inspection.findings import RULES, Observed, find
from penstock.inspection.findings.rules import Rule
from penstock.store.space import DiskSpace
from penstock.types import Batch, Group, Rollout
from stages.made_metrics import (
    RESULTS,
    Curve,
    healthy_rows,
    observe,
    sums_rows,
    with_curves,
)
from stages.rollouts import finish_rollout, make_prompt

SAME = {"groups/zero_variance": 1.0, "reward/std": 0.0, "reward/mean": 0.0, "accuracy/mean": 0.0}


def falls(first: float, last: float) -> Curve:
    return lambda step, steps: first + (last - first) * min(1.0, 2 * step / steps)


# (name, curves, settings, words of the finding, settings to paste)
ILLNESSES = [
    ("equal_rewards", SAME | {"format/mean": 0.03}, ["tasks.train.rewards=[{type='boxed'}]"],
     "all rewards are 0 (since step 1). Steps 1 to 60: 97% of the responses have no \\boxed{}",
     ['tasks.train.system_prompt="Reason step by step and put the final answer in \\\\boxed{}."']),
    ("equal_rewards", SAME | {"format/mean": 0.0}, [],
     "100% of the responses do not have the form <think>", None),
    ("equal_rewards", SAME | {"truncated/share": 0.99}, ["sampling.max_tokens=300"],
     "99% of the responses are cut off at max_tokens", ["sampling.max_tokens=600"]),
    ("equal_rewards", SAME | {"format/mean": 1.0}, [],
     "0% of the answers are right", ["sampling.num_generations=16"]),
    ("equal_rewards", SAME | {"format/mean": 1.0, "reward/mean": 1.0, "accuracy/mean": 1.0}, [],
     "100% of the answers are right. Take harder prompts", []),
    ("equal_rewards",
     {"groups/zero_variance": 1.0, "accuracy/mean": None, "format/mean": None}, [],
     "all responses to a prompt have the same reward", []),
    ("equal_rewards",
     {"groups/zero_variance": 1.0, "accuracy/mean": None, "format/mean": None, "reward/mean": falls(0.2, 1.0)}, [],
     "to 1. Take harder prompts, or stop if no response can earn more", []),
    ("equal_rewards", {"reward/std": 0.0, "accuracy/mean": None, "format/mean": None},
     ["algorithm.name=reinforce"], "all rewards are", []),
    ("equal_rewards", SAME | {"empty/share": 1.0}, [], "100% of the responses have no text",
     ["sampling.min_tokens=8"]),
    ("refused_groups", {"produced/groups": 640.0}, ["algorithm.name=dapo"],
     "trains 32 groups and 640 are generated", ["sampling.num_generations=16"]),
    ("empty_responses", {"empty/share": 1.0}, ["sampling.stop=['.']"], "100% of the responses have no text",
     ["sampling.stop=[]"]),
    ("truncated", {"truncated/share": 0.9}, ["tasks.train.sampling.max_tokens=50"],
     "90% of the responses reach the limit of 50 tokens", ["tasks.train.sampling.max_tokens=100"]),
    ("length_collapse", {"response_length/mean": falls(80, 4), "reward/mean": 0.3, "accuracy/mean": 0.3}, [],
     "to 4 tokens, the reward from 0.300 to 0.300", ["train.lr=5e-05"]),
    ("length_explosion", {"response_length/mean": falls(20, 200), "reward/mean": 0.3, "accuracy/mean": 0.3}, [],
     "to 200 tokens", ["algorithm.overlong_penalty=1.0"]),
    ("entropy_collapse",
     {"entropy/mean": falls(0.5, 0.001), "accuracy/mean": 0.4, "groups/zero_variance": 0.9}, [],
     "90% of the groups have no variance",
     ["algorithm.entropy_beta=0.01", "algorithm.entropy_target=0.1", "algorithm.clip_high=0.28",
      "train.lr=5e-05"]),
    ("bad_gradients", {"grad_norm": lambda step, _: 50.0 if step % 13 == 0 else 0.5}, [],
     "In 4 of the last 50 steps it was above 10 times its median of 0.5, up to 50", ["train.lr=5e-05"]),
    ("bad_gradients", {"updates/skipped": lambda step, _: float(step == 30)}, [],
     "gradient was not finite (since step 30)", ["train.lr=5e-05"]),
    ("lost_updates", {"update/arrived": 0.02}, ["train.masters=plain"], "2% of an update arrives",
     ["train.masters=dithered"]),
    ("kl_drift", {"kl/mean": falls(0.0, 0.8), "reward/mean": 0.4}, ["algorithm.kl_beta=0.01"],
     "0.8 nats of KL a token", ["algorithm.kl_beta=0.02"]),
    ("mismatch", {"mismatch/kl": 0.2, "importance/ess": 0.6}, ["sampling.top_p=0.9", "engine.name=vllm"],
     "mismatch/kl is 0.2; the importance weights are worth 60% of the samples",
     ["sampling.top_k=0", "sampling.top_p=1.0"]),
    ("mismatch", {"mismatch/kl": 0.2}, ["produce.max_staleness=4"], "is 0.2", ["produce.max_staleness=2"]),
    ("mismatch", {"mismatch/kl": 0.2}, [], "is 0.2", ["algorithm.correction.kind=token_truncate"]),
    ("mismatch", {"mismatch/kl": 0.03, "staleness/mean": 0.0}, ["engine.name=vllm"], "is 0.03",
     ["model.dtype=float32"]),
    ("expired", {"groups/expired": 12.0}, [], "240 groups expired while 640 were completed",
     ["produce.max_staleness=2"]),
    ("expired", {"groups/expired": 12.0}, ["produce.over_sample_threshold=0.5"], "too old",
     ["produce.over_sample_threshold=0.0"]),
    ("too_stale", {"staleness/mean": 7.8}, ["produce.max_staleness=8"], "Staleness 7.80 of at most 8",
     ["produce.max_staleness=4"]),
    ("slow_reward", {"time/reward_s": 0.6, "time/consumer_wait_s": 0.45}, [],
     "waits 0.6 s for its reward; a step takes 1 s", ["produce.max_staleness=2"]),
    ("trainer_idle", {"time/consumer_wait_s": 0.7}, ["produce.max_staleness=0"],
     "It waited 70% of the last 20 steps. Generate the next step while this one trains: "
     "a step of 1 s would take about 0.7 s", ["produce.max_staleness=1"]),
]  # fmt: skip


@pytest.mark.parametrize(
    ("name", "curves", "settings", "words", "change"),
    ILLNESSES,
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_an_illness_is_found(
    name: str, curves: dict[str, Curve], settings: list[str], words: str, change: list[str] | None
) -> None:
    observed = observe(with_curves(curves), *settings)
    [finding] = find(observed)
    assert finding.name == name
    assert words in str(finding)
    if change is not None:
        assert list(finding.change) == change
    assert with_overrides(observed.config, finding.change) is not None  # what it says can be pasted
    assert finding.since <= 60


@pytest.mark.parametrize("seed", range(5))
def test_a_run_that_learns_has_nothing(seed: int) -> None:
    for steps in (1, 4, 5, 9, 10, 20, 60, 200):
        assert find(observe(healthy_rows(steps, seed))) == []


RECORDED = sorted(RESULTS.glob("*.jsonl"))  # runs of examples/sums


def test_runs_were_recorded() -> None:
    assert RECORDED


@pytest.mark.parametrize("path", RECORDED, ids=lambda path: path.stem)
def test_recorded_runs_that_learn_stay_silent_at_every_step(path: Path) -> None:
    rows = sums_rows(path)
    assert len(rows) > 20
    for end in range(1, len(rows) + 1):
        assert find(observe(rows[:end])) == []


def test_the_demo_stays_silent_at_every_step() -> None:
    """Its metrics were recorded on two cores, beside other work."""
    lines = Path(__file__).with_name("demo_metrics.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in lines]
    assert rows[-1]["accuracy/mean"] > 0.97
    for end in range(1, len(rows) + 1):
        assert find(observe(rows[:end])) == []


def test_every_rule_finds_something_in_some_test_of_this_file() -> None:
    text = Path(__file__).read_text()
    assert [rule.name for rule in RULES if f'"{rule.name}"' not in text] == []


def test_cores_or_gpus_that_are_free_are_the_remedy_of_an_idle_side() -> None:
    four = {"machine": json.dumps({"cpus": 4, "gpus": 0})}
    gpus = {"machine": json.dumps({"cpus": 64, "gpus": 4})}
    waits = {"time/consumer_wait_s": 0.9}
    [finding] = find(observe(with_curves(waits), facts=four))
    assert (finding.name, finding.change) == ("trainer_idle", ("launch.num_producers=3",))
    assert "would take about 0.33 s" in finding.advice
    [finding] = find(observe(with_curves({"time/producer_wait_s": 0.7}), facts=gpus))
    assert (finding.name, finding.change) == ("producer_idle", ("launch.num_consumers=2",))
    assert find(observe(with_curves(waits))) == []  # two cores: nothing is free, nothing to advise


def test_engine_and_trainer_that_share_one_gpu_leave_nothing_to_advise() -> None:
    one = {"machine": json.dumps({"cpus": 16, "gpus": 1})}
    for name in ("time/producer_wait_s", "time/consumer_wait_s"):
        assert find(observe(with_curves({name: 0.7}), facts=one)) == []


def test_a_rule_that_raises_is_named_and_the_others_still_speak(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fails(observed: Observed) -> None:
        raise ZeroDivisionError("division by zero")

    broken = Rule("fails", fails, "", "")
    monkeypatch.setattr("penstock.inspection.findings.rules.RULES", (broken, *RULES))
    found = find(observe(with_curves({"groups/failed": 4.0}), last_failure=lambda: "engine: died"))
    assert [finding.name for finding in found] == ["broken_rule_fails", "failures"]
    assert "ZeroDivisionError: division by zero" in found[0].evidence


def test_a_failing_reward_is_named_with_its_last_error() -> None:
    rows = with_curves({"groups/failed": 4.0})
    said = "rollout train:3.1: reward score: KeyError: 'level'"
    [finding] = find(observe(rows, last_failure=lambda: said))
    assert (finding.name, finding.what) == ("failures", "The reward fails")
    assert (
        "80 groups failed while 640 were completed; the last error: rollout train:3.1"
        in finding.evidence
    )
    [finding] = find(observe(rows, last_failure=lambda: "engine: died"))
    assert finding.what == "Groups fail and are generated again"


def test_a_disk_that_will_be_full() -> None:
    space = DiskSpace(folder=Path("runs/x"), free=2**20, checkpoint=2**30, journal=0, ahead=100)
    [finding] = find(observe(healthy_rows(), disk=space))
    assert (finding.name, finding.change) == ("full_disk", ("checkpoint.keep=1",))
    assert "1.0 MiB are free in runs/x; the next checkpoint needs 1.0 GiB" in finding.evidence


def test_a_log_that_a_reader_lets_grow() -> None:
    space = DiskSpace(
        folder=Path("runs/x"), free=2**40, checkpoint=0, journal=0, ahead=100, log=2**29
    )
    [finding] = find(observe(healthy_rows(), disk=space))
    assert (finding.name, finding.change) == ("long_log", ())
    assert "journal.db-wal has 512 MiB" in finding.evidence


def test_what_is_known_at_the_start() -> None:
    data = {"source": "x", "prompts": 90, "skipped": 10, "longest": 77}
    facts = {
        "tasks.train.data": json.dumps(data),
        "chat template": json.dumps({"present": 0}),
        "overlap of eval.tasks.heldout and tasks.train": json.dumps({"found": 3, "problems": 50}),
    }
    skipped, template, overlap = find(observe([], facts=facts))
    assert [one.name for one in (template, overlap)] == ["no_template", "overlap"]
    assert (skipped.name, skipped.since) == ("skipped", 0)
    assert (
        "10 of 100 prompts of tasks.train are longer than 16 tokens, up to 77" in skipped.evidence
    )
    assert skipped.change == ("tasks.train.max_prompt_tokens=77",)
    assert overlap.evidence == "3 of 50 problems of eval.tasks.heldout are prompts of tasks.train"


def test_one_remedy_is_said_once() -> None:
    """Responses that are cut off are the cause of equal rewards: there is no second finding."""
    rows = with_curves(SAME | {"truncated/share": 1.0})
    assert [finding.name for finding in find(observe(rows))] == ["equal_rewards"]


def test_a_penalty_for_length_may_teach_though_rewards_are_equal() -> None:
    rows = with_curves(SAME | {"format/mean": 1.0})
    assert find(observe(rows, "algorithm.overlong_penalty=1.0")) == []


def test_an_illness_counts_from_the_step_it_began_with() -> None:
    rows = with_curves({"truncated/share": lambda step, _: 1.0 if step > 40 else 0.0})
    [finding] = find(observe(rows))
    assert finding.since == 41
    assert find(observe(rows[:43])) == []  # three steps are no illness yet


def test_an_example_is_one_line_with_the_end_of_the_response() -> None:
    prompt = make_prompt()
    rollout = finish_rollout(Rollout(rollout_id="t:0.0", prompt_ids=prompt.token_ids, seed=0))
    rollout.text = "a\nb " * 200 + "the\nanswer is 7"
    group = Group(group_id="t:0", task="t", cursor=0, prompt=prompt, rollouts=[rollout])
    batch = Batch(step=60, groups=(group,))
    [finding] = find(observe(with_curves(SAME), batch=batch))
    assert "\n" not in finding.evidence
    assert "the answer is 7', expected answer '" in finding.evidence
    assert len(finding.evidence) < 400

"""Settings are resolved and checked before weights are loaded: published defaults, overrides, errors."""

import subprocess
import sys

import numpy as np
import pytest

from penstock.config import AlgorithmConfig, Config
from penstock.errors import UserError
from penstock.training.algo import ALGORITHMS
from penstock.training.algo.doubts import algorithm_doubts
from penstock.training.algo.method import check_algorithm, resolve_settings, run_settings
from penstock.training.algo.settings import keep_group
from penstock.types import Rollout, Score


def test_reading_settings_imports_no_torch() -> None:
    program = (
        "import sys; from penstock.training.algo import ALGORITHMS, method;"
        "from penstock.config import AlgorithmConfig, Config;"
        "[method.resolve_settings(AlgorithmConfig(name=name)) for name in ALGORITHMS];"
        "method.check_algorithm(Config()); sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0


@pytest.mark.parametrize(
    ("name", "fields"),
    [
        ("grpo", {"clip_low": 0.2, "clip_high": 0.2, "aggregation": "token"}),
        (
            "dapo",
            {"clip_high": 0.28, "aggregation": "token", "filter_groups": True, "kl_beta": 0.0}
            | {"mask_truncated": True, "overlong_penalty": 1.0},
        ),
        ("dr_grpo", {"aggregation": "constant", "normalize": "none"}),
        ("rloo", {"baseline": "leave_one_out", "normalize": "none", "kl_in": "reward"}),
        ("reinforce_pp", {"normalize": "batch", "kl_in": "reward", "group_relative": False}),
        ("reinforce_pp_baseline", {"normalize": "batch", "group_relative": True}),
        ("gspo", {"clip_low": 3e-4, "clip_high": 4e-4}),
        ("cispo", {"clip_high": 4.0, "aggregation": "token"}),
        ("reinforce", {"baseline": "none", "group_relative": False}),
    ],
)
def test_defaults(name, fields) -> None:
    settings = resolve_settings(AlgorithmConfig(name=name))
    assert {key: getattr(settings, key) for key in fields} == fields
    assert not settings.needs_reference


def test_every_part_can_be_overridden() -> None:
    given = {
        "clip_low": 0.1,
        "clip_high": 0.3,
        "dual_clip": 3.0,
        "aggregation": "constant",
        "baseline": "leave_one_out",
        "normalize": "batch",
        "kl_in": "reward",
        "kl_estimator": "k2",
        "kl_beta": 0.5,
        "mask_truncated": True,
        "filter_groups": True,
        "filter_range": (0.2, 0.7),
        "overlong_penalty": 2.0,
        "overlong_window": 7,
    }
    for name in ALGORITHMS:
        settings = resolve_settings(AlgorithmConfig(name=name, **given))
        assert {key: getattr(settings, key) for key in given} == given


def test_a_correction_is_a_decoupled_objective() -> None:
    config = AlgorithmConfig(correction={"kind": "token_truncate", "cap": 3.0})
    settings = resolve_settings(config)
    assert (settings.decoupled, settings.correction, settings.correction_cap) == (
        True,
        "token_truncate",
        3.0,
    )
    assert resolve_settings(AlgorithmConfig(decoupled=True)).correction == "token_truncate"
    unbounded = AlgorithmConfig(decoupled=True, correction={"kind": "none"})
    assert resolve_settings(unbounded).correction == "token"


@pytest.mark.parametrize(
    ("fields", "correction"),
    [
        ({}, "none"),
        ({"engine": {"name": "vllm"}}, "token_truncate"),
        ({"engine": {"name": "openai"}}, "token_truncate"),
        ({"engine": {"name": "mine:Engine"}}, "token_truncate"),
        ({"sampling": {"top_p": 0.9}}, "none"),
        ({"engine": {"name": "vllm"}, "algorithm": {"correction": {"kind": "none"}}}, "none"),
        ({"algorithm": {"name": "gspo"}}, "token_truncate"),
        ({"algorithm": {"name": "gspo", "correction": {"kind": "none"}}}, "none"),
        ({"algorithm": {"name": "rloo"}, "engine": {"name": "vllm"}}, "sequence_truncate"),
        ({"algorithm": {"name": "rloo"}, "sampling": {"top_p": 0.9}}, "sequence_truncate"),
    ],
)
def test_a_run_is_corrected_where_engine_and_trainer_differ(fields, correction) -> None:
    settings = run_settings(Config.model_validate(fields))
    assert (settings.correction, settings.decoupled) == (correction, correction != "none")


def test_dual_clip_is_on_and_can_be_turned_off() -> None:
    assert resolve_settings(AlgorithmConfig()).dual_clip == 3.0
    assert resolve_settings(AlgorithmConfig(dual_clip=0)).dual_clip == 0
    with pytest.raises(ValueError, match=r"got 0.5, allowed: 0 \(off\), or above 1"):
        AlgorithmConfig(dual_clip=0.5)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"algorithm": {"name": "ppo2"}}, ["algorithm.name", "ppo2", "grpo", "dapo"]),
        ({"sampling": {"num_generations": 1}}, ["num_generations", "1", "at least 2"]),
        ({"train": {"reference": "x"}}, ["train.reference", "'x'", "kl_beta"]),
        (
            {"algorithm": {"name": "dapo", "kl_beta": 0.1}},
            ["algorithm.kl_beta", "0.1", "loss | reward"],
        ),
        (
            {
                "train": {"groups_per_step": 4, "mini_batches": 4},
                "launch": {"kind": "ray", "num_consumers": 2},
            },
            ["4 x 2", "divisor", "4"],
        ),
        ({"train": {"schedule": "cosine"}}, ["train.schedule", "cosine", "train.steps"]),
        (
            {
                "algorithm": {"name": "reinforce", "filter_groups": True},
                "sampling": {"num_generations": 1},
            },
            ["algorithm.filter_groups", "num_generations 1", "false"],
        ),
        *(
            (
                {"algorithm": {"name": name, "baseline": baseline, "normalize": "group"}},
                ["algorithm.normalize", f"baseline {baseline}", "group_mean | leave_one_out"],
            )
            for name in ("grpo", "reinforce", "reinforce_pp")
            for baseline in ("none", "batch_mean")
        ),
        (
            {"algorithm": {"name": "reinforce", "normalize": "batch_rewards"}},
            ["algorithm.normalize", "batch_rewards", "baseline none"],
        ),
        (
            {
                "algorithm": {"correction": {"newest": "trainer"}},
                "sampling": {"top_p": 0.9},
                "engine": {"name": "vllm"},
            },
            ["algorithm.correction.newest", "top_p", "engine"],
        ),
    ],
)
def test_impossible_settings_are_one_clear_line(fields, words) -> None:
    with pytest.raises(UserError) as caught:
        check_algorithm(Config.model_validate(fields))
    message = str(caught.value)
    assert "\n" not in message
    assert all(word in message for word in words), message


@pytest.mark.parametrize(
    "fields",
    [
        {"algorithm": {"kl_beta": -0.1}},
        {"algorithm": {"clip_low": -0.1}},
        {"train": {"ptx": {"coefficient": 1.5}}},
        {"train": {"groups_per_step": 4, "mini_batches": 8}},
    ],
)
def test_values_out_of_range_do_not_become_a_config(fields) -> None:
    with pytest.raises(ValueError):
        Config.model_validate(fields)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        (
            {
                "sampling": {"top_p": 0.9},
                "engine": {"name": "vllm"},
                "algorithm": {"correction": {"kind": "sequence_mask"}},
            },
            ["sequence_mask", "top_p", "token_truncate"],
        ),
        ({"algorithm": {"name": "reinforce"}}, ["reinforce", "produce.max_staleness=0"]),
        (
            {
                "algorithm": {"name": "reinforce"},
                "produce": {"strategy": "sync"},
                "train": {"num_epochs": 2},
            },
            ["2 updates", "train.num_epochs=1"],
        ),
        ({"algorithm": {"kl_beta": 0.1, "kl_estimator": "k1"}}, ["k1", "kl_in=reward"]),
        ({"algorithm": {"kl_estimator": "k2"}}, ["kl_estimator", "no effect", "kl_beta 0"]),
        ({"algorithm": {"name": "dapo", "kl_in": "loss"}}, ["kl_in", "no effect", "kl_beta 0"]),
        ({"algorithm": {"filter_range": (0.2, 0.8)}}, ["filter_range", "filter_groups false"]),
        ({"algorithm": {"overlong_window": 9}}, ["overlong_window", "overlong_penalty 0"]),
        ({"algorithm": {"name": "cispo", "dual_clip": 5.0}}, ["dual_clip", "no effect", "cispo"]),
        (
            {"algorithm": {"name": "reinforce", "clip_low": 0.1}, "produce": {"max_staleness": 0}},
            ["clip_low", "no effect", "reinforce"],
        ),
        (
            {"algorithm": {"name": "gspo", "clip_low": 0.1}},
            ["clip_low", "no effect", "token_truncate", "one update"],
        ),
        ({"algorithm": {"name": "gspo", "decoupled": True}}, ["decoupled", "token_truncate"]),
        (
            {"algorithm": {"name": "reinforce_pp", "baseline": "batch_mean"}},
            ["baseline", "no effect", "normalize batch"],
        ),
        (
            {"algorithm": {"name": "reinforce_pp_baseline", "baseline": "leave_one_out"}},
            ["baseline", "no effect", "group_mean"],
        ),
        ({"algorithm": {"correction": {"cap": 3.0}}}, ["correction.cap", "correction none"]),
        (
            {"algorithm": {"name": "rloo", "correction": {"floor": 0.1}}},
            ["correction.floor", "sequence_truncate", "mask"],
        ),
    ],
)
def test_settings_that_do_nothing_or_bias_the_gradient_are_told_in_one_line(fields, words) -> None:
    (line,) = algorithm_doubts(Config.model_validate(fields))
    assert "\n" not in line
    assert all(word in line for word in words), line


@pytest.mark.parametrize("name", [name for name in ALGORITHMS if name != "reinforce"])
def test_an_algorithm_as_it_is_raises_no_doubt(name) -> None:
    assert algorithm_doubts(Config.model_validate({"algorithm": {"name": name}})) == []


def test_one_generation_is_fine_without_a_group_baseline() -> None:
    check_algorithm(
        Config.model_validate(
            {"algorithm": {"name": "reinforce_pp"}, "sampling": {"num_generations": 1}}
        )
    )


def test_a_users_class_without_defaults_is_refused() -> None:
    with pytest.raises(UserError, match="defaults"):
        resolve_settings(AlgorithmConfig(name="collections:OrderedDict"))


USERS_FILE = """
from penstock.training.algo.method import Algorithm, Surrogate
from penstock.training.algo.settings import AlgorithmSettings

class Mine(Algorithm):
    defaults = AlgorithmSettings(baseline="leave_one_out", normalize="none", aggregation="token")

    def surrogate(self, view):
        ratio_N = self.log_ratio(view).exp()
        return Surrogate(
            loss_N=-ratio_N * view.advantages_N, ratio_N=ratio_N.detach(), clipped_N=ratio_N > 1e9
        )
"""


def test_a_users_own_file_is_an_algorithm(tmp_path) -> None:
    path = tmp_path / "mine.py"
    path.write_text(USERS_FILE)
    settings = resolve_settings(AlgorithmConfig(name=f"{path}:Mine", kl_beta=0.2))
    assert (settings.baseline, settings.kl_beta, settings.needs_reference) == (
        "leave_one_out",
        0.2,
        True,
    )


def scored(value: float, answer_ok: bool | None) -> Rollout:
    return Rollout(
        rollout_id="g.0",
        prompt_ids=np.array([1]),
        seed=0,
        score=Score(value, answer_ok=answer_ok),
    )


@pytest.mark.parametrize(
    ("verdicts", "kept"),
    [([True, True], False), ([False, False], False), ([True, False], True)],
)
def test_dynamic_sampling_keeps_groups_that_teach(verdicts, kept) -> None:
    settings = resolve_settings(AlgorithmConfig(name="dapo"))
    rollouts = [scored(float(verdict), verdict) for verdict in verdicts]
    assert keep_group(rollouts, settings) is kept
    assert keep_group(rollouts, resolve_settings(AlgorithmConfig(name="grpo")))


def test_the_range_of_dynamic_sampling_can_be_set() -> None:
    rollouts = [scored(float(number > 0), number > 0) for number in range(4)]  # three of four right
    for high, kept in ((0.99, True), (0.75, False), (0.8, True)):
        settings = resolve_settings(AlgorithmConfig(name="dapo", filter_range=(0.1, high)))
        assert keep_group(rollouts, settings) is kept
    with pytest.raises(ValueError, match=r"got \[0.9, 0.1\], allowed: two shares"):
        AlgorithmConfig(filter_range=(0.9, 0.1))


def test_dynamic_sampling_without_verdicts_looks_at_the_rewards() -> None:
    settings = resolve_settings(AlgorithmConfig(name="dapo"))
    assert keep_group([scored(0.5, None), scored(0.7, None)], settings)
    assert not keep_group([scored(0.5, None), scored(0.5, None)], settings)


@pytest.mark.parametrize("where", ["sampling", "tasks"])
def test_a_greedy_task_is_refused_before_weights_are_loaded(where: str) -> None:
    sampling = {"temperature": 0.0, "num_generations": 1}
    fields = (
        {"sampling": sampling}
        if where == "sampling"
        else {"tasks": {"train": {"data": "addition", "sampling": sampling}}}
    )
    config = Config(**fields)  # type: ignore[arg-type]
    with pytest.raises(UserError, match=r"sampling\.temperature got 0, allowed: above 0"):
        check_algorithm(config)

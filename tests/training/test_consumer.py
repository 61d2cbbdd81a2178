"""The consumer: reports, digests, stop, skipped updates, checkpoints, adapters."""

import json
import threading
from pathlib import Path

import numpy as np
import pytest
import torch

from penstock.errors import RunError, StopRequested, UserError
from penstock.training.adapters import add_adapters
from penstock.training.consumer import Consumer
from penstock.training.flat_batch import FlatBatch
from penstock.training.objective import TokenInputs
from penstock.types import Batch
from penstock.weights.model_weights import model_digest
from stages.training_data import (
    VOCABULARY,
    batches,
    config_of,
    consumer_of,
    from_disk,
    random_batch,
    tiny_model,
)

METRICS = [
    "reward/mean",
    "reward/std",
    "accuracy/mean",
    "format/mean",
    "response_length/mean",
    "response_length/max",
    "loss/policy",
    "kl/mean",
    "entropy/mean",
    "ratio/mean",
    "ratio/max",
    "clip/fraction",
    "grad_norm",
    "lr",
    "staleness/mean",
    "staleness/max",
    "mismatch/kl",
    "tokens/trained",
    "advantage/mean",
    "advantage/std",
    "groups/zero_variance",
    "truncated/share",
    "importance/mean",
    "importance/max",
    "importance/ess",
    "ptx/loss",
    "time/train_s",
    "time/digest_s",
    "tokens_per_s",
    "memory/peak_mib",
    "updates/skipped",
    "update/arrived",
]


def test_a_step_reports_every_metric_and_the_identity_of_the_new_weights(saved_model) -> None:
    consumer = from_disk(saved_model)
    before = consumer.digest()
    report = consumer.train(random_batch(1))
    assert (
        (report.step, report.policy_version) == (1, 1) == (consumer.step, consumer.policy_version)
    )
    assert report.digest == consumer.digest() != before
    assert set(METRICS) - set(report.metrics) == {"kl/mean"}  # without a reference there is none
    assert all(isinstance(v, float) and np.isfinite(v) for v in report.metrics.values())
    assert report.metrics["tokens/trained"] == random_batch(1).groups[0].num_response_tokens + sum(
        group.num_response_tokens for group in random_batch(1).groups[1:]
    )


def test_metrics_say_what_the_batch_holds(saved_model) -> None:
    batch = random_batch(3, seed=2)
    for rollout in batch.groups[0].rollouts:
        rollout.finish_reason = "length"
    metrics = from_disk(saved_model).train(batch).metrics
    rewards = [rollout.reward for rollout in batch.rollouts]
    lengths = [len(rollout.response_ids) for rollout in batch.rollouts]
    assert metrics["reward/mean"] == pytest.approx(np.mean(rewards))
    assert metrics["reward/std"] == pytest.approx(np.std(rewards))
    assert metrics["response_length/mean"] == pytest.approx(np.mean(lengths))
    assert metrics["response_length/max"] == max(lengths)
    assert metrics["staleness/mean"] == metrics["staleness/max"] == 2.0
    assert metrics["truncated/share"] == pytest.approx(4 / 24)
    assert metrics["ratio/log_gap_staleness_2"] > 0.0
    assert "ratio/log_gap_staleness_0" not in metrics  # no token is that fresh


def test_the_digest_does_not_depend_on_who_computes_it(saved_model) -> None:
    consumer = from_disk(saved_model)
    from transformers import AutoModelForCausalLM

    assert model_digest(AutoModelForCausalLM.from_pretrained(saved_model)) == consumer.digest()


def test_same_batches_same_bits(saved_model) -> None:
    digests = []
    for _ in range(2):
        consumer = from_disk(saved_model)
        digests.append([consumer.train(batch).digest for batch in batches(3)])
    assert digests[0] == digests[1]
    assert len(set(digests[0])) == 3


@pytest.mark.parametrize(
    "sections",
    [
        pytest.param({}, marks=pytest.mark.slow),
        {"train": {"mini_batches": 2, "groups_per_step": 6, "num_epochs": 2, "weight_decay": 0.1}},
        {"model": {"lora": {"rank": 2}}},
        pytest.param(
            {"algorithm": {"kl_beta": 0.1}, "train": {"schedule": "cosine", "warmup_steps": 2}},
            marks=pytest.mark.slow,
        ),
    ],
    ids=["plain", "mini_batches", "lora", "kl_schedule"],
)
def test_training_after_load_is_bitwise_what_it_would_have_been(
    saved_model, tmp_path, sections
) -> None:
    first, second, third = batches(3)
    consumer = from_disk(saved_model, **sections)
    consumer.train(first)
    consumer.train(second)
    consumer.snapshot(tmp_path / "checkpoint")()
    expected = consumer.train(third)
    torch.manual_seed(99)
    resumed = from_disk(saved_model, **sections)
    resumed.load(tmp_path / "checkpoint")
    assert (resumed.step, resumed.policy_version) == (2, 2)
    got = resumed.train(third)
    assert got.digest == expected.digest
    assert got.metrics["loss/policy"] == expected.metrics["loss/policy"]


def test_a_checkpoint_is_loaded_without_a_pickle(
    saved_model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    consumer = from_disk(saved_model)
    consumer.train(batches(1)[0])
    folder = tmp_path / "checkpoint"
    consumer.snapshot(folder)()
    assert {path.suffix for path in folder.rglob("*") if path.is_file()} <= PLAIN
    with monkeypatch.context() as patch:
        patch.setattr(torch, "load", lambda *_, **__: pytest.fail("loaded a pickle"))
        resumed = from_disk(saved_model)
        resumed.load(folder)
    assert resumed.digest() == consumer.digest()


PLAIN = {".safetensors", ".json", ".toml", ".jinja", ".txt", ".model"}  # none of them is executed


def test_a_checkpoint_before_the_first_update_loads(saved_model, tmp_path) -> None:
    consumer = from_disk(saved_model)
    consumer.snapshot(tmp_path / "checkpoint")()
    expected = consumer.train(random_batch(1)).digest
    resumed = from_disk(saved_model)
    resumed.load(tmp_path / "checkpoint")
    assert resumed.train(random_batch(1)).digest == expected


def test_the_saved_model_is_a_transformers_folder_with_the_published_weights(
    saved_model, tmp_path
) -> None:
    from transformers import AutoModelForCausalLM

    consumer = from_disk(saved_model)
    consumer.train(random_batch(1))
    consumer.snapshot(tmp_path / "checkpoint")()
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "checkpoint" / "model")
    published = dict(consumer.weights())
    assert set(published) == {name for name, _ in loaded.named_parameters()}
    assert "lm_head.weight" not in published  # tied: it goes out once
    for name, parameter in loaded.named_parameters():
        assert torch.equal(parameter, published[name])


def test_sampling_settings_that_transformers_refuses_to_write_are_saved_as_they_were(
    saved_model, tmp_path
) -> None:
    """Llama 2 and many others have a temperature beside do_sample = false."""
    file = saved_model / "generation_config.json"
    settings = {"do_sample": False, "temperature": 0.6, "eos_token_id": 2}
    file.write_text(json.dumps(settings))
    consumer = from_disk(saved_model)
    consumer.snapshot(tmp_path / "checkpoint")()
    saved = json.loads((tmp_path / "checkpoint" / "model" / file.name).read_text())
    assert settings.items() <= {"do_sample": False, **saved}.items()  # without what is the default


def test_a_checkpoint_of_another_model_is_refused(saved_model, tmp_path) -> None:
    from_disk(saved_model).snapshot(tmp_path / "checkpoint")()
    other = consumer_of(config_of(), model=tiny_model("Llama", dtype=torch.float32))
    with pytest.raises(RunError, match="weights are not the model's"):
        other.load(tmp_path / "checkpoint")


def test_the_demo_policy_is_the_default_model() -> None:
    consumer = Consumer.from_config(config_of(), total_steps=1)
    assert dict(consumer.weights())


def test_a_path_that_is_no_model_is_one_clear_line(tmp_path) -> None:
    with pytest.raises(UserError, match="model: got") as caught:
        from_disk(tmp_path)
    assert "\n" not in str(caught.value)


class StopAfter:
    """Requests a stop at the n-th pack of a step."""

    def __init__(self, consumer: Consumer, packs: int) -> None:
        self._left = packs
        self._consumer = consumer
        consumer.policy.register_forward_hook(self)

    def __call__(self, *_) -> None:
        self._left -= 1
        if self._left == 0:
            thread = threading.Thread(target=self._consumer.request_stop)
            thread.start()
            thread.join()


def test_every_micro_batch_update_and_tensor_is_a_sign_of_life(saved_model) -> None:
    consumer = from_disk(
        saved_model,
        train={"micro_batch_tokens": 8, "num_epochs": 2},
        algorithm={"kl_beta": 0.1},  # a pass of the reference before the updates
    )
    seen: list[int] = []
    for policy in (consumer.policy, consumer.reference):
        policy.register_forward_pre_hook(lambda *_: seen.append(consumer.work_done))
    consumer.train(random_batch(1))
    assert len(seen) > 6
    assert seen == sorted(set(seen))  # one more at each
    before = consumer.work_done
    assert consumer.work_done > seen[-1] + 1  # the update, the digest
    names = [name for name, _ in consumer.weights()]
    assert consumer.work_done == before + len(names)


@pytest.mark.slow
def test_a_stop_before_the_update_leaves_everything_as_it_was(saved_model) -> None:
    settings = {"train": {"micro_batch_tokens": 8}, "model": {"lora": {"rank": 2}}}
    first, second = batches(2)
    expected = from_disk(saved_model, **settings)
    digests = [expected.train(first).digest, expected.train(second).digest]
    consumer = from_disk(saved_model, **settings)
    assert consumer.train(first).digest == digests[0]
    StopAfter(consumer, 2)
    with pytest.raises(StopRequested):
        consumer.train(second)
    assert (consumer.step, consumer.policy_version) == (1, 1)
    assert consumer.digest() == digests[0]
    assert consumer.train(second).digest == digests[1]


def test_a_stop_after_the_first_update_of_a_batch_waits_for_its_end(saved_model) -> None:
    consumer = from_disk(saved_model, train={"mini_batches": 3, "groups_per_step": 6})
    StopAfter(consumer, 3)
    assert consumer.train(random_batch(1)).policy_version == 1
    with pytest.raises(StopRequested):
        consumer.train(random_batch(2))


def test_a_non_finite_gradient_is_skipped_counted_and_in_the_end_stops_the_run(
    saved_model,
) -> None:
    consumer = from_disk(saved_model)
    before = consumer.digest()
    bad = random_batch(1)
    for rollout in bad.rollouts:
        rollout.logprobs = np.full_like(rollout.logprobs, np.nan)
    report = consumer.train(bad)
    assert report.metrics["updates/skipped"] == 1.0
    assert report.digest == before
    assert consumer.train(random_batch(2)).digest != before
    consumer.train(bad)
    consumer.train(bad)
    with pytest.raises(RunError, match="3 updates in a row had a non-finite"):
        consumer.train(bad)


def test_lora_trains_adapters_only_and_publishes_merged_weights(saved_model, tmp_path) -> None:
    from transformers import AutoModelForCausalLM

    consumer = from_disk(saved_model, model={"lora": {"rank": 2, "alpha": 4.0}})
    assert all("lora_" in name for name in consumer.masters.parameters)
    base = dict(from_disk(saved_model).weights())
    assert all(torch.equal(tensor, base[name]) for name, tensor in consumer.weights())
    for batch in batches(2):
        consumer.train(batch)
    changed = {n for n, tensor in consumer.weights() if not torch.equal(tensor, base[n])}
    assert changed == {name for name in base if name.endswith("_proj.weight")}
    consumer.snapshot(tmp_path / "checkpoint")()
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "checkpoint" / "model")
    ids = torch.randint(1, VOCABULARY, (1, 7))
    own = consumer.policy.model
    own.set_attn_implementation("sdpa")
    torch.testing.assert_close(merged(ids).logits, own(ids).logits)


def test_with_lora_the_base_weights_are_the_reference(saved_model) -> None:
    batch = random_batch(1)
    kl = {"algorithm": {"kl_beta": 0.1}}
    adapted = from_disk(saved_model, model={"lora": {"rank": 2}}, **kl)
    assert adapted.reference is None
    assert adapted.train(batch).metrics["kl/mean"] == pytest.approx(0.0, abs=1e-9)
    assert adapted.train(random_batch(2)).metrics["kl/mean"] > 0
    full = from_disk(saved_model, **kl)
    assert full.reference is not None
    full.train(batch)
    assert full.train(random_batch(2)).metrics["kl/mean"] > 0


def test_no_reference_is_loaded_without_a_coefficient(saved_model) -> None:
    assert from_disk(saved_model).reference is None


def test_another_reference_model_can_be_named(saved_model, tmp_path) -> None:
    tiny_model(seed=7, dtype=torch.float32).save_pretrained(tmp_path / "other")
    consumer = from_disk(
        saved_model,
        algorithm={"kl_beta": 0.1},
        train={"reference": str(tmp_path / "other")},
    )
    assert consumer.train(random_batch(1)).metrics["kl/mean"] > 0.1


@pytest.mark.parametrize("kl_in", ["loss", "reward"])
def test_kl_has_a_bound_and_a_metric_of_how_often_it_acts(kl_in) -> None:
    """The reference is the policy with sharper logits: it gives some tokens far more probability."""
    batch, norms = random_batch(1), []
    for sharpness in (1.0, 3.0, 9.0):
        reference = tiny_model(seed=3)
        with torch.no_grad():
            reference.get_output_embeddings().weight *= sharpness
        config = config_of(algorithm={"kl_beta": 0.05, "kl_in": kl_in})
        metrics = consumer_of(config, reference=reference).train(batch).metrics
        norms.append(metrics["grad_norm"])
        assert metrics["kl/mean"] <= 10
        assert (metrics["kl/bounded"] > 0.03) == (sharpness > 1)
    assert max(norms) < 3 * norms[0]
    other = config_of(algorithm={"kl_beta": 0.05, "kl_estimator": "k2"})
    assert "kl/bounded" not in consumer_of(other, reference=tiny_model()).train(batch).metrics


@pytest.mark.parametrize(
    "adapters",
    [pytest.param({}, marks=pytest.mark.slow), {"lora": {"rank": 2}}],
)
@pytest.mark.parametrize(
    ("kind", "fields"),
    [
        ("Qwen3", {"attention_dropout": 0.5}),
        ("OPT", {"ffn_dim": 32, "word_embed_proj_dim": 16, "dropout": 0.5}),  # in its layers
    ],
)
def test_checkpointing_changes_memory_and_turns_no_dropout_on(
    tmp_path, kind, fields, adapters
) -> None:
    tiny_model(kind, dtype=torch.float32, **fields).save_pretrained(tmp_path / "policy")
    digests, calls = [], []
    without_dropout = from_disk(tmp_path / "policy").train(random_batch(1)).metrics["ratio/mean"]
    for flag in (False, True):
        consumer = from_disk(
            tmp_path / "policy", model=adapters, train={"gradient_checkpointing": flag}
        )
        count = []
        queries = consumer.policy.layers[0].self_attn.q_proj
        queries.register_forward_hook(lambda *_, count=count: count.append(1))
        report = consumer.train(random_batch(1))  # new adapters change nothing
        assert report.metrics["ratio/mean"] == pytest.approx(without_dropout, rel=1e-5)
        digests.append(report.digest)
        calls.append(len(count))
    assert digests[0] == digests[1]
    assert calls[1] > calls[0]  # computed again in the backward pass


def test_bfloat16_compute_keeps_float32_masters(saved_model) -> None:
    consumer = from_disk(saved_model, model={"dtype": "bfloat16"}, train={"lr": 1e-5})
    assert consumer.masters.separate
    masters = {name: p.detach().clone() for name, p in consumer.masters.parameters.items()}
    for batch in batches(2):
        consumer.train(batch)
    moved = sum(
        float((consumer.masters.parameters[name].detach() - old).abs().sum())
        for name, old in masters.items()
    )
    assert moved > 0
    for name, tensor in consumer.weights():
        assert tensor.dtype == torch.bfloat16
        assert torch.equal(tensor, consumer.masters.parameters[name].bfloat16())


def test_adapters_without_peft_are_a_users_error(monkeypatch) -> None:
    import sys

    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(UserError, match="peft"):
        add_adapters(tiny_model(), config_of(model={"lora": {"rank": 2}}).model.lora)


@pytest.mark.parametrize("mini_batches", [1, 2])
@pytest.mark.parametrize("kind", ["none", "token_truncate"])
def test_tokens_of_the_newest_weights_may_have_the_trainers_log_probs_as_old_ones(
    kind: str, mini_batches: int
) -> None:
    """As if the engine had reported the trainer's own log-probs; those of older tokens stay as sampled."""
    train = {"lr": 1e-2, "mini_batches": mini_batches}

    def trained(newest: str, batch: Batch) -> Consumer:
        algorithm = {"correction": {"kind": kind, "newest": newest}}
        consumer = consumer_of(config_of(train=train, algorithm=algorithm))
        consumer.step = consumer.policy_version = batch.step - 1
        report = consumer.train(batch)
        if newest == "trainer" and batch.step == 1 and mini_batches == 1:
            assert report.metrics["ratio/max"] == report.metrics["ratio/mean"] == 1.0
            assert report.metrics["mismatch/kl"] > 0  # the engine's gap stays visible
        return consumer

    exact = random_batch(1)
    flat = FlatBatch.from_groups(exact.groups, 1, consumer_of(config_of()).settings)
    consumer = consumer_of(config_of())
    inputs = TokenInputs.from_batch(flat, torch.float64, consumer.policy.device)
    own_N = consumer._logprobs(flat, inputs, consumer.policy).numpy()
    for rollout, part_N in zip(exact.rollouts, np.split(own_N, flat.bounds_R1[1:-1]), strict=True):
        rollout.logprobs = part_N
    wanted = trained("engine", exact).masters.parameters
    got = trained("trainer", random_batch(1)).masters.parameters
    assert all(torch.allclose(got[name], wanted[name], rtol=1e-9, atol=1e-12) for name in wanted)
    stale = [trained(newest, random_batch(2)).digest() for newest in ("engine", "trainer")]
    assert stale[0] == stale[1]

"""Low-rank adapters: trained and published weights are one model, whatever layers have adapters."""

import copy
import re

import numpy as np
import pytest
import torch

from penstock import cli
from penstock.errors import UserError
from penstock.training.flat_batch import FlatBatch
from penstock.training.objective import TokenInputs
from penstock.training.snapshot import take_snapshot, write_adapters
from stages.command_runs import train
from stages.tiny_architectures import make
from stages.training_data import batches, from_disk, random_batch, tiny_model


def saved(folder, kind="Qwen3", **fields):
    tiny_model(kind, dtype=torch.float32, **fields).save_pretrained(folder)
    return folder


def own_and_published_logprobs(consumer):
    """Return the trainer's log-probs of a batch, and those of a plain model with its published weights."""
    import transformers

    flat = FlatBatch.from_groups(random_batch().groups, 1, consumer.settings)
    inputs = TokenInputs.from_batch(flat, torch.float32, consumer.policy.device)
    own = consumer._logprobs(flat, inputs, consumer.policy).numpy()
    plain = transformers.AutoModelForCausalLM.from_config(
        copy.deepcopy(consumer.policy.model.config), attn_implementation="eager"
    )
    plain.load_state_dict(dict(consumer.weights()), strict=False)
    plain.tie_weights()
    rows = []
    with torch.no_grad():
        for ids, predictors in zip(flat.token_ids, flat.predictors, strict=True):
            scores = plain.eval()(torch.from_numpy(ids)[None].long()).logits[0].log_softmax(-1)
            rows.append(scores[predictors, ids[predictors + 1]].numpy())
    return own, np.concatenate(rows)


@pytest.mark.parametrize(
    ("model_type", "adapted", "without"),
    [
        ("deepseek_v3", {"kv_b_proj", "gate_proj", "down_proj"}, "mlp.experts.gate_up_proj"),
        pytest.param(
            "glm4_moe", {"q_proj", "up_proj"}, "mlp.experts.gate_up_proj", marks=pytest.mark.slow
        ),
        pytest.param("qwen3_moe", {"q_proj"}, "mlp.experts.gate_up_proj", marks=pytest.mark.slow),
        pytest.param("mixtral", {"o_proj"}, "mlp.experts.gate_up_proj", marks=pytest.mark.slow),
        pytest.param("gpt_oss", {"v_proj"}, "mlp.experts.gate_up_proj", marks=pytest.mark.slow),
    ],
)
def test_experts_train_without_adapters_and_the_run_says_so(
    tmp_path, model_type, adapted, without
) -> None:
    """Dense and shared layers beside experts have adapters; what is trained is what is published."""
    make(model_type).save_pretrained(tmp_path / "policy")
    consumer = from_disk(tmp_path / "policy", model={"lora": {"rank": 2}})
    for batch in batches(2):
        consumer.train(batch)
    own, published = own_and_published_logprobs(consumer)
    assert np.abs(own - published).max() < 1e-4
    layers, _, rest = consumer.adapters.partition("; without: ")
    assert adapted <= set(re.split(r"[ ,()]+", layers))
    assert without in rest


@pytest.mark.parametrize(
    ("kind", "fields"),
    [
        pytest.param("Qwen3", {"tie_word_embeddings": False}, marks=pytest.mark.slow),
        ("Qwen3", {"tie_word_embeddings": True}),
        ("GPT2", {"bos_token_id": 1, "eos_token_id": 2}),
    ],
)
def test_the_trained_model_is_the_published_model(tmp_path, kind, fields) -> None:
    consumer = from_disk(saved(tmp_path / "policy", kind, **fields), model={"lora": {"rank": 2}})
    before, _ = own_and_published_logprobs(consumer)
    for batch in batches(3):
        consumer.train(batch)
    own, published = own_and_published_logprobs(consumer)
    assert np.abs(own - before).max() > 1e-2
    assert np.abs(own - published).max() < 1e-4


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("target", ["lm_head", "embed_tokens", "all-linear", "q_prj", "mlp"])
def test_a_module_that_cannot_have_adapters_is_one_line(tmp_path, target, tied) -> None:
    folder = saved(tmp_path / "policy", tie_word_embeddings=tied)
    lora = {"rank": 2, "target_modules": ["q_proj", target]}
    with pytest.raises(UserError, match=rf"got \['{target}'\], allowed: linear layers .*q_proj"):
        from_disk(folder, model={"lora": lora})


def test_only_the_named_layers_get_adapters(tmp_path) -> None:
    lora = {"rank": 2, "target_modules": ["q_proj", "layers.1.mlp.up_proj"]}
    consumer = from_disk(saved(tmp_path / "policy"), model={"lora": lora})
    adapted = {name.split(".lora_")[0] for name in consumer.masters.parameters}
    assert adapted == {
        "model.layers.0.self_attn.q_proj",
        "model.layers.1.self_attn.q_proj",
        "model.layers.1.mlp.up_proj",
    }


@pytest.mark.slow
def test_the_command_ends_with_one_line_and_exit_code_2(tmp_path, monkeypatch, capsys) -> None:
    targets = 'model.lora.target_modules=["lm_head"]'
    words = ["train", "launch.kind=inline", "model.lora.rank=2", targets]
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.argv", ["penstock", *words])
    with pytest.raises(SystemExit) as left:
        cli.main()
    assert left.value.code == 2
    errors = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1
    assert "model.lora.target_modules: got ['lm_head'], allowed: linear layers" in errors[0]


def test_adapters_of_a_checkpoint_load_with_peft(tmp_path) -> None:
    import peft
    import transformers

    policy = saved(tmp_path / "policy", tie_word_embeddings=False)
    consumer = from_disk(policy, model={"lora": {"rank": 2, "alpha": 8.0}})
    consumer.train(batches(1)[0])
    take_snapshot(consumer, tmp_path / "checkpoint")()
    write_adapters(tmp_path / "checkpoint", consumer.config.model, tmp_path)
    base = transformers.AutoModelForCausalLM.from_pretrained(policy)
    merged = peft.PeftModel.from_pretrained(base, tmp_path).merge_and_unload().state_dict()
    trained = dict(consumer.weights())
    assert merged.keys() == trained.keys()
    for name, weight in trained.items():
        assert torch.allclose(merged[name], weight, atol=1e-6), name
    assert any(
        not torch.equal(weight, base_weight) for weight, base_weight in changed(policy, trained)
    )


def test_adapters_that_peft_would_load_onto_experts_are_not_written(tmp_path) -> None:
    make("glm4_moe").save_pretrained(tmp_path / "policy")
    consumer = from_disk(tmp_path / "policy", model={"lora": {"rank": 2}})
    take_snapshot(consumer, tmp_path / "checkpoint")()
    with pytest.raises(
        UserError, match="got adapters on down_proj, gate_proj, up_proj, which peft"
    ):
        write_adapters(tmp_path / "checkpoint", consumer.config.model, tmp_path / "adapter")
    assert not (tmp_path / "adapter").exists()


def changed(policy, trained):
    import transformers

    before = transformers.AutoModelForCausalLM.from_pretrained(policy).state_dict()
    return [(trained[name], weight) for name, weight in before.items()]


def test_a_run_says_which_layers_have_adapters(tmp_path) -> None:
    run = train(tmp_path, "adapters", "train.steps=1", "model.lora.rank=2")
    assert run.code == 0, run.told
    assert run.told.count("adapters: on 14 linear layers (down_proj, gate_proj, k_proj,") == 1

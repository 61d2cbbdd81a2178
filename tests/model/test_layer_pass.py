"""A whole layer as one function against the model's own code: log-probs and the gradients of masters."""

from __future__ import annotations

import copy
import types
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from stages.training_data import (
    VOCABULARY,
    Gradients,
    config_of,
    consumer_of,
    exact_model,
    random_batch,
    relative_gap,
    tiny_model,
)

pytest.importorskip("triton")
from penstock.model.kernels import end_pass, layer_pass, layer_step_kernels, layer_steps
from penstock.training.optimizer import Masters
from penstock.training.pack import make_pack
from penstock.training.policy import Policy
from penstock.training.stats import UpdateLoss

CPU = torch.device("cpu")
KERNELS = types.SimpleNamespace(  # by Triton's interpreter; attention and products need a GPU
    **vars(layer_step_kernels)
    | {name: getattr(layer_steps, name) for name in ("attend", "attend_back", "add_product")}
)
MODELS = [
    ("Llama", {}),
    ("Qwen2", {"num_key_value_heads": 1}),  # with biases
    ("Mistral", {"sliding_window": None, "tie_word_embeddings": False}),
    ("Qwen3", {}),  # with norms of queries and keys
]


@pytest.fixture(autouse=True)
def as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let policies run the model's own layers, as on a GPU; on a CPU the decoder would compute."""
    monkeypatch.setattr(Policy, "decodes", False)


def identity(model: nn.Module) -> dict[int, nn.Parameter]:
    return {id(one): one for one in model.parameters()}


def rows(*, shared: bool, seed: int = 0) -> tuple[Any, Any, Any]:
    """Return token ids, predictors and first tokens: three groups of one prompt each, or single rows."""
    generator = np.random.default_rng(seed)
    ids, predictors = [], []
    for prompt in (6, 4, 6):
        begin = generator.integers(1, VOCABULARY, prompt)
        for length in (5, 1, 3, 5):
            if not shared:
                begin = generator.integers(1, VOCABULARY, prompt)
            ids.append(np.concatenate([begin, generator.integers(1, VOCABULARY, length)]))
            predictors.append(np.arange(prompt - 1, prompt + length - 1))
    return ids, predictors, np.cumsum([0, *(len(index) for index in predictors)])


def train_packs(policy: Policy, *, shared: bool) -> list[torch.Tensor]:
    """Run two packs forward and backward; gradients add up. Return the log-probs of each."""
    ids, predictors, starts = rows(shared=shared)
    results = []
    for part in (range(8), range(8, 12)):
        pack = make_pack(part, ids, predictors, starts, policy.device)
        assert (pack.layout.shared is not None) == shared
        exact = torch.promote_types(policy.model.dtype, torch.float32)
        ones = torch.ones(len(pack.target_N), dtype=exact, device=policy.device)
        logprobs, _ = policy(pack, ones)
        factors = torch.arange(len(logprobs), device=policy.device).sin()
        (logprobs * factors).sum().backward()
        results.append(logprobs.detach())
    return results


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize(("kind", "fields"), MODELS)
def test_gradients_in_float64_are_those_of_the_models_own_code(kind, fields, shared) -> None:
    plain = exact_model(kind, **fields)
    whole = copy.deepcopy(plain)
    policies = Policy(plain), Policy(whole)
    assert layer_pass.install(whole, identity(whole), layer_steps) == 2
    wanted, got = (train_packs(policy, shared=shared) for policy in policies)
    torch.testing.assert_close(got, wanted, rtol=1e-10, atol=1e-10)
    for (name, one), other in zip(whole.named_parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad, msg=name, rtol=1e-9, atol=1e-9)
    layer_pass.restore(whole)
    assert "forward" not in vars(whole.model.layers[0])


@pytest.mark.parametrize(
    ("kind", "shared"),
    [
        pytest.param("Qwen2", False, marks=pytest.mark.slow),
        ("Qwen2", True),
        pytest.param("Qwen3", True, marks=pytest.mark.slow),
    ],
)
def test_gradients_by_the_kernels_are_those_of_the_models_own_code(kind, shared) -> None:
    plain, whole = (tiny_model(kind, dtype=torch.float32) for _ in range(2))
    policies = Policy(plain), Policy(whole)
    assert layer_pass.install(whole, identity(whole), KERNELS) == 2
    wanted, got = (train_packs(policy, shared=shared) for policy in policies)
    torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-5)
    for (name, one), other in zip(whole.named_parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad, msg=name, rtol=1e-3, atol=1e-4)


def test_what_a_layer_keeps_for_its_backward_pass() -> None:
    """For each token: input, norm, q, k and v, attention, sum, norm, gate and up, a number for each norm, cos and sin."""
    model = tiny_model("Llama", dtype=torch.float32)
    Policy(model)
    assert layer_pass.install(model, identity(model), layer_steps) == 2
    layer = model.model.layers[0].layer_pass
    x_TD, cos, sin, layout = layer.probe()
    _, kept = layer.forward(x_TD, cos, sin, layout)
    config, heads = model.config, layer.heads
    joint = heads.rotated + heads.keys * heads.size
    row = 4 * config.hidden_size + joint + heads.queries * heads.size
    row += 2 * config.intermediate_size + 2
    assert sum(one.numel() for one in kept) == len(x_TD) * (row + 2 * heads.size)


def test_a_copy_of_the_model_runs_its_own_code_and_leaves_the_masters_alone() -> None:
    model = tiny_model("Qwen3", dtype=torch.bfloat16)
    Policy(model)
    masters = {id(one): nn.Parameter(one.detach().float()) for one in model.parameters()}
    assert layer_pass.install(model, masters, layer_steps) == 2
    copied = copy.deepcopy(model)
    layer, twin = model.model.layers[1], copied.model.layers[1]
    x_TD, *turns, layout = layer.layer_pass.probe()
    named = {"position_embeddings": tuple(turns), "pack_layout": layout, "attention_mask": None}
    got, wanted = (one(x_TD[None].requires_grad_(), **named) for one in (twin, layer))
    torch.testing.assert_close(got, wanted, rtol=0.02, atol=0.02)
    got.sum().backward()
    assert all(one.grad is not None for one in twin.parameters())
    assert all(one.grad is None for one in (*masters.values(), *layer.parameters()))
    layer_pass.warm_up(copied)
    layer_pass.restore(copied)
    assert "forward" not in vars(twin)


def test_masters_of_rounded_weights_get_float32_gradients_and_nothing_else_does() -> None:
    """The joint weights follow the masters after an update, and the next update begins at zero."""
    model = tiny_model("Qwen2", dtype=torch.bfloat16)
    policy = Policy(model)
    masters = {id(one): nn.Parameter(one.detach().float()) for one in model.parameters()}
    assert layer_pass.install(model, masters, layer_steps) == 2
    layer_pass.warm_up(model)
    assert all(master.grad is None for master in masters.values())
    before = train_packs(policy, shared=True)
    layer = model.model.layers[0]
    weights = [
        layer.self_attn.q_proj.weight,
        layer.mlp.up_proj.weight,
        layer.input_layernorm.weight,
    ]
    first = [masters[id(weight)].grad.clone() for weight in weights]
    assert all(grad.dtype is torch.float32 and grad.abs().max() > 0 for grad in first)
    assert all(weight.grad is None for weight in weights)
    for master in masters.values():
        master.grad = None
    train_packs(policy, shared=True)
    for weight, grad in zip(weights, first, strict=True):
        torch.testing.assert_close(masters[id(weight)].grad, grad, rtol=0, atol=0)
    with torch.no_grad():
        for weight in (layer.self_attn.k_proj.weight, layer.mlp.gate_proj.weight):
            weight.mul_(2)
    assert not torch.equal(train_packs(policy, shared=True)[0], before[0])


def test_joint_weights_and_their_gradients_by_hand() -> None:
    parts = [nn.Parameter(torch.full((2, 8), 1.0)), nn.Parameter(torch.full((1, 8), 2.0))]
    masters = [nn.Parameter(one.detach().clone()) for one in parts]
    by_id = {id(part): master for part, master in zip(parts, masters, strict=True)}
    joint = layer_pass.Joint(parts, by_id)
    left = torch.tensor([[1.0, 2.0, 3.0], [0.0, 1.0, -1.0]])  # [tokens, outputs]
    right = torch.tensor([[1.0], [10.0]]).expand(2, 8).contiguous()  # [tokens, inputs]
    joint.add(layer_steps.add_product, left, right)
    assert masters[0].grad[:, 0].tolist() == [1.0, 12.0]
    assert masters[1].grad[:, 0].tolist() == [-7.0]
    joint.add(layer_steps.add_product, left, right)
    assert masters[0].grad[:, 0].tolist() == [2.0, 24.0]
    masters[1].grad = None  # by someone else
    joint.add(layer_steps.add_product, left, right)
    assert masters[0].grad[:, 0].tolist() == [3.0, 36.0]
    assert masters[1].grad[:, 0].tolist() == [-7.0]
    assert joint.values()[:, 0].tolist() == [1.0, 1.0, 2.0]
    with torch.no_grad():
        parts[1].fill_(5.0)
    assert joint.values()[:, 0].tolist() == [1.0, 1.0, 5.0]
    parts[0].data = torch.full((2, 8), 4.0)  # moves away
    assert joint.values()[:, 0].tolist() == [4.0, 4.0, 5.0]
    assert layer_pass.Joint(parts, by_id).values().data_ptr() == joint.values().data_ptr()


@pytest.mark.parametrize(
    ("kind", "fields"),
    [
        ("Granite", {"residual_multiplier": 0.3}),
        ("Mistral", {"sliding_window": 3}),
        ("Llama", {"hidden_act": "gelu"}),
        ("Llama", {"mlp_bias": True}),
        ("Olmo", {}),  # its norms have no weights
        ("Gemma2", {"query_pre_attn_scalar": 8}),
    ],
)
def test_a_layer_that_computes_something_else_keeps_its_own_code(kind, fields) -> None:
    model = tiny_model(kind, dtype=torch.float32, **fields)
    Policy(model)
    assert layer_pass.install(model, identity(model), layer_steps) == 0
    assert "forward" not in vars(model.model.layers[0])


def test_a_layer_without_masters_or_with_checkpoints_keeps_its_own_code() -> None:
    model = tiny_model("Llama", dtype=torch.float32)
    policy = Policy(model)
    assert layer_pass.install(model, {}, layer_steps) == 0
    policy.checkpoint_layers()
    assert layer_pass.install(model, identity(model), layer_steps) == 0


@pytest.mark.parametrize("tied", [False, True])
def test_head_and_embedding_add_to_their_masters_what_they_add_by_themselves(tied) -> None:
    """The head's product in float32, and of the embedding only the rows of the pack's tokens."""
    gradients = []
    for ends in (False, True):
        model = tiny_model("Qwen2", dtype=torch.float32, tie_word_embeddings=tied)
        policy = Policy(model)
        masters = Masters(model, torch.bfloat16, sharding=policy.sharding)
        if ends:
            given = masters.of_parameters()
            policy._add_to_head = end_pass.install(model, given, layer_steps)
            assert "forward" in vars(model.get_input_embeddings())
        train_packs(policy, shared=True)
        assert all(one.grad is None for one in model.parameters())
        gradients.append({name: one.grad for name, one in masters.parameters.items()})
        end_pass.restore(model)
        assert "forward" not in vars(model.get_input_embeddings())
    assert all(grad.dtype is torch.float32 for grad in gradients[1].values())
    assert relative_gap(gradients[1], gradients[0]) < 0.01
    for name, grad in gradients[0].items():
        assert relative_gap({name: gradients[1][name]}, {name: grad}) < 0.01, name


def test_updates_of_several_packs_change_the_weights_as_the_models_own_code_does() -> None:
    """Through the consumer, with shared prompts, clipping and AdamW; a snapshot's weights are the same too."""
    config = config_of(train={"micro_batch_tokens": 24, "lr": 1e-3})
    weights = []
    for whole in (False, True):
        consumer = consumer_of(config, model=exact_model("Qwen2"))
        if whole:
            model = consumer.policy.model
            assert layer_pass.install(model, identity(model), layer_steps) == 2
        for step in (1, 2):
            consumer.train(random_batch(step, seed=step))
        weights.append(dict(consumer.weights()))
    for name, wanted in weights[0].items():
        torch.testing.assert_close(weights[1][name], wanted, msg=name, rtol=1e-8, atol=1e-8)


# ---- on a GPU, in bfloat16

SHAPE = {
    "hidden_size": 192, "intermediate_size": 320, "num_attention_heads": 6, "num_key_value_heads": 2,
    "head_dim": 64, "num_hidden_layers": 3,
}  # fmt: skip


def on_gpu(kind: str, monkeypatch: pytest.MonkeyPatch, *, whole: bool, **train: Any) -> Any:
    """Return a consumer in bfloat16 on the GPU, with whole layers or with today's fused parts."""
    installed = []
    own = layer_pass.install

    def install(*given: Any) -> int:
        installed.append(own(*given) if whole else 0)
        return installed[-1]

    with monkeypatch.context() as patch:
        patch.setattr(layer_pass, "install", install)
        model = tiny_model(kind, dtype=torch.float32, **SHAPE).to("cuda")
        config = config_of(train=train, model={"dtype": "bfloat16"})
        consumer = consumer_of(config, model=model)
    assert installed
    assert installed[-1] == (3 if whole else 0)
    return consumer


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["Llama", "Qwen2", "Qwen3"])
def test_on_a_gpu_gradients_are_as_near_to_float64_as_those_of_the_fused_parts(
    kind, monkeypatch
) -> None:
    """Several packs with shared prompts; masters' gradients in float32."""
    batch = random_batch(groups=8)
    consumer = consumer_of(config_of(), model=exact_model(kind, **SHAPE))
    taken = Gradients(consumer)
    consumer.train(batch)
    exact = {name: one.double() for name, one in taken.updates[0].items()}
    gaps, gradients = [], []
    for whole in (False, True):
        consumer = on_gpu(kind, monkeypatch, whole=whole, micro_batch_tokens=64)
        taken = Gradients(consumer)
        consumer.train(batch)
        gradients.append({name: one.double().cpu() for name, one in taken.updates[0].items()})
        gaps.append(relative_gap(gradients[-1], exact))
    assert gaps[1] < 1.25 * gaps[0] + 1e-3
    assert relative_gap(gradients[1], gradients[0]) < 2 * gaps[0] + 1e-3


@pytest.mark.gpu
@pytest.mark.parametrize("shared", [False, True])
def test_on_a_gpu_a_layer_gives_what_its_fused_parts_give(shared, monkeypatch) -> None:
    whole, parts = (on_gpu("Qwen2", monkeypatch, whole=one).policy for one in (True, False))
    for got, wanted in zip(
        train_packs(whole, shared=shared), train_packs(parts, shared=shared), strict=True
    ):
        assert float((got - wanted).abs().mean()) < 0.02


@pytest.mark.gpu
def test_on_a_gpu_updates_change_the_weights_as_the_fused_parts_do(monkeypatch) -> None:
    """The masters' changes over two updates; AdamW's first steps have one size, so that signs decide."""
    changes = []
    for whole in (False, True):
        consumer = on_gpu("Qwen2", monkeypatch, whole=whole, micro_batch_tokens=64, lr=1e-4)
        before = {n: one.detach().clone() for n, one in consumer.masters.parameters.items()}
        for step in (1, 2):
            consumer.train(random_batch(step, seed=step, groups=8))
        assert all(one.grad is None for one in consumer.policy.model.parameters())
        after = consumer.masters.parameters
        changes.append(torch.cat([(after[n] - before[n]).flatten() for n in before]))
    assert torch.cosine_similarity(changes[0], changes[1], dim=0) > 0.9


@pytest.mark.gpu
def test_on_a_gpu_the_host_waits_for_no_pack_and_no_optimizer(monkeypatch) -> None:
    """It prepares what comes next while the GPU works; torch raises an error where it would wait."""
    consumer = on_gpu("Qwen2", monkeypatch, whole=True, micro_batch_tokens=64)
    first, second = random_batch(1, groups=8), random_batch(2, seed=2, groups=8)
    for rollout in (*first.rollouts, *second.rollouts):
        rollout.min_tokens = 1000  # end tokens are banned everywhere
    consumer.train(first)  # compiles
    current = consumer._prepare(second, num_updates=1)
    packs = consumer.work_done
    torch.cuda.set_sync_debug_mode("error")
    try:
        (part,) = current.parts
        consumer._accumulate(current, part, np.arange(len(part.flat.rollouts)))
        loss = UpdateLoss([(part.stats, part.weight)], consumer.ranks)
        before = consumer.arrival.sample()
        outcome = consumer._apply_update(1e-3, loss)
        share = consumer.arrival.share(before)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert consumer.work_done > packs + 3
    assert np.isfinite(loss())
    assert outcome()[0] > 0
    assert outcome()[1]
    assert 0.5 < share() < 1.5


@pytest.mark.gpu
def test_on_a_gpu_products_are_added_to_float32_sums() -> None:
    draw = torch.Generator("cuda").manual_seed(0)
    left, right = (
        torch.randn(700, width, generator=draw, device="cuda").bfloat16() for width in (48, 80)
    )
    wanted = left.double().t() @ right.double()
    total = layer_step_kernels.add_product(None, left, right)
    assert total.dtype is torch.float32
    torch.testing.assert_close(total.double(), wanted, rtol=1e-4, atol=1e-3)
    same = layer_step_kernels.add_product(total, left, right)
    assert same is total
    torch.testing.assert_close(total.double(), 2 * wanted, rtol=1e-4, atol=1e-3)

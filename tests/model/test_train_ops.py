"""The decoder's operations for training, on a GPU or by Triton's interpreter, against plain torch under autograd."""

from __future__ import annotations

import os
import types
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from torch import nn
from torch.nn.functional import linear

from stages.decoder_cases import CASES, SMALL, make_decoder, randomise
from stages.training_data import Gradients, config_of, consumer_of, random_batch, relative_gap

pytestmark = pytest.mark.gpu(stand_in=True)
pytest.importorskip("triton")
from penstock.model.decoder import rotations, run_layer  # noqa: E402
from penstock.model.decoder_check import kinds_end  # noqa: E402
from penstock.model.decoder_weights import ModuleProducts, read_weights  # noqa: E402
from penstock.model.kernels import layer_kernels  # noqa: E402
from penstock.model.kernels.train_ops import TrainOps  # noqa: E402
from penstock.model.kernels.trained_products import (  # noqa: E402
    Joint,
    Stack,
    TrainProducts,
    add_product,
)
from penstock.model.ops import TorchOps  # noqa: E402
from penstock.model.packed_attention import Block, PackedStep, PackLayout  # noqa: E402
from penstock.training.adapters import add_adapters  # noqa: E402
from penstock.training.pack import make_pack  # noqa: E402
from penstock.training.policy import Policy  # noqa: E402
from penstock.training.stats import UpdateLoss  # noqa: E402
from stages.plain_flash import use_plain_flash  # noqa: E402

DEVICE = "cpu" if os.environ.get("TRITON_INTERPRET") == "1" else "cuda"
QUICK = {"qwen 3", "gpt oss"}
CONTEXT = 5
NEAR = 1e-5 if DEVICE == "cpu" else 3e-5


def decoder(case: str) -> Any:
    return make_decoder(case).to(DEVICE)


def run_pack(policy: Policy, *, shared: bool = True) -> torch.Tensor:
    generator = np.random.default_rng(1)
    rows = [generator.integers(0, 97, length) for length in (14, 7, 7)]
    if shared:
        rows[2][:CONTEXT] = rows[1][:CONTEXT]
    predictors = [np.arange(CONTEXT - 1, len(ids) - 1) for ids in rows]
    first = np.cumsum([0, *(len(index) for index in predictors)])
    pack = make_pack(range(len(rows)), rows, predictors, first, policy.device)
    assert (pack.layout.shared is not None) == shared
    logprobs, _ = policy(pack, torch.ones(len(pack.target_N), device=policy.device))
    return logprobs[torch.from_numpy(np.argsort(pack.token_N)).to(logprobs.device)]


def by_kernels(policy: Policy) -> dict[int, nn.Parameter]:
    """Let a policy compute as on a GPU; return the masters of its parameters."""
    masters = {
        id(p): nn.Parameter(p.detach().float().clone())
        for p in policy.model.parameters()
        if p.requires_grad
    }
    policy._table = lambda: (TrainOps(masters), products)  # type: ignore[method-assign]
    products = TrainProducts(masters)
    return masters


def assert_gradients(actual: dict[str, Any], wanted: dict[str, torch.Tensor]) -> None:
    """Each as near as float32 allows; a gradient that cancels, as that of a key's bias, is small beside the others."""
    largest = max(float(grad.norm()) for grad in wanted.values())
    for name, grad in wanted.items():
        assert actual[name] is not None, name
        gap = float((actual[name] - grad).norm())
        assert gap <= NEAR * (float(grad.norm()) + 0.1 * largest), name


def gradients(policy: Policy, masters: dict[int, nn.Parameter]) -> dict[str, Any]:
    """The gradients of all trained parameters, each either its own or its master's."""
    grads = {}
    for name, parameter in policy.model.named_parameters():
        if not parameter.requires_grad:
            continue
        direct = masters[id(parameter)].grad if id(parameter) in masters else None
        assert direct is None or parameter.grad is None, name
        grads[name] = parameter.grad if direct is None else direct
    return grads


@pytest.mark.parametrize(
    ("case", "shared"),
    [
        pytest.param(case, shared, marks=[] if case in QUICK and shared else [pytest.mark.slow])
        for case in CASES
        if case != "llama with dynamic"
        for shared in (True, False)
    ],
)
def test_log_probs_and_gradients_are_those_of_plain_torch(case, shared, monkeypatch) -> None:
    use_plain_flash(monkeypatch)
    plain, policy = (Policy(decoder(case), longest=80) for _ in range(2))
    cut_layers(plain, policy)
    masters = by_kernels(policy)
    for factor in (1.0, -0.7) if case == "llama with biases" else (1.0,):  # gradients add up
        wanted, actual = (run_pack(one, shared=shared) for one in (plain, policy))
        torch.testing.assert_close(actual, wanted, rtol=0, atol=NEAR)
        for logprobs in (wanted, actual):
            (logprobs.square().sum() * factor).backward()
    assert_gradients(gradients(policy, masters), gradients(plain, {}))


def cut_layers(*policies: Policy) -> None:
    """Keep the first layers, as many as hold every kind: the interpreter is slow."""
    for policy in policies:
        body = policy.model.get_decoder()
        body.layers = body.layers[: kinds_end(policy.family)]


@pytest.mark.slow
def test_only_masters_have_gradients_and_joint_weights_follow_a_change_of_their_parts() -> None:
    policy = Policy(decoder("llama 3"))  # with one weight for embedding and head
    cut_layers(policy)
    masters = by_kernels(policy)
    before = run_pack(policy)
    before.sum().backward()
    layer = policy.model.model.layers[0]
    trained = [p for p in policy.model.parameters() if masters[id(p)].grad is not None]
    assert len(trained) == len(list(policy.model.parameters()))
    assert all(p.grad is None for p in trained)
    with torch.no_grad():
        layer.self_attn.k_proj.weight.mul_(2)
    assert not torch.equal(run_pack(policy), before)


@pytest.mark.slow
def test_checkpointed_layers_give_the_same_gradients(monkeypatch) -> None:
    use_plain_flash(monkeypatch)  # torch's attention in float32 adds in no fixed order on a GPU
    results = []
    for checkpoints in (False, True):
        policy = Policy(decoder("qwen 3"))
        cut_layers(policy)
        masters = by_kernels(policy)
        if checkpoints:
            policy.checkpoint_layers()
        run_pack(policy).square().sum().backward()
        results.append(gradients(policy, masters))
    for name, grad in results[0].items():
        assert torch.equal(results[1][name], grad), name


@pytest.mark.parametrize("case", ["qwen 3", pytest.param("gemma 3", marks=pytest.mark.slow)])
def test_adapters_train_between_the_kernels(case, monkeypatch) -> None:
    pytest.importorskip("peft")
    use_plain_flash(monkeypatch)
    policies = []
    for _ in range(2):
        model = decoder(case)
        torch.manual_seed(0)
        add_adapters(model, config_of(model={"lora": {"rank": 2}}).model.lora)
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                torch.nn.init.normal_(parameter, std=0.1)
        policies.append(Policy(model))
    plain, policy = policies
    cut_layers(plain, policy)
    masters = by_kernels(policy)
    wanted, actual = run_pack(plain), run_pack(policy)
    torch.testing.assert_close(actual, wanted, rtol=0, atol=NEAR)
    for logprobs in (wanted, actual):
        logprobs.square().sum().backward()
    assert_gradients(gradients(policy, masters), gradients(plain, {}))


def test_what_a_layer_keeps_for_its_backward_pass(monkeypatch) -> None:
    """Input, norm, q, k and v, attention, sum, norm, gate and up; what lies between gate and down is not kept."""
    use_plain_flash(monkeypatch)
    policy = Policy(decoder("llama"))
    cut_layers(policy)
    by_kernels(policy)
    ops, products = policy._table()
    weights = read_weights(policy.model, policy.family, products)
    rows = 7
    bounds = torch.tensor([0, rows], dtype=torch.int32, device=DEVICE)
    step = PackedStep(PackLayout(blocks=(Block(1, rows),), bounds_S1=bounds, longest=rows))
    tables = rotations(policy.family, torch.arange(rows, device=DEVICE), torch.float32)
    x = torch.randn(rows, 32, device=DEVICE, requires_grad=True)
    kept: dict[int, int] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes() // 4
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        run_layer(ops, policy.family, 0, step, tables, None, weights.layers[0], x)
    hidden, joint, attended, both = 4 * 32, (4 + 2 + 2) * 8, 4 * 8, 2 * 48
    small = 4 * rows + 2 * rows + 3  # a number for each head and each norm, the state of the kernel
    assert sum(kept.values()) == rows * (hidden + joint + attended + both) + small


# ---- products and sums by hand


def test_joint_weights_and_their_gradients_by_hand() -> None:
    parts = [nn.Parameter(torch.full((2, 8), 1.0)), nn.Parameter(torch.full((1, 8), 2.0))]
    masters = [nn.Parameter(one.detach().clone()) for one in parts]
    by_id = {id(part): master for part, master in zip(parts, masters, strict=True)}
    joint = Joint(parts, by_id)
    left = torch.tensor([[1.0, 2.0, 3.0], [0.0, 1.0, -1.0]])  # [tokens, outputs]
    right = torch.tensor([[1.0], [10.0]]).expand(2, 8).contiguous()  # [tokens, inputs]
    joint.add(add_product, left, right)
    assert masters[0].grad[:, 0].tolist() == [1.0, 12.0]
    assert masters[1].grad[:, 0].tolist() == [-7.0]
    joint.add(add_product, left, right)
    assert masters[0].grad[:, 0].tolist() == [2.0, 24.0]
    masters[1].grad = None  # by someone else
    joint.add(add_product, left, right)
    assert masters[0].grad[:, 0].tolist() == [3.0, 36.0]
    assert masters[1].grad[:, 0].tolist() == [-7.0]
    assert joint.values()[:, 0].tolist() == [1.0, 1.0, 2.0]
    with torch.no_grad():
        parts[1].fill_(5.0)
    assert joint.values()[:, 0].tolist() == [1.0, 1.0, 5.0]
    parts[0].data = torch.full((2, 8), 4.0)  # moves away
    assert joint.values()[:, 0].tolist() == [4.0, 4.0, 5.0]


@pytest.mark.parametrize("transposed", [False, True])
def test_one_product_for_all_experts_and_none_for_an_expert_without_rows(transposed) -> None:
    draw = torch.Generator().manual_seed(0)
    shape = (3, 16, 8) if transposed else (3, 8, 16)  # 16 inputs, 8 outputs
    weight = nn.Parameter(torch.randn(shape, generator=draw))
    bias = nn.Parameter(torch.randn(3, 8, generator=draw))
    masters = {id(p): nn.Parameter(p.detach().clone()) for p in (weight, bias)}
    products = TrainProducts(masters)
    given = weight.transpose(1, 2) if transposed else weight
    stack = products.stacked(given, bias)
    assert isinstance(stack, Stack)
    expert = torch.tensor([0, 0, 2, 2, 2])  # sorted
    rows = types.SimpleNamespace(expert_M=expert, ends_E=torch.tensor([2, 2, 5], dtype=torch.int32))
    x = torch.randn(5, 16, generator=draw, requires_grad=True)
    actual = stack.of(rows)(x)
    plain = [linear(x[n], given[e], bias[e]) for n, e in enumerate(expert.tolist())]
    wanted = torch.stack(plain)
    torch.testing.assert_close(actual, wanted)
    actual.square().sum().backward()
    x_grad, x.grad = x.grad, None
    wanted.square().sum().backward()
    torch.testing.assert_close(x_grad, x.grad)
    for parameter in (weight, bias):
        torch.testing.assert_close(masters[id(parameter)].grad, parameter.grad)
        assert not masters[id(parameter)].grad[1].any()


def test_rows_of_equal_numbers_are_added_in_their_order() -> None:
    number = torch.tensor([3, 1, 3, 0, 3, 1], device=DEVICE)
    rows = torch.randn(6, 5, generator=torch.Generator().manual_seed(0)).to(DEVICE)
    total, wanted = torch.ones(2, 5, 5, device=DEVICE).unbind()
    layer_kernels.add_rows_(total, number, rows, skipped=1)
    wanted[0] += rows[3]
    wanted[3] += rows[0] + rows[2] + rows[4]
    torch.testing.assert_close(total, wanted)


# ---- on a GPU, in bfloat16

LARGER = {
    "hidden_size": 512, "intermediate_size": 320, "num_attention_heads": 8, "num_key_value_heads": 2,
    "head_dim": 64, "moe_intermediate_size": 64,
}  # fmt: skip
UNCLIPPED = {"clip_low": 1e9, "clip_high": 1e9}
LONG_ROPE = {"short_factor": [1.0] * 24, "long_factor": [2.0] * 24}


def larger(case: str) -> Any:
    """Return a model whose sizes fit the kernels of a GPU."""
    model_type, fields = CASES[case]
    fields = fields | {name: size for name, size in LARGER.items() if name in SMALL | fields}
    if case == "gpt oss":
        # vectors of a multiple of 8 numbers, as the optimizer's kernel reads them; all are chosen, whatever rounds
        fields = fields | {"num_local_experts": 8, "num_experts_per_tok": 8}
    if case == "phi 4 mini":
        fields = fields | {"rope_parameters": fields["rope_parameters"] | LONG_ROPE}
    config = transformers.AutoConfig.for_model(model_type, **(SMALL | fields))
    model = transformers.AutoModelForCausalLM.from_config(
        config, attn_implementation="eager", experts_implementation="eager"
    )
    randomise(model, torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(0.4 if parameter.ndim > 1 else 1.0)
    return model


def on_gpu(case: str, monkeypatch: Any, *, kernels: bool = True, **train: Any) -> Any:
    """Return a consumer in bfloat16 on the GPU, by kernels or by plain torch."""
    if not kernels:
        monkeypatch.setattr(Policy, "_table", lambda _: (TorchOps(), ModuleProducts()))
    config = config_of(train=train, model={"dtype": "bfloat16"}, algorithm=UNCLIPPED)
    consumer = consumer_of(config, model=larger(case).to("cuda"))
    assert isinstance(consumer.policy._table()[0], TrainOps) == kernels
    return consumer


@pytest.mark.gpu
@pytest.mark.parametrize("case", [case for case in CASES if case != "llama with dynamic"])
def test_on_a_gpu_gradients_are_as_near_to_float64_as_those_of_plain_torch(
    case, monkeypatch
) -> None:
    """Several packs with shared prompts; masters' gradients in float32. Rounding may choose other experts.

    No ratio is clipped: one beside its bound has a gradient or none, by its rounding.
    """
    batch = random_batch(groups=8)
    consumer = consumer_of(config_of(algorithm=UNCLIPPED), model=larger(case).double())
    taken = Gradients(consumer)
    consumer.train(batch)
    exact = {name: grad.double() for name, grad in taken.updates[0].items()}
    gaps = []
    for kernels in (False, True):
        with monkeypatch.context() as patch:
            consumer = on_gpu(case, patch, kernels=kernels, micro_batch_tokens=64)
            taken = Gradients(consumer)
            consumer.train(batch)
        actual = {name: grad.double().cpu() for name, grad in taken.updates[0].items()}
        gaps.append(relative_gap(actual, exact))
    slack = 0.05 if consumer.policy.family.experts else 5e-3
    assert gaps[1] < 1.5 * gaps[0] + slack, gaps


@pytest.mark.gpu
def test_on_a_gpu_updates_change_the_weights_as_plain_torch_does(monkeypatch) -> None:
    """The masters' changes over two updates; AdamW's first steps have one size, so that signs decide."""
    changes = []
    for kernels in (False, True):
        with monkeypatch.context() as patch:
            consumer = on_gpu("qwen 3", patch, kernels=kernels, micro_batch_tokens=64, lr=1e-4)
            before = {n: one.detach().clone() for n, one in consumer.masters.parameters.items()}
            for step in (1, 2):
                consumer.train(random_batch(step, seed=step, groups=8))
        assert all(one.grad is None for one in consumer.policy.model.parameters())
        after = consumer.masters.parameters
        changes.append(torch.cat([(after[n] - before[n]).flatten() for n in before]))
    assert torch.cosine_similarity(changes[0], changes[1], dim=0) > 0.9


@pytest.mark.gpu
def test_on_a_gpu_the_same_step_has_the_same_bits(monkeypatch) -> None:
    """With torch's deterministic algorithms, as flash attention's backward pass; nothing here adds in any order."""
    results = []
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        for _ in range(2):
            consumer = on_gpu("qwen 3 moe", monkeypatch, micro_batch_tokens=64)
            taken = Gradients(consumer)
            consumer.train(random_batch(groups=8))
            results.append({name: grad.clone() for name, grad in taken.updates[0].items()})
    finally:
        torch.use_deterministic_algorithms(False)
    for name, grad in results[0].items():
        assert torch.equal(results[1][name], grad), name


@pytest.mark.gpu
@pytest.mark.parametrize("case", ["qwen 3", "gemma 3", "gpt oss", "qwen 3 moe"])
def test_on_a_gpu_the_host_waits_for_no_pack_and_no_optimizer(case, monkeypatch) -> None:
    """It prepares what comes next while the GPU works; torch raises an error where it would wait."""
    consumer = on_gpu(case, monkeypatch, micro_batch_tokens=64)
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
    total = add_product(None, left, right)
    assert total.dtype is torch.float32
    torch.testing.assert_close(total.double(), wanted, rtol=1e-4, atol=1e-3)
    same = add_product(total, left, right)
    assert same is total
    torch.testing.assert_close(total.double(), 2 * wanted, rtol=1e-4, atol=1e-3)


@pytest.mark.gpu
def test_on_a_gpu_experts_share_one_launch() -> None:
    """In bfloat16, with an expert that no row chose; against plain products in float64."""
    draw = torch.Generator("cuda").manual_seed(0)
    weight, x, grad = (
        torch.randn(shape, generator=draw, device="cuda").bfloat16()
        for shape in ((4, 64, 32), (300, 32), (300, 64))
    )
    weight = nn.Parameter(weight)
    master = nn.Parameter(weight.detach().float())
    stack = TrainProducts({id(weight): master}).stacked(weight, None)
    ends = torch.tensor([100, 100, 117, 300], dtype=torch.int32, device="cuda")
    expert = torch.searchsorted(ends.long(), torch.arange(300, device="cuda"), right=True)
    x.requires_grad_()
    rows = types.SimpleNamespace(expert_M=expert, ends_E=ends)
    output = stack.of(rows)(x)  # type: ignore[attr-defined]
    output.backward(grad)
    exact, chosen = weight.detach().double(), torch.nn.functional.one_hot(expert, 4).double()
    wanted = torch.einsum("mi,moi->mo", x.detach().double(), exact[expert])
    torch.testing.assert_close(output.double(), wanted, rtol=2e-2, atol=0.1)
    x_grad = torch.einsum("mo,moi->mi", grad.double(), exact[expert])
    torch.testing.assert_close(x.grad.double(), x_grad, rtol=2e-2, atol=0.1)
    sums = torch.einsum("me,mo,mi->eoi", chosen, grad.double(), x.detach().double())
    torch.testing.assert_close(master.grad.double(), sums, rtol=2e-2, atol=0.3)

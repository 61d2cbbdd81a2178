"""AdamW as one kernel against plain torch: on a GPU, else by Triton's interpreter."""

from __future__ import annotations

import os
from functools import partial

import pytest
import torch

pytestmark = pytest.mark.gpu(stand_in=True)
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
pytest.importorskip("triton")
from penstock.config import TrainConfig  # noqa: E402
from penstock.model.kernels import adamw_kernels  # noqa: E402
from penstock.model.kernels.adamw_kernels import AdamWStep  # noqa: E402
from penstock.training.moments import StoredAdamW  # noqa: E402

DEVICE = "cpu" if INTERPRETED else "cuda"
SHAPES = [(40, 72), (8,), (3, 8), (16, 16), (1096,)]
NAN, INF = float("nan"), float("inf")


@pytest.fixture(autouse=True)
def _small_chunks(monkeypatch):
    """Several chunks of a tensor, and several blocks of a chunk."""
    monkeypatch.setattr(adamw_kernels, "_CHUNK", 1024)
    monkeypatch.setattr(adamw_kernels, "_BLOCK", 256)


class Side:
    """Parameters, the weights that most of them are rounded into, and AdamW over them."""

    def __init__(self, dtype: torch.dtype = torch.bfloat16, **train: object) -> None:
        torch.manual_seed(0)
        self.masters = [torch.nn.Parameter(torch.randn(shape).to(DEVICE)) for shape in SHAPES]
        model = [torch.nn.Parameter(one.detach().to(dtype)) for one in self.masters]
        self.rounded = dict(zip(self.masters[:-1], model, strict=False))
        named = {f"w{number}": one for number, one in enumerate(self.masters)}
        config = TrainConfig(lr=1e-2, weight_decay=0.1, **train)
        self.optimizer = StoredAdamW(named, config)

    def set_gradients(self, step: int, size: float) -> torch.Tensor:
        draw = torch.Generator().manual_seed(step)
        for one in self.masters:
            one.grad = size * torch.randn(one.shape, generator=draw).to(DEVICE)
        return torch.nn.utils.get_total_norm([one.grad for one in self.masters])

    def state(self) -> list[torch.Tensor]:
        moments = [self.optimizer.state[one] for one in self.masters]
        return [
            *(one.detach() for one in self.masters),
            *(state[name] for state in moments for name in ("step", "exp_avg", "exp_avg_sq")),
        ]


def launch(side: Side, step: AdamWStep, norm: torch.Tensor, loss: float) -> None:
    table = step.table()
    assert table is not None
    step.launch(table, norm, torch.tensor(loss, device=DEVICE), max_norm=1.0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_steps_are_those_of_torch(dtype) -> None:
    """Large gradients are scaled down to the largest norm, small ones are not scaled up."""
    ours, plain = Side(dtype), Side(dtype)
    assert AdamWStep.fits(ours.optimizer, ours.rounded)
    step = AdamWStep(ours.optimizer, ours.rounded)
    for number, size in enumerate([1.0, 1e-4, 3.0, 1e-3]):
        rate = 1e-2 / (1 + number)
        for side in (ours, plain):
            norm = side.set_gradients(number, size)
            for group in side.optimizer.param_groups:
                group["lr"] = rate
        launch(ours, step, norm, 0.5)
        torch.nn.utils.clip_grads_with_norm_(plain.masters, 1.0, norm)
        plain.optimizer.step()
    for got, wanted in zip(ours.state(), plain.state(), strict=True):
        torch.testing.assert_close(got, wanted, rtol=1e-5, atol=1e-7)
    if dtype == torch.float16 or not INTERPRETED:  # the interpreter cuts digits off for bfloat16
        assert all(torch.equal(weight, one.to(dtype)) for one, weight in ours.rounded.items())


@pytest.mark.parametrize(
    ("norm", "loss"), [(INF, 0.5), (NAN, 0.5), (2.0, NAN), (2.0, INF), (0.0, 0.5)]
)
def test_what_is_not_finite_or_zero_changes_nothing(norm, loss) -> None:
    side = Side()
    step = AdamWStep(side.optimizer, side.rounded)
    launch(side, step, side.set_gradients(0, 1.0), 0.5)
    before = [one.clone() for one in (*side.state(), *side.rounded.values())]
    step.warm_up()
    side.set_gradients(1, norm)
    launch(side, step, torch.tensor(norm, device=DEVICE), loss)
    assert all(map(torch.equal, before, (*side.state(), *side.rounded.values())))
    launch(side, step, side.set_gradients(2, 1.0), 0.5)
    assert not torch.equal(before[0], side.state()[0])


@pytest.mark.slow
@pytest.mark.parametrize("away", [False, True])
def test_moments_are_rounded_as_plain_torch_rounds_them(away) -> None:
    """A sum may differ in its last digit, and then its rounding too: in one of 65,536."""
    ours, plain = (Side(moments="bfloat16", offload_moments=away) for _ in range(2))
    step = AdamWStep(ours.optimizer, ours.rounded)
    step.warm_up()
    for number in range(3):
        for side in (ours, plain):
            norm = side.set_gradients(number, 1e-4)
        launch(ours, step, norm, 0.5)
        plain.optimizer.step()
    kept = [side.state()[len(SHAPES) :] for side in (ours, plain)]
    assert {one.dtype for one in kept[0] if one.ndim} == {torch.bfloat16}
    assert {one.device.type for one in kept[0] if one.ndim} == {"cpu" if away else DEVICE}
    differing = sum(int((one != other).sum()) for one, other in zip(*kept, strict=True))
    assert differing < 0.001 * sum(one.numel() for one in kept[0])


def test_what_the_kernel_does_not_cover_is_left_to_torch() -> None:
    side = Side()
    step = AdamWStep(side.optimizer, side.rounded)
    side.set_gradients(0, 1.0)
    side.masters[1].grad = None
    assert step.table() is None
    odd = torch.nn.Parameter(torch.zeros(7, device=DEVICE))
    assert not AdamWStep.fits(StoredAdamW({"odd": odd}, TrainConfig()), {})


def scaled_backward(backward, factor: float, loss: torch.Tensor) -> None:
    backward(loss * factor)


@pytest.mark.gpu
def test_an_update_on_a_gpu_is_that_of_plain_torch(saved_model) -> None:
    """Whole updates, of which the second is not finite. AdamW's first steps have one size: signs decide."""
    from stages.training_data import batches, from_disk

    reports = {}
    for kind in ("fused", "plain"):
        consumer = from_disk(
            saved_model, model={"dtype": "bfloat16", "device": "cuda"}, train={"lr": 1e-3}
        )
        if kind == "plain":
            consumer.update_step._fused = None
        assert (consumer.update_step._fused is None) == (kind == "plain")
        made, backward = [], consumer.loss_scale.backward
        before = {n: p.detach().clone() for n, p in consumer.masters.parameters.items()}
        for number, batch in enumerate(batches(3)):
            factor = NAN if number == 1 else 1.0
            consumer.loss_scale.backward = partial(scaled_backward, backward, factor)
            made.append(consumer.train(batch).metrics)
        masters, weights = consumer.masters.parameters, dict(consumer.weights())
        assert all(torch.equal(weights[n], one.detach().bfloat16()) for n, one in masters.items())
        change = torch.cat([(masters[n].detach() - before[n]).flatten() for n in before])
        reports[kind] = made, change
    assert [one["updates/skipped"] for one in reports["fused"][0]] == [0.0, 1.0, 0.0]
    for got, wanted in zip(reports["fused"][0], reports["plain"][0], strict=True):
        for name in ("grad_norm", "loss/policy", "update/arrived", "updates/skipped"):
            assert got[name] == pytest.approx(wanted[name], rel=0.02, abs=1e-3), name
    changes = [reports[kind][1] for kind in ("fused", "plain")]
    assert torch.cosine_similarity(*changes, dim=0) > 0.95
    norms = [float(change.norm()) for change in changes]
    assert norms[0] == pytest.approx(norms[1], rel=0.02)

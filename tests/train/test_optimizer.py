"""Schedules on hand-worked numbers; clipping."""

from itertools import pairwise

import pytest
import torch

from penstock.config import TrainConfig
from penstock.train.optimizer import clip_gradients, learning_rate, make_optimizer


def rates(**fields):
    config = TrainConfig(lr=1.0, **fields)
    return [learning_rate(config, step, 10) for step in range(1, 13)]


def test_constant_after_a_warm_up() -> None:
    assert rates(warmup_steps=4)[:6] == [0.25, 0.5, 0.75, 1.0, 1.0, 1.0]


def test_linear_falls_to_its_share_and_stays() -> None:
    got = rates(schedule="linear", min_lr_ratio=0.1)
    assert got[0] == 1.0
    assert got[5] == pytest.approx(0.1 + 0.9 * 0.5)
    assert got[10] == got[11] == pytest.approx(0.1)


def test_cosine_is_half_way_in_the_middle() -> None:
    got = rates(schedule="cosine", min_lr_ratio=0.1)
    assert got[0] == 1.0
    assert got[5] == pytest.approx(0.55)
    assert got[11] == pytest.approx(0.1)
    assert all(left >= right for left, right in pairwise(got))


def test_gradients_are_scaled_to_the_norm_and_never_up() -> None:
    parameter = torch.nn.Parameter(torch.zeros(2))
    parameter.grad = torch.tensor([3.0, 4.0])
    assert clip_gradients([parameter], 1.0) == pytest.approx(5.0)
    torch.testing.assert_close(parameter.grad, torch.tensor([0.6, 0.8]))
    assert clip_gradients([parameter], 10.0) == pytest.approx(1.0)
    torch.testing.assert_close(parameter.grad, torch.tensor([0.6, 0.8]))
    assert clip_gradients([torch.nn.Parameter(torch.zeros(1))], 1.0) == 0.0


def test_vectors_are_not_decayed() -> None:
    parameters = {
        "matrix": torch.nn.Parameter(torch.ones(2, 2)),
        "norm": torch.nn.Parameter(torch.ones(2)),
    }
    optimizer = make_optimizer(parameters, TrainConfig(weight_decay=0.5))
    decay = {id(p): g["weight_decay"] for g in optimizer.param_groups for p in g["params"]}
    assert decay == {id(parameters["matrix"]): 0.5, id(parameters["norm"]): 0.0}

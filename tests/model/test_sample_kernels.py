"""The kernel that samples many tensors against plain slices: on a GPU, else by Triton's interpreter."""

from __future__ import annotations

import os

import pytest
import torch

pytestmark = pytest.mark.gpu(stand_in=True)
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
pytest.importorskip("triton")
from penstock.model.kernels.sample_kernels import EvenSamples  # noqa: E402

DEVICE = "cpu" if INTERPRETED else "cuda"


def test_the_sample_is_that_of_slices() -> None:
    shapes = [(40, 70), (7, 1), (1, 1500), (3, 5)]
    steps = [(3, 2), (1, 1), (1, 1), (2, 7)]
    spacings = [
        (shape, slice(0, shape[0], rows), slice(0, shape[1], columns))
        for shape, (rows, columns) in zip(shapes, steps, strict=True)
    ]
    samples = EvenSamples(spacings)
    dtypes = [torch.float32] if INTERPRETED else [torch.float32, torch.bfloat16, torch.float16]
    for dtype in dtypes:
        for _ in range(2):  # elsewhere in memory the second time
            tensors = [torch.randn(shape).to(DEVICE, dtype) for shape in shapes]
            wanted = [
                tensor[rows, columns].float().reshape(-1)
                for tensor, (_, rows, columns) in zip(tensors, spacings, strict=True)
            ]
            assert torch.equal(samples.copy(tensors), torch.cat(wanted))


@pytest.mark.gpu
def test_a_gpu_measures_the_same_share_as_plain_torch() -> None:
    from penstock.training.arrival import Arrival
    from penstock.training.optimizer import Masters
    from penstock.training.policy import Policy
    from stages.training_data import tiny_model

    policy = Policy(tiny_model(dtype=torch.float32).to("cuda"))
    masters = Masters(policy.model, torch.bfloat16, sharding=policy.sharding)
    masters.dither(0)
    arrival, plain = Arrival(policy, masters), Arrival(policy, masters)
    assert arrival._sampler is not None
    plain._sampler = None
    before = arrival.sample()
    assert all(map(torch.equal, before, plain.sample()))
    with torch.no_grad():
        for master in masters.parameters.values():
            master.add_(1e-3 * torch.randn_like(master))
    masters.write_back()
    assert 0.5 < arrival.share(before)() < 1.5
    assert arrival.share(before)() == plain.share(before)()

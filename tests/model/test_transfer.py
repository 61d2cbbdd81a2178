"""Copies between host and device have the bits of what they copy."""

from __future__ import annotations

import pytest
import torch

from penstock.model.transfer import copy_through, to_host

SHAPES = [(), (0,), (7,), (33, 5), (2, 3, 4)]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool])
def test_a_copy_in_pieces_is_whole(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    tensor = (torch.randn(shape) * 100).to(dtype)
    copy = copy_through(torch.empty(24, dtype=torch.uint8), tensor)
    assert (copy.dtype, copy.shape) == (tensor.dtype, tensor.shape)
    assert torch.equal(copy, tensor)


def test_threads_copy_all_of_a_large_tensor() -> None:
    """Pieces of 5 MiB, each cut for four threads, and a rest."""
    tensor = torch.randint(0, 256, (13_000_001,), dtype=torch.uint8)
    assert torch.equal(copy_through(torch.empty(5 << 20, dtype=torch.uint8), tensor), tensor)


def test_a_copy_shares_nothing_and_takes_any_layout() -> None:
    tensor = torch.arange(12.0).view(3, 4).t()
    for copy in (copy_through(torch.empty(16, dtype=torch.uint8), tensor), to_host(tensor)):
        assert torch.equal(copy, tensor)
        copy.zero_()
    assert float(tensor.sum()) == 66.0


@pytest.mark.gpu
def test_a_gpus_tensor_larger_than_the_stage_arrives() -> None:
    tensor = torch.randn(5, 5_000_011, device="cuda")
    assert torch.equal(to_host(tensor), tensor.cpu())

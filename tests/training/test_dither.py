"""Dithered masters: version 0 is bitwise the checkpoint, and updates arrive in expectation."""

import pytest
import torch

from penstock.training.dither import HALF_FORMATS, Place, dither_, dither_key


@pytest.mark.parametrize("dtype", HALF_FORMATS, ids=str)
def test_rounding_a_dithered_master_gives_back_every_weight_there_is(dtype) -> None:
    bits = torch.arange(-(2**15), 2**15).to(torch.int16)
    weights = bits.view(dtype).float()
    number = ~weights.isnan()
    for key in range(4):
        masters = weights.clone().view(256, 256)
        dither_(masters, dtype, key)
        assert torch.equal(masters.view(-1).to(dtype).view(torch.int16)[number], bits[number])
        usual = (weights.abs() >= 2.0**-24) & (weights.abs() < 60000)
        assert (masters.view(-1) != weights)[usual].all()


@pytest.mark.parametrize("centre", [0.1, 0.125, -0.125, 3e-5], ids=str)
@pytest.mark.parametrize("dtype", HALF_FORMATS, ids=str)
def test_a_small_update_arrives_in_expectation_in_both_directions(dtype, centre: float) -> None:
    """At 0.125 the cell is shorter towards zero; 3e-5 is subnormal in float16."""
    weight = torch.full((1000, 1000), centre).to(dtype).float()
    step = float(weight[0, 0] - torch.tensor(centre * 0.999).to(dtype).float())  # grid steps
    step = abs(step) or abs(float(weight[0, 0])) * 2.0**-8
    master = weight.clone()
    dither_(master, dtype, 3)
    for update in (0.05 * step, -0.05 * step):
        change = (master + update).to(dtype).double() - weight.double()
        assert float(change.mean()) == pytest.approx(update, rel=0.05)


def test_numbers_off_the_grid_keep_their_digits() -> None:
    exact = torch.randn(64, 64)
    exact[::2] = exact[::2].bfloat16().float()
    moved = exact.clone()
    dither_(moved, torch.bfloat16, 1)
    off_grid = exact != exact.bfloat16().float()
    assert off_grid[1::2].float().mean() > 0.99
    assert torch.equal(moved[off_grid], exact[off_grid])
    assert (moved != exact)[::2].all()


def test_zeros_stay_zero() -> None:
    zeros = torch.tensor([0.0, -0.0])
    dither_(zeros, torch.bfloat16, 1)
    assert torch.equal(zeros.view(torch.int32), torch.tensor([0.0, -0.0]).view(torch.int32))


def test_the_place_depends_on_seed_name_and_index_only() -> None:
    key = dither_key(0, "layer.weight")
    assert len({key, dither_key(1, "layer.weight"), dither_key(0, "layer.bias")}) == 3
    whole = torch.ones(64, 48)
    dither_(whole, torch.bfloat16, key)
    shard = torch.ones(20, 48)
    dither_(shard, torch.bfloat16, key, Place(44))
    assert torch.equal(shard, whole[44:])
    some = torch.ones(10, 12)
    dither_(some, torch.bfloat16, key, Place(2, 6, 4))
    assert torch.equal(some, whole[2:62:6, ::4])
    other = torch.ones(64, 48)
    dither_(other, torch.bfloat16, key + 1)
    assert abs(float(torch.corrcoef(torch.stack([whole.flatten(), other.flatten()]))[0, 1])) < 0.1


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", HALF_FORMATS, ids=str)
def test_a_gpu_gives_the_same_places(dtype) -> None:
    bits = torch.arange(-(2**15), 2**15).to(torch.int16)
    weights = bits.view(dtype).float().view(256, 256)
    on_host, on_device = weights.clone(), weights.cuda()
    dither_(on_host, dtype, 7)
    dither_(on_device, dtype, 7)
    number = ~weights.isnan()
    assert torch.equal(on_device.cpu()[number], on_host[number])
    assert torch.equal(on_device.to(dtype).cpu()[number], weights.to(dtype)[number])

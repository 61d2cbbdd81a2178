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


@pytest.mark.parametrize("dtype", HALF_FORMATS, ids=str)
def test_numbers_of_many_digits_keep_them(dtype) -> None:
    exact = torch.randn(64, 64)
    exact[::2] = exact[::2].to(dtype).float()
    moved = exact.clone()
    dither_(moved, dtype, 1)
    long = (exact.view(torch.int32) & 0xFF) != 0
    assert long[1::2].float().mean() > 0.99
    assert torch.equal(moved[long], exact[long])
    assert (moved != exact)[::2].all()
    assert torch.equal(moved.to(dtype), exact.to(dtype))


@pytest.mark.parametrize("dtype", HALF_FORMATS, ids=str)
def test_short_numbers_between_those_of_the_format_are_placed_too(dtype) -> None:
    """A quarter of these lies half-way between two numbers of the format: any update would carry them across."""
    step = 2.0**-11 if dtype == torch.bfloat16 else 2.0**-14  # a quarter of the format's, above 1/4
    exact = 0.25 + step * torch.arange(1000).repeat_interleave(1000).view(1000, 1000)
    exact = exact[:200]  # below 1/2
    master = exact.clone()
    dither_(master, dtype, 5)
    assert torch.equal(master.to(dtype), exact.to(dtype))
    for update in (0.2 * step, -0.2 * step):
        change = (master + update).to(dtype).double() - exact.to(dtype).double()
        assert float(change.mean()) == pytest.approx(update, rel=0.05)


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
    some = torch.ones(10, 44)
    dither_(some, torch.bfloat16, key, Place(2, 6, 4))
    assert torch.equal(some, whole[2:62:6, 4:])
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

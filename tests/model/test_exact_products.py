"""Products with the same bits in any batch, on a GPU in half precision."""

from __future__ import annotations

import pytest
import torch

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize(("inputs", "width"), [(896, 1152), (4864, 896), (2048, 12288)])
def test_a_row_has_the_same_bits_among_few_rows_and_many(inputs: int, width: int) -> None:
    from penstock.model.kernels.exact_products import _tiles, multiply

    x = torch.randn(12288, inputs, device="cuda").bfloat16()
    weight = torch.randn(width, inputs, device="cuda").bfloat16()
    whole, tiles = multiply(x, [(weight, None)]), set()
    for rows in (1, 8, 64, 200, 512, 1024, 4096, 12288):
        assert torch.equal(multiply(x[:rows], [(weight, None)]), whole[:rows])
        tiles.add(_tiles(x[:rows], width)[0])
    assert len(tiles) >= 3

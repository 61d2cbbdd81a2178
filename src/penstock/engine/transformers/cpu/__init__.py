"""The CPU runner: a bucketed KV cache, products in MKL's layout, rows with the same bits in any batch."""

"""The CPU runner: a bucketed KV cache, products of packed weights, rows with the same bits in any batch."""

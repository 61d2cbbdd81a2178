"""The CPU runner: bucketed KV cache, weights packed for MKL, batch-invariant rows."""

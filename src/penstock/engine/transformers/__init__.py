"""The default engine: continuous batching over any transformers decoder.

`engine.py` owns the thread and the queue, `cpu/` and `cuda/` each hold a runner with its KV cache and
kernels; sampling and request bookkeeping, which both share, lie here.
"""

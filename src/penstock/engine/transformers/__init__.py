"""The default engine: continuous batching over any transformers decoder.

`engine.py` owns the thread and the queue. `cpu/` and `cuda/` each hold a runner with its KV cache and
kernels; what both share (slots, sampling, attention over a KV cache, fusing) lies here.
"""

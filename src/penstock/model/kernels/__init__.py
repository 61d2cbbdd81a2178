"""What a trainer on one GPU runs instead of plain torch, for speed alone.

Everything here computes what plain torch computes in `logprobs.py`, `layer_steps.py`, AdamW or the
model's own layers, and tests compare the two. May import models, `packed_attention.py` and `transfer.py`. Files that
import Triton are themselves imported only where a kernel runs. What changes a result, or runs on several ranks, does not belong here.
"""

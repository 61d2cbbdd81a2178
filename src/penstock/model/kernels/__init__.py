"""What a GPU runs instead of plain torch, for speed alone.

Everything here computes what plain torch computes in `ops.py`, `logprobs.py` or AdamW, and tests compare the two.
Files that import Triton are themselves imported only where a kernel runs.
"""

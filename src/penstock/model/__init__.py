"""What trainer and engine share of a transformers model: loading it, and attention.

A new attention variant starts in `attention.py`, in plain operations, as the reference for every
fused kernel. May import config, demo and errors; nothing here trains or samples.
"""

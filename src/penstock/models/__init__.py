"""What trainer and engine share of a transformers model, so that both compute the same.

A new attention variant starts here, in plain operations, as the reference for every fused kernel.
Nothing here trains or samples.
"""

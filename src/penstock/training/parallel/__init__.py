"""Trainer ranks and the ways to divide one model and its work over them.

`ranks.py` has the axes and reductions, `sharding.py` says which part of a parameter each rank holds; tensor,
context and pipeline parallel have a file each. May import the packs and attention of `training/`, and models and
weights. Losses, metrics and the optimizer do not belong here: they reach other ranks through `Ranks` and `Sharding`.
"""

"""Algorithms: advantages, losses and corrections, one file per method.

A new algorithm is one file with a subclass of `method.Algorithm`, one line in this table, one test
and one row in docs/algorithms.md. Nothing here imports torch: the maths uses methods of the tensors
it is given, so that the control plane can read an algorithm's settings. Whatever needs packs, ranks
or a model belongs in `training/`.
"""

from __future__ import annotations

ALGORITHMS: dict[str, str] = {
    "grpo": "penstock.training.algo.grpo:GRPO",
    "dapo": "penstock.training.algo.dapo:DAPO",
    "dr_grpo": "penstock.training.algo.dr_grpo:DrGRPO",
    "rloo": "penstock.training.algo.rloo:RLOO",
    "reinforce_pp": "penstock.training.algo.reinforce_pp:ReinforcePP",
    "reinforce_pp_baseline": "penstock.training.algo.reinforce_pp_baseline:ReinforcePPBaseline",
    "gspo": "penstock.training.algo.gspo:GSPO",
    "cispo": "penstock.training.algo.cispo:CISPO",
    "reinforce": "penstock.training.algo.reinforce:Reinforce",
}

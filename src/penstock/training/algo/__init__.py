"""Algorithms: advantages, losses and corrections, one class per method.

A new algorithm is a subclass of `Algorithm` in `method.py`, one line in this table, one test and one
row in docs/algorithms.md. Nothing here imports torch: the maths uses methods of the tensors it is given,
so that the control plane can read an algorithm's settings. Whatever needs packs, ranks or a model
belongs in `training/`.
"""

from __future__ import annotations

ALGORITHMS: dict[str, str] = {
    "grpo": "penstock.training.algo.method:GRPO",
    "dapo": "penstock.training.algo.method:DAPO",
    "dr_grpo": "penstock.training.algo.method:DrGRPO",
    "rloo": "penstock.training.algo.method:RLOO",
    "ppo": "penstock.training.algo.method:PPO",
    "reinforce_pp": "penstock.training.algo.method:ReinforcePP",
    "reinforce_pp_baseline": "penstock.training.algo.method:ReinforcePPBaseline",
    "gspo": "penstock.training.algo.method:GSPO",
    "cispo": "penstock.training.algo.method:CISPO",
    "reinforce": "penstock.training.algo.method:Reinforce",
    "sapo": "penstock.training.algo.method:SAPO",
    "gmpo": "penstock.training.algo.method:GMPO",
    "dppo": "penstock.training.algo.method:DPPO",
    "gdpo": "penstock.training.algo.method:GDPO",
    "maxrl": "penstock.training.algo.method:MaxRL",
    "distill": "penstock.training.algo.method:Distill",
    "sft": "penstock.training.algo.method:SFT",
}

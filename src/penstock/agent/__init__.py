"""How a group of rollouts is made: one turn, or turns with tools.

An agent loop asks an engine and a reward; a new one is one file and one line in `AGENTS`.
"""

from __future__ import annotations

AGENTS = {"single_turn": "penstock.agent.single_turn:SingleTurn"}

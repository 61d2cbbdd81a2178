"""How a group of rollouts comes to be: single turn, or turns with tools. Layer 2."""

from __future__ import annotations

AGENTS = {"single_turn": "penstock.agent.single_turn:SingleTurn"}

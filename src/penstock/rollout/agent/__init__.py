"""How a group of rollouts is made: an agent loop asks an engine for responses and a reward for scores.

`AgentLoop`, which every agent loop implements, is declared where it is called, in `rollout/`. A new
agent is one file here and one line in `AGENTS`: a loop's class, or a function that makes an agent's function.
"""

from __future__ import annotations

from penstock.rollout.agent_loop import AgentLoop

__all__ = ["AGENTS", "AgentLoop"]

AGENTS = {
    "demonstration": "penstock.rollout.agent.demonstration:Demonstrations",
    "single_turn": "penstock.rollout.agent.single_turn:SingleTurn",
    "tools": "penstock.rollout.agent.tools:make",
    "gym": "penstock.rollout.agent.gym:make",
    "command": "penstock.rollout.agent.function:Command",
}

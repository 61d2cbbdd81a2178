"""Plays a game of another package through the agent `gym`, under that package's Python; prints what the policy would see.

    python tests/stages/real_games.py textarena|gem|skyrl_gym

Guesses numbers by halves, as a good policy would.
"""

from __future__ import annotations

import asyncio
import importlib
import json
import sys
from collections.abc import Callable
from typing import Any

from penstock.rollout.agent.gym import Environment
from penstock.rollout.agent.session import Task


def make(name: str) -> tuple[Any, str, int]:
    """Return a game, how it takes a guess, and its highest number."""
    package = importlib.import_module(name)
    if name == "textarena":
        return package.make("GuessTheNumber-v0"), "[{}]", 20
    if name == "gem":
        return package.make("game:GuessTheNumber-v0-easy"), "\\boxed{{{}}}", 10
    return package.make("gsm8k", extras={"reward_spec": {"ground_truth": "6"}}), "#### {}", 10


async def call(method: Callable[[], Any]) -> Any:
    """Call a method of a game here; a rollout calls it in a thread, for a bounded time."""
    return method()


async def play(name: str) -> list[Any]:
    """Return the first messages, then (observation, reward, done) of every step."""
    game, form, high = make(name)
    environment, low = Environment(game, call), 1
    task = Task(prompt_id="p", messages=[{"role": "user", "content": "play"}])
    seen: list[Any] = [await environment.start(task, seed=3)]
    done = False
    while not done:
        guess = (low + high + 1) // 2
        step = await environment.step(form.format(guess))
        seen.append((step.observation, step.reward, step.done))
        low, high = (guess, high) if "higher" in step.observation else (low, guess - 1)
        done = step.done
    await environment.close()
    return seen


if __name__ == "__main__":
    print(json.dumps(asyncio.run(play(sys.argv[1]))))

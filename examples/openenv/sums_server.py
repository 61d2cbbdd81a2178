"""An environment of OpenEnv: one sum, a calculator, a reward for the right answer. Serves on a port of this machine.

    examples/openenv/.venv/bin/python examples/openenv/sums_server.py 8341

Nothing of Penstock is in this file: it is an environment as OpenEnv's hub has them.
"""

import sys

import uvicorn
from openenv.core.env_server.http_server import create_app
from openenv.core.env_server.interfaces import Environment
from openenv.core.env_server.types import Action, Observation, State


class SumAction(Action):
    """Two numbers to add, or the answer."""

    a: int | None = None
    b: int | None = None
    answer: str | None = None


class SumObservation(Observation):
    """What the policy reads."""

    text: str = ""


class SumEnvironment(Environment):
    """Shows a sum; adds numbers; ends with the answer."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self):
        super().__init__()
        self._state, self._wanted = State(), None

    def reset(self, seed=None, episode_id=None, question="1+1", **options):
        self._state = State(episode_id=episode_id, step_count=0)
        self._wanted = str(sum(map(int, question.split("+"))))
        return SumObservation(text=question, done=False, reward=0.0)

    def step(self, action, timeout_s=None, **options):
        self._state.step_count += 1
        if action.answer is None:
            return SumObservation(text=str(action.a + action.b), done=False, reward=0.0)
        return SumObservation(done=True, reward=float(action.answer.strip() == self._wanted))

    @property
    def state(self):
        return self._state


app = create_app(SumEnvironment, SumAction, SumObservation, env_name="sums", max_concurrent_envs=64)

if __name__ == "__main__":
    uvicorn.run(app, host="127.0.0.1", port=int(sys.argv[1]))

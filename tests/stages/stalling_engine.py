"""An engine, the second of a run, that makes a few tokens with each version of the weights and then none.

It answers everything else, so nothing but its slowness is wrong. A run can end only if what it holds is
taken from it: whether that happens does not depend on how fast the machine is.
"""

from __future__ import annotations

from typing import Any, Self

from penstock.config import Config
from penstock.engine.transformers.engine import TransformersEngine

STEPS = 2  # decode steps with each version


class StallingSecond(TransformersEngine):
    _index = 0
    _stepped = 0

    @classmethod
    def from_config(cls, config: Config, *, fetch: Any, index: int = 0) -> Self:
        engine = super().from_config(config, fetch=fetch, index=index)
        engine._index = index
        return engine

    def _can_step(self) -> bool:
        return (self._index != 1 or self._stepped < STEPS) and super()._can_step()

    def _step(self) -> None:
        self._stepped += 1
        super()._step()

    def _switch(self, *args: Any) -> str:
        self._stepped = 0
        return super()._switch(*args)

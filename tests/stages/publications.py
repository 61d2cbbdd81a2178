"""A state machine of weight publications: publishes, fetches, releases and restarts in any order."""

from __future__ import annotations

import tempfile
from pathlib import Path

import torch
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from penstock.errors import WeightsGone
from penstock.weights.shared_memory import SharedMemorySync


def weights(value: int, count: int = 3) -> list[tuple[str, torch.Tensor]]:
    return [(f"w{n}", torch.full((5, 7), float(value + n))) for n in range(count)]


def holds(tensors: list[tuple[str, torch.Tensor]], value: int) -> bool:
    return all(bool((tensor == value + n).all()) for n, (_, tensor) in enumerate(tensors))


class Publications(RuleBasedStateMachine):
    """Publishes, fetches and releases in any order, by trainers that die and restart."""

    outlives_its_trainer = True  # the newest publication, for readers that have not read it yet

    def __init__(self) -> None:
        super().__init__()
        self._folder = tempfile.TemporaryDirectory()
        self.trainer = self.new_trainer()
        self.engines = [SharedMemorySync() for _ in range(3)]
        self.handles: list = []
        self.held: list = []  # (version, tensors)
        self.version = 0

    @rule(versions=st.integers(1, 3), announced=st.booleans())
    def publish(self, versions: int, announced: bool) -> None:
        self.version += versions
        early = self.trainer.announce(self.version, "d") if announced else None
        handle = self.trainer.publish(self.version, "d", weights(self.version))
        assert early in (None, handle)
        self.handles.append(handle)
        buffers = list(Path(self._folder.name).glob("buffer-*"))
        assert len(buffers) <= len({held for held, _ in self.held}) + 2  # no more than are needed

    @precondition(lambda self: self.handles)
    @rule(engine=st.integers(0, 2), back=st.integers(0, 3))
    def fetch(self, engine: int, back: int) -> None:
        """Fetch a version: the newest is always there, an older one is complete or refused."""
        handle = self.handles[-1 - min(back, len(self.handles) - 1)]
        try:
            tensors = list(self.engines[engine].fetch(handle))
        except WeightsGone:
            assert back >= 1
            return
        assert holds(tensors, handle.version)
        self.held.append((handle.version, tensors))

    @precondition(lambda self: self.held)
    @rule(which=st.integers(0, 100), part=st.booleans())
    def let_go(self, which: int, part: bool) -> None:
        """Release all tensors of a version, or all but one."""
        version, tensors = self.held.pop(which % len(self.held))
        if part and len(tensors) == 3:
            self.held.append((version, tensors[:1]))

    @rule()
    def the_trainer_comes_back(self) -> None:
        """Replace the trainer; the new one finds the folder in the middle of a publication."""
        self.trainer.announce(self.version + 1, "never written")
        self.trainer.close()
        self.trainer = self.new_trainer()
        if not self.outlives_its_trainer:
            self.handles.clear()

    def new_trainer(self) -> SharedMemorySync:
        return SharedMemorySync(self._folder.name)

    @invariant()
    def what_is_held_is_as_it_was(self) -> None:
        assert all(holds(tensors, version) for version, tensors in self.held)

    def teardown(self) -> None:
        self.held.clear()
        self.trainer.close()
        self._folder.cleanup()

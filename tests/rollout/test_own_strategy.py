"""A strategy of the user's own: named in a config, run by `penstock train`, seen in the journal."""

from __future__ import annotations

import asyncio
import inspect
from pathlib import Path

import pytest

from penstock import cli
from penstock.config import ProduceConfig
from penstock.errors import UserError
from penstock.rollout import AsyncProduceStrategyConfig, ProduceStrategy, strategy_config
from penstock.store.journal import Journal
from penstock.store.run_folder import RunFolder
from stages.producing import ProducerStage, cancel, on_virtual_time, turns
from stages.tiny_run import TINY


class OnPolicy(ProduceStrategy):
    """Produces only for the step that trains with the next weights, even if the bound allows more."""

    def furthest_step(self, model_step: int, next_consumer_step: int) -> int:
        return model_step + 1


def train(monkeypatch: pytest.MonkeyPatch, name: str, *overrides: str) -> RunFolder:
    words = [*TINY, "produce.max_staleness=3", f"run.name={name}", *overrides]
    monkeypatch.setattr("sys.argv", ["penstock", "train", *words])
    with pytest.raises(SystemExit) as left:
        cli.main()
    assert not left.value.code
    return RunFolder(Path("runs") / name)


def staleness(folder: RunFolder) -> list[int]:
    journal = Journal.open(folder.journal, readonly=True)
    try:
        rows = journal.query("SELECT staleness FROM groups WHERE state = 'trained'")
    finally:
        journal.close()
    return [number for (number,) in rows]


def test_a_run_trains_with_the_strategy_that_its_config_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("own_strategy.py").write_text(
        f"from penstock.rollout import ProduceStrategy\n\n\n{inspect.getsource(OnPolicy)}"
    )
    own = train(monkeypatch, "own", "produce.strategy=own_strategy.py:OnPolicy")
    assert own.config().produce.strategy == f"{tmp_path}/own_strategy.py:OnPolicy"
    assert set(staleness(own)) == {0}
    assert max(staleness(train(monkeypatch, "usual"))) > 0  # the bound allows 3


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("json:JSONDecoder", "allowed: a subclass of penstock.rollout.ProduceStrategy"),
        ("nowhere:Class", "nowhere cannot be imported"),
    ],
)
def test_what_is_no_strategy_is_refused_by_name(name: str, words: str) -> None:
    with pytest.raises(UserError, match=f"produce.strategy: got '{name}'") as caught:
        strategy_config(ProduceConfig(strategy=name)).build()
    assert words in str(caught.value)


def test_a_step_waits_for_weights_that_its_strategy_waits_for(tmp_path: Path) -> None:
    async def main() -> None:
        config = AsyncProduceStrategyConfig(max_staleness=3, strategy=f"{__file__}:OnPolicy")
        stage = ProducerStage(tmp_path, config, batch=2)
        running = asyncio.create_task(stage.producer.run())
        await turns()
        stage.finish_all()
        first = await stage.producer.take_batch(1)
        taking = asyncio.create_task(stage.producer.take_batch(2))
        await turns()
        assert not taking.done()
        waits = {wait.lane: wait.detail for wait in stage.waits.open.values()}
        assert waits["produce t"] == "weights newer than version 0"
        await stage.train(first)
        await turns()
        stage.finish_all()
        assert (await taking).step == 2
        await cancel(running)

    on_virtual_time(main)

"""A strategy of one's own, from the command to what the run leaves."""

from __future__ import annotations

from pathlib import Path

import pytest

from penstock import cli
from penstock.config import ProduceConfig
from penstock.errors import UserError
from penstock.journal import Journal
from penstock.produce import strategy_config
from penstock.run_folder import RunFolder
from stages.tiny_run import TINY

OWN = """
from penstock.produce import ProduceStrategy


class OnPolicy(ProduceStrategy):
    def furthest_step(self, model_step: int, next_consumer_step: int) -> int:
        return model_step + 1
"""


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
    Path("own_strategy.py").write_text(OWN)
    own = train(monkeypatch, "own", "produce.strategy=own_strategy.py:OnPolicy")
    assert own.config().produce.strategy == "own_strategy.py:OnPolicy"
    assert set(staleness(own)) == {0}
    assert max(staleness(train(monkeypatch, "usual"))) > 0  # the bound allows 3


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("json:JSONDecoder", "allowed: a subclass of penstock.produce.ProduceStrategy"),
        ("nowhere:Class", "nowhere cannot be imported"),
    ],
)
def test_what_is_no_strategy_is_refused_by_name(name: str, words: str) -> None:
    with pytest.raises(UserError, match=f"produce.strategy: got '{name}'") as caught:
        strategy_config(ProduceConfig(strategy=name)).build()
    assert words in str(caught.value)

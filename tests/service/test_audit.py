"""A service's folder that somebody else made: nothing of it runs unasked, and its file is what a service wrote."""

from __future__ import annotations

import sqlite3
from pathlib import Path

import pytest

from penstock.config.source import load_config
from penstock.errors import JournalDamaged, UserError
from penstock.service.audit import audit_service, replay_service
from penstock.store.command_log import FILE, CommandLog


def make_log(folder: Path, *words: str) -> Path:
    log = CommandLog(folder / FILE)
    log.fact("config", load_config(None, words).config.model_dump_json())
    log.close()
    return folder


def test_a_replay_of_a_strangers_service_asks(tmp_path: Path) -> None:
    """The code that comes with a model would run."""
    folder = make_log(tmp_path, f"model.path={tmp_path}", "model.trust_remote_code=true")
    with pytest.raises(UserError, match="--trust"):
        replay_service(folder)


def test_a_log_with_other_tables_is_not_read(tmp_path: Path) -> None:
    folder = make_log(tmp_path)
    assert audit_service(folder) == 0
    with sqlite3.connect(folder / FILE) as database:
        database.execute("CREATE VIEW endless AS SELECT 1")
    with pytest.raises(JournalDamaged, match="definition of endless is not what was written"):
        audit_service(folder)

"""The journal of a real run: old tokens are removed, and the audit knows the prompts of its data."""

from __future__ import annotations

from contextlib import closing

import pytest

from penstock.store.journal.codec import expression
from penstock.store.journal.schema import open_database
from stages.tiny_run import KILLED, STEPS, CrashServer, assert_sound, digests

WORDS = ("checkpoint.every_steps=1", "checkpoint.keep=2", "produce.strategy=sync")


@pytest.mark.slow
def test_a_run_without_its_old_tokens_continues_and_is_replayed_as_far_as_it_can_be(
    server: CrashServer,
) -> None:
    """Only the steps after the oldest checkpoint can be computed again: step 4, or steps 3 and 4.

    The checkpoint of step 3 was being written when the run was killed.
    """
    whole, code = server.train("whole", *WORDS)
    assert code == 0, server.output()
    words = (*WORDS, "journal.keep_payloads=text")
    run, code = server.train("pruned", *words, point="after take", number=STEPS)
    assert code == KILLED, server.output()
    assert server.run("resume", str(run.path)) == 0, server.output()
    assert_sound(run)
    assert digests(run) == digests(whole)
    assert server.run("audit", str(run.path)) == 0, server.output()
    oldest = min(int(path.name.removeprefix("step-")) for path in run.checkpoints.iterdir())
    assert f"steps 1 to {oldest}: their tokens were removed (journal.keep" in server.output()
    assert server.run("replay", str(run.path)) == 0, server.output()
    assert f"{STEPS - oldest} step" in server.output()
    assert f"steps 1 to {oldest} were not" in server.output()
    assert server.run("replay", str(run.path), "--to", "2") == 2
    assert f"allowed: a step after the oldest good checkpoint (step {oldest})" in server.output()
    assert server.run("replay", str(run.path), "--algo", "rloo") == 2
    assert "a fork trains on all recorded groups" in server.output()


def test_the_audit_of_a_run_knows_which_prompt_each_cursor_draws(server: CrashServer) -> None:
    run, code = server.train("one-prompt", *WORDS)
    assert code == 0, server.output()
    assert server.run("audit", str(run.path)) == 0, server.output()
    with closing(open_database(run.journal)) as database:
        check = expression("group_rows", prompt_id=":one")
        database.execute(
            f"UPDATE group_rows SET prompt_id = :one, row_check = {check}",
            {"one": database.execute("SELECT prompt_id FROM group_rows").fetchone()[0]},
        )
    assert server.run("audit", str(run.path)) == 1
    assert "task train: cursors 0 and 1 draw different prompts, both got" in server.output()

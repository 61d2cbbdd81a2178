"""A run that removes old tokens is killed, resumed, audited and replayed from its oldest checkpoint."""

from __future__ import annotations

from stages.tiny_run import KILLED, STEPS, CrashServer, assert_sound, digests

WORDS = ("checkpoint.every_steps=1", "checkpoint.keep=2", "produce.strategy=sync")


def test_a_run_without_its_old_tokens_continues_and_is_replayed_as_far_as_it_can_be(
    server: CrashServer,
) -> None:
    """The run ends with checkpoints of steps 3 and 4: step 4 alone can be computed again."""
    whole, code = server.train("whole", *WORDS)
    assert code == 0, server.output()
    words = (*WORDS, "journal.keep_payloads=text")
    run, code = server.train("pruned", *words, point="after take", number=STEPS)
    assert code == KILLED, server.output()
    assert server.run("resume", str(run.path)) == 0, server.output()
    assert_sound(run)
    assert digests(run) == digests(whole)
    assert server.run("audit", str(run.path)) == 0, server.output()
    assert "steps 1 to 3: their tokens were removed (journal.keep_payloads)" in server.output()
    assert server.run("replay", str(run.path)) == 0, server.output()
    assert "1 steps recomputed" in server.output()
    assert "steps 1 to 3 were not" in server.output()
    assert server.run("replay", str(run.path), "--to", "2") == 2
    assert "allowed: a step after the oldest good checkpoint (step 3)" in server.output()
    assert server.run("replay", str(run.path), "--algo", "rloo") == 2
    assert "a fork trains on all recorded groups" in server.output()

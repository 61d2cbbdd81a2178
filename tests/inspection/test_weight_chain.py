"""The chain of weights: every link that is missing or does not fit is named."""

from __future__ import annotations

import asyncio
from pathlib import Path

import numpy as np
import pytest

from penstock.inspection.laws import chain_faults, redone_versions
from penstock.store.journal import Journal
from penstock.types import Group, Rollout, Score, Status, StepReport, VersionSegment
from stages.rollouts import make_prompt


def group(number: int, *versions: int) -> Group:
    prompt = make_prompt(number)
    rollout = Rollout(rollout_id=f"t:{number}.0", prompt_ids=prompt.token_ids, seed=0)
    count = len(versions)
    segments = tuple(VersionSegment(version, 1) for version in versions)
    rollout.append(np.arange(count), np.zeros(count, dtype=np.float32), segments)
    rollout.score = Score(1.0)
    rollout.move_to(Status.COMPLETED)
    return Group(group_id=f"t:{number}", task="t", cursor=number, prompt=prompt, rollouts=[rollout])


def tell(path: Path, *, skip: str = "", **digests: str) -> Journal:
    """Journal three steps; the last trains a rollout with tokens of versions 0, 1 and 2.

    `skip` leaves out one event; `digests` puts another digest in its place.
    """
    journal = Journal.open(path / "journal.db", threaded=False)

    def weights(kind: str, version: int) -> None:
        name = f"{kind}{version}"
        digest = digests.get(name, f"d{version}")
        if skip == name:
            return
        if kind == "published":
            journal.record_published(version, digest)
        else:
            journal.record_confirmed("engine", version, digest)

    async def story() -> None:
        for version in (0, 1, 2):
            weights("published", version)
            weights("confirmed", version)
            landed, step = group(version, *range(version + 1)), version + 1
            journal.drawn(landed)
            await journal.landed(landed)
            await journal.begin_step(step, [landed])
            digest = digests.get(f"committed{step}", f"d{step}")
            await journal.commit_step(StepReport(step=step, policy_version=step, digest=digest))

    asyncio.run(story())
    return journal


def test_an_unbroken_chain_has_no_fault(tmp_path: Path) -> None:
    journal = tell(tmp_path)
    assert chain_faults(journal) == []
    assert redone_versions(journal) == []
    journal.close()


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        ({"skip": "published1"}, "the trainer never published them"),
        ({"skip": "confirmed1"}, "weights 1: trained rollouts name them, no engine confirmed"),
        (
            {"confirmed2": "xx"},
            "weights 2: an engine confirmed digest xx, the trainer published d2",
        ),
        ({"committed1": "xx"}, "weights 1: published with digest d1, committed with xx"),
    ],
)
def test_a_broken_link_is_named(tmp_path: Path, damage: dict[str, str], words: str) -> None:
    journal = tell(tmp_path, **damage)
    assert any(words in fault for fault in chain_faults(journal))
    journal.close()


def test_weights_redone_with_other_bits_are_told_not_refused(tmp_path: Path) -> None:
    journal = tell(tmp_path, committed2="d2-again")
    journal.record_published(2, "d2-again")
    journal.record_confirmed("engine", 2, "d2-again")
    assert chain_faults(journal) == []
    assert redone_versions(journal) == [
        "weights 2: redone after a crash, with other bits (d2 and d2-again)"
    ]
    journal.close()


def test_a_fork_is_not_asked_to_have_published_its_own(tmp_path: Path) -> None:
    journal = tell(tmp_path, committed2="of the fork")
    assert chain_faults(journal)
    assert chain_faults(journal, recorded=True) == []
    journal.close()

"""The chain of weights in a journal: trained, published, loaded, sampled from, trained again.

Each step commits the digest of its weights; the trainer publishes a version with its digest; engines
confirm the digest of what they loaded; each rollout says which versions its tokens came from. A
link that is missing or does not match is a fault: the samples came from unknown weights. Used by
`audit.py`, which prints the faults.
"""

from __future__ import annotations

from penstock.store.journal import Journal


def chain_faults(journal: Journal, *, recorded: bool = False) -> list[str]:
    """What breaks the chain. `recorded`: a fork, whose versions are those of its origin."""
    published, confirmed, redone = (
        _seen(journal, kind) for kind in ("published", "confirmed", "redone")
    )
    faults = [
        f"weights {version}: an engine confirmed digest {digest}, the trainer published "
        f"{_words(published.get(version))}"
        # a restarted trainer publishes what it redid
        for version, digests in sorted(confirmed.items())
        for digest in sorted(digests - published.get(version, set()) - redone.get(version, set()))
    ]
    if not recorded:
        faults += _step_faults(journal, published, redone)
    for version in _sampled_versions(journal):
        if version not in published:
            faults.append(
                f"weights {version}: trained rollouts name them, the trainer never published them"
            )
        elif version not in confirmed:
            faults.append(
                f"weights {version}: trained rollouts name them, no engine confirmed them"
            )
    return faults


def redone_versions(journal: Journal) -> list[str]:
    """A line per version whose step was redone where bits do not repeat, with all its digests."""
    published, redone = _seen(journal, "published"), _seen(journal, "redone")
    digests_of = {
        version: published.get(version, set()) | redone.get(version, set())
        for version in published.keys() | redone.keys()
    }
    return [
        f"weights {version}: redone after a crash, with other bits ({_words(digests)})"
        for version, digests in sorted(digests_of.items())
        if len(digests) > 1 or version in redone
    ]


def _step_faults(
    journal: Journal, published: dict[int, set[str]], redone: dict[int, set[str]]
) -> list[str]:
    faults = []
    rows = journal.query("SELECT step, policy_version, digest FROM steps WHERE committed")
    for step, version, digest in rows:
        if version != step:
            faults.append(f"step {step}: committed version {version}, expected version {step}")
        known = published.get(version, set()) | redone.get(version, set())
        if version in published and digest not in known:
            faults.append(
                f"weights {version}: published with digest {_words(published[version])}, "
                f"committed with {digest}"
            )
    return faults


def _seen(journal: Journal, kind: str) -> dict[int, set[str]]:
    by_version: dict[int, set[str]] = {}
    for version, digest in journal.query(
        "SELECT DISTINCT version, digest FROM weights WHERE kind = ?", (kind,)
    ):
        by_version.setdefault(version, set()).add(digest)
    return by_version


def _sampled_versions(journal: Journal) -> list[int]:
    """Every version that a token of a trained rollout was sampled from."""
    versions: set[int] = set()
    rows = journal.query(
        "SELECT DISTINCT oldest_version, newest_version FROM rollouts"
        " WHERE step IS NOT NULL AND oldest_version IS NOT NULL"
    )
    for oldest, newest in rows:
        versions |= {oldest, newest}
        if newest - oldest > 1:  # versions in between are only in the payloads
            for (group_id,) in journal.query(
                "SELECT DISTINCT group_id FROM rollouts"
                " WHERE step IS NOT NULL AND oldest_version = ? AND newest_version = ?",
                (oldest, newest),
            ):
                rollouts = journal.group(group_id).rollouts
                versions |= {s.version for rollout in rollouts for s in rollout.segments}
    return sorted(versions)


def _words(digests: set[str] | None) -> str:
    return " and ".join(sorted(digests)) if digests else "nothing"

"""Which evaluation problems are training prompts, too: equal texts, whatever their case and spaces.

Compares the messages without system messages, as every task may add its own. Does not find problems
that are worded in another way.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

Messages = Sequence[Mapping[str, Any]]


def count_overlap(training: Iterable[Messages], problems: Iterable[Messages]) -> int:
    """How many of the problems are among the training prompts."""
    wanted = [_fingerprint(messages) for messages in problems]
    known = set(wanted)
    trained = {mark for messages in training if (mark := _fingerprint(messages)) in known}
    return sum(mark in trained for mark in wanted)


def _fingerprint(messages: Messages) -> bytes:
    parts = [
        f"{message.get('role')}\x1f{' '.join(str(message.get('content', '')).lower().split())}"
        for message in messages
        if message.get("role") != "system"
    ]
    return hashlib.blake2b("\x1e".join(parts).encode("utf-8", "replace"), digest_size=16).digest()

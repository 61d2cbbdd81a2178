"""The journal: a write-ahead log of every group and every step, in one SQLite file.

The writer thread owns the connection that writes. May import errors, types and watch.
"""

from __future__ import annotations

from penstock.store.journal.journal import InFlightRecord, Journal, Unfinished
from penstock.store.journal.schema import is_empty

__all__ = ["InFlightRecord", "Journal", "Unfinished", "is_empty"]

"""transformers without text that nobody reads.

For its log, which is off, it writes out every config that it reads: it makes a second config with the defaults,
compares the two and formats the difference. A run of the tests reads five, and this takes a tenth of the run's time.
"""

from __future__ import annotations


def install() -> None:
    """Let configs be written out as plain objects are; what is saved to files stays as it is."""
    from transformers import GenerationConfig, PreTrainedConfig

    for kind in (GenerationConfig, PreTrainedConfig):
        kind.__repr__ = object.__repr__

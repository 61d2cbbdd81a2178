"""From a data source to token ids: datasets, built-in tasks, the sampler and chat templates.

Only `chat.py` turns text into tokens. May import config, types and the demo. Rewards, which judge
responses, do not belong here.
"""

from __future__ import annotations

from penstock.data.dataset import Dataset, load_dataset, validate_source

__all__ = ["Dataset", "load_dataset", "validate_source"]

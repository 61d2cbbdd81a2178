"""Datasets, built-in tasks, the sampler and chat templates: from a data source to token ids.

Text becomes tokens only in `chat.py`. May import config, types and the demo.
"""

from __future__ import annotations

from penstock.data.dataset import Dataset, check_data, load_dataset, validate_source

__all__ = ["Dataset", "check_data", "load_dataset", "validate_source"]

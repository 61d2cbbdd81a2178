"""Datasets, built-in tasks and chat templates. Layer 1; the parts live in this folder's files."""

from __future__ import annotations

from penstock.data.dataset import Dataset, check_data, load_dataset, validate_source

__all__ = ["Dataset", "check_data", "load_dataset", "validate_source"]

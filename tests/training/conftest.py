"""What several tests of the trainer start from."""

from __future__ import annotations

import pytest
import torch

from stages.training_data import tiny_model


@pytest.fixture
def saved_model(tmp_path):
    """A float32 model on disk, as a config names it."""
    folder = tmp_path / "policy"
    tiny_model(dtype=torch.float32).save_pretrained(folder)
    return folder

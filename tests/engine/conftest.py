"""Engine tests compute on one thread, as an engine beside a trainer does."""

import torch

torch.set_num_threads(1)

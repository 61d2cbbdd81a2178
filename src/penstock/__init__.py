"""Penstock: reinforcement-learning post-training for language models, with a journal.

    import penstock

    run = penstock.train(
        model="Qwen/Qwen2.5-0.5B-Instruct",
        data=[{"prompt": "What is 2+3?", "gt_answer": "5"}],  # or a file, folder, hub name, Dataset
        reward=lambda completions, gt_answer, **_: [float(a in c) for c, a in zip(completions, gt_answer)],
        steps=50, lr=1e-6,
    )
    run.metrics, run.samples(), run.model_path, run.report()

`resume` continues a run, `open_run` returns one by its name, `evaluate`, `generate` and `score` judge a
model. `Service` is for your own training loop (docs/service.md). A mistake raises UserError, with one
line; a fault at run time RunError; Ctrl-C StopRequested. docs/python.md says more.
"""

from typing import TYPE_CHECKING

__version__ = "0.1.0"

from penstock.api import Run, evaluate, generate, open_run, resume, score, sft, train
from penstock.errors import PenstockError as PenstockError
from penstock.errors import RunError as RunError
from penstock.errors import StopRequested as StopRequested
from penstock.errors import UserError as UserError

if TYPE_CHECKING:
    from penstock.service.client import AdamParams as AdamParams
    from penstock.service.client import Datum as Datum
    from penstock.service.client import SamplingParams as SamplingParams
    from penstock.service.client import Service as Service


def __getattr__(name: str) -> object:
    """The clients of a service, imported when they are used: every command imports this file."""
    if name not in ("AdamParams", "Datum", "SamplingParams", "Service"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from penstock.service import client

    return getattr(client, name)


# what `help(penstock)` shows: exceptions and clients of a service would fill pages with their methods
__all__ = ["Run", "evaluate", "generate", "open_run", "resume", "score", "sft", "train"]

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
model. Every mistake raises a UserError of one line. docs/python.md says more.
"""

__version__ = "0.1.0"

from penstock.api import Run, evaluate, generate, open_run, resume, score, train
from penstock.errors import PenstockError, RunError, StopRequested, UserError

__all__ = [
    "PenstockError",
    "Run",
    "RunError",
    "StopRequested",
    "UserError",
    "evaluate",
    "generate",
    "open_run",
    "resume",
    "score",
    "train",
]

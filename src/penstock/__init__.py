"""Penstock: reinforcement-learning post-training for language models, with a journal."""

__version__ = "0.1.0"

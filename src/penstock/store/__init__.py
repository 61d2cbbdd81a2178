"""What a run keeps on disk: its folder, the journal, checkpoints, the space left, and whom to trust.

May import config, files and waits. Nothing here trains, samples or starts a process.
"""

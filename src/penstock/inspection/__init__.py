"""Commands that inspect a run: audit, weight chain, rollouts, timeline, report, summary, replay.

A new command that reads a run folder goes here, with one function in `cli.py`. Nothing here changes
the run it reads; `replay.py` forks into a folder of its own.
"""

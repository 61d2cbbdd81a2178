"""Waits of the driver: what it waits for, since when, and what to do when no answer comes.

`waits.py` records open waits, `watchdog.py` reports and acts on a stuck one. `learning.py` watches what the
waits brought: batches from which nothing can be learned. May import config, types and errors; knows
nothing of the work inside a worker.
"""

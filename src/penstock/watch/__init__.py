"""Waits of the driver: what it waits for, since when, and what to do when no answer comes.

`waits.py` records open waits, `watchdog.py` reports and acts on a stuck one; `disk_use.py` and `memory_use.py`
measure what the machine has left. May import config, types and errors; knows nothing of the work inside
a worker.
"""

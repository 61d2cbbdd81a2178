"""Waits of the driver: who waits for whom, since when, and what to do when nothing answers.

`waits.py` records open waits, `watchdog.py` reports and acts on a stuck one, `timeline_log.py` writes
closed ones to the run folder. May import config and errors; what a worker does belongs elsewhere.
"""

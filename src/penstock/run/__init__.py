"""A run from its config to its end: build the parts, recover, loop, and the commands that start one.

`loop.py` is the whole system on one screen, `run/job.py` builds its parts, `run/session.py` is what one command does.
Imports every other room but the doors.
"""

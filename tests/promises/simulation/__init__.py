"""Whole runs on virtual time, decided by one seed: faults at any await, then checks of every promise.

The real session, loop, producer, pool, supervision, journal, checkpoints and recovery run here. Simulated
are what lies outside of the driver: the clock and the order of ready callbacks (`event_loop.py`), worker
processes behind their messages (`processes.py`, `parts.py`) and the disk's speed and faults (`files.py`).
`faults.py` draws the faults of a seed, `world.py` joins the parts, `schedule.py` runs and checks one seed:

    PYTHONPATH=tests:tests/promises python -m simulation --seed 17
"""

"""The twin of a run: its real control plane on virtual time, to plan a cluster before it is rented.

    a run's journal and timeline --fit--> Profile --simulate--> Result --plan--> table, JSON, picture

The loop, producer, strategies, buffer, pool and dispatch are those of a run; engines, trainer, rewards
and journal are modelled by the times that a `Profile` holds (`engine.py`). Executes nothing
of a run.
"""

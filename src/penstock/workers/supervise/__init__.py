"""Workers that are restarted when they die: the worker protocol, back-off, the restartable trainer.

Every call into a worker passes `Supervised.call`, which opens its wait. May import `watch/`, config and
types; processes and Ray belong to `workers/`.
"""

"""Many engines as one: which engine takes a request, which weights it serves, what follows its death.

`pool.py` is the class that others use; `requests.py` brings requests to engines, `Scheduler` there is the pure
scheduler, `weights.py` loads weights. May import the engine protocol and `workers/supervise/`; how a worker is
started belongs to `workers/`.
"""

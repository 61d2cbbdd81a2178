"""Many engines as one: which engine takes which request, what happens when one dies, which weights it has.

`pool.py` is the one class that others use, `dispatch.py` its pure scheduler. May import the engine protocol
and `supervise/`; how a worker is started belongs to `launch/`.
"""

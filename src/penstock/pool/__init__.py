"""Many engines as one: which engine takes which request, what happens when one dies, who has which weights.

`dispatch.py` decides on a clock it is given, the rest acts. May import the engine protocol and
`supervise/`; how a worker is started belongs to `launch/`.
"""

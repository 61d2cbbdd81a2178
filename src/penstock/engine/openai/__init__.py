"""An engine over a server that speaks /v1/completions with token ids; several servers are several engines.

`engine.py` follows requests and updates, `server_weights.py` sends weights, `completions.py` reads answers
and `server.py` is the wire. No Python of the server is imported.
"""

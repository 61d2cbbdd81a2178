"""An engine over a server that speaks /v1/completions with token ids; several servers are several engines.

`engine.py` follows requests and updates, `server_weights.py` sends weights, and `server.py` makes the HTTP
calls and reads the answers. No Python of the server is imported.
"""

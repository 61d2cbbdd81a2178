"""One engine over one or more servers that speak /v1/completions with token ids.

`engine.py` follows requests and updates, `servers.py` knows which servers are up, `server_weights.py` sends
them weights, `completions.py` and `http_client.py` are the wire. No Python of the server is imported.
"""

"""`penstock dashboard`: the runs of a folder, live, in a browser on this machine.

`shown_run.py` says which runs there are and what changed, `views.py` and `pairs.py` read what a view
shows, `server.py` serves it. The page draws with the report's scripts. Everything only reads: no file
of a run is written, no link followed, no code of a run imported.
"""

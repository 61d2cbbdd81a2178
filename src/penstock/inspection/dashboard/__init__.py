"""`penstock dashboard`: the runs of a folder, live, in a browser on this machine.

`shown_run.py` says which runs there are and what changed, `views.py` reads what a view shows, `server.py`
serves it, and the scripts in `assets/` draw it; `penstock report` writes the same page with its data in it.
Everything only reads: no file of a run is written, no link followed, no code of a run imported.
"""

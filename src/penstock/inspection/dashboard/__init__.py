"""`penstock dashboard`: the runs of a folder, live, in a browser on this machine.

`views.py` says which runs there are, what changed and what each view shows, `server.py` serves it, and the scripts in `assets/` draw it; `penstock report` writes the same page with its data in it.
Everything only reads: no file of a run is written, no link followed, no code of a run imported.
"""

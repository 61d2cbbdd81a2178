"""Say in one line when this Python cannot run Penstock, before anything is installed."""

import sys

if not (3, 11) <= sys.version_info[:2] <= (3, 13):
    found = ".".join(map(str, sys.version_info[:2]))
    sys.exit(
        f"error: Python {found} found, allowed: 3.11 to 3.13 (set PYTHON=python3.12, for example)"
    )

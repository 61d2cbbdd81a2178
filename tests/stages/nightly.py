"""Whether this is the nightly run (PENSTOCK_NIGHTLY=1), which has time for more load and examples."""

from __future__ import annotations

import os

NIGHTLY = bool(os.environ.get("PENSTOCK_NIGHTLY"))

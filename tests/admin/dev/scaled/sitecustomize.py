"""Python imports this module at its start where this folder is in its path: bookies of local clusters wait for less."""

from __future__ import annotations

import sys

if "pybk.admin.dev.disk_faults" in sys.orig_argv:
    from tests.cluster.scenarios.scaled import scale

    scale()

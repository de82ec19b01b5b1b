"""Python imports this module at its start where this folder is in its path: bookies of how-tos wait for less."""

from __future__ import annotations

import sys

if {"bookie", "pybk.admin.dev.disk_faults"}.intersection(sys.orig_argv):
    from tests.cluster.scenarios.scaled import scale

    scale()

"""Python imports this module at its start where this folder is in its path: bookies of local clusters wait for less.

While there is a file with the name of a bookie's file of faults and ``.silent`` at its end, its auditor's thread rests.
"""

from __future__ import annotations

import os
import sys
import time

if "pybk.admin.dev.disk_faults" in sys.orig_argv:
    from pybk.healing import auditor_driver
    from tests.cluster.scenarios.scaled import scale

    scale()
    silent = sys.orig_argv[sys.orig_argv.index("pybk.admin.dev.disk_faults") + 1] + ".silent"
    work = auditor_driver.AuditorDriver.do

    def rest_or_work(found: auditor_driver.AuditorDriver, call: auditor_driver.Call) -> None:
        """Make a call of the auditor's thread, once the file is gone."""
        while os.path.exists(silent):
            time.sleep(0.05)
        work(found, call)

    setattr(auditor_driver.AuditorDriver, "do", rest_or_work)  # noqa: B010  # a method of a class, which mypy protects

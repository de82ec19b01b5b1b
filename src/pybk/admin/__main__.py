"""``python -m pybk.admin``: the command ``pybk``."""

import sys

from pybk.admin.command import main

sys.exit(main())

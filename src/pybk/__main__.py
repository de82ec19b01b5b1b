"""``python -m pybk``: the command ``pybk``."""

import sys

from pybk.admin.cli import main

sys.exit(main())

"""``python -m pybk``: the command ``pybk``."""

import sys

from pybk.admin.command import main

if __name__ == "__main__":
    sys.exit(main())

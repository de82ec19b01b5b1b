"""The administration of stores and clusters: commands, the interface over HTTP and its page, local clusters."""

from pybk.ledger import CORE
from pybk.version import __version__

VERSION = f"pybk {__version__}, {'in pure Python' if CORE is None else 'with the native core'}"
"""The output of ``pybk --version``."""

"""The version of pybk, which members of a cluster register and errors name."""

from typing import Final

__version__: Final = "0.2.0"

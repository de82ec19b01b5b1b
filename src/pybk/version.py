"""The version of pybk, which members of a cluster register and errors name."""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Final

__version__: Final = "0.2.0"

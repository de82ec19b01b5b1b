"""A ledger and its entries: their bytes, and the keys, digests and seals that prove them.

The native core, ``pybk._native``, is an extension module in C (``native.py`` has its functions). It is installed if
there was a C compiler when pybk was installed, or if a wheel contained it. Its results are those of pure Python, byte
for byte; ``PYBK_PURE=1`` in the environment leaves it out.
"""

from __future__ import annotations

import os
import sys

from pybk.deferral import deferred

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, Final

    from pybk.ledger.arrow import binary_array as binary_array
    from pybk.ledger.arrow import pyarrow as pyarrow
    from pybk.ledger.native import NativeCore
else:
    __getattr__ = deferred(__name__, {"arrow": "binary_array pyarrow"})


def _native_core() -> NativeCore | None:
    if os.environ.get("PYBK_PURE", "0") not in ("", "0"):
        return None
    try:
        __import__("pybk._native")  # importlib takes a millisecond, for which `pybk --version` would wait
    except ImportError:
        return None
    modules: dict[str, Any] = sys.modules
    core: NativeCore = modules["pybk._native"]
    return core


CORE: Final = _native_core()
"""The native core, which computes digests, encodes and decodes entries and frames commits of one entry; None without
it."""

CORE_ENCODES: Final = hasattr(CORE, "encode")
"""Whether the core has ``encode`` and ``lengths``; one that was built from older sources does all else without them."""

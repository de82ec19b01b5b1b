"""A ledger and its entries: their bytes, and the keys, digests and seals that prove them.

The native core, ``pybk._native``, is an extension module in C (``native.py`` has its functions). It is installed if
there was a C compiler when pybk was installed, or if a wheel contained it. Its results are those of pure Python, byte
for byte; ``PYBK_PURE=1`` in the environment leaves it out.
"""

from __future__ import annotations

from pybk.deferral import deferred, native_core

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Final

    from pybk.ledger.arrow import binary_array as binary_array
    from pybk.ledger.arrow import pyarrow as pyarrow
    from pybk.ledger.native import NativeCore
else:
    __getattr__ = deferred(__name__, {"arrow": "binary_array pyarrow"})


CORE: Final[NativeCore | None] = native_core()
"""The native core, which computes digests, encodes and decodes entries and frames commits of one entry; None without
it."""

CORE_ENCODES: Final = hasattr(CORE, "encode")
"""Whether the core has ``encode`` and ``lengths``; one that was built from older sources does all else without them."""

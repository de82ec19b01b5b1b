"""Digests made by pure Python, as ``vectors.c`` reads them: ``python -m tests.native.vectors`` prints them.

A line is ``TYPE KEY HEADER PAYLOAD DIGEST``, in hexadecimal but for the type; ``-`` stands for nothing.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator

from pybk.ledger.digest import KEY_BYTES, DigestType, entry_digest
from pybk.ledger.entry import ENTRY_HEADER_BYTES
from tests.native.fuzz import SIZES


def vectors(seed: int = 1) -> Iterator[str]:
    """Yield a line for each digest type and size of a payload."""
    source = random.Random(seed)
    for kind in DigestType:
        for size in SIZES:
            key, payload = source.randbytes(KEY_BYTES), source.randbytes(size)
            prefix = entry_digest(kind, source.randrange(1 << 62), key).prefix(
                source.randrange(1 << 62), -1, size, payload
            )
            parts = (key, prefix[:ENTRY_HEADER_BYTES], payload, prefix[ENTRY_HEADER_BYTES:])
            yield " ".join((str(int(kind)), *(part.hex() or "-" for part in parts)))


if __name__ == "__main__":
    sys.stdout.writelines(f"{line}\n" for line in vectors())

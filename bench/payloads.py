"""The payloads: entries of 1 KiB that cannot be compressed."""

from __future__ import annotations

import random
from typing import Final

ENTRY_BYTES: Final = 1024
BATCH: Final = 512
PASSWORD: Final = b"benchmark"

_random = random.Random(20)
PAYLOADS: Final = [_random.randbytes(ENTRY_BYTES) for _ in range(BATCH)]
PAYLOAD: Final = PAYLOADS[0]

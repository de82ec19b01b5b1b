"""The rate at which copies of entries are made, as machines and bookies use it."""

from __future__ import annotations

from typing import Protocol


class Pace(Protocol):
    """A rate of bytes. Threads: one at a time."""

    @property
    def piece_bytes(self) -> int:
        """How many bytes are to be copied at once."""

    def wait_ns(self, now_ns: int) -> int:
        """Return after how many nanoseconds the next copy may begin; 0 for now."""

    def charge(self, size_bytes: int, now_ns: int) -> None:
        """Count bytes of a copy."""

"""The rate at which copies of entries are made, as machines and bookies use it."""

from __future__ import annotations

from typing import Protocol


class Pace(Protocol):
    """A rate of bytes. Threads: one at a time."""

    @property
    def piece_bytes(self) -> int:
        """The bytes to copy at once."""

    def wait_ns(self, now_ns: int) -> int:
        """Return the nanoseconds until the next copy may begin; 0 for now."""

    def charge(self, size_bytes: int, now_ns: int) -> None:
        """Count bytes of a copy."""

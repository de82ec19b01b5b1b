"""A simulated file's bytes: what reading shows, what is on the platter, and what lies between."""

from __future__ import annotations

from collections.abc import Iterable
from random import Random
from typing import Final

SECTOR_BYTES: Final = 512
BLOCK_BYTES: Final = 4096
MAPPED_BYTES: Final = 64


Table = tuple[dict[bytes, bytes], list[bytes]]
"""What an environment holds, and its keys, sorted; never changed in place."""


class Inode:
    """Bytes with and without power.

    ``unsynced`` has, for each sector, every content it had since the last sync: the disk may have got any of them.
    """

    def __init__(self, size: int) -> None:
        self.live = bytearray(size)
        self.durable = bytearray(size)
        self.durable_size = 0
        self.unsynced: dict[int, list[bytes]] = {}
        self.blocks = set(range(-(-size // BLOCK_BYTES)))
        self.reserved_bytes = self.durable_reserved_bytes = 0
        self.mapped = False
        self.table: Table | None = None

    def copy(self) -> Inode:
        """Return the same file as another process would find it in the same machine."""
        twin = Inode(0)
        twin.live, twin.durable, twin.durable_size = self.live[:], self.durable[:], self.durable_size
        twin.unsynced = {sector: versions[:] for sector, versions in self.unsynced.items()}
        twin.blocks, twin.mapped, twin.table = set(self.blocks), self.mapped, self.table
        twin.reserved_bytes, twin.durable_reserved_bytes = self.reserved_bytes, self.durable_reserved_bytes
        return twin

    def missing_blocks(self, offset: int, size: int) -> int:
        """Return how many blocks a write there has to allocate."""
        return len(_blocks(offset, size) - self.blocks)

    def write(self, data: bytes, offset: int) -> None:
        """Write without sync."""
        end = offset + len(data)
        if not data:
            return
        if end > len(self.live):
            # A new buffer, because views of the old one may be about.
            self.live = self.live + bytes(end - len(self.live))
        self.live[offset:end] = data
        self.blocks |= _blocks(offset, len(data))
        for sector in range(offset // SECTOR_BYTES, -(-end // SECTOR_BYTES)):
            self.unsynced.setdefault(sector, []).append(self._live_sector(sector))

    def write_torn(self, data: bytes, offset: int, random: Random) -> None:
        """Write some of the sectors only."""
        for start, end in pieces(offset, len(data), SECTOR_BYTES):
            if random.random() < 0.5:
                self.write(data[start - offset : end - offset], start)

    def write_durable(self, data: bytes, offset: int) -> None:
        """Write, and make the sectors written durable."""
        self.write(data, offset)
        end = offset + len(data)
        self._settle(range(offset // SECTOR_BYTES, -(-end // SECTOR_BYTES)))
        if data:
            self.durable_size = max(self.durable_size, end)

    def sync(self) -> None:
        """Make everything durable that a sync reaches: not what an earlier one failed to write."""
        self._settle(list(self.unsynced))
        self.durable_size = len(self.live)
        self.durable_reserved_bytes = self.reserved_bytes
        if self.mapped:
            self.write_back()

    def sync_failed(self) -> None:
        """Forget, as kernels do, that the unsynced pages are dirty."""
        self.unsynced.clear()

    def write_back(self) -> None:
        """Put what was stored through shared maps on disk, as the kernel may at any time."""
        self.durable[: len(self.live)] = self.live

    def reserve(self, end: int) -> None:
        """Allocate blocks, also beyond the end."""
        self.blocks |= _blocks(0, end)
        self.reserved_bytes = max(self.reserved_bytes, end)

    def punch(self, offset: int, size: int) -> None:
        """Zero a range and free its whole blocks."""
        size = min(size, len(self.live) - offset)
        if size > 0:
            self.write(bytes(size), offset)
            self.blocks -= set(range(-(-offset // BLOCK_BYTES), (offset + size) // BLOCK_BYTES))

    def truncate(self, size: int) -> None:
        """Cut the file, not durably."""
        self.live = self.live[:size]  # a new buffer, because views of the old one may be about
        self.blocks = {block for block in self.blocks if block * BLOCK_BYTES < size}
        self.reserved_bytes = min(self.reserved_bytes, size)

    def after_power_loss(self, random: Random) -> Inode:
        """Return one of the files that may be found after power comes back."""
        found = Inode(0)
        disk = self.durable + bytes(max(0, len(self.live) - len(self.durable)))
        for sector, versions in self.unsynced.items():
            kept = random.randrange(len(versions) + 1)
            if kept:
                start = sector * SECTOR_BYTES
                disk[start : start + SECTOR_BYTES] = versions[kept - 1]
        if self.mapped:
            for start, end in pieces(0, len(self.live), MAPPED_BYTES):
                if random.random() < 0.5:
                    disk[start:end] = self.live[start:end]
        size = random.choice((self.durable_size, len(self.live)))
        found.live, found.durable, found.durable_size = disk[:size], disk[:size], size
        found.table = self.table
        found.reserved_bytes = found.durable_reserved_bytes = self.durable_reserved_bytes
        end = max(size, self.durable_reserved_bytes)
        found.blocks = {block for block in self.blocks if block * BLOCK_BYTES < end or self.table is not None}
        return found

    def _live_sector(self, sector: int) -> bytes:
        return bytes(self.live[sector * SECTOR_BYTES : (sector + 1) * SECTOR_BYTES])

    def _settle(self, sectors: Iterable[int]) -> None:
        if len(self.durable) < len(self.live):
            self.durable.extend(bytes(len(self.live) - len(self.durable)))
        for sector in sectors:
            if self.unsynced.pop(sector, None):
                content = self._live_sector(sector)
                self.durable[sector * SECTOR_BYTES : sector * SECTOR_BYTES + len(content)] = content


def _blocks(offset: int, size: int) -> set[int]:
    return set(range(offset // BLOCK_BYTES, -(-(offset + size) // BLOCK_BYTES)))


def pieces(offset: int, size: int, step: int) -> Iterable[tuple[int, int]]:
    """Yield the parts of a range between multiples of ``step``."""
    start, stop = offset, offset + size
    while start < stop:
        end = min(stop, (start // step + 1) * step)
        yield start, end
        start = end

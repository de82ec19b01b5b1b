"""A simulated directory: its names with and without power."""

from __future__ import annotations

from dataclasses import dataclass, field
from random import Random

from tests.simdisk.inode import Inode


@dataclass
class Change:
    """One operation on names; ``put`` is None for an unlink."""

    put: str | None
    inode: Inode | None
    dropped: str | None

    def apply(self, names: dict[str, Inode]) -> None:
        """Make the change in a directory."""
        if self.dropped is not None:
            names.pop(self.dropped, None)
        if self.put is not None and self.inode is not None:
            names[self.put] = self.inode


@dataclass
class Directory:
    """Names in this process's eyes, on disk, and the changes since the last sync."""

    live: dict[str, Inode] = field(default_factory=dict)
    durable: dict[str, Inode] = field(default_factory=dict)
    unsynced: list[Change] = field(default_factory=list)

    def change(self, change: Change) -> None:
        """Make a change that is not durable."""
        change.apply(self.live)
        self.unsynced.append(change)

    def sync(self) -> None:
        """Make the names durable."""
        for change in self.unsynced:
            change.apply(self.durable)
        self.unsynced.clear()

    def sync_failed(self) -> None:
        """Forget the changes: a later sync does not write them."""
        self.unsynced.clear()

    def after_power_loss(self, random: Random) -> dict[str, Inode]:
        """Return the names that may be found: those synced, and the first few changes or any of them."""
        names = dict(self.durable)
        cut = random.randrange(len(self.unsynced) + 1)
        in_order = random.random() < 0.5
        for number, change in enumerate(self.unsynced):
            if number < cut if in_order else random.random() < 0.5:
                change.apply(names)
        return names

"""The state that a bookie reports of its replicas."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, NamedTuple, Self

from pybk.bookie.ledger_header import LedgerHeader
from pybk.errors import PybkError
from pybk.flags import StorageHint

if TYPE_CHECKING:
    from pybk.storage.store import Store


class ReplicaState(NamedTuple):
    """The state of one replicated ledger at this bookie.

    Attributes:
        fenced: Adds are accepted from recoveries alone. The fence is durable, unless ``Replicas.fence`` raised.
        limbo: Acknowledged entries may be missing (D6), so a missing entry is UNKNOWN, except to a recovery after its
            durable fence.
        gap: Durable entries may be missing, too, so a missing entry is UNKNOWN to recoveries as well. Implies
            ``limbo``.
        lac: The highest last add confirmed received so far, -1 for none.
        header: The ledger's unchanging facts; None if the bookie has received a fence alone.
    """

    fenced: bool
    limbo: bool
    gap: bool
    lac: int
    header: LedgerHeader | None


class ReplicasHealth(NamedTuple):
    """The state that a bookie reports of its disks.

    Attributes:
        free_bytes: Free bytes of each tier.
        capacity_bytes: All bytes of each tier, used and free.
        full: Why adds are refused until there is space again; None if they are not.
        error: The failure after which adds are refused until the bookie is restarted; None if there was none.
        outstanding_bytes: Bytes that are staged and not durable yet.
    """

    free_bytes: Mapping[StorageHint, int]
    capacity_bytes: Mapping[StorageHint, int]
    full: str | None
    error: PybkError | None
    outstanding_bytes: int

    @classmethod
    def of(cls, store: Store) -> Self:
        """Return the state of a bookie's store. Cost: two ``statvfs`` per directory."""
        free = dict.fromkeys(StorageHint, 0)
        capacity = dict.fromkeys(StorageHint, 0)
        for directory in store.volumes.directories:
            free[directory.tier] += store.fs.free_bytes(directory.path)
            capacity[directory.tier] += store.fs.total_bytes(directory.path)
        return cls(free, capacity, store.scheduler.full, store.log.error, store.log.outstanding_bytes)

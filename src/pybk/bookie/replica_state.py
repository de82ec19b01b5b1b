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
    """What is known here of a replicated ledger.

    Attributes:
        fenced: Takes adds of recoveries alone; durable, unless ``Replicas.fence`` raised.
        limbo: Entries may be missing that were acknowledged, so nothing is denied but to a recovery.
        gap: In limbo, entries may be missing that were durable, too, so nothing is denied.
        lac: The highest last add confirmed that was received, -1 for none.
        description: What never changes of the ledger; None if only its fence came so far.
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
        full: Why nothing is taken for want of space, or None.
        error: Why nothing is taken until the bookie is started again, or None.
        outstanding_bytes: Bytes staged and not durable yet.
    """

    free_bytes: Mapping[StorageHint, int]
    full: str | None
    error: PybkError | None
    outstanding_bytes: int

    @classmethod
    def of(cls, store: Store) -> Self:
        """Ask a bookie's store."""
        free = dict.fromkeys(StorageHint, 0)
        for directory in store.volumes.directories:
            free[directory.tier] += store.fs.free_bytes(directory.path)
        return cls(free, store.scheduler.full, store.log.error, store.log.outstanding_bytes)

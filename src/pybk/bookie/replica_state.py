"""The state that a bookie reports of its replicas."""

from __future__ import annotations

import platform
from collections.abc import Mapping
from functools import cache
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
        gap: Durable entries may be missing as well, so a missing entry is UNKNOWN to recoveries, too. Implies
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
        devices: The device of each tier, which no other host has; several are joined by ``+``.
        full: The reason why adds are refused until there is space again; None if they are not.
        error: The failure after which adds are refused until the bookie is restarted; None if there was none.
        outstanding_bytes: Bytes that are staged and not durable yet.
    """

    free_bytes: Mapping[StorageHint, int]
    capacity_bytes: Mapping[StorageHint, int]
    devices: Mapping[StorageHint, str]
    full: str | None
    error: PybkError | None
    outstanding_bytes: int

    @classmethod
    def of(cls, store: Store) -> Self:
        """Return the state of a bookie's store. Cost: two ``statvfs`` per directory."""
        free = dict.fromkeys(StorageHint, 0)
        capacity = dict.fromkeys(StorageHint, 0)
        numbers: dict[StorageHint, list[int]] = {}
        for device, directories in store.volumes.by_device().items():
            for tier in {each.tier for each in directories}:
                path = next(each.path for each in directories if each.tier is tier)
                free[tier] += store.fs.free_bytes(path)
                capacity[tier] += store.fs.total_bytes(path)
                numbers.setdefault(tier, []).append(device)
        devices = {tier: "+".join(f"{_boot()}:{each}" for each in sorted(found)) for tier, found in numbers.items()}
        return cls(free, capacity, devices, store.scheduler.full, store.log.error, store.log.outstanding_bytes)


@cache
def _boot() -> str:
    """Return what distinguishes this host from others, until it is booted again."""
    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
            return file.read(64).strip()
    except OSError:
        return platform.node()

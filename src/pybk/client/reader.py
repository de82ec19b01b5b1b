"""The conversations that read entries and the last add confirmed (LAC), and the one that recovers a ledger."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import numpy as np

from pybk.client.driver import Conversation
from pybk.client.machine_errors import error_of
from pybk.errors import CorruptError, EntryUnknownError
from pybk.ledger.entry import EntryBatch
from pybk.replication.entry_runs import whole
from pybk.replication.messages import (
    Confirmed,
    Done,
    Effect,
    EntriesRead,
    EntryRun,
    Failed,
    LacRead,
    LacsCompared,
    ReadEnded,
    Status,
    UnderReplicated,
)
from pybk.replication.reader import LacComparisonMachine, LacMachine, ReadMachine
from pybk.replication.recovery import RecoveryMachine

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from pybk.client.driver import Driver
    from pybk.client.remote_ledger import RemoteLedger
    from pybk.ledger.ledger_metadata import Bookie

REPLY_BYTES_MAX: Final = 4 << 20
"""The most encoded bytes that one reply of a read may have."""

PARTS_MAX: Final = 4
"""The most bookies that share one read."""

PART_BYTES: Final = 1 << 20
"""The least bytes that each bookie reads of a read that several share."""

_MARGIN_BYTES: Final = PART_BYTES // 16
"""Bytes by which a reply may exceed its share of a read, because entries differ in size."""

SPECULATIVE_NS: Final = 500_000_000
"""Time without an answer after which another replica is asked, too."""


class Reading(Conversation[ReadMachine]):
    """Reads a range of entries.

    Args:
        driver: Runs it.
        ledger: The ledger.
        first: First entry.
        last: Last entry, inclusive.
        max_bytes: The bytes to read, about, at most; at least one entry is read.
        rank: The order in which to ask bookies, lowest first.
        shared: Whether several bookies read parts of a long read at the same time.

    Attributes:
        runs: The runs that were read, in the order in which they came.
        ended: The outcome; None while it runs.
    """

    def __init__(
        self,
        driver: Driver,
        ledger: RemoteLedger,
        first: int,
        last: int,
        max_bytes: int,
        rank: Mapping[Bookie, int],
        *,
        shared: bool,
    ) -> None:
        parts = min(PARTS_MAX, max_bytes // PART_BYTES) if shared else 1
        reply_bytes = max_bytes // parts + _MARGIN_BYTES if parts > 1 else max_bytes
        machine = ReadMachine(
            ledger.metadata,
            first,
            last,
            bytes_max=min(reply_bytes, REPLY_BYTES_MAX),
            total_bytes=max_bytes,
            parts=max(1, parts),
            speculative_ns=SPECULATIVE_NS,
            rank=rank,
            checked=ledger.digest.size == 0,
        )
        super().__init__(driver, ledger, machine)
        self.first = first
        self.last = last
        self.runs: list[EntryRun] = []
        self.ended: ReadEnded | None = None

    def take(self, effect: Effect) -> None:
        """Collect entries; end when the read has ended or failed."""
        if type(effect) is EntriesRead:
            self.runs.append(effect.run)
        elif type(effect) is ReadEnded:
            self.ended = effect
            self.ledger.renew(self.machine.metadata, self.ledger.version)
            self.end()
        elif type(effect) is Failed:
            self.end(error_of(effect))

    @property
    def bad(self) -> tuple[tuple[Bookie, int], ...]:
        """Pairs of a bookie and the id of an entry of which it returned no sound copy."""
        return () if self.ended is None else self.ended.bad

    def batch(self) -> EntryBatch:
        """Return the entries that were read, from the first one on and without a gap.

        Raises:
            CorruptError: Every bookie of the first entry denies that it has it, though it was confirmed.
            EntryUnknownError: No bookie that could be asked has a sound copy of the first entry.
        """
        assert self.ended is not None
        batch = joined(self.ledger, self.runs)
        if self.ended.missing is not None:
            batch = _before(batch, self.ended.missing)
        if len(batch):
            return batch
        asked = f"ledger {self.ledger.ledger_id} entry {self.first}"
        if self.ended.status is Status.NO_SUCH_ENTRY:
            raise CorruptError(
                f"{asked}: no bookie of its ensemble has it, although it was confirmed; restore a replica"
            )
        raise EntryUnknownError(f"{asked}: no bookie that answers has a sound copy; start the bookies that are missing")


def joined(ledger: RemoteLedger, runs: list[EntryRun]) -> EntryBatch:
    """Return runs as one batch in the order of the ids; copied if there are several."""
    if len(runs) == 1:
        return ledger.batch_of(runs[0], whole(runs[0]))
    batches = [ledger.batch_of(run, whole(run)) for run in runs]
    if not batches:
        nothing = np.empty(0, np.int64)
        return EntryBatch(ledger.ledger_id, nothing, memoryview(b""), nothing, nothing, ledger.digest.size)
    starts = np.cumsum([0, *(len(batch.buffer) for batch in batches)])
    ids = np.concatenate([batch.entry_ids for batch in batches])
    order = np.argsort(ids, kind="stable")
    offsets = np.concatenate([batch.offsets + start for batch, start in zip(batches, starts, strict=False)])
    sizes = np.concatenate([batch.sizes for batch in batches])
    buffer = memoryview(b"".join(batch.buffer for batch in batches))
    return EntryBatch(ledger.ledger_id, ids[order], buffer, offsets[order], sizes[order], ledger.digest.size)


def _before(batch: EntryBatch, entry_id: int) -> EntryBatch:
    """Return the entries of a batch before one that is missing."""
    count = int(np.searchsorted(batch.entry_ids, entry_id))
    return EntryBatch(
        batch.ledger_id,
        batch.entry_ids[:count],
        batch.buffer,
        batch.offsets[:count],
        batch.sizes[:count],
        batch.digest_bytes,
    )


class LacReading(Conversation[LacMachine]):
    """Reads the last add confirmed, or waits until it is above what is known.

    Attributes:
        last_add_confirmed: The LAC that was read, -1 for none.
    """

    def __init__(
        self,
        driver: Driver,
        ledger: RemoteLedger,
        *,
        beyond: int | None = None,
        wait_ns: int = 0,
        pause_ns: int = 0,
        retry_ns: int = 0,
        rank: Mapping[Bookie, int],
    ) -> None:
        machine = LacMachine(
            ledger.metadata, beyond=beyond, wait_ns=wait_ns, pause_ns=pause_ns, retry_ns=retry_ns, rank=rank
        )
        super().__init__(driver, ledger, machine)
        self.last_add_confirmed = -1

    def take(self, effect: Effect) -> None:
        """Keep the LAC, and end."""
        if type(effect) is LacRead:
            self.last_add_confirmed = effect.last_add_confirmed
            self.end()
        elif type(effect) is Failed:
            self.end(error_of(effect))


class LacComparing(Conversation[LacComparisonMachine]):
    """Finds the ledgers whose last add confirmed has not moved.

    Args:
        driver: Runs it.
        ledgers: The ledgers, at least one. The requests take no right to any of them.

    Attributes:
        same: The ids of the ledgers whose LAC has not moved; of others it may have.
    """

    def __init__(self, driver: Driver, ledgers: Sequence[RemoteLedger]) -> None:
        machine = LacComparisonMachine((each.metadata, each.last_add_confirmed) for each in ledgers)
        super().__init__(driver, ledgers[0], machine)
        self.same: frozenset[int] = frozenset()

    def take(self, effect: Effect) -> None:
        """Keep the ledgers, and end."""
        assert type(effect) is LacsCompared
        self.same = effect.same
        self.end()


class Recovering(Conversation[RecoveryMachine]):
    """Recovers a ledger: finds its end, and closes it; without the password if ``ledger.as_member``."""

    def __init__(self, driver: Driver, ledger: RemoteLedger) -> None:
        member = ledger.as_member
        seal = None if member else ledger.sealed
        super().__init__(driver, ledger, RecoveryMachine(ledger.metadata, ledger.version, seal=seal, member=member))

    def take(self, effect: Effect) -> None:
        """Adopt the closed metadata, and report bookies that miss entries."""
        if type(effect) is Done:
            self.ledger.renew(effect.metadata, effect.version)
            self.end()
        elif type(effect) is UnderReplicated:
            self.driver.report_missing(self, effect)
        elif type(effect) is Failed:
            self.end(error_of(effect))
        else:
            assert type(effect) is Confirmed

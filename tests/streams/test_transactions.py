"""A transaction of a log that takes several entries, and several commits, is there as a whole or not at all."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from typing import NamedTuple

import pytest

from pybk import LedgerManager, PybkError, WriteAheadLog
from pybk.streams.appender import PlainBatch
from pybk.streams.list_record import ListKind
from pybk.streams.list_writer import ListWriter
from pybk.streams.log_settings import RollPolicy, spec_of
from tests.internals import store_of
from tests.simdisk import SimCrash, SimFileSystem
from tests.storage.store_harness import CONFIG, abandon, open_store

PASSWORD = b"transactions"
SMALL = replace(CONFIG, max_outstanding_bytes=64 << 10)
BATCH = [bytes([number]) * 40_000 for number in range(4)]
"""Each record is an entry, and more of them than two are beyond the limit of ``SMALL``: the others wait for a sync."""


class Torn(NamedTuple):
    """A batch of which the last entry is missing, as after the death of its writer.

    Attributes:
        payloads: The data of its records.
    """

    payloads: Sequence[bytes]

    @property
    def records(self) -> int:
        """How many there would have been."""
        return len(self.payloads)

    def encode(self, seq: int) -> list[bytes]:
        """Return all entries but the last."""
        return PlainBatch(self.payloads).encode(seq)[:-1]

    def staged(self, seq: int, segment: int, entry: int) -> int:
        """Return the first number."""
        return seq


def run(fs: SimFileSystem) -> bool:
    """Append a record and a transaction; return whether the latter was acknowledged."""
    manager: LedgerManager | None = None
    acknowledged = False
    try:
        manager = open_store(fs, SMALL)
        wal = WriteAheadLog.open(manager, "wal", insecure=True)
        wal.append(b"before")
        acknowledged = bool(wal.append_many(BATCH))
        wal.close()
    except (SimCrash, PybkError):
        pass
    finally:
        if manager is not None:
            abandon(manager)
            store_of(manager).ended = True
    return acknowledged


@pytest.mark.sampled(one_in=6, group="steps")
@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_transaction_of_several_commits_is_whole_or_absent_when_the_machine_stops_at_any_operation(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("pybk.manager.ledger_writer.CHUNK_BYTES", 32 << 10)  # 4 MiB, which would take minutes here
    whole = SimFileSystem(0)
    assert run(whole)
    found, torn = set(), 0
    for operation in range(len(whole.operations)):
        fs = SimFileSystem(operation)
        fs.crash_at(operation)
        acknowledged = run(fs)
        manager = open_store(fs.crash() if operation % 2 else fs.kill(), SMALL)
        last = max((each.last_add_confirmed or 0 for each in manager.ledgers()), default=0)
        torn += 1 < last < 1 + len(BATCH)  # after the header and the first record
        with WriteAheadLog.open(manager, "wal", insecure=True) as wal:
            records = [record.data for record in wal.replay()]
            assert records in ([], [b"before"], [b"before", *BATCH])
            assert not acknowledged or len(records) == 5
            found.add(len(records))
            assert wal.append(b"after") == len(records) + 1
            assert [record.data for record in wal.replay()] == [*records, b"after"]
        manager.close()
    assert found == {0, 1, 5}
    assert torn > 0, "no stop was in the middle of the transaction"


def test_a_transaction_whose_writer_died_in_the_middle_does_not_count(manager: LedgerManager) -> None:
    WriteAheadLog.open(manager, "wal", password=PASSWORD).close()
    writer = ListWriter(manager, "wal", spec_of(ListKind.WAL, PASSWORD, None, insecure=False), RollPolicy())
    writer.take_over(wait_s=0.0, steal=False)
    writer.append(b"before", None, kick=True).result()
    torn = writer.appender.append_batch(Torn([bytes(40_000)] * 4), kick=True)
    assert torn is not None
    assert torn.result() == 2
    with WriteAheadLog.open(manager, "wal", mode="r", password=PASSWORD) as wal:
        assert [record.data for record in wal.replay()] == [b"before"]
    with WriteAheadLog.open(manager, "wal", password=PASSWORD, steal=True) as wal:
        assert wal.append(b"after") == 2, "the numbers of the transaction are given again"
        assert [record.data for record in wal.replay()] == [b"before", b"after"]
    with suppress(PybkError):
        writer.close()

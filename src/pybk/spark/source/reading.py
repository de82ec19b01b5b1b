"""Reading of entries as Arrow batches in a task."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from pyspark.sql.datasource import InputPartition

from pybk.errors import EntryUnknownError, NoSuchLedgerError
from pybk.spark.connection import connection, task_connection
from pybk.spark.source.columns import LedgerColumns
from pybk.spark.source.planning import EntryRange

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql.types import StructType

    from pybk.manager.ledger_reader import LedgerReader
    from pybk.spark.options import SourceOptions

LATE_SECONDS: Final = 10.0
"""The longest wait of a task, in seconds, until it sees the entries or records that the planner saw."""

_CONFIRMED_LOOK_SECONDS: Final = 0.05

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class LedgerPartition(InputPartition):
    """The entries that one task reads.

    Attributes:
        entry_ranges: The entries, in order.
    """

    entry_ranges: tuple[EntryRange, ...]


def lost_ledgers_error(ledger_ids: Iterable[int]) -> NoSuchLedgerError:
    """Return the error for ledgers that were to be read and do not exist."""
    names = ", ".join(map(str, ledger_ids))
    return NoSuchLedgerError(
        f"ledger {names:.200} was deleted or never existed, so it cannot be read; option failOnDataLoss=false leaves "
        "out such ledgers"
    )


def read_ranges(
    options: SourceOptions, schema: StructType, entry_ranges: Iterable[EntryRange]
) -> Iterator[pa.RecordBatch]:
    """Read and verify entries; those of which only columns are wanted that are known without that are not read.

    Args:
        options: The options of the read.
        schema: The columns to return.
        entry_ranges: The entries; all of them are confirmed.

    Returns:
        Batches of about ``options.batch_bytes``, in order.

    Raises:
        NoSuchLedgerError: A ledger was deleted, and ``fail_on_data_loss`` is set.
        DigestMismatchError, CorruptError: An entry differs from the one that was written, or is missing.
        EntryUnknownError: The bookies that have an entry do not answer.
        UnauthorizedError: The password is not that of a ledger.
        LedgerUnsealedError, SealMismatchError: A seal is required, and a ledger has none or one that does not match.
    """
    manager = task_connection(options.where).manager
    given = options.given.read()
    for entry_range in entry_ranges:
        first = entry_range.first
        try:
            with manager.open_ledger(
                entry_range.ledger_id,
                password=given.password,
                secret=given.secret,
                recover=False,
                require_seal=options.require_seal,
            ) as reader:
                columns = LedgerColumns(schema, reader.metadata)
                _wait_for(reader, entry_range.last)
                if not columns.of_entries:
                    yield from columns.numbered(first, entry_range.last)
                    continue
                while first <= entry_range.last:
                    entries = reader.read_batch(first, max_bytes=options.batch_bytes, last=entry_range.last)
                    yield columns.batch(entries)
                    first = int(entries.entry_ids[-1]) + 1
        except NoSuchLedgerError as error:
            if options.fail_on_data_loss:
                raise lost_ledgers_error([entry_range.ledger_id]) from error
            logger.warning(
                "ledger %d does not exist; entries %d to %d are left out",
                entry_range.ledger_id,
                first,
                entry_range.last,
            )


def _wait_for(reader: LedgerReader, last: int) -> None:
    """Wait until this process knows that an entry is confirmed.

    Bookies get the last add confirmed one after the other, and a store's readers see it when they poll, so the planner
    may have seen a later one than this process.
    """
    deadline = time.monotonic() + LATE_SECONDS
    while reader.last_add_confirmed < last and not reader.is_closed and time.monotonic() < deadline:
        time.sleep(_CONFIRMED_LOOK_SECONDS)
        reader.read_last_add_confirmed()
    if reader.last_add_confirmed < last:
        raise EntryUnknownError(
            f"ledger {reader.ledger_id} was confirmed up to entry {last} when this was planned, and "
            f"{LATE_SECONDS:.0f} s later the bookies that answer know of {reader.last_add_confirmed}; start the "
            f"missing bookies, or call open_ledger({reader.ledger_id}, recover=True) if its writer is gone"
        )


def payload_bytes(options: SourceOptions, entry_range: EntryRange) -> int:
    """Return the payload bytes of a range of entries, from the lengths in two of them.

    Raises:
        NoSuchLedgerError: The ledger was deleted.
        PybkError: As ``read_ranges``.

    Cost: Two reads. Waits up to 10 s if this process does not yet know that the entries are confirmed.
    """
    given = options.given.read()
    with connection(options.where).manager.open_ledger(
        entry_range.ledger_id,
        password=given.password,
        secret=given.secret,
        recover=False,
        require_seal=options.require_seal,
    ) as reader:
        _wait_for(reader, entry_range.last)
        before, last = (
            next(reader.read(entry_id, entry_id)).length if entry_id >= 0 else 0
            for entry_id in (entry_range.first - 1, entry_range.last)
        )
    return last - before

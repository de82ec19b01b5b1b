"""The version row of an entries environment (LMDB, SSD tier), which shows that one was replaced by an older copy.

Above level BASE, each environment holds one row in addition to its records. The row counts the transactions that put
records, and holds the catalog location at which records were last removed. The index stores in the file's row the count
that it relies on. So an environment is older than the index if its count is lower, and the index is older than the
environment if records were removed at a catalog location that the index has not reached.
"""

from __future__ import annotations

from typing import Final, NamedTuple

from pybk.errors import CorruptError
from pybk.storage.format.index_rows import CheckpointMark, decode_value, dump_json, encode_value, load_json
from pybk.storage.io.lmdb_environment import ReadTransaction, WriteTransaction

ENTRIES_MARK_KEY: Final = b"M"
"""The key of the row; the keys of records have 16 bytes."""

CatalogLocation = tuple[int, int]
"""A point in the history of the catalog: the catalog's file id, and its length in bytes. Pairs only grow."""


class EntriesMark(NamedTuple):
    """The row: the number of transactions that put records, and the catalog location of the last removal."""

    puts: int
    removed_at: CatalogLocation


NO_MARK: Final = EntriesMark(0, (0, 0))
"""The mark of an environment without the row: one of level BASE, or a new one."""


def catalog_location(mark: CheckpointMark) -> CatalogLocation:
    """Return the catalog location that an index has reached, from its mark."""
    return mark.catalog_file_id, mark.catalog_bytes


def read_entries_mark(transaction: ReadTransaction) -> EntriesMark:
    """Return the mark of an environment; CorruptError if its row is damaged."""
    value = transaction.get(ENTRIES_MARK_KEY)
    if value is None:
        return NO_MARK
    where = "the mark of the SSD tier"
    fields = load_json(decode_value(ENTRIES_MARK_KEY, value), where=where)
    puts, removed_at = fields.get("puts"), fields.get("removed_at")
    if type(puts) is not int or not isinstance(removed_at, list) or len(removed_at) != len(NO_MARK.removed_at):
        raise CorruptError(f"{where} is {fields}; restore the environment from a backup")
    return EntriesMark(puts, (int(removed_at[0]), int(removed_at[1])))


def write_entries_mark(transaction: WriteTransaction, mark: EntriesMark) -> None:
    """Set the mark of an environment."""
    transaction.put(ENTRIES_MARK_KEY, encode_value(ENTRIES_MARK_KEY, dump_json(mark._asdict())))

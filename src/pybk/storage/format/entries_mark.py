"""How far an entries environment of the SSD tier has come, so that an older copy of one is noticed.

Above level BASE, each environment holds one row besides its records. It counts the transactions that put records, and
says at which place of the catalog records were last removed. The index names the count that it relies on in the file's
row. So an environment is older than the index if its count is lower, and the index is older than the environment if
records were removed at a place of the catalog that the index has not reached.
"""

from __future__ import annotations

from typing import Final, NamedTuple

from pybk.errors import CorruptError
from pybk.storage.format.index_rows import CheckpointMark, decode_value, dump_json, encode_value, load_json
from pybk.storage.io.lmdb_environment import ReadTransaction, WriteTransaction

ENTRIES_MARK_KEY: Final = b"M"
"""The key of the row; the keys of records have 16 bytes."""

CatalogLocation = tuple[int, int]
"""A place in the history of the catalog: the catalog's file id, and its length in bytes. Both only grow."""


class EntriesMark(NamedTuple):
    """The row: how many transactions put records, and the place in the catalog at the last removal."""

    puts: int
    removed_at: CatalogLocation


NO_MARK: Final = EntriesMark(0, (0, 0))
"""What an environment without the row stands for: one of level BASE, or a new one."""


def catalog_location(mark: CheckpointMark) -> CatalogLocation:
    """Return how far in the catalog's history an index is, by its mark."""
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

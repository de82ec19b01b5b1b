"""Look-ups in the index inside one transaction, with proofs of absence."""

from __future__ import annotations

from pybk.storage.format.index_rows import (
    LAST_KEY,
    MARK_KEY,
    ChainRow,
    CheckpointMark,
    FileUse,
    Totals,
    damaged,
    decode_chain_row,
    decode_mark,
    decode_page,
    decode_use,
    key_ids,
    ledger_key,
    page_key,
)
from pybk.storage.format.record import RunLocations
from pybk.storage.io.lmdb_environment import ReadTransaction


def stored_mark(transaction: ReadTransaction) -> tuple[CheckpointMark, Totals] | None:
    """Return the mark and the totals; None for an index without any row.

    Raises:
        CorruptError: The mark is damaged, or missing although other rows exist.
    """
    value = transaction.get(MARK_KEY)
    if value is not None:
        return decode_mark(value)
    other = transaction.floor(LAST_KEY)
    if other is not None:
        raise damaged(f"the index has no mark, but other rows, as key {other[0].hex()}")
    return None


def find_ledger(transaction: ReadTransaction, ledger_id: int) -> ChainRow | None:
    """Return a ledger's row of the chain; None if its neighbours prove that it has none.

    Raises:
        CorruptError: The row is damaged, or it is missing although its neighbours do not name each other.
    """
    key = ledger_key(ledger_id)
    value = transaction.get(key)
    if value is not None:
        return decode_chain_row(key, value)
    neighbours(transaction, ledger_id)
    return None


def neighbours(transaction: ReadTransaction, ledger_id: int) -> tuple[int, int]:
    """Return the two ids around the gap after ``ledger_id``: the last row up to it, and the first after it.

    Raises:
        CorruptError: They do not name each other, so a row between them is missing.
    """
    found = transaction.floor(ledger_key(ledger_id))
    if found is None or found[0][:1] != b"L":
        raise damaged(f"the index has no ledger row up to id {ledger_id}, not even the chain's beginning")
    (previous,) = key_ids(found[0])
    following = decode_chain_row(*found).next
    back = chain_row(transaction, following).previous
    if back != previous:
        raise damaged(
            f"ledger {previous} names ledger {following} as the next in the index, but that names ledger {back} as "
            f"the one before"
        )
    return previous, following


def chain_row(transaction: ReadTransaction, ledger_id: int) -> ChainRow:
    """Return a row of the chain that another row names; raise CorruptError if it is missing."""
    key = ledger_key(ledger_id)
    value = transaction.get(key)
    if value is None:
        raise damaged(f"the index has no row for ledger {ledger_id}, which another row names")
    return decode_chain_row(key, value)


def find_page(transaction: ReadTransaction, ledger_id: int, entry_id: int) -> tuple[bytes, RunLocations] | None:
    """Return key and runs of the last page of a ledger that begins at or before an entry, None if none does."""
    found = transaction.floor(page_key(ledger_id, entry_id))
    if found is None or found[0][:9] != page_key(ledger_id, 0)[:9]:
        return None
    return found[0], decode_page(*found)


def file_uses(transaction: ReadTransaction) -> dict[int, FileUse]:
    """Return the rows of all files, by id.

    Raises:
        CorruptError: A row is damaged, or the number of rows differs from that in the mark.
    """
    stored = stored_mark(transaction)
    uses = {}
    for key, value in transaction.items(b"F", b"G"):
        use = decode_use(key, value)
        uses[use.row.file_id] = use
    counted = 0 if stored is None else stored[1].files
    if len(uses) != counted:
        raise damaged(f"the index has {len(uses)} files, but counts {counted}")
    return uses

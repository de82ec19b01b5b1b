"""Changes of the index: one update is one write transaction."""

from __future__ import annotations

from itertools import islice
from typing import Final, NamedTuple

from pybk.deferral import np
from pybk.errors import UsageError
from pybk.storage.format.index_rows import (
    CHAIN_HEAD,
    CHAIN_TAIL,
    PAGE_LOCATIONS_MAX,
    ChainRow,
    CheckpointMark,
    FileRow,
    FileUse,
    LedgerRow,
    NamedRow,
    Totals,
    damaged,
    decode_page,
    decode_share,
    decode_use,
    encode_chain_row,
    encode_mark,
    encode_named_value,
    encode_share,
    encode_state,
    encode_use,
    encode_value,
    file_key,
    ledger_key,
    named_key,
    page_key,
    share_key,
    state_last_entry_id,
    state_metadata_bytes,
)
from pybk.storage.format.log_file import RunLocations
from pybk.storage.index.index import (
    NOTHING,
    bytes_by_file,
    chain_row,
    differing_entries,
    find_ledger,
    find_page,
    joined,
    last_entry,
    neighbours,
    stored_mark,
    untiled,
)
from pybk.storage.io.lmdb_environment import WriteTransaction

_PAGES_AT_A_TIME: Final = 64
_ENTRIES_OF_A_RUN: Final = ("first", "count", "stride")
"""The fields of a run that say which entries it has."""


class _UnwrittenLedger(NamedTuple):
    """The row of a new ledger that is not written yet, because the next insert probably changes it as its neighbour."""

    ledger_id: int
    link: ChainRow


class IndexUpdate:
    """One update of the index; made by ``Index.update``, and usable only inside its ``with``.

    Any method may raise CorruptError if the index contradicts the change or itself, or StorageFullError; the whole
    update is discarded then.

    Threads: one. Durable: when the ``with`` ends.
    """

    def __init__(self, transaction: WriteTransaction) -> None:
        """Begin an update; an empty index gets the two ends of its chain."""
        self._transaction = transaction
        stored = stored_mark(transaction)
        self._stored = stored
        self._mark: CheckpointMark | None = None
        if stored is None:
            transaction.put(
                ledger_key(CHAIN_HEAD), encode_chain_row(ledger_key(CHAIN_HEAD), ChainRow(CHAIN_HEAD, CHAIN_TAIL, b""))
            )
            transaction.put(
                ledger_key(CHAIN_TAIL), encode_chain_row(ledger_key(CHAIN_TAIL), ChainRow(CHAIN_HEAD, CHAIN_TAIL, b""))
            )
        else:
            self._mark = stored[0]
        totals = Totals(0, 0, 0) if stored is None else stored[1]
        self._ledgers, self._metadata_bytes, self._files, self._named = totals
        self._waiting: _UnwrittenLedger | None = None
        self._uses: dict[int, tuple[int, int]] = {}

    # ---- ledgers -------------------------------------------------------------------------------------------------

    def put_ledger(self, row: LedgerRow) -> None:
        """Insert or replace a ledger's row. Rows with ascending ids that follow each other cost one write each.

        Raises:
            UsageError: The id is not a valid ledger id.
        """
        ledger_id = row.metadata.ledger_id
        if not CHAIN_HEAD < ledger_id < CHAIN_TAIL:
            raise UsageError(f"ledger id {ledger_id} lies outside 0 to {CHAIN_TAIL - 1}")
        state = encode_state(row)
        waiting = self._waiting
        if waiting is not None and waiting.ledger_id < ledger_id < waiting.link.next:
            self._put_link(waiting.ledger_id, waiting.link._replace(next=ledger_id))
            self._insert(ledger_id, ChainRow(waiting.ledger_id, waiting.link.next, state))
            return
        self._write_waiting()
        link = find_ledger(self._transaction, ledger_id)
        if link is not None:
            self._metadata_bytes += len(state) - len(link.state)
            self._put_link(ledger_id, link._replace(state=state))
            return
        previous, following = neighbours(self._transaction, ledger_id)
        self._put_link(previous, chain_row(self._transaction, previous)._replace(next=ledger_id))
        self._insert(ledger_id, ChainRow(previous, following, state))

    def drop_ledger(self, ledger_id: int) -> dict[int, int]:
        """Remove a ledger with its pages and shares.

        Returns:
            The bytes that became free in each file, by file id; empty if the ledger does not exist. Costs O(pages).
        """
        self._write_waiting()
        transaction = self._transaction
        link = find_ledger(transaction, ledger_id)
        if link is None:
            return {}
        freed = self._drop_pages(ledger_id, state_last_entry_id(link.state))
        for file_id, size in freed.items():
            self._change_share(file_id, ledger_id, -size)
            if transaction.get(share_key(file_id, ledger_id)) is not None:
                raise damaged(
                    f"the index says that ledger {ledger_id} has more in file {file_id:016x} than the {size} bytes "
                    f"that its pages name"
                )
        self._put_link(link.previous, chain_row(transaction, link.previous)._replace(next=link.next))
        self._put_link(link.next, chain_row(transaction, link.next)._replace(previous=link.previous))
        transaction.delete(ledger_key(ledger_id))
        self._ledgers -= 1
        self._metadata_bytes -= state_metadata_bytes(link.state)
        return freed

    def _insert(self, ledger_id: int, link: ChainRow) -> None:
        self._waiting = _UnwrittenLedger(ledger_id, link)
        self._ledgers += 1
        self._metadata_bytes += state_metadata_bytes(link.state)

    def _write_waiting(self) -> None:
        waiting = self._waiting
        if waiting is not None:
            self._waiting = None
            self._put_link(waiting.ledger_id, waiting.link)
            following = waiting.link.next
            self._put_link(following, chain_row(self._transaction, following)._replace(previous=waiting.ledger_id))

    def _put_link(self, ledger_id: int, link: ChainRow) -> None:
        key = ledger_key(ledger_id)
        self._transaction.put(key, encode_chain_row(key, link))

    def _drop_pages(self, ledger_id: int, last: int) -> dict[int, int]:
        """Delete all pages of a ledger, which must tile it up to entry ``last``; return their bytes by file."""
        freed: dict[int, int] = {}
        after = NOTHING
        start, stop = page_key(ledger_id, CHAIN_HEAD), page_key(ledger_id, CHAIN_TAIL)
        while found := list(islice(self._transaction.items(start, stop), _PAGES_AT_A_TIME)):
            for key, value in found:
                runs = decode_page(key, value)
                wrong = untiled(runs, after)
                if wrong is not None:
                    raise damaged(f"the pages of ledger {ledger_id} in the index do not fit: {wrong}")
                after = last_entry(runs)
                for file_id, size in bytes_by_file(runs).items():
                    freed[file_id] = freed.get(file_id, 0) + size
                self._transaction.delete(key)
        if after[0] != last:
            raise damaged(f"the pages of ledger {ledger_id} in the index end with entry {after[0]}, not with {last}")
        return freed

    # ---- runs ----------------------------------------------------------------------------------------------------

    def append_locations(self, ledger_id: int, runs: RunLocations) -> None:
        """Add runs that follow a ledger's last page; the caller puts the row that names the new last entry.

        Costs O(new runs), and the rewriting of at most one page.

        Args:
            ledger_id: The ledger.
            runs: ``(r,)``, sorted; the first follows the last entry that the index knows.
        """
        if not len(runs):
            return
        found = find_page(self._transaction, ledger_id, CHAIN_TAIL)
        wrong = untiled(runs, NOTHING if found is None else last_entry(found[1]))
        if wrong is not None:
            raise damaged(f"runs that do not follow what the index has of ledger {ledger_id}: {wrong}")
        low = 0
        if found is not None and len(found[1]) < PAGE_LOCATIONS_MAX:
            key, page = found
            low = PAGE_LOCATIONS_MAX - len(page)
            self._transaction.put(key, encode_value(key, page.tobytes() + runs[:low].tobytes()))
        self._put_pages(ledger_id, runs[low:])
        for file_id, size in bytes_by_file(runs).items():
            self._change_share(file_id, ledger_id, size)

    def replace_locations(self, ledger_id: int, old: RunLocations, new: RunLocations) -> None:
        """Replace the locations of entries.

        Costs O(runs) and the rewriting of each page that has one of the old runs.

        Args:
            ledger_id: The ledger.
            old: ``(r,)`` sorted runs as the index has them, not necessarily next to each other.
            new: ``(s,)`` sorted runs of the same entries.

        Raises:
            UsageError: The new runs do not hold exactly the entries of the old ones.
        """
        if not len(old) and not len(new):
            return
        if self.replace_places(ledger_id, old, new):
            return
        wrong = differing_entries(old, new) if len(old) and len(new) else f"{len(old)} runs replaced by {len(new)}"
        if wrong is not None:
            raise UsageError(f"ledger {ledger_id}: runs are replaced by runs of the same entries only: {wrong}")
        region: list[RunLocations] = []
        region_end = -1
        done = taken = 0
        while done < len(old):
            page = self._take_page(ledger_id, int(old["first"][done]))
            if int(page["first"][0]) != region_end + 1:
                self._put_region(ledger_id, region)
                region = []
            region_end = last_entry(page)[0]
            until = int(np.searchsorted(old["first"], region_end, side="right"))
            region.append(_without(page, old[done:until], ledger_id))
            upto = int(np.searchsorted(new["first"], region_end, side="right"))
            region.append(new[taken:upto])
            done, taken = until, upto
        self._put_region(ledger_id, region)
        self._change_shares(ledger_id, old, new)

    def replace_places(self, ledger_id: int, old: RunLocations, new: RunLocations) -> bool:
        """Replace runs of a ledger's first page one by one; return False if that is not possible.

        Small ledgers have one page and are moved run by run, which then needs one write and no arithmetic.
        """
        if len(old) != len(new) or any(old[name].tobytes() != new[name].tobytes() for name in _ENTRIES_OF_A_RUN):
            return False
        page = self._transaction.get(key := page_key(ledger_id, 0))
        if page is None:
            return False
        runs = decode_page(key, page)
        if last_entry(old)[0] > last_entry(runs)[0]:
            return False
        places = np.searchsorted(runs["first"], old["first"])
        if int(places[-1]) >= len(runs) or runs[places].tobytes() != old.tobytes():
            return False
        if len(places) > 1 and not (np.diff(places) > 0).all():
            return False
        runs = runs.copy()
        runs[places] = new
        self._transaction.put(key, encode_value(key, runs.tobytes()))
        self._change_shares(ledger_id, old, new)
        return True

    def _take_page(self, ledger_id: int, entry_id: int) -> RunLocations:
        """Remove the page that holds an entry and return its runs."""
        found = find_page(self._transaction, ledger_id, entry_id)
        if found is None or last_entry(found[1])[0] < entry_id:
            raise damaged(f"no page of the index holds ledger {ledger_id} entry {entry_id}, which is to be moved")
        self._transaction.delete(found[0])
        return found[1]

    def _put_region(self, ledger_id: int, parts: list[RunLocations]) -> None:
        """Write the runs that replace neighbouring pages; merge them with the preceding page if all fit one page."""
        runs = joined(parts)
        if not len(runs):
            return
        before = find_page(self._transaction, ledger_id, int(runs["first"][0]))
        if before is not None and len(before[1]) + len(runs) <= PAGE_LOCATIONS_MAX:
            self._transaction.delete(before[0])
            runs = joined([before[1], runs])
        self._put_pages(ledger_id, runs)

    def _put_pages(self, ledger_id: int, runs: RunLocations) -> None:
        for low in range(0, len(runs), PAGE_LOCATIONS_MAX):
            page = runs[low : low + PAGE_LOCATIONS_MAX]
            key = page_key(ledger_id, int(page["first"][0]))
            self._transaction.put(key, encode_value(key, page.tobytes()))

    # ---- files ---------------------------------------------------------------------------------------------------

    def put_file(self, row: FileRow) -> None:
        """Insert or replace a file's row; the shares of ledgers in the file are kept."""
        self._apply_share_changes(row.file_id)
        key = file_key(row.file_id)
        value = self._transaction.get(key)
        ledgers = live_bytes = 0
        if value is None:
            self._files += 1
        else:
            _, ledgers, live_bytes = decode_use(key, value)
        self._transaction.put(key, encode_use(key, FileUse(row, ledgers, live_bytes)))

    def drop_file(self, file_id: int) -> bool:
        """Remove a file's row; return whether it existed.

        Raises:
            UsageError: The file has live entries.
        """
        self._apply_share_changes(file_id)
        key = file_key(file_id)
        value = self._transaction.get(key)
        if value is None:
            return False
        _, ledgers, live_bytes = decode_use(key, value)
        if ledgers or live_bytes:
            raise UsageError(
                f"file {file_id:016x} still holds {live_bytes} bytes of {ledgers} ledgers; move or drop them first"
            )
        self._transaction.delete(key)
        self._files -= 1
        return True

    def _change_shares(self, ledger_id: int, old: RunLocations, new: RunLocations) -> None:
        """Subtract the bytes of removed runs of a ledger from their files, and add those of new runs to theirs."""
        sizes = bytes_by_file(new)
        for file_id, size in bytes_by_file(old).items():
            sizes[file_id] = sizes.get(file_id, 0) - size
        for file_id, size in sizes.items():
            self._change_share(file_id, ledger_id, size)

    def _change_share(self, file_id: int, ledger_id: int, size: int) -> None:
        """Change the number of bytes that a ledger has in a file."""
        if size == 0:
            return
        key = share_key(file_id, ledger_id)
        value = self._transaction.get(key)
        before = 0 if value is None else decode_share(key, value)
        share = before + size
        if share < 0:
            raise damaged(
                f"the index says that ledger {ledger_id} has {before} bytes in file {file_id:016x}, but {-size} are "
                f"to leave it"
            )
        if share:
            self._transaction.put(key, encode_share(key, share))
        else:
            self._transaction.delete(key)
        ledgers, live_bytes = self._uses.get(file_id, (0, 0))
        self._uses[file_id] = ledgers + (share > 0) - (before > 0), live_bytes + size

    def _apply_share_changes(self, file_id: int) -> None:
        """Update a file's row after changes of its shares."""
        change = self._uses.get(file_id)
        if change is None:
            return
        key = file_key(file_id)
        value = self._transaction.get(key)
        if value is not None:
            del self._uses[file_id]
            row, ledgers, live_bytes = decode_use(key, value)
            self._transaction.put(key, encode_use(key, FileUse(row, ledgers + change[0], live_bytes + change[1])))

    # ---- named records -------------------------------------------------------------------------------------------

    def put_named(self, row: NamedRow) -> None:
        """Insert or replace a named record; remove it if it has no value."""
        key = named_key(row.name)
        before = self._transaction.get(key) is not None
        if row.value is None:
            self._transaction.delete(key)
        else:
            self._transaction.put(key, encode_named_value(key, row))
        self._named += (row.value is not None) - before

    # ---- the whole -----------------------------------------------------------------------------------------------

    def put_mark(self, mark: CheckpointMark) -> None:
        """Set the mark."""
        self._mark = mark

    def finish(self) -> None:
        """Write the rows that are still in memory; called when the ``with`` ends.

        Raises:
            CorruptError: A run lies in a file without a row.
            UsageError: The index has no mark yet.
        """
        self._write_waiting()
        for file_id in list(self._uses):
            self._apply_share_changes(file_id)
        if self._uses:
            raise damaged(
                f"entries lie in file {min(self._uses):016x}, which has no row in the index, and none was put"
            )
        if self._mark is None:
            raise UsageError("the first update of an index must put its mark")
        totals = Totals(self._ledgers, self._metadata_bytes, self._files, self._named)
        if (self._mark, totals) != self._stored:
            self._transaction.put(b"M", encode_mark(self._mark, totals))


def _without(page: RunLocations, old: RunLocations, ledger_id: int) -> RunLocations:
    """Return a page's runs without some of them, each of which must be in the page unchanged."""
    places = np.searchsorted(page["first"], old["first"], side="right") - 1
    if page[places].tobytes() != old.tobytes():
        raise damaged(
            f"the index does not have the runs of ledger {ledger_id} from entry {int(old['first'][0])} that are to be "
            f"moved"
        )
    return np.delete(page, places)

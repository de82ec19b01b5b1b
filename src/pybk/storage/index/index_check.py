"""Check of the consistency of the whole index."""

from __future__ import annotations

from collections.abc import Generator, Iterator
from typing import Final

from pybk.errors import CorruptError, UnsupportedFormatError
from pybk.storage.format.index_rows import (
    CHAIN_HEAD,
    CHAIN_TAIL,
    LAST_KEY,
    FileUse,
    Totals,
    decode_chain_row,
    decode_named_value,
    decode_page,
    decode_share,
    decode_state,
    decode_use,
    key_ids,
    state_metadata_bytes,
)
from pybk.storage.index.index import NOTHING, bytes_by_file, last_entry, stored_mark, untiled
from pybk.storage.io.lmdb_environment import ReadTransaction

_UNUSED: Final = ((b"\0", b"F"), (b"G", b"L"), (b"M\0", b"N"), (b"O", b"P"), (b"Q", b"X"), (b"Y", LAST_KEY))
"""Ranges in which no key belongs."""

_DAMAGE: Final = (CorruptError, UnsupportedFormatError)

Shares = dict[tuple[int, int], int]


def problems(transaction: ReadTransaction) -> Iterator[str]:
    """Yield the problems of an index, each as a sentence."""
    totals = None
    try:
        stored = stored_mark(transaction)
    except _DAMAGE as error:
        yield str(error)
    else:
        if stored is None:
            return
        totals = stored[1]
    for start, stop in _UNUSED:
        for key, _ in transaction.items(start, stop):
            yield f"key {key[:20].hex()} is none of the index's"
    lasts: dict[int, int] = {}
    metadata_bytes = yield from _check_chain(transaction, lasts)
    shares: Shares = {}
    yield from _check_pages(transaction, lasts, shares)
    uses: dict[int, FileUse] = {}
    yield from _check_files(transaction, uses)
    yield from _check_shares(transaction, shares, uses)
    named = yield from _check_named(transaction)
    found = Totals(len(lasts), metadata_bytes, len(uses), named)
    if totals is not None and found != totals:
        yield f"the mark counts {totals}, but there are {found}"


def _check_chain(transaction: ReadTransaction, lasts: dict[int, int]) -> Generator[str, None, int]:
    """Check the ledgers' rows and note the last entry of each; return the bytes of their metadata."""
    metadata_bytes = 0
    previous, expected = CHAIN_HEAD, CHAIN_HEAD
    for key, value in transaction.items(b"L", b"M"):
        try:
            (ledger_id,) = _ids(key, 1)
            link = decode_chain_row(key, value)
            if CHAIN_HEAD < ledger_id < CHAIN_TAIL:
                lasts[ledger_id] = decode_state(ledger_id, link.state, where="index").last_entry_id
                metadata_bytes += state_metadata_bytes(link.state)
        except _DAMAGE as error:
            yield str(error)
            continue
        if ledger_id != expected or link.previous != previous:
            yield (
                f"the chain of ledgers is broken: {previous} names {expected} as the next, but {ledger_id} comes, "
                f"which names {link.previous} as the one before"
            )
        previous, expected = ledger_id, link.next
    if previous != CHAIN_TAIL:
        yield f"the chain of ledgers ends with {previous}"
    return metadata_bytes


def _check_pages(transaction: ReadTransaction, lasts: dict[int, int], shares: Shares) -> Iterator[str]:
    """Check that pages tile every ledger, and sum up the bytes of their runs by file and ledger."""
    ends = dict.fromkeys(lasts, NOTHING)
    for key, value in transaction.items(b"P", b"Q"):
        try:
            ledger_id, first = _ids(key, 2)
            runs = decode_page(key, value)
        except _DAMAGE as error:
            yield str(error)
            continue
        if ledger_id not in lasts:
            yield f"ledger {ledger_id} has a page from entry {first} on, but no row"
        if int(runs["first"][0]) != first:
            yield f"the page of ledger {ledger_id} from entry {first} on begins with entry {int(runs['first'][0])}"
        wrong = untiled(runs, ends.get(ledger_id, NOTHING))
        if wrong is not None:
            yield f"the pages of ledger {ledger_id} do not fit: {wrong}"
        ends[ledger_id] = last_entry(runs)
        for file_id, size in bytes_by_file(runs).items():
            shares[file_id, ledger_id] = shares.get((file_id, ledger_id), 0) + size
    for ledger_id, last in lasts.items():
        if ends[ledger_id][0] != last:
            yield f"the pages of ledger {ledger_id} end with entry {ends[ledger_id][0]}, not with {last}"


def _check_files(transaction: ReadTransaction, uses: dict[int, FileUse]) -> Iterator[str]:
    """Check the files' rows and note them."""
    for key, value in transaction.items(b"F", b"G"):
        try:
            (file_id,) = _ids(key, 1)
            use = decode_use(key, value)
        except _DAMAGE as error:
            yield str(error)
            continue
        if use.row.file_id != file_id:
            yield f"the row of file {file_id:016x} is that of file {use.row.file_id:016x}"
        uses[file_id] = use


def _check_shares(transaction: ReadTransaction, shares: Shares, uses: dict[int, FileUse]) -> Iterator[str]:
    """Check the shares of ledgers in files against the pages, and the files' rows against the shares."""
    missing = dict(shares)
    for key, value in transaction.items(b"X", b"Y"):
        try:
            file_id, ledger_id = _ids(key, 2)
            share = decode_share(key, value)
        except _DAMAGE as error:
            yield str(error)
            continue
        expected = missing.pop((file_id, ledger_id), 0)
        if share != expected:
            yield f"ledger {ledger_id} has {share} bytes in file {file_id:016x}, but its pages name {expected}"
    for (file_id, ledger_id), size in missing.items():
        yield f"ledger {ledger_id} has no share of file {file_id:016x}, but its pages name {size} bytes there"
    counted: dict[int, tuple[int, int]] = {}
    for (file_id, _), size in shares.items():
        ledgers, live_bytes = counted.get(file_id, (0, 0))
        counted[file_id] = ledgers + 1, live_bytes + size
    for file_id in sorted(counted.keys() - uses.keys()):
        ledgers, live_bytes = counted[file_id]
        yield f"file {file_id:016x} has no row, but {live_bytes} bytes of {ledgers} ledgers lie in it"
    for file_id, use in uses.items():
        there = counted.get(file_id, (0, 0))
        if (use.ledgers, use.live_bytes) != there:
            yield (
                f"file {file_id:016x} counts {use.live_bytes} bytes of {use.ledgers} ledgers, but pages name "
                f"{there[1]} of {there[0]}"
            )


def _check_named(transaction: ReadTransaction) -> Generator[str, None, int]:
    """Check the rows of named records; return their number."""
    count = 0
    for key, value in transaction.items(b"N", b"O"):
        count += 1
        try:
            decode_named_value(key, value)
        except _DAMAGE as error:
            yield str(error)
    return count


def _ids(key: bytes, count: int) -> tuple[int, ...]:
    ids = key_ids(key)
    if len(ids) != count:
        raise CorruptError(f"key {key.hex()} has {len(ids)} ids, not {count}")
    return ids

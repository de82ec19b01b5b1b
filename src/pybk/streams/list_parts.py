"""The parts of a ledger list that are not in its record: pages of segments, and bounds of subscriptions.

They are named records apart from that of the list, in a group of the first byte of its uid, so that no group has too
many. The group sorts after that of the lists, so whatever copies all records in order has a list before its pages. A
part's name begins with the list's uid, which a rename of the list leaves as it is.

``pybk.streams.ledger_list`` says when parts are written and removed (rules T16 and T17).
"""

from __future__ import annotations

import logging
import secrets
import threading
from bisect import bisect_right
from collections.abc import Callable, Container, Iterator, Sequence
from contextlib import suppress
from itertools import accumulate
from typing import Final, overload

from pybk.backend.ledger_backend import LedgerBackend
from pybk.errors import PybkError, VersionConflictError
from pybk.streams.bounds import SHARDS, Bounds, decode_bounds, encode_bounds, shard_of
from pybk.streams.list_record import ListKind, ListRecord, Page, Rows, Segment, decode_page, encode_page

logger = logging.getLogger(__name__)

_KEPT_PAGES: Final = 16
"""Pages that are kept in memory, of those that were read or written last."""

_NONCE_BYTES: Final = 8


class PageGoneError(Exception):
    """A page is gone that a record names which was read before."""


class ListParts:
    """The parts of one list.

    Args:
        backend: Has them.
        kind: The list's.
        uid: The list's.

    Threads: any.
    """

    def __init__(self, backend: LedgerBackend, kind: ListKind, uid: bytes) -> None:
        self.uid: Final = uid
        self._backend = backend
        self._prefix = f"{kind.group}_{uid[:1].hex()}/{uid.hex()}."
        self._pages: dict[str, Rows] = {}
        self._shards: dict[str, tuple[bytes, Bounds]] = {}
        self._lock = threading.Lock()

    # ---- pages ---------------------------------------------------------------------------------------------------

    def page(self, name: str) -> Rows | None:
        """Return the segments of a page; None if it does not exist."""
        rows = self._pages.get(name)
        if rows is None:
            found = self._backend.read_record(self._prefix + name)
            if found is None:
                return None
            rows = decode_page(found.value, where=f"the page {self._prefix}{name}")
            self._keep(name, rows)
        return rows

    def write_page(self, number: int, rows: Rows) -> str:
        """Create a page, and return its name."""
        name = f"p.{_new_name(number)}"
        self._backend.write_record(self._prefix + name, encode_page(rows), None)
        self._keep(name, rows)
        return name

    def _keep(self, name: str, rows: Rows) -> None:
        with self._lock:
            self._pages[name] = rows
            while len(self._pages) > _KEPT_PAGES:
                del self._pages[next(iter(self._pages))]

    # ---- bounds --------------------------------------------------------------------------------------------------

    def bounds(self, bound_set: str) -> Bounds:
        """Return all bounds of a set, by name."""
        names = [f"{self._prefix}{bound_set}.{number:x}" for number in range(SHARDS)]
        found = self._backend.read_records(names)
        shards = [self._decoded(name, each.value) for name, each in zip(names, found, strict=True) if each is not None]
        return tuple(sorted(bound for shard in shards for bound in shard))

    def shard(self, bound_set: str, cursor: str) -> tuple[Bounds, int | None]:
        """Return the bounds of the record that has the one of a subscription, and its version; None without one."""
        name = self._shard_name(bound_set, cursor)
        found = self._backend.read_record(name)
        return ((), None) if found is None else (self._decoded(name, found.value), found.version)

    def _decoded(self, name: str, value: bytes) -> Bounds:
        """Return the bounds of a record, which is decoded again only after it changed."""
        kept = self._shards.get(name)
        if kept is not None and kept[0] == value:
            return kept[1]
        bounds = decode_bounds(value, where=f"the bounds {name}")
        self._shards[name] = value, bounds
        return bounds

    def write_shard(self, bound_set: str, cursor: str, bounds: Bounds, version: int | None) -> int:
        """Replace the record that has the bound of a subscription; returns its new version."""
        return self._backend.write_record(self._shard_name(bound_set, cursor), encode_bounds(bounds), version)

    def write_bounds(self, number: int, bounds: Bounds) -> str:
        """Create a set of bounds, and return its name."""
        name = f"b.{_new_name(number)}"
        for shard in range(SHARDS):
            part = tuple(each for each in bounds if shard_of(each.name) == shard)
            if part:
                self._backend.write_record(f"{self._prefix}{name}.{shard:x}", encode_bounds(part), None)
        return name

    def _shard_name(self, bound_set: str, cursor: str) -> str:
        return f"{self._prefix}{bound_set}.{shard_of(cursor):x}"

    def shard_names(self, bound_set: str) -> list[str]:
        """Return the names of the records that have bounds, for watches."""
        return [f"{self._prefix}{bound_set}.{number:x}" for number in range(SHARDS)]

    # ---- removing ------------------------------------------------------------------------------------------------

    def remove_page(self, name: str) -> None:
        """Remove a page; one that cannot be removed now is left to a sweep."""
        self._remove(self._prefix + name)

    def sweep(self, kept: Container[str], below: int) -> None:
        """Remove the pages and sets whose numbers are lower, but for some; what cannot be removed now is left."""
        for full in self._backend.record_names(self._prefix):
            name = ".".join(full.removeprefix(self._prefix).split(".")[:2])  # without the number of a shard
            if name not in kept and _number_of(name) < below:
                self._remove(full)

    def _remove(self, full: str) -> None:
        try:
            with suppress(VersionConflictError):
                found = self._backend.read_record(full)
                if found is not None:
                    self._backend.write_record(full, None, found.version)
        except (PybkError, OSError) as error:
            logger.warning("%s is not needed, and could not be removed: %s", full, error)


def bounds_of(backend: LedgerBackend, record: ListRecord) -> Bounds:
    """Return the bounds of the durable subscriptions of the list with a record, by name."""
    if not record.admissions:
        return record.cursors
    return record.left_of(ListParts(backend, record.kind, record.uid).bounds(record.bound_set))


def _new_name(number: int) -> str:
    return f"{number}-{secrets.token_hex(_NONCE_BYTES)}"


def _number_of(name: str) -> int:
    return int(name.partition(".")[2].partition("-")[0])


class AllSegments(Sequence[Segment]):
    """All segments of a record, those of pages included, which are read when they are asked for.

    Args:
        record: The record.
        load: Returns the segments of a page; raises PageGoneError.
    """

    def __init__(self, record: ListRecord, load: Callable[[Page], Rows]) -> None:
        self._record = record
        self._load = load
        self._ends = list(accumulate(each.segments for each in record.pages))
        self._in_pages = self._ends[-1] if self._ends else 0

    def __len__(self) -> int:
        """Return how many there are."""
        return self._in_pages + len(self._record.segments)

    @overload
    def __getitem__(self, index: int) -> Segment: ...
    @overload
    def __getitem__(self, index: slice) -> list[Segment]: ...
    def __getitem__(self, index: int | slice) -> Segment | list[Segment]:
        """Return one by its index from 0 up, or some."""
        if isinstance(index, slice):
            return [self[each] for each in range(*index.indices(len(self)))]
        if index >= self._in_pages:
            return self._record.segments[index - self._in_pages]
        if index < 0:
            return self[len(self) + index]
        at = bisect_right(self._ends, index)
        return self._load(self._record.pages[at])[index - self._ends[at]]

    def __iter__(self) -> Iterator[Segment]:
        """Yield all, ascending."""
        for page in self._record.pages:
            yield from live_of(page, self._load(page))
        yield from self._record.segments


def live_of(page: Page, rows: Rows) -> Rows:
    """Return the segments of a page that were not truncated."""
    return rows[len(rows) - page.segments :]

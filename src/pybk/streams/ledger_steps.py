"""Performs the steps of ``pybk.streams.ledger_list`` with the ledgers and named records of a manager.

**The parts of a list** that are not in its record, pages of segments and bounds of subscriptions, are named records of
their own. Their group is named by the first byte of the list's uid, because one group for all lists would have too many
records. The group sorts after that of the lists, so a copy of all records in order has a list before its pages. A
part's name begins with the list's uid, which a rename of the list does not change. ``pybk.streams.ledger_list`` has the
rules by which parts are written and removed (T16 and T17).
"""

from __future__ import annotations

import _thread
import logging
import secrets
import shlex
import threading
import time
import weakref
from bisect import bisect_left, bisect_right
from collections import OrderedDict
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from itertools import accumulate
from typing import TYPE_CHECKING, Any, Final, TypeVar, overload

from pybk.backend import LedgerBackend
from pybk.errors import (
    CorruptError,
    DigestMismatchError,
    LedgerFencedError,
    MetadataForgedError,
    MetadataUnreachableError,
    NoSuchLedgerError,
    NoSuchLogError,
    NotEnoughBookiesError,
    PybkError,
    SealMismatchError,
    StorageRefusedError,
    UnsupportedFormatError,
    UsageError,
    VersionConflictError,
)
from pybk.feature_level import FeatureLevel
from pybk.ledger.ledger_metadata import LedgerState
from pybk.manager.ledger_manager import LedgerManager, backend_of
from pybk.manager.ledger_reader import LedgerReader  # not for types alone: a close may read
from pybk.manager.ledger_writer import LedgerWriter
from pybk.streams import ledger_list
from pybk.streams.appender import Appender, fenced_error
from pybk.streams.format import (
    DETACHED_KEY,
    HEADER_BYTES,
    NOTHING_YET,
    SEGMENT_KEY,
    TIME_BYTES,
    DetachedHeader,
    EntryFlag,
    Origin,
    SegmentHeader,
    decode_entry_header,
    highest_after,
)
from pybk.streams.ledger_list import Found, PageGoneError, Step, Steps, Written
from pybk.streams.list_record import (
    PAGE_SEGMENTS,
    SHARDS,
    Bounds,
    CursorBound,
    Detached,
    ListKind,
    ListRecord,
    Page,
    Rows,
    Segment,
    SegmentEnd,
    bound_of,
    decode_bounds,
    decode_page,
    encode_bounds,
    encode_page,
    shard_of,
    title_of,
)
from pybk.streams.log_settings import SETTINGS_PROPERTY, LedgerSpec, LogSettings, wrong_password
from pybk.threads import background, weakly
from pybk.values import encode_json

if TYPE_CHECKING:
    from pybk.metadata.store import Watch

logger = logging.getLogger(__name__)

T = TypeVar("T")

PLACES_MAX: Final = 4096
"""The most known entries of one ledger; beyond it, every other one is forgotten."""

LEDGERS_MAX: Final = 64
"""The most ledgers with known entries; beyond it, the one whose last search is oldest is forgotten."""


class EntryPlaces:
    """The entries that searches of one log have found so far. Entries never change, so this knowledge stays valid.

    Threads: any.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._ledgers: OrderedDict[int, list[tuple[int, int]]] = OrderedDict()
        """The first records of entries and these entries, ascending, by ledger."""

    def around(self, ledger_id: int, seq: int) -> tuple[tuple[int, int] | None, int | None]:
        """Return the known bounds of the search for a record.

        Returns:
            The first record of the last known entry that begins with the record or before it, and that entry; then the
            first known entry that begins after it. None for what is not known.
        """
        with self._lock:
            places = self._ledgers.get(ledger_id)
            if places is None:
                return None, None
            self._ledgers.move_to_end(ledger_id)
            at = bisect_left(places, (seq + 1, 0))
            return places[at - 1] if at else None, places[at][1] if at < len(places) else None

    def learn(self, ledger_id: int, seq: int, entry: int) -> None:
        """Note the first record of an entry."""
        with self._lock:
            places = self._ledgers.setdefault(ledger_id, [])
            at = bisect_left(places, (seq, entry))
            if at < len(places) and places[at] == (seq, entry):
                return
            places.insert(at, (seq, entry))
            if len(places) > PLACES_MAX:
                del places[1::2]
            if len(self._ledgers) > LEDGERS_MAX:
                self._ledgers.popitem(last=False)


_KEPT_PAGES: Final = 16
"""Pages that are kept in memory, of those that were read or written last."""

_NONCE_BYTES: Final = 8


class ListParts:
    """The parts of one list.

    Args:
        backend: The backend that has them.
        kind: The kind of the list.
        uid: The uid of the list.

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
        """Return the bounds in the record that has a subscription's, and its version; None without a record."""
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
        """Replace the record that has the bound of a subscription; return its new version."""
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
        """Remove the pages and sets with lower numbers, except some; those that cannot be removed now are left."""
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
        """Return their number."""
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
        """Yield all segments, ascending."""
        for page in self._record.pages:
            yield from live_of(page, self._load(page))
        yield from self._record.segments


def live_of(page: Page, rows: Rows) -> Rows:
    """Return the segments of a page that were not truncated."""
    return rows[len(rows) - page.segments :]


BLOB_KEY: Final = "pybk.blob"
"""Custom metadata of a blob's ledger: its log, the epoch of its writer, and what it covers, as JSON."""

_LONG_BYTES: Final = 2 << 10
"""Bytes of a record from which on decoding it costs more than the rest of a read."""

_RECORD_LOOK_SECONDS: Final = 1.0
"""The delay after a failed read of the record before it is looked at again for truncation."""

_ALL_ENTRIES: Final = 1 << 62

DAMAGE: Final = (CorruptError, DigestMismatchError)
"""The errors of an entry that is damaged or missing."""

FIRST_ENTRY: Final = 1
"""Entry 0 of a segment's ledger is its header."""


UNREADABLE: Final = (CorruptError, MetadataForgedError, UnsupportedFormatError)
"""The errors of a list whose record cannot be read; what is done to all lists is done to the others nevertheless."""


def names_of(manager: LedgerManager, kind: ListKind, prefix: str = "") -> list[str]:
    """Return the names of the lists of a kind in a store or cluster that begin with ``prefix``, ascending."""
    if not isinstance(prefix, str):
        raise UsageError(f"prefix is {prefix!r:.50}; it takes a string, with which names begin")
    if any("\ud800" <= each <= "\udfff" for each in prefix):
        raise UsageError(f"prefix is {prefix!r:.50}; it takes a string that UTF-8 can encode, as names are")
    return [each.partition("/")[2] for each in backend_of(manager).record_names(f"{kind.group}/{prefix}")]


def page_segments_of(manager: LedgerManager) -> int:
    """Return the number of segments of a page of a list; 0 below the feature level of pages."""
    return PAGE_SEGMENTS if manager.feature_level >= FeatureLevel.STREAMS else 0


class LedgerSteps:
    """Performs steps for one list.

    Args:
        manager: The manager that has the ledgers and the record.
        name: The name of the list.
        spec: The specification by which its ledgers are created and opened.
        owner: The appender of the list, if this process becomes its writer.

    Threads: any, one operation at a time each.
    """

    def __init__(self, manager: LedgerManager, name: str, spec: LedgerSpec, owner: Appender | None = None) -> None:
        self.manager = manager
        self.name = name
        self.spec = spec
        self.made_as: Callable[[], LedgerSpec] | None = None
        """Returns the specification of its ledgers, if another list's settings give it; None for this list's own."""
        self.uid: bytes | None = None
        """The uid of the list to operate on; a list with another uid under this name does not count (rule T13). None
        for any."""
        self._owner = owner
        self._uid = b""
        self._properties: Mapping[str, str] = {}
        """The properties of the record that was read last."""
        self._known: Found | None = None
        """The newest long record that was read or written; it is decoded again only after another process has changed
        it."""
        self._known_lock = threading.Lock()
        self._group = spec.kind.group
        self.record_name = f"{self._group}/{name}"
        self.changes = 0
        """The number of times that the record may have changed since ``watch_truncation`` was called."""
        self._backend = backend_of(manager)
        self._parts: ListParts | None = None
        self._places: EntryPlaces | None = None
        self._truncation: Watch | None = None
        self._woken: Final[set[Callable[[], None]]] = set()
        """What is called after each change of the record, while ``woken_by_change`` is in use."""
        self._kept, self._kept_at = 0, -1
        """The first record that was not truncated, and ``changes`` when that was looked up."""
        self._looks_again = False
        """True after a failed read of the record, until it counts as changed after ``_RECORD_LOOK_SECONDS``."""
        self._recovering: set[int] = set()
        """Lost ledgers of this writer whose recovery it has begun, and whose ends are not listed yet; the recovery may
        have failed."""

    @property
    def title(self) -> str:
        """The list's name in errors."""
        return title_of(self.name, of_cursor=self.spec.kind is ListKind.CURSOR)

    @property
    def places(self) -> EntryPlaces:
        """The places that searches for records have found; made by the first one, because most logs are at rest."""
        if self._places is None:
            self._places = EntryPlaces()
        return self._places

    def perform(self, steps: Steps[T]) -> T:
        """Perform an operation; return its result. Raises the errors of the operation and of its steps."""
        answer: Any = None
        try:
            while True:
                try:
                    step = steps.send(answer)
                except StopIteration as stop:
                    result: T = stop.value
                    return result
                answer = self._step(step)
        finally:
            steps.close()

    def read(self) -> Found | None:
        """Return the record as it is now."""
        found = self._read(self.name)
        if found is None or self.uid not in (None, found.record.uid):
            return None
        self._uid = found.record.uid
        self._properties = found.record.properties
        return found

    def _read(self, name: str) -> Found | None:
        found = self._backend.read_record(f"{self._group}/{name}")
        if found is None:
            return None
        known = self._known
        page_segments = page_segments_of(self.manager)
        if known is not None and known.record.encode() == found.value:
            return Found(known.record, found.version, page_segments)
        try:
            record = ListRecord.decode(found.value, where=f"the record of log {name!r}")
        except CorruptError as error:
            raise CorruptError(f"{error}{self._remedy(name, 'the record')}") from error
        return self._keep(Found(record, found.version, page_segments))

    def _remedy(self, name: str, what: str) -> str:
        """Return the remedy that makes a record again, for an error; empty for a cursor, which has no such command."""
        kind = self.spec.kind
        if kind is ListKind.CURSOR:
            return ""
        return f"; `pybk {kind} rebuild PATH {shlex.quote(name)}` makes {what} again from the ledgers"

    def lost_remedy(self) -> str:
        """Return the remedy for a lost record, which makes the record again, for an error."""
        return self._remedy(self.name, "a record that was lost")

    def _keep(self, found: Found) -> Found:
        """Keep a record for the next read if it is long, because most logs are short and at rest; returns it.

        A newer one stays: another thread may have read before this one wrote.
        """
        with self._known_lock:
            known = self._known
            if known is None or known.record.uid != found.record.uid or known.version <= found.version:
                self._known = found if len(found.record.encode()) >= _LONG_BYTES else None
        return found

    def pin(self) -> None:
        """Operate only on the list that has the name now, and not on one that gets the name later (rule T13).

        Raises:
            NoSuchLogError: The log does not exist.
        """
        self.uid = self.existing().record.uid

    def existing(self, *, of_dropped: bool = False) -> Found:
        """Return the record as it is now.

        Args:
            of_dropped: Whether to return the record of a log whose deletion was begun and not completed.

        Raises:
            NoSuchLogError: The log does not exist.
        """
        found = self.read()
        if found is None or (found.record.dropped and not of_dropped):
            raise ledger_list.absent(self.title, found, self.lost_remedy())
        return found

    def settings(self) -> LogSettings:
        """Return the settings that the log keeps.

        Raises:
            NoSuchLogError: The log does not exist.
        """
        return LogSettings.kept_in(self.existing().record.properties, self.name)

    def keep_settings(self, settings: LogSettings) -> None:
        """Replace the settings that the log keeps."""
        if not isinstance(settings, LogSettings):
            raise UsageError(f"settings is {settings!r:.50}; it takes LogSettings(...)")
        self.set_properties({SETTINGS_PROPERTY: None, **settings.as_properties()})

    def set_properties(self, changes: Mapping[str, str | None]) -> None:
        """Change some of the list's properties, all or none; None removes one."""
        self.perform(ledger_list.update(self.name, lambda record: record.with_properties(changes)))

    def full_spec(self) -> LedgerSpec:
        """Return the specification of the log's ledgers: the settings of its opening, completed by those it keeps.

        Raises:
            NoSuchLogError: The log does not exist.
        """
        self.existing()
        return self._full_spec

    @property
    def _full_spec(self) -> LedgerSpec:
        return self.spec.completed(LogSettings.kept_in(self._properties, self.name))

    @property
    def data_bytes_max(self) -> int:
        """The longest record that an entry can hold, bytes."""
        return self._backend.config.max_entry_bytes - HEADER_BYTES - TIME_BYTES

    def last_seq(self) -> int:
        """Return the last record that can be read now; the one before ``first_seq`` if there is none."""
        record = self.existing().record
        for segment in reversed(record.open_segments):
            try:
                with self.open_segment(segment) as reader:
                    end = segment_end(reader, segment, where=f"log {self.name!r}, ledger {segment.ledger_id}")
            except NoSuchLedgerError:
                if self.existing().record == record:
                    raise
                return self.last_seq()  # the log was truncated, or taken over, since the record was read
            except DAMAGE as error:
                if self.has_own_remedy(error):
                    raise
                raise self._uncounted(segment, error) from error
            if end.last_seq is not None:
                return end.last_seq
        return max(record.end_seq, record.first_seq) - 1

    def last_shown(self, last: int) -> str:
        """Return which record is the last one, for an error; ``last`` is the result of ``last_seq``."""
        first = self.existing().record.first_seq
        if last >= first:
            return f"its last is {last}"
        return f"it has no records, and the next one is {first}"

    def check_truncation(self, seq: int, last: int) -> None:
        """Raise UsageError if records before one are to be dropped, and not all of them exist yet.

        Args:
            seq: The first record to keep.
            last: The result of ``last_seq``.
        """
        if seq > last + 1:
            raise UsageError(f"{self.title}: records before {seq} cannot be dropped; {self.last_shown(last)}")

    # ---- pages and bounds ----------------------------------------------------------------------------------------

    def bounds_of(self, record: ListRecord) -> Bounds:
        """Return the present bounds of the durable subscriptions, or those in the record, by name."""
        if not record.admissions:
            return record.cursors
        return record.left_of(self._parts_of(record.uid).bounds(record.bound_set))

    def bound(self, cursor: str) -> CursorBound | None:
        """Return the bound of a subscription; None if no subscription has that name.

        Raises:
            NoSuchLogError: The log does not exist.
        """
        return self.bound_in(self.existing().record, cursor)

    def bound_in(self, record: ListRecord, cursor: str) -> CursorBound | None:
        """Return the bound of a subscription of the log with a record; None if no subscription has that name."""
        if not record.bound_set:
            return bound_of(record.cursors, cursor)
        return bound_of(record.left_of(self._parts_of(record.uid).shard(record.bound_set, cursor)[0]), cursor)

    def with_segments(self, use: Callable[[ListRecord, Sequence[Segment]], T]) -> T:
        """Return the result of ``use`` with the record and all its segments, which are read when it takes them.

        ``use`` is called again if a page of them does not exist any more, because the record has changed then.

        Raises:
            NoSuchLogError: The log does not exist.
            CorruptError: A page is missing.
        """
        while True:
            record = self.existing().record
            try:
                return use(record, AllSegments(record, self._page))
            except PageGoneError:
                continue

    def all_segments(self) -> list[Segment]:
        """Return all segments of the list.

        Raises:
            NoSuchLogError, CorruptError: As ``with_segments``.
        """
        return self.with_segments(lambda _, segments: list(segments))

    def segment_of(self, record: ListRecord, seq: int) -> Segment | None:
        """Return the segment of record ``seq``, as ``ListRecord.segment_of``; None also if its page does not exist."""
        page = record.page_of(seq)
        if page is None:
            return record.segment_of(seq)
        with suppress(PageGoneError):
            return next(each for each in self._page(page) if each.last_seq is not None and seq <= each.last_seq)
        return None

    def segment_numbered(self, record: ListRecord, number: int) -> Segment | None:
        """Return the segment of a number; None if the record does not list it, or its page does not exist."""
        page = record.page_numbered(number)
        if page is None:
            return next((each for each in record.segments if each.number == number), None)
        with suppress(PageGoneError):
            return next((each for each in live_of(page, self._page(page)) if each.number == number), None)
        return None

    def _page(self, page: Page) -> Rows:
        rows = self._read_page(page.name)
        if rows is None:
            raise PageGoneError
        return rows

    def _read_page(self, name: str) -> Rows | None:
        """Return the segments of a page; None if the record does not name it any more.

        Raises:
            CorruptError: It is missing.
        """
        rows = self._own_parts.page(name)
        if rows is None:
            found = self.read()
            if found is not None and any(each.name == name for each in found.record.pages):
                raise CorruptError(
                    f"{self.title}: page {name} of its segments is missing; restore it, or make its record again from "
                    f"its ledgers{self._remedy(self.name, 'the record')}"
                )
        return rows

    @property
    def _own_parts(self) -> ListParts:
        """The parts of the list that is operated on, or that was read last."""
        return self._parts_of(self._uid if self.uid is None else self.uid)

    def _parts_of(self, uid: bytes) -> ListParts:
        """Return the parts of the list of a uid."""
        parts = self._parts
        if parts is None or parts.uid != uid:
            self._parts = parts = ListParts(self._backend, self.spec.kind, uid)
        return parts

    def watch_bounds(self, record: ListRecord, callback: Callable[[], None]) -> list[Watch]:
        """Call ``callback`` after changes of bounds, as ``watch``; do nothing if the record itself has the bounds."""
        names = self._parts_of(record.uid).shard_names(record.bound_set) if record.admissions else []
        return [self._backend.watch_record(each, callback) for each in names]

    def watch(self, callback: Callable[[], None]) -> Watch:
        """Call ``callback`` after changes of the record, from some thread; it must not block."""
        return self._backend.watch_record(self.record_name, callback)

    def watch_truncation(self) -> None:
        """Count the changes of the record in ``changes`` from now on, as long as this object exists."""
        if self._truncation is None:
            self._truncation = watch = self.watch(weakly(LedgerSteps._note_change, self))
            weakref.finalize(self, cancel_elsewhere, watch).atexit = False

    @contextmanager
    def woken_by_change(self, callback: Callable[[], None]) -> Iterator[None]:
        """Have a callback called after each change of the record, from some thread, until the ``with`` block ends.

        Needs ``watch_truncation`` before; by its watch an event loop can wait, as no metadata store is asked here.
        """
        self._woken.add(callback)
        try:
            yield
        finally:
            self._woken.discard(callback)

    def _note_change(self) -> None:
        self.changes += 1
        for callback in list(self._woken):
            callback()

    def _look_again(self) -> None:
        self._looks_again = False
        self.changes += 1

    def kept_from(self) -> int:
        """Return the first record that was not truncated; reads the record only if it may have changed.

        If the list does not exist any more, or cannot be read now, the value known before is returned, and the record
        counts as changed a second later.
        """
        changes = self.changes
        if self._kept_at != changes:
            try:
                self._kept, self._kept_at = self.existing().record.first_seq, changes
            except NoSuchLogError:
                pass
            except MetadataUnreachableError:
                if self._kept_at < 0:
                    raise
                if not self._looks_again:
                    self._looks_again = True
                    background().call_later(_RECORD_LOOK_SECONDS, weakly(LedgerSteps._look_again, self))
        return self._kept

    def _step(self, step: Step) -> Any:
        match step:
            case ledger_list.ReadList(other):
                return self.read() if other is None else self._read(other)
            case ledger_list.WriteList(record, version):
                written = self._write(record.encode(), version)
                if isinstance(written, Written):
                    self._keep(Found(record, written.version))
                return written
            case ledger_list.RemoveList(version):
                return self._write(None, version)
            case ledger_list.MoveList(record, version):
                return self._move(record, version)
            case ledger_list.CreateLedger():
                return self._create(step)
            case ledger_list.RecoverLedger(segment, counts):
                return self._end_of(segment, counts=counts)
            case ledger_list.SwitchTo(segment):
                return self._writing.switch(segment)
            case ledger_list.CloseLedger(segment):
                return self._close(segment)
            case ledger_list.RecoverOwn(segment):
                return self._recover_own(segment)
            case ledger_list.CheckDetached():
                return self._check_detached(step)
            case ledger_list.DeleteLedger(ledger_id):
                if self._owner is not None:
                    self._owner.deleted(ledger_id)
                return self.delete(ledger_id)
            case _:
                return self._part_step(step)

    def _part_step(self, step: Step) -> Any:
        parts = self._own_parts
        match step:
            case ledger_list.ReadPage(name):
                return self._read_page(name)
            case ledger_list.WritePage(number, rows):
                return parts.write_page(number, rows)
            case ledger_list.RemovePage(name):
                return parts.remove_page(name)
            case ledger_list.SweepParts(kept, below):
                return parts.sweep(kept, below)
            case ledger_list.ReadBounds(bound_set):
                return parts.bounds(bound_set)
            case ledger_list.ReadShard(bound_set, cursor):
                return ledger_list.Shard(*parts.shard(bound_set, cursor))
            case ledger_list.WriteShard(bound_set, cursor, bounds, version):
                return _outcome(lambda: parts.write_shard(bound_set, cursor, bounds, version))
            case ledger_list.WriteBounds(number, bounds):
                return parts.write_bounds(number, bounds)

    @property
    def _writing(self) -> Appender:
        assert self._owner is not None, "only a writer rolls and closes"
        return self._owner

    def _write(self, value: bytes | None, version: int | None) -> Any:
        try:
            return _outcome(lambda: self._backend.write_record(self.record_name, value, version))
        finally:
            self.changes += 1  # a cluster reports it some time later

    def _move(self, record: ListRecord, version: int) -> Any:
        target = f"{self._group}/{record.name}"

        def move() -> int:
            self._backend.rename_record(self.record_name, target, record.encode(), version)
            return version

        return _outcome(move)

    def _create(self, step: ledger_list.CreateLedger) -> int:
        header = SegmentHeader(self._uid, self.name, step.number, step.epoch, step.generation, step.predecessor)
        spec = self._full_spec if self.made_as is None else self.made_as()
        writer = spec.create(
            self.manager, {SEGMENT_KEY: header.describe()}, entries_when_full=self._entries_when_full(step)
        )
        try:
            writer.append(header.encode())
        except NoSuchLedgerError:
            if self.existing().record.next_segment <= step.number:
                raise
            return writer.ledger_id  # a sweep deleted it, as another owner has used its number: it cannot be listed
        except PybkError as error:
            self.delete(writer.ledger_id)
            if isinstance(error, NotEnoughBookiesError):  # that of the ledger is nobody's business, as it is not listed
                raise NotEnoughBookiesError(f"{self.title}: {error}") from error
            raise
        self._writing.created(writer)
        return writer.ledger_id

    def _entries_when_full(self, step: ledger_list.CreateLedger) -> int:
        """Return how many entries of a segment a store takes although it is full: the header, and acknowledgements."""
        if self.spec.kind is ListKind.CURSOR:
            return _ALL_ENTRIES
        return 1 if step.when_full else 0

    def create_blob(self, epoch: int, seq: int, generation: int) -> LedgerWriter:
        """Create the ledger of a blob of this log.

        Args:
            epoch: The epoch of its writer.
            seq: The last record that the checkpoint covers.
            generation: The generation of this record.
        """
        description = {"name": self.name, "uid": self.existing().record.uid.hex()}
        covers = {"epoch": epoch, "seq": seq, "generation": generation}
        return self._full_spec.create(self.manager, {BLOB_KEY: encode_json(description | covers)})

    def open_blob(self, ledger_id: int) -> LedgerReader:
        """Open the ledger of a blob; NoSuchLedgerError if it was deleted."""
        return self.spec.open_ledger(self.manager, ledger_id, recover=False)

    def open_segment(self, segment: Segment, *, recover: bool = False) -> LedgerReader:
        """Open the ledger of a segment; NoSuchLedgerError if it was deleted."""
        return self.spec.open_ledger(self.manager, segment.ledger_id, recover=recover)

    def create_detached(self, header: DetachedHeader) -> LedgerWriter:
        """Create a ledger that the log may adopt; its header is to be its first entry."""
        return self.full_spec().create(self.manager, {DETACHED_KEY: header.describe()})

    def _check_detached(self, step: ledger_list.CheckDetached) -> bool:
        """Check a ledger that is to be adopted; returns whether it exists.

        Raises:
            CorruptError: It is another ledger than its description says, or not closed.
        """
        ledger = step.ledger
        where = f"{self.title}: ledger {ledger.ledger_id}"
        try:
            metadata = self._backend.metadata(ledger.ledger_id)
            if metadata.state is not LedgerState.CLOSED:
                raise CorruptError(f"{where} is not closed; seal it before it is adopted")
            with self.spec.open_ledger(self.manager, ledger.ledger_id, recover=False) as reader:
                header = DetachedHeader.decode(payload_of(reader, 0), where=f"{where} entry 0")
                found = _detached_of(reader, where=where)
        except NoSuchLedgerError:
            return False
        if (header.uid, header.query, header.epoch) != (self._uid, step.query, step.epoch):
            raise CorruptError(
                f"{where} was written for commit {header.epoch} of query {header.query!r} of log {header.name!r}; "
                "adopt it there"
            )
        if found != ledger:
            raise CorruptError(f"{where} has {found}, and was described as {ledger}; describe it as its writer did")
        return True

    def release_replaced(self, record: ListRecord) -> None:
        """Delete the ledgers of segments that merges replaced and whose time is over (rule T22), as a record says.

        Raises:
            NoSuchLogError: The log does not exist.
        """
        now_ns = time.time_ns()
        if record.pages_over(now_ns):
            self.perform(ledger_list.release(self.name, now_ns))

    def check_password(self, *, of_dropped: bool = False) -> None:
        """Raise UnauthorizedError if the password is not that of the log's ledgers; arguments as for ``existing``."""
        looked: ListRecord | None = None
        while (
            record := self.existing(of_dropped=of_dropped).record
        ) != looked:  # again if its ledgers were deleted meanwhile
            looked = record
            for segment in reversed(record.segments):
                with suppress(NoSuchLedgerError):
                    if not self.spec.opens(self.manager, segment.ledger_id):
                        raise wrong_password(self.manager, segment.ledger_id, f"log {self.name!r}", self.spec.given)
                    return

    def delete_list(self) -> None:
        """Delete the log for good.

        Raises:
            NoSuchLogError: It does not exist.
            UnauthorizedError: The password is not the log's; nothing was deleted.
            StorageRefusedError: A ledger could not be deleted.
        """
        self.check_password(of_dropped=True)
        self.perform(ledger_list.drop(self.name))
        if self.read() is not None:
            raise StorageRefusedError(
                f"log {self.name!r} is deleted, except for a ledger that could not be deleted; delete it again"
            )

    def _end_of(self, segment: Segment, *, counts: bool = True) -> SegmentEnd | None:
        """Close a ledger unless that is done, and return what it holds; None if it is gone, and not listed any more."""
        where = f"log {self.name!r}, ledger {segment.ledger_id}"
        try:
            with self.open_segment(segment, recover=True) as reader:
                return segment_end(reader, segment, where=where) if counts else SegmentEnd(None, None, reader.length)
        except DAMAGE as error:
            if self.has_own_remedy(error):
                raise
            raise self._uncounted(segment, error) from error
        except NoSuchLedgerError as error:
            found = self.read()
            if found is None or segment.ledger_id not in found.record.ledgers:
                return None
            if not counts:
                return SegmentEnd(None, None, 0)
            raise CorruptError(
                f"log {self.name!r}: ledger {segment.ledger_id} of segment {segment.number} is missing; restore it, or "
                "give its records up"
            ) from error

    def has_own_remedy(self, error: PybkError) -> bool:
        """Return whether an error of a damaged or missing entry has another remedy than those of a log."""
        return isinstance(error, SealMismatchError) or self.spec.kind is ListKind.CURSOR

    def _uncounted(self, segment: Segment, error: PybkError) -> CorruptError:
        """Return the error for a segment whose records cannot be counted."""
        place = error if isinstance(error, CorruptError) else CorruptError()
        return CorruptError(
            f"{self.title}: the records of its open ledger {segment.ledger_id} cannot be counted, so nothing can be "
            f"appended ({error}); restore the ledger from a backup, or give the log up: "
            f"`pybk {self.spec.kind} delete PATH {shlex.quote(self.name)}` deletes it, so that it can be made again",
            path=place.path,
            offset=place.offset,
        )

    def _close(self, segment: Segment) -> SegmentEnd | ledger_list.Lost:
        try:
            if not self._writing.close_segment(segment):
                return ledger_list.LOST
        except (LedgerFencedError, NoSuchLedgerError) as error:
            self.existing()  # raises if the log was deleted or renamed
            raise fenced_error(self.title) from error
        end = self._end_of(segment)
        if end is None:
            self.existing()
            raise fenced_error(self.title)
        return end

    def _recover_own(self, segment: Segment) -> SegmentEnd:
        """Recover a lost ledger of this writer, unless another client has begun to (rule T15)."""
        ledger_id = segment.ledger_id
        with suppress(NoSuchLedgerError):
            if not self._may_recover(ledger_id):
                raise fenced_error(self.title, f" (another client fenced its ledger {ledger_id})")
            self._recovering.add(ledger_id)
            end = self._end_of(segment)
            if end is not None:
                return end
        self.existing()
        raise fenced_error(self.title)

    def _may_recover(self, ledger_id: int) -> bool:
        """Return whether no other client has begun to recover a ledger of this writer."""
        if ledger_id in self._recovering:
            return True
        metadata = self._backend.metadata(ledger_id)
        return metadata.state is LedgerState.OPEN or self._writing.has_closed(metadata)

    def delete(self, ledger_id: int) -> bool:
        """Delete a ledger that no list names; return whether it no longer exists."""
        return self.spec.delete_ledger(self.manager, ledger_id, f"log {self.name!r}")


def _outcome(change: Callable[[], int]) -> Written | ledger_list.Conflict | ledger_list.Unknown:
    """Make a compare-and-set, and return its outcome as the result of a step."""
    try:
        return Written(change())
    except VersionConflictError as error:
        return ledger_list.UNKNOWN if error.outcome_unknown else ledger_list.CONFLICT
    except MetadataUnreachableError as error:
        if not error.outcome_unknown:
            raise
        return ledger_list.UNKNOWN


def payload_of(reader: LedgerReader, entry: int) -> bytes:
    """Return the payload of an entry."""
    return next(reader.read(entry, entry)).payload


def first_seq_of(reader: LedgerReader, entry: int, origin: Origin | None = None) -> int:
    """Return the first record of an entry; ``origin`` is that of the ledger, if the log adopted it."""
    where = f"ledger {reader.ledger_id} entry {entry}"
    return decode_entry_header(payload_of(reader, entry), where=where, origin=origin).seq


def _detached_of(reader: LedgerReader, *, where: str) -> Detached:
    """Return what a closed detached ledger holds; CorruptError if it has no records."""
    last, origin = reader.last_add_confirmed, Origin(0, NOTHING_YET)
    if last < FIRST_ENTRY:
        raise CorruptError(f"{where} has no records; leave it out")
    payload, at = payload_of(reader, last), f"{where} entry {last}"
    found = decode_entry_header(payload, where=at, origin=origin)
    highest = highest_after(payload, where=at, origin=origin)
    return Detached(reader.ledger_id, found.seq + found.records, reader.length, highest)


def segment_end(reader: LedgerReader, segment: Segment, *, where: str) -> SegmentEnd:
    """Return the records and bytes of a closed ledger of a list, without a transaction that was not committed.

    Raises:
        CorruptError: It is not the ledger of this segment.
    """
    last = reader.last_add_confirmed
    if last < 0:
        return SegmentEnd(None, None, reader.length)
    header = SegmentHeader.decode(payload_of(reader, 0), where=f"{where} entry 0")
    if header.number != segment.number:
        raise CorruptError(f"{where} is segment {header.number}, not {segment.number}; restore the list's record")
    first_seq = None
    while last > 0:
        payload = payload_of(reader, last)
        found = decode_entry_header(payload, where=f"{where} entry {last}")
        if EntryFlag.MORE not in found.flags:
            first_seq = first_seq_of(reader, FIRST_ENTRY)
            highest = highest_after(payload, where=f"{where} entry {last}")
            return SegmentEnd(first_seq, found.seq + found.records - 1, reader.length, highest)
        last -= 1
    return SegmentEnd(None, None, reader.length)


def cancel_elsewhere(watch: Watch) -> None:
    """Cancel a watch in a thread, because the collector runs inside any other call, which may hold the same lock."""
    with suppress(RuntimeError):  # the interpreter is ending
        _thread.start_new_thread(watch.cancel, ())

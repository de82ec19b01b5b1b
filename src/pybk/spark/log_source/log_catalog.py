"""The logs of a read, as the planner sees them: which there are, and the records that each has now.

A look reads the record of each log, and the last add confirmed of its open ledger; it lists neither ledgers nor, unless
a pattern selects the logs, names. The catalog of a streaming query in a cluster *follows* the logs: after its first
look it reads the records that have changed, and a pattern is compared with their names alone. Each look asks each
bookie once for the ends of all open ledgers, and reads those that have moved. So it costs what changed, and misses
no record that an ack quorum knew as confirmed before it began.
"""

from __future__ import annotations

import math
import re
import time
from collections.abc import Collection, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Final, NamedTuple

from pybk.credentials import Credentials
from pybk.errors import NoSuchLedgerError, NoSuchLogError
from pybk.manager.ledger_reader import moved
from pybk.spark.connection import connection
from pybk.spark.log_source.log_reading import RecordRange
from pybk.spark.noted_changes import NotedChanges
from pybk.spark.options import nearest
from pybk.spark.source.planning import SizedRange
from pybk.streams.ledger_steps import LedgerSteps, names_of, segment_end
from pybk.streams.list_record import ListKind, ListRecord, Segment
from pybk.streams.log_settings import LedgerSpec

if TYPE_CHECKING:
    from pybk.manager.ledger_manager import LedgerManager
    from pybk.manager.ledger_reader import LedgerReader
    from pybk.spark.log_source.log_options import LogOptions
    from pybk.streams.ledger_list import Found

_LIST_SHARE: Final = 10
_RECORD_BYTES: Final = 1 << 10


class LogState(NamedTuple):
    """A log at one moment.

    Attributes:
        record: Its record.
        end_seq: The record after the last one that can be read.
    """

    record: ListRecord
    end_seq: int


class LogView:
    """One log, as the planner sees it.

    Args:
        manager: Has the log.
        name: The log's.
        spec: How its ledgers are opened.

    Threads: one.
    """

    def __init__(self, manager: LedgerManager, name: str, spec: LedgerSpec) -> None:
        self.steps: Final = LedgerSteps(manager, name, spec)
        self._checked = b""
        """The uid of the log whose password was checked."""
        self._found: Found | None = None
        """The record as of the last look; None if there was none."""
        self.reader: LedgerReader | None = None
        """The reader of the open ledger that was looked at last."""
        self._seen: tuple[int, int, int | None] | None = None
        """That ledger, its last add confirmed, and the last record up to there."""
        self._state: LogState | None = None
        """The log as of the last look."""

    def look(self, *, again: bool = True, unmoved: LedgerReader | None = None) -> LogState | None:
        """Return the log as it is now; None if there is none.

        Args:
            again: Whether to read its record; if False, it is that of the last look, whose end alone may have moved.
            unmoved: A reader whose last add confirmed need not be read, because it is that of this moment.

        Raises:
            UnauthorizedError: The password or secret is not the log's.
            PybkError: The metadata store or bookies cannot be read.
        """
        while True:
            if again:
                self._found = self.steps.read()
            found, again, self._state = self._found, True, None
            if found is None or found.record.dropped:
                self.close()
                return None
            record = found.record
            try:
                if self._checked != record.uid:
                    self.steps.check_password()
                    self._checked = record.uid
                self._state = LogState(record, self._end(record, unmoved))
            except NoSuchLedgerError:
                if self.steps.read() == found:
                    raise
            except NoSuchLogError:
                continue  # deleted since it was read
            else:
                return self._state

    def _end(self, record: ListRecord, unmoved: LedgerReader | None) -> int:
        """Return the record after the last one that can be read."""
        for segment in reversed(record.open_segments):
            last = self._last_of(segment, unmoved)
            if last is not None:
                return last + 1
        if not record.open_segments:
            self.close()
        return max(record.end_seq, record.first_seq)

    def _last_of(self, segment: Segment, unmoved: LedgerReader | None) -> int | None:
        """Return the last record of an open segment; None if it has none. Reads entries only if there are new ones."""
        reader = self._opened(segment)
        last = reader.last_add_confirmed if reader is unmoved else reader.read_last_add_confirmed()
        if self._seen is None or self._seen[:2] != (segment.ledger_id, last):
            end = segment_end(reader, segment, where=f"{self.steps.title}, ledger {segment.ledger_id}")
            self._seen = segment.ledger_id, last, end.last_seq
        return self._seen[2]

    def _opened(self, segment: Segment) -> LedgerReader:
        if self.reader is None or self.reader.ledger_id != segment.ledger_id:
            self.close()
            self.reader = self.steps.open_segment(segment)
        return self.reader

    def close(self) -> None:
        """Close the ledger."""
        if self.reader is not None:
            self.reader.close()
            self.reader = None

    def parts(self, state: LogState, wanted: RecordRange) -> Iterator[SizedRange[RecordRange]]:
        """Yield records by segment, with their average size."""
        record, last = state.record, wanted.last
        seq = wanted.first
        while seq <= last:
            segment = self.steps.segment_of(record, seq)
            part_last, nbytes = last, float(_RECORD_BYTES)
            if segment is not None and segment.first_seq is not None:
                end_seq = state.end_seq if segment.last_seq is None else segment.last_seq + 1
                part_last = last if segment.last_seq is None else min(last, segment.last_seq)
                nbytes = self._bytes_of(segment) / max(1, end_seq - segment.first_seq)
            yield SizedRange(wanted.part(seq, part_last), nbytes)
            seq = part_last + 1

    def bytes_of(self, wanted: RecordRange) -> int:
        """Return about how many bytes some records have, as of the last look; 0 if there was no log.

        Raises:
            PybkError: The metadata store cannot be read.

        Cost: By the number of segments; reads the pages of the log's record that have them.
        """
        if self._state is None:
            return 0
        return round(sum(len(part.entry_range) * part.entry_bytes for part in self.parts(self._state, wanted)))

    def _bytes_of(self, segment: Segment) -> int:
        """Return the payload bytes of a segment, so far."""
        if segment.last_seq is not None or self.reader is None or self.reader.ledger_id != segment.ledger_id:
            return segment.nbytes
        return self.reader.length


class LogCatalog:
    """The logs of a read.

    Args:
        options: The options of the read.
        follow: Whether many looks are made, which see what has changed since the one before; in an embedded store they
            read all records nevertheless.

    Threads: one.
    """

    def __init__(self, options: LogOptions, *, follow: bool = False) -> None:
        found = connection(options.where)
        self._options = options
        self._manager: Final = found.manager
        self._spec: Final = spec_of_logs(options.kind, options.given.read())
        self._views: dict[str, LogView] = {}
        self._names: Sequence[str] = options.names
        self._pattern: Final = None if options.pattern is None else re.compile(options.pattern)
        self._changes: NotedChanges[str] | None = None
        """The names of the logs whose records were created, changed or removed."""
        if follow and found.metadata is not None:
            self._changes = NotedChanges(partial(found.metadata.feed_pointers, options.kind.group))
        self.list_at = 0.0
        """The time of the next look that sees all, by the monotonic clock."""

    def view(self, name: str) -> LogView:
        """Return the view of a log, which need not exist."""
        if name not in self._views:
            self._views[name] = LogView(self._manager, name, self._spec)
        return self._views[name]

    def look(self, *, now: bool = True) -> dict[str, LogState]:
        """Return the logs that exist, by name.

        Args:
            now: Whether to see every record of a log that exists now. If False, a catalog that follows sees those of
                which it was notified, and another one uses the last listing of names while a new one would take too
                long.

        Raises:
            UnauthorizedError: The password or secret is not that of a log.
            PybkError: The metadata store or bookies cannot be read.

        Cost: A request to each bookie, and reading the records and ends that have changed; without following, a read
            of each record.
        """
        listing = now or time.monotonic() >= self.list_at
        changed = None if self._changes is None else self._changes.take()
        try:
            unmoved = self._unmoved()
            if changed is None or listing:
                found = {
                    name: self.view(name).look(unmoved=unmoved.get(name)) for name in self._listed(listing=listing)
                }
            else:
                self._names = self._with(changed)
                found = {
                    name: self.view(name).look(again=name in changed, unmoved=unmoved.get(name)) for name in self._names
                }
        except BaseException:
            if self._changes is not None:
                self._changes.note(None)
            raise
        return {name: state for name, state in found.items() if state is not None}

    def _unmoved(self) -> dict[str, LedgerReader]:
        """Return the readers of open ledgers that have not moved since the last look, by log."""
        readers = {name: view.reader for name, view in self._views.items() if view.reader is not None}
        unread = set(map(id, moved(list(readers.values()))))
        return {name: reader for name, reader in readers.items() if id(reader) not in unread}

    def look_at(self, name: str) -> LogState | None:
        """Return a log that a pattern selects and a look lacks, because listings may be late; None if there is none.

        Raises:
            PybkError: As ``look``.
        """
        if self._pattern is None or not self._pattern.fullmatch(name):
            return None
        state = self.view(name).look()
        if state is not None:
            self._names = sorted({*self._names, name})
        return state

    def _listed(self, *, listing: bool) -> Sequence[str]:
        """Return the names of the logs, of which some may not exist; list them if a pattern selects them."""
        if self._pattern is not None and (listing or self._changes is not None):
            began = time.monotonic()
            names = names_of(self._manager, self._options.kind, literal_prefix(self._pattern.pattern))
            self._names = [name for name in names if self._pattern.fullmatch(name)]
            ended = time.monotonic()
            self.list_at = ended + _LIST_SHARE * (ended - began)
        if self._changes is not None:
            self.list_at = math.inf
        return self._names

    def _with(self, changed: Collection[str]) -> Sequence[str]:
        """Return the names of the logs, after some were made, changed or deleted."""
        if self._pattern is None:
            return self._names
        return sorted({*self._names, *filter(self._pattern.fullmatch, changed)})

    def close(self) -> None:
        """End the feed of changes."""
        if self._changes is not None:
            self._changes.close()
            self._changes = None

    def check_names(self) -> None:
        """Check that the logs exist, unless ``allow_missing`` is set.

        Raises:
            NoSuchLogError: A log does not exist, or no log matches the pattern.
        """
        options = self._options
        if options.allow_missing:
            return
        if options.pattern is not None and not self._listed(listing=True):
            names = names_of(self._manager, options.kind)
            raise NoSuchLogError(
                f"no log of {options.where} matches {options.pattern!r:.100}; {nearest('', names, 'logs')}"
            )
        for name in options.names:
            found = self.view(name).steps.read()
            if found is None or found.record.dropped:
                title = "write-ahead log" if options.kind is ListKind.WAL else "log"
                names = names_of(self._manager, options.kind)
                raise NoSuchLogError(f"there is no {title} {name!r} in {options.where}; {nearest(name, names, 'logs')}")


def spec_of_logs(kind: ListKind, given: Credentials) -> LedgerSpec:
    """Return how the ledgers of logs are opened, which are not made here."""
    return LedgerSpec(ledger_type=kind, given=given, insecure=True)


def literal_prefix(pattern: str) -> str:
    """Return characters with which all names begin that match a regular expression; perhaps none."""
    if "|" in pattern:
        return ""
    found = re.match(r"[\w/-]*", pattern, re.ASCII)
    assert found is not None
    following = pattern[found.end() : found.end() + 1]
    return found[0][:-1] if following in ("*", "?", "{") else found[0]

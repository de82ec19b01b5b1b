"""The logs of a read, as the planner sees them: which there are, and the records that each has now.

A look reads the record of each log, and asks for the last add confirmed of its open ledger; it lists neither ledgers
nor, unless a pattern selects the logs, names.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Final, NamedTuple

from pybk.credentials import Credentials
from pybk.errors import NoSuchLedgerError, NoSuchLogError
from pybk.spark.connection import connection
from pybk.spark.log_source.log_reading import RecordRange
from pybk.spark.options import nearest
from pybk.spark.source.planning import SizedRange
from pybk.streams.ledger_spec import LedgerSpec
from pybk.streams.ledger_steps import LedgerSteps, names_of, segment_end
from pybk.streams.list_record import ListKind, ListRecord, Segment

if TYPE_CHECKING:
    from pybk.manager.ledger_manager import LedgerManager
    from pybk.manager.ledger_reader import LedgerReader
    from pybk.spark.log_source.log_options import LogOptions

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
        self._reader: LedgerReader | None = None
        """Of the open ledger that was looked at last."""
        self._seen: tuple[int, int, int | None] | None = None
        """That ledger, its last add confirmed, and the last record up to there."""

    def look(self) -> LogState | None:
        """Return the log as it is now; None if there is none.

        Raises:
            UnauthorizedError: The password or secret is not the log's.
            PybkError: The metadata store or bookies cannot be read.
        """
        while True:
            found = self.steps.read()
            if found is None or found.record.dropped:
                self.close()
                return None
            record = found.record
            try:
                if self._checked != record.uid:
                    self.steps.check_password()
                    self._checked = record.uid
                return LogState(record, self._end(record))
            except NoSuchLedgerError:
                if self.steps.read() == found:
                    raise
            except NoSuchLogError:
                continue  # deleted since it was read

    def _end(self, record: ListRecord) -> int:
        """Return the record after the last one that can be read."""
        for segment in reversed(record.open_segments):
            last = self._last_of(segment)
            if last is not None:
                return last + 1
        if not record.open_segments:
            self.close()
        return max(record.end_seq, record.first_seq)

    def _last_of(self, segment: Segment) -> int | None:
        """Return the last record of an open segment; None if it has none. Reads entries only if there are new ones."""
        reader = self._opened(segment)
        last = reader.read_last_add_confirmed()
        if self._seen is None or self._seen[:2] != (segment.ledger_id, last):
            end = segment_end(reader, segment, where=f"{self.steps.title}, ledger {segment.ledger_id}")
            self._seen = segment.ledger_id, last, end.last_seq
        return self._seen[2]

    def _opened(self, segment: Segment) -> LedgerReader:
        if self._reader is None or self._reader.ledger_id != segment.ledger_id:
            self.close()
            self._reader = self.steps.open_segment(segment)
        return self._reader

    def close(self) -> None:
        """Close the ledger."""
        if self._reader is not None:
            self._reader.close()
            self._reader = None

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

    def _bytes_of(self, segment: Segment) -> int:
        """Return the payload bytes of a segment, so far."""
        if segment.last_seq is not None or self._reader is None or self._reader.ledger_id != segment.ledger_id:
            return segment.nbytes
        return self._reader.length


class LogCatalog:
    """The logs of a read.

    Args:
        options: The options of the read.

    Threads: one.
    """

    def __init__(self, options: LogOptions) -> None:
        self._options = options
        self._manager: Final = connection(options.where).manager
        self._spec: Final = spec_of_logs(options.kind, options.given.read())
        self._views: dict[str, LogView] = {}
        self._names: Sequence[str] = options.names
        self.list_at = 0.0
        """The time of the next listing of names, by the monotonic clock; for a pattern."""

    def view(self, name: str) -> LogView:
        """Return the view of a log, which need not exist."""
        if name not in self._views:
            self._views[name] = LogView(self._manager, name, self._spec)
        return self._views[name]

    def look(self, *, now: bool = True) -> dict[str, LogState]:
        """Return the logs that exist, by name.

        Args:
            now: Whether to list names in any case; if False, the last listing is used while a new one would take too
                long.

        Raises:
            UnauthorizedError: The password or secret is not that of a log.
            PybkError: The metadata store or bookies cannot be read.
        """
        states = {name: self.view(name).look() for name in self._listed(now=now)}
        return {name: state for name, state in states.items() if state is not None}

    def _listed(self, *, now: bool) -> Sequence[str]:
        pattern = self._options.pattern
        began = time.monotonic()
        if pattern is not None and (now or began >= self.list_at):
            wanted = re.compile(pattern)
            names = names_of(self._manager, self._options.kind, literal_prefix(pattern))
            self._names = [name for name in names if wanted.fullmatch(name)]
            ended = time.monotonic()
            self.list_at = ended + _LIST_SHARE * (ended - began)
        return self._names

    def check_names(self) -> None:
        """Check that the logs exist, unless ``allow_missing`` is set.

        Raises:
            NoSuchLogError: A log does not exist, or no log matches the pattern.
        """
        options = self._options
        if options.allow_missing:
            return
        if options.pattern is not None and not self._listed(now=True):
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

"""The routes of named logs: their list, one log, and its records.

List and view come from the metadata store. Records are read from the ledgers, which takes the logs' password or secret.
So they are shown only to holders of a token with the scope ``operate``, and only if the interface was given the
password or secret.
"""

from __future__ import annotations

import codecs
from dataclasses import dataclass
from http import HTTPStatus
from itertools import islice
from typing import Annotated, Final

from msgspec import Meta

from pybk.admin.http.lags import LagSeries
from pybk.admin.http.log_list import LogInfo, SegmentInfo, log_info, log_infos, log_names
from pybk.admin.http.problems import ProblemError
from pybk.admin.http.routes import Route, route
from pybk.admin.http.tokens import Scope
from pybk.admin.http.view import View
from pybk.errors import LogSealedError
from pybk.streams.log import Log
from pybk.streams.log_record import LogRecord
from pybk.values import INT64_MAX

LOGS_MAX: Final = 200
"""The most logs of a page."""

SEGMENTS_MAX: Final = 50
"""The most ledgers of a log that are shown, the newest ones."""

RECORDS_MAX: Final = 50
"""The most records that are shown at once."""

EXCERPT_BYTES: Final = 2048
"""The most bytes of a record that are shown."""

_READ_BYTES_MAX: Final = 4 << 20
"""No further record is read once so many bytes were."""

_ROOT: Final = "/api/v1"


@dataclass(frozen=True, slots=True, kw_only=True)
class LogPage:
    """Named logs by name.

    Attributes:
        logs: The logs.
        next: The value of ``after`` for the next page; null at the end.
    """

    logs: tuple[LogInfo, ...]
    next: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class LogView:
    """One log.

    Attributes:
        log: The log.
        segments: Its newest ledgers, the newest first.
        lags: The lags of its subscriptions; empty for logs after the first hundred.
    """

    log: LogInfo
    segments: tuple[SegmentInfo, ...]
    lags: LagSeries


@dataclass(frozen=True, slots=True, kw_only=True)
class Excerpt:
    """The beginning of some bytes.

    Attributes:
        size: The number of all bytes.
        text: The beginning as text; null if it is not UTF-8.
        hex: The beginning, hexadecimal; null if it is text.
    """

    size: int
    text: str | None
    hex: bytes | None


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordInfo:
    """A record of a log.

    Attributes:
        seq: Its sequence number.
        time_ns: Its event time, nanoseconds since 1970.
        key: Its key; null for none.
        data: The application's bytes.
    """

    seq: int
    time_ns: int
    key: Excerpt | None
    data: Excerpt


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordPage:
    """Records of a log, in order.

    Attributes:
        records: The records.
        first_seq: The first record of the log.
        last_seq: Its last record.
    """

    records: tuple[RecordInfo, ...]
    first_seq: int
    last_seq: int


@route("GET", f"{_ROOT}/logs", cluster=False)
def logs(
    view: View, after: str = "", limit: Annotated[int, Meta(ge=1, le=LOGS_MAX)] = 50, contains: str = ""
) -> LogPage:
    """Return a page of the named logs, with their subscriptions.

    Args:
        after: The last log of the page before.
        limit: The most logs, 1 to 200.
        contains: Only logs whose names contain this, in letters of any case.
    """
    names = log_names(view.manager, contains)
    wanted = list(islice((name for name in names if name > after), limit))
    more = bool(wanted) and wanted[-1] < names[-1]
    return LogPage(logs=tuple(log_infos(view.manager, wanted)), next=wanted[-1] if more else None)


@route("GET", f"{_ROOT}/logs/{{name}}", cluster=False)
def log(view: View, name: str) -> LogView:
    """Return a log: its newest ledgers, its subscriptions, and their lags.

    Args:
        name: Its name.
    """
    found = log_info(view.manager, name, SEGMENTS_MAX)
    if found is None:
        raise ProblemError(HTTPStatus.NOT_FOUND, "no_such_log", f"no log has the name {name!r:.200}")
    return LogView(log=found[0], segments=found[1], lags=view.lags.of(name))


@route("POST", f"{_ROOT}/logs/{{name}}:peek", Scope.OPERATE, cluster=False)
def peek(
    view: View,
    name: str,
    first: Annotated[int, Meta(ge=0, le=INT64_MAX)] | None = None,
    limit: Annotated[int, Meta(ge=1, le=RECORDS_MAX)] = 20,
) -> RecordPage:
    """Return records of a log, if the interface was given its password or secret; nothing is changed.

    Args:
        name: The name of the log.
        first: The first record; left out, the last records are returned.
        limit: The most records, 1 to 50.
    """
    if not view.opens_logs:
        raise ProblemError(
            HTTPStatus.NOT_FOUND, "no_secret", "this interface was given no password and no secret of logs"
        )
    with Log.open(view.manager, name, mode="r", create=False, **view.opens_logs, insecure=True) as found:
        first_seq, last_seq = found.first_seq(), found.last_seq()
        begin = max(first_seq, last_seq - limit + 1) if first is None else first
        return RecordPage(records=_records(found, begin, limit), first_seq=first_seq, last_seq=last_seq)


def _records(found: Log, first: int, limit: int) -> tuple[RecordInfo, ...]:
    records: list[RecordInfo] = []
    with found.reader(first) as reader:
        while len(records) < limit and sum(each.data.size for each in records) < _READ_BYTES_MAX:
            try:
                record = reader.read(timeout=0)
            except LogSealedError:
                break
            if record is None:
                break
            records.append(_record_info(record))
    return tuple(records)


def _record_info(record: LogRecord) -> RecordInfo:
    key = None if record.key is None else _excerpt(record.key)
    return RecordInfo(seq=record.seq, time_ns=record.time_ns, key=key, data=_excerpt(record.data))


def _excerpt(data: bytes) -> Excerpt:
    begin = data[:EXCERPT_BYTES]
    try:
        # A character that the cut has parted is left out, and bytes that are no text anywhere else are none at all.
        text = codecs.getincrementaldecoder("utf-8")().decode(begin, final=len(data) <= EXCERPT_BYTES)
    except UnicodeDecodeError:
        return Excerpt(size=len(data), text=None, hex=bytes(begin))
    return Excerpt(size=len(data), text=text, hex=None)


LOG_ROUTES: Final[tuple[Route, ...]] = (logs, log, peek)
"""The routes of this module."""

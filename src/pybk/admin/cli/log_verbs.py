"""The commands that ``pybk wal …`` and ``pybk log …`` share; see ``docs/concepts/streams.md``."""

from __future__ import annotations

import argparse
import sys
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar, Final, Generic, Protocol, TypeVar

from pybk.admin.cli.clusters import opened_manager
from pybk.admin.cli.command_parser import Verbs
from pybk.admin.cli.given_secrets import Given, given_in
from pybk.admin.cli.output import (
    SOUND,
    base64,
    confirm,
    counted,
    print_json,
    print_json_line,
    print_note,
    print_result,
    print_table,
)
from pybk.admin.shown_text import shown_name
from pybk.errors import LogExistsError, PybkError, UnauthorizedError
from pybk.flags import StorageHint
from pybk.ledger.digest import DigestType
from pybk.streams.format import Position
from pybk.streams.log import Log
from pybk.streams.log_settings import LogSettings
from pybk.streams.wal import WriteAheadLog

if TYPE_CHECKING:
    from pybk.manager.ledger_manager import LedgerManager
    from pybk.streams.appender import RecordFuture
    from pybk.streams.list_rebuild import RebuiltList

_APPEND_AT_ONCE: Final = 512

L = TypeVar("L", Log, WriteAheadLog)
Append = Callable[[bytes], "RecordFuture[Any]"]


class Record(Protocol):
    """A record of a log of either sort."""

    @property
    def data(self) -> bytes:
        """The application's bytes."""

    def _asdict(self) -> dict[str, Any]:
        """Return its fields by name."""


class LogVerbs(ABC, Generic[L]):
    """The verbs that logs of both sorts have.

    Attributes:
        record: The word for a record in sentences, before its number.
        number: The name of a record's number, in JSON and in calls of Python, such as ``first_lsn``.
        contents: The contents of a log other than records.
        columns: The further columns of the table of logs.
    """

    record: ClassVar[str]
    number: ClassVar[str]
    contents: ClassVar[str]
    columns: ClassVar[tuple[str, ...]]

    def __init__(self, sort: type[L]) -> None:
        self.sort: Final[type[L]] = sort
        """The class of the logs."""

    # ---- what a sort of logs says --------------------------------------------------------------------------------

    @abstractmethod
    def described(self, log: L) -> dict[str, Any]:
        """Return the further values of a log in a listing, in addition to its records."""

    @abstractmethod
    def records(self, log: L, first: Any, last: int | None, *, follow: bool = False) -> Iterable[Record]:
        """Return the records between two, None for the first and the last; or those from one on, as they come."""

    @abstractmethod
    def appending(self, parsed: argparse.Namespace, log: L) -> AbstractContextManager[Append]:
        """Return a context manager that appends to a log, and releases it at the end."""

    @abstractmethod
    def appended(self, last: Any) -> tuple[dict[str, Any], str]:
        """Return the values, for JSON and for a sentence, of the last appended record; None without one."""

    @abstractmethod
    def truncate(self, log: L, parsed: argparse.Namespace) -> None:
        """Drop the records before the one that a command names."""

    def create(self, manager: LedgerManager, name: str, given: Given, *, insecure: bool) -> None:
        """Create a log that does not exist."""
        if name in self.sort.names(manager, name):
            raise LogExistsError(f"log {name!r} exists in {manager.location}; choose another name")
        self.sort.open(manager, name, **given, insecure=insecure).close()

    def span(self, log: L) -> tuple[int, int]:
        """Return the numbers of the first and the last record."""
        return getattr(log, f"first_{self.number}")(), getattr(log, f"last_{self.number}")()

    # ---- verbs ---------------------------------------------------------------------------------------------------

    def verbs(self) -> Verbs:
        """Return the function of each verb."""
        return {
            "list": self._list,
            "create": self._create,
            "cat": self._cat,
            "tail": self._tail,
            "append": self._append,
            "truncate": self._truncate,
            "seal": self._seal,
            "sweep": self._sweep,
            "rebuild": self._rebuild,
            "delete": self._delete,
            "settings": self._settings,
        }

    def open(self, parsed: argparse.Namespace, manager: LedgerManager, name: str, mode: str) -> L:
        """Open a log that exists, with or without a password or secret."""
        given = given_in(parsed)
        return self.sort.open(manager, name, mode=mode, create=False, **given, insecure=True)

    def _list(self, parsed: argparse.Namespace) -> int:
        with opened_manager(parsed, read_only=True) as manager:
            rows = []
            for name in self.sort.names(manager, parsed.prefix):
                try:
                    with self.open(parsed, manager, name, "r") as log:
                        first, last = self.span(log)
                        span = {f"first_{self.number}": first, f"last_{self.number}": last}
                        rows.append({"name": name, **span, **self.described(log)})
                except UnauthorizedError:
                    rows.append({"name": name, "other_password": True})
        return print_rows(parsed, rows, ("name", f"first_{self.number}", f"last_{self.number}", *self.columns), "logs")

    def _create(self, parsed: argparse.Namespace) -> int:
        with opened_manager(parsed, read_only=False) as manager:
            self.create(manager, parsed.name, given_in(parsed), insecure=parsed.insecure)
        return print_result(parsed, {"created": parsed.name}, f"log {parsed.name} is created")

    def _cat(self, parsed: argparse.Namespace) -> int:
        with opened_manager(parsed, read_only=True) as manager, self.open(parsed, manager, parsed.name, "r") as log:
            print_records(self.records(log, parsed.first, parsed.last), as_json=parsed.json)
        return SOUND

    def _tail(self, parsed: argparse.Namespace) -> int:
        with opened_manager(parsed, read_only=True) as manager, self.open(parsed, manager, parsed.name, "r") as log:
            first, last = self.span(log)
            begin = max(first, last - parsed.n + 1)
            print_records(self.records(log, begin, None, follow=parsed.follow), as_json=parsed.json)
        return SOUND

    def _append(self, parsed: argparse.Namespace) -> int:
        given = given_in(parsed)
        with (
            opened_manager(parsed, read_only=False) as manager,
            self.sort.open(manager, parsed.name, **given, insecure=self._may_lack(parsed, manager)) as log,
            self.appending(parsed, log) as append,
        ):
            count, last = append_lines(append)
        fields, place = self.appended(last)
        text = f"{counted(count, 'record')} appended" + (f", up to {place}" if count else "")
        return print_result(parsed, {"appended": count, **fields}, text)

    def _may_lack(self, parsed: argparse.Namespace, manager: LedgerManager) -> bool:
        """Return whether a log may have no password: one that is there is opened as it is, as other verbs open it."""
        return parsed.insecure or parsed.name in self.sort.names(manager, parsed.name)

    def _truncate(self, parsed: argparse.Namespace) -> int:
        mode = "r" if parsed.dry_run else "w"
        with (
            opened_manager(parsed, read_only=parsed.dry_run) as manager,
            self.open(parsed, manager, parsed.name, mode) as log,
        ):
            first, last = self.span(log)
            has = f"{self.record} {first} to {last}" if last >= first else "no records"
            text = f"log {parsed.name} has {has}; nothing is dropped"
            if not parsed.dry_run:
                what = f"the records of log {parsed.name} before {parsed.before} are dropped for good"
                confirm(parsed, parsed.name, what)
                self.truncate(log, parsed)
                first, _ = self.span(log)
                text = f"log {parsed.name} begins with {self.record} {first}"
        return print_result(parsed, {f"first_{self.number}": first}, text)

    def _seal(self, parsed: argparse.Namespace) -> int:
        with opened_manager(parsed, read_only=False) as manager, self.open(parsed, manager, parsed.name, "w") as log:
            log.seal()
            first, last = self.span(log)
        after = f"after {self.record} {last}" if last >= first else "without records"
        return print_result(parsed, {f"last_{self.number}": last}, f"log {parsed.name} is sealed {after}")

    def _sweep(self, parsed: argparse.Namespace) -> int:
        with opened_manager(parsed, read_only=False) as manager:
            deleted = self.sort.sweep(manager, parsed.prefix, **given_in(parsed), insecure=True)
        return print_result(parsed, {"deleted": deleted}, f"{counted(len(deleted), 'ledger')} deleted")

    def _rebuild(self, parsed: argparse.Namespace) -> int:
        with opened_manager(parsed, read_only=False) as manager:
            sort: Any = self.sort  # the first record has another name in each sort
            first = {f"first_{self.number}": parsed.first}
            found: RebuiltList = sort.rebuild(manager, parsed.name, **first, **given_in(parsed), insecure=True)
        has = f"records {found.first_seq} to {found.last_seq} in ledgers {shown(found.ledgers)}"
        if found.last_seq < found.first_seq:
            has = f"no records; the next one is {self.record} {found.first_seq}"
        lines = [
            f"log {parsed.name} has {has}",
            f"checkpoints: {shown(found.checkpoints) or 'none'}; ledgers left out: {shown(found.left_out) or 'none'}",
            *(f"- {each}" for each in found.not_restored),
        ]
        return print_result(parsed, found._asdict(), "\n".join(lines))

    def _delete(self, parsed: argparse.Namespace) -> int:
        with opened_manager(parsed, read_only=parsed.dry_run) as manager:
            if parsed.dry_run:
                self.open(parsed, manager, parsed.name, "r").close()
                return print_result(parsed, {"deleted": None}, f"log {parsed.name} would be deleted")
            confirm(parsed, parsed.name, f"log {parsed.name} is deleted with all its records and {self.contents}")
            given = given_in(parsed)
            self.sort.delete(manager, parsed.name, **given, insecure=True, steal=parsed.steal)
        return print_result(parsed, {"deleted": parsed.name}, f"log {parsed.name} is deleted")

    def _settings(self, parsed: argparse.Namespace) -> int:
        given = _given_settings(parsed)
        is_changed = bool(given) or parsed.defaults
        # It is open for reading, so that its owner keeps it.
        with (
            opened_manager(parsed, read_only=not is_changed) as manager,
            self.open(parsed, manager, parsed.name, "r") as log,
        ):
            if is_changed:
                log.set_settings(replace(LogSettings() if parsed.defaults else log.settings(), **given))
            kept = log.settings()
        quorums = None if kept.quorums == (None, None, None) else "/".join(map(str, kept.quorums))
        fields = {**kept.described(), "quorums": quorums}
        text = "\n".join(f"{name:<16} {shown(value) or 'default'}" for name, value in fields.items())
        return print_result(parsed, fields, text)


def _given_settings(parsed: argparse.Namespace) -> dict[str, Any]:
    """Return the settings that the arguments name."""
    given = {
        "quorums": parsed.quorums,
        "digest_type": parsed.digest and DigestType[parsed.digest],
        "storage_hints": parsed.storage_hint and {StorageHint(parsed.storage_hint)},
        "segment_bytes": parsed.segment_bytes,
        "segment_age_s": parsed.segment_age,
        "segment_records": parsed.segment_records,
    }
    return {name: value for name, value in given.items() if value is not None}


def append_lines(append: Callable[[bytes], RecordFuture[Any]]) -> tuple[int, Any]:
    """Append each line of standard input; return their number, and the last append's result, None without lines.

    Raises:
        PybkError: A line was not appended, or may not have been; the error names it and the last line that was
            appended.
    """
    count, last = 0, None
    futures: deque[RecordFuture[Any]] = deque()

    def wait() -> None:
        nonlocal count, last
        while futures:
            last = futures.popleft().result()
            count += 1

    try:
        for line in sys.stdin.buffer:
            try:
                futures.append(append(line.removesuffix(b"\n")))
            except PybkError:
                wait()
                raise
            if len(futures) >= _APPEND_AT_ONCE:
                wait()
        wait()
    except PybkError as error:
        before = f"{counted(count, 'line')} before it" + (f", up to record {last}," if count else "")
        raise PybkError(
            f"line {count + 1}: {error}; {before} {'was' if count == 1 else 'were'} appended",
            outcome_unknown=error.outcome_unknown,
        ) from error
    return count, last


def print_records(records: Iterable[Record], *, as_json: bool) -> None:
    """Print records as they come, a line each: their data, or JSON with all their fields."""
    for record in records:
        if as_json:
            print_json_line({name: _encoded(value) for name, value in record._asdict().items()})
        else:
            sys.stdout.flush()
            sys.stdout.buffer.write(record.data + b"\n")
        sys.stdout.flush()


def _encoded(value: Any) -> Any:
    """Return a field of a record as JSON has it."""
    match value:
        case Position():
            return str(value)
        case bytes():
            return base64(value)
        case tuple():
            return [[name, base64(data)] for name, data in value]
    return value


def print_rows(parsed: argparse.Namespace, rows: list[dict[str, Any]], headers: Iterable[str], what: str) -> int:
    """Print rows as JSON, in a list of that name, or as a table of some of their columns; returns the exit status."""
    if parsed.json:
        print_json({what: rows})
    else:
        names = list(headers)
        cells = [[_shown_of(name, row.get(name, "?")) for name in names] for row in rows]
        print_table(cells, [name.replace("_", " ") for name in names])
    others = sum("other_password" in row for row in rows)
    if others:
        text = f"pybk: {counted(others, 'log has', 'logs have')} a secret or password that was not given"
        print_note(parsed, f"{text}: --secret-file FILE or --password-file FILE")
    return SOUND


def _shown_of(column: str, value: Any) -> Any:
    """Return how a table shows a value; long names are cut."""
    if column == "name":
        return shown_name(str(value))
    return shown([shown_name(str(each)) for each in value] if column == "subscriptions" and value != "?" else value)


def shown(value: Any) -> Any:
    """Return a value as text for a table."""
    return ", ".join(map(str, value)) if isinstance(value, (list, tuple)) else value

"""What the commands ``pybk wal …`` and ``pybk log …`` share: their arguments, and how records are read and printed."""

from __future__ import annotations

import argparse
import sys
from collections import deque
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, Final, Protocol

from pybk.admin.cli.arguments import (
    STORE_OR_CLUSTER,
    CommandParser,
    add_command,
    is_url,
    secret_needed,
    whole_number,
)
from pybk.admin.cli.credentials import secret_of, takes_password, takes_secret
from pybk.admin.cli.output import SOUND, base64, counted, print_json, print_json_line, print_note, print_table
from pybk.admin.shown_text import shown_name
from pybk.errors import PybkError, UnauthorizedError

if TYPE_CHECKING:
    from pybk.manager.ledger_manager import LedgerManager
    from pybk.streams.rebuild import RebuiltList
    from pybk.streams.record_future import RecordFuture

_TAIL: Final = 10
_APPEND_AT_ONCE: Final = 512


class _Record(Protocol):
    """A record of a log of any kind."""

    @property
    def data(self) -> bytes:
        """The application's bytes."""

    def _asdict(self) -> dict[str, Any]:
        """Return its fields by name."""


def verbs_of(parser: CommandParser) -> Callable[..., CommandParser]:
    """Return what adds the verbs of a kind of logs: its arguments are those of ``add_command`` without ``commands``.

    The verbs take PATH, the name of a log unless ``named`` is False, a password and a cluster's secret.
    """
    verbs = parser.add_subparsers()

    def add(name: str, run: Callable[[argparse.Namespace], int], text: str, *, named: bool = True) -> CommandParser:
        command = add_command(verbs, name, run, text, STORE_OR_CLUSTER)
        if named:
            command.add_argument("name", metavar="NAME", help="the log's name")
        takes_password(command)
        takes_secret(command)
        return command

    return add


def takes_prefix(command: argparse.ArgumentParser, text: str) -> None:
    """Have a command take PREFIX."""
    command.add_argument("prefix", metavar="PREFIX", nargs="?", default="", help=text)


def takes_tail(command: argparse.ArgumentParser) -> None:
    """Have a command take how many records it prints, and whether it follows."""
    command.add_argument("-n", type=whole_number, default=_TAIL, metavar="RECORDS", help=f"how many; default: {_TAIL}")
    command.add_argument("-f", "--follow", action="store_true", help="wait for more, until the log is sealed")


def add_repairs(
    add: Callable[..., argparse.ArgumentParser],
    sweep: Callable[[argparse.Namespace], int],
    rebuild: Callable[[argparse.Namespace], int],
    number: str,
) -> None:
    """Add the verbs that clean up and repair.

    Args:
        add: Adds a verb.
        sweep: Runs the first.
        rebuild: Runs the second.
        number: What the number of a record is called.
    """
    command = add("sweep", sweep, "delete ledgers that processes which died left behind", named=False)
    takes_prefix(command, "only of logs whose names begin with it")
    command = add("rebuild", rebuild, "make a log whose record is lost or damaged again from its ledgers")
    command.add_argument(
        "--first", type=whole_number, metavar=number, help="first record to keep, giving up those before"
    )


def takes_insecure(command: argparse.ArgumentParser) -> None:
    """Have a command make logs without a password."""
    command.add_argument("--insecure", action="store_true", help="make a log without a password if there is none")


def manager_of(parsed: argparse.Namespace, *, read_only: bool) -> LedgerManager:
    """Open the store or the cluster that PATH names."""
    from pybk.manager.ledger_manager import LedgerManager

    if is_url(parsed.path):
        with secret_needed():
            return LedgerManager.connect(parsed.path, cluster_secret=secret_of(parsed))
    return LedgerManager.open(parsed.path, read_only=read_only)


def append_lines(append: Callable[[bytes], RecordFuture[Any]]) -> tuple[int, Any]:
    """Append each line of standard input; returns how many, and what the last append returned, None for none.

    Raises:
        PybkError: A line was not appended, or it is not known; the error names it and the last that was appended.
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


def print_records(
    records: Iterable[_Record], *, as_json: bool, encode: Callable[[Any], Any] = lambda value: value
) -> None:
    """Print records as they come, a line each: their data, or JSON, in which ``encode`` converts the other fields."""
    for record in records:
        if as_json:
            fields = {name: encode(value) for name, value in record._asdict().items()}
            print_json_line({**fields, "data": base64(record.data)})
        else:
            sys.stdout.flush()
            sys.stdout.buffer.write(record.data + b"\n")
        sys.stdout.flush()


def rows_of(names: Iterable[str], describe: Callable[[str], dict[str, Any]]) -> list[dict[str, Any]]:
    """Return a row for each log; one that has another password has a row that says so, and nothing else."""
    rows = []
    for name in names:
        try:
            rows.append({"name": name, **describe(name)})
        except UnauthorizedError:
            rows.append({"name": name, "other_password": True})
    return rows


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
        print_note(parsed, f"pybk: {counted(others, 'log has', 'logs have')} another password")
    return SOUND


def _shown_of(column: str, value: Any) -> Any:
    """Return how a table shows a value; long names are cut."""
    if column == "name":
        return shown_name(str(value))
    return shown([shown_name(str(each)) for each in value] if column == "subscriptions" and value != "?" else value)


def print_result(parsed: argparse.Namespace, content: dict[str, Any], text: str) -> int:
    """Print what a command did, as JSON or as a sentence; returns the exit status."""
    if parsed.json:
        print_json(content)
    else:
        print(text)
    return SOUND


def print_swept(parsed: argparse.Namespace, deleted: list[int]) -> int:
    """Print which ledgers a sweep deleted; returns the exit status."""
    return print_result(parsed, {"deleted": deleted}, f"{counted(len(deleted), 'ledger')} deleted")


def print_rebuilt(parsed: argparse.Namespace, found: RebuiltList) -> int:
    """Print what a log has that was rebuilt, and what it lacks; returns the exit status."""
    if parsed.json:
        print_json(found._asdict())
    else:
        print(f"log {parsed.name} has records {found.first_seq} to {found.last_seq} in ledgers {shown(found.ledgers)}")
        print(f"checkpoints: {shown(found.checkpoints) or 'none'}; ledgers left out: {shown(found.left_out) or 'none'}")
        for each in found.not_restored:
            print(f"- {each}")
    return SOUND


def shown(value: Any) -> Any:
    """Return a value as a table has it."""
    return ", ".join(map(str, value)) if isinstance(value, (list, tuple)) else value

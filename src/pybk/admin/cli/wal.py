"""The commands ``pybk wal …``: write-ahead logs of a store or a cluster; see ``docs/concepts/streams.md``."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from pybk.admin.cli.arguments import CommandParser, takes_confirmation, whole_number
from pybk.admin.cli.credentials import password_of
from pybk.admin.cli.logs import (
    add_repairs,
    append_lines,
    manager_of,
    print_rebuilt,
    print_records,
    print_result,
    print_rows,
    print_swept,
    rows_of,
    takes_insecure,
    takes_prefix,
    takes_tail,
    verbs_of,
)
from pybk.admin.cli.output import SOUND, confirm, counted
from pybk.errors import LogExistsError

if TYPE_CHECKING:
    from pybk.manager.ledger_manager import LedgerManager
    from pybk.streams.wal import WriteAheadLog


def add(parser: CommandParser) -> None:
    """Add the verbs of ``pybk wal``."""
    add = verbs_of(parser)
    listing = add("list", _list, "list the logs with their records and checkpoints", named=False)
    takes_prefix(listing, "list only names that begin with it")
    takes_insecure(add("create", _create, "create a log without records"))
    cat = add("cat", _cat, "print the data of a log's records, a line each")
    cat.add_argument(
        "--first", type=whole_number, metavar="LSN", help="first record; default: the first that was not truncated"
    )
    cat.add_argument("--last", type=whole_number, metavar="LSN", help="last record; default: the last one")
    takes_tail(add("tail", _tail, "print the last records of a log, a line each"))
    takes_insecure(add("append", _append, "append each line of standard input as a record; makes the log if needed"))
    truncate = add("truncate", _truncate, "drop the records of a log before one of them")
    truncate.add_argument("before", metavar="LSN", type=whole_number, help="the first record to keep")
    takes_confirmation(truncate, "show what the log has now")
    add("seal", _seal, "end a log for good")
    add_repairs(add, _sweep, _rebuild, "LSN")
    deletion = add("delete", _delete, "delete a log with its records and checkpoints")
    deletion.add_argument("--steal", action="store_true", help="also from a live writer")
    takes_confirmation(deletion, "check that the log is there")


def _open(parsed: argparse.Namespace, manager: LedgerManager, name: str, mode: str) -> WriteAheadLog:
    """Open an existing log; one without a password is opened as such."""
    from pybk.streams.wal import WriteAheadLog

    return WriteAheadLog.open(
        manager, name, mode=mode, create=False, password=password_of(parsed) or b"", insecure=True
    )


def _list(parsed: argparse.Namespace) -> int:
    from pybk.streams.wal import WriteAheadLog

    with manager_of(parsed, read_only=True) as manager:

        def describe(name: str) -> dict[str, Any]:
            with _open(parsed, manager, name, "r") as wal:
                return {
                    "first_lsn": wal.first_lsn,
                    "last_lsn": wal.last_lsn,
                    "generation": wal.generation,
                    "epoch": wal.epoch,
                    "ledgers": list(wal.ledgers),
                    "checkpoints": [each.lsn for each in wal.checkpoints()],
                }

        rows = rows_of(WriteAheadLog.names(manager, parsed.prefix), describe)
    headers = ("name", "first_lsn", "last_lsn", "generation", "epoch", "ledgers", "checkpoints")
    return print_rows(parsed, rows, headers, "logs")


def _create(parsed: argparse.Namespace) -> int:
    from pybk.streams.wal import WriteAheadLog

    password = password_of(parsed)
    with manager_of(parsed, read_only=False) as manager:
        if parsed.name in WriteAheadLog.names(manager, parsed.name):
            raise LogExistsError(f"log {parsed.name!r} exists in {manager.location}; choose another name")
        WriteAheadLog.open(manager, parsed.name, password=password or b"", insecure=parsed.insecure).close()
    return print_result(parsed, {"created": parsed.name}, f"log {parsed.name} is created")


def _cat(parsed: argparse.Namespace) -> int:
    with manager_of(parsed, read_only=True) as manager, _open(parsed, manager, parsed.name, "r") as wal:
        print_records(wal.replay(parsed.first, parsed.last), as_json=parsed.json)
    return SOUND


def _tail(parsed: argparse.Namespace) -> int:
    with manager_of(parsed, read_only=True) as manager, _open(parsed, manager, parsed.name, "r") as wal:
        first = max(wal.first_lsn, wal.last_lsn - parsed.n + 1)
        print_records(wal.follow(first) if parsed.follow else wal.replay(first), as_json=parsed.json)
    return SOUND


def _append(parsed: argparse.Namespace) -> int:
    from pybk.streams.wal import WriteAheadLog

    password = password_of(parsed)
    with (
        manager_of(parsed, read_only=False) as manager,
        WriteAheadLog.open(manager, parsed.name, password=password or b"", insecure=parsed.insecure) as wal,
    ):
        count, last = append_lines(wal.append_async)
    text = f"{counted(count, 'record')} appended" + (f", up to LSN {last}" if count else "")
    return print_result(parsed, {"appended": count, "last_lsn": last or 0}, text)


def _truncate(parsed: argparse.Namespace) -> int:
    mode = "r" if parsed.dry_run else "w"
    with manager_of(parsed, read_only=parsed.dry_run) as manager, _open(parsed, manager, parsed.name, mode) as wal:
        if parsed.dry_run:
            span = f"LSN {wal.first_lsn} to {wal.last_lsn}"
            return print_result(
                parsed, {"first_lsn": wal.first_lsn}, f"log {parsed.name} has {span}; nothing is dropped"
            )
        confirm(parsed, parsed.name, f"the records of log {parsed.name} before {parsed.before} are dropped for good")
        wal.truncate_before(parsed.before)
        first = wal.first_lsn
    return print_result(parsed, {"first_lsn": first}, f"log {parsed.name} begins with LSN {first}")


def _seal(parsed: argparse.Namespace) -> int:
    with manager_of(parsed, read_only=False) as manager, _open(parsed, manager, parsed.name, "w") as wal:
        first, last = wal.first_lsn, wal.last_lsn
        wal.seal()
    after = f"after LSN {last}" if last >= first else "without records"
    return print_result(parsed, {"last_lsn": last}, f"log {parsed.name} is sealed {after}")


def _sweep(parsed: argparse.Namespace) -> int:
    from pybk.streams.wal import WriteAheadLog

    with manager_of(parsed, read_only=False) as manager:
        return print_swept(
            parsed, WriteAheadLog.sweep(manager, parsed.prefix, password=password_of(parsed) or b"", insecure=True)
        )


def _rebuild(parsed: argparse.Namespace) -> int:
    from pybk.streams.wal import WriteAheadLog

    with manager_of(parsed, read_only=False) as manager:
        password = password_of(parsed) or b""
        found = WriteAheadLog.rebuild(manager, parsed.name, first_lsn=parsed.first, password=password, insecure=True)
    return print_rebuilt(parsed, found)


def _delete(parsed: argparse.Namespace) -> int:
    from pybk.streams.wal import WriteAheadLog

    with manager_of(parsed, read_only=parsed.dry_run) as manager:
        password = password_of(parsed) or b""
        if parsed.dry_run:
            _open(parsed, manager, parsed.name, "r").close()
            return print_result(parsed, {"deleted": None}, f"log {parsed.name} would be deleted")
        confirm(parsed, parsed.name, f"log {parsed.name} is deleted with all its records")
        WriteAheadLog.delete(manager, parsed.name, password=password, insecure=True, steal=parsed.steal)
    return print_result(parsed, {"deleted": parsed.name}, f"log {parsed.name} is deleted")

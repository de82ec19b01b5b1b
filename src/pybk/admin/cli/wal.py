"""The commands ``pybk wal …``: write-ahead logs of a store or a cluster; see ``docs/streams.md``."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterable
from typing import Any, Final

from pybk.admin.cli.arguments import STORE_OR_CLUSTER, add_command, is_url, secret_needed
from pybk.admin.cli.credentials import password_of, secret_of, takes_password, takes_secret
from pybk.admin.cli.output import SOUND, base64, counted, print_json, print_table
from pybk.manager import LedgerManager
from pybk.streams.wal import WriteAheadLog
from pybk.streams.wal_record import WalRecord

_TAIL: Final = 10
_APPEND_AT_ONCE: Final = 512


def add_wal(commands: Any) -> None:
    """Add ``pybk wal`` and its verbs."""
    text = "list, read and change write-ahead logs"
    verbs = commands.add_parser("wal", help=text, description=text).add_subparsers(required=True, metavar="VERB")

    def add(
        name: str, run: Callable[[argparse.Namespace], int], text: str, *, named: bool = True
    ) -> argparse.ArgumentParser:
        command = add_command(verbs, name, run, text, STORE_OR_CLUSTER)
        if named:
            command.add_argument("name", metavar="NAME", help="the log's name")
        takes_password(command)
        takes_secret(command)
        return command

    listing = add("list", _list, "list the logs with their records and checkpoints", named=False)
    listing.add_argument("prefix", metavar="PREFIX", nargs="?", default="", help="list only names that begin with it")
    cat = add("cat", _cat, "print the data of a log's records, a line each")
    cat.add_argument("--first", type=int, metavar="LSN", help="first record; default: the first that was not truncated")
    cat.add_argument("--last", type=int, metavar="LSN", help="last record; default: the last one")
    tail = add("tail", _tail, "print the last records of a log, a line each")
    tail.add_argument("-n", type=int, default=_TAIL, metavar="RECORDS", help=f"how many; default: {_TAIL}")
    tail.add_argument("-f", "--follow", action="store_true", help="wait for more, until the log is sealed")
    append = add("append", _append, "append each line of standard input as a record; makes the log if needed")
    append.add_argument("--insecure", action="store_true", help="make a log without a password if there is none")
    truncate = add("truncate", _truncate, "drop the records of a log before one of them")
    truncate.add_argument("before", metavar="LSN", type=int, help="the first record to keep")
    add("seal", _seal, "end a log for good")
    sweep = add("sweep", _sweep, "delete ledgers that processes which died left behind", named=False)
    sweep.add_argument("prefix", metavar="PREFIX", nargs="?", default="", help="only of logs whose names begin with it")
    rebuild = add("rebuild", _rebuild, "make a log whose record is lost or damaged again from its ledgers")
    rebuild.add_argument("--first", type=int, metavar="LSN", help="first record to keep, giving up those before")
    add("delete", _delete, "delete a log with its records and checkpoints")


def _manager(parsed: argparse.Namespace, *, read_only: bool) -> LedgerManager:
    """Open the store or the cluster that PATH names."""
    if is_url(parsed.path):
        with secret_needed():
            return LedgerManager.connect(parsed.path, cluster_secret=secret_of(parsed))
    return LedgerManager.open(parsed.path, read_only=read_only)


def _open(parsed: argparse.Namespace, manager: LedgerManager, name: str, mode: str) -> WriteAheadLog:
    """Open an existing log; one without a password is opened as such."""
    return WriteAheadLog.open(
        manager, name, mode=mode, create=False, password=password_of(parsed) or b"", insecure=True
    )


def _list(parsed: argparse.Namespace) -> int:
    rows = []
    with _manager(parsed, read_only=True) as manager:
        for name in WriteAheadLog.names(manager, parsed.prefix):
            with _open(parsed, manager, name, "r") as wal:
                rows.append(
                    {
                        "name": name,
                        "first_lsn": wal.first_lsn,
                        "last_lsn": wal.last_lsn,
                        "generation": wal.generation,
                        "epoch": wal.epoch,
                        "ledgers": list(wal.ledgers),
                        "checkpoints": [each.lsn for each in wal.checkpoints()],
                    }
                )
    if parsed.json:
        print_json(rows)
    else:
        headers = ("name", "first_lsn", "last_lsn", "generation", "epoch", "ledgers", "checkpoints")
        shown = [[_shown(row[name]) for name in headers] for row in rows]
        print_table(shown, [name.replace("_", " ") for name in headers])
    return SOUND


def _shown(value: Any) -> Any:
    return ", ".join(map(str, value)) if isinstance(value, (list, tuple)) else value


def _cat(parsed: argparse.Namespace) -> int:
    with _manager(parsed, read_only=True) as manager, _open(parsed, manager, parsed.name, "r") as wal:
        _print(wal.replay(parsed.first, parsed.last), as_json=parsed.json)
    return SOUND


def _tail(parsed: argparse.Namespace) -> int:
    with _manager(parsed, read_only=True) as manager, _open(parsed, manager, parsed.name, "r") as wal:
        first = max(wal.first_lsn, wal.last_lsn - parsed.n + 1)
        _print(wal.follow(first) if parsed.follow else wal.replay(first), as_json=parsed.json)
    return SOUND


def _print(records: Iterable[WalRecord], *, as_json: bool) -> None:
    """Print records as they come, a line each."""
    for record in records:
        if as_json:
            print_json({**record._asdict(), "data": base64(record.data)}, indent=None)
        else:
            sys.stdout.flush()
            sys.stdout.buffer.write(record.data + b"\n")
        sys.stdout.flush()


def _append(parsed: argparse.Namespace) -> int:
    password = password_of(parsed)
    count, last = 0, 0
    with (
        _manager(parsed, read_only=False) as manager,
        WriteAheadLog.open(manager, parsed.name, password=password or b"", insecure=parsed.insecure) as wal,
    ):
        futures = []
        for line in sys.stdin.buffer:
            futures.append(wal.append_async(line.removesuffix(b"\n")))
            if len(futures) >= _APPEND_AT_ONCE:
                last = futures[-1].result()
                futures.clear()
            count += 1
        for future in futures:
            last = future.result()
    if parsed.json:
        print_json({"appended": count, "last_lsn": last})
    else:
        print(f"{counted(count, 'record')} appended" + (f", up to LSN {last}" if count else ""))
    return SOUND


def _truncate(parsed: argparse.Namespace) -> int:
    with _manager(parsed, read_only=False) as manager, _open(parsed, manager, parsed.name, "w") as wal:
        wal.truncate_before(parsed.before)
        first = wal.first_lsn
    if parsed.json:
        print_json({"first_lsn": first})
    else:
        print(f"log {parsed.name} begins with LSN {first}")
    return SOUND


def _seal(parsed: argparse.Namespace) -> int:
    with _manager(parsed, read_only=False) as manager, _open(parsed, manager, parsed.name, "w") as wal:
        last = wal.last_lsn
        wal.seal()
    if parsed.json:
        print_json({"last_lsn": last})
    else:
        print(f"log {parsed.name} is sealed after LSN {last}")
    return SOUND


def _sweep(parsed: argparse.Namespace) -> int:
    with _manager(parsed, read_only=False) as manager:
        deleted = WriteAheadLog.sweep(manager, parsed.prefix, password=password_of(parsed) or b"", insecure=True)
    if parsed.json:
        print_json({"deleted": deleted})
    else:
        print(f"{counted(len(deleted), 'ledger')} deleted")
    return SOUND


def _rebuild(parsed: argparse.Namespace) -> int:
    with _manager(parsed, read_only=False) as manager:
        password = password_of(parsed) or b""
        found = WriteAheadLog.rebuild(manager, parsed.name, first_lsn=parsed.first, password=password, insecure=True)
    if parsed.json:
        print_json(found._asdict())
    else:
        print(f"log {parsed.name} has records {found.first_seq} to {found.last_seq} in ledgers {_shown(found.ledgers)}")
        print(
            f"checkpoints: {_shown(found.checkpoints) or 'none'}; ledgers left out: {_shown(found.left_out) or 'none'}"
        )
        for each in found.not_restored:
            print(f"- {each}")
    return SOUND


def _delete(parsed: argparse.Namespace) -> int:
    with _manager(parsed, read_only=False) as manager:
        WriteAheadLog.delete(manager, parsed.name, password=password_of(parsed) or b"", insecure=True)
    if parsed.json:
        print_json({"deleted": parsed.name})
    else:
        print(f"log {parsed.name} is deleted")
    return SOUND

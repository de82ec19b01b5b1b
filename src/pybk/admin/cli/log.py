"""The commands ``pybk log …``: named logs of a store or a cluster; see ``docs/concepts/streams.md``."""

from __future__ import annotations

import argparse
import itertools
import os
from dataclasses import replace
from datetime import datetime
from functools import partial
from typing import TYPE_CHECKING, Any, Final

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
from pybk.admin.cli.output import SOUND, base64, confirm, counted, print_json
from pybk.errors import UsageError
from pybk.flags import StorageHint
from pybk.streams.position import Position

if TYPE_CHECKING:
    from pybk.manager.ledger_manager import LedgerManager
    from pybk.streams.log import Log
    from pybk.streams.log_reader import Start
    from pybk.streams.namespace import Namespace

DIGESTS: Final = ("CRC32C", "NONE", "HMAC_SHA256", "XXH3")
"""The names of digests, without the import of what computes them."""

_PLACE = "a sequence number, a position, txid=NUMBER, or time=TIME as 2026-01-31T12:00:00+00:00"


def add(parser: CommandParser) -> None:
    """Add the verbs of ``pybk log``."""
    add = verbs_of(parser)
    listing = add("list", _list, "list the logs with their records, ledgers and subscriptions", named=False)
    takes_prefix(listing, "list only names that begin with it")
    takes_insecure(add("create", _create, "create a log without records"))
    cat = add("cat", _cat, "print the data of a log's records, a line each")
    cat.add_argument("--first", type=_place, metavar="PLACE", help=f"first record: {_PLACE}")
    cat.add_argument(
        "--last", type=whole_number, metavar="SEQ", help="sequence number of the last record; default: the last"
    )
    takes_tail(add("tail", _tail, "print the last records of a log, a line each"))
    append = add("append", _append, "append each line of standard input as a record; makes the log if needed")
    append.add_argument("--key", metavar="KEY", help="key of the records")
    append.add_argument(
        "--txid", type=whole_number, metavar="NUMBER", help="transaction id of the first; the next have the next"
    )
    takes_insecure(append)
    truncate = add("truncate", _truncate, "drop the records of a log before a place")
    truncate.add_argument("before", metavar="PLACE", type=_place, help=f"the first record to keep: {_PLACE}")
    takes_confirmation(truncate, "show what the log has now")
    add("seal", _seal, "end a log for good")
    rename = add("rename", _rename, "give a log another name")
    rename.add_argument("target", metavar="NEW", help="its new name")
    add_repairs(add, _sweep, _rebuild, "SEQ")
    deletion = add("delete", _delete, "delete a log with its records and subscriptions")
    deletion.add_argument(
        "--steal", action="store_true", help="also from a live writer, and live owners of subscriptions"
    )
    takes_confirmation(deletion, "check that the log is there")
    add("subscriptions", _subscriptions, "list the subscriptions of a log with what they have not acknowledged")
    settings = add("settings", _settings, "show how the ledgers of a log are made, or change it for all who open it")
    settings.add_argument(
        "--quorums", type=_quorums, metavar="E/W/A", help="ensemble size, write and ack quorum: 3/2/2"
    )
    settings.add_argument("--digest", choices=DIGESTS, help="what guards the records")
    settings.add_argument(
        "--storage-hint", choices=[each.value for each in StorageHint], help="where its ledgers should live"
    )
    settings.add_argument("--segment-bytes", type=whole_number, metavar="BYTES", help="bytes of a ledger")
    settings.add_argument("--segment-age", type=float, metavar="SECONDS", help="age of a ledger")
    settings.add_argument("--segment-records", type=whole_number, metavar="RECORDS", help="records of a ledger")
    settings.add_argument("--defaults", action="store_true", help="give up all settings that are not given")


def _place(text: str) -> Start:
    """Return the place that a text names."""
    name, equals, value = text.partition("=")
    try:
        if equals and name == "txid":
            from pybk.streams.log_reader import TxId

            return TxId(int(value))
        if equals and name == "time":
            time = datetime.fromisoformat(value)
            if time.tzinfo is None:
                raise argparse.ArgumentTypeError(f"{text!r:.50} names no time zone; write it as {value:.30}Z for UTC")
            return time
        return Position.parse(text) if ":" in text else int(text)
    except (ValueError, UsageError):
        raise argparse.ArgumentTypeError(f"{text!r:.50} is not a place; it takes {_PLACE}") from None


def _quorums(text: str) -> tuple[int, ...]:
    """Return the quorums that a text names."""
    try:
        ensemble, write, ack = map(int, text.split("/"))
    except ValueError:
        ensemble = write = ack = 0
    if not ensemble >= write >= ack >= 1:
        raise argparse.ArgumentTypeError(f"{text!r:.50} is not quorums; it takes E/W/A, from E down, such as 3/2/2")
    return ensemble, write, ack


def _open(parsed: argparse.Namespace, manager: LedgerManager, name: str, mode: str) -> Log:
    """Open an existing log; one without a password is opened as such."""
    from pybk.streams.log import Log

    return Log.open(manager, name, mode=mode, create=False, password=password_of(parsed) or b"", insecure=True)


def _names(parsed: argparse.Namespace, manager: LedgerManager, *, insecure: bool = True) -> Namespace:
    from pybk.streams.namespace import Namespace

    return Namespace.open(manager, password=password_of(parsed) or b"", insecure=insecure)


def _list(parsed: argparse.Namespace) -> int:
    with manager_of(parsed, read_only=True) as manager, _names(parsed, manager) as logs:

        def describe(name: str) -> dict[str, Any]:
            with _open(parsed, manager, name, "r") as log:
                return {
                    "first_seq": log.first_seq,
                    "last_seq": log.last_seq,
                    "sealed": log.is_sealed,
                    "ledgers": [each.ledger_id for each in log.segments()],
                    "subscriptions": log.subscriptions(),
                    "properties": dict(log.properties),
                }

        rows = rows_of(logs.names(parsed.prefix), describe)
    headers = ("name", "first_seq", "last_seq", "sealed", "ledgers", "subscriptions")
    return print_rows(parsed, rows, headers, "logs")


def _create(parsed: argparse.Namespace) -> int:
    with (
        manager_of(parsed, read_only=False) as manager,
        _names(parsed, manager, insecure=parsed.insecure) as logs,
    ):
        logs.create(parsed.name).close()
    return print_result(parsed, {"created": parsed.name}, f"log {parsed.name} is created")


def _cat(parsed: argparse.Namespace) -> int:
    from pybk.streams.log_reader import LogEnd

    with (
        manager_of(parsed, read_only=True) as manager,
        _open(parsed, manager, parsed.name, "r") as log,
        log.reader(LogEnd.EARLIEST if parsed.first is None else parsed.first) as reader,
    ):
        records = itertools.takewhile(lambda record: parsed.last is None or record.seq <= parsed.last, reader)
        print_records(records, as_json=parsed.json, encode=_encoded)
    return SOUND


def _tail(parsed: argparse.Namespace) -> int:
    with manager_of(parsed, read_only=True) as manager, _open(parsed, manager, parsed.name, "r") as log:
        first = max(log.first_seq, log.last_seq - parsed.n + 1)
        with log.reader(first, follow=parsed.follow) as reader:
            print_records(reader, as_json=parsed.json, encode=_encoded)
    return SOUND


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


def _append(parsed: argparse.Namespace) -> int:
    txids = itertools.count(parsed.txid) if parsed.txid is not None else itertools.repeat(None)
    key = None if parsed.key is None else os.fsencode(parsed.key)
    with (
        manager_of(parsed, read_only=False) as manager,
        _names(parsed, manager, insecure=parsed.insecure) as logs,
        logs.log(parsed.name) as log,
        log.writer() as writer,
    ):
        append = partial(writer.append_async, key=key)
        count, last = append_lines(lambda line: append(line, txid=next(txids)))
    text = f"{counted(count, 'record')} appended" + (f", up to {last}" if count else "")
    return print_result(parsed, {"appended": count, "last": None if last is None else str(last)}, text)


def _truncate(parsed: argparse.Namespace) -> int:
    mode = "r" if parsed.dry_run else "w"
    with manager_of(parsed, read_only=parsed.dry_run) as manager, _open(parsed, manager, parsed.name, mode) as log:
        if parsed.dry_run:
            span = f"record {log.first_seq} to {log.last_seq}"
            return print_result(
                parsed, {"first_seq": log.first_seq}, f"log {parsed.name} has {span}; nothing is dropped"
            )
        confirm(parsed, parsed.name, f"the records of log {parsed.name} before {parsed.before} are dropped for good")
        first = log.truncate(parsed.before)
    return print_result(parsed, {"first_seq": first}, f"log {parsed.name} begins with record {first}")


def _seal(parsed: argparse.Namespace) -> int:
    with manager_of(parsed, read_only=False) as manager, _open(parsed, manager, parsed.name, "w") as log:
        log.seal()
        first, last = log.first_seq, log.last_seq
    after = f"after record {last}" if last >= first else "without records"
    return print_result(parsed, {"last_seq": last}, f"log {parsed.name} is sealed {after}")


def _rename(parsed: argparse.Namespace) -> int:
    with manager_of(parsed, read_only=False) as manager, _names(parsed, manager) as logs:
        logs.rename(parsed.name, parsed.target)
    return print_result(parsed, {"renamed": parsed.target}, f"log {parsed.name} has the name {parsed.target} now")


def _sweep(parsed: argparse.Namespace) -> int:
    from pybk.streams.log import Log

    with manager_of(parsed, read_only=False) as manager:
        return print_swept(
            parsed, Log.sweep(manager, parsed.prefix, password=password_of(parsed) or b"", insecure=True)
        )


def _rebuild(parsed: argparse.Namespace) -> int:
    from pybk.streams.log import Log

    with manager_of(parsed, read_only=False) as manager:
        password = password_of(parsed) or b""
        found = Log.rebuild(manager, parsed.name, first_seq=parsed.first, password=password, insecure=True)
    return print_rebuilt(parsed, found)


def _delete(parsed: argparse.Namespace) -> int:
    with manager_of(parsed, read_only=parsed.dry_run) as manager, _names(parsed, manager) as logs:
        if parsed.dry_run:
            _open(parsed, manager, parsed.name, "r").close()
            return print_result(parsed, {"deleted": None}, f"log {parsed.name} would be deleted")
        confirm(parsed, parsed.name, f"log {parsed.name} is deleted with all its records and subscriptions")
        logs.delete(parsed.name, steal=parsed.steal)
    return print_result(parsed, {"deleted": parsed.name}, f"log {parsed.name} is deleted")


def _subscriptions(parsed: argparse.Namespace) -> int:
    with manager_of(parsed, read_only=True) as manager, _open(parsed, manager, parsed.name, "r") as log:
        rows = [each._asdict() for each in log.subscription_states()]
    headers = ("name", "first_unacked", "backlog", "acked_ranges")
    return print_rows(parsed, rows, headers, "subscriptions")


def _settings(parsed: argparse.Namespace) -> int:
    from pybk.ledger.digest import DigestType

    given = {
        "quorums": parsed.quorums,
        "digest_type": parsed.digest and DigestType[parsed.digest],
        "storage_hints": parsed.storage_hint and {StorageHint(parsed.storage_hint)},
        "segment_bytes": parsed.segment_bytes,
        "segment_age_s": parsed.segment_age,
        "segment_records": parsed.segment_records,
    }
    changes = {name: value for name, value in given.items() if value is not None}
    is_changed = bool(changes) or parsed.defaults
    with (
        manager_of(parsed, read_only=not is_changed) as manager,
        _open(parsed, manager, parsed.name, "w" if is_changed else "r") as log,
    ):
        if is_changed:
            from pybk.streams.log_settings import LogSettings

            log.set_settings(replace(LogSettings() if parsed.defaults else log.settings, **changes))
        kept = log.settings
    shown = {
        "quorums": None if kept.quorums == (None, None, None) else "/".join(map(str, kept.quorums)),
        "digest_type": None if kept.digest_type is None else kept.digest_type.name,
        "storage_hints": sorted(each.value for each in kept.storage_hints),
        "segment_bytes": kept.segment_bytes,
        "segment_age_s": kept.segment_age_s,
        "segment_records": kept.segment_records,
    }
    if parsed.json:
        print_json(shown)
        return SOUND
    for name, value in shown.items():
        text = ", ".join(value) if isinstance(value, list) else value
        print(f"{name:<16} {text or 'default'}")
    return SOUND

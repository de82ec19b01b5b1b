"""The command ``pybk``: runs bookies, looks into stores and clusters, checks stores, makes their index again.

Passwords and cluster secrets come by file or environment: PYBK_PASSWORD, PYBK_CLUSTER_SECRET.

Exit status: 0 all is sound, 1 damage was found, 2 wrong usage, or a store or cluster that cannot be opened.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import sys
from binascii import b2a_base64
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import Any, Final

from tabulate import tabulate
from tqdm import tqdm

from pybk.admin.counts import counted
from pybk.admin.credentials import password_of, passwords_of, secret_of, takes_password, takes_passwords, takes_secret
from pybk.admin.dump import dump_store
from pybk.admin.http import serve
from pybk.admin.permissions import run_permissions
from pybk.admin.spark import add_spark
from pybk.admin.upgrade import run_upgrade
from pybk.bookie.server import BookieServer
from pybk.config import StoreConfig
from pybk.connect import open_cluster
from pybk.credentials import CLUSTER_SECRET, PASSWORD
from pybk.errors import (
    CorruptError,
    DigestMismatchError,
    MetadataForgedError,
    PybkError,
    UnauthorizedError,
    UsageError,
)
from pybk.ledger import LedgerMetadata, LedgerState
from pybk.manager import LedgerManager
from pybk.reader import LedgerReader
from pybk.seal import end_is_sealed
from pybk.storage.readonly import ReadOnlyStore
from pybk.storage.repair.rebuild import Progress, Rebuilt, rebuild_index
from pybk.storage.repair.verify import Problem, Verified, verify_store
from pybk.version import __version__

SOUND: Final = 0
DAMAGED: Final = 1
FAILED: Final = 2

_PROGRESS_AFTER_SECONDS: Final = 1.0
_LAST_COLUMN: Final = 100
_PAGE: Final = 500


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command.

    Args:
        arguments: Those of the command line; None takes the process's own.

    Returns:
        The exit status.
    """
    parsed = _parser().parse_args(arguments)
    try:
        status: int = parsed.run(parsed)
        sys.stdout.flush()
        return status
    except BrokenPipeError:
        # Whoever read has seen enough; without this the interpreter would complain when it flushes at its end.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return SOUND
    except (CorruptError, DigestMismatchError) as error:
        text = _one_line(error)
        where = "" if parsed.path in text else f"{parsed.path}: "  # what is damaged may not know its store
        print(f"pybk: {where}{text}", file=sys.stderr)
        return DAMAGED
    except (PybkError, OSError) as error:
        print(f"pybk: {_one_line(error)}", file=sys.stderr)
        return FAILED


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split()) or type(error).__name__


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="pybk", description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--version", action="version", version=f"pybk {__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    def add(name: str, run: Any, text: str, path: str = "the directory of the store") -> argparse.ArgumentParser:
        # No abbreviations: --cluster-secret SECRET would be taken for a file's name, and printed as one not found.
        command = commands.add_parser(name, help=text, description=text, allow_abbrev=False)
        command.add_argument("path", metavar="PATH", help=path)
        command.add_argument("--json", action="store_true", help="print JSON")
        command.set_defaults(run=run)
        return command

    either = "the directory of a store, or the metadata URL of a cluster: zk://host:port/path, lmdb:///path"
    either_lmdb = "the directory of a store or bookie, or the URL of an LMDB metadata store: lmdb:///path"
    takes_secret(add("ls", _ls, "list the ledgers", either))
    cat = add("cat", _cat, "print the payloads of a ledger's entries, one after the other", either)
    cat.add_argument("ledger", metavar="LEDGER", type=int, help="the ledger's id")
    cat.add_argument("--first", type=int, default=0, metavar="ENTRY", help="first entry; default: 0")
    cat.add_argument("--last", type=int, metavar="ENTRY", help="last entry; default: the last one confirmed")
    cat.add_argument("--headers", action="store_true", help="print a line before each payload, and a line end after it")
    takes_password(cat)
    takes_secret(cat)
    add("dump", _dump, "print what lies in the files, record by record")
    verify = add("verify", _verify, "check everything, also beside a live writer, up to the durable watermark")
    takes_password(verify)
    takes_passwords(verify)
    reseal = add("reseal", _reseal, "check closed ledgers whole, and seal them", either)
    reseal.add_argument("ledgers", metavar="LEDGER", type=int, nargs="+", help="a ledger's id")
    takes_password(reseal)
    takes_secret(reseal)
    rebuild = add("rebuild-index", _rebuild, "make the index again from the catalog and the files")
    rebuild.add_argument(
        "--accept-loss",
        action="store_true",
        help="go on although entries are missing; reading them fails from then on",
    )
    upgrade = add("upgrade", run_upgrade, "show the feature level, or raise it to the newest", either)
    upgrade.add_argument("--finalize", action="store_true", help="raise the level; it cannot be lowered again")
    takes_secret(upgrade)
    permissions = add("permissions", run_permissions, "show which files others may use, or narrow that", either_lmdb)
    permissions.add_argument(
        "--narrow",
        action="store_true",
        help="give the files to their owner alone, or with --group to its members",
    )
    permissions.add_argument("--group", metavar="GROUP", help="name or number of the group that shares the files")
    _add_bookie_options(add("bookie", _bookie, "serve as a bookie until SIGTERM or SIGINT", "the bookie's directory"))
    add_spark(commands)
    return parser


def _add_bookie_options(bookie: argparse.ArgumentParser) -> None:
    bookie.add_argument(
        "--listen",
        action="append",
        required=True,
        metavar="ADDRESS",
        help="tcp://host:port (port * for any) or ipc://path; several times for several, the first is told to others",
    )
    bookie.add_argument(
        "--advertise",
        action="append",
        default=[],
        metavar="ADDRESS",
        help="address that others are told instead, such as tcp://bookie1.example.org:3181; needed with tcp://0.0.0.0:...",
    )
    bookie.add_argument(
        "--metadata",
        required=True,
        metavar="URL",
        help="where the cluster's metadata is: zk://host:port,host:port/path, or lmdb:///path for one host",
    )
    bookie.add_argument("--id", metavar="NAME", help="its name; default: that of the directory, or a new one")
    bookie.add_argument(
        "--moved", action="store_true", help="the directory was moved since the last start, and no other is left"
    )
    bookie.add_argument(
        "--replace", action="store_true", help="take the name of a bookie whose directory is lost for good"
    )
    bookie.add_argument("--rack", default="", metavar="RACK", help="where it stands, such as /room/rack")
    takes_secret(bookie)


@contextmanager
def _progress(what: str) -> Iterator[Progress]:
    """Show how far it is, on a terminal, once it takes long."""
    with tqdm(
        desc=what, unit="B", unit_scale=True, delay=_PROGRESS_AFTER_SECONDS, disable=None, file=sys.stderr, leave=False
    ) as bar:

        def show(done: int, total: int) -> None:
            bar.total = total
            bar.update(done - bar.n)

        yield show


def _print_json(content: Any, *, indent: int | None = 2) -> None:
    print(json.dumps(content, indent=indent, sort_keys=True))


def _table(rows: Iterable[Sequence[Any]], headers: Sequence[str]) -> None:
    widths = [None] * (len(headers) - 1) + [_LAST_COLUMN]
    print(tabulate(rows, headers=headers, disable_numparse=True, stralign="left", maxcolwidths=widths))


# ---- ls and cat --------------------------------------------------------------------------------------------------


def _is_url(path: str) -> bool:
    return "://" in path


def _directory(parsed: argparse.Namespace) -> str:
    """Return the directory that a command works on."""
    path: str = parsed.path
    if _is_url(path):
        raise UsageError(f"{path} is a metadata URL; this takes a directory: run it on that of each bookie")
    return path


def _ls(parsed: argparse.Namespace) -> int:
    rows = _cluster_rows(parsed) if _is_url(parsed.path) else _store_rows(parsed.path)
    if parsed.json:
        _print_json(rows)
        return SOUND
    names = ["ledger", "type", "state", "tier", "entries", "bytes", "digest", "sealed"]
    if _is_url(parsed.path):
        names[3:4] = ["quorums", "bookies"]
    times = (datetime.fromtimestamp(row["created_ns"] // 1_000_000_000, UTC) for row in rows)
    shown = [
        (*(_shown(row[name]) for name in names), f"{time:%Y-%m-%d %H:%M:%S}")
        for row, time in zip(rows, times, strict=True)
    ]
    _table(shown, (*names, "created (UTC)"))
    return SOUND


def _shown(value: Any) -> Any:
    """Return what a table shows of a value that JSON shows as null, true or false."""
    if value is None:
        return ""
    return ("no", "yes")[value] if isinstance(value, bool) else value


def _store_rows(path: str) -> list[dict[str, Any]]:
    """Return what is listed of a store's ledgers: the entries that are confirmed, and their bytes."""
    store = ReadOnlyStore.open(path, config=StoreConfig())
    try:
        return [_ledger_row(store, metadata) for metadata in store.ledgers()]
    finally:
        store.close()


def _ledger_row(store: ReadOnlyStore, metadata: LedgerMetadata) -> dict[str, Any]:
    descriptor = store.descriptor(metadata.ledger_id)
    confirmed = descriptor.last_add_confirmed
    nbytes = descriptor.length_durable if confirmed == descriptor.last_durable else None if confirmed >= 0 else 0
    return _row(metadata, confirmed + 1, nbytes)  # which of the durable bytes are confirmed, the entries alone say


def _row(metadata: LedgerMetadata, entries: int | None, nbytes: int | None) -> dict[str, Any]:
    return {
        "ledger": metadata.ledger_id,
        "type": str(metadata.ledger_type),
        "state": metadata.state.value,
        "tier": metadata.tier.value,
        "entries": entries,
        "bytes": nbytes,
        "digest": metadata.digest_type.name,
        "sealed": end_is_sealed(metadata),
        "created_ns": metadata.creation_time_ns,
        "creation_sequence": metadata.creation_sequence,
        "storage_hints": sorted(hint.value for hint in metadata.storage_hints),
        "write_flags": int(metadata.write_flags),
        "custom_metadata": {key: _base64(value) for key, value in metadata.custom_metadata.items()},
    }


def _cluster_rows(parsed: argparse.Namespace) -> list[dict[str, Any]]:
    """Return what is listed of a cluster's ledgers; how far one is that is not closed, its bookies know alone."""
    rows: list[dict[str, Any]] = []
    with _secret_needed():
        metadata, _ = open_cluster(parsed.path, secret_of(parsed), create=False)
    with metadata:
        after = -1
        while ids := metadata.list_ledgers(after=after, count=_PAGE):
            rows += [_cluster_row(found.metadata) for found in metadata.read_sound_ledgers(ids)]
            after = ids[-1]
    return rows


def _cluster_row(metadata: LedgerMetadata) -> dict[str, Any]:
    closed = metadata.state is LedgerState.CLOSED
    row = _row(metadata, metadata.last_entry_id + 1 if closed else None, metadata.length if closed else None)
    return {
        **row,
        "quorums": f"{metadata.ensemble_size}/{metadata.write_quorum}/{metadata.ack_quorum}",
        "bookies": ", ".join(bookie.bookie_id for bookie in metadata.fragments[-1].ensemble),
        "fragments": [
            {"first": fragment.first_entry_id, "bookies": [bookie.bookie_id for bookie in fragment.ensemble]}
            for fragment in metadata.fragments
        ],
    }


@contextmanager
def _secret_needed() -> Iterator[None]:
    """Say how to give a cluster's secret to whoever gave none, or another one."""
    try:
        yield
    except MetadataForgedError as error:
        raise MetadataForgedError(f"{error}: --cluster-secret-file FILE or {CLUSTER_SECRET}") from error


def _base64(data: bytes) -> str:
    return b2a_base64(data, newline=False).decode()


def _cat(parsed: argparse.Namespace) -> int:
    with _manager(parsed) as manager, _open_ledger(manager, parsed) as reader:
        confirmed = reader.read_last_add_confirmed()
        last = confirmed if parsed.last is None else parsed.last
        for entry in reader.read(parsed.first, last):
            if parsed.json:
                _print_json({**entry._asdict(), "payload": _base64(entry.payload)}, indent=None)
                continue
            if parsed.headers:
                print(
                    f"entry {entry.entry_id}, last add confirmed {entry.last_add_confirmed}, length {entry.length}, "
                    f"{len(entry.payload)} bytes",
                    flush=True,
                )
            sys.stdout.buffer.write(entry.payload + (b"\n" if parsed.headers else b""))
    return SOUND


def _manager(parsed: argparse.Namespace, *, read_only: bool = True) -> LedgerManager:
    """Open what the ledger is read from."""
    if not _is_url(parsed.path):
        return LedgerManager.open(parsed.path, read_only=read_only)
    with _secret_needed():
        return LedgerManager.connect(parsed.path, cluster_secret=secret_of(parsed))


def _open_ledger(manager: LedgerManager, parsed: argparse.Namespace) -> LedgerReader:
    """Open a ledger without recovery, so that its writer is not disturbed."""
    password = password_of(parsed)
    with _password_needed(parsed.ledger, password):
        return manager.open_ledger(parsed.ledger, password=password or b"", recover=False)


@contextmanager
def _password_needed(ledger_id: int, password: bytes | None) -> Iterator[None]:
    """Add to the error of a missing or wrong password how it is given."""
    try:
        yield
    except UnauthorizedError as error:
        how = f"give it with --password-file FILE or in {PASSWORD}"
        if password is None:
            text = (
                f"no password was given for ledger {ledger_id}, which was created with one; {how}; nothing was changed"
            )
            raise UnauthorizedError(text) from error
        raise UnauthorizedError(f"{error}; {how}") from error


def _dump(parsed: argparse.Namespace) -> int:
    for row in dump_store(_directory(parsed)):
        if parsed.json:
            _print_json(row, indent=None)
        else:
            print("  ".join(f"{name}={value}" for name, value in row.items()))
    return SOUND


# ---- verify and rebuild-index ------------------------------------------------------------------------------------


def _verify(parsed: argparse.Namespace) -> int:
    with _progress("verify") as progress:
        found = verify_store(_directory(parsed), passwords=passwords_of(parsed), progress=progress)
    status = DAMAGED if found.problems or (parsed.strict and not found.complete) else SOUND
    if parsed.json:
        problems = [problem._asdict() for problem in found.problems]
        _print_json({**found._asdict(), "problems": problems, "sound": not problems, "complete": found.complete})
        return status
    if found.problems:
        _table(
            (_problem_row(problem, parsed.path) for problem in found.problems),
            ("file", "offset", "ledger", "entries", "problem"),
        )
    print(_summary(found))
    return status


def _problem_row(problem: Problem, root: str) -> tuple[Any, ...]:
    entries = ""
    if problem.first_entry_id is not None:
        entries = f"{problem.first_entry_id} to {problem.last_entry_id}"
    numbers = ("" if number is None else number for number in (problem.offset, problem.ledger_id))
    return ("" if problem.path is None else os.path.relpath(problem.path, root), *numbers, entries, problem.message)


def _summary(found: Verified) -> str:
    text = (
        f"{len(found.problems) or 'no'} problem{'' if len(found.problems) == 1 else 's'} in "
        f"{counted(found.ledgers, 'ledger')}, {counted(found.entries, 'entry', 'entries')}, "
        f"{counted(found.files, 'file')}; the log was checked up to LSN {found.durable_lsn}, its durable watermark"
    )
    if found.unauthenticated:
        text += (
            f"; the entries of {counted(found.unauthenticated, 'ledger')} were checked by checksum only, their digests "
            f"need the password: --passwords, --password-file or {PASSWORD}"
        )
    if found.seals_unchecked:
        text += f"; the seals of {counted(found.seals_unchecked, 'ledger')} were not checked, for want of passwords"
    if found.unsealed:
        text += f"; {counted(found.unsealed, 'closed ledger')} without a seal, `pybk reseal` makes it"
    return text


def _reseal(parsed: argparse.Namespace) -> int:
    if not _is_url(parsed.path):
        LedgerManager.open(parsed.path, read_only=True).close()  # which makes no store where there is none
    password = password_of(parsed)
    with _manager(parsed, read_only=False) as manager:
        rows = []
        for ledger_id in parsed.ledgers:
            with _password_needed(ledger_id, password):
                metadata = manager.reseal(ledger_id, password=password or b"")
            rows.append({"ledger": ledger_id, "last_entry": metadata.last_entry_id, "seal": metadata.seal.hex()})
            if not parsed.json:
                print(f"ledger {ledger_id} was checked up to entry {metadata.last_entry_id} and is sealed")
    if parsed.json:
        _print_json(rows)
    return SOUND


def _rebuild(parsed: argparse.Namespace) -> int:
    with _progress("rebuild-index") as progress:
        found = rebuild_index(_directory(parsed), accept_loss=parsed.accept_loss, progress=progress)
    status = SOUND if found.made else DAMAGED
    if parsed.json:
        _print_json({**found._asdict(), "lost": [one._asdict() for one in found.lost]})
        return status
    for problem in found.problems:
        print(problem)
    if found.lost:
        _table(found.lost, ("ledger", "first entry missing", "last"))
    print(_outcome(found))
    return status


def _outcome(found: Rebuilt) -> str:
    if not found.made:
        return (
            "nothing was changed: restore the missing files from a backup, or go on with --accept-loss, which keeps "
            "the ledgers and lets reading the missing entries fail"
        )
    text = f"the index was made again: {counted(found.ledgers, 'ledger')}, {counted(found.entries, 'entry', 'entries')}"
    if found.log_ledgers:
        text += (
            f", and the next open takes {counted(found.log_entries, 'entry', 'entries')} of "
            f"{counted(found.log_ledgers, 'ledger')} from the log, which "
            "no checkpoint has brought into the index yet"
        )
    if found.old_index is not None:
        text += f"; the old one is kept as {found.old_index} and may be removed"
    return text


# ---- bookie ------------------------------------------------------------------------------------------------------


def _bookie(parsed: argparse.Namespace) -> int:
    logging.basicConfig(format="%(asctime)s %(levelname)s %(message)s")

    def ready(bookie: BookieServer) -> None:
        name, addresses = bookie.bookie.bookie_id, list(bookie.addresses)
        if parsed.json:
            _print_json({"bookie": name, "addresses": addresses}, indent=None)
        else:
            print(f"bookie {name} serves at {', '.join(addresses)}")
        sys.stdout.flush()

    with _secret_needed():
        serve(
            _directory(parsed),
            parsed.listen,
            parsed.metadata,
            secret_of(parsed),
            bookie_id=parsed.id,
            advertise=parsed.advertise,
            rack=parsed.rack,
            moved=parsed.moved,
            replace=parsed.replace,
            ready=ready,
        )
    return SOUND

"""The command ``pybk metadata``: export, check, restore and rebuild a cluster's metadata."""

from __future__ import annotations

import argparse
import os
from typing import TYPE_CHECKING, Any, Final

from pybk.admin.cli.arguments import (
    CLUSTER,
    CLUSTER_OR_EXPORT,
    CommandParser,
    add_command,
    is_url,
    secret_needed,
    takes_confirmation,
)
from pybk.admin.cli.credentials import secret_of, takes_secret
from pybk.admin.cli.output import DAMAGED, SOUND, confirm, counted, print_json, print_table, progress_bar
from pybk.errors import UsageError

if TYPE_CHECKING:
    from pybk.metadata.reports import MetadataCheckReport, MetadataRestoreReport

_URL: Final = "where the cluster's metadata is: zk://host:port,host:port/path, or lmdb:///path"
_LAST_COLUMN: Final = 100
_NAMED_MAX: Final = 20
"""Ledgers that one line names; JSON has all."""


def add(parser: CommandParser) -> None:
    """Add the verbs of ``pybk metadata``."""
    nested = parser.add_subparsers()
    text = "write the metadata to a new file, with their MACs and without any secret"
    export = add_command(nested, "export", _export, text, CLUSTER)
    export.add_argument("file", metavar="FILE", help="the file, which must not exist")
    takes_secret(export)
    text = "decode and verify everything in a metadata store, or in an export; exit 1 if there are problems"
    check = add_command(nested, "check", _check, text, CLUSTER_OR_EXPORT)
    check.set_defaults(path_may_be_file=True)
    check.add_argument(
        "--repair",
        action="store_true",
        help="first make damaged values of deleted ids again: their ids that no ledger has count as deleted then",
    )
    takes_secret(check)
    text = "restore an export to an empty metadata store, or accept one that was put back; all bookies must be closed"
    restore = add_command(nested, "restore", _restore, text, _URL)
    restore.add_argument(
        "file", metavar="FILE", nargs="?", help="the export; without it the store is accepted as it is"
    )
    restore.add_argument(
        "--directory", action="append", default=[], metavar="DIRECTORY", help="a bookie's directory; may be repeated"
    )
    restore.add_argument(
        "--new-epoch", action="store_true", help="the default: ids jump, and bookies do not trust what they know"
    )
    restore.add_argument(
        "--same-epoch", action="store_true", help="the export is known to be the newest state: a cluster is moved"
    )
    restore.add_argument("--overwrite", action="store_true", help="remove what the store has before FILE is restored")
    text = "make the metadata again from bookies' directories; all bookies must be closed"
    rebuild = add_command(nested, "rebuild", _rebuild, text, _URL)
    rebuild.add_argument("directory", metavar="DIRECTORY", nargs="+", help="a bookie's directory")
    for command in (restore, rebuild):
        command.add_argument(
            "--all-directories", action="store_true", help="all other directories of bookies are lost for good"
        )
        takes_confirmation(command, "show what would be done")
        takes_secret(command)


def _export(parsed: argparse.Namespace) -> int:
    if not is_url(parsed.path):
        raise UsageError(f"{parsed.path} is no metadata URL; PATH takes {_URL}")
    from pybk.operations.metadata_repair import export_metadata

    with secret_needed(), progress_bar(parsed, "export", "values") as progress:
        made = export_metadata(parsed.path, parsed.file, cluster_secret=secret_of(parsed), progress=progress)
    if parsed.json:
        print_json(made._asdict())
    else:
        print(f"{made.path}: {counted(made.values, 'value')}, {counted(made.ledgers, 'ledger')}, {made.bytes} bytes")
        print(f"SHA-256 {made.sha256}")
    return SOUND


def _check(parsed: argparse.Namespace) -> int:
    if os.path.isdir(parsed.path):
        raise UsageError(f"{parsed.path} is a directory; PATH takes {parsed.path_help}")
    from pybk.operations.metadata_repair import check_metadata

    with secret_needed(), progress_bar(parsed, "check", "values") as progress:
        found = check_metadata(parsed.path, cluster_secret=secret_of(parsed), repair=parsed.repair, progress=progress)
    if parsed.json:
        print_json({**found._asdict(), "problems": [one._asdict() for one in found.problems]})
    else:
        _print_check(found)
    return DAMAGED if found.problems else SOUND


def _print_check(found: MetadataCheckReport) -> None:
    for key in found.repaired:
        print(f"{key} is made again")
    if found.problems:
        print_table(found.problems, ("key", "problem"), last_column=_LAST_COLUMN)
    for note in found.notes:
        print(f"note: {note}")
    print(
        f"{counted(len(found.problems), 'problem')} in {counted(found.values, 'value')}: "
        f"{counted(found.ledgers, 'ledger')}, {found.not_closed} of them not closed, "
        f"{counted(found.tombstones, 'tombstone')}, {counted(found.bookies, 'bookie')}; epoch {found.epoch or 'none'}; "
        f"ids are given from {found.next_id} on"
    )
    if found.unknown:
        print(f"{counted(found.unknown, 'value')} of other kinds were not checked")


def _restore(parsed: argparse.Namespace) -> int:
    from pybk.operations.metadata_repair import restore_metadata

    if parsed.new_epoch and parsed.same_epoch:
        raise UsageError("--new-epoch and --same-epoch exclude each other; leave one out")

    def run(write: bool) -> MetadataRestoreReport:
        return restore_metadata(
            parsed.path,
            parsed.file,
            cluster_secret=secret_of(parsed),
            directories=parsed.directory,
            all_directories=parsed.all_directories,
            new_epoch=not parsed.same_epoch,
            overwrite=parsed.overwrite,
            write=write,
        )

    return _mend(parsed, run)


def _rebuild(parsed: argparse.Namespace) -> int:
    from pybk.operations.metadata_repair import rebuild_metadata

    def run(write: bool) -> MetadataRestoreReport:
        return rebuild_metadata(
            parsed.path,
            parsed.directory,
            cluster_secret=secret_of(parsed),
            all_directories=parsed.all_directories,
            write=write,
        )

    return _mend(parsed, run)


def _mend(parsed: argparse.Namespace, run: Any) -> int:
    """Show what would be done, ask, and do it."""
    with secret_needed():
        found: MetadataRestoreReport = run(False)
        if not parsed.json:
            _print_restore(found)
        if not parsed.dry_run:
            lost = "all other directories are lost for good, " if parsed.all_directories else ""
            what = f"all bookies and clients are closed, {lost}and this is written to {parsed.path}"
            confirm(parsed, parsed.path, what)
            found = run(True)
    if parsed.json:
        print_json(found._asdict())
    elif found.written:
        print(f"done: epoch {found.epoch or 'unchanged'}; start the bookies, then the clients")
    return SOUND


def _print_restore(found: MetadataRestoreReport) -> None:
    print(f"{counted(found.known, 'ledger')} known, {counted(found.values, 'value')}; ids from {found.next_id} on")
    for text, ids in (
        ("made again from directories, in recovery", found.made),
        ("get other ensembles", found.corrected),
        ("were deleted, as a bookie remembers", found.deleted),
        ("may have been deleted", found.suspects),
        ("have lost so many bookies that no recovery can find their end", found.undecidable),
    ):
        if ids:
            print(f"{counted(len(ids), 'ledger')} {text}: {_named(ids)}")
    if found.incomplete:
        print_table(found.incomplete, ("ledger", "entries that no bookie has: from", "to"))
    if found.not_made:
        print_table(found.not_made, ("ledger", "cannot be made again"), last_column=_LAST_COLUMN)
    for note in found.notes:
        print(f"note: {note}")


def _named(ids: tuple[int, ...]) -> str:
    more = f" and {len(ids) - _NAMED_MAX} more" if len(ids) > _NAMED_MAX else ""
    return ", ".join(map(str, ids[:_NAMED_MAX])) + more

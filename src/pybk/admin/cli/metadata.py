"""The command ``pybk metadata``: export, check, restore and rebuild a cluster's metadata."""

from __future__ import annotations

import argparse
import os
from typing import TYPE_CHECKING, Any, Final

from pybk.admin.cli.command_parser import Verbs, is_url, secret_needed
from pybk.admin.cli.given_secrets import secret_of
from pybk.admin.cli.output import (
    DAMAGED,
    LAST_COLUMN,
    SOUND,
    confirm,
    counted,
    print_json,
    print_result,
    print_table,
    progress_bar,
)
from pybk.errors import UsageError
from pybk.operations.metadata_repair import check_metadata, export_metadata, rebuild_metadata, restore_metadata
from pybk.values import listed

if TYPE_CHECKING:
    from pybk.metadata.reports import MetadataCheckReport, MetadataRestoreReport

_URL: Final = "where the cluster's metadata is: zk://host:port,host:port/path, or lmdb:///path"


def _export(parsed: argparse.Namespace) -> int:
    if not is_url(parsed.path):
        raise UsageError(f"{parsed.path} is not a metadata URL; PATH takes {_URL}")
    with secret_needed(), progress_bar(parsed, "export", "values") as progress:
        made = export_metadata(parsed.path, parsed.file, cluster_secret=secret_of(parsed), progress=progress)
    return print_result(
        parsed,
        made._asdict(),
        f"{made.path}: {counted(made.values, 'value')}, {counted(made.ledgers, 'ledger')}, {made.bytes} bytes",
        f"SHA-256 {made.sha256}",
    )


def _check(parsed: argparse.Namespace) -> int:
    if os.path.isdir(parsed.path):
        raise UsageError(f"{parsed.path} is a directory; PATH takes {parsed.path_help}")
    if not is_url(parsed.path) and not os.path.exists(parsed.path):
        raise UsageError(f"{parsed.path} does not exist; PATH takes {parsed.path_help}")
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
        print_table(found.problems, ("key", "problem"), last_column=LAST_COLUMN)
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
            print(f"{counted(len(ids), 'ledger')} {text}: {listed(ids)}")
    if found.incomplete:
        print_table(found.incomplete, ("ledger", "entries that no bookie has: from", "to"))
    if found.not_made:
        print_table(found.not_made, ("ledger", "cannot be made again"), last_column=LAST_COLUMN)
    for note in found.notes:
        print(f"note: {note}")


VERBS: Final[Verbs] = {
    "export": _export,
    "check": _check,
    "restore": _restore,
    "rebuild": _rebuild,
}
"""The verbs of ``pybk metadata``."""

"""The command ``pybk backup``: make, verify, show and prune backups of stores, bookies and clusters' ledgers."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from pybk.admin.cli.clusters import manager_of
from pybk.admin.cli.command_parser import Verbs, is_url
from pybk.admin.cli.given_secrets import passwords_of, storage_options_of
from pybk.admin.cli.output import (
    DAMAGED,
    SOUND,
    confirm,
    counted,
    print_json,
    print_table,
    progress_bar,
    shown_bytes,
    shown_time,
)
from pybk.backup import back_up, list_backup_runs, prune_backup, verify_backup
from pybk.credentials import PASSWORD, SECRET
from pybk.errors import UsageError

if TYPE_CHECKING:
    from pybk.backup.backing_up import BackupReport
    from pybk.backup.pruning import PruneReport
    from pybk.backup.verifying import BackupCheckReport

TARGET: Final = "the directory of the backup, or a URL of fsspec, such as s3://bucket/path"
_NEEDS_PASSWORD: Final = (
    f"need the secret or password: --passwords, --secret-file, --password-file, {SECRET} or {PASSWORD}"
)


def _make(parsed: argparse.Namespace) -> int:
    with ExitStack() as stack:
        source = stack.enter_context(manager_of(parsed)) if is_url(parsed.path) else parsed.path
        progress = stack.enter_context(progress_bar(parsed, "backup"))
        passwords = passwords_of(parsed)
        made = back_up(
            source,
            parsed.target,
            passwords=passwords,
            skip_damaged=parsed.skip_damaged,
            dry_run=parsed.dry_run,
            progress=progress,
            storage_options=storage_options_of(parsed),
        )
    if parsed.json:
        print_json({**made._asdict(), "dry_run": parsed.dry_run})
    else:
        print(_made(made, dry_run=parsed.dry_run))
        print_left_out(made.left_out)
    return DAMAGED if made.left_out or (parsed.strict and made.unauthenticated) else SOUND


def _made(made: BackupReport, *, dry_run: bool) -> str:
    entries = f"{counted(made.entries, 'entry', 'entries')} with {shown_bytes(made.payload_bytes)}"
    if dry_run:
        return f"run {made.run} would copy {entries}; {counted(made.changed, 'ledger')} changed; nothing was written"
    text = (
        f"run {made.run}: {entries} copied, {shown_bytes(made.written_bytes)} written; "
        f"{counted(made.ledgers, 'ledger')} in the backup, {made.changed} new or changed, {made.gone} gone"
    )
    if made.durable_lsn:
        text += f"; up to LSN {made.durable_lsn}"
    if made.continued_entries:
        text += f"; {counted(made.continued_entries, 'entry', 'entries')} of an interrupted run taken over"
    return text + unauthenticated_note(made.unauthenticated)


def print_left_out(left_out: Sequence[str]) -> None:
    """Print the ledgers and entries that are not in a backup, or were not restored."""
    for text in left_out:
        print(f"left out: {text}", file=sys.stderr)


def unauthenticated_note(count: int) -> str:
    """Return a note on ledgers whose digests were not checked; empty without such ledgers."""
    if not count:
        return ""
    return f"; the entries of {counted(count, 'ledger')} were checked by checksum only, their digests {_NEEDS_PASSWORD}"


def _verify(parsed: argparse.Namespace) -> int:
    with progress_bar(parsed, "backup verify") as progress:
        found = verify_backup(
            parsed.path,
            passwords=passwords_of(parsed),
            progress=progress,
            storage_options=storage_options_of(parsed),
        )
    if parsed.json:
        print_json({**_fields(found), "sound": not found.problems, "complete": found.complete})
    else:
        for problem in found.problems:
            print(problem)
        print(
            f"{len(found.problems) or 'no'} problem{'' if len(found.problems) == 1 else 's'} in "
            f"{counted(found.ledgers, 'ledger')}, {counted(found.entries, 'entry', 'entries')} as of run "
            f"{found.runs[-1].run} of the backup of {found.source}{unauthenticated_note(found.unauthenticated)}"
        )
        print_left_out(found.left_out)
    return DAMAGED if found.problems or found.left_out or (parsed.strict and not found.complete) else SOUND


def _fields(found: BackupCheckReport) -> dict[str, Any]:
    return {**found._asdict(), "runs": [run._asdict() for run in found.runs]}


def _show(parsed: argparse.Namespace) -> int:
    runs = list_backup_runs(parsed.path, storage_options=storage_options_of(parsed))
    if parsed.json:
        print_json({"runs": [run._asdict() for run in runs]})
        return SOUND
    print_table(
        (
            (
                run.run,
                shown_time(run.created_ns),
                run.durable_lsn,
                run.ledgers,
                run.changed,
                run.gone,
                run.left_out,
                shown_bytes(run.nbytes),
            )
            for run in runs
        ),
        ("run", "ended (UTC)", "LSN", "ledgers", "changed", "gone", "left out", "written"),
    )
    return SOUND


def _prune(parsed: argparse.Namespace) -> int:
    if parsed.keep is None and parsed.keep_for is None:
        raise UsageError("give the runs to keep: --keep N, --keep-for TIME, or both")
    keep = 1 if parsed.keep is None else parsed.keep
    prune = partial(
        prune_backup,
        parsed.path,
        keep=keep,
        keep_seconds=parsed.keep_for,
        storage_options=storage_options_of(parsed),
    )
    found = prune(dry_run=True)
    if not parsed.dry_run:
        if found.removed:
            confirm(parsed, found.target, f"{_pruned(found)} for good")
        found = prune()
    if parsed.json:
        print_json({"dry_run": parsed.dry_run, **found._asdict(), **_run_fields(found)})
    else:
        note = "; nothing was changed" if parsed.dry_run else ""
        print(f"{_pruned(found)}; {counted(len(found.kept), 'run')} kept, from run {found.kept[0].run} on{note}")
    return SOUND


def _run_fields(found: PruneReport) -> dict[str, Any]:
    return {name: [run._asdict() for run in runs] for name, runs in (("kept", found.kept), ("removed", found.removed))}


def _pruned(found: PruneReport) -> str:
    """Return what is removed of a backup, a sentence without its end."""
    if not found.removed:
        return "no run is removed"
    first, last = found.removed[0].run, found.removed[-1].run
    runs = f"run {first}" if first == last else f"runs {first} to {last}"
    packs = f"{counted(found.packs, 'pack')} with {shown_bytes(found.nbytes)}"
    return f"{runs} of {found.target} and {packs} are removed"


VERBS: Final[Verbs] = {
    "make": _make,
    "verify": _verify,
    "show": _show,
    "prune": _prune,
}
"""The verbs of ``pybk backup``."""

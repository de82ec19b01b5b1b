"""The command ``pybk restore``: a store from its backup, to a new directory."""

from __future__ import annotations

import argparse

from pybk.admin.cli.arguments import CommandParser, takes_path
from pybk.admin.cli.backup import TARGET
from pybk.admin.cli.credentials import passwords_of, takes_password, takes_passwords
from pybk.admin.cli.output import DAMAGED, SOUND, counted, print_json, progress_bar, shown_bytes
from pybk.credentials import PASSWORD


def add(parser: CommandParser) -> None:
    """Add the arguments of ``pybk restore``."""
    takes_path(parser, _restore, TARGET)
    parser.add_argument("destination", metavar="DIRECTORY", help="the store's new directory: it is empty, or not there")
    parser.add_argument("--run", dest="number", type=int, metavar="N", help="the run to restore; default: the last")
    parser.add_argument("--dry-run", action="store_true", help="say what would be restored, and write nothing")
    takes_password(parser)
    takes_passwords(parser)


def _restore(parsed: argparse.Namespace) -> int:
    from pybk.backup import restore_backup

    with progress_bar(parsed, "restore") as progress:
        made = restore_backup(
            parsed.path,
            parsed.destination,
            run=parsed.number,
            passwords=passwords_of(parsed),
            dry_run=parsed.dry_run,
            progress=progress,
        )
    if parsed.json:
        print_json({**made._asdict(), "incarnation": f"{made.incarnation:016x}", "dry_run": parsed.dry_run})
    else:
        what = (
            f"run {made.run}: {counted(made.ledgers, 'ledger')}, {counted(made.entries, 'entry', 'entries')} with "
            f"{shown_bytes(made.payload_bytes)}"
        )
        if parsed.dry_run:
            print(f"{what} would be restored to {parsed.destination}; nothing was written")
        else:
            text = f"{what} restored to {parsed.destination}, incarnation {made.incarnation:016x}"
            if made.unauthenticated:
                text += (
                    f"; the entries of {counted(made.unauthenticated, 'ledger')} were checked by checksum only, their "
                    f"digests need the password: --passwords, --password-file or {PASSWORD}"
                )
            print(text)
    return DAMAGED if parsed.strict and made.unauthenticated else SOUND

"""The command ``pybk restore``: a store from its backup, to a new directory; or ledgers, to a cluster."""

from __future__ import annotations

import argparse
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

from pybk.admin.cli.arguments import CommandParser, is_url, secret_needed, takes_path, whole_number
from pybk.admin.cli.backup import TARGET, print_left_out, unauthenticated_note
from pybk.admin.cli.credentials import (
    passwords_of,
    secret_of,
    storage_options_of,
    takes_password,
    takes_passwords,
    takes_secret,
    takes_storage_options,
)
from pybk.admin.cli.output import DAMAGED, SOUND, counted, print_json, progress_bar, shown_bytes

if TYPE_CHECKING:
    from pybk.backup.restoring import RestoreReport


def add(parser: CommandParser) -> None:
    """Add the arguments of ``pybk restore``."""
    takes_path(parser, _restore, TARGET)
    parser.add_argument(
        "destination",
        metavar="DESTINATION",
        help="a store's new directory, empty or not there yet; for a cluster's ledgers, the metadata URL of a cluster",
    )
    parser.add_argument(
        "--new-ids", action="store_true", help="give a cluster's ledgers new ids, because those that they had are taken"
    )
    parser.add_argument(
        "--ledger",
        dest="ledgers",
        type=whole_number,
        nargs="+",
        metavar="ID",
        help="of a cluster's ledgers, only these",
    )
    parser.add_argument(
        "--run", dest="number", type=whole_number, metavar="N", help="the run to restore; default: the last"
    )
    parser.add_argument("--dry-run", action="store_true", help="say what would be restored, and write nothing")
    takes_password(parser)
    takes_passwords(parser)
    takes_secret(parser)
    takes_storage_options(parser)


def _restore(parsed: argparse.Namespace) -> int:
    from pybk.backup import restore_backup
    from pybk.manager.ledger_manager import LedgerManager

    with ExitStack() as stack:
        destination: Any = parsed.destination
        if is_url(destination):
            with secret_needed():
                manager = LedgerManager.connect(destination, cluster_secret=secret_of(parsed))
            destination = stack.enter_context(manager)
        progress = stack.enter_context(progress_bar(parsed, "restore"))
        made = restore_backup(
            parsed.path,
            destination,
            run=parsed.number,
            passwords=passwords_of(parsed),
            new_ids=parsed.new_ids,
            ledgers=parsed.ledgers,
            dry_run=parsed.dry_run,
            progress=progress,
            storage_options=storage_options_of(parsed),
        )
    if parsed.json:
        print_json({**made._asdict(), "incarnation": f"{made.incarnation:016x}", "dry_run": parsed.dry_run})
    else:
        _print(parsed, made)
    return DAMAGED if made.left_out or (parsed.strict and made.unauthenticated) else SOUND


def _print(parsed: argparse.Namespace, made: RestoreReport) -> None:
    what = (
        f"run {made.run}: {counted(made.ledgers, 'ledger')}, {counted(made.entries, 'entry', 'entries')} with "
        f"{shown_bytes(made.payload_bytes)}"
    )
    if parsed.dry_run:
        text = f"{what} would be restored to {parsed.destination}; nothing was written"
    else:
        text = f"{what} restored to {parsed.destination}"
        if made.incarnation:
            text += f", incarnation {made.incarnation:016x}"
        text += unauthenticated_note(made.unauthenticated)
    print(text)
    for old, new in made.ids.items():
        if old != new:
            print(f"ledger {old} is ledger {new}")
    print_left_out(made.left_out)

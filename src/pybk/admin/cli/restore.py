"""The command ``pybk restore``: a store from its backup, to a new directory; or ledgers, to a cluster."""

from __future__ import annotations

import argparse
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any, Final

from pybk.admin.cli.backup import print_left_out, unauthenticated_note
from pybk.admin.cli.command_parser import Verbs, is_url, secret_needed
from pybk.admin.cli.given_secrets import passwords_of, secret_of, storage_options_of
from pybk.admin.cli.output import DAMAGED, SOUND, counted, print_json, progress_bar, shown_bytes
from pybk.backup import restore_backup
from pybk.errors import UsageError
from pybk.manager.ledger_manager import LedgerManager

if TYPE_CHECKING:
    from pybk.backup.restoring import RestoreReport


def _restore(parsed: argparse.Namespace) -> int:
    given = "--ledger" if parsed.ledgers is not None else "--new-ids"
    if not is_url(parsed.destination) and (parsed.ledgers is not None or parsed.new_ids):
        raise UsageError(
            f"{given} is for the ledgers of a cluster; a store is restored whole, and its ledgers keep their ids: "
            "leave it out"
        )
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


VERBS: Final[Verbs] = {"": _restore}
"""``pybk restore``, which has no verbs."""

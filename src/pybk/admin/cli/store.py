"""The command ``pybk store``: what is in a store's files, and how they are checked and mended."""

from __future__ import annotations

import argparse
import os
from typing import TYPE_CHECKING, Any, Final

from pybk.admin.cli.arguments import STORE_OR_CLUSTER, CommandParser, add_command, directory_of
from pybk.admin.cli.credentials import passwords_of, takes_password, takes_passwords
from pybk.admin.cli.feature_level import add_upgrade
from pybk.admin.cli.output import DAMAGED, SOUND, counted, print_json, print_json_line, print_table, progress_bar
from pybk.credentials import PASSWORD

if TYPE_CHECKING:
    from pybk.storage.repair.rebuild import RebuildReport
    from pybk.storage.repair.verify import VerifyProblem, VerifyReport

_LAST_COLUMN: Final = 100


def add(parser: CommandParser) -> None:
    """Add the verbs of ``pybk store``."""
    verbs = parser.add_subparsers()
    add_command(verbs, "dump", _dump, "print the contents of the files, record by record")
    _add_verify(verbs)
    _add_rebuild_index(verbs)
    add_upgrade(verbs, STORE_OR_CLUSTER)


def _add_verify(verbs: Any) -> None:
    text = "check everything up to the durable watermark; the store may be open for writing meanwhile"
    command = add_command(verbs, "verify", _verify, text)
    takes_password(command)
    takes_passwords(command)


def _add_rebuild_index(verbs: Any) -> None:
    rebuild = add_command(verbs, "rebuild-index", _rebuild_index, "rebuild the index from the catalog and the files")
    rebuild.add_argument(
        "--accept-loss",
        action="store_true",
        help="rebuild although entries are missing; reading these fails from then on",
    )


def _dump(parsed: argparse.Namespace) -> int:
    from pybk.admin.dump import dump_store

    for row in dump_store(directory_of(parsed)):
        if parsed.json:
            print_json_line(row)
        else:
            print("  ".join(f"{name}={value}" for name, value in row.items()))
    return SOUND


# ---- verify ------------------------------------------------------------------------------------------------------


def _verify(parsed: argparse.Namespace) -> int:
    from pybk.repair import verify

    with progress_bar(parsed, "verify") as progress:
        found = verify(directory_of(parsed), passwords=passwords_of(parsed), progress=progress)
    status = DAMAGED if found.problems or (parsed.strict and not found.complete) else SOUND
    if parsed.json:
        problems = [problem._asdict() for problem in found.problems]
        print_json({**found._asdict(), "problems": problems, "sound": not problems, "complete": found.complete})
        return status
    if found.problems:
        print_table(
            (_problem_row(problem, parsed.path) for problem in found.problems),
            ("file", "offset", "ledger", "entries", "problem"),
            last_column=_LAST_COLUMN,
        )
    print(_summary(found))
    return status


def _problem_row(problem: VerifyProblem, root: str) -> tuple[Any, ...]:
    entries = ""
    if problem.first_entry_id is not None:
        entries = f"{problem.first_entry_id} to {problem.last_entry_id}"
    numbers = ("" if number is None else number for number in (problem.offset, problem.ledger_id))
    return ("" if problem.path is None else os.path.relpath(problem.path, root), *numbers, entries, problem.message)


def _summary(found: VerifyReport) -> str:
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
        text += (
            f"; the seals of {counted(found.seals_unchecked, 'ledger')} were not checked, because their passwords are "
            "not known"
        )
    if found.unsealed:
        text += f"; {counted(found.unsealed, 'closed ledger')} without a seal, `pybk reseal` makes it"
    return text


# ---- rebuild-index -----------------------------------------------------------------------------------------------


def _rebuild_index(parsed: argparse.Namespace) -> int:
    from pybk.repair import rebuild_index

    with progress_bar(parsed, "rebuild-index") as progress:
        found = rebuild_index(directory_of(parsed), accept_loss=parsed.accept_loss, progress=progress)
    status = SOUND if found.made else DAMAGED
    if parsed.json:
        print_json({**found._asdict(), "lost": [one._asdict() for one in found.lost]})
        return status
    for problem in found.problems:
        print(problem)
    if found.lost:
        print_table(found.lost, ("ledger", "first entry missing", "last"), last_column=_LAST_COLUMN)
    print(_outcome(found))
    return status


def _outcome(found: RebuildReport) -> str:
    if not found.made:
        return (
            "nothing was changed: restore the missing files from a backup, or give --accept-loss, which keeps the "
            "ledgers and makes reads of the missing entries fail; a bookie copies them back from its peers"
        )
    text = f"the index was rebuilt: {counted(found.ledgers, 'ledger')}, {counted(found.entries, 'entry', 'entries')}"
    if found.log_ledgers:
        text += (
            f", and the next open takes {counted(found.log_entries, 'entry', 'entries')} of "
            f"{counted(found.log_ledgers, 'ledger')} from the log, because no checkpoint has indexed them yet"
        )
    if found.old_index is not None:
        text += f"; the old one is kept as {found.old_index} and may be removed"
    return text

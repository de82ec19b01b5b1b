"""The command ``pybk repair``: the queue of repairs, a repair by hand, and the pause of all repairs."""

from __future__ import annotations

import argparse
import sys
from typing import TYPE_CHECKING, Final

from pybk.admin.cli.arguments import CommandParser, seconds_of
from pybk.admin.cli.clusters import add_verb, admin_of, manager_of, mark_as_json, person_of, takes_person
from pybk.admin.cli.output import (
    PARTLY,
    SOUND,
    age_of,
    counted,
    print_json,
    print_note,
    print_table,
    shown_bytes,
    shown_time,
)

if TYPE_CHECKING:
    from pybk.metadata.settings import ClusterSettings

_ERROR_COLUMN: Final = 60


def add(parser: CommandParser) -> None:
    """Add the verbs of ``pybk repair``."""
    verbs = parser.add_subparsers()
    add_verb(verbs, "list", _list, "list the ledgers that are to be repaired, the most urgent first")
    run = add_verb(
        verbs,
        "run",
        _run,
        "copy now what a ledger lacks, or all that a bookie has to others; exit 5 if something is left",
    )
    what = run.add_mutually_exclusive_group(required=True)
    what.add_argument(
        "--bookie", metavar="NAME", help="move all ledgers off this bookie, as if it were lost, also if it runs"
    )
    what.add_argument("--ledger", metavar="ID", type=int, help="this ledger")
    pause = add_verb(verbs, "pause", _pause, "pause repairs for some time; they resume by themselves")
    pause.add_argument(
        "--for",
        dest="seconds",
        type=seconds_of,
        default=3_600.0,
        metavar="TIME",
        help="such as 30m or 2h; default: 1h; at most 1d",
    )
    resume = add_verb(verbs, "resume", _resume, "end a pause of repairs, and accept losses that they wait for")
    resume.add_argument(
        "--accept-loss-of",
        nargs="+",
        default=[],
        metavar="NAME",
        help="bookies whose loss does not make repairs wait any more",
    )
    for command in (pause, resume):
        takes_person(command)


def _list(parsed: argparse.Namespace) -> int:
    with admin_of(parsed) as admin:
        marks, status = admin.repairs(), admin.status()
    if parsed.json:
        print_json({"repairs": [mark_as_json(mark) for mark in marks]})
        return SOUND
    rows = [
        (
            mark.ledger_id,
            mark.bookie.bookie_id,
            mark.reason,
            mark.state,
            age_of(mark.since_ns),
            shown_bytes(mark.size_bytes) if mark.size_bytes else "",
            mark.tries,
            mark.error,
        )
        for mark in marks
    ]
    print_table(
        rows, ("ledger", "bookie", "reason", "state", "age", "bytes", "tries", "error"), last_column=_ERROR_COLUMN
    )
    for reason in status.reasons:
        if reason.code.startswith("hold_") or reason.code in ("repairs_paused", "no_auditor"):
            print_note(parsed, f"note: {reason.text}")  # what waits because of it has no mark yet
    return SOUND


def _run(parsed: argparse.Namespace) -> int:
    with manager_of(parsed) as manager:
        done = manager.replicate(parsed.ledger if parsed.bookie is None else parsed.bookie)
    if parsed.json:
        print_json(done._asdict())
    else:
        print(f"{counted(done.ledgers, 'ledger')} examined, {counted(done.fragments, 'fragment')} completed")
        for text in done.left:
            print(f"left: {text}", file=sys.stderr)
    return PARTLY if done.left else SOUND


def _pause(parsed: argparse.Namespace) -> int:
    with admin_of(parsed) as admin:
        settings = admin.pause_repair(parsed.seconds, person_of(parsed))
    _print_settings(parsed, settings)
    if not parsed.json:
        print(f"repairs are paused until {shown_time(settings.repair.paused_until_ns)} UTC")
    return SOUND


def _resume(parsed: argparse.Namespace) -> int:
    with admin_of(parsed) as admin:
        settings = admin.resume_repair(parsed.accept_loss_of, person_of(parsed))
    _print_settings(parsed, settings)
    if not parsed.json:
        print("repairs are not paused")
        if settings.repair.accepted_losses:
            print(f"repairs do not wait for {', '.join(settings.repair.accepted_losses)}")
    return SOUND


def _print_settings(parsed: argparse.Namespace, settings: ClusterSettings) -> None:
    if parsed.json:
        print_json(settings.repair.as_dict())

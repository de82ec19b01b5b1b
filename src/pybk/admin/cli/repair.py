"""The command ``pybk repair``: the queue of repairs, a repair by hand, and the pause of all repairs."""

from __future__ import annotations

import argparse
import getpass
import sys
from dataclasses import fields
from typing import Any, Final

from pybk.admin.cli.cluster import (
    add_verb,
    admin_of,
    age_of,
    manager_of,
    mark_as_json,
    seconds_of,
    shown_bytes,
    shown_time,
)
from pybk.admin.cli.output import DAMAGED, SOUND, counted, print_json, print_table
from pybk.metadata.settings import ClusterSettings

_ERROR_COLUMN: Final = 60


def add_repair(commands: Any) -> None:
    """Add ``pybk repair`` and its verbs."""
    text = "list, run, pause and resume the repairs of a cluster"
    parser = commands.add_parser("repair", help=text, description=text, allow_abbrev=False)
    verbs = parser.add_subparsers(required=True, metavar="VERB")
    add_verb(verbs, "list", _list, "list the ledgers that are to be repaired, the most urgent first")
    run = add_verb(
        verbs,
        "run",
        _run,
        "copy now what a ledger lacks, or all that a bookie has to others; exit 1 if something is left",
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
        command.add_argument("--by", default=None, metavar="WHO", help="who does it, for others; default: the user")


def _list(parsed: argparse.Namespace) -> int:
    with admin_of(parsed) as admin:
        marks, status = admin.repairs(), admin.status()
    if parsed.json:
        print_json([mark_as_json(mark) for mark in marks])
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
            print(f"note: {reason.text}", file=sys.stderr)  # what waits because of it has no mark yet
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
    return DAMAGED if done.left else SOUND


def _pause(parsed: argparse.Namespace) -> int:
    with admin_of(parsed) as admin:
        settings = admin.pause_repair(parsed.seconds, _who(parsed))
    _print_settings(parsed, settings)
    if not parsed.json:
        print(f"repairs are paused until {shown_time(settings.repair.paused_until_ns)} UTC")
    return SOUND


def _resume(parsed: argparse.Namespace) -> int:
    with admin_of(parsed) as admin:
        settings = admin.resume_repair(parsed.accept_loss_of, _who(parsed))
    _print_settings(parsed, settings)
    if not parsed.json:
        print("repairs are not paused")
        if settings.repair.accepted_losses:
            print(f"repairs do not wait for {', '.join(settings.repair.accepted_losses)}")
    return SOUND


def _print_settings(parsed: argparse.Namespace, settings: ClusterSettings) -> None:
    if parsed.json:
        print_json({each.name: getattr(settings.repair, each.name) for each in fields(settings.repair)})


def _who(parsed: argparse.Namespace) -> str:
    """Return who gives the command: ``--by``, or the name of the user."""
    if parsed.by is not None:
        return str(parsed.by)
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # a process in a container may have a user without a name
        return "pybk repair"

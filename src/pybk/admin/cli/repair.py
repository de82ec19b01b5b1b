"""The command ``pybk repair``: the queue of repairs, a repair by hand, and the pause of all repairs."""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from typing import TYPE_CHECKING, Final

from pybk import operations
from pybk.admin.cli.clusters import admin_of, manager_of, mark_as_json, person_of
from pybk.admin.cli.command_parser import Verbs
from pybk.admin.cli.output import (
    PARTLY,
    SOUND,
    age_of,
    counted,
    print_json,
    print_note,
    print_result,
    print_table,
    progress_bar,
    shown_bytes,
    shown_time,
    watch,
)
from pybk.backend import Replicated
from pybk.errors import NoSuchLedgerError

if TYPE_CHECKING:
    from pybk.manager.ledger_manager import LedgerManager
    from pybk.metadata.settings import ClusterSettings
    from pybk.operations.cluster_admin import ClusterAdmin
    from pybk.operations.cluster_checks import ClusterStatus

_ERROR_COLUMN: Final = 60
_QUEUED: Final = "queued"


def _list(parsed: argparse.Namespace) -> int:
    with admin_of(parsed) as admin:
        return watch(parsed, lambda: _print_list(parsed, admin))


def _print_list(parsed: argparse.Namespace, admin: ClusterAdmin) -> int:
    marks = [
        mark
        for mark in admin.repairs()
        if parsed.reason in (None, mark.reason) and not (parsed.stuck and mark.state == _QUEUED)
    ]
    status = admin.status()
    if parsed.json:
        held = {"ledgers": status.held, "because": list(status.held_because)}
        print_json({"repairs": [mark_as_json(mark) for mark in marks], "held": held})
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
    _print_held(status)
    for text in _waits(status):
        print_note(parsed, f"note: {text}")  # what waits because of it has no mark yet
    return SOUND


def _print_held(status: ClusterStatus) -> None:
    """Print how many ledgers lack copies and are not queued, and why."""
    if status.held:
        print(f"{counted(status.held, 'ledger')} with too few copies, not queued yet:")
        for text in status.held_because:
            print(f"  {text}")


def _waits(status: ClusterStatus) -> list[str]:
    """Return why repairs wait."""
    codes = ("repairs_paused", "no_auditor")
    return [reason.text for reason in status.reasons if reason.code.startswith("hold_") or reason.code in codes]


def _status(parsed: argparse.Namespace) -> int:
    with admin_of(parsed) as admin:
        return watch(parsed, lambda: _print_status(parsed, admin))


def _print_status(parsed: argparse.Namespace, admin: ClusterAdmin) -> int:
    marks, status, settings = admin.repairs(), admin.status(), admin.settings()
    counts = Counter((str(mark.reason), str(mark.state)) for mark in marks)
    waits = _waits(status)
    if parsed.json:
        rows = [{"reason": reason, "state": state, "marks": count} for (reason, state), count in counts.items()]
        values = {"queued_bytes": status.queued_bytes, "rate": status.rate, "eta_s": status.eta_s}
        paused = {"paused_until_ns": settings.repair.paused_until_ns, "paused_by": settings.repair.paused_by}
        losses = list(settings.repair.accepted_losses)
        held = {"ledgers": status.held, "because": list(status.held_because)}
        print_json({"marks": rows, **values, "waits": waits, "held": held, **paused, "accepted_losses": losses})
    else:
        print_table([(*key, count) for key, count in sorted(counts.items())], ("reason", "state", "marks"))
        eta = "" if status.eta_s is None else f", done in {status.eta_s:.0f} s"
        print(f"to copy: {shown_bytes(status.queued_bytes)} at {shown_bytes(status.rate)}/s{eta}")
        _print_held(status)
        for text in waits:
            print(f"repairs wait: {text}")
        if settings.repair.accepted_losses:
            print(f"accepted losses: {', '.join(settings.repair.accepted_losses)}")
    return SOUND


def _run(parsed: argparse.Namespace) -> int:
    with manager_of(parsed) as manager:
        if parsed.dry_run:
            return _print_plan(parsed, manager)
        what = parsed.ledger if parsed.bookie is None else parsed.bookie
        done = _replicate_all(parsed, manager) if parsed.all else manager.replicate(what)
    if parsed.json:
        print_json(done._asdict())
    else:
        print(f"{counted(done.ledgers, 'ledger')} examined, {counted(done.fragments, 'fragment')} completed")
        for text in done.left:
            print(f"left: {text}", file=sys.stderr)
    return PARTLY if done.left else SOUND


def _replicate_all(parsed: argparse.Namespace, manager: LedgerManager) -> Replicated:
    """Copy what the ledgers that are marked lack."""
    ids = list(dict.fromkeys(mark.ledger_id for mark in operations.ClusterAdmin(manager).repairs()))
    fragments, left = 0, list[str]()
    with progress_bar(parsed, "repair", "ledgers") as show:
        for place, ledger_id in enumerate(ids, 1):
            try:
                done = manager.replicate(ledger_id)
            except NoSuchLedgerError:
                continue  # it was deleted meanwhile
            fragments += done.fragments
            left += done.left
            show(place, len(ids))
    return Replicated(len(ids), fragments, tuple(left))


def _print_plan(parsed: argparse.Namespace, manager: LedgerManager) -> int:
    """Show what a run would look at: about how many bytes, as no bookie is asked what it has."""
    admin = operations.ClusterAdmin(manager)
    if parsed.bookie is not None:
        progress = admin.drain_progress(parsed.bookie)
        ledgers, size = progress.ledgers_left, progress.bytes_left
    else:
        marks = [mark for mark in admin.repairs() if parsed.all or mark.ledger_id == parsed.ledger]
        ledgers = len({mark.ledger_id for mark in marks}) if parsed.all else 1
        size = sum(mark.size_bytes for mark in marks)
    return print_result(
        parsed,
        {"ledgers": ledgers, "bytes": size, "dry_run": True},
        f"{counted(ledgers, 'ledger')} would be examined, and about {shown_bytes(size)} copied",
    )


def _losses(parsed: argparse.Namespace) -> int:
    with admin_of(parsed) as admin:
        who = person_of(parsed)
        settings = admin.withdraw_losses(parsed.withdraw, who) if parsed.withdraw else admin.settings()
    accepted = settings.repair.accepted_losses
    return print_result(
        parsed, {"accepted_losses": list(accepted)}, "\n".join(accepted) or "the loss of no bookie is accepted"
    )


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


VERBS: Final[Verbs] = {
    "list": _list,
    "status": _status,
    "run": _run,
    "pause": _pause,
    "resume": _resume,
    "losses": _losses,
}
"""The verbs of ``pybk repair``."""

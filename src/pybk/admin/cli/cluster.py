"""The command ``pybk cluster``: the state of a cluster, its rebalance, its settings and its upgrade."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

from pybk.admin.cli import cluster_making, cluster_settings
from pybk.admin.cli.argparse_rows import WATCH_SECONDS
from pybk.admin.cli.check_verb import check
from pybk.admin.cli.clusters import admin_of, mark_as_json
from pybk.admin.cli.command_parser import Verbs
from pybk.admin.cli.output import (
    DAMAGED,
    REFUSED,
    SOUND,
    coloured,
    counted,
    print_json,
    print_result,
    print_table,
    shown_bytes,
    shown_time,
    watch,
)
from pybk.admin.cli.probing import probe
from pybk.admin.cli.upgrading import upgrade
from pybk.admin.shown_text import shown_text
from pybk.healing.repair_report import COPIES
from pybk.values import listed

if TYPE_CHECKING:
    from pybk.healing.rebalance import RebalancePlan
    from pybk.operations.cluster_checks import ClusterStatus, RebalanceProgress

_OK: Final = "ok"

_LISTED_MAX: Final = 10
"""Ledgers that one line of the status names; JSON has all."""


# ---- status --------------------------------------------------------------------------------------------------------


def _status(parsed: argparse.Namespace) -> int:
    if parsed.exit_when_healthy and parsed.watch is None:
        parsed.watch = WATCH_SECONDS
    with admin_of(parsed) as admin:
        return watch(
            parsed,
            lambda: _print_status(parsed, admin.status()),
            lambda status: bool(parsed.exit_when_healthy) and status == SOUND,
        )


def _print_status(parsed: argparse.Namespace, status: ClusterStatus) -> int:
    if parsed.json:
        print_json(_as_json(status))
    else:
        _print(status)
    return SOUND if status.verdict == _OK else DAMAGED


def _as_json(status: ClusterStatus) -> dict[str, Any]:
    return {
        **{name: getattr(status, name) for name in status.__dataclass_fields__},
        "reasons": [reason._asdict() for reason in status.reasons],
    }


def _print(status: ClusterStatus) -> None:
    print(f"the cluster is {coloured(status.verdict)}")
    for reason in status.reasons:
        print(f"  {shown_text(reason.text)}")
    rows = [
        ("bookies", _counts(status.bookies) + (f"; absent: {', '.join(status.absent)}" if status.absent else "")),
        ("auditor", status.auditor or "none"),
        ("short ledgers with 0, 1, 2, more copies", ", ".join(str(status.short.get(name, 0)) for name in COPIES)),
        ("misplaced ledgers", status.misplaced),
        ("to copy", _left_to_copy(status)),
        ("paused until (UTC)", shown_time(status.paused_until_ns) or "not paused"),
    ]
    named = ((name, getattr(status, name)) for name in ("lost", "waiting", "no_target", "stuck"))
    rows += [(name.replace("_", " "), listed(ids, _LISTED_MAX)) for name, ids in named if ids]
    print_table(rows, ())


def _counts(bookies: Mapping[Any, int]) -> str:
    return ", ".join(f"{count} {state}" for state, count in sorted(bookies.items())) or "none"


def _left_to_copy(status: ClusterStatus) -> str:
    text = f"{shown_bytes(status.queued_bytes)}, {shown_bytes(status.rate)}/s"
    return text if status.eta_s is None else f"{text}, done in {status.eta_s:.0f} s"


# ---- orphans -------------------------------------------------------------------------------------------------------


def _orphans(parsed: argparse.Namespace) -> int:
    with admin_of(parsed) as admin:
        found = admin.orphans()
    if parsed.json:
        replicas = [
            {"bookie": each.bookie.bookie_id, "count": each.total, "ledgers": each.ledger_ids}
            for each in found.replicas
        ]
        lists = {name: getattr(found, name) for name in ("without_copies", "long_open", "marks")}
        print_json({"replicas": replicas, **lists})
        return SOUND
    rows = [(f"on {each.bookie.bookie_id}, without metadata", each.total, each.ledger_ids) for each in found.replicas]
    rows += [
        ("without a copy", len(found.without_copies), found.without_copies),
        ("open for more than 7 days", len(found.long_open), found.long_open),
        ("deleted, and marked", len(found.marks), found.marks),
    ]
    shown = [(what, count, ", ".join(map(str, ids[:_LISTED_MAX]))) for what, count, ids in rows if count]
    print_table(shown, ("what", "ledgers", "the first"))
    return SOUND


# ---- rebalance -----------------------------------------------------------------------------------------------------


def _rebalance(parsed: argparse.Namespace) -> int:
    with admin_of(parsed) as admin:
        if parsed.what == "status":
            return _print_rebalance(parsed, admin.rebalance_progress())
        if parsed.what == "abort":
            left = admin.abort_rebalance()
            return print_result(parsed, {"left": left}, f"{counted(left, 'move')} will not be made")
        plan = admin.plan_rebalance()
        if not parsed.json:
            _print_plan(plan)
        began = admin.apply_rebalance(plan) if parsed.what == "apply" and not plan.refused else None
    if parsed.json:
        values = {} if began is None else {"began": began.moves, "skipped": began.skipped}
        print_json({**_plan_as_json(plan), **values})
    elif began is not None:
        skipped = f", {began.skipped} left out because their ledgers have changed" if began.skipped else ""
        print(f"{counted(began.moves, 'move')} began{skipped}")
    return REFUSED if plan.refused else SOUND


def _print_plan(plan: RebalancePlan) -> None:
    print(plan.summary)
    if plan.moves:
        print()
        ways = [
            (tier, source, target, count, shown_bytes(size)) for (tier, source, target), (count, size) in plan.ways()
        ]
        print_table(ways, ("tier", "from", "to", "copies", "bytes"))
    if plan.fullness:
        print()
        rows = [
            (each.bookie.bookie_id, each.tier, shown_bytes(each.capacity), *(f"{part:.1%}" for part in each.parts))
            for each in plan.fullness
        ]
        print_table(rows, ("bookie", "tier", "capacity", "used", "copies now", "with both", "then"))


def _plan_as_json(plan: RebalancePlan) -> dict[str, Any]:
    return {
        "refused": list(plan.refused),
        "level": plan.level,
        "bytes": plan.moved_bytes,
        "all_bytes": plan.all_bytes,
        "moves": [
            {
                "ledger": each.ledger_id,
                "first_entry": each.first_entry_id,
                "from": each.source.bookie_id,
                "to": each.target.bookie_id,
                "tier": each.tier,
                "bytes": each.size_bytes,
            }
            for each in plan.moves
        ],
        "bookies": [
            {
                "bookie": each.bookie.bookie_id,
                "tier": each.tier,
                "capacity": each.capacity,
                "used": each.used,
                "before": each.before,
                "during": each.during,
                "after": each.after,
            }
            for each in plan.fullness
        ],
    }


def _print_rebalance(parsed: argparse.Namespace, progress: RebalanceProgress) -> int:
    if parsed.json:
        values = {
            "moves_left": progress.moves_left,
            "bytes_left": progress.bytes_left,
            "stuck": [mark_as_json(mark) for mark in progress.stuck],
            "absent_targets": list(progress.absent_targets),
        }
        print_json(values)
    else:
        print(f"{counted(progress.moves_left, 'move')} left, {shown_bytes(progress.bytes_left)}")
        for mark in progress.stuck:
            print(f"ledger {mark.ledger_id} is {mark.state}: {mark.error or mark.reason}")
        if progress.absent_targets:
            print(f"bookies that take no copies now: {', '.join(progress.absent_targets)}")
    return DAMAGED if progress.stuck or progress.absent_targets else SOUND


VERBS: Final[Verbs] = {
    "init": cluster_making.init,
    "probe": probe,
    "destroy": cluster_making.destroy,
    "status": _status,
    "check": check,
    "settings show": cluster_settings.show,
    "settings set": cluster_settings.change,
    "orphans": _orphans,
    "rebalance": _rebalance,
    "upgrade": upgrade,
}
"""The verbs of ``pybk cluster``."""

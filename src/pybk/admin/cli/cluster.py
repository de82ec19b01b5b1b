"""The command ``pybk cluster``: how a cluster is, and its rebalance; and what the commands over clusters share."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import Any, Final

from pybk.admin.cli.arguments import add_command, is_url, secret_needed
from pybk.admin.cli.credentials import secret_of, takes_secret
from pybk.admin.cli.output import DAMAGED, REFUSED, SOUND, counted, print_json, print_table
from pybk.cluster_admin import ClusterAdmin
from pybk.cluster_checks import ClusterStatus, ClusterVerdict, RebalanceProgress
from pybk.errors import UsageError
from pybk.healing.rebalance import RebalancePlan
from pybk.manager import LedgerManager
from pybk.metadata.underreplication import UnderReplicatedLedger

CLUSTER: Final = "the metadata URL of a cluster: zk://host:port/path, lmdb:///path"

_LISTED_MAX: Final = 10
"""Ledgers that one line of the status names; JSON has all."""


def add_cluster(commands: Any) -> None:
    """Add ``pybk cluster`` and its verbs."""
    text = "show how a cluster is, and rebalance it"
    parser = commands.add_parser("cluster", help=text, description=text, allow_abbrev=False)
    verbs = parser.add_subparsers(required=True, metavar="VERB")
    add_verb(verbs, "status", _status, "show how a cluster is and why, and its repairs; exit 1 unless it is ok")
    add_verb(verbs, "orphans", _orphans, "list replicas without metadata, and ledgers without copies")
    text = "plan which copies move to emptier bookies, and move them; exit 3 while that is refused"
    rebalance = add_verb(verbs, "rebalance", _rebalance, text)
    what = rebalance.add_mutually_exclusive_group()
    for name, text in (
        ("plan", "show what would move, and change nothing; the default"),
        ("apply", "plan, and begin the moves"),
        ("status", "show what is left; exit 1 if some of it does not proceed"),
        ("abort", "begin no further move; what was moved stays where it is"),
    ):
        what.add_argument(f"--{name}", dest="what", action="store_const", const=name, help=text)
    rebalance.set_defaults(what="plan")


def add_verb(verbs: Any, name: str, run: Callable[[argparse.Namespace], int], text: str) -> argparse.ArgumentParser:
    """Add a verb that takes the URL of a cluster, ``--json`` and the cluster's secret."""
    command = add_command(verbs, name, run, text, CLUSTER)
    takes_secret(command)
    return command


@contextmanager
def manager_of(parsed: argparse.Namespace) -> Iterator[LedgerManager]:
    """Connect to the cluster that PATH names, until the end of the block."""
    if not is_url(parsed.path):
        raise UsageError(f"{parsed.path} is no metadata URL; PATH takes {CLUSTER}")
    with secret_needed():
        manager = LedgerManager.connect(parsed.path, cluster_secret=secret_of(parsed))
    with manager:
        yield manager


@contextmanager
def admin_of(parsed: argparse.Namespace) -> Iterator[ClusterAdmin]:
    """Administer the cluster that PATH names, until the end of the block."""
    with manager_of(parsed) as manager:
        yield ClusterAdmin(manager)


def seconds_of(text: str) -> float:
    """Return the seconds that a text such as ``90``, ``30s``, ``10m``, ``2h`` or ``1d`` names."""
    unit = _UNITS.get(text[-1:])
    try:
        return float(text) if unit is None else float(text[:-1]) * unit
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r:.50} is no time; it takes 90, 30s, 10m, 2h or 1d") from None


_UNITS: Final = {"s": 1.0, "m": 60.0, "h": 3_600.0, "d": 86_400.0}


def shown_time(time_ns: int) -> str:
    """Return how tables show a time; empty for 0."""
    return "" if not time_ns else f"{datetime.fromtimestamp(time_ns // 1_000_000_000, UTC):%Y-%m-%d %H:%M:%S}"


def shown_bytes(count: float) -> str:
    """Return a number of bytes for people."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{count:.0f} B" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} TiB"


def mark_as_json(mark: UnderReplicatedLedger) -> dict[str, Any]:
    """Return a mark as JSON output has it."""
    return {
        "ledger": mark.ledger_id,
        "bookie": mark.bookie.bookie_id,
        "instance": mark.bookie.instance.hex(),
        "first_entry": mark.first_entry_id,
        "reason": mark.reason,
        "state": mark.state,
        "since_ns": mark.since_ns,
        "bytes": mark.size_bytes,
        "tries": mark.tries,
        "error": mark.error,
        "target": mark.target,
    }


# ---- status --------------------------------------------------------------------------------------------------------


def _status(parsed: argparse.Namespace) -> int:
    with admin_of(parsed) as admin:
        status = admin.status()
    if parsed.json:
        print_json(_as_json(status))
    else:
        _print(status)
    return SOUND if status.verdict is ClusterVerdict.OK else DAMAGED


def _as_json(status: ClusterStatus) -> dict[str, Any]:
    return {
        "schema": 1,
        **{name: getattr(status, name) for name in ClusterStatus.__dataclass_fields__},
        "reasons": [reason._asdict() for reason in status.reasons],
    }


def _print(status: ClusterStatus) -> None:
    print(f"the cluster is {status.verdict}")
    for reason in status.reasons:
        print(f"  {reason.text}")
    rows = [
        ("bookies", _counts(status.bookies) + (f"; absent: {', '.join(status.absent)}" if status.absent else "")),
        ("auditor", status.auditor or "none"),
        ("short ledgers with 0, 1, 2, more copies", ", ".join(str(status.short.get(name, 0)) for name in _COPIES)),
        ("misplaced ledgers", status.misplaced),
        ("to copy", _left_to_copy(status)),
        ("paused until (UTC)", shown_time(status.paused_until_ns) or "not paused"),
    ]
    for name in ("lost", "waiting", "no_target", "stuck"):
        if ids := getattr(status, name):
            more = " ..." if len(ids) > _LISTED_MAX else ""
            rows.append((name.replace("_", " "), ", ".join(map(str, ids[:_LISTED_MAX])) + more))
    print_table(rows, ())


_COPIES: Final = ("0", "1", "2", "more")


def _counts(bookies: Mapping[Any, int]) -> str:
    return ", ".join(f"{count} {state}" for state, count in sorted(bookies.items())) or "none"


def _left_to_copy(status: ClusterStatus) -> str:
    text = f"{shown_bytes(status.queued_bytes)}, {shown_bytes(status.rate)}/s"
    return text if status.eta_s is None else f"{text}, done in {status.eta_s:.0f} s"


def age_of(since_ns: int) -> str:
    """Return for how long something has been so; empty if unknown."""
    return f"{max(0.0, (time.time_ns() - since_ns) / 1e9):.0f} s" if since_ns else ""


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
            if parsed.json:
                print_json({"left": left})
            else:
                print(f"{counted(left, 'move')} will not be made")
            return SOUND
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

"""The command ``pybk cluster``: how a cluster is; and what the commands over clusters share."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import Any, Final

from pybk.admin.cli.arguments import add_command, is_url, secret_needed
from pybk.admin.cli.credentials import secret_of, takes_secret
from pybk.admin.cli.output import DAMAGED, SOUND, print_json, print_table
from pybk.cluster_admin import ClusterAdmin
from pybk.cluster_checks import ClusterStatus, ClusterVerdict
from pybk.errors import UsageError
from pybk.manager import LedgerManager

CLUSTER: Final = "the metadata URL of a cluster: zk://host:port/path, lmdb:///path"

_LISTED_MAX: Final = 10
"""Ledgers that one line of the status names; JSON has all."""


def add_cluster(commands: Any) -> None:
    """Add ``pybk cluster`` and its verbs."""
    text = "show how a cluster is"
    parser = commands.add_parser("cluster", help=text, description=text, allow_abbrev=False)
    verbs = parser.add_subparsers(required=True, metavar="VERB")
    add_verb(verbs, "status", _status, "show how a cluster is and why, and its repairs; exit 1 unless it is ok")


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
    }


def _print(status: ClusterStatus) -> None:
    print(f"the cluster is {status.verdict}")
    for reason in status.reasons:
        print(f"  {reason}")
    rows = [
        ("bookies", _counts(status.bookies) + (f"; absent: {', '.join(status.absent)}" if status.absent else "")),
        ("auditor", status.auditor or "none"),
        ("ledgers with 0, 1, 2, more copies", ", ".join(str(status.short.get(name, 0)) for name in _COPIES)),
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

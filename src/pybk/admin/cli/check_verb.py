"""The verb ``pybk cluster check``: one line for each check, and an exit status that monitoring understands."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import TYPE_CHECKING, Final

from pybk.admin.cli.clusters import admin_of
from pybk.admin.cli.output import coloured, print_json, shown_bytes
from pybk.errors import UsageError

if TYPE_CHECKING:
    from pybk.operations.cluster_checks import ClusterStatus

_LEVELS: Final = ("OK", "WARN", "CRIT")
_COLOURS: Final = ("ok", "warn", "bad")

_Found = tuple[int, str, float]
"""The place in ``_LEVELS``, a text, and the value that is compared."""


def _health(status: ClusterStatus) -> _Found:
    texts = "; ".join(reason.text for reason in status.reasons) or "nothing needs attention"
    return _COLOURS.index(status.verdict), texts, len(status.reasons)


def _auditor(status: ClusterStatus) -> _Found:
    silence = next((reason.text for reason in status.reasons if reason.code == "auditor_silent"), "")
    if silence:
        return 2, silence, 0
    return (0, f"{status.auditor} leads", 1) if status.auditor else (2, "no auditor reports", 0)


def _bookies(status: ClusterStatus) -> _Found:
    absent = len(status.absent)
    return min(absent, 1), f"absent: {', '.join(status.absent)}" if absent else "all bookies run", absent


def _lost(status: ClusterStatus) -> _Found:
    count = max(len(status.lost), status.short.get("0", 0))
    return (2 if count else 0), "ledgers with entries that no running bookie has", count


def _one_copy(status: ClusterStatus) -> _Found:
    count = status.short.get("1", 0)
    return (2 if count else 0), "ledgers with one copy of an entry left", count


def _repairs(status: ClusterStatus) -> _Found:
    stuck = len(status.stuck) + len(status.no_target)
    waits = bool(status.holds) or bool(status.paused_until_ns)
    text = f"{shown_bytes(status.queued_bytes)} to copy, {stuck} ledgers stuck or without a target"
    held = "; ".join(status.holds) or "paused"
    return (2 if stuck else 1 if waits else 0), text + (f"; {held}" if waits else ""), stuck


CHECKS: Final[dict[str, Callable[[ClusterStatus], _Found]]] = {
    "health": _health,
    "auditor": _auditor,
    "bookies": _bookies,
    "lost": _lost,
    "one-copy": _one_copy,
    "repairs": _repairs,
}
"""The checks by name."""


def check(parsed: argparse.Namespace) -> int:
    """Run the command."""
    if unknown := [name for name in parsed.names if name not in CHECKS]:
        raise UsageError(f"there is no check {unknown[0]!r:.50}; there are {', '.join(CHECKS)}")
    with admin_of(parsed) as admin:
        status = admin.status()
    found = {name: CHECKS[name](status) for name in parsed.names or CHECKS}
    if parsed.json:
        rows = [
            {"check": name, "level": _LEVELS[level], "text": text, "value": value}
            for name, (level, text, value) in found.items()
        ]
        print_json({"checks": rows})
    else:
        for name, (level, text, value) in found.items():
            shown = coloured(_COLOURS[level]).replace(_COLOURS[level], _LEVELS[level])
            print(f"{shown} {name}: {' '.join(text.split())} | {value:g}")
    return max(level for level, _, _ in found.values())

"""The command ``pybk scrub``: check stored entries, and show the progress of these checks."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final

from pybk.admin.cli.bookie_parts import BookieParts, Replacements
from pybk.admin.cli.clusters import admin_of, opened_manager
from pybk.admin.cli.command_parser import Verbs, is_url
from pybk.admin.cli.output import (
    DAMAGED,
    SOUND,
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
from pybk.errors import UsageError
from pybk.healing.scrub_schedule import ScrubKind

if TYPE_CHECKING:
    from pybk.healing.scrub import ScrubStatus
    from pybk.storage.repair.record_check import DamagedEntries


def _scrub(parsed: argparse.Namespace) -> int:
    if not is_url(parsed.path):
        return _scrub_store(parsed)
    if parsed.ledger is not None:
        return _scrub_ledger(parsed)
    with admin_of(parsed) as admin:
        settings = admin.scrub(ScrubKind(parsed.kind))
    return print_result(
        parsed,
        settings.scrub.as_dict(),
        f"all bookies are asked; `pybk scrub status {parsed.path}` shows how far they are",
    )


def _scrub_store(parsed: argparse.Namespace) -> int:
    if parsed.ledger is not None or parsed.kind != ScrubKind.DEEP:
        raise UsageError("--ledger and --kind are for clusters; of a directory, every checksum is checked")
    with opened_manager(parsed, read_only=True) as manager, progress_bar(parsed, "scrub") as progress:
        report = manager.scrub(progress=progress)
        whole = BookieParts.of_open(manager, {each.ledger_id for each in report.damaged})
    replacements = Replacements(parsed.path) if whole else None
    needed = [each for each in report.damaged if not _is_replaced(each, whole, replacements)]
    replaced = len(report.damaged) - len(needed)
    parts = [_part_of(whole, each) for each in needed]
    if parsed.json:
        named = [
            {**each._asdict(), **({} if part is None else dict(zip(_PART, part, strict=True)))}
            for each, part in zip(needed, parts, strict=True)
        ]
        print_json({**report._asdict(), "damaged": named, "replaced": replaced})
    elif any(parts):
        rows = [(*(part or ("",) * len(_PART)), each.problem) for each, part in zip(needed, parts, strict=True)]
        print_table(rows, ("part of ledger", "first entry", "last", "problem"))
        print_note(
            parsed,
            "note: a bookie's store has parts of the cluster's ledgers: `pybk scrub status URL` shows what is still "
            "needed of these",
        )
    elif needed:
        print_table(needed, ("ledger", "first entry", "last", "problem"))
    if not parsed.json:
        print(
            f"{counted(len(needed), 'damaged record')} in {counted(report.ledgers, 'ledger')}, "
            f"{shown_bytes(report.read_bytes)} were read"
            + (f"; {counted(replaced, 'damaged record')} more, whose entries were copied from a peer" * bool(replaced))
        )
    return DAMAGED if needed else SOUND


def _is_replaced(damaged: DamagedEntries, parts: BookieParts, replacements: Replacements | None) -> bool:
    """Return whether a bookie's store has newer copies of damaged entries, which are read instead."""
    part = parts.get(damaged.ledger_id)
    if part is None or replacements is None:
        return False
    return replacements.have(damaged.ledger_id, part, damaged.first_entry_id, damaged.last_entry_id)


_PART: Final = ("of_ledger", "of_first_entry", "of_last_entry")


def _part_of(parts: BookieParts, damaged: DamagedEntries) -> tuple[int, int, int] | None:
    """Return the replicated ledger and its entries that damaged entries of a bookie's store are; None for others."""
    part = parts.get(damaged.ledger_id)
    return None if part is None else (part.ledger_id, *part.entries(damaged.first_entry_id, damaged.last_entry_id))


def _scrub_ledger(parsed: argparse.Namespace) -> int:
    if parsed.kind != ScrubKind.DEEP:
        raise UsageError(f"--kind {parsed.kind} is for all ledgers; of one ledger, every checksum is checked")
    with admin_of(parsed) as admin:
        found = admin.scrub_ledger(parsed.ledger)
    rows = [
        (each.bookie.bookie_id, each.first_entry_id, *map(_spans, each[2:5]), "yes" if each.silent else "")
        for each in found.problems
    ]
    names = ("bookie", "fragment", "missing", "damaged", "unknown", "silent")
    if parsed.json:
        problems = [dict(zip(names, row, strict=True)) for row in rows]
        print_json({**found._asdict(), "problems": problems})
    else:
        if rows:
            print_table(rows, names)
        print(f"{counted(found.copies, 'sound copy', 'sound copies')} of entries, {shown_bytes(found.read_bytes)}")
    return DAMAGED if rows else SOUND


def _spans(spans: Sequence[object]) -> str:
    return ", ".join(map(str, spans))


def _status(parsed: argparse.Namespace) -> int:
    return watch(parsed, lambda: _look(parsed))


def _look(parsed: argparse.Namespace) -> int:
    if is_url(parsed.path):
        with admin_of(parsed) as admin:
            found = admin.scrub_status()
    else:
        with opened_manager(parsed, read_only=True) as manager:
            found = (manager.scrub_status(),)
    damaged = [(status.name, *each) for status in found for each in status.damaged]
    if parsed.json:
        print_json({"scrubs": [_as_json(status) for status in found]})
    else:
        rows = [
            (status.name, kind.value, shown_time(each.oldest_ns), f"{each.asked:.0%}" if each.asked else "", _way(each))
            for status in found
            for kind, each in sorted(status.kinds.items())
        ]
        print_table(rows, ("of", "kind", "all checked since (UTC)", "asked and left", "under way"))
        for status in found:
            if not status.kinds:
                print_note(parsed, f"{status.name} has noted nothing yet")
        if damaged:
            print_table(damaged, ("of", "ledger", "first entry", "last", "problem"))
    return DAMAGED if damaged else SOUND


def _way(progress: Any) -> str:
    return "yes" if progress.under_way else ""


def _as_json(status: ScrubStatus) -> dict[str, Any]:
    return {
        "of": status.name,
        "noted_ns": status.noted_ns,
        "kinds": {
            kind.value: {"oldest_ns": each.oldest_ns, "asked": each.asked, "under_way": each.under_way}
            for kind, each in status.kinds.items()
        },
        "damaged": [each._asdict() for each in status.damaged],
    }


VERBS: Final[Verbs] = {"run": _scrub, "status": _status}
"""The verbs of ``pybk scrub``."""

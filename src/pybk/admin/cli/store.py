"""The command ``pybk store``: shows the contents of a store's files, checks them and mends them."""

from __future__ import annotations

import argparse
import os
from collections import Counter
from typing import TYPE_CHECKING, Any, Final

from pybk import operations
from pybk.admin.cli.bookie_parts import BookieParts, Part, is_bookie
from pybk.admin.cli.command_parser import Verbs, directory_of
from pybk.admin.cli.given_secrets import passwords_of
from pybk.admin.cli.output import (
    DAMAGED,
    LAST_COLUMN,
    SOUND,
    counted,
    print_json,
    print_json_line,
    print_note,
    print_table,
    progress_bar,
)
from pybk.admin.cli.upgrading import upgrade
from pybk.admin.dump import dump_store
from pybk.admin.shown_text import shown_text
from pybk.credentials import PASSWORD, SECRET
from pybk.flags import StorageHint

if TYPE_CHECKING:
    from pybk.storage.repair.rebuild import RebuildReport
    from pybk.storage.repair.verify import VerifyProblem, VerifyReport


def _dump(parsed: argparse.Namespace) -> int:
    for row in dump_store(directory_of(parsed)):
        if parsed.json:
            print_json_line(row)
        else:
            print(shown_text("  ".join(f"{name}={value}" for name, value in row.items())))
    return SOUND


def _files(parsed: argparse.Namespace) -> int:
    found = [row for row in dump_store(directory_of(parsed), contents=False) if row["what"] in ("directory", "file")]
    if parsed.json:
        print_json({"files": found})
    else:
        names = ("what", "kind", "tier", "bytes", "path")
        print_table([[row.get(name, "") for name in names] for row in found], names)
    return SOUND


def _status(parsed: argparse.Namespace) -> int:
    rows = list(dump_store(directory_of(parsed), contents=False))
    wanted = ("store", "catalog", "ledger", "file", "problem")
    of = {what: [row for row in rows if row["what"] == what] for what in wanted}
    kinds = Counter(str(row["kind"]) for row in of["file"])
    values: dict[str, Any] = {
        "store": of["store"][0]["store"],
        "durable_lsn": of["store"][0]["durable_lsn"],
        "checkpointed_ledgers": len(of["ledger"]),
        "open_ledgers": sum(row["state"] == "open" for row in of["ledger"]),
        "files": dict(kinds),
        "file_bytes": sum(int(str(row["bytes"])) for row in of["file"]),
        "problems": [row["message"] for row in of["problem"]],
    }
    values |= {f"checkpoint_{key}": value for key, value in (of["catalog"] or [{}])[0].items() if key != "what"}
    if parsed.json:
        print_json(values)
    else:
        shown = {**values, "files": ", ".join(f"{count} {kind}" for kind, count in sorted(kinds.items()))}
        shown["problems"] = "; ".join(map(str, values["problems"])) or "none"
        print_table([(name.replace("_", " "), value) for name, value in shown.items()], ())
    return DAMAGED if values["problems"] else SOUND


# ---- verify ------------------------------------------------------------------------------------------------------


def _verify(parsed: argparse.Namespace) -> int:
    directory = directory_of(parsed)
    with progress_bar(parsed, "verify") as progress:
        found = operations.verify(directory, passwords=passwords_of(parsed), progress=progress)
    status = DAMAGED if found.problems or (parsed.strict and not found.complete) else SOUND
    parts = BookieParts.of(directory, {each.ledger_id for each in found.problems if each.ledger_id is not None})
    if parsed.json:
        problems = [_problem_as_json(problem, parts) for problem in found.problems]
        print_json({**found._asdict(), "problems": problems, "sound": not problems, "complete": found.complete})
        return status
    if found.problems:
        headers = ("file", "offset", "part of ledger" if parts else "ledger", "entries", "problem")
        rows = (_problem_row(problem, parsed.path, parts) for problem in found.problems)
        print_table(rows, headers, last_column=LAST_COLUMN)
    if parts:
        print_note(
            parsed,
            "note: this is a bookie's store, which has parts of the cluster's ledgers. While the bookie runs, it finds "
            "damage by its scrubs and copies what is needed from its peers; `pybk scrub status URL` shows what is left",
        )
    print(_bookie_summary(found) if is_bookie(directory) else _summary(found))
    return status


def _problem_as_json(problem: VerifyProblem, parts: BookieParts) -> dict[str, Any]:
    part = parts.get(problem.ledger_id)
    if part is None:
        return problem._asdict()
    first, last = _entries_of(problem, part)
    found = {
        **problem._asdict(),
        "message": parts.named(problem.message),
        "ledger_id": None,
        "of_ledger": part.ledger_id,
    }
    return {**found, "first_entry_id": first, "last_entry_id": last}


def _entries_of(problem: VerifyProblem, part: Part | None) -> tuple[int | None, int | None]:
    if problem.first_entry_id is None or problem.last_entry_id is None or part is None:
        return problem.first_entry_id, problem.last_entry_id
    return part.entries(problem.first_entry_id, problem.last_entry_id)


def _problem_row(problem: VerifyProblem, root: str, parts: BookieParts) -> tuple[Any, ...]:
    part = parts.get(problem.ledger_id)
    first, last = _entries_of(problem, part)
    entries = "" if first is None else f"{first} to {last}"
    numbers = (problem.offset, problem.ledger_id if part is None else part.ledger_id)
    where = "" if problem.path is None else os.path.relpath(problem.path, root)
    shown = ("" if number is None else number for number in numbers)
    return (where, *shown, entries, parts.named(problem.message))


def _counted(found: VerifyReport, what: str, plural: str) -> str:
    return (
        f"{len(found.problems) or 'no'} problem{'' if len(found.problems) == 1 else 's'} in "
        f"{counted(found.ledgers, what, plural)}, {counted(found.entries, 'entry', 'entries')}, "
        f"{counted(found.files, 'file')}; the log was checked up to LSN {found.durable_lsn}, its durable watermark"
    )


def _bookie_summary(found: VerifyReport) -> str:
    """Return the summary of a bookie's store, whose ledgers no password opens, and which have no seals."""
    counts = _counted(found, "part of a ledger", "parts of ledgers")
    return f"{counts}; the checks are of checksums: readers, who have the ledgers' keys, check the digests"


def _summary(found: VerifyReport) -> str:
    text = _counted(found, "ledger", "ledgers")
    if found.unauthenticated:
        text += (
            f"; the entries of {counted(found.unauthenticated, 'ledger')} were checked by checksum only, their digests "
            f"need the secret or password: --passwords, --secret-file, --password-file, {SECRET} or {PASSWORD}"
        )
    if found.seals_unchecked:
        text += (
            f"; the seals of {counted(found.seals_unchecked, 'ledger')} were not checked, because their passwords are "
            "not known"
        )
    if found.unsealed:
        text += f"; {counted(found.unsealed, 'closed ledger')} without a seal, `pybk ledger reseal` makes it"
    return text


# ---- rebuild-index -----------------------------------------------------------------------------------------------


def tier_directory(text: str) -> tuple[StorageHint, str]:
    """Return the tier and the directory that a text such as ``hdd=/mnt/hdd`` names."""
    name, _, path = text.partition("=")
    if not path or name not in set(StorageHint):
        names = ", ".join(hint.value for hint in StorageHint)
        raise argparse.ArgumentTypeError(
            f"{text!r:.100} is not a tier with its directory: write TIER=DIRECTORY, with TIER one of {names}"
        )
    return StorageHint(name), path


def _rebuild_index(parsed: argparse.Namespace) -> int:
    with progress_bar(parsed, "rebuild-index") as progress:
        tiers: dict[StorageHint, list[str]] = {}
        for tier, path in parsed.tiers:
            tiers.setdefault(tier, []).append(path)
        found = operations.rebuild_index(
            directory_of(parsed), accept_loss=parsed.accept_loss, tiers=tiers or None, progress=progress
        )
    status = SOUND if found.made else DAMAGED
    if parsed.json:
        print_json({**found._asdict(), "lost": [one._asdict() for one in found.lost]})
        return status
    for problem in found.problems:
        print(problem)
    if found.lost:
        print_table(found.lost, ("ledger", "first entry missing", "last"), last_column=LAST_COLUMN)
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


VERBS: Final[Verbs] = {
    "dump": _dump,
    "files": _files,
    "status": _status,
    "verify": _verify,
    "rebuild-index": _rebuild_index,
    "upgrade": upgrade,
}
"""The verbs of ``pybk store``."""

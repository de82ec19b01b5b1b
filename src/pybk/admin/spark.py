"""The commands ``pybk spark …``: jobs over ledgers on the executors of Apache Spark. See ``docs/spark.md``."""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, Final

from tabulate import tabulate

from pybk.admin.counts import counted
from pybk.admin.credentials import (
    password_of,
    passwords_of,
    secret_of,
    takes_password,
    takes_passwords,
    takes_secret,
)
from pybk.credentials import Secret
from pybk.errors import UsageError
from pybk.flags import StorageHint

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from pybk.spark.jobs.verify import Replica, Verified

SOUND: Final = 0
PROBLEMS: Final = 1
USAGE: Final = 2

_PLACE: Final = "the metadata URL of a cluster: zk://host:port/path, lmdb:///path"
_EITHER: Final = f"the directory of a store, or {_PLACE}"
_SPANS_SHOWN: Final = 5
_ORPHAN_AGE_S: Final = 86_400.0
_AGES: Final = {"s": 1, "m": 60, "h": 3600, "d": 86_400}
_SIZES: Final = {"": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30, "t": 1 << 40}


def add_spark(commands: Any) -> None:
    """Add ``spark`` and its jobs to the commands; nothing of Spark is imported before one runs."""
    text = "run a job over ledgers on the executors of Apache Spark; needs pip install 'pybk[spark]'"
    jobs = commands.add_parser("spark", help=text, description=text).add_subparsers(required=True, metavar="JOB")

    def add(name: str, job: Any, text: str, path: str) -> argparse.ArgumentParser:
        command: argparse.ArgumentParser = jobs.add_parser(name, help=text, description=text, allow_abbrev=False)
        command.add_argument("path", metavar="PATH", help=path)
        command.add_argument("--json", action="store_true", help="print JSON")
        command.add_argument("--quiet", action="store_true", help="show no progress")
        command.add_argument(
            "--master", metavar="URL", help="Spark's master; default: what spark-submit says, or all cores here"
        )
        takes_password(command)
        takes_secret(command)
        command.set_defaults(run=_run, job=job, name=name)
        return command

    def choosing(command: argparse.ArgumentParser) -> argparse.ArgumentParser:
        command.add_argument("--ledgers", metavar="IDS", type=_ids, help="only these, such as 3,5,7-9")
        command.add_argument("--type", metavar="TYPE", help="only ledgers of this type")
        return command

    verify = choosing(add("verify", _verify, "check every entry on every bookie that should have it", _EITHER))
    takes_passwords(verify)
    verify.add_argument("--repair", action="store_true", help="copy what is not sound from replicas that are")
    _add_tier(choosing(add("tier", _tier, "move closed ledgers to a tier by policy", _PLACE)))
    export = choosing(add("export", _export, "write ledgers to Parquet files", _EITHER))
    export.add_argument("directory", metavar="DIRECTORY", help="where to, as Spark names it")
    export.add_argument("--overwrite", action="store_true", help="replace what is there")
    export.add_argument("--open-too", action="store_true", help="also ledgers that are not closed, as far as they are")
    importing = add("import", _import, "make ledgers of what was exported, each once", _PLACE)
    importing.add_argument("directory", metavar="DIRECTORY", help="where the export is, as Spark names it")
    _takes_quorums(importing)
    choosing(add("inventory", _inventory, "say what there is, and what is under-replicated", _EITHER))
    copy = choosing(add("copy", _copy, "copy ledgers to another cluster; what is there is left", _EITHER))
    copy.add_argument("target", metavar="TARGET", help="the metadata URL of the other cluster")
    copy.add_argument("--target-secret-file", metavar="FILE", help="holds the other cluster's secret")
    copy.add_argument("--open-too", action="store_true", help="also ledgers that are not closed, as far as they are")
    _takes_quorums(copy)
    _add_collect(jobs)


def _add_collect(jobs: Any) -> None:
    """Add the one that runs in this process alone, and needs no Spark."""
    text = "delete what writes from Spark, imports and copies left and never committed"
    collect = jobs.add_parser("collect", help=text, description=text, allow_abbrev=False)
    collect.add_argument("path", metavar="PATH", help=_PLACE)
    collect.add_argument("--json", action="store_true", help="print JSON")
    collect.add_argument(
        "--older-than",
        metavar="AGE",
        type=_age,
        default=_ORPHAN_AGE_S,
        help="only ledgers created longer ago: 90s, 12h, 30d; default: 1d. A write that takes longer is refused then",
    )
    takes_password(collect)
    takes_secret(collect)
    collect.set_defaults(run=_collect)


def _add_tier(tier: argparse.ArgumentParser) -> None:
    tiers = [hint.value for hint in StorageHint]
    tier.add_argument("target", metavar="TIER", choices=tiers, help=f"one of {', '.join(tiers)}")
    tier.add_argument("--hint", choices=tiers, help="only ledgers created with this hint")
    tier.add_argument("--older-than", metavar="AGE", type=_age, help="only those created longer ago: 90s, 12h, 30d")
    tier.add_argument("--larger-than", metavar="SIZE", type=_size, help="only those of more payload bytes: 500m, 2g")
    tier.add_argument("--dry-run", action="store_true", help="only say which they are")


def _takes_quorums(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--quorums",
        metavar="E,W,A",
        type=_quorums,
        help="ensemble size, write quorum and ack quorum of the new ledgers; default: those of the old ones",
    )


# ---- arguments ---------------------------------------------------------------------------------------------------


def _ids(text: str) -> list[int]:
    """Return ledger ids of ``3,5,7-9``."""
    found: list[int] = []
    for part in text.split(","):
        low, _, high = part.partition("-")
        if not re.fullmatch(r"\d{1,18}(-\d{1,18})?", part):
            raise argparse.ArgumentTypeError(f"{text!r:.100} names no ledgers; write 3,5,7-9")
        if int(high or low) - int(low) > 1_000_000:
            raise argparse.ArgumentTypeError(f"{part} names more than a million ledgers; use --type")
        found += range(int(low), int(high or low) + 1)
    return found


def _age(text: str) -> float:
    found = re.fullmatch(r"(\d{1,9})([smhd])", text)
    if found is None:
        raise argparse.ArgumentTypeError(f"{text!r:.100} is no age; write 90s, 15m, 12h or 30d")
    return float(int(found[1]) * _AGES[found[2]])


def _size(text: str) -> int:
    found = re.fullmatch(r"(\d{1,15})([kmgt]?)", text.lower())
    if found is None:
        raise argparse.ArgumentTypeError(f"{text!r:.100} is no size; write bytes, or 500m, 2g")
    return int(found[1]) * _SIZES[found[2]]


def _quorums(text: str) -> tuple[int, int, int]:
    found = re.fullmatch(r"(\d{1,3}),(\d{1,3}),(\d{1,3})", text)
    if found is None:
        raise argparse.ArgumentTypeError(f"{text!r:.100} are no quorums; write 3,3,2")
    return int(found[1]), int(found[2]), int(found[3])


def _where(parsed: argparse.Namespace) -> dict[str, Any]:
    """Return the arguments that all jobs take."""
    return {"cluster_secret": secret_of(parsed), "password": password_of(parsed), "quiet": parsed.quiet or parsed.json}


def _which(parsed: argparse.Namespace) -> dict[str, Any]:
    """Return the arguments that say which ledgers."""
    return {"ledgers": parsed.ledgers, "ledger_type": parsed.type}


# ---- running -----------------------------------------------------------------------------------------------------


def _run(parsed: argparse.Namespace) -> int:
    """Run a job; return the exit status."""
    with _spark_needed():
        from pybk.spark.jobs.session import failure, session
    with session(f"pybk {parsed.name}", parsed.master) as spark:
        try:
            status: int = parsed.job(spark, parsed)
        except Exception as error:
            reason = failure(error)
            if reason is None:
                raise
            print(f"pybk: {reason}", file=sys.stderr)
            return PROBLEMS
    return status


@contextmanager
def _spark_needed() -> Iterator[None]:
    """Say what to install to whoever has no Spark."""
    try:
        yield
    except ModuleNotFoundError as error:
        if (error.name or "").split(".")[0] not in ("pyspark", "py4j", "pyarrow"):
            raise
        raise UsageError(f"{error.name} is not installed: pip install 'pybk[spark]'") from error


def _print_json(content: Any) -> None:
    print(json.dumps(content, indent=2, sort_keys=True, default=str))


def _table(rows: Iterable[Sequence[Any]], headers: Sequence[str]) -> None:
    print(tabulate(rows, headers=headers, disable_numparse=True, stralign="left"))


def _numbers(ledgers: Sequence[int]) -> str:
    shown = ", ".join(map(str, ledgers[:10]))
    return f"{len(ledgers)} ({shown}{', …' if len(ledgers) > 10 else ''})"


def _left_out(
    *, not_opened: Sequence[int] = (), still_open: Sequence[int] = (), failed: Sequence[tuple[int, str]] = ()
) -> None:
    """Say what a job could not do."""
    if not_opened:
        print(f"not opened, as the password is another: {_numbers(not_opened)}")
    if still_open:
        print(f"left out, as they are not closed: {_numbers(still_open)}")
    for ledger_id, reason in failed:
        print(f"ledger {ledger_id}: {' '.join(reason.split())}")


def _collect(parsed: argparse.Namespace) -> int:
    """Collect orphans; return the exit status."""
    from pybk.spark.sink.manifest import collect

    found = collect(
        parsed.path, cluster_secret=secret_of(parsed), password=password_of(parsed), older_than=parsed.older_than
    )
    if parsed.json:
        _print_json(found)
    else:
        if found:
            _table(((app_id, _numbers(ledgers)) for app_id, ledgers in found.items()), ("sink", "deleted ledgers"))
        print(f"{sum(map(len, found.values()))} ledgers were deleted")
    return SOUND


# ---- the jobs ----------------------------------------------------------------------------------------------------


def _verify(spark: SparkSession, parsed: argparse.Namespace) -> int:
    from pybk.spark.jobs.verify import verify

    found = verify(
        spark,
        parsed.path,
        **_where(parsed),
        **_which(parsed),
        passwords=passwords_of(parsed),
        repair=parsed.repair,
    )
    if parsed.json:
        problems = list(map(_problem, found.problems))
        _print_json({**asdict(found), "problems": problems, "sound": found.sound, "complete": found.complete})
    else:
        if found.problems:
            headers = ("ledger", "fragment", "bookie", "missing", "damaged", "unknown", "")
            _table(map(_problem_row, found.problems), headers)
        for ledger_id, text in found.ledger_problems:
            print(f"ledger {ledger_id}: {' '.join(text.split()).removeprefix(f'ledger {ledger_id}: ')}")
        for reason in found.left:
            print(reason)
        _left_out(not_opened=found.not_opened)
        print(_summary(found))
    return SOUND if found.sound and (found.complete or not parsed.strict) else PROBLEMS


def _problem(replica: Replica) -> dict[str, Any]:
    """Return a replica that is not sound, for JSON."""
    return {
        "ledger": replica.ledger_id,
        "first_entry": replica.first_entry_id,
        "last_entry": replica.last_entry_id,
        "bookie": None if replica.bookie is None else replica.bookie.bookie_id,
        "silent": replica.silent,
        "missing": [tuple(span) for span in replica.missing],
        "damaged": [tuple(span) for span in replica.damaged],
        "unknown": [tuple(span) for span in replica.unknown],
    }


def _problem_row(replica: Replica) -> tuple[Any, ...]:
    spans = (
        ", ".join(map(str, each[:_SPANS_SHOWN])) + (", …" if len(each) > _SPANS_SHOWN else "")
        for each in (replica.missing, replica.damaged, replica.unknown)
    )
    bookie = "" if replica.bookie is None else replica.bookie.bookie_id
    silent = "does not answer" if replica.silent else ""
    return (replica.ledger_id, f"{replica.first_entry_id}-{replica.last_entry_id}", bookie, *spans, silent)


def _summary(found: Verified) -> str:
    problems = len(found.problems) + len(found.ledger_problems)
    text = (
        f"{problems or 'no'} problem{'' if problems == 1 else 's'} in {counted(found.ledgers, 'ledger')}, "
        f"{counted(found.replicas, 'replica of a fragment', 'replicas of fragments')}, "
        f"{counted(found.entries, 'entry', 'entries')}, {found.bytes} bytes"
    )
    if found.repaired:
        text += f"; {found.repaired} replicas were repaired"
    if found.unauthenticated:
        text += (
            f"; the entries of {len(found.unauthenticated)} ledgers were checked by the bookies' checksums only, their "
            "digests need the password"
        )
    if found.seals_unchecked:
        text += f"; the seals of {len(found.seals_unchecked)} ledgers were not checked, for want of their passwords"
    if found.unsealed:
        text += f"; {counted(len(found.unsealed), 'closed ledger')} without a seal, `pybk reseal` makes it"
    if found.unread:
        text += f"; {len(found.unread)} ledgers are not closed, and what was written last to them needs the password"
    if found.late:
        text += f"; {found.late} entries of ledgers that are not closed have yet to come to a bookie"
    return text


def _tier(spark: SparkSession, parsed: argparse.Namespace) -> int:
    from pybk.spark.jobs.tier import tier

    found = tier(
        spark,
        parsed.path,
        StorageHint(parsed.target),
        **_where(parsed),
        **_which(parsed),
        hint=None if parsed.hint is None else StorageHint(parsed.hint),
        older_than=parsed.older_than,
        larger_than=parsed.larger_than,
        dry_run=parsed.dry_run,
    )
    if parsed.json:
        _print_json(asdict(found))
    else:
        _left_out(not_opened=found.not_opened, failed=found.failed)
        done = "would be moved" if found.dry_run else "were moved"
        print(f"{_numbers(found.ledgers)} ledgers of {found.bytes} bytes {done} to {found.target.value}")
    return PROBLEMS if found.not_opened or found.failed else SOUND


def _export(spark: SparkSession, parsed: argparse.Namespace) -> int:
    from pybk.spark.jobs.export import export

    mode = "overwrite" if parsed.overwrite else "errorifexists"
    found = export(
        spark,
        parsed.path,
        parsed.directory,
        **_where(parsed),
        **_which(parsed),
        open_too=parsed.open_too,
        mode=mode,
    )
    if parsed.json:
        _print_json(asdict(found))
    else:
        _left_out(not_opened=found.not_opened, still_open=found.open, failed=found.failed)
        print(f"{len(found.ledgers)} ledgers, {found.entries} entries of {found.bytes} bytes: export {found.export_id}")
    return PROBLEMS if found.not_opened or found.failed else SOUND


def _import(spark: SparkSession, parsed: argparse.Namespace) -> int:
    from pybk.spark.jobs.import_ import import_

    found = import_(spark, parsed.path, parsed.directory, **_where(parsed), quorums=parsed.quorums)
    if parsed.json:
        _print_json(asdict(found))
    else:
        _table(found.ledgers.items(), ("exported ledger", "ledger"))
        print(f"{len(found.imported)} ledgers were made, of {found.entries} entries and {found.bytes} bytes")
    return SOUND


def _copy(spark: SparkSession, parsed: argparse.Namespace) -> int:
    from pybk.spark.jobs.copy import copy

    found = copy(
        spark,
        parsed.path,
        parsed.target,
        **_where(parsed),
        **_which(parsed),
        target_secret=Secret(file=parsed.target_secret_file).read(),
        open_too=parsed.open_too,
        quorums=parsed.quorums,
    )
    if parsed.json:
        _print_json(asdict(found))
    else:
        _left_out(not_opened=found.not_opened, still_open=found.open, failed=found.failed)
        there = len(found.ledgers) - len(found.copied)
        print(f"{len(found.copied)} ledgers of {found.bytes} bytes were copied, {there} were there")
    return PROBLEMS if found.not_opened or found.failed else SOUND


def _inventory(spark: SparkSession, parsed: argparse.Namespace) -> int:
    from pybk.spark.jobs.inventory import inventory

    found = inventory(spark, parsed.path, **_where(parsed), **_which(parsed))
    kinds, bookies, short = (
        [row.asDict() for row in frame.collect()]
        for frame in (found.by_kind(), found.by_bookie(), found.under_replicated())
    )
    for frame in found:
        frame.unpersist()
    if parsed.json:
        _print_json({"ledgers": kinds, "bookies": bookies, "under_replicated": short})
    else:
        for rows in (kinds, bookies):
            if rows:
                _table((["" if value is None else value for value in row.values()] for row in rows), list(rows[0]))
                print()
        if short:
            names = ("ledger_id", "first_entry_id", "bookie", "registered", "recorded")
            _table(([row[name] for name in names] for row in short), names)
        print(f"{len(short) or 'no'} replica{'' if len(short) == 1 else 's'} of fragments under-replicated")
    return PROBLEMS if short else SOUND

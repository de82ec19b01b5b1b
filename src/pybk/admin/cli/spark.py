"""The commands ``pybk spark …``: jobs over ledgers on the executors of Apache Spark; see ``docs/howto/spark.md``.

Spark is imported when a job runs, so all other commands work without it.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, Final

from pybk import spark as jobs
from pybk.admin.cli.command_parser import Verbs
from pybk.admin.cli.given_secrets import given_in, passwords_of, secret_of, target_secret_of
from pybk.admin.cli.output import DAMAGED, SOUND, counted, print_json, print_result, print_table, shown_time
from pybk.credentials import cut_value
from pybk.deferral import LateModule
from pybk.errors import UsageError
from pybk.flags import StorageHint

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from pybk.spark.consumers import Consumer
    from pybk.spark.jobs import session as sessions
    from pybk.spark.jobs.verify import CheckedReplica, VerifiedLedgers
else:
    sessions = LateModule("pybk.spark.jobs.session")

_SPANS_SHOWN: Final = 5


# ---- arguments ---------------------------------------------------------------------------------------------------


def ids(text: str) -> list[int]:
    """Parse ledger ids such as ``3,5,7-9``."""
    found: list[int] = []
    for part in text.split(","):
        low, _, high = part.partition("-")
        if not re.fullmatch(r"\d{1,18}(-\d{1,18})?", part):
            raise argparse.ArgumentTypeError(f"{cut_value(text, 100)} is not a list of ledgers; write 3,5,7-9")
        if int(high or low) - int(low) > 1_000_000:
            raise argparse.ArgumentTypeError(f"{part} names more than a million ledgers; use --type")
        found += range(int(low), int(high or low) + 1)
    return found


def _common(parsed: argparse.Namespace) -> dict[str, Any]:
    """Return the arguments that all jobs take."""
    return {"cluster_secret": secret_of(parsed), **given_in(parsed), "quiet": parsed.quiet or parsed.json}


def _selection(parsed: argparse.Namespace) -> dict[str, Any]:
    """Return the arguments that select ledgers."""
    return {"ledgers": parsed.ledgers, "ledger_type": parsed.type}


# ---- running -----------------------------------------------------------------------------------------------------


def _job(name: str, job: Callable[[SparkSession, argparse.Namespace], int]) -> Callable[[argparse.Namespace], int]:
    """Return a command that runs a job, and returns its exit status."""

    def run(parsed: argparse.Namespace) -> int:
        with _spark_needed():
            opened = sessions.session(f"pybk {name}", parsed.master)
        with opened as spark:
            try:
                return job(spark, parsed)
            except Exception as error:
                reason = sessions.failure(error)
                if reason is None:
                    raise
                print(f"pybk: {reason}", file=sys.stderr)
                return DAMAGED

    return run


@contextmanager
def _spark_needed() -> Iterator[None]:
    """Turn a missing import of Spark into an error that says what to install."""
    try:
        yield
    except ModuleNotFoundError as error:
        if (error.name or "").split(".")[0] not in ("pyspark", "py4j", "pyarrow"):
            raise
        raise UsageError(f"{error.name} is not installed: pip install 'pybk[spark]'") from error


def _numbers(ledgers: Sequence[int]) -> str:
    shown = ", ".join(map(str, ledgers[:10]))
    return f"{len(ledgers)} ({shown}{', …' if len(ledgers) > 10 else ''})"


def _left_out(
    *, not_opened: Sequence[int] = (), still_open: Sequence[int] = (), failed: Sequence[tuple[int, str]] = ()
) -> None:
    """Print which ledgers a job left out, and why."""
    if not_opened:
        print(f"not opened, because their password is another: {_numbers(not_opened)}")
    if still_open:
        print(f"left out, because they are not closed: {_numbers(still_open)}")
    for ledger_id, reason in failed:
        print(f"ledger {ledger_id}: {' '.join(reason.split())}")


def _collect(parsed: argparse.Namespace) -> int:
    found = jobs.collect(
        parsed.path, cluster_secret=secret_of(parsed), **given_in(parsed), older_than=parsed.older_than
    )
    if parsed.json:
        print_json({"deleted": found})
    else:
        if found:
            print_table(((app_id, _numbers(ledgers)) for app_id, ledgers in found.items()), ("sink", "deleted ledgers"))
        print(f"{sum(map(len, found.values()))} ledgers were deleted")
    return SOUND


def _retain(parsed: argparse.Namespace) -> int:
    found = jobs.retain(
        parsed.path,
        parsed.type,
        max_age_s=parsed.max_age,
        max_bytes=parsed.max_bytes,
        keep_read=not parsed.delete_read,
        keep_unread=not parsed.delete_unread,
        dry_run=parsed.dry_run,
        cluster_secret=secret_of(parsed),
        **given_in(parsed),
    )
    if parsed.json:
        print_json({"deleted": found, "dry_run": parsed.dry_run})
    else:
        if found:
            print_table(((app_id, _numbers(ledgers)) for app_id, ledgers in found.items()), ("sink", "ledgers"))
        print(f"{sum(map(len, found.values()))} ledgers {'would be' if parsed.dry_run else 'were'} deleted")
    return SOUND


def _consumers(parsed: argparse.Namespace) -> int:
    if parsed.forget is not None:
        jobs.forget_consumer(parsed.path, parsed.forget, cluster_secret=secret_of(parsed))
        return print_result(parsed, {"forgotten": parsed.forget}, f"consumer {parsed.forget} is forgotten")
    found = jobs.list_consumers(parsed.path, cluster_secret=secret_of(parsed))
    if parsed.json:
        print_json({"consumers": list(map(_consumer, found))})
    else:
        rows = [(each.name, str(each.selection), shown_time(each.recorded_ns)) for each in found]
        print_table(rows, ("consumer", "reads", "recorded"))
    return SOUND


def _consumer(consumer: Consumer) -> dict[str, Any]:
    """Return how JSON has a consumer."""
    return {"name": consumer.name, **consumer.selection._asdict(), "recorded_ns": consumer.recorded_ns}


# ---- the jobs ----------------------------------------------------------------------------------------------------


def _verify(spark: SparkSession, parsed: argparse.Namespace) -> int:
    found = jobs.verify(
        spark,
        parsed.path,
        **_common(parsed),
        **_selection(parsed),
        passwords=passwords_of(parsed),
        repair=parsed.repair,
    )
    if parsed.json:
        problems = list(map(_problem, found.problems))
        print_json({**asdict(found), "problems": problems, "sound": found.sound, "complete": found.complete})
    else:
        if found.problems:
            headers = ("ledger", "fragment", "bookie", "missing", "damaged", "unknown", "")
            print_table(map(_problem_row, found.problems), headers)
        for ledger_id, text in found.ledger_problems:
            print(f"ledger {ledger_id}: {' '.join(text.split()).removeprefix(f'ledger {ledger_id}: ')}")
        for reason in found.left:
            print(reason)
        _left_out(not_opened=found.not_opened)
        print(_summary(found))
    return SOUND if found.sound and (found.complete or not parsed.strict) else DAMAGED


def _problem(replica: CheckedReplica) -> dict[str, Any]:
    """Return how JSON has a replica that is not sound."""
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


def _problem_row(replica: CheckedReplica) -> tuple[Any, ...]:
    spans = (
        ", ".join(map(str, each[:_SPANS_SHOWN])) + (", …" if len(each) > _SPANS_SHOWN else "")
        for each in (replica.missing, replica.damaged, replica.unknown)
    )
    bookie = "" if replica.bookie is None else replica.bookie.bookie_id
    silent = "does not answer" if replica.silent else ""
    return (replica.ledger_id, f"{replica.first_entry_id}-{replica.last_entry_id}", bookie, *spans, silent)


def _summary(found: VerifiedLedgers) -> str:
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
        text += (
            f"; the seals of {len(found.seals_unchecked)} ledgers were not checked, because their passwords are not "
            "known"
        )
    if found.unsealed:
        text += f"; {counted(len(found.unsealed), 'closed ledger')} without a seal, `pybk ledger reseal` makes it"
    if found.unread:
        text += f"; {len(found.unread)} ledgers are not closed, and checking their last fragment needs the password"
    if found.late:
        text += f"; {found.late} entries of ledgers that are not closed have not reached a bookie yet"
    return text


def _tier(spark: SparkSession, parsed: argparse.Namespace) -> int:
    found = jobs.tier(
        spark,
        parsed.path,
        StorageHint(parsed.target),
        **_common(parsed),
        **_selection(parsed),
        hint=None if parsed.hint is None else StorageHint(parsed.hint),
        older_than=parsed.older_than,
        larger_than=parsed.larger_than,
        dry_run=parsed.dry_run,
    )
    if parsed.json:
        print_json(asdict(found))
    else:
        _left_out(not_opened=found.not_opened, failed=found.failed)
        done = "would be moved" if found.dry_run else "were moved"
        print(f"{_numbers(found.ledgers)} ledgers of {found.bytes} bytes {done} to {found.target.value}")
    return DAMAGED if found.not_opened or found.failed else SOUND


def _export(spark: SparkSession, parsed: argparse.Namespace) -> int:
    mode = "overwrite" if parsed.overwrite else "errorifexists"
    found = jobs.export(
        spark,
        parsed.path,
        parsed.directory,
        **_common(parsed),
        **_selection(parsed),
        open_too=parsed.open_too,
        mode=mode,
    )
    if parsed.json:
        print_json(asdict(found))
    else:
        _left_out(not_opened=found.not_opened, still_open=found.open, failed=found.failed)
        print(f"{len(found.ledgers)} ledgers, {found.entries} entries of {found.bytes} bytes: export {found.export_id}")
    return DAMAGED if found.not_opened or found.failed else SOUND


def _import(spark: SparkSession, parsed: argparse.Namespace) -> int:
    found = jobs.import_(spark, parsed.path, parsed.directory, **_common(parsed), quorums=parsed.quorums)
    if parsed.json:
        print_json(asdict(found))
    else:
        print_table(found.ledgers.items(), ("exported ledger", "ledger"))
        print(f"{len(found.imported)} ledgers were created, with {found.entries} entries of {found.bytes} bytes")
    return SOUND


def _copy(spark: SparkSession, parsed: argparse.Namespace) -> int:
    found = jobs.copy(
        spark,
        parsed.path,
        parsed.target,
        **_common(parsed),
        **_selection(parsed),
        target_secret=target_secret_of(parsed),
        open_too=parsed.open_too,
        quorums=parsed.quorums,
    )
    if parsed.json:
        print_json(asdict(found))
    else:
        _left_out(not_opened=found.not_opened, still_open=found.open, failed=found.failed)
        before = len(found.ledgers) - len(found.copied)
        print(f"{len(found.copied)} ledgers of {found.bytes} bytes were copied, {before} were there")
    return DAMAGED if found.not_opened or found.failed else SOUND


def _inventory(spark: SparkSession, parsed: argparse.Namespace) -> int:
    found = jobs.inventory(spark, parsed.path, **_common(parsed), **_selection(parsed))
    kinds, bookies, short = (
        [row.asDict() for row in frame.collect()]
        for frame in (found.by_kind(), found.by_bookie(), found.under_replicated())
    )
    for frame in found:
        frame.unpersist()
    if parsed.json:
        print_json({"ledgers": kinds, "bookies": bookies, "under_replicated": short})
    else:
        for rows in (kinds, bookies):
            if rows:
                print_table((["" if value is None else value for value in row.values()] for row in rows), list(rows[0]))
                print()
        if short:
            names = ("ledger_id", "first_entry_id", "bookie", "registered", "recorded")
            print_table(([row[name] for name in names] for row in short), names)
        print(f"{len(short) or 'no'} replica{'' if len(short) == 1 else 's'} of fragments under-replicated")
    return DAMAGED if short else SOUND


def _compact(spark: SparkSession, parsed: argparse.Namespace) -> int:
    limits = {
        "segment_bytes": parsed.segment_bytes,
        "segment_age_s": parsed.segment_age,
        "segment_records": parsed.segment_records,
        "keep_s": parsed.keep,
    }
    logs: tuple[jobs.CompactedLog, ...] = ()
    sinks: tuple[jobs.CompactedSink, ...] = ()
    if parsed.logs or parsed.type is None:
        logs = jobs.compact(spark, parsed.path, parsed.logs or None, **_common(parsed), **limits)
    if parsed.type is not None or not parsed.logs:
        sinks = jobs.compact_ledgers(spark, parsed.path, parsed.type, **_common(parsed), **limits)
    if parsed.json:
        print_json({"logs": [asdict(each) for each in logs], "sinks": [asdict(each) for each in sinks]})
    else:
        _print_compacted(logs, sinks)
    failed = [*(each.failed for each in logs), *(each.failed for each in sinks)]
    return DAMAGED if any(failed) else SOUND


def _print_compacted(logs: Sequence[jobs.CompactedLog], sinks: Sequence[jobs.CompactedSink]) -> None:
    rows = [(each.log, each.replaced, each.ledgers, each.records, each.bytes, each.segments) for each in logs]
    if rows or not sinks:
        print_table(_shown(rows), ("log", "merged segments", "into ledgers", "records", "bytes", "segments now"))
    rows = [(each.sink, each.replaced, each.ledgers, each.entries, each.bytes, each.left) for each in sinks]
    if rows:
        print_table(_shown(rows), ("sink", "merged ledgers", "into ledgers", "entries", "bytes", "ledgers now"))
    for name, failed in [
        *((f"log {each.log}", each.failed) for each in logs),
        *((f"sink {each.sink}", each.failed) for each in sinks),
    ]:
        for reason in failed:
            print(f"{name}: {' '.join(reason.split())}")


def _shown(rows: Iterable[Sequence[object]]) -> list[list[object]]:
    return [["" if value is None else value for value in row] for row in rows]


VERBS: Final[Verbs] = {
    "verify": _job("verify", _verify),
    "tier": _job("tier", _tier),
    "export": _job("export", _export),
    "import": _job("import", _import),
    "inventory": _job("inventory", _inventory),
    "copy": _job("copy", _copy),
    "compact": _job("compact", _compact),
    "collect": _collect,
    "retain": _retain,
    "consumers": _consumers,
}
"""The jobs of ``pybk spark``."""

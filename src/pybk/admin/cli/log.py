"""The commands ``pybk log …``: named logs of a store or a cluster; see ``docs/concepts/streams.md``."""

from __future__ import annotations

import argparse
import itertools
import os
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from datetime import datetime
from typing import TYPE_CHECKING, Any, ClassVar, Final

from pybk.admin.cli.clusters import opened_manager
from pybk.admin.cli.command_parser import Verbs
from pybk.admin.cli.given_secrets import Given, given_in
from pybk.admin.cli.log_verbs import Append, LogVerbs, Record, print_rows
from pybk.admin.cli.output import UNREACHABLE, counted, print_result, watch
from pybk.credentials import cut_value
from pybk.errors import LogFencedError, PybkError, UsageError
from pybk.metadata.store import without_secrets
from pybk.streams.format import Position
from pybk.streams.log import Log
from pybk.streams.log_reader import LogEnd, Start, TxId
from pybk.streams.namespace import Namespace

if TYPE_CHECKING:
    from pybk.manager.ledger_manager import LedgerManager

_PLACES: Final = "a sequence number, a position, txid=NUMBER, or time=TIME as 2026-01-31T12:00:00+00:00"


class _LogVerbs(LogVerbs[Log]):
    record = "record"
    number = "seq"
    contents = "subscriptions"
    columns: ClassVar[tuple[str, ...]] = ("sealed", "ledgers", "subscriptions")

    def verbs(self) -> Verbs:
        own = {"merge": self._merge, "rename": self._rename, "subscriptions": self._subscriptions}
        return {**super().verbs(), **own}

    def described(self, log: Log) -> dict[str, Any]:
        ledgers = [each.ledger_id for each in log.segments()]
        found = {"sealed": log.is_sealed(), "ledgers": ledgers, "subscriptions": log.subscriptions()}
        return {**found, "properties": dict(log.properties())}

    def records(self, log: Log, first: Start | None, last: int | None, *, follow: bool = False) -> Iterable[Record]:
        reader = log.reader(LogEnd.EARLIEST if first is None else first, follow=follow)
        return itertools.takewhile(lambda record: last is None or record.seq <= last, reader)

    @contextmanager
    def appending(self, parsed: argparse.Namespace, log: Log) -> Iterator[Append]:
        txids = itertools.repeat(None) if parsed.txid is None else itertools.count(parsed.txid)
        key = None if parsed.key is None else os.fsencode(parsed.key)
        with log.writer() as writer:
            yield lambda line: writer.append_async(line, key=key, txid=next(txids))

    def appended(self, last: Position | None) -> tuple[dict[str, Any], str]:
        return {"last": None if last is None else str(last)}, str(last)

    def truncate(self, log: Log, parsed: argparse.Namespace) -> None:
        log.truncate(parsed.before, force=parsed.force)

    def create(self, manager: LedgerManager, name: str, given: Given, *, insecure: bool) -> None:
        with _names(manager, given, insecure=insecure) as logs:
            logs.create(name).close()

    def _merge(self, parsed: argparse.Namespace) -> int:
        with opened_manager(parsed, read_only=False) as manager, self.open(parsed, manager, parsed.name, "w") as log:

            def look() -> int:
                try:
                    made = log.merge_segments(
                        segment_bytes=parsed.segment_bytes,
                        segment_age_s=parsed.segment_age,
                        segment_records=parsed.segment_records,
                        keep_s=parsed.keep,
                    )
                except PybkError as error:
                    if parsed.watch is None or not (error.retryable or isinstance(error, LogFencedError)):
                        raise
                    print(f"pybk: {without_secrets(str(error))}; the next look tries again", file=sys.stderr)
                    return UNREACHABLE
                what = f"{counted(made.replaced, 'segment')} merged into {counted(made.ledgers, 'ledger')}"
                return print_result(
                    parsed, made._asdict(), f"{what}; log {parsed.name} has {counted(made.segments, 'segment')}"
                )

            return watch(parsed, look)

    def _rename(self, parsed: argparse.Namespace) -> int:
        with opened_manager(parsed, read_only=False) as manager, _names(manager, given_in(parsed)) as logs:
            logs.rename(parsed.name, parsed.target)
        return print_result(parsed, {"renamed": parsed.target}, f"log {parsed.name} has the name {parsed.target} now")

    def _subscriptions(self, parsed: argparse.Namespace) -> int:
        with opened_manager(parsed, read_only=True) as manager, self.open(parsed, manager, parsed.name, "r") as log:
            rows = [each._asdict() for each in log.subscription_states()]
        headers = ("name", "first_unacked", "backlog", "acked_ranges")
        return print_rows(parsed, rows, headers, "subscriptions")


def place(text: str) -> Start:
    """Return the place that a text names."""
    name, equals, value = text.partition("=")
    try:
        if equals and name == "txid":
            return TxId(int(value))
        if equals and name == "time":
            time = datetime.fromisoformat(value)
            if time.tzinfo is None:
                raise argparse.ArgumentTypeError(
                    f"{cut_value(text, 50)} names no time zone; write it as {value:.30}Z for UTC"
                )
            return time
        if ":" in text:
            return Position.parse(text)
        seq = int(text)
        if seq >= 0:
            return seq
    except (ValueError, UsageError):  # as of a negative number
        pass
    raise argparse.ArgumentTypeError(f"{cut_value(text, 50)} is not a place; it takes {_PLACES}")


def _names(manager: LedgerManager, given: Given, *, insecure: bool = True) -> Namespace:
    return Namespace.open(manager, **given, insecure=insecure)


VERBS: Final[Verbs] = _LogVerbs(Log).verbs()
"""The verbs of ``pybk log``."""

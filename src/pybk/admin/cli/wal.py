"""The commands ``pybk wal …``: write-ahead logs of a store or a cluster; see ``docs/concepts/streams.md``."""

from __future__ import annotations

import argparse
from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, ClassVar, Final

from pybk.admin.cli.command_parser import Verbs
from pybk.admin.cli.log_verbs import Append, LogVerbs, Record
from pybk.streams.wal import WriteAheadLog


class _WalVerbs(LogVerbs[WriteAheadLog]):
    record = "LSN"
    number = "lsn"
    contents = "checkpoints"
    columns: ClassVar[tuple[str, ...]] = ("generation", "epoch", "ledgers", "checkpoints")

    def described(self, log: WriteAheadLog) -> dict[str, Any]:
        found = {"generation": log.generation(), "epoch": log.epoch(), "ledgers": list(log.ledgers())}
        return {**found, "checkpoints": [each.lsn for each in log.checkpoints()]}

    def records(
        self, log: WriteAheadLog, first: int | None, last: int | None, *, follow: bool = False
    ) -> Iterable[Record]:
        return log.follow(first) if follow else log.replay(first, last)

    def appending(self, _: argparse.Namespace, log: WriteAheadLog) -> AbstractContextManager[Append]:
        return nullcontext(log.append_async)

    def appended(self, last: int | None) -> tuple[dict[str, Any], str]:
        return {"last_lsn": last or 0}, f"LSN {last}"

    def truncate(self, log: WriteAheadLog, parsed: argparse.Namespace) -> None:
        log.truncate_before(parsed.before)


VERBS: Final[Verbs] = _WalVerbs(WriteAheadLog).verbs()
"""The verbs of ``pybk wal``."""

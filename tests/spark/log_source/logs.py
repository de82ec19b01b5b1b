"""Logs to read: written in a process of their own, as one process cannot have a store open for writing and reading."""

from __future__ import annotations

import ast
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from pybk.manager.ledger_manager import LedgerManager
from pybk.streams.log import Log
from pybk.streams.log_writer import LogWriter, NewRecord
from pybk.streams.wal import WriteAheadLog
from tests.spark.secret_files import secret_file
from tests.storage.real_store import open_quick, python
from tests.waiting import PROCESS_S

PASSWORD = b"the logs' password"

PROGRAM = "from tests.spark.log_source.logs import serve; serve()"


class Logs:
    """The logs of a manager, and their writers, which stay open."""

    def __init__(self, manager: LedgerManager) -> None:
        self._manager = manager
        self._open = ExitStack()
        self._logs: dict[str, Log] = {}
        self._writers: dict[str, LogWriter] = {}
        self._wals: dict[str, WriteAheadLog] = {}

    def create(self, name: str) -> None:
        """Make a log, which has no records."""
        self._logs[name] = self._open.enter_context(Log.open(self._manager, name, password=PASSWORD))

    def append(self, name: str, records: Sequence[bytes | dict[str, Any]]) -> int:
        """Append records to a log, which is made if it does not exist; return the sequence number of the last one."""
        if name not in self._logs:
            self.create(name)
        if name not in self._writers:
            self._writers[name] = self._logs[name].writer()
        given = [NewRecord(**each) if isinstance(each, dict) else each for each in records]
        return self._writers[name].append_many(given)[-1].seq

    def roll(self, name: str) -> None:
        """End the open segment of a log: its writer closes, and the next append makes another one."""
        self._writers.pop(name).close()

    def truncate(self, name: str, seq: int) -> None:
        """Drop the records before one."""
        self._logs[name].truncate(seq)

    def merge(self, name: str) -> int:
        """Merge the closed segments of a log, delete the ledgers of others before, and return how many are merged."""
        return self._logs[name].merge_segments(keep_s=0).replaced

    def seal(self, name: str) -> None:
        """End a log for good."""
        self._writers.pop(name).seal()

    def delete(self, name: str, *, steal: bool = False) -> None:
        """Delete a log."""
        self._writers.pop(name).close()
        self._logs.pop(name).close()
        Log.delete(self._manager, name, password=PASSWORD, steal=steal)

    def segments(self, name: str) -> list[tuple[int, int]]:
        """Return the number and the ledger of each segment of a log."""
        return [(each.number, each.ledger_id) for each in self._logs[name].segments()]

    def sizes(self, name: str) -> list[int]:
        """Return the payload bytes of each segment of a log."""
        return [each.nbytes for each in self._logs[name].segments()]

    def lag(self, name: str) -> list[tuple[str, int, int]]:
        """Return each subscription of a log, with its first record that is not acknowledged, and its backlog."""
        return [(each.name, each.first_unacked, each.backlog) for each in self._logs[name].subscription_states()]

    def append_wal(self, name: str, records: Sequence[bytes]) -> int:
        """Append records to a write-ahead log; return the number of the last one."""
        if name not in self._wals:
            self._wals[name] = self._open.enter_context(WriteAheadLog.open(self._manager, name, password=PASSWORD))
        return self._wals[name].append_many(records)[-1]

    def cut_wal(self, name: str, lsn: int) -> None:
        """Drop the records after one from the end of a write-ahead log."""
        self._wals[name].truncate_after(lsn)

    def close(self) -> None:
        """Close all of them."""
        for writer in self._writers.values():
            writer.close()
        self._open.close()


def serve() -> None:
    """Do what each line of the standard input says, with a store; write what it returns to the standard output."""
    with open_quick(Path(sys.stdin.readline().strip())) as manager:
        logs = Logs(manager)
        for line in sys.stdin:
            name, arguments = ast.literal_eval(line)
            sys.stdout.write(f"{getattr(logs, name)(*arguments)!r}\n")
            sys.stdout.flush()
        logs.close()


class LogStore:
    """A store with logs that another process writes.

    Attributes:
        options: The options by which Spark finds it.
    """

    def __init__(self, directory: Path) -> None:
        self.options = {"path": str(directory / "store"), "passwordFile": password_file(directory)}
        self._process = python(PROGRAM)
        assert self._process.stdin is not None
        print(directory / "store", file=self._process.stdin, flush=True)

    def __getattr__(self, name: str) -> Any:
        """Return a method of ``Logs``, which the other process calls."""

        def call(*arguments: Any) -> Any:
            assert self._process.stdin is not None
            assert self._process.stdout is not None
            print(repr((name, arguments)), file=self._process.stdin, flush=True)
            answer = self._process.stdout.readline()
            try:
                return ast.literal_eval(answer)
            except (SyntaxError, ValueError):
                raise AssertionError(answer + self._process.communicate(timeout=PROCESS_S)[0]) from None

        return call

    def end(self) -> None:
        """End the writer."""
        self._process.communicate(timeout=PROCESS_S)


def password_file(directory: Path) -> str:
    """Make a file that has the password of the logs, and return its path."""
    return secret_file(directory, PASSWORD)

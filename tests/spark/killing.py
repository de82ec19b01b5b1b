"""Sinks that are stopped at a step of a write or a commit: a step is whatever comes before the next change or look."""

from __future__ import annotations

import functools
import os
import signal
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any, Final, NoReturn

import pyarrow as pa
from pyspark.sql.datasource import DataSourceStreamWriter, WriterCommitMessage
from pyspark.sql.types import StructType

from pybk.manager.ledger_manager import LedgerManager
from pybk.manager.ledger_writer import LedgerWriter
from pybk.metadata.cluster import ClusterMetadata
from pybk.spark.connection import close_connections
from pybk.spark.options import SinkOptions, sink_options
from pybk.spark.sink.writer import StreamWriter
from pyspark_pybk import DefaultSource

ACTIONS: Final[tuple[tuple[type, str], ...]] = (
    (LedgerManager, "create_ledger"),
    (LedgerManager, "create_system_ledger"),
    (LedgerManager, "delete_ledger"),
    (LedgerWriter, "append_many"),
    (LedgerWriter, "append_many_async"),
    (LedgerWriter, "close"),
    (ClusterMetadata, "read_pointer"),
    (ClusterMetadata, "write_pointer"),
)


Actions = Sequence[tuple[type, str]]


@contextmanager
def stepping(reach: Callable[[str], None], actions: Actions = ACTIONS) -> Iterator[None]:
    """Call ``reach`` before each action that a sink takes, after each compare-and-set, and at the end."""
    originals = [getattr(owner, name) for owner, name in actions]

    def watched(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def act(*arguments: Any, **options: Any) -> Any:
            reach(name)
            result = original(*arguments, **options)
            if name == "write_pointer":
                reach("after write_pointer")
            return result

        return act

    for (owner, name), original in zip(actions, originals, strict=True):
        setattr(owner, name, watched(name, original))
    try:
        yield
        reach("end")
    finally:
        for (owner, name), original in zip(actions, originals, strict=True):
            setattr(owner, name, original)


def in_child(what: Callable[[], None], kill_at: int | None = None, actions: Actions = ACTIONS) -> int:
    """Do something in a process that kills itself at a step; return how the process ended."""
    close_connections()  # for LMDB is not open twice, and the child is to have its own
    child = os.fork()
    if not child:
        _child(what, kill_at, actions)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def _child(what: Callable[[], None], kill_at: int | None, actions: Actions) -> NoReturn:
    steps = count()

    def reach(_: str) -> None:
        if next(steps) == kill_at:
            os.kill(os.getpid(), signal.SIGKILL)

    try:
        with stepping(reach, actions):
            what()
        os._exit(0)
    finally:
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)


@dataclass
class Kill:
    """Sends a signal, once, at a step that has a number.

    Attributes:
        part: ``write`` or ``commit``; ``commit1`` is that of batch 1.
        step: Which step of it, from 0.
        signal: The signal.
        pid: Which process gets it; 0 for the one that takes the step, -1 for the JVM that it works for.
        mark: A file that is made before, with the step's name and this process's id; if it is there, nothing is done.
    """

    part: str
    step: int
    signal: int
    pid: int
    mark: str

    @classmethod
    def of(cls, text: str) -> Kill:
        """Return what ``str`` made."""
        part, step, number, pid, mark = text.split(" ", 4)
        return cls(part, int(step), int(number), int(pid), mark)

    def __str__(self) -> str:
        """Return it as an option takes it."""
        return f"{self.part} {self.step} {int(self.signal)} {self.pid} {self.mark}"

    @contextmanager
    def armed(self, *names: str) -> Iterator[None]:
        """Watch the steps of a part that has these names."""
        taken = 0

        def reach(name: str) -> None:
            nonlocal taken
            if self.part in names and taken == self.step and self._first(name):
                os.kill(self.pid if self.pid > 0 else os.getpid() if self.pid == 0 else jvm_pid(), self.signal)
                if self.pid:
                    signal.pause()  # nothing is done here before the other is gone
            taken += 1

        with stepping(reach):
            yield

    def _first(self, name: str) -> bool:
        try:
            with open(self.mark, "x", encoding="utf-8") as file:
                file.write(f"{name} {os.getpid()}")
        except FileExistsError:
            return False
        return True


def jvm_pid() -> int:
    """Return the JVM that this worker of Spark works for: its parent's parent, as a daemon forks workers."""
    status = Path(f"/proc/{os.getppid()}/stat").read_text()
    return int(status.rpartition(")")[2].split()[1])


class KillingWriter(StreamWriter):
    """Writes a stream as users' do, up to a step."""

    def __init__(self, kill: Kill, options: SinkOptions, schema: StructType, overwrite: bool) -> None:
        super().__init__(options, schema, overwrite)
        self._kill = kill

    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
        """Write what a task has."""
        with self._kill.armed("write"):
            return super().write(iterator)

    def commit(self, messages: Sequence[WriterCommitMessage | None], batchId: int) -> None:  # noqa: N803
        """Commit what tasks wrote."""
        with self._kill.armed("commit", f"commit{batchId}"):
            super().commit(messages, batchId)


class KillingSource(DefaultSource):
    """The format ``pybk-killing``: ``pybk`` with one more option, ``kill``."""

    @classmethod
    def name(cls) -> str:
        """Return the name of the format."""
        return "pybk-killing"

    def streamWriter(self, schema: StructType, overwrite: bool) -> DataSourceStreamWriter:  # type: ignore[override]  # noqa: N802
        """Return what writes."""
        options = {name: value for name, value in self.options.items() if name != "kill"}
        return KillingWriter(Kill.of(self.options["kill"]), sink_options(options, streaming=True), schema, overwrite)

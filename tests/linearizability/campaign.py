"""Runs processes that share a metadata store, a ledger or a log, kills some of them, and checks what they did.

The processes are forked from a server that has imported pybk already. A process is killed once it has noted some
number of calls, so that the moment does not depend on the speed of the machine.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

from tests.linearizability import worker
from tests.linearizability.checker import Model, check
from tests.linearizability.history import Operation, read_histories
from tests.linearizability.models import LedgerEnd, Register, StandbyLog
from tests.waiting import PROCESS_S, wait_until

_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(["tests.linearizability.worker", "pybk.manager.connect", "pybk.metadata.lmdb_store"])

PROCESSES = 3
"""Processes that do the same at once."""

ENTRIES = 400
"""Entries that a writer appends at most."""


class NotLinearizableError(AssertionError):
    """No order of the operations explains their results."""


class Tally(NamedTuple):
    """What was checked.

    Attributes:
        histories: How many histories, each of one key.
        operations: How many operations they have.
        unknown: How many of those have no known outcome.
    """

    histories: int = 0
    operations: int = 0
    unknown: int = 0

    def plus(self, other: Tally) -> Tally:
        """Return the sum of two."""
        return Tally(*(mine + theirs for mine, theirs in zip(self, other, strict=True)))


def judge(model: Model, histories: dict[str, list[Operation]]) -> Tally:
    """Check the histories of some keys.

    Raises:
        NotLinearizableError: One is not linearizable.
    """
    for key, history in histories.items():
        verdict = check(model, history)
        if not verdict.linearizable:
            lines = "\n".join(map(str, sorted(history, key=lambda each: each.called_ns)))
            raise NotLinearizableError(f"{key}: none of {verdict.stuck} can come next; all operations:\n{lines}")
    everything = [operation for history in histories.values() for operation in history]
    unknown = sum(each.returned_ns is None for each in everything)
    return Tally(len(histories), len(everything), unknown)


class Crowd:
    """Processes, and the files with their histories.

    Args:
        directory: Where the files lie.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        directory.mkdir(parents=True)
        self._members: list[tuple[ForkServerProcess, Path]] = []
        self._killed: set[int | None] = set()

    def start(self, does: Callable[..., None], *arguments: Any) -> int:
        """Start a process, which is given the path of its history second; return its number."""
        path = self._directory / str(len(self._members))
        process = _CONTEXT.Process(target=does, args=(arguments[0], path, *arguments[1:]), daemon=True)
        process.start()
        self._members.append((process, path))
        return len(self._members) - 1

    def lines(self, number: int) -> int:
        """Return how many lines of its history a process has written."""
        path = self._members[number][1]
        return path.read_bytes().count(b"\n") if path.exists() else 0

    def wait_for(self, number: int, lines: int) -> None:
        """Wait until a process has written some lines, or has ended by itself."""
        process, _ = self._members[number]
        wait_until(lambda: self.lines(number) >= lines or not process.is_alive(), seconds=PROCESS_S)

    def kill_after(self, number: int, lines: int) -> None:
        """Kill a process once it has written some lines, unless it has ended by itself."""
        self.wait_for(number, lines)
        process, _ = self._members[number]
        process.kill()
        self._killed.add(process.pid)

    def join(self) -> None:
        """Wait for all processes; each that was not killed must have ended well."""
        for process, path in self._members:
            process.join(PROCESS_S)
            status = process.exitcode
            assert status == 0 or process.pid in self._killed, f"process {path.name} ended with {status}"

    def histories(self) -> dict[str, list[Operation]]:
        """Return what all processes did, by key."""
        return read_histories(path for _, path in self._members if path.exists())

    def close(self) -> None:
        """Kill the processes that are left."""
        for process, _ in self._members:
            process.kill()
            process.join()


@contextmanager
def crowd(directory: Path) -> Iterator[Crowd]:
    """Provide processes, and kill those that are left at the end."""
    made = Crowd(directory)
    try:
        yield made
    finally:
        made.close()


def compare_and_set(url: str, directory: Path, seed: str, *, mutant: str = "", count: int = 40) -> Tally:
    """Have processes read and change the same keys; some are killed, and others come."""
    source = Random(seed)
    with crowd(directory) as processes:
        numbers = [
            processes.start(worker.change_keys, url, f"{seed}.{number}", mutant, count) for number in range(PROCESSES)
        ]
        for kill in range(2):
            processes.kill_after(numbers[kill], source.randrange(count, 3 * count))
            processes.start(worker.change_keys, url, f"{seed}.{PROCESSES + kill}", mutant, count)
        processes.join()
        return judge(Register(), processes.histories())


def recoveries(url: str, directory: Path, seed: str, *, mutant: str = "", rounds: int = 3) -> Tally:
    """Have processes recover ledgers at once while their writers append; writers and recoveries are killed."""
    source = Random(seed)
    with crowd(directory) as processes:
        for number in range(rounds):
            announced = directory / f"ledger.{number}"
            writer = processes.start(worker.write, url, announced, ENTRIES)
            begun = source.randrange(2, ENTRIES // 2)
            processes.wait_for(writer, begun)
            ledger_id = int(announced.read_text())
            killed = source.choice(("writer", "recovery", "nobody"))
            if killed == "writer":
                processes.kill_after(writer, begun)
            first, *_ = [processes.start(worker.recover, url, ledger_id, mutant) for _ in range(PROCESSES)]
            if killed == "recovery":
                processes.kill_after(first, 1)
        processes.join()
        return judge(LedgerEnd(), processes.histories())


def promotions(where: str, directory: Path, seed: str, *, mutant: str = "", count: int = 4) -> Tally:
    """Have standbys of a log promote themselves and append; some are killed, and others come.

    Args:
        where: The directory of a store, where each waits until the one before has let go of the log, or died; or the
            metadata URL of a cluster, where each steals it.
        directory: Where the histories are written.
        seed: Decides what they do; the log has it as its name.
        mutant: How their code is broken.
        count: How often each is promoted.
    """
    source = Random(seed)
    name = f"log-{seed}"
    with crowd(directory) as processes:
        processes.start(worker.stand_by, where, name, seed, "", 0)
        processes.join()

        def start(number: int) -> int:
            return processes.start(worker.stand_by, where, name, f"{seed}.{number}", mutant, count)

        numbers = [start(number) for number in range(PROCESSES)]
        for kill in range(2):
            processes.kill_after(numbers[kill], source.randrange(1, 8 * count))
            start(PROCESSES + kill)
        processes.join()
        return judge(StandbyLog(), processes.histories())

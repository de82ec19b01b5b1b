"""Contests about many small ledgers: moving them to another tier, and having them while nothing happens."""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Final

from bench.contest import Contest, Contestant, Run, Scale, Target, at_most
from bench.lifecycle import answer, child
from bench.payloads import PASSWORD, PAYLOAD
from pybk import LedgerManager, StorageHint

GROUP: Final = 1024
LINEAR: Final = 1.3


def make_ledgers(manager: LedgerManager, count: int) -> list[int]:
    """Make closed ledgers of one entry, which the index knows."""
    ledger_ids = []
    for _ in range(count):
        with manager.create_ledger(password=PASSWORD) as writer:
            writer.append(PAYLOAD)
        ledger_ids.append(writer.ledger_id)
    manager.checkpoint()
    return ledger_ids


class Moves:
    """Moves closed ledgers to HDD in ten parts; the time of each part is kept.

    Args:
        move: Moves some of them.
    """

    def __init__(self, move: Callable[[LedgerManager, Sequence[int]], None]) -> None:
        self._move = move
        self._times: list[float] = []

    @contextmanager
    def enter(self, directory: Path, scale: Scale) -> Iterator[Run]:
        """Move them all, and give the time of all."""
        with LedgerManager.open(directory) as manager:
            ledger_ids = make_ledgers(manager, scale.moved_ledgers)
            part = max(len(ledger_ids) // 10, 1)

            def run(_: float) -> float:
                self._times = [
                    self._timed(manager, ledger_ids[low : low + part]) for low in range(0, len(ledger_ids), part)
                ]
                return sum(self._times)

            yield run

    @contextmanager
    def enter_last(self, _: Path, __: Scale) -> Iterator[Run]:
        """Give ten times the time of the last part: what all would take if none cost more than those."""
        yield lambda _: 10 * self._times[-1]

    def _timed(self, manager: LedgerManager, ledger_ids: Sequence[int]) -> float:
        begin = time.perf_counter()
        self._move(manager, ledger_ids)
        return time.perf_counter() - begin


def move_together(manager: LedgerManager, ledger_ids: Sequence[int]) -> None:
    """Move ledgers by one call."""
    manager.move_ledgers(ledger_ids, StorageHint.HDD)


def move_singly(manager: LedgerManager, ledger_ids: Sequence[int]) -> None:
    """Move ledgers one by one, each durable before the next."""
    for ledger_id in ledger_ids:
        manager.move_ledger(ledger_id, StorageHint.HDD)


@contextmanager
def move_rows(directory: Path, scale: Scale, group: int) -> Iterator[Run]:
    """Move as many rows of 1 KiB between two databases of sqlite3, synced, so many with one transaction."""
    with closing(sqlite3.connect(directory / "warm.db", isolation_level=None)) as warm:
        warm.execute("ATTACH ? AS hdd", (str(directory / "cold.db"),))
        for name in ("main", "hdd"):
            warm.execute(f"PRAGMA {name}.journal_mode=WAL")
            warm.execute(f"PRAGMA {name}.synchronous=FULL")
            warm.execute(f"CREATE TABLE {name}.ledgers (id INTEGER PRIMARY KEY, payload BLOB)")
        count = scale.moved_ledgers
        warm.execute("BEGIN")
        warm.executemany("INSERT INTO main.ledgers VALUES (?, ?)", ((number, PAYLOAD) for number in range(count)))
        warm.execute("COMMIT")

        def run(_: float) -> float:
            begin = time.perf_counter()
            for low in range(0, count, group):
                some = low, min(low + group, count)
                warm.execute("BEGIN")
                warm.execute("INSERT INTO hdd.ledgers SELECT * FROM main.ledgers WHERE id >= ? AND id < ?", some)
                warm.execute("DELETE FROM main.ledgers WHERE id >= ? AND id < ?", some)
                warm.execute("COMMIT")
            return time.perf_counter() - begin

        yield run


@contextmanager
def rows_together(directory: Path, scale: Scale) -> Iterator[Run]:
    """Move rows in groups as large as pybk's."""
    with move_rows(directory, scale, GROUP) as run:
        yield run


@contextmanager
def rows_singly(directory: Path, scale: Scale) -> Iterator[Run]:
    """Move rows one by one."""
    with move_rows(directory, scale, 1) as run:
        yield run


class Idle:
    """Opens a store in a process of its own, and asks for the processor time that it takes at rest."""

    def __init__(self) -> None:
        self._store: Path | None = None

    @contextmanager
    def enter(self, directory: Path, scale: Scale) -> Iterator[Run]:
        """Measure from the open on, while the policy looks at the ledgers that it does not know yet."""
        with LedgerManager.open(directory) as manager:
            make_ledgers(manager, scale.idle_ledgers)
        self._store = directory
        yield lambda _: self._measured("idle", scale)

    @contextmanager
    def enter_looked(self, _: Path, scale: Scale) -> Iterator[Run]:
        """Measure once the policy knows all ledgers."""
        yield lambda _: self._measured("idle-looked", scale)

    @contextmanager
    def enter_plain(self, _: Path, scale: Scale) -> Iterator[Run]:
        """Measure the same store without a policy."""
        yield lambda _: self._measured("idle-plain", scale)

    def _measured(self, what: str, scale: Scale) -> float:
        with child(what, self._store, scale.idle_seconds) as process:
            return float(answer(process))


_TOGETHER: Final = Moves(move_together)
_SINGLY: Final = Moves(move_singly)
_IDLE: Final = Idle()
TOGETHER, SINGLY = "pybk, move_ledgers", "pybk, move_ledger"
CONTESTS: Final = (
    Contest(
        "tiering",
        "move closed ledgers of 1 KiB to HDD",
        "s",
        [
            Contestant(TOGETHER, _TOGETHER.enter, [at_most(60)]),
            Contestant(
                f"{TOGETHER}, 10 x the last tenth",
                _TOGETHER.enter_last,
                [Target(f"<= {LINEAR:g} x all", lambda times: LINEAR * times[TOGETHER], at_most=True)],
            ),
            Contestant(SINGLY, _SINGLY.enter, [at_most(60)]),
            Contestant(
                f"{SINGLY}, 10 x the last tenth",
                _SINGLY.enter_last,
                [Target(f"<= {LINEAR:g} x all", lambda times: LINEAR * times[SINGLY], at_most=True)],
            ),
            Contestant(f"sqlite3, {GROUP} rows at a time", rows_together),
            Contestant("sqlite3, row by row", rows_singly),
        ],
        once=True,
    ),
    Contest(
        "idle",
        "processor time of a store at rest with a tier policy",
        "ms/s",
        [
            Contestant("pybk, from the open on", _IDLE.enter, [at_most(5)]),
            Contestant("pybk, policy knows all", _IDLE.enter_looked, [at_most(5)]),
            Contestant("pybk, no policy", _IDLE.enter_plain),
        ],
        once=True,
    ),
)

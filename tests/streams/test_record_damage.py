"""Reading a log of which an entry was changed on the disk, or a ledger is gone."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from pybk import CorruptError, LedgerManager, Log, LogEnd, PybkError, WriteAheadLog
from tests.healing.test_embedded_scrub import flip
from tests.storage.real_store import open_quick, python_path

KINDS = ("wal", "log")
RECORDS = 60
SEGMENT_RECORDS = 20
PASSWORD = b"p"


def data_of(number: int) -> bytes:
    return b"data-%03d" % number


def opened(stack: ExitStack, manager: LedgerManager, kind: str, mode: str = "r") -> WriteAheadLog | Log:
    if kind == "wal":
        return stack.enter_context(WriteAheadLog.open(manager, "my log", mode=mode, password=PASSWORD))
    return stack.enter_context(Log.open(manager, "my log", mode=mode, password=PASSWORD))


def write(path: Path, kind: str, *, batch: int = 1) -> tuple[int, list[int]]:
    """Write a log of closed segments, some records at a time; returns its first record, and its ledgers."""
    with open_quick(path) as manager, ExitStack() as stack:
        log = opened(stack, manager, kind, "w")
        writer = log if isinstance(log, WriteAheadLog) else stack.enter_context(log.writer())
        for first in range(0, RECORDS, batch):
            writer.append_many([data_of(number) for number in range(first, first + batch)])
            if (first + batch) % SEGMENT_RECORDS == 0:
                writer.roll()
        ledgers = log.ledgers() if isinstance(log, WriteAheadLog) else [each.ledger_id for each in log.segments()]
        manager.checkpoint()
    return (1 if kind == "wal" else 0), list(ledgers)


def read_from(log: WriteAheadLog | Log, seq: int | None) -> Iterator[bytes]:
    if isinstance(log, WriteAheadLog):
        return (record.data for record in log.replay(seq))
    return (record.data for record in log.reader(LogEnd.EARLIEST if seq is None else seq))


def read(path: Path, kind: str, seq: int | None = None) -> tuple[list[bytes], str]:
    """Read a log from a record on; returns what came, and the error that ended it, nothing if none did."""
    found: list[bytes] = []
    with open_quick(path, read_only=True) as manager, ExitStack() as stack:
        try:
            found.extend(read_from(opened(stack, manager, kind), seq))
        except PybkError as error:
            return found, str(error)
    return found, ""


def numbers(first: int, last: int) -> list[bytes]:
    return [data_of(number) for number in range(first, last + 1)]


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_before_a_damaged_record_is_read_and_its_error_names_the_place_and_what_is_after_it(
    kind: str, tmp_path: Path
) -> None:
    first_seq, ledgers = write(tmp_path, kind)
    flip(tmp_path, data_of(25))
    found, error = read(tmp_path, kind)
    assert found == numbers(0, 24)
    at, after = first_seq + 25, first_seq + 26
    assert f"log 'my log': record {at} cannot be read, because entry 6 of segment 2 is damaged" in error
    assert f"ledger {ledgers[1]} entry 6 is not what its writer made" in error
    assert f"restore ledger {ledgers[1]} from a backup" in error
    assert f"`pybk {kind} truncate PATH 'my log' {after}`" in error
    assert read(tmp_path, kind, after) == (numbers(26, RECORDS - 1), "")


@pytest.mark.sampled(one_in=4)
@pytest.mark.parametrize("damaged", [(20,), (39,), (20, 21, 22), (38, 39), (29, 30, 31, 33), tuple(range(20, 40))])
@pytest.mark.parametrize("kind", KINDS)
def test_reading_goes_on_after_damaged_records_wherever_they_are(
    kind: str, damaged: tuple[int, ...], tmp_path: Path
) -> None:
    first_seq, _ = write(tmp_path, kind)
    for number in damaged:
        flip(tmp_path, data_of(number))
    found, error = read(tmp_path, kind)
    while error:
        (after,) = re.findall(r"--first (\d+)`", error)
        more, error = read(tmp_path, kind, int(after))
        found += more
    assert found == [data_of(number) for number in range(RECORDS) if number not in damaged]
    for number in range(RECORDS):
        more, error = read(tmp_path, kind, first_seq + number)
        assert bool(error) == any(each >= number for each in damaged)
        assert more == numbers(number, next((each for each in damaged if each >= number), RECORDS) - 1)


@pytest.mark.parametrize("kind", KINDS)
def test_a_transaction_that_is_damaged_is_read_as_a_whole_or_not_at_all(kind: str, tmp_path: Path) -> None:
    first_seq, _ = write(tmp_path, kind, batch=10)
    flip(tmp_path, data_of(25))
    found, error = read(tmp_path, kind)
    assert found == numbers(0, 19)
    assert f"record {first_seq + 20} cannot be read" in error
    assert read(tmp_path, kind, first_seq + 30) == (numbers(30, RECORDS - 1), "")


@pytest.mark.parametrize("kind", KINDS)
def test_a_reader_says_that_a_ledger_of_the_log_is_missing(kind: str, tmp_path: Path) -> None:
    first_seq, ledgers = write(tmp_path, kind)
    with open_quick(tmp_path) as manager:
        manager.delete_ledger(ledgers[1])
    found, error = read(tmp_path, kind)
    assert found == numbers(0, 19)
    assert f"log 'my log': record {first_seq + 20} cannot be read, because ledger {ledgers[1]} of segment 2 is" in error
    assert f"`pybk {kind} truncate PATH 'my log' {first_seq + 40}`" in error
    assert read(tmp_path, kind, first_seq + 40) == (numbers(40, RECORDS - 1), "")


WRITE_AND_DIE = """
import os, sys
from pybk import LedgerManager, Log
manager = LedgerManager.open(sys.argv[1])
log = Log.open(manager, "my log", password=b"p")
writer = log.writer()
writer.append_many([b"data-000", b"data-001"])
manager.checkpoint()
os._exit(0)
"""


@pytest.mark.sampled(one_in=2)
@pytest.mark.parametrize("call", [Log.last_seq, Log.writer])
def test_the_error_of_a_damaged_record_at_the_end_of_an_open_ledger_names_the_log(
    call: Callable[[Log], object], tmp_path: Path
) -> None:
    command = [sys.executable, "-c", WRITE_AND_DIE, str(tmp_path)]
    subprocess.run(command, env={**os.environ, "PYTHONPATH": python_path()}, check=True)
    flip(tmp_path, data_of(1))
    with (
        open_quick(tmp_path) as manager,
        Log.open(manager, "my log", password=PASSWORD) as log,
        pytest.raises(CorruptError, match=r"log 'my log': .*`pybk log delete PATH 'my log'`"),
    ):
        call(log)

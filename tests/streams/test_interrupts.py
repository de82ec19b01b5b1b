"""A KeyboardInterrupt at any line of a call that changes a log: the log stays whole, and continues."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path

import pytest

from pybk import (
    CheckpointWriter,
    LedgerManager,
    Log,
    LogFencedError,
    LogRecord,
    LogWriter,
    NewRecord,
    TxId,
    WriteAheadLog,
)
from tests.interrupting import interrupted_at
from tests.sampling import places
from tests.waiting import WAIT_S

FILES = ("pybk/streams/",)
LINES = {"roll": 29, "truncate": 23, "truncate_after": 17, "transaction": 17, "close": 29, "writer": 43}
"""Every how many lines calls that have many are interrupted."""


@pytest.mark.sampled(one_in=2)
@pytest.mark.parametrize("what", ["append", "append_many", "append_async", "roll", "truncate_after", "transaction"])
@pytest.mark.timeout(0)
def test_an_interrupt_at_any_line_leaves_a_log_that_appends(tmp_path: Path, what: str) -> None:
    with LedgerManager.open(tmp_path) as manager:
        following, line, fired = places(f"wal {what}", LINES.get(what, 7), 3), 0, True
        while fired:
            line = next(following)
            wal = WriteAheadLog.open(manager, f"{what}/{line}", insecure=True)
            done = {wal.append(b"before"): b"before"}
            calls: dict[str, Callable[[], object]] = {
                "append": partial(wal.append, b"interrupted"),
                "append_many": partial(wal.append_many, [b"interrupted"] * 3),
                "append_async": partial(wal.append_async, b"interrupted"),
                "roll": wal.roll,
                "truncate_after": partial(wal.truncate_after, 1),
                "transaction": partial(wal.append_many, [bytes(40_000)] * 6),
            }
            fired = interrupted_at(line, FILES, calls[what])
            done[wal.append(b"after")] = b"after"
            done.update(zip(wal.append_many([b"x", b"y"]), [b"x", b"y"], strict=True))
            found = list(wal.replay())
            assert [record.lsn for record in found] == list(range(1, len(found) + 1)), f"line event {line}"
            kept = {record.lsn: record.data for record in found}
            assert {lsn: kept.get(lsn) for lsn in done} == done, f"line event {line}"
            wal.close()
            assert len(list(WriteAheadLog.open(manager, f"{what}/{line}", mode="r", insecure=True).replay())) == len(
                found
            )
        assert line > 20, "nothing was traced"


@pytest.mark.sampled(one_in=3, group="any line")
@pytest.mark.timeout(0)
def test_an_interrupt_at_any_line_of_a_checkpoint_leaves_no_upload(tmp_path: Path) -> None:
    def checkpoint(content: bytes) -> None:
        with wal.checkpoint(meta=content.decode(), truncate=False) as file:
            files.append(file)  # so that its finaliser is not interrupted, from which Python lets no exception out
            file.write(content)

    files: list[CheckpointWriter] = []
    with LedgerManager.open(tmp_path) as manager, WriteAheadLog.open(manager, insecure=True) as wal:
        wal.append(b"one")
        following, line, fired = places("checkpoint", 23, 3), 0, True
        while fired:
            line = next(following)
            fired = interrupted_at(line, FILES, partial(checkpoint, b"%d" % line))
            files.clear()
            wal.roll()
            assert wal.stats().uploads == 0, f"line event {line}"
            for each in wal.checkpoints():
                with each.open() as read:
                    assert read.read() == each.meta.encode(), f"line event {line}"
        assert wal.checkpoints()[-1].meta == str(line), "without an interrupt it is listed"


def named_calls(log: Log, writer: LogWriter, taken: list[LogWriter]) -> dict[str, Callable[[], object]]:
    return {
        "append": partial(writer.append, b"interrupted", txid=100),
        "append_many": partial(writer.append_many, [NewRecord(b"interrupted", 100)] * 3),
        "append_async": partial(writer.append_async, b"interrupted", txid=100),
        "roll": writer.roll,
        "truncate": partial(log.truncate, 1),
        "transaction": partial(writer.append_many, [NewRecord(bytes(40_000), 100)] * 6),
        "close": writer.close,
        "writer": lambda: taken.append(log.writer(steal=True)),
    }


def check_search(log: Log, records: list[LogRecord]) -> None:
    """Every transaction id is found, also those of records whose append was interrupted."""
    for wanted in (1, 2, 50, 51, 100, 101):
        first = next((each.position for each in records if each.txid is not None and each.txid >= wanted), None)
        assert log.position_for(TxId(wanted)) == first


@pytest.mark.sampled(one_in=3)
@pytest.mark.parametrize(
    "what", ["append", "append_many", "append_async", "roll", "truncate", "transaction", "close", "writer"]
)
@pytest.mark.timeout(0)
def test_an_interrupt_at_any_line_leaves_a_named_log_that_continues(tmp_path: Path, what: str) -> None:
    with LedgerManager.open(tmp_path) as manager:
        following, line, fired = places(f"log {what}", LINES.get(what, 9), 3), 0, True
        while fired:
            line = next(following)
            log = Log.open(manager, f"{what}/{line}", insecure=True)
            writer = log.writer(ordered_txids=False)
            done = {writer.append(b"before", txid=1).seq: b"before"}
            taken = list[LogWriter]()
            fired = interrupted_at(line, FILES, named_calls(log, writer, taken)[what])
            if what == "close":
                writer.close()
                writer = log.writer(ordered_txids=False)
            elif what == "writer":
                for each in (writer, *taken):
                    with suppress(LogFencedError):
                        each.close()
                writer = log.writer(ordered_txids=False, wait=WAIT_S)
            done[writer.append(b"after", txid=50).seq] = b"after"
            done.update((each.seq, b"x") for each in writer.append_many([b"x", b"x"]))
            records = list(log.reader())
            assert [each.seq for each in records] == list(range(log.first_seq(), log.first_seq() + len(records)))
            kept = {each.seq: each.data for each in records}
            assert log.first_seq() <= (what == "truncate"), f"line event {line}"
            assert {seq: kept.get(seq) for seq in done if seq >= log.first_seq()} == {
                seq: data for seq, data in done.items() if seq >= log.first_seq()
            }, f"line event {line}"
            check_search(log, records)
            writer.close()
            with Log.open(manager, f"{what}/{line}", insecure=True) as again:
                again.writer().close()
                assert list(again.reader()) == records
        assert line > 20, "nothing was traced"


@pytest.mark.sampled(one_in=3, group="any line")
@pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.timeout(0)
def test_an_interrupt_at_any_line_of_taking_a_log_leaves_it_to_the_next_writer(tmp_path: Path) -> None:
    files = ("pybk/streams/list_writer.py", "pybk/manager/local_backend.py")
    with LedgerManager.open(tmp_path) as manager, Log.open(manager, "log", insecure=True) as log:
        line, fired = 0, True
        while fired:
            taken: list[LogWriter] = []
            fired = interrupted_at(line, files, lambda: taken.append(log.writer()))  # noqa: B023
            for writer in taken:
                writer.close()
            log.writer(wait=WAIT_S).close()
            line += 1
        assert line > 20, "nothing was traced"

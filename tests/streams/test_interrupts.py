"""A KeyboardInterrupt at any line of an append, a roll or a cut: the log stays whole, and its next append works."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from pybk import LedgerManager
from pybk.streams.wal import WriteAheadLog
from tests.interrupting import interrupted_at

FILES = ("pybk/streams/",)


@pytest.mark.parametrize("what", ["append", "append_many", "append_async", "roll", "truncate_after", "transaction"])
@pytest.mark.timeout(method="thread")
def test_an_interrupt_at_any_line_leaves_a_log_that_appends(tmp_path: Path, what: str) -> None:
    with LedgerManager.open(tmp_path) as manager:
        line, fired = 0, True
        while fired:
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
            line += 1
        assert line > 20, "nothing was traced"

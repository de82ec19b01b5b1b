"""Logs that several clients use at once: a look sees what others appended, and owners overtake each other."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest

from pybk import LedgerManager, LedgerReader, Log, LogEnd, LogFencedError, TruncatedError, WriteAheadLog
from tests.cluster.inside import inside
from tests.waiting import wait_until

PASSWORD = b"two clients"


def test_a_look_without_waiting_sees_what_another_client_appends(tmp_path: Path) -> None:
    with inside(tmp_path) as cluster, cluster.connect() as writing, cluster.connect() as reading:
        writer = Log.open(writing, "log", password=PASSWORD).writer()
        writer.append(b"first")
        with Log.open(reading, "log", password=PASSWORD) as log:
            reader, subscription = log.reader(), log.subscribe("all", start=LogEnd.EARLIEST)
            seen: list[bytes] = []
            handed: list[bytes] = []

            def look() -> int:
                seen.extend(record.data for record in reader.read_many(10, timeout=0))
                handed.extend(record.data for record in subscription.read_many(10, timeout=0))
                return min(len(seen), len(handed))

            for count in range(1, 6):
                wait_until(lambda count=count: look() == count)  # type: ignore[misc]
                writer.append(b"next")
        assert seen == handed == [b"first", *[b"next"] * 4]


def test_a_follower_that_has_read_ahead_sees_what_another_client_truncates(tmp_path: Path) -> None:
    with inside(tmp_path) as cluster, cluster.connect() as writing, cluster.connect() as reading:
        owner = WriteAheadLog.open(writing, "log", password=PASSWORD)
        owner.append_many([b"record"] * 1000)
        with WriteAheadLog.open(reading, "log", password=PASSWORD, mode="r") as standby:
            following = standby.follow()
            assert next(following).lsn == 1
            owner.truncate_before(990)

            def is_refused() -> bool:
                try:
                    return next(following).lsn >= 990
                except TruncatedError as error:
                    return error.first_seq == 990

            wait_until(is_refused)
            assert following.applied is not None
            assert following.applied[1] < 989, "what was truncated was yielded to its end"
        owner.close()


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_take_over_during_which_another_one_deletes_what_it_recovers_begins_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    with LedgerManager.open(tmp_path / "store") as manager:
        first = WriteAheadLog.open(manager, password=PASSWORD)  # whose ledger is empty, so a take-over deletes it
        opened = LedgerManager.open_ledger

        def overtake() -> None:
            with WriteAheadLog.open(manager, password=PASSWORD, steal=True) as other:
                other.append(b"of the other one")

        def overtaken(self: LedgerManager, *arguments: Any, **options: Any) -> LedgerReader:
            monkeypatch.setattr(LedgerManager, "open_ledger", opened)
            reader = opened(self, *arguments, **options) if when == "after" else None
            thread = threading.Thread(target=overtake)
            thread.start()
            thread.join()
            return opened(self, *arguments, **options) if reader is None else reader

        monkeypatch.setattr(LedgerManager, "open_ledger", overtaken)
        with WriteAheadLog.open(manager, password=PASSWORD, steal=True) as second:
            assert second.append(b"of this one") == 2
            assert [record.data for record in second.replay()] == [b"of the other one", b"of this one"]
        with pytest.raises(LogFencedError):
            first.append(b"late")
        with pytest.raises(LogFencedError):
            first.close()

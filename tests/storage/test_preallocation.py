"""Log files are made with zeros for small commits and without them for large ones; pauses end when one is urgent."""

from __future__ import annotations

import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from pybk.flags import WriteFlag
from pybk.ledger.digest import DigestType
from pybk.storage import preallocation
from pybk.storage.preallocation import LogFileSupply
from tests.internals import store_of
from tests.storage.real_store import contents, open_quick


def unzeroed_queued(supply: LogFileSupply) -> list[bool]:
    return [made.row.file_id in supply.unzeroed for made in supply.queued()]


def test_small_commits_after_a_burst_go_to_files_with_zeros(tmp_path: Path) -> None:
    batch = [bytes(1024)] * 256
    with open_quick(tmp_path, background=False, log_file_bytes=8 << 20, unchecked_tail_bytes=1 << 30) as manager:
        store = store_of(manager)
        supply, tick = store.supply, store.scheduler.tick
        deferred = manager.create_ledger(
            password=b"p", digest_type=DigestType.CRC32C, write_flags=WriteFlag.DEFERRED_FORCE
        )
        for _ in range(120):
            deferred.append_many(batch)
            deferred.force()
            tick()
        assert supply.current_id in supply.unzeroed
        assert all(unzeroed_queued(supply))
        assert not supply.has_better()
        writer = manager.create_ledger(password=b"p")
        for number in range(100):
            writer.append(b"%d" % number)
        tick()
        assert all(unzeroed_queued(supply)), "too few small commits to say that the burst is over"
        for number in range(100, 400):
            writer.append(b"%d" % number)
        tick()
        assert unzeroed_queued(supply) == [False, False]
        writer.append(b"400")
        assert supply.current_id not in supply.unzeroed
        for _ in range(3):
            tick()
            assert not any(unzeroed_queued(supply))
        assert len(list((tmp_path / "nvme").glob("*.log"))) < 20
        manager.checkpoint()
        assert contents(manager, writer.ledger_id, b"p") == [b"%d" % number for number in range(401)]
        assert len(contents(manager, deferred.ledger_id, b"p")) == 120 * 256
    with open_quick(tmp_path, background=False) as manager:
        assert contents(manager, writer.ledger_id, b"p", recover=True) == [b"%d" % number for number in range(401)]


def test_pauses_end_when_the_log_has_taken_the_last_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The log waits for the file that is made if it fills the one that it took before."""
    pauses: list[float] = []
    with open_quick(tmp_path, background=False) as manager, manager.create_ledger(password=b"p") as writer:
        store = store_of(manager)
        supply = store.supply

        def sleep(seconds: float) -> None:
            pauses.append(seconds)
            if len(pauses) == 3:
                store.log.cut(lambda: None)
                writer.append(b"x")

        supply.give_back()
        with supply.making:
            supply.make(1 << 20, 1.0)
            monkeypatch.setattr(preallocation, "time", SimpleNamespace(monotonic=time.monotonic, sleep=sleep))
            supply.make(1 << 20, 1.0)
            # Nobody makes another file before the lock is free, for which the append may have asked.
            assert len(pauses) == 3
            assert len(supply.queued()) == 1

"""What stays of a commit that is done: ledgers and futures refer to it for as long as they live."""

from __future__ import annotations

import errno
import gc
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from pybk.errors import StorageFailedError
from pybk.manager.append_future import origin_of
from pybk.storage.descriptor import StagedEntries
from pybk.storage.log.commit import StagedGroup
from pybk.threads.group_commit import Completion
from tests.internals import descriptor_of, store_of
from tests.storage.real_store import open_quick

ENTRY = bytes(1000)
COUNT = 50


def held_bytes(completion: Completion) -> int:
    """Return how many bytes of entries a completion refers to, by its lists and its staged entries."""
    seen: set[int] = set()
    left: list[object] = [completion]
    nbytes = 0
    while left:
        found = left.pop()
        if id(found) in seen:
            continue
        seen.add(id(found))
        if isinstance(found, bytes | memoryview):
            nbytes += len(found)
        elif isinstance(found, Completion | StagedEntries | StagedGroup | list | tuple):
            left += gc.get_referents(found)
    return nbytes


def test_a_durable_commit_holds_no_entries(tmp_path: Path) -> None:
    with open_quick(tmp_path / "data") as manager, manager.create_ledger(insecure=True) as writer:
        future = writer.append_many_async([ENTRY] * COUNT)
        future.result()
        store_of(manager).log.stand_still(lambda: None)  # until the leader that wrote it has left
        _, commit = origin_of(future)
        staging = descriptor_of(writer).staging
        assert staging is not None
        assert staging.completion is commit
        assert held_bytes(commit) == 0
        pending = Completion()
        pending.callbacks = [ENTRY]  # type: ignore[list-item]  # bytes in a list, as a commit has them
        assert held_bytes(pending) == len(ENTRY), "what is counted"


def test_a_commit_that_its_step_did_not_end_fails_the_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As when memory is short while it fails, or an exception of another thread strikes: nobody waits for ever."""
    with open_quick(tmp_path / "data") as manager:
        writer = manager.create_ledger(insecure=True)
        writer.append(ENTRY)
        log = store_of(manager).log
        fail = log.fail_commit

        def short(*given: Any) -> None:
            monkeypatch.setattr(log, "fail_commit", fail)
            raise MemoryError

        def refused(*given: Any) -> None:
            raise OSError(errno.EIO, "no")

        monkeypatch.setattr(log.writer, "write", refused)
        monkeypatch.setattr(log, "fail_commit", short)
        future = writer.append_async(ENTRY)
        with suppress(MemoryError):
            log.flush()
        with pytest.raises(StorageFailedError):
            future.result()
        with pytest.raises(StorageFailedError):
            writer.append(ENTRY)
        with suppress(StorageFailedError):
            writer.close()

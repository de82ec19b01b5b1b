"""Many threads at once: moves in every direction, checkpoints and deletions while entries are appended and read."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from pybk.errors import LedgerFencedError, NoSuchLedgerError
from pybk.flags import ReadFlag, StorageHint
from pybk.ledger.digest import DigestType
from pybk.ledger.ledger_metadata import LedgerState
from pybk.manager.ledger_manager import LedgerManager
from tests.internals import store_of
from tests.storage.real_store import contents, numbered, open_quick, payloads
from tests.waiting import WAIT_S


@contextmanager
def running(*works: Callable[[], None]) -> Iterator[threading.Event]:
    """Call each work again and again, in a thread of its own, until the end of the ``with``; raise what one raised."""
    over = threading.Event()
    errors: list[BaseException] = []

    def run(work: Callable[[], None]) -> None:
        try:
            while not over.is_set():
                work()
        except BaseException as error:
            errors.append(error)
            raise

    threads = [threading.Thread(target=run, args=(work,)) for work in works]
    for thread in threads:
        thread.start()
    try:
        yield over
    finally:
        over.set()
        for thread in threads:
            thread.join(WAIT_S)
        assert not any(thread.is_alive() for thread in threads)
    assert not errors


def read_all(manager: LedgerManager, ledger_id: int, flags: ReadFlag = ReadFlag.NONE) -> Callable[[], None]:
    """Return a work that reads a ledger whole, singly, and in batches, and compares."""

    def read() -> None:
        with manager.open_ledger(ledger_id, recover=False, read_flags=flags) as reader:
            last = reader.last_add_confirmed
            assert payloads(reader) == numbered(last + 1)
            for entry_id in range(0, last + 1, 37):
                assert next(reader.read(entry_id, entry_id)).payload == b"entry %d" % entry_id
            if last >= 0:
                assert bytes(reader.read_batch(last).payload(0)) == b"entry %d" % last

    return read


@pytest.mark.parametrize("state", [LedgerState.OPEN, LedgerState.CLOSED])
def test_a_move_is_done_when_it_returns_in_every_direction(tmp_path: Path, state: LedgerState) -> None:
    with open_quick(tmp_path) as manager:
        writer = manager.create_ledger(digest_type=DigestType.CRC32C)
        writer.append_many(numbered(300))
        if state is LedgerState.CLOSED:
            writer.close()
        count = 300
        for source, target in itertools.permutations(StorageHint, 2):
            manager.move_ledger(0, source)
            manager.move_ledger(0, target)
            assert manager.ledger_metadata(0).tier is target
            assert manager.ledger_metadata(0).state is state
            places = where(manager)
            assert places == {target}, f"moved from {source} to {target}, and lies in {places}"
            assert contents(manager, 0) == numbered(count)
            if state is LedgerState.OPEN:
                count = 1 + writer.append(b"entry %d" % count)
                assert contents(manager, 0) == numbered(count)
        manager.move_ledger(0, manager.ledger_metadata(0).tier)
    with open_quick(tmp_path) as manager:
        assert contents(manager, 0, recover=True) == numbered(count)


def where(manager: LedgerManager) -> set[StorageHint]:
    """Return the tiers in which the entries of ledger 0 lie that the index knows."""
    store = store_of(manager)
    files = {int(file_id) for page in store.index.pages(0) for file_id in page["file"]}
    return {StorageHint(store.volumes.rows[file_id].tier) for file_id in files}


def test_moves_checkpoints_and_reads_while_entries_are_appended(tmp_path: Path) -> None:
    with open_quick(tmp_path, unchecked_tail_bytes=4 << 20) as manager:
        writer = manager.create_ledger(insecure=True)
        counter = itertools.count()
        tiers = itertools.cycle(StorageHint)

        def append() -> None:
            number = next(counter)
            assert writer.append(b"entry %d" % number) == number

        works = [
            append,
            lambda: manager.move_ledger(0, next(tiers)),
            manager.checkpoint,
            read_all(manager, 0),
            read_all(manager, 0, ReadFlag.DONT_CACHE),
        ]
        with running(*works):
            threading.Event().wait(1.5)
        count = next(counter)
        writer.close()
        assert contents(manager, 0) == numbered(count)
    with open_quick(tmp_path) as manager:
        assert contents(manager, 0) == numbered(count)


def test_closed_ledgers_move_while_others_are_made_and_deleted(tmp_path: Path) -> None:
    with open_quick(tmp_path) as manager:
        with manager.create_ledger(insecure=True) as writer:
            writer.append_many(numbered(400))
        tiers = itertools.cycle(StorageHint)

        def make_and_delete() -> None:
            with manager.create_ledger(storage_hints={next(tiers)}, insecure=True) as other:
                other.append_many(numbered(50))
            assert contents(manager, other.ledger_id) == numbered(50)
            manager.delete_ledger(other.ledger_id)
            with pytest.raises(NoSuchLedgerError):
                manager.open_ledger(other.ledger_id)

        works = [
            make_and_delete,
            make_and_delete,
            lambda: manager.move_ledger(0, next(tiers)),
            manager.checkpoint,
            read_all(manager, 0),
        ]
        with running(*works):
            threading.Event().wait(1.5)
        assert contents(manager, 0) == numbered(400)
        assert list(manager.list_ledgers()) == [0]


def test_a_ledger_is_deleted_while_it_is_read_followed_moved_and_appended(tmp_path: Path) -> None:
    with open_quick(tmp_path) as manager:
        for tier in StorageHint:
            writer = manager.create_ledger(storage_hints={tier}, insecure=True)
            writer.append_many([b"x" * 600] * 5000)
            manager.checkpoint()
            ended: list[str] = []

            def until_deleted(work: Callable[[], object], name: str, ended: list[str] = ended) -> threading.Thread:
                def run() -> None:
                    try:
                        while True:
                            work()
                    except NoSuchLedgerError:
                        ended.append(name)

                return threading.Thread(target=run, name=name)

            reader = manager.open_ledger(writer.ledger_id, recover=False)
            threads = [
                until_deleted(lambda w=writer: w.append(b"x" * 600), "append"),  # type: ignore[misc]  # bound now
                until_deleted(lambda w=writer: w.append_many([b"x" * 600] * 9), "append_many"),  # type: ignore[misc]  # ditto
                until_deleted(lambda r=reader: payloads(r), "read"),  # type: ignore[misc]  # ditto
                until_deleted(lambda r=reader: next(r.read(7, 7)), "read one"),  # type: ignore[misc]  # ditto
                until_deleted(lambda r=reader: list(r.follow()), "follow"),  # type: ignore[misc]  # ditto
                until_deleted(lambda i=writer.ledger_id: manager.move_ledger(i, StorageHint.HDD), "move"),  # type: ignore[misc]  # ditto
            ]
            for thread in threads:
                thread.start()
            threading.Event().wait(0.2)
            manager.delete_ledger(writer.ledger_id)
            manager.checkpoint()
            for thread in threads:
                thread.join(WAIT_S)
            assert sorted(ended) == ["append", "append_many", "follow", "move", "read", "read one"]
        assert list(manager.list_ledgers()) == []


def test_two_recoveries_and_a_writer_agree_on_the_end(tmp_path: Path) -> None:
    with open_quick(tmp_path) as manager:
        for _ in range(20):
            writer = manager.create_ledger(insecure=True)
            acknowledged = [writer.append(payload) for payload in numbered(3)]
            ends: list[int] = []

            def recover(ledger_id: int = writer.ledger_id, ends: list[int] = ends) -> None:
                ends.append(manager.open_ledger(ledger_id).last_add_confirmed)

            threads = [threading.Thread(target=recover) for _ in range(3)]
            for thread in threads:
                thread.start()
            try:
                while True:
                    acknowledged.append(writer.append(b"entry %d" % len(acknowledged)))
            except LedgerFencedError:
                pass
            for thread in threads:
                thread.join(WAIT_S)
            assert len(ends) == 3
            assert len(set(ends)) == 1
            assert ends[0] >= acknowledged[-1]
            assert contents(manager, writer.ledger_id) == numbered(ends[0] + 1)


def test_ledgers_created_by_many_threads_have_ids_of_their_own(tmp_path: Path) -> None:
    with open_quick(tmp_path) as manager:
        found: list[tuple[int, int]] = []

        def create() -> None:
            for _ in range(10):
                with manager.create_ledger(password=b"p") as writer:
                    found.append((writer.ledger_id, writer.metadata.creation_sequence))

        threads = [threading.Thread(target=create) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert sorted(ledger_id for ledger_id, _ in found) == list(range(80))
        assert sorted(sequence for _, sequence in found) == list(range(80))
        assert list(manager.list_ledgers()) == list(range(80))

"""Read-only managers next to a live writer: any number, never a wrong byte, nothing written."""

from __future__ import annotations

import asyncio
import os
import random
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from pybk.errors import IllegalOperationError, NoSuchLedgerError, ReadRangeError
from pybk.flags import ReadFlag, StorageHint, WriteFlag
from pybk.ledger.ledger_metadata import LedgerState
from pybk.manager.ledger_manager import LedgerManager
from pybk.manager.ledger_reader import LedgerReader
from pybk.storage.readonly import ReadOnlyStore
from tests.internals import store_of, store_view_of
from tests.storage.real_store import contents, numbered, open_quick, payloads, python
from tests.waiting import WAIT_S, wait_until

CHILD = """
import random, sys
from pathlib import Path
from pybk.flags import StorageHint
from tests.storage.real_store import open_quick

def payload(ledger_id, entry_id):
    return b"%d/%d " % (ledger_id, entry_id) * (1 + (entry_id * 7 + ledger_id) % 40)

def say(*words):
    print(*words, flush=True)

root, steps, seed = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
dice = random.Random(seed)
with open_quick(root, background=False) as manager:
    kept = manager.create_ledger(insecure=True)
    writers = {kept.ledger_id: kept}
    say("open")
    sys.stdin.readline()
    for step in range(steps):
        if len(writers) < 6:
            writer = manager.create_ledger(storage_hints={dice.choice(list(StorageHint))}, insecure=True)
            writers[writer.ledger_id] = writer
        for writer in list(writers.values()):
            first = writer.last_add_pushed + 1
            if dice.random() < 0.5:
                writer.append(payload(writer.ledger_id, first))
            else:
                writer.append_many([payload(writer.ledger_id, first + n) for n in range(dice.randrange(1, 60))])
        what = dice.randrange(6)
        victim = dice.choice(list(writers))
        if what == 0:
            manager.move_ledger(victim, dice.choice(list(StorageHint)))
        elif what == 1 and victim != kept.ledger_id:
            manager.delete_ledger(victim)
            del writers[victim]
        elif what == 2 and victim != kept.ledger_id:
            writers.pop(victim).close()
        elif what == 3:
            manager.checkpoint()
        elif what == 4:
            manager.move_ledger(kept.ledger_id, dice.choice(list(StorageHint)))
    last = kept.last_add_confirmed
    kept.close()
    say(kept.ledger_id, last)
"""


def payload(ledger_id: int, entry_id: int) -> bytes:
    return b"%d/%d " % (ledger_id, entry_id) * (1 + (entry_id * 7 + ledger_id) % 40)


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[[int, int], subprocess.Popen[str]]]:
    children = []

    def begin(steps: int, seed: int) -> subprocess.Popen[str]:
        child = python(CHILD, tmp_path, str(steps), str(seed))
        children.append(child)
        assert child.stdout is not None
        assert child.stdout.readline() == "open\n"
        return child

    yield begin
    for child in children:
        child.kill()
        child.communicate()


def go(child: subprocess.Popen[str]) -> None:
    assert child.stdin is not None
    child.stdin.write("go\n")
    child.stdin.flush()


def end(child: subprocess.Popen[str]) -> int:
    """Return the last entry of the ledger that the child kept open until its end."""
    text, _ = child.communicate("")
    assert child.returncode == 0, text
    return int(text.split()[1])


def check(entry: Any) -> int:
    assert entry.payload == payload(entry.ledger_id, entry.entry_id)
    return int(entry.entry_id)


def look_around(manager: LedgerManager, dice: random.Random) -> int:
    """Read all over the store; ledgers may be deleted at any moment, and everything else must be right."""
    read = 0
    for ledger_id in list(manager.list_ledgers()):
        try:
            flags = ReadFlag(dice.randrange(2))
            with manager.open_ledger(ledger_id, read_flags=flags) as reader:
                last = reader.last_add_confirmed
                assert [check(entry) for entry in reader.read(0, last)] == list(range(last + 1))
                for _ in range(min(last + 1, 5)):
                    one = dice.randrange(last + 1)
                    assert check(next(reader.read(one, one))) == one
                again = reader.read_last_add_confirmed()
                assert again >= last
                if again >= 0:
                    assert check(reader.read_batch(again)[-1]) == again
                read += last + 1
        except NoSuchLedgerError:
            assert ledger_id != 0, "the ledger that is never deleted was taken for deleted"
    return read


@pytest.mark.sampled(one_in=2)
@pytest.mark.parametrize("seed", [1, 2])
def test_readers_of_a_store_whose_writer_does_everything(
    tmp_path: Path, start: Callable[[int, int], subprocess.Popen[str]], seed: int
) -> None:
    child = start(50, seed)
    problems: list[BaseException] = []
    rounds = [0] * 4
    followed: list[int] = []
    over = threading.Event()
    with open_quick(tmp_path, read_only=True) as shared, open_quick(tmp_path, read_only=True) as other:

        def look(number: int, manager: LedgerManager) -> None:
            dice = random.Random(number)
            try:
                while not over.is_set():
                    rounds[number] += look_around(manager, dice) > 0
            except BaseException as error:
                problems.append(error)
                raise

        def follow() -> None:
            with shared.open_ledger(0) as reader:
                followed.extend(check(entry) for entry in reader.follow())

        threads = [threading.Thread(target=look, args=(n, other if n == 3 else shared)) for n in range(4)]
        threads.append(threading.Thread(target=follow))
        for thread in threads:
            thread.start()
        go(child)
        last = end(child)
        threads[-1].join(WAIT_S)
        try:
            wait_until(lambda: min(rounds) or problems, "each reader to look around once")
        finally:
            over.set()
        for thread in threads:
            thread.join(WAIT_S)
            assert not thread.is_alive()
        assert not problems
        assert followed == list(range(last + 1))


def test_a_reader_that_looks_rarely_catches_up(
    tmp_path: Path, start: Callable[[int, int], subprocess.Popen[str]]
) -> None:
    child = start(30, 3)
    with open_quick(tmp_path, read_only=True) as manager, manager.open_ledger(0) as reader:
        assert reader.read_last_add_confirmed() == -1
        go(child)
        last = end(child)
        assert reader.read_last_add_confirmed() == last
        assert reader.is_closed
        assert [check(entry) for entry in reader.read(0, last)] == list(range(last + 1))
        look_around(manager, random.Random(0))


def test_following_from_another_process_in_a_loop(
    tmp_path: Path, start: Callable[[int, int], subprocess.Popen[str]]
) -> None:
    async def main() -> list[int]:
        manager = await LedgerManager.open_async(tmp_path, read_only=True)
        async with manager, manager.open_ledger_async(0) as reader:
            go(child)
            return [check(entry) async for entry in reader.follow_async()]

    child = start(15, 4)
    found = asyncio.run(main())
    assert found == list(range(end(child) + 1))


def test_everything_that_changes_is_refused(tmp_path: Path) -> None:
    with open_quick(tmp_path) as live:
        writer = live.create_ledger(insecure=True)
        writer.append(b"x")
        with open_quick(tmp_path, read_only=True) as manager:
            assert manager.read_only
            assert "read-only" in repr(manager)
            calls: list[Callable[[], Any]] = [
                lambda: manager.create_ledger(insecure=True),
                lambda: manager.delete_ledger(0),
                lambda: manager.move_ledger(0, StorageHint.HDD),
                lambda: manager.open_ledger(0, recover=True),
                manager.checkpoint,
            ]
            for call in calls:
                with pytest.raises(IllegalOperationError, match="without read_only=True"):
                    call()
            assert manager.ledger_metadata(0).state is LedgerState.OPEN
        assert writer.append(b"y") == 1


def listing(root: Path) -> dict[str, tuple[int, int, bytes]]:
    """Return size, time of change and content of all files but those in which LMDB notes its readers."""
    return {
        str(path): (path.stat().st_size, path.stat().st_mtime_ns, path.read_bytes())
        for path in sorted(root.rglob("*"))
        if path.is_file() and path.name != "lock.mdb"
    }


def test_nothing_is_written_recovered_or_repaired(tmp_path: Path) -> None:
    with open_quick(tmp_path) as manager:
        manager.create_ledger(insecure=True).append_many(numbered(20))
        manager.checkpoint()
    child = python(
        """
import os, sys
from pathlib import Path
from tests.storage.real_store import open_quick
manager = open_quick(Path(sys.argv[1]), background=False)
manager.create_ledger(insecure=True).append_many([b"entry %d" % n for n in range(30)])
os._exit(0)
""",
        tmp_path,
    )
    child.communicate()
    before = listing(tmp_path)
    for _ in range(2):
        with open_quick(tmp_path, read_only=True) as manager, open_quick(tmp_path, read_only=True) as second:
            assert contents(manager, 0) == contents(second, 0) == numbered(20)
            assert contents(manager, 1) == numbered(30)
            assert manager.ledger_metadata(1).state is LedgerState.OPEN
            with manager.open_ledger(0) as reader:
                reader.read_last_add_confirmed()
    assert listing(tmp_path) == before


def test_unconfirmed_entries_of_a_deferred_ledger(tmp_path: Path) -> None:
    with open_quick(tmp_path, background=False) as live, open_quick(tmp_path, read_only=True) as manager:
        writer = live.create_ledger(write_flags=WriteFlag.DEFERRED_FORCE, insecure=True)
        writer.append_many(numbered(3))
        with manager.open_ledger(0) as reader:
            with pytest.raises(ReadRangeError):
                reader.read_unconfirmed(0, 2)
            live.create_ledger(insecure=True).append(b"takes the buffered ones along")
            assert reader.read_last_add_confirmed() == -1
            assert [entry.payload for entry in reader.read_unconfirmed(0, 2)] == numbered(3)
            writer.force()
            assert reader.read_last_add_confirmed() == 2
            live.checkpoint()
            assert reader.read_last_add_confirmed() == 2
            assert payloads(reader) == numbered(3)


def test_a_ledger_created_while_a_checkpoint_ran_is_not_taken_for_deleted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with open_quick(tmp_path, background=False) as live, open_quick(tmp_path, read_only=True) as manager:
        live.create_ledger(insecure=True).append(b"old")
        store = store_of(live)
        cut = store.log.cut
        readers: list[LedgerReader] = []

        def cut_and_create(snapshot: Callable[[], None]) -> int:
            lsn = cut(snapshot)
            if not readers:
                live.create_ledger(insecure=True).append_many(numbered(3))
                readers.append(manager.open_ledger(1))
            return lsn

        monkeypatch.setattr(store.log, "cut", cut_and_create)
        live.checkpoint()
        assert readers[0].read_last_add_confirmed() == 2
        assert payloads(readers[0]) == numbered(3)
        live.delete_ledger(1)
        with pytest.raises(NoSuchLedgerError):
            readers[0].read_last_add_confirmed()
        live.checkpoint()
        with pytest.raises(NoSuchLedgerError):
            readers[0].read_last_add_confirmed()


def test_a_checkpoint_between_two_reads_of_the_index_is_not_reported_as_damage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings: dict[str, Any] = {"background": False, "fill_ratio": 0.01}
    with open_quick(tmp_path, **settings) as live, open_quick(tmp_path, read_only=True, **settings) as manager:
        writer = live.create_ledger(insecure=True)
        writer.append_many(numbered(500))
        reader = manager.open_ledger(0)
        live.checkpoint()
        index = store_view_of(manager).index
        files = index.files
        moments: list[range] = []

        def checkpoint_first() -> Any:
            if not moments:
                moments.append(writer.append_many(numbered(500, 500)))
                live.checkpoint()
                assert len(list(tmp_path.rglob("*.log"))) > 1, "the log files should have stayed"
            return files()

        monkeypatch.setattr(index, "files", checkpoint_first)
        assert reader.read_last_add_confirmed() == 999
        assert payloads(reader) == numbered(1000)


def test_reading_continues_while_another_thread_learns_of_a_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with open_quick(tmp_path, background=False) as live, open_quick(tmp_path, read_only=True) as manager:
        writer = live.create_ledger(insecure=True)
        writer.append_many(numbered(20))
        reader = manager.open_ledger(0)
        log = store_of(live).log
        cut = log.cut

        def cut_and_append(snapshot: Callable[[], None]) -> int:
            lsn = cut(snapshot)
            writer.append_many(numbered(10, 20))
            assert reader.read_last_add_confirmed() == 29
            return lsn

        monkeypatch.setattr(log, "cut", cut_and_append)
        live.checkpoint()
        found: list[Any] = []
        threads = [
            threading.Thread(target=lambda: found.append(next(reader.read(25, 25)).payload)),
            threading.Thread(target=lambda: found.append([entry.payload for entry in reader.read(0, 29)])),
        ]
        store = store_view_of(manager)
        assert isinstance(store, ReadOnlyStore)
        follow = store.follow

        def read_meanwhile() -> bool:
            for thread in threads:
                if thread.ident is None:
                    thread.start()
            time.sleep(0.05)
            return follow()

        monkeypatch.setattr(store, "follow", read_meanwhile)
        assert reader.read_last_add_confirmed() == 29
        for thread in threads:
            thread.join(WAIT_S)
        assert sorted(map(str, found)) == sorted(map(str, [b"entry 25", numbered(30)]))


def test_files_that_the_writer_unlinked_are_closed(tmp_path: Path) -> None:
    with open_quick(tmp_path, background=False) as live, open_quick(tmp_path, read_only=True) as manager:
        for number in range(5):
            with live.create_ledger(storage_hints={StorageHint.HDD}, insecure=True) as writer:
                writer.append_many(numbered(300))
            assert contents(manager, writer.ledger_id) == numbered(300)
            live.checkpoint()
            assert contents(manager, writer.ledger_id) == numbered(300)
            live.delete_ledger(writer.ledger_id)
            live.checkpoint()
            assert list(manager.list_ledgers()) == []
            assert number < 5
        maps = Path("/proc/self/maps").read_text(encoding="utf-8")
        gone = [line for line in maps.splitlines() if str(tmp_path) in line and line.endswith("(deleted)")]
        assert not [line for line in gone if ".cold" in line], "a deleted file keeps its space while a reader is open"


def test_a_reader_without_write_permission(tmp_path: Path) -> None:
    if os.geteuid() == 0:
        pytest.skip("root may write everywhere")
    with open_quick(tmp_path) as manager:
        manager.create_ledger(insecure=True).append(b"x")
    for path in [*tmp_path.rglob("*"), tmp_path]:
        path.chmod(0o555 if path.is_dir() else 0o444)
    try:
        with open_quick(tmp_path, read_only=True) as manager:
            assert contents(manager, 0) == [b"x"]
    finally:
        for path in [tmp_path, *tmp_path.rglob("*")]:
            path.chmod(0o755 if path.is_dir() else 0o644)


def test_the_state_after_a_writer_was_killed(tmp_path: Path) -> None:
    program = """
import sys
from pathlib import Path
from tests.storage.real_store import open_quick
manager = open_quick(Path(sys.argv[1]))
writer = manager.create_ledger(insecure=True)
while True:
    print(writer.append(b"entry %d" % (writer.last_add_pushed + 1)), flush=True)
"""
    child = python(program, tmp_path)
    assert child.stdout is not None
    acknowledged = [int(child.stdout.readline()) for _ in range(50)][-1]
    child.kill()
    rest = child.communicate()[0].split()
    acknowledged = max([acknowledged, *(int(word) for word in rest[:-1])])
    with open_quick(tmp_path, read_only=True) as manager:
        wait_until(lambda: not (there := contents(manager, 0)) or len(there) > acknowledged)
        found = contents(manager, 0)
        assert found == numbered(len(found))
    with open_quick(tmp_path) as live:
        assert contents(live, 0, recover=True)[: acknowledged + 1] == numbered(acknowledged + 1)

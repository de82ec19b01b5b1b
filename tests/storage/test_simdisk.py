"""The simulated disk loses what a disk may lose, keeps what it must keep, and fails when told to."""

from __future__ import annotations

import errno
from collections.abc import Callable
from contextlib import suppress

import pytest

from pybk.errors import StorageFailedError, StorageFullError
from pybk.storage.io.filesystem import replace_file
from tests.simdisk import WRITING, SimCrash, SimEnvironment, SimFileSystem

SECTOR = 512
SEEDS = range(200)


def found_after(prepare: Callable[[SimFileSystem], object], *, kill: bool = False) -> set[bytes | None]:
    """Return all contents of ``/a`` that are found after losing power, or after a kill, over many seeds."""
    found = set()
    for seed in SEEDS:
        fs = SimFileSystem(seed)
        prepare(fs)
        after = fs.kill() if kill else fs.crash()
        found.add(after.open("/a").read(0, 1 << 20) if after.exists("/a") else None)
    return found


def durable_file(fs: SimFileSystem, content: bytes) -> None:
    replace_file(fs, "/a", content)


# ---- power loss: bytes -----------------------------------------------------------------------------------------------


def test_synced_bytes_stay() -> None:
    def prepare(fs: SimFileSystem) -> None:
        durable_file(fs, b"old" * 1000)
        file = fs.open("/a", writable=True)
        file.write([b"new" * 1000], 0)
        file.sync()

    assert found_after(prepare) == {b"new" * 1000}


def test_unsynced_sectors_are_kept_or_lost_one_by_one() -> None:
    def prepare(fs: SimFileSystem) -> None:
        durable_file(fs, b"o" * 2 * SECTOR)
        fs.open("/a", writable=True).write([b"n" * 2 * SECTOR], 0)

    halves = (b"o" * SECTOR, b"n" * SECTOR)
    assert found_after(prepare) == {a + b for a in halves for b in halves}
    assert found_after(prepare, kill=True) == {b"n" * 2 * SECTOR}


def test_sector_may_be_found_as_it_was_between_two_writes() -> None:
    def prepare(fs: SimFileSystem) -> None:
        durable_file(fs, b"ooo")
        file = fs.open("/a", writable=True)
        file.write([b"n"], 0)
        file.write([b"n"], 2)

    assert found_after(prepare) == {b"ooo", b"noo", b"non"}


def test_durable_write_stays_and_takes_no_other_write_with_it() -> None:
    def prepare(fs: SimFileSystem) -> None:
        durable_file(fs, b"o" * 2 * SECTOR)
        file = fs.open("/a", writable=True)
        file.write([b"n" * SECTOR], 0)
        file.write_durable([b"d" * SECTOR], SECTOR)

    assert found_after(prepare) == {b"o" * SECTOR + b"d" * SECTOR, b"n" * SECTOR + b"d" * SECTOR}


def test_growth_is_durable_with_what_was_written_durably() -> None:
    def prepare(fs: SimFileSystem) -> None:
        durable_file(fs, b"old")
        fs.open("/a", writable=True).write_durable([b"more"], 3)

    assert found_after(prepare) == {b"oldmore"}


def test_unsynced_growth_may_be_lost_or_be_zeros() -> None:
    def prepare(fs: SimFileSystem) -> None:
        durable_file(fs, b"o" * SECTOR)
        fs.open("/a", writable=True).write([b"n" * SECTOR], SECTOR)

    old = b"o" * SECTOR
    assert found_after(prepare) == {old, old + bytes(SECTOR), old + b"n" * SECTOR}


def test_zeros_and_holes_are_not_durable_without_a_sync() -> None:
    for method in ("write_zeros", "punch"):

        def prepare(fs: SimFileSystem, method: str = method) -> None:
            durable_file(fs, b"o" * SECTOR)
            getattr(fs.open("/a", writable=True), method)(0, SECTOR)

        assert found_after(prepare) == {b"o" * SECTOR, bytes(SECTOR)}


def test_stores_into_a_map_survive_a_kill_and_perhaps_a_power_loss() -> None:
    def prepare(fs: SimFileSystem) -> None:
        durable_file(fs, b"o" * 64)
        fs.map_shared("/a")[:] = b"n" * 64

    assert found_after(prepare) == {b"o" * 64, b"n" * 64}
    assert found_after(prepare, kill=True) == {b"n" * 64}


def test_stores_into_a_map_reach_the_disk_at_any_time() -> None:
    def prepare(fs: SimFileSystem) -> None:
        durable_file(fs, b"\0" * 64)
        shared = fs.map_shared("/a")
        for n in range(1, 20):
            shared[0] = n
            fs.create(f"/{n}", 0)

    assert len(found_after(prepare)) > 5


def test_failed_sync_is_forgotten_by_the_next_one() -> None:
    def prepare(fs: SimFileSystem) -> None:
        durable_file(fs, b"old")
        file = fs.open("/a", writable=True)
        file.write([b"new"], 0)
        fs.fail_at(0, only="sync")
        with pytest.raises(OSError, match="simulated"):
            file.sync()
        assert file.read(0, 3) == b"new"
        file.sync()

    assert found_after(prepare) == {b"old"}
    assert found_after(prepare, kill=True) == {b"new"}


def test_a_killed_process_can_still_lose_power() -> None:
    found = set()
    for seed in SEEDS:
        fs = SimFileSystem(seed)
        durable_file(fs, b"old")
        fs.open("/a", writable=True).write([b"new"], 0)
        found.add(fs.kill().crash().open("/a").read(0, 3))
    assert found == {b"old", b"new"}


def test_after_a_power_loss_everything_is_durable() -> None:
    for seed in SEEDS:
        fs = SimFileSystem(seed)
        durable_file(fs, b"old")
        fs.open("/a", writable=True).write([b"new"], 0)
        once = fs.crash()
        content = once.open("/a").read(0, 3)
        assert once.crash().open("/a").read(0, 3) == content


# ---- power loss: names -----------------------------------------------------------------------------------------------


def test_name_needs_the_sync_of_its_directory() -> None:
    def prepare(fs: SimFileSystem) -> None:
        file = fs.create("/a", 0)
        file.write([b"new"], 0)
        file.sync()

    assert found_after(prepare) == {None, b"new"}
    assert found_after(prepare, kill=True) == {b"new"}

    def synced(fs: SimFileSystem) -> None:
        prepare(fs)
        fs.sync_directory("/")

    assert found_after(synced) == {b"new"}


def test_unsynced_rename_shows_the_old_or_the_new_file() -> None:
    def prepare(fs: SimFileSystem) -> None:
        durable_file(fs, b"old")
        file = fs.create("/b", 0)
        file.write([b"new"], 0)
        file.sync()
        fs.rename("/b", "/a")

    assert found_after(prepare) == {b"old", b"new"}


def test_replace_without_the_sync_of_the_file_may_leave_nothing_in_it() -> None:
    def prepare(fs: SimFileSystem) -> None:
        durable_file(fs, b"old")
        fs.create("/b", 0).write([b"new"], 0)
        fs.rename("/b", "/a")
        fs.sync_directory("/")

    assert found_after(prepare) == {b"", bytes(3), b"new"}


def test_unlink_is_undone_unless_synced() -> None:
    def prepare(fs: SimFileSystem) -> None:
        durable_file(fs, b"old")
        fs.unlink("/a")

    assert found_after(prepare) == {None, b"old"}


def test_changes_of_names_are_lost_in_any_order() -> None:
    found = set()
    for seed in range(500):
        fs = SimFileSystem(seed)
        for name in "abc":
            fs.create(f"/{name}", 0)
        found.add("".join(fs.crash().list_directory("/")))
    assert found == {"", "a", "b", "c", "ab", "ac", "bc", "abc"}


def test_failed_sync_of_a_directory_is_forgotten_too() -> None:
    def prepare(fs: SimFileSystem) -> None:
        fs.create("/a", 0)
        fs.fail_at(0, only="sync_directory")
        with pytest.raises(OSError, match="simulated"):
            fs.sync_directory("/")
        fs.sync_directory("/")

    assert found_after(prepare) == {None}


def test_directory_is_durable_when_made() -> None:
    fs = SimFileSystem(1)
    fs.make_directory("/x/y")
    assert fs.crash().list_directory("/x") == ["y"]


# ---- crashes and errors at an operation ------------------------------------------------------------------------------


def work(fs: SimFileSystem) -> None:
    file = fs.create("/a", 4 * SECTOR)
    file.write_durable([b"n" * 4 * SECTOR], 0)
    file.sync()
    fs.sync_directory("/")


def test_operations_are_logged_and_readings_apart() -> None:
    fs = SimFileSystem(1)
    work(fs)
    fs.view("/a")
    assert fs.operations == [("create", "/a"), ("write_durable", "/a"), ("sync", "/a"), ("sync_directory", "/")]
    assert fs.readings == [("view", "/a")]


@pytest.mark.parametrize("n", range(4))
def test_crash_comes_at_its_operation_and_nothing_works_after_it(n: int) -> None:
    for seed in SEEDS:
        fs = SimFileSystem(seed)
        fs.crash_at(n)
        with pytest.raises(SimCrash):
            work(fs)
        assert len(fs.operations) == n + 1
        calls: list[Callable[[str], object]] = [fs.open, fs.exists, fs.view, fs.lock, fs.unlink, fs.map_shared]
        for call in calls:
            with pytest.raises(SimCrash):
                call("/a")
        fs.crash()


def test_durable_write_in_flight_is_torn_at_sectors() -> None:
    found = set()
    for seed in range(500):
        fs = SimFileSystem(seed)
        durable_file(fs, b"o" * 3 * SECTOR)
        file = fs.open("/a", writable=True)
        fs.crash_at(0)
        with suppress(SimCrash):
            file.write_durable([b"n" * 3 * SECTOR], 0)
        content = fs.crash().open("/a").read(0, 1 << 20)
        found.add(bytes(content[at] for at in range(0, len(content), SECTOR)))
        assert all(len(set(content[at : at + SECTOR])) == 1 for at in range(0, len(content), SECTOR))
    assert len(found) == 8


def test_crash_at_a_sync_may_come_before_or_after_it() -> None:
    def prepare(fs: SimFileSystem) -> None:
        durable_file(fs, b"old")
        file = fs.open("/a", writable=True)
        file.write([b"new"], 0)
        fs.crash_at(0)
        with suppress(SimCrash):
            file.sync()

    assert found_after(prepare) == {b"old", b"new"}


@pytest.mark.parametrize(("error", "code"), [("EIO", errno.EIO), ("ENOSPC", errno.ENOSPC), ("short", errno.ENOSPC)])
@pytest.mark.parametrize("forever", [False, True])
def test_error_comes_at_its_operation_once_or_for_ever(error: str, code: int, forever: bool) -> None:
    fs = SimFileSystem(1)
    file = fs.create("/a", 0)
    fs.fail_at(2, error, forever=forever, only=("write", "sync"))  # type: ignore[arg-type] # one of the three
    outcomes: list[int | None] = []
    calls: list[Callable[[], None]] = [
        lambda: file.write([b"x"], 0),
        lambda: file.write_durable([b"y"], 9),
        file.sync,
    ]
    for call in calls * 3:
        try:
            call()
            outcomes.append(None)
        except OSError as caught:
            outcomes.append(caught.errno)
    expected: list[int | None] = [None, None, None, code, None, None, None, None, None]
    if forever:
        expected[5:] = [code, code, None, code]
    assert outcomes == expected
    fs.heal()
    file.sync()


def test_short_write_leaves_a_beginning() -> None:
    lengths = set()
    for seed in SEEDS:
        fs = SimFileSystem(seed)
        file = fs.create("/a", 0)
        fs.fail_at(0, "short")
        with pytest.raises(OSError, match="short write"):
            file.write([b"0123456789"], 0)
        content = file.read(0, 100)
        assert b"0123456789".startswith(content)
        lengths.add(len(content))
    assert len(lengths) > 5


def test_write_durable_that_failed_may_be_read_and_yet_be_lost() -> None:
    outcomes = set()
    for seed in SEEDS:
        fs = SimFileSystem(seed)
        durable_file(fs, b"old")
        file = fs.open("/a", writable=True)
        fs.fail_at(0)
        with pytest.raises(OSError, match="input/output"):
            file.write_durable([b"new"], 0)
        seen = file.read(0, 3)
        file.sync()
        outcomes.add((seen, fs.crash().open("/a").read(0, 3)))
    assert outcomes == {(b"old", b"old"), (b"new", b"old"), (b"new", b"new")}


@pytest.mark.parametrize("name", sorted(WRITING - {"commit"}))
def test_every_operation_can_fail(name: str) -> None:
    fs = SimFileSystem(1)
    file = fs.create("/a", 8192)
    calls: dict[str, Callable[[], object]] = {
        "create": lambda: fs.create("/b", 0),
        "write": lambda: file.write([b"x"], 0),
        "write_durable": lambda: file.write_durable([b"x"], 0),
        "write_zeros": lambda: file.write_zeros(0, 512),
        "sync": file.sync,
        "reserve": lambda: file.reserve(16384),
        "punch": lambda: file.punch(0, 4096),
        "truncate": lambda: file.truncate(4096),
        "rename": lambda: fs.rename("/a", "/c"),
        "unlink": lambda: fs.unlink("/a"),
        "make_directory": lambda: fs.make_directory("/d"),
        "sync_directory": lambda: fs.sync_directory("/"),
    }
    fs.fail_at(0)
    with pytest.raises(OSError, match="simulated"):
        calls[name]()
    assert fs.operations[-1][0] == name
    assert fs.list_directory("/") == ["a"]
    calls[name]()


@pytest.mark.parametrize("name", ["open", "read", "view", "read_direct"])
def test_readings_fail_when_asked_for(name: str) -> None:
    fs = SimFileSystem(1)
    durable_file(fs, b"content")
    file = fs.open("/a")
    calls: dict[str, Callable[[], object]] = {
        "open": lambda: fs.open("/a"),
        "read": lambda: file.read(0, 1),
        "view": lambda: fs.view("/a"),
        "read_direct": lambda: fs.read_direct("/a", 0, 1),
    }
    fs.fail_at(0, only=name)
    with pytest.raises(OSError, match="simulated"):
        calls[name]()
    calls[name]()


def test_same_seed_same_outcome() -> None:
    def once(seed: int) -> tuple[list[str], bytes]:
        fs = SimFileSystem(seed)
        for name in "abcdef":
            fs.create(f"/{name}", 0).write([name.encode() * 5000], 0)
        after = fs.crash()
        names = after.list_directory("/")
        return names, b"".join(after.open(f"/{name}").read(0, 1 << 20) for name in names)

    assert all(once(seed) == once(seed) for seed in range(20))
    assert len({str(once(seed)) for seed in range(20)}) > 10


# ---- space -----------------------------------------------------------------------------------------------------------


def test_full_disk_refuses_and_unlinking_helps() -> None:
    fs = SimFileSystem(1, capacity_bytes=10 * 4096)
    fs.create("/a", 6 * 4096)
    assert fs.free_bytes("/") == 4 * 4096
    with pytest.raises(OSError, match="no space") as caught:
        fs.create("/b", 5 * 4096)
    assert caught.value.errno == errno.ENOSPC
    assert not fs.exists("/b")
    file = fs.create("/b", 4096)
    with pytest.raises(OSError, match="no space"):
        file.write([bytes(4 * 4096)], 4096)
    file.write([bytes(4096)], 0)
    fs.unlink("/a")
    file.write([bytes(4 * 4096)], 4096)
    assert (fs.disk_bytes("/b"), fs.free_bytes("/")) == (5 * 4096, 5 * 4096)


# ---- environment -----------------------------------------------------------------------------------------------------


def put(environment: SimEnvironment, value: bytes) -> None:
    with environment.write() as transaction:
        transaction.put(b"key", value)


def value_in(fs: SimFileSystem) -> bytes | None:
    with SimEnvironment(fs, "/index").read() as transaction:
        return transaction.get(b"key")


def test_commit_is_durable_and_an_operation() -> None:
    for seed in SEEDS:
        fs = SimFileSystem(seed)
        put(SimEnvironment(fs, "/index"), b"1")
        assert [name for name, _ in fs.operations] == ["make_directory", "create", "commit"]
        assert fs.list_directory("/index") == ["data.mdb"]
        assert value_in(fs.crash()) == b"1"


def test_crash_at_a_commit_leaves_all_or_nothing() -> None:
    found = set()
    for seed in SEEDS:
        fs = SimFileSystem(seed)
        environment = SimEnvironment(fs, "/index")
        put(environment, b"1")
        fs.crash_at(0, only="commit")
        with pytest.raises(SimCrash):
            put(environment, b"2")
        found.add(value_in(fs.crash()))
    assert found == {b"1", b"2"}


def test_failed_commit_ends_writing() -> None:
    found = set()
    for seed in SEEDS:
        fs = SimFileSystem(seed)
        environment = SimEnvironment(fs, "/index")
        put(environment, b"1")
        fs.fail_at(0, only="commit")
        for _ in range(2):
            with pytest.raises(StorageFailedError):
                put(environment, b"2")
        found.add(value_in(fs.kill()))
    assert found == {b"1", b"2"}


def test_commit_without_space_changes_nothing() -> None:
    fs = SimFileSystem(1, capacity_bytes=4 * 4096)
    environment = SimEnvironment(fs, "/index")
    put(environment, b"1")
    with pytest.raises(StorageFullError):
        put(environment, bytes(5 * 4096))
    fs.fail_at(0, "ENOSPC", only="commit")
    with pytest.raises(StorageFullError):
        put(environment, b"2")
    assert value_in(fs) == b"1"
    put(environment, b"3")
    assert value_in(fs) == b"3"
    assert fs.disk_bytes("/index/data.mdb") == 4096

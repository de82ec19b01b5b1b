"""Bytes of a small store damaged: what is read is what was written, or an error; nothing is lost in silence.

The tests flip one bit of every fifth byte, another one in each; a run tries a third of these.
``python -m tests.storage.test_bitflips`` flips every bit.
"""

from __future__ import annotations

import os
import random
import shutil
import signal
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from pybk.errors import CorruptError, NoSuchLedgerError, PybkError
from pybk.flags import StorageHint, WriteFlag
from pybk.ledger.digest import DigestType
from pybk.manager.ledger_manager import LedgerManager
from pybk.manager.local_backend import StoreBackend
from pybk.storage.format.catalog import read_catalog
from pybk.storage.format.log_file import RECORD_HEADER_BYTES
from pybk.storage.readonly import ReadOnlyStore
from pybk.storage.repair.verify import verify_store
from tests.internals import store_view_of
from tests.sampling import sample
from tests.simdisk import SimEnvironment, SimFileSystem
from tests.storage.store_harness import CONFIG, ROOT, abandon, open_store

# A log file is kept however little of it is used, so that one is there to be damaged.
CONFIG_KEEPING = replace(CONFIG, fill_ratio=0.0001, cold_compression="zstd")
ZEROS_STEP = 509
STEP = 5
TRIED = sample("flipped bytes", range(0, 3 * STEP, STEP), 3)
"""The remainders of the offsets that this run tries."""
EVERY_BIT = "PYBK_FLIP_EVERY_BIT" in os.environ
pytestmark = pytest.mark.sampled

TIERS = [f"{ROOT}/{hint.value}" for hint in StorageHint]

Given = dict[int, list[bytes]]
LedgerKind = tuple[StorageHint, DigestType, WriteFlag]

TAIL: list[LedgerKind] = [(StorageHint.HDD, DigestType.NONE, WriteFlag.DEFERRED_FORCE)]
CHECKPOINTED: list[LedgerKind] = [
    (StorageHint.NVME, DigestType.CRC32C, WriteFlag.NONE),
    (StorageHint.SSD, DigestType.NONE, WriteFlag.NONE),
    (StorageHint.HDD, DigestType.HMAC_SHA256, WriteFlag.NONE),
]
IN_TWO_TIERS = CHECKPOINTED[:2]


def make_store(kinds: list[LedgerKind], *, checkpoint: bool) -> tuple[SimFileSystem, Given]:
    """Return the disk of a process that was killed, and what it had written."""
    fs = SimFileSystem(1)
    given: Given = {}
    manager = open_store(fs, CONFIG_KEEPING)
    for hint, digest_type, flags in kinds:
        writer = manager.create_ledger(storage_hints={hint}, digest_type=digest_type, write_flags=flags, insecure=True)
        entries = [b"one", b"two" * 19, b"", b"four"]
        writer.append(entries[0])
        writer.append_many(entries[1:])
        writer.force()
        given[writer.ledger_id] = entries
        if digest_type is DigestType.CRC32C:
            writer.close()
    if checkpoint:
        manager.checkpoint()
    abandon(manager)
    after = fs.kill()
    drop_what_costs_time(after)
    return after, given


def drop_what_costs_time(fs: SimFileSystem) -> None:
    """Remove preallocated log files, zeros at the end of others, and what the simulation knows of unsynced sectors."""
    for path in (path for directory in (ROOT, *TIERS) for path in files(fs, directory)):
        inode = fs.inode(path)
        inode.sync()
        if path.endswith(".log"):
            inode.live = inode.live[: used(inode.live) + 8192]
            inode.durable = inode.live[:]
            if not any(inode.live):
                fs.unlink(path)
    for directory in (ROOT, *TIERS):
        fs.sync_directory(directory)


def open_read_only(fs: SimFileSystem) -> LedgerManager:
    store = ReadOnlyStore.open(
        ROOT, config=CONFIG_KEEPING, fs=fs, environment=lambda path: SimEnvironment(fs, path, read_only=True)
    )
    return LedgerManager(StoreBackend(store))


def check_live(fs: SimFileSystem, given: Given) -> None:
    """Open a copy for writing and read everything."""
    copy = fs.kill()
    fs.dead = False
    try:
        manager = open_store(copy, CONFIG_KEEPING)
    except PybkError:
        return
    try:
        check_contents(manager, given)
    finally:
        abandon(manager)


def check_read_only(fs: SimFileSystem, given: Given) -> None:
    try:
        manager = open_read_only(fs)
    except PybkError:
        return
    check_contents(manager, given)
    manager.close()


def check_contents(manager: LedgerManager, given: Given) -> None:
    """Read everything: what comes without an error must be exactly what was written, and all of it."""
    try:
        listed = list(manager.list_ledgers())
    except PybkError:
        pass
    else:
        assert listed == sorted(given), "a ledger is lost, or one is there that never was"
    for ledger_id, entries in given.items():
        try:
            reader = manager.open_ledger(ledger_id, recover=False)
        except NoSuchLedgerError:
            pytest.fail("a ledger is lost")
        except PybkError:
            continue
        last = len(entries) - 1
        assert reader.last_add_confirmed == last, "a ledger is shorter or longer than it was"
        try:
            found = [entry.payload for entry in reader.read(0, last)]
        except PybkError:
            for entry_id, expected in enumerate(entries):
                try:
                    entry = next(reader.read(entry_id, entry_id))
                except PybkError:
                    continue
                assert entry.payload == expected
        else:
            assert found == entries


def verify(fs: SimFileSystem) -> bool:
    """Return whether verification finds nothing wrong."""
    found = verify_store(ROOT, fs=fs, password=b"", environment=lambda path: SimEnvironment(fs, path, read_only=True))
    return not found.problems


def flips(
    data: bytearray, *, every_bit: bool = True, every_bit_of: set[int] | None = None
) -> Iterator[tuple[int, int]]:
    """Flip bits one after the other, each flipped back before the next; yield offset and bit.

    Far from everything that is not zero, bytes are sampled.

    Args:
        data: What is flipped, in place.
        every_bit: Whether ``EVERY_BIT`` counts; else one bit of each byte that is tried.
        every_bit_of: It counts for the bytes at these offsets only.
    """
    meaningful = bytearray(len(data))
    for offset, byte in enumerate(data):
        if byte:
            low, high = max(0, offset - 8), min(len(data), offset + 9)
            meaningful[low:high] = b"\1" * (high - low)
    for offset in range(len(data)):
        if (not meaningful[offset] and offset % ZEROS_STEP) or (offset % (3 * STEP) not in TRIED and not EVERY_BIT):
            continue
        whole = every_bit if every_bit_of is None else offset in every_bit_of
        for bit in range(8) if whole and EVERY_BIT else (offset // STEP % 8,):
            data[offset] ^= 1 << bit
            try:
                yield offset, bit
            finally:
                data[offset] ^= 1 << bit


def files(fs: SimFileSystem, directory: str, name_part: str = "") -> list[str]:
    """Return the paths of the files in a directory, LMDB's left out."""
    names = [name for name in fs.directory(directory).live if name_part in name]
    return [f"{directory}/{name}" for name in sorted(names)]


def used(data: bytearray) -> int:
    """Return where the last block that is not zeros ends."""
    return -(-len(data.rstrip(b"\0")) // 4096) * 4096


# ---- the log's tail ----------------------------------------------------------------------------------------------


def test_any_bit_of_the_tail_read_by_a_live_store() -> None:
    fs, given = make_store(TAIL, checkpoint=False)
    (log,) = files(fs, TIERS[0], ".log")
    for _ in flips(fs.inode(log).live):
        check_live(fs, given)


def test_any_bit_of_the_log_read_while_a_writer_runs() -> None:
    fs, given = make_store(TAIL, checkpoint=False)
    (log,) = files(fs, TIERS[0], ".log")
    for _ in flips(fs.inode(log).live):
        check_read_only(fs, given)


def test_any_byte_of_the_durable_log_is_verified() -> None:
    for kinds, checkpoint in ((TAIL, False), (IN_TWO_TIERS, True)):
        fs, _ = make_store(kinds, checkpoint=checkpoint)
        (log,) = files(fs, TIERS[0], ".log")
        data = fs.inode(log).live
        end = used(data)
        assert verify(fs)
        for offset, bit in flips(data, every_bit=False):
            if checkpoint and offset % 2 and not EVERY_BIT:
                continue  # the same format as without a checkpoint, of which each byte is tried
            assert verify(fs) == (offset >= end), f"byte {offset} bit {bit} of the log, which is used up to {end}"


# ---- what a checkpoint makes -------------------------------------------------------------------------------------


def test_any_bit_of_files_with_entries() -> None:
    """One open store reads while bits of its files change: nothing of them is read at opening only."""
    fs, given = make_store(CHECKPOINTED, checkpoint=True)
    manager = open_read_only(fs)
    paths = [path for tier in TIERS for kind in (".log", ".cold") for path in files(fs, tier, kind)]
    assert [os.path.splitext(path)[1] for path in paths] == [".log", ".cold"]
    for path in paths:
        for _ in flips(fs.inode(path).live, every_bit_of=entries_in(manager, path)):
            check_contents(manager, given)
    manager.close()


def entries_in(manager: LedgerManager, path: str) -> set[int]:
    """Return the offsets of a file at which records of entries lie."""
    file_id = int(os.path.basename(path)[:16], 16)
    index = store_view_of(manager).index
    runs = [run for row in index.ledgers() for page in index.pages(row.metadata.ledger_id) for run in page.tolist()]
    found = {at for run in runs if run[4] == file_id for at in range(run[3], run[3] + RECORD_HEADER_BYTES + run[5])}
    assert found
    return found


def test_any_byte_of_a_cold_segment_is_verified() -> None:
    fs, _ = make_store(CHECKPOINTED, checkpoint=True)
    (cold,) = files(fs, TIERS[2], ".cold")
    for offset, bit in flips(fs.inode(cold).live, every_bit=False):
        assert not verify(fs), f"byte {offset} bit {bit} of {cold}"


def values(fs: SimFileSystem, environment: str) -> Iterator[bytes]:
    """Flip every bit of every value of an environment; yield the key."""
    inode = fs.inode(f"{TIERS[1]}/{environment}/data.mdb")
    assert inode.table is not None
    original = inode.table
    for key, value in original[0].items():
        data = bytearray(value)
        for _ in flips(data):
            inode.table = ({**original[0], key: bytes(data)}, original[1])
            yield key
    inode.table = original


@pytest.mark.parametrize("environment", ["index", "entries"])
def test_any_bit_of_any_value_read_while_a_writer_runs(environment: str) -> None:
    fs, given = make_store(IN_TWO_TIERS, checkpoint=True)
    for _ in values(fs, environment):
        check_read_only(fs, given)


@pytest.mark.parametrize("environment", ["index", "entries"])
def test_any_byte_of_any_value_read_by_a_live_store_and_verified(environment: str) -> None:
    fs, given = make_store(IN_TWO_TIERS, checkpoint=True)
    for number, key in enumerate(values(fs, environment)):
        if number % 3 == 0:
            check_live(fs, given)
            assert not verify(fs), f"a value of key {key.hex()}"


# ---- small files -------------------------------------------------------------------------------------------------


@pytest.mark.sampled(one_in=3)
@pytest.mark.parametrize(
    "path", [f"{ROOT}/cookie", f"{ROOT}/directories", f"{ROOT}/watermark", *(f"{tier}/cookie" for tier in TIERS)]
)
def test_any_bit_of_the_small_files(path: str) -> None:
    for kinds, checkpoint in ((TAIL, False), (IN_TWO_TIERS[1:], True)):
        fs, given = make_store(kinds, checkpoint=checkpoint)
        for number, _ in enumerate(flips(fs.inode(path).live)):
            check_read_only(fs, given)
            if path.endswith("watermark") or number % 2 == 0:
                check_live(fs, given)


def test_any_byte_of_cookies_and_directories_is_verified() -> None:
    fs, _ = make_store(TAIL, checkpoint=True)
    for path in (f"{ROOT}/cookie", f"{ROOT}/directories", f"{TIERS[2]}/cookie"):
        for offset, bit in flips(fs.inode(path).live, every_bit=False):
            assert not verify(fs), f"byte {offset} bit {bit} of {path}"


def test_any_bit_of_the_catalog() -> None:
    fs, given = make_store(IN_TWO_TIERS, checkpoint=True)
    (path,) = files(fs, ROOT, "catalog-")
    manager = open_read_only(fs)
    store_id = store_view_of(manager).store_id
    manager.close()
    file_id = int(path[-16:], 16)
    data = fs.inode(path).live
    length = len(data)
    sound = read_catalog(fs, path, store_id, file_id)
    for number, (offset, bit) in enumerate(flips(data)):
        with pytest.raises(CorruptError):
            read_catalog(fs, path, store_id, file_id, at_least=length)
        try:
            found = read_catalog(fs, path, store_id, file_id)
        except CorruptError:
            pass
        else:
            assert found.mark.catalog_bytes < length, f"byte {offset} bit {bit} is part of what counts"
            assert found.ledgers.items() <= sound.ledgers.items()
        if number % 3 == 0:
            check_live(fs, given)


# ---- LMDB's own file ---------------------------------------------------------------------------------------------

FLIPS_IN_LMDB = 400 if EVERY_BIT else 14


def fill_real_store(path: Path) -> Given:
    given: Given = {}
    with LedgerManager.open(path, config=CONFIG) as manager:
        for number in range(24):
            hint = list(StorageHint)[number % 3]
            with manager.create_ledger(storage_hints={hint}, digest_type=DigestType.XXH3) as writer:
                given[writer.ledger_id] = [b"%d" % entry * (number + 1) * 7 for entry in range(5)]
                writer.append_many(given[writer.ledger_id])
            if number % 5 == 0:
                manager.checkpoint()
        manager.checkpoint()
    return given


def look_in_a_process(path: Path, given: Given) -> int:
    """Open a store, read-only and then for writing, in a forked process; return its status, negative for a signal."""
    child = os.fork()
    if child == 0:
        status = 1
        try:
            for read_only in (True, False):
                try:
                    manager = LedgerManager.open(path, config=CONFIG, read_only=read_only)
                except PybkError:
                    continue
                check_contents(manager, given)
                manager.close()
            status = 0
        finally:
            os._exit(status)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


@pytest.mark.long
@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
@pytest.mark.parametrize("environment", ["index", "entries"])
def test_random_bits_of_the_lmdb_file(tmp_path: Path, environment: str) -> None:
    given = fill_real_store(tmp_path / "made")
    rng = random.Random(environment)
    crashes = 0
    for number in range(FLIPS_IN_LMDB):
        path = tmp_path / "flipped"
        shutil.copytree(tmp_path / "made", path)
        file = path / "ssd" / environment / "data.mdb"
        data = bytearray(file.read_bytes())
        used_bytes = [offset for offset in range(0, len(data), 64) if any(data[offset : offset + 64])]
        offset, bit = rng.choice(used_bytes) + rng.randrange(64), rng.randrange(8)
        data[offset] ^= 1 << bit
        file.write_bytes(data)
        status = look_in_a_process(path, given)
        assert status <= 0, f"flip {number}: byte {offset} bit {bit} of {environment}"
        if status < 0:
            assert -status in (signal.SIGSEGV, signal.SIGBUS, signal.SIGABRT)
            crashes += 1
        shutil.rmtree(path)
    assert crashes <= FLIPS_IN_LMDB // 4, "LMDB trusts its own pages, but not that many flips should end the process"


if __name__ == "__main__":
    # In a process of its own, because pytest loads the plugin of pybk before anything else of it.
    command = [sys.executable, "-m", "pytest", __file__, *sys.argv[1:]]
    os.execve(sys.executable, command, {**os.environ, "PYBK_FLIP_EVERY_BIT": "1"})

"""A bookie's replicas on a simulated disk, and entries as writers make them."""

from __future__ import annotations

from array import array
from collections.abc import Iterable

from pybk.bookie.ledger_header import LedgerHeader
from pybk.bookie.replica_state import ReplicaState
from pybk.bookie.replicas import Replicas
from pybk.flags import LedgerType, StorageHint, WriteFlag
from pybk.ledger import keys
from pybk.ledger.digest import DigestType, entry_digest
from pybk.replication.messages import EntryRun, Status
from pybk.storage import preallocation
from pybk.storage.repair.verify import verify_store
from tests.simdisk import SimEnvironment, SimFileSystem
from tests.storage.store_harness import CONFIG

ROOT = "/bookie"
LEDGER = 7


def open_replicas(fs: SimFileSystem) -> Replicas:
    """Open the bookie of a simulated disk."""
    keys.SCRYPT_COST = 2  # type: ignore[misc]  # nothing that is tested depends on it
    preallocation.FIRST_FILE_BYTES = 1 << 18  # type: ignore[misc]  # as above
    return Replicas.open(ROOT, config=CONFIG, fs=fs, environment=lambda path: SimEnvironment(fs, path))


def drop(replicas: Replicas) -> None:
    """Let go of replicas whose disk is dead."""
    log = replicas.store.log
    log.group.stop()


def after_crash(fs: SimFileSystem, replicas: Replicas) -> tuple[SimFileSystem, Replicas]:
    """Lose power and open again."""
    fs = fs.crash()
    drop(replicas)
    return fs, open_replicas(fs)


def after_kill(fs: SimFileSystem, replicas: Replicas) -> tuple[SimFileSystem, Replicas]:
    """End the process and open again."""
    fs = fs.kill()
    drop(replicas)
    return fs, open_replicas(fs)


def no_space(fs: SimFileSystem, replicas: Replicas) -> None:
    """Let the next commit need a new log file, for which there is no space until the disk is healed."""
    replicas.store.log.cut(lambda: None)
    replicas.store.supply.give_back()
    fs.fail_at(0, "ENOSPC", only={"create", "write_zeros"}, forever=True)


def describe(
    *, hints: Iterable[StorageHint] = (), flags: WriteFlag = WriteFlag.NONE, digest: DigestType = DigestType.CRC32C
) -> LedgerHeader:
    """Describe a ledger."""
    return LedgerHeader(b"authenticated", LedgerType("wal"), frozenset(hints), flags, digest)


def entry(entry_id: int, *, ledger_id: int = LEDGER, size: int = 300, seed: int = 0) -> bytes:
    """Return an encoded entry; its length counts all entries before it, of whichever bookie."""
    payload = bytes([(entry_id + seed) % 251]) * size
    return (
        entry_digest(DigestType.CRC32C, ledger_id).prefix(entry_id, entry_id - 1, (entry_id + 1) * size, payload)
        + payload
    )


def make_run(
    first: int,
    count: int,
    stride: int = 1,
    *,
    ledger_id: int = LEDGER,
    size: int = 300,
    seed: int = 0,
    whole: bool = True,
) -> EntryRun:
    """Return a run of entries, in one piece or in one for each entry."""
    entries = [entry(first + n * stride, ledger_id=ledger_id, size=size, seed=seed) for n in range(count)]
    return EntryRun(first, stride, array("q", map(len, entries)), [b"".join(entries)] if whole else entries)


def add(
    replicas: Replicas, run: EntryRun, *, ledger_id: int = LEDGER, recovery: bool = False, durable: bool = True
) -> Status:
    """Stage a run, and commit it if it is durable."""
    status = replicas.stage(ledger_id, run, durable, recovery=recovery)
    if durable:
        replicas.commit()
    return status


def content(run: EntryRun | None) -> list[bytes]:
    """Return the entries of a run."""
    if run is None:
        return []
    body = b"".join(run.body)
    ends = [sum(run.sizes[: n + 1]) for n in range(len(run.sizes))]
    assert ends[-1] == len(body)
    return [body[end - size : end] for end, size in zip(ends, run.sizes, strict=True)]


def assert_reads(
    replicas: Replicas, first: int, last: int, stride: int = 1, *, status: Status = Status.OK, upto: int | None = None
) -> None:
    """Assert that reading gives these entries, up to ``upto`` if given, and this status."""
    found, run = replicas.read(LEDGER, first, last, stride, 1 << 30)
    stop = (last if upto is None else upto) + 1
    assert content(run) == [entry(entry_id) for entry_id in range(first, stop, stride)]
    assert found is status
    if run is not None:
        assert (run.first, run.stride) == (first, stride)


def state_of(replicas: Replicas, ledger_id: int = LEDGER) -> ReplicaState:
    """Return what is known of a ledger."""
    state = replicas.state(ledger_id)
    assert state is not None
    return state


def check_disk(fs: SimFileSystem, ledgers: int) -> None:
    """Assert that nothing is wrong with a bookie's directory that was closed."""
    found = verify_store(ROOT, fs=fs, environment=lambda path: SimEnvironment(fs, path, read_only=True))
    assert found.problems == ()
    assert found.ledgers == ledgers

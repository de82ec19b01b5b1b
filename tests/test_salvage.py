"""A bookie that lost something durable starts, doubts everything until that is durable, and gets it back."""

from __future__ import annotations

import pytest

from pybk.bookie.replicas import Replicas
from pybk.errors import CorruptError
from pybk.replication.messages import Status
from pybk.storage.logfile import BLOCK_BYTES, decode_commit_header
from tests.replicaworld import ROOT, check_disk, describe, drop, make_run, state_of
from tests.salvageworld import (
    CLUSTER,
    INSTANCE,
    COUNT,
    LEDGERS,
    SIZE,
    Harm,
    bring,
    log_files,
    make_bookie,
    missing,
    open_bookie,
    salvage,
)
from tests.simdisk import SimCrash, SimFileSystem

pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")


def overwrite(path: str, offset: int, data: bytes, fs: SimFileSystem) -> None:
    file = fs.open(path, writable=True)
    file.write([data], offset)
    file.sync()
    file.close()


def lose(fs: SimFileSystem, path: str) -> None:
    fs.unlink(path)
    fs.sync_directory(path.rpartition("/")[0])


def commits(fs: SimFileSystem, number: int) -> list[int]:
    """Return the offsets of the commits in a log file."""
    data = fs.view(log_files(fs)[number])
    return [
        at
        for at in range(BLOCK_BYTES, len(data), BLOCK_BYTES)
        if decode_commit_header(data, at, number + 3) is not None
    ]


def gap_in_a_file(fs: SimFileSystem) -> None:
    overwrite(log_files(fs)[1], commits(fs, 1)[2], b"?" * 64, fs)


def header_destroyed(fs: SimFileSystem) -> None:
    overwrite(log_files(fs)[1], 0, b"?" * BLOCK_BYTES, fs)


def header_zeroed(fs: SimFileSystem) -> None:
    overwrite(log_files(fs)[2], 0, bytes(BLOCK_BYTES), fs)


def first_file_lost(fs: SimFileSystem) -> None:
    lose(fs, log_files(fs)[0])


def middle_file_lost(fs: SimFileSystem) -> None:
    lose(fs, log_files(fs)[1])


def last_file_lost(fs: SimFileSystem) -> None:
    lose(fs, log_files(fs)[2])


def last_commit_destroyed(fs: SimFileSystem) -> None:
    overwrite(log_files(fs)[2], commits(fs, 2)[-1], b"?" * 64, fs)


def fence_damaged(fs: SimFileSystem) -> None:
    data = bytes(fs.view(log_files(fs)[0]))
    overwrite(log_files(fs)[0], data.rindex(b".fence"), b"?fence", fs)


def watermark_lost(fs: SimFileSystem) -> None:
    lose(fs, f"{ROOT}/watermark")


def watermark_damaged(fs: SimFileSystem) -> None:
    overwrite(f"{ROOT}/watermark", 0, b"?" * 8, fs)


def kept_file_lost(fs: SimFileSystem) -> None:
    middle_file_lost(fs)


HARMS: dict[Harm, int] = {
    gap_in_a_file: 60,
    header_destroyed: 100,
    header_zeroed: 100,
    first_file_lost: 60,
    middle_file_lost: 100,
    last_file_lost: 100,
    last_commit_destroyed: 20,
    fence_damaged: 0,
    watermark_lost: 0,
    watermark_damaged: 0,
    kept_file_lost: 100,
}
"""What may happen, and how many entries that loses at least."""


def harmed(harm: Harm) -> SimFileSystem:
    fs = SimFileSystem(1)
    make_bookie(fs, checkpoint=harm is kept_file_lost)
    harm(fs)
    return fs


def mend(fs: SimFileSystem) -> None:
    """Bring back what a bookie in limbo lacks; then it is as if nothing had been."""
    replicas = open_bookie(fs)
    assert set(replicas.in_limbo()) == set(LEDGERS)
    bring(replicas, COUNT)
    for ledger_id in LEDGERS:
        replicas.lift_limbo(ledger_id, closed=True)
        assert state_of(replicas, ledger_id).fenced
    assert missing(replicas) == 0
    replicas.close()
    replicas = open_bookie(fs)
    assert replicas.store.began_clean
    assert replicas.in_limbo() == []
    assert missing(replicas) == 0
    for ledger_id in LEDGERS:
        assert replicas.read(ledger_id, COUNT, COUNT, 1, 100)[0] is Status.NO_SUCH_ENTRY
        late = make_run(COUNT, 1, ledger_id=ledger_id, size=SIZE)
        assert replicas.stage(ledger_id, late, True) is Status.FENCED
    replicas.close()


@pytest.mark.parametrize("harm", HARMS)
def test_what_is_left_is_taken_and_the_rest_doubted_until_it_is_back(harm: Harm) -> None:
    fs = harmed(harm)
    with pytest.raises(CorruptError):
        open_bookie(fs)
    replicas = salvage(fs)
    unknown = missing(replicas)
    assert HARMS[harm] <= unknown <= 3 * COUNT
    for ledger_id in LEDGERS:
        run = make_run(COUNT, 1, ledger_id=ledger_id, size=SIZE)
        fenced = state_of(replicas, ledger_id).fenced
        assert replicas.stage(ledger_id, run, True) is (Status.FENCED if fenced else Status.LIMBO)
        assert replicas.read(ledger_id, COUNT, COUNT, 1, 100, recovery=True)[0] is Status.UNKNOWN
        assert state_of(replicas, ledger_id).gap
        assert state_of(replicas, ledger_id).description == describe()
    replicas.close()
    replicas = open_bookie(fs)
    assert missing(replicas) == unknown
    assert all(state_of(replicas, ledger_id).gap for ledger_id in LEDGERS)
    replicas.close()
    mend(fs)
    if harm is not kept_file_lost:  # what lay in it is replaced and goes on to be damaged
        replicas = open_bookie(fs)
        count = len(list(replicas.store.ledgers()))
        replicas.close()
        check_disk(fs, count)


# ---- a stop at any point -----------------------------------------------------------------------------------------


def twin(fs: SimFileSystem) -> SimFileSystem:
    """Return another disk with the same content."""
    copy = fs.kill()
    fs.dead = False
    return copy


def start(fs: SimFileSystem) -> Replicas:
    """Start the bookie, salvaging only if it must."""
    try:
        replicas = open_bookie(fs)
    except CorruptError:
        return salvage(fs)
    replicas.begin(CLUSTER, "b", INSTANCE)
    return replicas


@pytest.mark.parametrize("power_loss", [True, False])
@pytest.mark.parametrize("harm", HARMS)
def test_a_stop_at_any_operation_of_the_start_lifts_no_limbo(harm: Harm, power_loss: bool) -> None:
    disk = harmed(harm)
    replicas = salvage(twin(disk))
    unknown = missing(replicas)
    replicas.close()
    for operation in range(1000):
        fs = twin(disk)
        fs.crash_at(operation)
        stopped: list[Replicas] = []
        try:
            replicas = salvage(fs, stopped)
        except SimCrash:
            for replicas in stopped:
                drop(replicas)
        else:
            replicas.close()
            break
        fs = fs.crash() if power_loss else fs.kill()
        replicas = start(fs)
        assert set(LEDGERS) <= set(replicas.in_limbo()), operation
        assert all(state_of(replicas, ledger_id).gap for ledger_id in LEDGERS), operation
        assert missing(replicas) == unknown, operation
        replicas.close()
        if operation % 16 == 0:
            mend(fs)
    assert operation > 20

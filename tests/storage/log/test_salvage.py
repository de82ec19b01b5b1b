"""A bookie that lost something durable starts, doubts everything until that is durable, and gets it back."""

from __future__ import annotations

import re
import struct

import pytest

from pybk.bookie.replicas import Replicas
from pybk.errors import CookieError, CorruptError
from pybk.flags import StorageHint
from pybk.replication.bookie import BookieMachine, Respond
from pybk.replication.messages import Add, Force, Read, Request, Status
from pybk.storage.format.log_file import BLOCK_BYTES, decode_commit_header
from tests.bookie.replica_harness import ROOT, check_disk, describe, drop, make_run, state_of
from tests.sampling import ALL, every
from tests.simdisk import SimCrash, SimFileSystem
from tests.storage.salvage_harness import (
    CLUSTER,
    COUNT,
    FENCED,
    INSTANCE,
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


def creation_damaged(fs: SimFileSystem) -> None:
    data = bytes(fs.view(log_files(fs)[0]))
    overwrite(log_files(fs)[0], data.index(b".extent"), b"?", fs)


def watermark_lost(fs: SimFileSystem) -> None:
    lose(fs, f"{ROOT}/watermark")


def watermark_damaged(fs: SimFileSystem) -> None:
    overwrite(f"{ROOT}/watermark", 0, b"?" * 8, fs)


def kept_file_lost(fs: SimFileSystem) -> None:
    middle_file_lost(fs)


def kept_file_cut(fs: SimFileSystem) -> None:
    path = log_files(fs)[1]
    data = bytes(fs.view(path))[: commits(fs, 1)[2]]
    lose(fs, path)
    file = fs.create(path, len(data))
    file.write([data], 0)
    file.sync()
    file.close()
    fs.sync_directory(path.rpartition("/")[0])


def environment_lost(fs: SimFileSystem) -> None:
    lose(fs, f"{ROOT}/ssd/entries/data.mdb")


HARMS: dict[Harm, int] = {
    gap_in_a_file: 60,
    header_destroyed: 100,
    header_zeroed: 100,
    first_file_lost: 60,
    middle_file_lost: 100,
    last_file_lost: 100,
    last_commit_destroyed: 20,
    fence_damaged: 0,
    creation_damaged: COUNT,
    watermark_lost: 0,
    watermark_damaged: 0,
    kept_file_lost: 100,
    kept_file_cut: 60,
    environment_lost: COUNT,
}
"""Kinds of harm, and how many entries each loses at least."""

STORED = (kept_file_lost, kept_file_cut, environment_lost)
"""Kinds of harm to a tier; the index still knows the entries that were there."""


def harmed(harm: Harm) -> SimFileSystem:
    fs = SimFileSystem(1)
    make_bookie(fs, checkpoint=harm in STORED, ssd=harm is environment_lost)
    harm(fs)
    return fs


def mend(fs: SimFileSystem) -> None:
    """Bring back the entries that a bookie in limbo lacks, which ends the limbo."""
    replicas = open_bookie(fs)
    assert set(replicas.in_limbo()) == set(LEDGERS)
    bring(replicas, COUNT)
    for ledger_id in LEDGERS:
        replicas.end_limbo(ledger_id, closed=True)
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


@pytest.mark.sampled(one_in=4)
@pytest.mark.parametrize("harm", HARMS)
def test_salvage_keeps_sound_entries_and_leaves_the_rest_in_limbo_until_repaired(harm: Harm) -> None:
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
        assert state_of(replicas, ledger_id).header == describe()
    replicas.close()
    replicas = open_bookie(fs)
    assert missing(replicas) == unknown
    assert all(state_of(replicas, ledger_id).gap for ledger_id in LEDGERS)
    replicas.close()
    mend(fs)
    if harm not in STORED:  # what lay there is replaced and stays damaged
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
    replicas.record_start(CLUSTER, "b", INSTANCE)
    return replicas


"""Else power fails at every fourth operation of a start, and the process dies at as many others."""


@pytest.mark.sampled(one_in=5)
@pytest.mark.parametrize("power_loss", [True, False])
@pytest.mark.parametrize("harm", [header_zeroed, first_file_lost, creation_damaged, watermark_lost, *STORED])
def test_a_stop_at_any_operation_of_the_start_lifts_no_limbo(harm: Harm, power_loss: bool) -> None:
    disk = harmed(harm)
    replicas = salvage(twin(disk))
    unknown = missing(replicas)
    replicas.close()
    for operation in range(0 if ALL else 2 * power_loss, 1000, every(4)):
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
        if operation % 16 < 4:
            mend(fs)
    assert operation > 20


def test_a_start_that_gives_up_before_all_is_in_doubt_leaves_everything_as_it_was() -> None:
    fs = harmed(header_zeroed)
    before = {path: bytes(fs.view(path)) for path in log_files(fs)}
    replicas = open_bookie(fs, salvage=True)
    replicas.record_start(CLUSTER, "b", INSTANCE)
    replicas.close()
    assert {path: bytes(fs.view(path)) for path in before} == before
    assert fs.view(f"{ROOT}/watermark")[40] == 0  # no clean end
    with pytest.raises(CorruptError):
        open_bookie(fs)


def test_a_stop_leaves_limbo_with_the_fence_or_not_at_all() -> None:
    disk = harmed(first_file_lost)
    salvage(disk).close()
    seen = set()
    for number in range(24):
        fs = twin(disk)
        replicas = start(fs)
        fs.crash_at(number % 2, only="write_durable")  # the fence, and the end of the mark
        with pytest.raises(SimCrash):
            replicas.end_limbo(FENCED, closed=True)
        drop(replicas)
        replicas = start(fs.crash())
        state = replicas.state(FENCED)
        assert state is not None
        assert state.fenced or state.gap
        seen.add((state.fenced, state.gap))
        replicas.close()
    assert seen == {(False, True), (True, True), (True, False)}


# ---- single things -----------------------------------------------------------------------------------------------


def test_missing_commits_and_dropped_records_are_reported_with_their_place() -> None:
    fs = harmed(gap_in_a_file)
    replicas = open_bookie(fs, salvage=True)
    assert replicas.store.salvage is not None
    gap, *dropped = replicas.store.salvage.lost
    assert re.fullmatch(r".*0004\.log from offset \d+: the commits 8 to 11 are missing", gap)
    assert len(dropped) == 9
    assert all(
        re.search(r"0005\.log: ledger \d continues with entry \d+ at offset \d+, after entry", each) for each in dropped
    )
    replicas.close()


def test_of_many_records_without_their_ledger_the_first_are_reported() -> None:
    replicas = open_bookie(harmed(first_file_lost), salvage=True)
    assert replicas.store.salvage is not None
    lost = replicas.store.salvage.lost
    assert len(lost) == 12
    assert lost[-1] == "5 more records continue ledgers whose earlier entries are missing"
    assert replicas.store.new_ledger_id() == 4  # above those that the records name
    assert lost[1].startswith("/bookie/nvme/0000000000000004.log: a record of ledger 1, of which nothing else is known")
    replicas.close()


def test_of_a_damaged_batch_the_others_are_taken() -> None:
    """The commit after it proves that it was durable, and where it ends."""
    fs = harmed(lambda fs: overwrite(log_files(fs)[1], commits(fs, 1)[2] + 64, b"?" * 64, fs))
    replicas = open_bookie(fs, salvage=True)
    assert replicas.store.salvage is not None
    lost, *dropped = replicas.store.salvage.lost
    assert lost.endswith("the records of commit 8 are damaged")
    assert len({re.search(r"ledger (\d+)", each)[1] for each in dropped}) == 1  # type: ignore[index]
    replicas.close()


def test_a_damaged_last_batch_is_lost_only_if_it_was_durable() -> None:
    def torn(fs: SimFileSystem) -> None:
        overwrite(log_files(fs)[2], commits(fs, 2)[-1] + 64, b"?" * 64, fs)

    def forgotten(fs: SimFileSystem) -> None:
        torn(fs)
        header = bytes(fs.view(f"{ROOT}/watermark"))
        overwrite(f"{ROOT}/watermark", 24, struct.pack("<qq", 19, ~19), fs)
        assert struct.unpack_from("<qq", header, 24) == (20, ~20)

    with pytest.raises(CorruptError):
        open_bookie(harmed(torn))
    replicas = open_bookie(harmed(forgotten))
    assert replicas.read(LEDGERS[-1], COUNT - 1, COUNT - 1, 1, 100)[0] is Status.NO_SUCH_ENTRY
    replicas.close()


def test_a_ledger_of_which_nothing_is_left_is_neither_denied_nor_written() -> None:
    fs = harmed(first_file_lost)
    replicas = open_bookie(fs, salvage=True)
    assert replicas.ledgers() == []
    replicas.close()
    replicas = salvage(fs)
    machine = BookieMachine(replicas)

    def ask(request: Request) -> Status:
        effects = machine.receive("sender", request, describe(), 0) + machine.commit()
        (effect,) = effects
        assert isinstance(effect, Respond)
        return effect.reply.status

    run = make_run(0, 20, ledger_id=1, size=SIZE)
    assert ask(Add(1, (run,), -1)) is Status.LIMBO
    assert ask(Read(1, 0, 0, 1, 100)) is Status.UNKNOWN
    assert ask(Read(1, 0, 0, 1, 100, fence=True)) is Status.UNKNOWN
    assert ask(Force(1)) is Status.FENCED
    assert ask(Force(2)) is Status.LIMBO
    assert ask(Read(9, 0, 0, 1, 100)) is Status.NO_SUCH_LEDGER
    assert ask(Add(1, (run,), -1, recovery=True)) is Status.OK
    assert ask(Read(1, 0, 0, 1, 100)) is Status.OK
    replicas.close()


def test_local_replicas_are_in_limbo_even_if_the_metadata_name_other_bookies() -> None:
    fs = harmed(lambda fs: None)
    replicas = open_bookie(fs)
    replicas.fence(9, describe())
    replicas.close()
    header_zeroed(fs)
    replicas = salvage(fs)
    assert replicas.in_limbo() == [*LEDGERS, 9]
    assert state_of(replicas, 9).fenced
    replicas.close()


def test_an_open_ledger_that_continued_elsewhere_leaves_limbo_without_a_fence() -> None:
    fs = harmed(middle_file_lost)
    replicas = salvage(fs)
    replicas.end_limbo(1, closed=False)
    replicas.close()
    replicas = open_bookie(fs)
    assert not state_of(replicas, 1).fenced
    assert not state_of(replicas, 1).limbo
    assert replicas.in_limbo() == [2, 3]
    replicas.close()


def test_a_deleted_ledger_leaves_limbo_with_all_else() -> None:
    fs = harmed(middle_file_lost)
    replicas = salvage(fs)
    replicas.delete(1)
    replicas.close()
    replicas = open_bookie(fs)
    assert replicas.state(1) is None
    assert replicas.in_limbo() == [2, 3]
    replicas.close()


@pytest.mark.parametrize("harm", [kept_file_lost, kept_file_cut, gap_in_a_file])
def test_salvaged_entries_are_moved_packed_and_deleted_like_others(harm: Harm) -> None:
    fs = harmed(harm)
    replicas = salvage(fs)
    unknown = missing(replicas)
    replicas.store.scheduler.collect()
    replicas.move(1, StorageHint.HDD)
    replicas.move(2, StorageHint.SSD)
    replicas.store.scheduler.collect()
    assert missing(replicas) == unknown
    replicas.close()
    replicas = open_bookie(fs)
    assert missing(replicas) == unknown
    bring(replicas, COUNT)
    replicas.store.scheduler.checkpoint()
    replicas.move(1, StorageHint.NVME)
    replicas.store.scheduler.collect()
    assert missing(replicas) == 0
    for ledger_id in LEDGERS:
        replicas.delete(ledger_id)
    replicas.store.scheduler.checkpoint()
    replicas.store.scheduler.collect()
    replicas.close()
    assert log_files(fs) == []
    check_disk(fs, 1)  # whose directory it is


def test_a_store_that_is_whole_is_opened_as_ever() -> None:
    fs = harmed(lambda fs: None)
    replicas = open_bookie(fs, salvage=True)
    assert replicas.store.salvage is not None
    assert replicas.store.salvage.lost == ()
    replicas.close()


def test_files_of_elsewhere_are_not_salvaged() -> None:
    fs = harmed(lambda fs: None)
    other = bytes(fs.view(log_files(fs)[0]))
    overwrite(log_files(fs)[1], 0, other[:BLOCK_BYTES], fs)
    with pytest.raises(CorruptError, match="put the right file in its place"):
        open_bookie(fs, salvage=True)


@pytest.mark.parametrize("harm", [header_zeroed, watermark_lost, kept_file_lost])
def test_a_salvaged_directory_may_record_an_older_start(harm: Harm) -> None:
    replicas = open_bookie(harmed(harm), salvage=True)
    replicas.check_identity(CLUSTER, "b", INSTANCE, 7)
    assert replicas.record_start(CLUSTER, "b", INSTANCE, 7) == 8
    for cluster, name, instance in ((b"other", "b", INSTANCE), (CLUSTER, "c", INSTANCE), (CLUSTER, "b", b"j" * 16)):
        with pytest.raises(CookieError):
            replicas.check_identity(cluster, name, instance, 1)
    replicas.close()

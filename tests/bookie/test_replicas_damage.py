"""Damaged records of a bookie's replicas: what reads of them and of others return, and the repair."""

from __future__ import annotations

import struct
from array import array
from typing import Any

import pytest

from pybk.bookie.replicas import Replicas
from pybk.errors import CorruptError
from pybk.flags import StorageHint
from pybk.ledger.entry import EntryBatch
from pybk.replication.bookie import BookieMachine, Respond
from pybk.replication.messages import CompareLacs, LacReply, LacsAbove, ReadLac, Status
from pybk.storage.descriptor import LedgerDescriptor
from pybk.storage.format.log_file import RunLocations
from pybk.storage.repair.verify import verify_store
from pybk.storage.store import Store
from pybk.storage.tiers import ENTRIES
from tests.bookie.replica_harness import (
    LEDGER,
    ROOT,
    add,
    after_crash,
    assert_reads,
    content,
    entry,
    make_run,
    open_replicas,
    state_of,
)
from tests.simdisk import SimEnvironment, SimFileSystem

COUNT = 5
SIZE = len(entry(0))
TABLE = struct.pack(f"<{COUNT}I", *(SIZE * (n + 1) for n in range(COUNT)))
"""Where the entries of a record end, before the first of them."""


def flip(fs: SimFileSystem, replicas: Replicas, found: bytes, at: int, bit: int = 1) -> None:
    """Flip a bit of some bytes on the disk, where they lie last."""
    for row in replicas.store.volumes.rows.values():
        if row.kind == ENTRIES:
            continue
        path = replicas.store.volumes.path_of(row)
        data = bytes(fs.view(path))
        place = data.rfind(found)
        if place >= 0:
            file = fs.open(path, writable=True)
            file.write([bytes([data[place + at] ^ bit])], place + at)
            file.sync()
            file.close()
            return
    raise AssertionError("what is to be damaged lies in no file")


@pytest.mark.parametrize("harm", ["short", "beyond", "header"])
def test_no_last_add_confirmed_is_taken_from_a_damaged_record(
    fs: SimFileSystem, replicas: Replicas, harm: str, caplog: pytest.LogCaptureFixture
) -> None:
    add(replicas, make_run(0, COUNT))
    if harm == "header":
        flip(fs, replicas, entry(COUNT - 1), 17, 64)  # the last add confirmed itself
    elif harm == "short":
        flip(fs, replicas, TABLE, 4 * (COUNT - 2) + 1, 1)  # where the last entry begins: behind its end
    else:
        flip(fs, replicas, TABLE, 4 * (COUNT - 2) + 3, 64)
    replicas.close()
    replicas = open_replicas(fs)
    machine = BookieMachine(replicas)
    compared = CompareLacs(array("q", (LEDGER,)), array("q", (COUNT,)))
    named = LacsAbove(compared.ledger_ids)
    assert machine.compare_lacs(compared) == named, "it was not used since the start, and is not read for this"
    assert state_of(replicas).lac == -1
    assert "cannot be read" in caplog.text
    assert machine.compare_lacs(compared) == named
    (answer,) = machine.receive("a", ReadLac(LEDGER), None, 0)
    assert isinstance(answer, Respond)
    assert isinstance(answer.reply, LacReply)
    assert answer.reply.lac == -1
    assert add(replicas, make_run(COUNT, 1)) is Status.OK
    assert state_of(replicas).lac == COUNT - 1
    assert machine.compare_lacs(compared) == named, "an earlier entry may say more"


def test_a_last_add_confirmed_that_could_not_be_read_for_lack_of_memory_is_read_by_the_next_request(
    fs: SimFileSystem, replicas: Replicas, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise MemoryError

    add(replicas, make_run(0, COUNT))
    replicas.close()
    replicas = open_replicas(fs)
    with monkeypatch.context() as patch:
        patch.setattr(Store, "read_batch", refuse)
        with pytest.raises(MemoryError):
            state_of(replicas)
    compared = CompareLacs(array("q", (LEDGER,)), array("q", (-1,)))
    assert BookieMachine(replicas).compare_lacs(compared) == LacsAbove(compared.ledger_ids)
    assert state_of(replicas).lac == COUNT - 2


@pytest.mark.parametrize("stride", [1, 2])
def test_entries_next_to_a_damaged_record_are_judged_by_themselves(
    fs: SimFileSystem, replicas: Replicas, stride: int
) -> None:
    """No conflict is seen in them, nor are they stored again."""
    for first in (0, COUNT, 2 * COUNT):
        add(replicas, make_run(first, COUNT))
    flip(fs, replicas, TABLE, 4 * (COUNT - 1))  # of the last record, where its last entry ends
    whole = make_run(0, 3 * COUNT // stride, stride)
    extents = len(list(replicas.store.ledgers()))
    for run in (make_run(COUNT, COUNT // stride, stride), make_run(0, 2 * COUNT // stride, stride)):
        assert add(replicas, run) is Status.OK
        assert add(replicas, run, recovery=True) is Status.OK
    assert len(list(replicas.store.ledgers())) == extents
    with pytest.raises(CorruptError, match="repaired from its other bookies"):
        replicas.stage(LEDGER, whole, True)
    assert add(replicas, whole, recovery=True) is Status.OK
    assert_reads(replicas, 0, 2 * COUNT - 1)
    assert_reads(replicas, 0, 3 * COUNT - 1 - (stride - 1), stride)


def test_all_entries_of_a_damaged_record_are_repaired_so_that_they_can_be_copied(
    fs: SimFileSystem, replicas: Replicas
) -> None:
    for first in (0, COUNT):
        add(replicas, make_run(first, COUNT))
    flip(fs, replicas, entry(COUNT), 100)
    everything = make_run(0, 2 * COUNT)
    status, run = replicas.read(LEDGER, COUNT + 1, 2 * COUNT - 1, 1, 1 << 20, checked=True)
    assert (status, run) == (Status.UNKNOWN, None)
    assert add(replicas, make_run(0, 2 * COUNT, seed=1), recovery=True) is Status.CONFLICT
    assert add(replicas, everything, recovery=True) is Status.OK
    for _ in range(2):
        for first in (0, COUNT + 1):
            status, run = replicas.read(LEDGER, first, 2 * COUNT - 1, 1, 1 << 20, checked=True)
            assert status is Status.OK
            assert content(run) == [entry(entry_id) for entry_id in range(first, 2 * COUNT)]
        fs, replicas = after_crash(fs, replicas)


def test_a_damaged_record_is_read_once_and_not_once_per_entry(
    fs: SimFileSystem, replicas: Replicas, monkeypatch: pytest.MonkeyPatch
) -> None:
    many = 200
    for first in (0, many):
        add(replicas, make_run(first, many))
    flip(fs, replicas, entry(0), 100)
    flip(fs, replicas, entry(many), 100)
    fs, replicas = after_crash(fs, replicas)
    asked: list[tuple[int, int]] = []
    read = replicas.store.read_batch

    def counted(descriptor: LedgerDescriptor, first: int, last: int, *args: Any, **options: Any) -> EntryBatch:
        asked.append((first, last))
        return read(descriptor, first, last, *args, **options)

    monkeypatch.setattr(replicas.store, "read_batch", counted)
    assert add(replicas, make_run(1, 2 * many - 1), recovery=True) is Status.OK
    # The run, each record alone, and the last entry for its last add confirmed.
    assert asked == [(1, 2 * many - 1), (1, many - 1), (many, 2 * many - 1), (2 * many - 1, 2 * many - 1)]
    assert add(replicas, make_run(0, 2 * many), recovery=True) is Status.OK
    assert_reads(replicas, 0, 2 * many - 1)


def test_entries_whose_record_was_moved_during_a_look_are_judged_anew(
    fs: SimFileSystem, replicas: Replicas, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else intact entries would be replaced, even by entries with other bytes (I14)."""
    for first in (0, COUNT):
        add(replicas, make_run(first, COUNT))
    flip(fs, replicas, entry(COUNT), 100)
    locate = replicas.store.locations_from
    looks = 0

    def merged_at_first(descriptor: LedgerDescriptor, first: int) -> RunLocations:
        """Show both records as one, as they were before they were moved."""
        nonlocal looks
        runs = locate(descriptor, first)
        looks += 1
        if looks == 2:  # the first look is of the read of all
            runs = runs.copy()
            runs["count"][0] = 2 * COUNT
        return runs

    monkeypatch.setattr(replicas.store, "locations_from", merged_at_first)
    assert add(replicas, make_run(0, 2 * COUNT, seed=1), recovery=True) is Status.CONFLICT
    assert looks > 2


def test_a_move_of_a_replica_with_a_damaged_record_fails(fs: SimFileSystem, replicas: Replicas) -> None:
    add(replicas, make_run(0, COUNT))
    add(replicas, make_run(COUNT, COUNT))
    flip(fs, replicas, entry(0), 100)
    for _ in range(2):
        with pytest.raises(CorruptError, match=r"1 records in .*\.log"):
            replicas.move(LEDGER, StorageHint.HDD)
    assert_reads(replicas, COUNT, 2 * COUNT - 1)


@pytest.mark.parametrize("checkpoint", [False, True])
def test_a_damaged_record_is_reported_until_all_of_it_was_repaired(
    fs: SimFileSystem, replicas: Replicas, checkpoint: bool
) -> None:
    def is_reported(entry_id: int) -> bool:
        found = verify_store(ROOT, fs=fs, environment=lambda path: SimEnvironment(fs, path, read_only=True))
        ranges = [(each.first_entry_id, each.last_entry_id) for each in found.problems]
        return any(first is None or last is None or first <= entry_id <= last for first, last in ranges)

    add(replicas, make_run(0, 2 * COUNT))
    if checkpoint:
        replicas.store.scheduler.checkpoint()
    flip(fs, replicas, entry(COUNT), 100)
    assert is_reported(COUNT)
    assert add(replicas, make_run(0, COUNT), recovery=True) is Status.OK
    assert is_reported(COUNT)
    assert add(replicas, make_run(COUNT, COUNT), recovery=True) is Status.OK
    assert_reads(replicas, 0, 2 * COUNT - 1)
    assert not is_reported(COUNT)
    flip(fs, replicas, entry(COUNT), 100)  # of the copy, which lies last
    assert is_reported(0)

"""Contests about reading; every entry that is read is verified."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Final

from bench.appending import DIGESTS, times_best
from bench.contest import THREADS, Contest, Contestant, Run, Scale, Target, rate
from bench.floors import BareRead
from bench.payloads import BATCH, PASSWORD, PAYLOAD, PAYLOADS
from bench.peers import READABLE_PEERS, Lmdb, Rocks, Sqlite
from pybk import DigestType, LedgerManager, LedgerReader, StorageHint

SCAN_BYTES: Final = 8 << 20
READS_PER_STEP: Final = 256


def scan(readers: Sequence[LedgerReader]) -> int:
    """Read some ledgers from end to end; return the number of entries."""
    count = 0
    for reader in readers:
        first, last = 0, reader.last_add_confirmed
        while first <= last:
            first += len(reader.read_batch(first, max_bytes=SCAN_BYTES))
        count += last + 1
    return count


def times_lmdb(digest_type: DigestType, share: float = 1.0) -> Target:
    """Return the target of a scan, in scans of LMDB, which checks nothing.

    Args:
        digest_type: The digest that each entry is verified with.
        share: Of the target; less where entries lie in many pieces.
    """
    factor = 0.7 if digest_type is DigestType.HMAC_SHA256 else 1.8
    return times_best(factor * share, [Lmdb.name], Lmdb.name)


@contextmanager
def batched(digest_type: DigestType, tier: StorageHint, directory: Path, scale: Scale) -> Iterator[Run]:
    """Scan one closed ledger that was appended in batches and lies in a tier."""
    with LedgerManager.open(directory) as manager:
        with manager.create_ledger(password=PASSWORD, digest_type=digest_type, storage_hints={tier}) as writer:
            for _ in range(scale.entries // BATCH):
                writer.append_many(PAYLOADS)
        manager.move_ledger(writer.ledger_id, tier)
        with manager.open_ledger(writer.ledger_id, password=PASSWORD) as reader:
            yield lambda seconds: rate(lambda: scan([reader]), seconds)


@contextmanager
def interleaved(digest_type: DigestType, tier: StorageHint, directory: Path, scale: Scale) -> Iterator[Run]:
    """Scan ledgers that as many threads appended one by one, so that each log file holds pieces of all."""
    with LedgerManager.open(directory) as manager:
        writers = [
            manager.create_ledger(password=PASSWORD, digest_type=digest_type, storage_hints={tier})
            for _ in range(THREADS)
        ]
        each = max(scale.entries // 4 // THREADS, 1)
        threads = [
            threading.Thread(target=lambda append: [append(PAYLOAD) for _ in range(each)], args=(writer.append,))
            for writer in writers
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for writer in writers:
            writer.close()
            if tier is not StorageHint.NVME:
                manager.move_ledger(writer.ledger_id, tier)
        readers = [manager.open_ledger(writer.ledger_id, password=PASSWORD) for writer in writers]
        yield lambda seconds: rate(lambda: scan(readers), seconds)


@contextmanager
def singles(directory: Path, scale: Scale) -> Iterator[Run]:
    """Read single entries of one ledger in random order."""
    with LedgerManager.open(directory) as manager:
        with manager.create_ledger(password=PASSWORD) as writer:
            for _ in range(scale.entries // BATCH):
                writer.append_many(PAYLOADS)
        with manager.open_ledger(writer.ledger_id, password=PASSWORD) as reader:
            order = numbers(scale)

            def step() -> int:
                for _ in range(READS_PER_STEP):
                    number = next(order)
                    for entry in reader.read(number, number):
                        assert entry.entry_id == number
                return READS_PER_STEP

            yield lambda seconds: rate(step, seconds)


def numbers(scale: Scale) -> Iterator[int]:
    """Yield entry numbers in random order for ever."""
    shuffled = list(range(scale.entries // BATCH * BATCH))
    random.Random(3).shuffle(shuffled)
    while True:
        yield from shuffled


@contextmanager
def filled(kind: type[Sqlite | Lmdb | Rocks], directory: Path, scale: Scale) -> Iterator[Sqlite | Lmdb | Rocks]:
    """A peer with the same entries in it."""
    with kind(directory) as peer:
        for _ in range(scale.entries // BATCH):
            peer.append(PAYLOADS)
        yield peer


def peer_scan(kind: type[Sqlite | Lmdb | Rocks]) -> Contestant:
    """Return a peer that scans; it verifies what it verifies by itself."""

    @contextmanager
    def enter(directory: Path, scale: Scale) -> Iterator[Run]:
        with filled(kind, directory, scale) as peer:
            yield partial(rate, peer.scan)

    return Contestant(kind.name, enter)


def peer_singles(kind: type[Sqlite | Lmdb | Rocks]) -> Contestant:
    """Return a peer that reads single entries."""

    @contextmanager
    def enter(directory: Path, scale: Scale) -> Iterator[Run]:
        with filled(kind, directory, scale) as peer:
            get = peer.getter()
            order = numbers(scale)

            def step() -> int:
                for _ in range(READS_PER_STEP):
                    get(next(order))
                return READS_PER_STEP

            yield lambda seconds: rate(step, seconds)

    return Contestant(kind.name, enter)


@contextmanager
def bare_scan(directory: Path, scale: Scale) -> Iterator[Run]:
    """Read a file of entries piece by piece, and make the HMAC of each entry."""
    with BareRead(directory, scale.entries) as floor:
        yield partial(rate, floor.scan)


@contextmanager
def bare_singles(directory: Path, scale: Scale) -> Iterator[Run]:
    """Read single entries of a file in random order, and make the HMAC of each."""
    with BareRead(directory, scale.entries) as floor:
        order = numbers(scale)

        def step() -> int:
            for _ in range(READS_PER_STEP):
                floor.get(next(order))
            return READS_PER_STEP

        yield lambda seconds: rate(step, seconds)


def scans() -> Iterator[Contestant]:
    """Yield pybk with each digest from each tier, then the peers."""
    for digest_type in DIGESTS:
        for tier in StorageHint:
            target = [] if tier is StorageHint.SSD else [times_lmdb(digest_type)]
            yield Contestant(f"pybk {digest_type.name} {tier.name}", partial(batched, digest_type, tier), target)
    yield from map(peer_scan, READABLE_PEERS)
    yield Contestant(f"{BareRead.name} and HMAC of a file", bare_scan)


def interleaved_scans() -> Iterator[Contestant]:
    """Yield pybk with two digests from each tier."""
    for digest_type in (DigestType.HMAC_SHA256, DigestType.XXH3):
        for tier in StorageHint:
            yield Contestant(f"pybk {digest_type.name} {tier.name}", partial(interleaved, digest_type, tier))


CONTESTS: Final = (
    Contest("scan", "read_batch over a ledger appended in batches", "/s", list(scans())),
    Contest(
        "interleaved", f"read_batch over {THREADS} ledgers appended singly at once", "/s", list(interleaved_scans())
    ),
    Contest(
        "random",
        "single reads in random order",
        "/s",
        [
            Contestant(
                "pybk",
                singles,
                [times_best(1.5, [Sqlite.name], Sqlite.name), times_best(1, [Rocks.name], Rocks.name)],
            ),
            *map(peer_singles, READABLE_PEERS),
            Contestant(f"{BareRead.name} and HMAC", bare_singles),
        ],
    ),
)

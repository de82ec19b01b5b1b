"""Contests of blobs: compared with the bare disk, and with bare SHA-256 where a password guards them."""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import repeat
from pathlib import Path
from typing import Final

from bench.contest import Contest, Contestant, Rates, Run, Scale, Target
from bench.payloads import PASSWORD
from pybk import BlobStore, DigestType, StorageHint

CHUNK: Final = os.urandom(1 << 20)
FACTOR: Final = 0.7
WARM_UPS: Final = 3
"""How often everyone writes before it counts: a virtual disk writes blocks that it never had four times as slowly."""

Measure = Callable[[], float]
"""Does the work once; returns how many seconds it took."""


def megabytes(count: int, measure: Measure, _: float) -> float:
    """Return a run of chunks in MB/s."""
    return count * len(CHUNK) / 1e6 / measure()


def drop(directory: Path) -> None:
    """Drop the files of a directory from the page cache."""
    for path in directory.rglob("*"):
        if path.is_file():
            with path.open("rb") as file:
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def opened(directory: Path, digest_type: DigestType) -> BlobStore:
    """Open a blob store."""
    return BlobStore.open(directory, password=PASSWORD, digest_type=digest_type, storage_hints=[StorageHint.NVME])


def write_file(path: Path, count: int) -> float:
    """Write a file, synced, in the place of the one before, which is there until then."""
    begin = time.perf_counter()
    new = path.with_suffix(".new")
    with new.open("wb", buffering=0) as file:
        for _ in range(count):
            file.write(CHUNK)
        os.fdatasync(file.fileno())
    new.replace(path)
    return time.perf_counter() - begin


def warmed_up(write: Measure) -> Measure:
    """Return what writes, after it has written often enough."""
    for _ in range(WARM_UPS):
        write()
    return write


def read_file(path: Path) -> float:
    """Read a file that is not in memory."""
    drop(path.parent)
    buffer = bytearray(len(CHUNK))
    begin = time.perf_counter()
    with path.open("rb", buffering=0) as file:
        while file.readinto(buffer):
            pass
    return time.perf_counter() - begin


def write_blob(blobs: BlobStore, count: int) -> float:
    """Put a blob."""
    begin = time.perf_counter()
    blobs.put("blob", repeat(CHUNK, count))
    return time.perf_counter() - begin


def read_blob(directory: Path, digest_type: DigestType) -> float:
    """Read a blob that is not in memory; the store is opened anew, because what it has mapped stays in memory."""
    with opened(directory, digest_type) as blobs:
        blobs.get("warm")  # derives the key, which takes a second
        drop(directory)
        buffer = bytearray(len(CHUNK))
        begin = time.perf_counter()
        with blobs.open_blob("blob") as file:
            while file.readinto(buffer):
                pass
        return time.perf_counter() - begin


def hash_all(count: int) -> float:
    """Hash as much."""
    sha256 = hashlib.sha256()
    begin = time.perf_counter()
    for _ in range(count):
        sha256.update(CHUNK)
    return time.perf_counter() - begin


@contextmanager
def disk(reads: bool, directory: Path, scale: Scale) -> Iterator[Run]:
    """The bare disk."""
    path, count = directory / "file", scale.blob_bytes // len(CHUNK)
    write = partial(write_file, path, count)
    if reads:
        write()
    yield partial(megabytes, count, partial(read_file, path) if reads else warmed_up(write))


@contextmanager
def sha256(_: Path, scale: Scale) -> Iterator[Run]:
    """SHA-256 without a disk."""
    count = scale.blob_bytes // len(CHUNK)
    yield partial(megabytes, count, partial(hash_all, count))


@contextmanager
def blob_write(digest_type: DigestType, directory: Path, scale: Scale) -> Iterator[Run]:
    """Blobs that replace each other."""
    count = scale.blob_bytes // len(CHUNK)
    with opened(directory, digest_type) as blobs:
        blobs.put("warm", b"")
        yield partial(megabytes, count, warmed_up(partial(write_blob, blobs, count)))


@contextmanager
def blob_read(digest_type: DigestType, directory: Path, scale: Scale) -> Iterator[Run]:
    """A blob that is read again and again."""
    count = scale.blob_bytes // len(CHUNK)
    with opened(directory, digest_type) as blobs:
        blobs.put("blob", repeat(CHUNK, count))
        blobs.put("warm", b"")
        blobs.manager.checkpoint()
    yield partial(megabytes, count, partial(read_blob, directory, digest_type))


def of_slowest(rates: Rates) -> float:
    """Return what the slower of disk and SHA-256 has."""
    return FACTOR * min(rates["disk"], rates["SHA-256"])


def contestants(enter: Callable[..., Contestant]) -> Iterator[Contestant]:
    """Yield a contestant for each digest, with what it should reach."""
    disk_alone = Target(f">= {FACTOR:g} x disk", lambda rates: FACTOR * rates["disk"])
    yield enter(DigestType.CRC32C, disk_alone)
    yield enter(DigestType.XXH3, disk_alone)
    yield enter(DigestType.HMAC_SHA256, Target(f">= {FACTOR:g} x slower of disk and SHA-256", of_slowest))


def writes(digest_type: DigestType, target: Target) -> Contestant:
    """Return a contestant that writes blobs."""
    return Contestant(f"blob {digest_type.name}", partial(blob_write, digest_type), [target])


def reads(digest_type: DigestType, target: Target) -> Contestant:
    """Return a contestant that reads a blob."""
    return Contestant(f"blob {digest_type.name}", partial(blob_read, digest_type), [target])


CONTESTS: Final = (
    Contest(
        "blob-write",
        "a blob is written in chunks of 1 MiB, synced",
        "MB/s",
        [Contestant("disk", partial(disk, False)), Contestant("SHA-256", sha256), *contestants(writes)],
    ),
    Contest(
        "blob-read",
        "a blob that is not in memory is read, verified",
        "MB/s",
        [Contestant("disk", partial(disk, True)), Contestant("SHA-256", sha256), *contestants(reads)],
    ),
)

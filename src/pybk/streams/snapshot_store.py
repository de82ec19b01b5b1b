"""``SnapshotStore``: snapshots of a state; each writes only the parts that changed."""

from __future__ import annotations

import builtins
import hashlib
import os
import shutil
import stat
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO, Final, NamedTuple, TypeVar

from xxhash import xxh3_128_hexdigest

from pybk.errors import (
    BlobLockedError,
    CorruptError,
    DigestMismatchError,
    NoSuchBlobError,
    PybkError,
    UnsupportedFormatError,
    UsageError,
)
from pybk.manager.arguments import whole_from
from pybk.manager.ledger_manager import backend_of
from pybk.storage.io.failures import IrregularFileError
from pybk.storage.io.filesystem import open_regular
from pybk.streams.blob import PieceWriter
from pybk.streams.blob_store import BlobStore
from pybk.streams.list_record import checked_name
from pybk.threads.call_threads import asyncio_form
from pybk.values import decode_json, encode_json

T = TypeVar("T")

SNAPSHOT_FORMAT: Final = 1
PART_BYTES: Final = 8 << 20
NAME_BYTES_MAX: Final = 48
"""Bytes of the name of a snapshot store, which is a part of the names of its blobs."""

_DAMAGE: Final = (CorruptError, DigestMismatchError, NoSuchBlobError, UnsupportedFormatError)
"""Errors for which an older snapshot is taken; others, such as a disk that fails, say nothing about a snapshot."""

SnapshotContent = bytes | bytearray | memoryview | os.PathLike[str] | Callable[[BinaryIO], object]
"""The types that can be saved: bytes, the path of a file or directory, or a function that writes to its file."""


class SnapshotInfo(NamedTuple):
    """A snapshot that was saved.

    Attributes:
        number: Its number, from 1 up.
        lsn: The application's position: the last record of its log that the snapshot covers.
        generation: The generation of that log.
        meta: The application's.
        created_ns: The time when it was saved, nanoseconds since 1970.
        is_directory: Whether it is of a directory.
        size: Bytes of all its files.
        written: Bytes that were written for this snapshot, because they were not stored, or were damaged.
    """

    number: int
    lsn: int
    generation: int
    meta: Mapping[str, str]
    created_ns: int
    is_directory: bool
    size: int
    written: int


class SkippedSnapshot(NamedTuple):
    """A damaged snapshot, instead of which an older one was restored.

    Attributes:
        number: Its number.
        problem: The damage.
    """

    number: int
    problem: PybkError


class SnapshotReport(NamedTuple):
    """The result of a restore.

    Attributes:
        info: The snapshot.
        skipped: Newer snapshots that are damaged, the newest first.
    """

    info: SnapshotInfo
    skipped: tuple[SkippedSnapshot, ...]


class _File(NamedTuple):
    """A file of a snapshot.

    Attributes:
        path: Relative, with ``/``; empty for a snapshot that is not of a directory.
        mode: Its permissions.
        size: Its bytes.
        parts: The SHA-256 of each part, hexadecimal.
    """

    path: str
    mode: int
    size: int
    parts: tuple[str, ...]


class _Manifest(NamedTuple):
    """The parts of a snapshot; written last."""

    info: SnapshotInfo
    part_bytes: int
    directories: tuple[str, ...]
    files: tuple[_File, ...]

    @property
    def parts(self) -> set[str]:
        return {part for file in self.files for part in file.parts}

    def encode(self) -> bytes:
        return encode_json({"format": SNAPSHOT_FORMAT, **self._asdict()})

    @classmethod
    def decode(cls, data: bytes, *, where: str) -> _Manifest:
        def make(values: dict[str, Any]) -> _Manifest:
            files = tuple(_File(path, mode, size, tuple(parts)) for path, mode, size, parts in values["files"])
            made = cls(SnapshotInfo(*values["info"]), values["part_bytes"], tuple(values["directories"]), files)
            for each in files:
                if len(each.parts) != -(-each.size // made.part_bytes):
                    raise CorruptError(
                        f"{where}: {each.size} bytes of {each.path!r} are not in {len(each.parts)} parts"
                    )
            for path in (*made.directories, *(each.path for each in files)):
                if PurePosixPath(path).is_absolute() or ".." in PurePosixPath(path).parts:
                    raise CorruptError(f"{where}: the path {path!r} does not lie in the snapshot")
            return made

        return decode_json(data, make, where=where, number=SNAPSHOT_FORMAT)


class SnapshotStore:
    """Snapshots of a state, in a blob store.

    Example::

        snapshots = SnapshotStore(blobs, "db", keep=3)
        snapshots.save(Path("data"), lsn=wal.last_lsn())
        ...
        report = snapshots.restore("data")
        replay_from(report.info.lsn + 1)

    A snapshot is saved in parts, named by the SHA-256 of their content; so parts that did not change are not written
    again. Its manifest, which lists the parts, is written last: a snapshot exists once it is complete. Snapshots share
    parts, so a damaged part damages all snapshots that have it. ``latest`` finds such damage; a later save that has the
    part writes it again, which mends them all.

    Threads: any. One process at a time saves or prunes.

    Args:
        blobs: The blob store.
        name: The name of the snapshots: 1 to 48 bytes in UTF-8, as for blobs.
        keep: The number of snapshots to keep.
        part_bytes: Bytes of a part; a part in which any byte changed is written again.

    Raises:
        UsageError: An argument is invalid.
    """

    def __init__(
        self, blobs: BlobStore, name: str = "snapshots", *, keep: int = 2, part_bytes: int = PART_BYTES
    ) -> None:
        if not isinstance(blobs, BlobStore):
            raise UsageError(f"blobs is {blobs!r:.50}; it takes a BlobStore, such as of BlobStore.open(path)")
        self.name: Final = checked_name(name, "a snapshot store")
        if len(name.encode()) > NAME_BYTES_MAX:
            raise UsageError(f"the name {name!r:.60} of a snapshot store takes 1 to {NAME_BYTES_MAX} bytes in UTF-8")
        self._blobs = blobs
        self._keep = whole_from(keep, 1, "keep", "a number of snapshots")
        self._part_bytes = whole_from(part_bytes, 1, "part_bytes", "bytes of a part")
        self._manifests = f"{name}/manifest/"
        self._parts = f"{name}/part/"
        self._verified: dict[str, int] = {}
        """The ledgers of parts that were read whole here, by their names."""

    def __repr__(self) -> str:
        """Name the snapshots and their blob store."""
        return f"<SnapshotStore {self.name!r} in {self._blobs!r}>"

    # ---- saving --------------------------------------------------------------------------------------------------

    def save(
        self, content: SnapshotContent, *, lsn: int = 0, generation: int = 0, meta: Mapping[str, str] | None = None
    ) -> SnapshotInfo:
        """Save a snapshot, then prune.

        Args:
            content: Bytes; the path of a file or of a directory, which must not change meanwhile; or a function that
                writes the content to the file that it is given.
            lsn: The last record of the application's log that the snapshot covers.
            generation: The generation of that log.
            meta: The application's texts by name.

        Returns:
            The snapshot; its ``written`` is the number of new bytes.

        Raises:
            BlobLockedError: Another process saves or prunes.
            UsageError: A directory contains other things than files and directories.
            PybkError: As ``BlobStore.put``; the snapshot was not saved, unless ``outcome_unknown`` is set.

        Durability: On return the snapshot is durable.
        Cost: Reads all of the content, and writes the parts that are new, missing or damaged. A part that is stored is
            read and verified before this object uses it for the first time; later saves only open its ledger. So later
            damage is found by ``latest``, or by a save of another ``SnapshotStore``.
        """
        if isinstance(content, str):
            raise UsageError(f"content is the string {content!r:.50}; it takes bytes, or a path as pathlib.Path")
        lsn = whole_from(lsn, 0, "lsn", "a log sequence number")
        with self._locked():
            number = max(self._numbers(), default=0) + 1
            saving = _Saving(self._blobs, self._parts, self._part_bytes, self._verified)
            is_directory = isinstance(content, os.PathLike) and os.path.isdir(content)
            if isinstance(content, os.PathLike):
                saving.add_path(Path(content))
            else:
                write: Callable[[Any], object] = content if callable(content) else lambda file: file.write(content)
                saving.add("", 0o600, write)
            size = sum(each.size for each in saving.files)
            info = SnapshotInfo(
                number, lsn, generation, dict(meta or {}), time.time_ns(), is_directory, size, saving.written
            )
            manifest = _Manifest(info, self._part_bytes, tuple(saving.directories), tuple(saving.files))
            self._blobs.put(f"{self._manifests}{number:016d}", manifest.encode(), overwrite=False)
            self._prune()  # older ones go last: all parts of this one were written or found now
        return info

    save_async = asyncio_form(save, own_thread=True)

    @contextmanager
    def _locked(self) -> Iterator[None]:
        """Keep other processes from saving and pruning: parts that are not listed yet would be deleted."""
        lock = backend_of(self._blobs.manager).try_lock(f"snapshots.{self._blobs.name}.{self.name}", f"{os.getpid()}")
        if lock is None:
            raise BlobLockedError(f"snapshots {self.name!r} are being saved or pruned by another caller; try again")
        try:
            yield
        finally:
            lock.release()

    def prune(self) -> int:
        """Delete all except the newest ``keep`` snapshots, and the parts that none of those has.

        Snapshots whose manifests cannot be read do not count. Parts are not verified; ``latest`` does that.

        Returns:
            The number of blobs that were deleted: manifests and parts.

        Raises:
            BlobLockedError: Another process saves or prunes.
        """
        with self._locked():
            return self._prune()

    prune_async = asyncio_form(prune)

    def _prune(self) -> int:
        needed: set[str] = set()
        kept, gone = 0, []
        for number in self._numbers():
            if kept == self._keep:
                gone.append(f"{self._manifests}{number:016d}")
                continue
            try:
                needed |= self._manifest(number).parts
            except _DAMAGE:
                continue  # it does not count, and goes once enough newer ones can be read
            kept += 1
        if not kept:
            return 0  # nothing says which parts are needed
        parts = (each.name for each in self._blobs.list(self._parts))
        gone += [name for name in parts if name.rpartition("/")[2] not in needed]
        for name in gone:  # manifests before their parts
            self._blobs.delete(name)
            self._verified.pop(name, None)
        return len(gone)

    # ---- restoring -----------------------------------------------------------------------------------------------

    def _numbers(self) -> builtins.list[int]:
        """Return the numbers of the snapshots, the newest first."""
        names = (each.name.rpartition("/")[2] for each in self._blobs.list(self._manifests))
        return sorted((int(name) for name in names if name.isdecimal()), reverse=True)

    def _manifest(self, number: int) -> _Manifest:
        data = self._blobs.get(f"{self._manifests}{number:016d}")
        return _Manifest.decode(data, where=f"the manifest of snapshot {number} of {self.name!r}")

    def list(self) -> builtins.list[SnapshotInfo]:
        """Return the snapshots whose manifests can be read, the newest first; their parts are not verified."""
        found = []
        for number in self._numbers():
            try:
                found.append(self._manifest(number).info)
            except _DAMAGE:
                continue
        return found

    list_async = asyncio_form(list)

    def latest(self) -> SnapshotReport | None:
        """Return the newest snapshot that is whole, verified to its last byte; None if there are no snapshots.

        Raises:
            CorruptError: All snapshots are damaged.
            PybkError: They could not be read; this does not mean that they are damaged.

        Cost: Reads the snapshot.
        """

        def verify(manifest: _Manifest) -> None:
            for part in manifest.parts:
                self._part(part)

        found = self._newest(verify)
        return found and found[0]

    latest_async = asyncio_form(latest)

    def restore(self, destination: str | os.PathLike[str], *, number: int | None = None) -> SnapshotReport:
        """Write the newest whole snapshot, or one of a given number, to a file or a directory.

        The destination appears as a whole, or not at all.

        Args:
            destination: The path. A file is replaced; a directory must not exist, or be empty.
            number: The snapshot; None for the newest one that is whole.

        Returns:
            The snapshot, and newer ones that are damaged and were skipped.

        Raises:
            NoSuchBlobError: No snapshot exists, or none of this number.
            CorruptError, DigestMismatchError: The snapshot of this number, or each snapshot, is damaged.
            FileExistsError: The destination is a directory that is not empty, or a file where the snapshot is of a
                directory, or the other way round.

        Durability: On return the destination is durable.
        """
        target = Path(destination)
        return self._chosen(number, lambda manifest: self._write(manifest, target))[0]

    restore_async = asyncio_form(restore)

    def read(self, *, number: int | None = None) -> bytes:
        """Return the content of a snapshot that is not of a directory; arguments and errors as for ``restore``."""

        def read(manifest: _Manifest) -> bytes:
            if manifest.info.is_directory:
                raise UsageError(f"the snapshot of {self.name!r} is of a directory; restore(directory) writes it")
            return b"".join(self._part(part) for file in manifest.files for part in file.parts)

        return self._chosen(number, read)[1]

    read_async = asyncio_form(read)

    def _chosen(self, number: int | None, use: Callable[[_Manifest], T]) -> tuple[SnapshotReport, T]:
        """Use the snapshot of a number, or the newest that can be used; returns also what ``use`` does."""
        if number is not None:
            manifest = self._manifest(number)
            return SnapshotReport(manifest.info, ()), use(manifest)
        found = self._newest(use)
        if found is None:
            raise NoSuchBlobError(f"there is no snapshot of {self.name!r}; save one")
        return found

    def _newest(self, use: Callable[[_Manifest], T]) -> tuple[SnapshotReport, T] | None:
        """Use the newest snapshot that can be used; what is damaged is skipped. None if there is none."""
        skipped: builtins.list[SkippedSnapshot] = []
        for number in self._numbers():
            try:
                manifest = self._manifest(number)
                return SnapshotReport(manifest.info, tuple(skipped)), use(manifest)
            except _DAMAGE as error:
                skipped.append(SkippedSnapshot(number, error))
        if skipped:
            problems = "; ".join(f"{each.number}: {each.problem}" for each in skipped)
            raise CorruptError(f"all snapshots of {self.name!r} are damaged; restore one of their blobs: {problems}")
        return None

    def _part(self, digest: str) -> bytes:
        """Return a part, verified."""
        data = self._blobs.get(self._parts + digest)
        if hashlib.sha256(data).hexdigest() != digest:
            raise DigestMismatchError(f"part {digest} of snapshots {self.name!r} has another content; restore its blob")
        return data

    def _write(self, manifest: _Manifest, target: Path) -> None:
        """Write a snapshot next to the target, and move it there."""
        if manifest.info.is_directory and target.is_dir() and any(target.iterdir()):
            raise FileExistsError(f"{target} is not empty; restore to a directory that does not exist")
        if target.exists() and target.is_dir() != manifest.info.is_directory:
            what, is_a = ("directory", "file") if manifest.info.is_directory else ("file", "directory")
            raise FileExistsError(f"the snapshot is of a {what}, and {target} is a {is_a}; restore to another path")
        parent = target.absolute().parent
        _make_directory(parent)
        with tempfile.TemporaryDirectory(prefix=f".{target.name}.", dir=parent) as work:
            made = Path(work) / "snapshot"
            if manifest.info.is_directory:
                made.mkdir()
            for each in manifest.directories:
                (made / each).mkdir(parents=True)
            for file in manifest.files:
                self._write_file(made / file.path, file)
            for directory in [made, *(made / each for each in manifest.directories)]:
                if directory.is_dir():
                    _sync(directory)
            os.replace(made, target)
            _sync(parent)

    def _write_file(self, path: Path, file: _File) -> None:
        with open(path, "wb") as out:
            for part in file.parts:
                out.write(self._part(part))
            out.flush()
            os.fchmod(out.fileno(), file.mode)
            os.fsync(out.fileno())
            if out.tell() != file.size:
                raise CorruptError(f"{file.path!r} has {out.tell()} bytes in parts, and {file.size} in the manifest")


class _Saving(PieceWriter):
    """Splits files into parts, and puts those that are not there; a file to write one of them to.

    Args:
        blobs: The blob store for the parts.
        prefix: The prefix of their names.
        part_bytes: Bytes of a part.
        verified: The ledgers of parts that were read whole, by name; grows.
    """

    def __init__(self, blobs: BlobStore, prefix: str, part_bytes: int, verified: dict[str, int]) -> None:
        super().__init__(part_bytes)
        self._blobs = blobs
        self._prefix = prefix
        self._verified = verified
        self._there: set[str] = set()
        """Names of the parts that this save wrote or found."""
        self._digests: list[str] = []
        self.files: list[_File] = []
        self.directories: list[str] = []
        self.written = 0

    def add(self, path: str, mode: int, write: Callable[[_Saving], object]) -> None:
        """Add a file, whose content ``write`` writes to this."""
        self._written, self._digests = 0, []
        write(self)
        self._put_rest()
        self.files.append(_File(path, mode, self._written, tuple(self._digests)))

    def _put(self, piece: bytes) -> None:
        digest = hashlib.sha256(piece).hexdigest()
        name = self._prefix + digest
        self._digests.append(digest)
        if name not in self._there:
            if not self._is_stored(name, piece):
                self._blobs.put(name, piece)
                self.written += len(piece)
            self._there.add(name)

    def _is_stored(self, name: str, data: bytes) -> bool:
        """Return whether a part can be read back; the catalog does not know if its ledger is lost or damaged."""
        try:
            found = self._blobs.stat(name)
            if found.digest != xxh3_128_hexdigest(data):
                return False
            if self._verified.get(name) == found.ledger_id:
                self._blobs.open_blob(name).close()  # reads its first and last entry
                return True
            if self._blobs.get(name) != data:
                return False
        except _DAMAGE:
            return False
        self._verified[name] = found.ledger_id
        return True

    def add_path(self, root: Path) -> None:
        """Add a file, or a directory with all that it holds."""
        if not root.is_dir():
            self._add_file(root, "")
            return
        for path in sorted(root.rglob("*")):
            relative = path.relative_to(root).as_posix()
            mode = path.lstat().st_mode
            if stat.S_ISDIR(mode):
                self.directories.append(relative)
            elif stat.S_ISREG(mode):
                self._add_file(path, relative)
            else:
                raise UsageError(f"{path} is neither a file nor a directory, and cannot be in a snapshot; remove it")

    def _add_file(self, path: Path, relative: str) -> None:
        try:
            opened = open_regular(str(path))
        except IrregularFileError as error:
            raise UsageError(f"{path} cannot be in a snapshot: it is {error.strerror}, or a directory") from error
        with open(opened, "rb") as file:
            mode = os.fstat(file.fileno()).st_mode & 0o777
            self.add(relative, mode, lambda saving: shutil.copyfileobj(file, saving, 1 << 20))


def _make_directory(path: Path) -> None:
    """Make a directory and its missing parents, durably, also if another process made it and was killed."""
    missing = [each for each in (path, *path.parents) if not each.is_dir()]
    with suppress(PermissionError):  # then no process of this user made it
        _sync(missing[-1].parent.parent if missing else path.parent)
    for each in reversed(missing):
        each.mkdir(exist_ok=True)
        _sync(each.parent)


def _sync(directory: Path) -> None:
    """Make the names in a directory durable."""
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)

"""``BlobStore``: named bytes of any length, replaced as a whole."""

from __future__ import annotations

import builtins
import io
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from types import TracebackType
from typing import BinaryIO, Final, Self, TypeVar

from pybk.config import StoreConfig
from pybk.credentials import Secret
from pybk.errors import (
    BlobExistsError,
    BlobGivenUpError,
    ClosedError,
    CorruptError,
    LedgerFencedError,
    NoSuchBlobError,
    NoSuchLedgerError,
    PybkError,
    UsageError,
)
from pybk.flags import StorageHint
from pybk.ledger.digest import DigestType
from pybk.manager.append_future import duration_of
from pybk.manager.arguments import hints_of, whole_from
from pybk.manager.atomic_group import GroupMember, GroupPart
from pybk.manager.handle import Handle, opening_form
from pybk.manager.ledger_manager import LedgerManager, backend_of
from pybk.manager.ledger_reader import LedgerReader
from pybk.streams.blob import BlobReader, BlobWriter, usual_chunk_bytes
from pybk.streams.blob_catalog import BlobCatalog
from pybk.streams.blob_record import BlobRecord, BlobVersion
from pybk.streams.list_record import META_BYTES_MAX, checked_name
from pybk.streams.log_settings import LogSettings, spec_of
from pybk.streams.named_list import manager_at
from pybk.threads.call_threads import asyncio_form, in_own_thread
from pybk.values import FrozenDict, encode_json, flag_of

UPLOAD_AGE_S: Final = 86400.0
"""The age in seconds from which a sweep counts an upload of another process as ended."""

STORE_NAME_BYTES_MAX: Final = 32
"""The longest name of a blob store: with a blob's name of 120 bytes, escaped, it has to fit a key of 480 bytes."""
KEEP_MAX: Final = 64
_BUFFER_BYTES: Final = 1 << 20
_GRACE_SECONDS_MAX: Final = 1e9

R = TypeVar("R")


@dataclass(frozen=True, slots=True)
class BlobInfo:
    """A blob that was published.

    Attributes:
        name: Its name.
        version: Its version, from 1 up. A name that is used again after a deletion begins with 1 again.
        size: Its bytes.
        digest: XXH3-128 of its bytes, hexadecimal.
        chunk: The size of its chunks, bytes; each chunk is verified as a whole.
        created_ns: The time when it was published, nanoseconds since 1970.
        meta: The application's.
        ledger_id: The ledger that holds it.
    """

    name: str
    version: int
    size: int
    digest: str
    chunk: int
    created_ns: int
    meta: Mapping[str, str]
    ledger_id: int


BlobData = bytes | bytearray | memoryview | str | os.PathLike[str] | BinaryIO | Iterable[bytes]
"""The data of a blob: bytes, the path of a file, a file that is open for reading, or an iterable of bytes."""


class BlobStore(Handle):
    """Named blobs: bytes of any length that are written once, and replaced as a whole.

    Example::

        with BlobStore.open("data/blobs", password=password) as blobs:
            blobs.put("model/weights", b"...")
            with blobs.open_blob("model/weights") as file:
                file.seek(100)
                part = file.read(50)

    A name refers to its old blob until the new one is complete and durable, and then to the new one; never to a part or
    a mixture. Files that are open for reading stay readable.

    Threads: any.
    """

    def __init__(self, manager: LedgerManager, catalog: BlobCatalog, keep: int, *, owns: bool) -> None:
        """Use ``BlobStore.open`` instead."""
        self.name: Final = catalog.store
        self._manager = manager
        self._catalog = catalog
        self._keep = keep
        self._owns_manager = owns
        self._closed = False

    # ---- opening and closing -------------------------------------------------------------------------------------

    @classmethod
    def open(
        cls,
        where: str | os.PathLike[str] | LedgerManager,
        name: str = "blobs",
        *,
        read_only: bool = False,
        password: bytes | Secret | None = None,
        secret: bytes | Secret | None = None,
        insecure: bool = False,
        keep: int = 1,
        grace_s: float = 0.0,
        digest_type: DigestType | None = None,
        storage_hints: Iterable[StorageHint] = (),
        quorums: tuple[int | None, int | None, int | None] = (None, None, None),
        config: StoreConfig | None = None,
    ) -> BlobStore:
        """Open a blob store; it needs no creation.

        Args:
            where: The directory of a store, which is created if needed and belongs to this blob store alone; or the
                manager of a store or a cluster, which it shares with other users.
            name: The blob store's name: 1 to 32 bytes in UTF-8 without ``/``; otherwise as for logs.
            read_only: Open the directory for reading, which is possible while another process writes. This process can
                open it for writing only after ``close``.
            password: The password of its ledgers, as for ``WriteAheadLog.open``.
            secret: Random bytes instead of a password, as for ``WriteAheadLog.open``.
            insecure: Allow neither a password nor a secret; blobs are then guarded against damage, not against forgery.
            keep: The number of versions of a name, 1 to 64, that are kept when this ``BlobStore`` publishes another.
            grace_s: Seconds for which a replaced or deleted blob is kept for readers in other processes, or of other
                managers. Readers of this manager keep the blobs that they have open in any case.
            digest_type: The digest of each chunk; None for HMAC-SHA256, or for CRC32C without a password or secret.
            storage_hints: The tiers where its ledgers should live.
            quorums: Ensemble size, write quorum and ack quorum in a cluster; None for the manager's defaults.
            config: Settings of the store, if ``where`` is a directory.

        Raises:
            StoreLockedError: Another process has the directory open for writing.
            IllegalOperationError: This process has it open for reading, so it cannot open it for writing.
            UsageError: There is neither password nor secret, or another argument is invalid.
        """
        asked = LogSettings(quorums=quorums, digest_type=digest_type, storage_hints=hints_of(storage_hints))
        spec = spec_of("blob", password, secret, insecure, asked)
        name = checked_name(name, "a blob store")
        if "/" in name or len(name.encode()) > STORE_NAME_BYTES_MAX:
            raise UsageError(
                f"the name {name!r:.60} of a blob store takes 1 to {STORE_NAME_BYTES_MAX} bytes in UTF-8, without /"
            )
        kept = whole_from(keep, 1, "keep", "a number of versions", KEEP_MAX)
        grace_s, read_only = duration_of(grace_s, "grace_s", _GRACE_SECONDS_MAX), flag_of(read_only, "read_only")
        with ExitStack() as undo:
            manager = manager_at(where, undo, read_only=read_only, config=config)
            store = cls(manager, BlobCatalog(manager, name, spec, grace_s), kept, owns=manager is not where)
            undo.pop_all()
        return store

    open_async = classmethod(opening_form(open))

    def close(self) -> None:
        """Release the blob store; a second call does nothing. Files that are open for reading stay open.

        A manager that ``open`` opened is closed as well, and with it such files.
        """
        if not self._closed:
            self._closed = True
            try:
                if not self._manager.read_only:
                    self._catalog.clean_late()
            finally:
                if self._owns_manager:
                    self._manager.close()

    def __repr__(self) -> str:
        """Name the blob store, and say where it is."""
        closed = ", closed" if self._closed else ""
        return f"<BlobStore {self.name!r} in {self._manager.location}{closed}>"

    @property
    def manager(self) -> LedgerManager:
        """The manager that has its ledgers."""
        return self._manager

    def _open(self) -> BlobCatalog:
        if self._closed:
            raise ClosedError(f"blob store {self.name!r} is closed here; open it again")
        return self._catalog

    # ---- writing -------------------------------------------------------------------------------------------------

    def create_blob(
        self, name: str, *, meta: Mapping[str, str] | None = None, overwrite: bool = True, chunk: int | None = None
    ) -> BlobUpload:
        """Return a file to write a blob to, which is published by leaving its ``with``.

        Args:
            name: The blob's name: 1 to 120 bytes in UTF-8, in parts separated by ``/``, as for logs.
            meta: The application's texts by name, at most 4 KiB in all.
            overwrite: Replace a blob of this name; False raises instead.
            chunk: Bytes of a chunk, at most ``max_entry_bytes``: a read at any position reads whole chunks. None for
                1 MiB, or ``max_entry_bytes`` if that is less.

        Raises:
            BlobExistsError: A blob of this name exists, and ``overwrite`` is False.
            UnauthorizedError: The password is not that of the blob of this name.
            StorageFullError: There is not enough free space; nothing was written.
            UsageError: An argument is invalid.

        Cost: Two synced writes, and two more to publish it.
        """
        catalog = self._open()
        name = checked_name(name, "a blob")
        most = backend_of(self._manager).config.max_entry_bytes
        size = usual_chunk_bytes(self._manager) if chunk is None else chunk
        size = whole_from(size, 1, "chunk", "bytes, up to max_entry_bytes", most)
        return BlobUpload(catalog, name, _checked_meta(meta), size, self._keep, overwrite=overwrite)

    create_blob_async = opening_form(create_blob)

    def put(
        self,
        name: str,
        data: BlobData,
        *,
        meta: Mapping[str, str] | None = None,
        overwrite: bool = True,
        chunk: int | None = None,
    ) -> BlobInfo:
        """Write and publish a blob.

        Args:
            name: As for ``create_blob``.
            data: Its bytes; or the path of a file, a file that is open for reading, or an iterable of bytes.
            meta: As for ``create_blob``.
            overwrite: As for ``create_blob``.
            chunk: As for ``create_blob``.

        Raises:
            PybkError: As ``create_blob`` and ``BlobUpload.commit``; with ``outcome_unknown`` the name may refer to the
                old blob or to this one, each whole.

        Durability: On return the blob is durable, and the name refers to it.
        """
        pieces = _pieces(data)
        with self.create_blob(name, meta=meta, overwrite=overwrite, chunk=chunk) as file:
            for piece in pieces:
                file.write(piece)
        return file.info

    put_async = asyncio_form(put, own_thread=True)

    def copy(self, source: str, target: str, *, version: int | None = None, overwrite: bool = True) -> BlobInfo:
        """Publish a blob under a second name without copying its bytes: both names refer to one ledger.

        Args:
            source: The name of the blob.
            target: The other name.
            version: The version; None for the newest.
            overwrite: Replace a blob of the other name; False raises instead.

        Raises:
            NoSuchBlobError: The blob does not exist.
            BlobExistsError: A blob of the other name exists, and ``overwrite`` is False.
            UnauthorizedError: The password is not that of both blobs; nothing was changed.

        Cost: Three synced writes, for any size.
        """
        catalog = self._open()
        source, target = checked_name(source, "a blob"), checked_name(target, "a blob")
        found = catalog.version(source, version)
        if source == target and found == catalog.read(source).latest:
            return _info(source, found)
        check = _check_of(overwrite)
        record = catalog.read(target)
        check(record)
        for each in (catalog.read(source), record):
            catalog.check_password(each)
        return _info(target, catalog.copy(source, found, target, self._keep, check))

    copy_async = asyncio_form(copy)

    def rename(self, source: str, target: str, *, overwrite: bool = True) -> BlobInfo:
        """Give a blob another name.

        The old name is removed after the new one was published, so after a crash in between the blob has both names.

        Args:
            source: The name of the blob; its newest version is renamed, and older ones are dropped.
            target: The other name.
            overwrite: As for ``copy``.

        Raises:
            PybkError: As ``copy``.

        Cost: As ``copy``, and another synced write.
        """
        catalog = self._open()
        if checked_name(source, "a blob") == checked_name(target, "a blob"):
            return self.stat(source)
        number = catalog.version(source).number
        made = self.copy(source, target, version=number, overwrite=overwrite)
        catalog.drop(source, number)
        return made

    rename_async = asyncio_form(rename)

    def delete(self, name: str) -> None:
        """Delete a blob with all its versions.

        Raises:
            NoSuchBlobError: It does not exist.
            UnauthorizedError: The password is not the blob's; nothing was deleted.

        Durability: The deletion is durable on return.
        """
        catalog = self._open()
        number = catalog.version(checked_name(name, "a blob")).number
        catalog.check_password(catalog.read(name))
        catalog.drop(name, number)

    delete_async = asyncio_form(delete)

    def sweep(self, *, older_than_s: float = UPLOAD_AGE_S) -> int:
        """Give up uploads that ended without being published, and delete all ledgers that are not needed any more.

        Each change also does this for its own name, and for ledgers that this ``BlobStore`` could not delete before. So
        a sweep is needed only after a crash, after ``grace_s``, and for uploads and ledgers that other processes left.

        Args:
            older_than_s: In a cluster, uploads of other processes that began at least this many seconds ago are given
                up; one that is still under way fails with ``BlobGivenUpError``. Uploads of this process are never given
                up. In a store, uploads of other processes always are, because only one process writes to a store.

        Returns:
            How many ledgers were deleted.

        Cost: One pass over all names and over all ledgers of type ``blob``.
        """
        return self._open().sweep(time.time_ns() - round(older_than_s * 1e9))

    sweep_async = asyncio_form(sweep)

    # ---- reading -------------------------------------------------------------------------------------------------

    def open_blob(self, name: str, version: int | None = None) -> io.BufferedReader:
        """Return a file to read a blob from, at any position; it stays readable if the blob is replaced or deleted.

        Args:
            name: The blob.
            version: The version; None for the newest.

        Raises:
            NoSuchBlobError: It does not exist. A read raises it for a blob that another process has deleted meanwhile.
            CorruptError, DigestMismatchError: It is damaged; also raised by a read that finds it. Every chunk is
                verified when it is read, and the digest of the whole blob if all chunks were read in order.
            UnauthorizedError: The password is not the blob's.
        """
        catalog = self._open()
        name = checked_name(name, "a blob")
        found = catalog.version(name, version)
        while True:
            try:
                return _BlobFile(_StoredBlob.open(catalog, name, found), _BUFFER_BYTES)
            except NoSuchLedgerError as error:
                before, found = found, catalog.version(name, version)
                if found == before:
                    ledger_id = found.reference.ledger_id
                    raise CorruptError(f"blob {name!r}: its ledger {ledger_id} is missing; restore it") from error

    open_blob_async = opening_form(open_blob)

    def get(self, name: str, version: int | None = None) -> bytes:
        """Read a whole blob; arguments and errors as for ``open_blob``."""
        with self.open_blob(name, version) as file:
            return file.read()

    get_async = asyncio_form(get)

    def stat(self, name: str, version: int | None = None) -> BlobInfo:
        """Return the facts of a blob without reading it; arguments and errors as for ``open_blob``."""
        return _info(name, self._open().version(checked_name(name, "a blob"), version))

    stat_async = asyncio_form(stat)

    def exists(self, name: str) -> bool:
        """Return whether there is a blob of this name."""
        return self._open().read(checked_name(name, "a blob")).latest is not None

    exists_async = asyncio_form(exists)

    def versions(self, name: str) -> builtins.list[BlobInfo]:
        """Return the versions of a blob that are kept, the newest first; empty if the blob does not exist."""
        found = self._open().read(checked_name(name, "a blob")).versions
        return [_info(name, each) for each in reversed(found)]

    versions_async = asyncio_form(versions)

    def list(self, prefix: str = "") -> builtins.list[BlobInfo]:
        """Return the blobs whose names begin with ``prefix``, by name.

        Cost: In a store one pass over the names with the prefix; in a cluster a round trip for each 500 names of the
            store.
        """
        found = self._open().records(prefix)
        return [_info(each.name, each.latest) for each in found if each.latest is not None]

    list_async = asyncio_form(list)


class BlobUpload(BlobWriter[BlobInfo]):
    """Writes a blob; made by ``BlobStore.create_blob``.

    Leaving its ``with`` publishes it, or ``commit`` does. If an exception leaves the ``with``, if ``abort`` is called,
    or if the file is dropped or only closed, nothing changes; leaving the ``with`` after ``abort`` does nothing.

    After its commit the name refers to the blob. The commit raises BlobExistsError if another writer has published a
    blob meanwhile, and ``overwrite`` is False; it and ``write`` raise BlobGivenUpError if a sweep has given this upload
    up.

    Threads: one.

    Attributes:
        name: The blob's name.
    """

    def __init__(
        self, catalog: BlobCatalog, name: str, meta: Mapping[str, str], chunk_bytes: int, keep: int, *, overwrite: bool
    ) -> None:
        """Use ``BlobStore.create_blob`` instead."""
        self.name: Final = name
        self._catalog = catalog
        self._meta = meta
        self._keep = keep
        self._check = _check_of(overwrite)
        self._info: BlobInfo | None = None
        self._check(catalog.read(name))
        writer, self._reference = catalog.begin(name)
        self._ended = False
        super().__init__(f"blob {name!r}", writer, chunk_bytes)

    @property
    def info(self) -> BlobInfo:
        """The blob, once it is published."""
        if self._info is None:
            raise ClosedError(f"blob {self.name!r} is not published: its upload lasts, or was given up")
        return self._info

    @contextmanager
    def _explaining(self) -> Iterator[None]:
        """Raise BlobGivenUpError if the ledger was deleted or fenced."""
        try:
            yield
        except (NoSuchLedgerError, LedgerFencedError) as error:
            raise BlobGivenUpError(
                f"the upload of blob {self.name!r} was given up, by a sweep; put it again"
            ) from error

    def _publish(self) -> BlobInfo:
        return self._published(self._catalog.publish(self.name, self._made(), self._keep, self._check))

    def _made(self) -> BlobVersion:
        """Return what is to be published, once it is sealed."""
        digest, now_ns = self._digest.hexdigest(), time.time_ns()
        return BlobVersion(1, self._reference, self._written, digest, self._piece_bytes, now_ns, self._meta)

    def _published(self, version: BlobVersion) -> BlobInfo:
        self._info = _info(self.name, version)
        return self._info

    def _group_member(self) -> GroupMember:
        return _UploadMember(self)

    def _abandon(self) -> None:
        self._catalog.abandon(self.name, self._reference.token)

    def _give_up(self) -> None:
        with suppress(PybkError):  # a later change of the name, or a sweep, deletes the ledger
            self._catalog.give_up(self.name, self._reference.token)


class _UploadMember(GroupMember):
    """A blob that an atomic group publishes.

    Args:
        upload: Its upload, which ends with the group.
    """

    call = "publish"
    alone = "commit the blob by itself"

    def __init__(self, upload: BlobUpload) -> None:
        upload._check_lasts()
        self._upload = upload
        self._catalog = upload._catalog
        super().__init__(self._catalog.record_name(upload.name), self._catalog.backend)
        self._made: BlobVersion | None = None
        self._record: BlobRecord | None = None

    def add(self) -> None:
        """Complete the blob, so that it can be published."""
        upload = self._upload
        upload._check_lasts()
        try:
            upload._ended = True
            upload._seal()
        except BaseException:
            self.abandon()
            raise
        self._made = upload._made()

    def hold(self, stage: Callable[[GroupPart], R | None]) -> R | None:
        """Stage the change of the blob's record as a part of the group."""
        assert self._made is not None, "it was added"
        upload = self._upload
        change, self._record = self._catalog.proposed(upload.name, self._made, upload._keep, upload._check)
        return stage(GroupPart(change=change))

    def committed(self) -> None:
        """Take note of that the blob is published."""
        assert self._made is not None, "it was staged"
        assert self._record is not None, "it was staged"
        upload = self._upload
        self.results = [upload._published(self._catalog.published(upload.name, self._record, self._made))]

    def abandon(self) -> None:
        """Give the upload up."""
        self._upload._abandon()
        self._upload._give_up()


class _StoredBlob(BlobReader):
    """Reads a blob of a store, whose ledger stays until this is closed."""

    def __init__(self, catalog: BlobCatalog, name: str, reader: LedgerReader, key: object) -> None:
        """Use ``_StoredBlob.open`` instead."""
        self._catalog = catalog
        self._name = name
        self._key = key
        super().__init__(reader)

    @classmethod
    def open(cls, catalog: BlobCatalog, name: str, version: BlobVersion) -> Self:
        """Open the blob of a version of a name; NoSuchLedgerError if its ledger was deleted."""
        key, ledger_id = object(), version.reference.ledger_id
        with ExitStack() as undo:
            undo.callback(catalog.close_ledger, key)
            reader = undo.enter_context(catalog.open_ledger(name, ledger_id, key))
            blob = cls(catalog, name, reader, key)
            if (blob.size, blob.digest.hex()) != (version.size, version.digest):
                raise CorruptError(
                    f"blob {name!r}: its ledger {ledger_id} has {blob.size} bytes with digest {blob.digest.hex()}, and "
                    f"its record says {version.size} and {version.digest}; restore the record"
                )
            undo.pop_all()
        return blob

    def readinto(self, buffer: memoryview | bytearray) -> int:  # type: ignore[override]
        """Read bytes into a buffer."""
        try:
            return super().readinto(buffer)
        except PybkError as error:
            if not self._catalog.is_deleted(self._reader.ledger_id):
                raise
            raise NoSuchBlobError(
                f"blob {self._name!r} was replaced or deleted by another process while it was read; open it again"
            ) from error

    def close(self) -> None:
        """Let go of the ledger."""
        self._catalog.close_ledger(self._key)
        super().close()


class _BlobFile(io.BufferedReader):
    """A blob that is open for reading; ``async with`` closes it in a thread."""

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Close the file."""
        await in_own_thread(self.close)


def _info(name: str, found: BlobVersion) -> BlobInfo:
    return BlobInfo(
        name=name,
        version=found.number,
        size=found.size,
        digest=found.digest,
        chunk=found.chunk_bytes,
        created_ns=found.created_ns,
        meta=FrozenDict(found.meta),
        ledger_id=found.reference.ledger_id,
    )


def _check_of(overwrite: bool) -> Callable[[BlobRecord], None]:
    """Return the check that the record of a blob passes before the blob is replaced."""
    return partial(_check_absent, overwrite=flag_of(overwrite, "overwrite"))


def _check_absent(record: BlobRecord, *, overwrite: bool) -> None:
    if not overwrite and record.latest is not None:
        raise BlobExistsError(f"blob {record.name!r} exists; overwrite=True replaces it")


def _checked_meta(meta: object) -> Mapping[str, str]:
    if meta is None:
        return FrozenDict({})
    if isinstance(meta, Mapping) and all(isinstance(text, str) for pair in meta.items() for text in pair):
        with suppress(UnicodeEncodeError):
            if len(encode_json(dict(meta))) <= META_BYTES_MAX:
                return FrozenDict(meta)
    raise UsageError(
        f"meta takes strings by strings, at most {META_BYTES_MAX} bytes as JSON in UTF-8, not {meta!r:.50}"
    )


def _pieces(data: object) -> Iterable[bytes | bytearray | memoryview]:
    """Return what is to be put in pieces."""
    if isinstance(data, bytes | bytearray | memoryview):
        return (data,)
    if isinstance(data, str | os.PathLike):
        return _content(data)
    if hasattr(data, "read"):
        return iter(partial(data.read, _BUFFER_BYTES), b"")
    if isinstance(data, Iterable):
        return data
    raise UsageError(
        f"data is {data!r:.50}; it takes bytes, the path of a file, a file open for reading, or an iterable of bytes"
    )


def _content(path: str | os.PathLike[str]) -> Iterator[bytes]:
    with open(path, "rb") as file:
        yield from iter(partial(file.read, _BUFFER_BYTES), b"")

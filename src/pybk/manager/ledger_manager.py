"""``LedgerManager``: opens a store or joins a cluster, and creates, opens, moves and deletes its ledgers."""

from __future__ import annotations

import logging
import os
import secrets
import time
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING, Final, NoReturn, Self, Unpack

from pybk import manager as handles
from pybk import storage
from pybk.backend import LedgerBackend, Replicated, ReplicatedLedgers
from pybk.config import StoreConfig
from pybk.credentials import (
    ClusterSecret,
    Credentials,
    Secret,
    cut_value,
    given_credentials,
    read_credentials,
)
from pybk.errors import (
    ClosedError,
    IllegalOperationError,
    LedgerExistsError,
    NoSuchLedgerError,
    UnauthorizedError,
    UsageError,
)
from pybk.feature_level import FeatureLevel
from pybk.flags import LedgerType, ReadFlag, StorageHint, WriteFlag
from pybk.ledger.digest import DigestType, entry_digest
from pybk.ledger.keys import LedgerKeys, LedgerSeal, unlocked, wrong_credentials
from pybk.ledger.ledger_metadata import (
    LedgerMetadata,
    LedgerState,
    LedgerSummary,
    key_binding,
    key_kind,
    new_key_format,
)
from pybk.manager.arguments import (
    LEDGER_ID_MAX,
    ClusterOptions,
    Tiers,
    bound_of,
    config_of,
    digest_type_of,
    existing_id,
    existing_ids,
    hints_of,
    id_for,
    join_cluster,
    member_of,
    progress_of,
    quorums_of,
    store_path_of,
    system_type,
    user_type,
)
from pybk.manager.handle import Ending, opening_form, settle_dropped, where_called
from pybk.manager.ledger_writer import LedgerWriter
from pybk.manager.local_backend import BackgroundScrub, StoreBackend, StoreUpkeep
from pybk.metrics import UNSEALED_LEDGERS, MetricsSnapshot
from pybk.spans import operation
from pybk.storage.descriptor import LedgerDescriptor
from pybk.storage.store import Store
from pybk.storage.volumes import named_paths
from pybk.threads.call_threads import asyncio_form, in_thread
from pybk.values import flag_of

if TYPE_CHECKING:
    from pybk.healing.scrub import ScrubReport, ScrubStatus
    from pybk.health import Health
    from pybk.manager.atomic_group import AtomicGroup
    from pybk.manager.ledger_reader import LedgerReader
    from pybk.metadata.registration import BookieRegistration

logger = logging.getLogger(__name__)

_LEDGERS_AT_ONCE: Final = 500
"""Ledgers that a thread reads for an event loop at a time."""

HOW_TO_SEAL: Final = "LedgerManager.reseal, or `pybk ledger reseal`, checks a closed ledger and seals it"

# Without a handler of its own a library's warnings would be printed to stderr by logging's last resort.
logging.getLogger("pybk").addHandler(logging.NullHandler())


class LedgerManager:
    """The ledgers of one store, or of one cluster.

    Use it as a context manager, sync or async. A manager that is garbage-collected without ``close`` is closed with a
    ResourceWarning once its writers and readers are collected, too; one that is open at the end of the program is
    closed then.

    Threads: any.
    """

    def __init__(self, backend: LedgerBackend) -> None:
        """Use ``LedgerManager.open`` instead."""
        self._backend = backend
        self._on_span = backend.config.on_span
        self._unsealed: set[int] = set()
        """Closed ledgers without a seal that the log has a warning of already."""
        self._ending = Ending(backend)

    # ---- opening and closing -------------------------------------------------------------------------------------

    @classmethod
    def _opened(cls, backend: LedgerBackend) -> Self:
        manager = cls(backend)
        manager._ending.watch(manager)
        return manager

    @classmethod
    def open(
        cls,
        path: str | os.PathLike[str],
        *,
        tiers: Tiers | None = None,
        read_only: bool = False,
        config: StoreConfig | None = None,
        **cluster: Unpack[ClusterOptions],
    ) -> LedgerManager:
        """Open the ledgers in a directory, creating it if needed; or join a cluster as a bookie and a client.

        Args:
            path: The store's directory.
            tiers: Directories of tiers outside of ``path``, one or several each, such as
                ``{StorageHint.HDD: "/mnt/hdd/pybk"}``. The store records them, so give them only when it is created or
                a device was moved.
            read_only: Open for reading while another process may write; nothing is locked, recovered or written.
            config: Settings; None for the defaults.
            cluster: ``metadata``, ``listen`` and others (see ``ClusterOptions``) make the directory that of a bookie,
                which serves once this returns; the manager's ledgers are those of the cluster.

        Returns:
            The manager. Every entry that was acknowledged as durable can be read.

        Raises:
            UsageError: An argument is invalid, such as the URL of a cluster for ``path``; ``connect`` takes that.
            StoreLockedError: Another process has it open; ``pid`` names it.
            IllegalOperationError: This process has it open for reading, so it cannot open it for writing.
            CookieError: A directory belongs to another store, was moved, or is missing.
            CorruptError: Durable data are damaged or missing.
        """
        config = config_of(config)
        root = store_path_of(path)
        if tiers is not None:
            named_paths(tiers)  # before anything is made
        flag_of(read_only, "read_only")
        settle_dropped()
        with operation(config.on_span, "pybk.manager.open", location=root, read_only=read_only):
            if cluster:
                return cls._opened(join_cluster(root, tiers, config, read_only=read_only, options=cluster))
            if read_only:
                return cls._opened(StoreBackend(storage.ReadOnlyStore.open(root, tiers=tiers, config=config)))
            return cls._opened(_live(Store.open(root, tiers=tiers, config=config)))

    open_async = classmethod(opening_form(open))

    @classmethod
    def connect(
        cls, metadata: str, *, cluster_secret: ClusterSecret | None = None, config: StoreConfig | None = None
    ) -> LedgerManager:
        """Use the ledgers of a cluster without being a bookie.

        Args:
            metadata: The URL of the cluster's metadata store: ``zk://host:port,host:port/path``, or ``lmdb:///path``
                for the processes of one host.
            cluster_secret: The secret of the cluster; None for a cluster of one host that has none. While it is
                replaced, both secrets in a tuple; or a ``Secret``, whose file is read again then.
            config: Settings of handles; None for the defaults.

        Raises:
            MetadataError: The metadata store cannot be reached, or the secret is wrong.
        """
        config = config_of(config)
        settle_dropped()
        with operation(config.on_span, "pybk.manager.connect") as connecting:
            manager = cls._opened(handles.connect.connect(metadata, cluster_secret, config))
            connecting.note(location=manager.location)
        return manager

    connect_async = classmethod(opening_form(connect))

    def close(self) -> None:
        """Wait for outstanding appends and close the store or the connection; open ledgers are not closed.

        Handles of this manager raise ClosedError afterwards, and waiting followers at once. A repeated close does
        nothing, and neither does a close in a forked child. A KeyboardInterrupt ends the wait, but not the close: call
        it again to wait for the end of the close. docs/concepts/lifecycle.md has signals, and managers without a close.

        Raises:
            IllegalOperationError: Called by a signal handler or a finaliser that interrupted a call of pybk; nothing
                was done.
            PybkError: The close failed; the lock of the directory was released all the same.
        """
        where = where_called("LedgerManager.close()")
        with operation(self._on_span, "pybk.manager.close", location=self.location):
            self._ending.close(where)

    close_async = asyncio_form(close, own_thread=True)

    def __enter__(self) -> Self:
        """Return the manager itself."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close the manager."""
        self.close()

    async def __aenter__(self) -> Self:
        """Return the manager itself."""
        return self

    async def __aexit__(self, *_: object) -> None:
        """Close the manager."""
        await self.close_async()

    def __reduce__(self) -> NoReturn:
        """Refuse to be copied or pickled.

        Raises:
            TypeError: Always.
        """
        raise TypeError(
            "a LedgerManager can be neither copied nor pickled: share it between threads, and open another one in "
            "another process, with read_only=True while this process has the store open, or with LedgerManager.connect"
        )

    def __repr__(self) -> str:
        """Return the class and the location."""
        how = ", closed" if self._backend.ended else ", read-only" if self.read_only else ""
        return f"<LedgerManager {self._backend.where}{how}>"

    @property
    def read_only(self) -> bool:
        """True if it was opened read-only."""
        return self._backend.read_only

    @property
    def is_cluster(self) -> bool:
        """True if the ledgers are on the bookies of a cluster; False for a store that this process opened."""
        return isinstance(self._backend, ReplicatedLedgers)

    @property
    def location(self) -> str:
        """The directory of the store, or the URL of the cluster's metadata store, without secrets."""
        return self._backend.where

    @property
    def store_id(self) -> bytes:
        """The identity of the store or cluster: 16 random bytes, which never change."""
        return self._backend.identity.store_id

    @property
    def feature_level(self) -> FeatureLevel:
        """The feature level whose formats are written; that of a cluster may rise while the manager is open."""
        return self._backend.feature_level

    def _usable(self) -> LedgerBackend:
        """Return the backend; raise ClosedError if the manager is closed."""
        self._backend.check_usable()
        return self._backend

    # ---- ledgers -------------------------------------------------------------------------------------------------

    def create_ledger(
        self,
        *,
        password: bytes | Secret = b"",
        secret: bytes | Secret | None = None,
        ledger_type: str = "",
        storage_hints: Iterable[StorageHint] = (),
        write_flags: WriteFlag = WriteFlag.NONE,
        digest_type: DigestType = DigestType.HMAC_SHA256,
        custom_metadata: Mapping[str, bytes] | None = None,
        ledger_id: int | None = None,
        ensemble_size: int | None = None,
        write_quorum: int | None = None,
        ack_quorum: int | None = None,
        insecure: bool = False,
    ) -> LedgerWriter:
        """Create a ledger and return its writer.

        Args:
            password: The password, as bytes or as a ``Secret`` that names a file or an environment variable. It opens
                the ledger, and with HMAC_SHA256 its key also authenticates the entries. It is never stored. Meant for
                passwords that people choose, because scrypt makes guesses slow.
            secret: A secret instead of the password, in the same forms: 32 random bytes or more, which need no scrypt.
                If both are given, the ledger is created with the secret.
            ledger_type: The type, by which metrics are split. Names beginning with "." are reserved for pybk.
            storage_hints: The tiers that the ledger may be in; the first of NVME, SSD, HDD that is named is used.
            write_flags: How the entries are written.
            digest_type: The digest that each entry carries.
            custom_metadata: The application's own metadata of the ledger.
            ledger_id: The id of an advanced ledger, whose entry ids the caller assigns; None for other ledgers.
            ensemble_size: Number of bookies that entries are striped over; None: 3 in a cluster, 1 in a store.
            write_quorum: Number of bookies that each entry is written to; None: 3, but at most the ensemble size.
            ack_quorum: Number of bookies that must acknowledge an entry; None: 2, but at most the write quorum.
            insecure: Must be true for settings without protection: ``DigestType.NONE``, and HMAC_SHA256 with an empty
                password.

        Returns:
            The writer; closing it, or leaving its ``with``, closes the ledger.

        Raises:
            UsageError: An argument is not valid; nothing was done.
            LedgerExistsError: ``ledger_id`` is taken.
            StorageFullError: There is not enough free space.
            IllegalOperationError: ``secret`` is given, and the feature level has no ledgers with one.

        Durability: The ledger is durable on return.
        Cost: One synced write; the first use of a password costs one scrypt: about 400 ms and, meanwhile, 128 MiB.
        """
        return self._create_ledger(
            user_type(ledger_type),
            given_credentials(password, secret),
            storage_hints=storage_hints,
            write_flags=write_flags,
            digest_type=digest_type,
            custom_metadata=custom_metadata,
            ledger_id=ledger_id,
            quorums=quorums_of(ensemble_size, write_quorum, ack_quorum),
            insecure=insecure,
        )

    create_ledger_async = opening_form(create_ledger)

    def create_system_ledger(
        self,
        ledger_type: LedgerType,
        *,
        password: bytes | Secret = b"",
        secret: bytes | Secret | None = None,
        custom_metadata: Mapping[str, bytes] | None = None,
        ensemble_size: int | None = None,
        write_quorum: int | None = None,
        ack_quorum: int | None = None,
        insecure: bool = False,
    ) -> LedgerWriter:
        """Create a ledger for the own metadata of a package that is built on pybk, and return its writer.

        Applications list and read such ledgers like any other, but cannot create them by accident, because
        ``create_ledger`` refuses types that begin with ".".

        Args:
            ledger_type: ``LedgerType.METADATA``.
            password: As for ``create_ledger``.
            secret: As for ``create_ledger``.
            custom_metadata: As for ``create_ledger``.
            ensemble_size: As for ``create_ledger``.
            write_quorum: As for ``create_ledger``.
            ack_quorum: As for ``create_ledger``.
            insecure: As for ``create_ledger``.

        Raises:
            UsageError: The type is not a system type; nothing was done.
            PybkError: As ``create_ledger``.

        Durability, cost: As for ``create_ledger``.
        """
        return self._create_ledger(
            system_type(ledger_type),
            given_credentials(password, secret),
            custom_metadata=custom_metadata,
            quorums=quorums_of(ensemble_size, write_quorum, ack_quorum),
            insecure=insecure,
        )

    create_system_ledger_async = opening_form(create_system_ledger)

    def _create_ledger(
        self,
        ledger_type: LedgerType,
        given: Credentials,
        *,
        storage_hints: Iterable[StorageHint] = (),
        write_flags: WriteFlag = WriteFlag.NONE,
        digest_type: DigestType = DigestType.HMAC_SHA256,
        custom_metadata: Mapping[str, bytes] | None = None,
        ledger_id: int | None = None,
        quorums: tuple[int | None, int | None, int | None] = (None, None, None),
        insecure: bool = False,
        entries_when_full: int = 0,
    ) -> LedgerWriter:
        """Create a ledger as ``create_ledger`` does, of a type that may be the system's own.

        A store takes ``entries_when_full`` of its first entries, if any, and the ledger although it is full.
        """
        backend = self._usable()
        with operation(self._on_span, "pybk.ledger.create", ledger_type=str(ledger_type)) as creating:
            hints = hints_of(storage_hints)
            flags = member_of(WriteFlag, write_flags, "write_flags")
            digest_type = digest_type_of(digest_type, given, insecure=insecure)
            key_salt = secrets.token_bytes(16)
            key_format = new_key_format(given.kind, backend.feature_level, backend.where)
            derive = partial(
                backend.key_ring.ledger_keys,
                given.value,
                ledger_salt=key_salt,
                key_epoch=0,
                kind=key_kind(key_format),
                binding=key_binding(key_format, digest_type, flags),
            )
            describe = partial(
                LedgerMetadata,
                ledger_type=ledger_type,
                storage_hints=hints,
                write_flags=flags,
                digest_type=digest_type,
                creation_time_ns=time.time_ns(),
                creation_sequence=backend.new_creation_sequence(),
                custom_metadata={} if custom_metadata is None else custom_metadata,
                tier=next((tier for tier in StorageHint if tier in hints), backend.config.default_tier),
                advanced=ledger_id is not None,
                key_salt=key_salt,
                key_format=key_format,
                **backend.quorums(quorums)._asdict(),
            )
            writer = self._create(backend, ledger_id, derive, describe, entries_when_full)
            creating.note(ledger_id=writer.ledger_id)
        return writer

    def _create(
        self,
        backend: LedgerBackend,
        ledger_id: int | None,
        derive: Callable[[int], LedgerKeys],
        describe: Callable[..., LedgerMetadata],
        entries_when_full: int,
    ) -> LedgerWriter:
        """Create a ledger with the requested id, or with the next unused one."""
        while True:
            new_id = id_for(backend, ledger_id)
            keys = derive(new_id)
            try:
                metadata = describe(ledger_id=new_id, verifier=backend.verifier(keys))
                descriptor = backend.create(metadata, entries_when_full=entries_when_full)
            except LedgerExistsError:
                if ledger_id is not None:
                    raise
            else:
                seal = LedgerSeal(keys, entry_digest(descriptor.metadata.digest_type, new_id, keys.entry_key))
                backend.unlock(descriptor, keys, seal)
                return LedgerWriter(backend, descriptor, seal.digest, self)

    def open_ledger(
        self,
        ledger_id: int,
        *,
        password: bytes | Secret = b"",
        secret: bytes | Secret | None = None,
        read_flags: ReadFlag = ReadFlag.NONE,
        recover: bool | None = None,
        require_seal: bool = False,
    ) -> LedgerReader:
        """Open a ledger for reading.

        Args:
            ledger_id: The ledger.
            password: The password of the ledger.
            secret: Its secret, if it was created with one. If both are given, the one that it was created with is used.
            read_flags: How it is read.
            recover: True fences the ledger's writer and closes the ledger. Its end is final then, and every
                acknowledged entry is in it. False does not change the ledger. None means True, or False in a read-only
                manager.
            require_seal: Refuse a ledger that is not sealed: one that is open, was closed by an older pybk, or whose
                seal was removed. Otherwise such a ledger opens with a warning in the log.

        Returns:
            A reader of the entries up to its last add confirmed.

        Raises:
            NoSuchLedgerError: The ledger was never created, or was deleted.
            UnauthorizedError: The password or secret is wrong; nothing was changed.
            LedgerRecoveryError: In a cluster: too few bookies answer to find the ledger's end. It is raised after 5 s
                if they refuse at once, after about 10 s if they do not answer, and at most 15.2 s after the recovery's
                last progress. Open the ledger again when they are back.
            SealMismatchError: The ledger's kind or end was changed after it was created or sealed.
            LedgerUnsealedError: ``require_seal`` is True, and the ledger is not sealed.
            IllegalOperationError: ``recover`` is True in a read-only manager.
            StorageFailedError: The store has failed and cannot close ledgers; ``recover=False`` still reads.

        Durability: With ``recover``, the ledger is durably closed on return.
        Cost: One synced write if there was something to recover; scrypt as for ``create_ledger``.
        """
        backend = self._usable()
        flags = member_of(ReadFlag, read_flags, "read_flags")
        flag_of(require_seal, "require_seal")
        recover = not self.read_only if recover is None else flag_of(recover, "recover")
        if recover:
            backend.check_writable()
        ledger_id, given = existing_id(ledger_id), given_credentials(password, secret)
        with operation(self._on_span, "pybk.ledger.open", ledger_id=ledger_id):
            return self._open_ledger(backend, ledger_id, given, flags, recover=recover, require_seal=require_seal)

    open_ledger_async = opening_form(open_ledger)

    def _open_ledger(
        self,
        backend: LedgerBackend,
        ledger_id: int,
        given: Credentials,
        flags: ReadFlag,
        *,
        recover: bool,
        require_seal: bool,
    ) -> LedgerReader:
        """Open a ledger as ``open_ledger`` does."""
        backend.catch_up()
        descriptor = backend.descriptor(ledger_id)
        seal = self._unlock(descriptor, given)
        if recover:
            with operation(self._on_span, "pybk.ledger.recover", ledger_id=ledger_id):
                backend.recover(descriptor)
        elif descriptor.metadata.state is not LedgerState.CLOSED:  # the end of a closed one is final
            backend.look(descriptor)
        check_end = partial(self._check_end, require_seal=require_seal)
        if require_seal and descriptor.metadata.state is not LedgerState.CLOSED:
            check_end(descriptor.metadata, seal)
        return handles.LedgerReader(backend, descriptor, seal, flags, check_end, self)

    def _unlock(self, descriptor: LedgerDescriptor, given: Credentials) -> LedgerSeal:
        """Check a ledger's password, set its keys in the backend, and return the verifier of its entries and seal."""
        metadata = descriptor.metadata
        keys = self._keys_of(metadata, given)
        if keys is None:
            raise _unauthorized(metadata, given)
        seal = LedgerSeal(keys, entry_digest(metadata.digest_type, metadata.ledger_id, keys.entry_key))
        self._backend.unlock(descriptor, keys, seal)
        return seal

    def _keys_of(self, metadata: LedgerMetadata, given: Credentials) -> LedgerKeys | None:
        """Return a ledger's keys, None if what is given is wrong."""
        return unlocked(self._backend.key_ring, self._backend.verifier, given, metadata)

    def check_password(
        self, ledger: int | LedgerMetadata, password: bytes | Secret = b"", *, secret: bytes | Secret | None = None
    ) -> bool:
        """Return whether a password or secret is a ledger's; does not read entries or change anything.

        The verifier that is derived from it is compared, in constant time, with the one in the ledger's metadata.

        Args:
            ledger: The ledger's id, or its metadata, such as ``ledgers`` yields, which saves looking the ledger up.
            password: The password to check; empty for a ledger that was created without one.
            secret: The secret to check, as for ``open_ledger``.

        Raises:
            NoSuchLedgerError: The ledger was never created, or was deleted.
            SealMismatchError: The password is right, but the digest type or write flags in the ledger's metadata differ
                from those with which it was created.
            UsageError: The password is not bytes, or the secret is too short.
            OutOfMemoryError: There is not enough memory for scrypt.

        Threads: Any; checks of passwords that were not used before wait for each other.
        Cost: One scrypt, about 400 ms and 128 MiB, for the first use of a password in this manager. Later, and for a
            secret, about 20 µs if it is right, and more than ten times that if it is wrong.
        """
        return self._keys_of(self._metadata_of(ledger), given_credentials(password, secret)) is not None

    check_password_async = asyncio_form(check_password)

    def check_seal(
        self,
        ledger: int | LedgerMetadata,
        *,
        password: bytes | Secret = b"",
        secret: bytes | Secret | None = None,
        require: bool = False,
    ) -> bool:
        """Check the seal of a closed ledger, which proves its kind and its end; does not read entries.

        Args:
            ledger: The ledger's id, or its metadata, such as ``ledgers`` yields, which saves looking the ledger up.
            password: The password of the ledger.
            secret: Its secret, as for ``open_ledger``.
            require: Raise for a ledger that is not closed and sealed.

        Returns:
            True if the ledger is sealed and the seal is right; False if it is not closed, or was closed without a seal.

        Raises:
            NoSuchLedgerError: The ledger was never created, or was deleted.
            UnauthorizedError: The password is wrong.
            SealMismatchError: The ledger's kind or end was changed after it was created or sealed.
            LedgerUnsealedError: ``require`` is True, and the ledger is not closed and sealed.

        Threads: Any.
        Cost: As ``check_password``.
        """
        flag_of(require, "require")
        metadata, given = self._metadata_of(ledger), given_credentials(password, secret)
        keys = self._keys_of(metadata, given)
        if keys is None:
            raise _unauthorized(metadata, given)
        if not metadata.sealed and not require:
            return False
        seal = LedgerSeal(keys, entry_digest(metadata.digest_type, metadata.ledger_id, keys.entry_key))
        seal.require(metadata, HOW_TO_SEAL)
        return True

    check_seal_async = asyncio_form(check_seal)

    def _metadata_of(self, ledger: int | LedgerMetadata) -> LedgerMetadata:
        """Return the metadata of a ledger that is given by id or by metadata."""
        if isinstance(ledger, LedgerMetadata):
            self._usable()
            return ledger
        return self.ledger_metadata(ledger)

    def _check_end(self, metadata: LedgerMetadata, seal: LedgerSeal, *, require_seal: bool) -> None:
        """Check the seal of a closed ledger; without a seal, log a warning or raise."""
        if metadata.sealed or require_seal:
            seal.require(metadata, HOW_TO_SEAL)
            return
        backend = self._backend
        backend.metrics.add(UNSEALED_LEDGERS, 1, metadata.ledger_type, metadata.tier)
        if backend.feature_level >= FeatureLevel.SEALS and metadata.ledger_id not in self._unsealed:
            self._unsealed.add(metadata.ledger_id)
            logger.warning(
                "ledger %d is closed without a seal, so nothing proves where it ends; %s",
                metadata.ledger_id,
                HOW_TO_SEAL,
            )

    def reseal(
        self, ledger_id: int, *, password: bytes | Secret = b"", secret: bytes | Secret | None = None
    ) -> LedgerMetadata:
        """Check all entries of a closed ledger, and seal it.

        Every entry is read. The check covers digests, that ids are dense, that the cumulative lengths add up, and that
        the last entry is that of the metadata. A sealed ledger is checked as well, and keeps its seal. In a cluster,
        the bookies of the last fragment are asked for entries beyond the end. If one of these proves that an entry
        after the end was confirmed, somebody without the password closed the ledger short.

        Args:
            ledger_id: The ledger.
            password: The password of the ledger.
            secret: Its secret, as for ``open_ledger``.

        Returns:
            The metadata of the ledger with the seal.

        Raises:
            NoSuchLedgerError: The ledger was never created, or was deleted.
            UnauthorizedError: The password is wrong; nothing was changed.
            SealMismatchError: The ledger has a seal that does not match its kind or end, or it was closed short;
                nothing was changed.
            CorruptError, DigestMismatchError: An entry is damaged, missing or was changed; no seal was written.
            IllegalOperationError: The ledger is not closed, or the feature level of the store or cluster is too low.

        Durability: The seal is durable on return.
        Cost: Reads each entry once, from one bookie; one synced write.
        """
        ledger_id = existing_id(ledger_id)
        with operation(self._on_span, "pybk.ledger.reseal", ledger_id=ledger_id):
            return self._reseal(ledger_id, given_credentials(password, secret))

    reseal_async = asyncio_form(reseal)

    def _reseal(self, ledger_id: int, given: Credentials) -> LedgerMetadata:
        """Check and seal a ledger as ``reseal`` does."""
        backend = self._usable()
        backend.check_writable()
        with self.open_ledger(ledger_id, password=given.password, secret=given.secret, recover=False) as reader:
            metadata = reader.metadata
            if not reader.is_closed:
                raise IllegalOperationError(
                    f"ledger {ledger_id} is {metadata.state.value}; open_ledger({ledger_id}, recover=True) closes and "
                    "seals it"
                )
            if backend.feature_level < FeatureLevel.SEALS:
                raise IllegalOperationError(
                    f"{backend.where} is at feature level {backend.feature_level.name}, which has no seals; raise it "
                    "with --finalize of `pybk store upgrade` or `pybk cluster upgrade`, once no older pybk uses it"
                )
            last_entry = handles.checked_whole(reader)
            descriptor = backend.descriptor(ledger_id)
            if not metadata.sealed:
                seal = self._unlock(descriptor, given)
                hidden = backend.proven_lac(descriptor) if isinstance(backend, ReplicatedLedgers) else -1
                seal.check_end(metadata, hidden)
                backend.reseal(descriptor, seal.sealed(metadata, last_entry))
        return backend.metadata(ledger_id)

    def delete_ledger(
        self, ledger_id: int, *, password: bytes | Secret | None = None, secret: bytes | Secret | None = None
    ) -> None:
        """Delete a ledger for good; its writer and readers get NoSuchLedgerError from now on.

        Args:
            ledger_id: The ledger.
            password: The password of the ledger. In a cluster it or the secret is required, because bookies delete
                nothing without it; in a store of this process, the check is skipped if both are None.
            secret: Its secret, as for ``open_ledger``.

        Raises:
            NoSuchLedgerError: The ledger was never created, or was deleted.
            UnauthorizedError: The password is wrong; nothing was changed.

        Durability: The deletion is durable on return; disk space is freed in the background.
        """
        backend, ledger_id = self._usable(), existing_id(ledger_id)
        with operation(self._on_span, "pybk.ledger.delete", ledger_id=ledger_id):
            backend.delete(self._entitled(ledger_id, password, secret))

    delete_ledger_async = asyncio_form(delete_ledger)

    def list_ledgers(self, ledger_type: str | None = None) -> Iterator[int]:
        """Yield the ids of all ledgers, ascending; only those of a type if one is given."""
        self._usable().catch_up()
        return self._listed(None if ledger_type is None else LedgerType(ledger_type))

    def _all_metadata(self, after: int = -1) -> Iterator[LedgerMetadata]:
        """Yield as the backend does; after a close, raise the error that names the manager."""
        try:
            yield from self._backend.ledgers(after)
        except ClosedError:
            self._usable()
            raise

    def _listed(self, wanted: LedgerType | None) -> Iterator[int]:
        for metadata in self._all_metadata():
            if wanted is None or metadata.ledger_type == wanted:
                yield metadata.ledger_id

    async def list_ledgers_async(self, ledger_type: str | None = None) -> list[int]:
        """Return the ids of all ledgers as a list, made in a thread."""
        return await in_thread(lambda: list(self.list_ledgers(ledger_type)))

    def ledgers(
        self,
        *,
        ledger_type: str | None = None,
        state: LedgerState | None = None,
        first: int = 0,
        last: int | None = None,
    ) -> Iterator[LedgerSummary]:
        """Yield ledgers with their metadata by ascending id, in one pass.

        A ledger that is created or deleted during the iteration may or may not be among them. The iterator keeps the
        manager open.

        Args:
            ledger_type: Yield ledgers of this type alone; None for all types, the system's included.
            state: Yield ledgers in this state alone; None for all.
            first: Lowest ledger id.
            last: Highest ledger id, inclusive; None for no bound.

        Raises:
            UsageError: An argument is of another type or out of its range; raised by the call itself.
            ClosedError: The manager is closed. An iteration may still yield what was read before a close.
            MetadataUnreachableError: The cluster's metadata store does not answer; raised by the iteration.

        Threads: One at a time for each iterator.
        Cost: In a store some 35 µs a closed ledger and 130 µs an open one, 1000 index rows at a time. In a cluster one
            round trip for 500 ledgers. Ledgers outside ``first`` to ``last`` cost nothing; those of another type or
            state are read.
        """
        backend, wanted = self._usable(), self._filter(ledger_type, state, first, last)
        backend.catch_up()
        return self._summaries(*wanted)

    def ledgers_async(
        self,
        *,
        ledger_type: str | None = None,
        state: LedgerState | None = None,
        first: int = 0,
        last: int | None = None,
    ) -> AsyncIterator[LedgerSummary]:
        """Yield ledgers as ``ledgers`` does; use with ``async for``. A thread reads up to 500 ledgers at a time."""
        self._usable()
        return self._summaries_async(*self._filter(ledger_type, state, first, last))

    @staticmethod
    def _filter(
        ledger_type: str | None, state: LedgerState | None, first: int, last: int | None
    ) -> tuple[LedgerType | None, LedgerState | None, int, int]:
        return (
            None if ledger_type is None else LedgerType(ledger_type),
            None if state is None else member_of(LedgerState, state, "state"),
            bound_of(first, "first", 0),
            bound_of(last, "last", LEDGER_ID_MAX),
        )

    def _summaries(
        self, ledger_type: LedgerType | None, state: LedgerState | None, first: int, last: int
    ) -> Iterator[LedgerSummary]:
        for metadata in self._all_metadata(first - 1):
            if metadata.ledger_id > last:
                return
            if ledger_type is not None and metadata.ledger_type != ledger_type:
                continue
            if state is not None and metadata.state is not state:
                continue
            try:
                summary = self._summary(metadata)
            except NoSuchLedgerError:  # deleted since the index or the metadata store was read
                continue
            yield summary

    async def _summaries_async(
        self, ledger_type: LedgerType | None, state: LedgerState | None, first: int, last: int
    ) -> AsyncIterator[LedgerSummary]:
        await in_thread(self._backend.catch_up)
        found = self._summaries(ledger_type, state, first, last)
        while page := await in_thread(lambda: list(islice(found, _LEDGERS_AT_ONCE))):
            for summary in page:
                yield summary

    def _summary(self, metadata: LedgerMetadata) -> LedgerSummary:
        """Return the summary of a ledger without requests to bookies."""
        if metadata.state is LedgerState.CLOSED:
            return LedgerSummary(metadata, metadata.last_entry_id, metadata.length)
        return LedgerSummary(metadata, *(self._backend.confirmed(metadata.ledger_id) or (None, None)))

    def ledger_summary(self, ledger_id: int) -> LedgerSummary:
        """Return the summary of one ledger, as ``ledgers`` yields it.

        Raises:
            NoSuchLedgerError: The ledger was never created, or was deleted.

        Threads: Any.
        Cost: In a store some 60 µs; in a cluster one round trip to the metadata store.
        """
        return self._summary(self.ledger_metadata(ledger_id))

    ledger_summary_async = asyncio_form(ledger_summary)

    def ledger_metadata(self, ledger_id: int) -> LedgerMetadata:
        """Return the metadata of a ledger.

        Raises:
            NoSuchLedgerError: The ledger was never created, or was deleted.
        """
        backend, ledger_id = self._usable(), existing_id(ledger_id)
        with operation(self._on_span, "pybk.ledger.metadata", ledger_id=ledger_id):
            backend.catch_up()
            return backend.metadata(ledger_id)

    ledger_metadata_async = asyncio_form(ledger_metadata)

    def move_ledger(
        self,
        ledger_id: int,
        target: StorageHint,
        *,
        password: bytes | Secret | None = None,
        secret: bytes | Secret | None = None,
    ) -> None:
        """Move a ledger to another tier, in any direction, open or closed; reads and appends continue meanwhile.

        Args:
            ledger_id: The ledger.
            target: The tier; in a cluster, each bookie moves its part to this tier.
            password: As for ``delete_ledger``.
            secret: As for ``delete_ledger``.

        Raises:
            NoSuchLedgerError: The ledger was never created, or was deleted.
            UnauthorizedError: The password is wrong; nothing was changed.
            StorageFullError: The target has not enough free space; or a bookie did not answer, or has damaged entries
                of the ledger, which the bookie's log names. The entries stay readable in their present tier.
            CorruptError: Damaged entries stay in their present tier; the error names ledgers and files. All others were
                moved, and the metadata name the target; move the ledger again once the file is restored.
        """
        tier = member_of(StorageHint, target, "target")
        backend, ledger_id = self._usable(), existing_id(ledger_id)
        with operation(self._on_span, "pybk.ledger.move", ledger_id=ledger_id, tier=tier.name):
            backend.move(self._entitled(ledger_id, password, secret), tier)

    move_ledger_async = asyncio_form(move_ledger)

    def move_ledgers(
        self,
        ledger_ids: Iterable[int],
        target: StorageHint,
        *,
        password: bytes | Secret | None = None,
        secret: bytes | Secret | None = None,
    ) -> None:
        """Move many ledgers to another tier, as ``move_ledger`` moves one; reads and appends continue meanwhile.

        In a store of this process up to 1024 ledgers or 64 MiB are moved with one commit and share files of the tier,
        so small ledgers move many times faster than one by one. A cluster moves one ledger after the other.

        Args:
            ledger_ids: The ledgers, in any order; one that is named twice is moved once.
            target: The tier; in a cluster, that of each bookie that has a part of a ledger.
            password: As for ``delete_ledger``; the same for all of them.
            secret: As for ``delete_ledger``; the same for all of them.

        Raises:
            NoSuchLedgerError: A ledger was never created, or was deleted. Those with lower ids may have been moved.
            UnauthorizedError: The password is wrong for a ledger. Those with lower ids may have been moved.
            StorageFullError: The target has not enough free space, or a bookie did not answer; entries that were not
                moved stay readable in their present tier. Call this again with the same ledgers; those that were moved
                are skipped.
            CorruptError: Damaged entries stay in their present tier; the error names ledgers and files. All others were
                moved, and the metadata name the target; move the ledger again once the file is restored.

        Durability: All are moved durably if it returns without an error. After a crash some are moved, each of them
            whole or not at all.
        Cost: About 0.5 ms of processor time for each small closed ledger of a store, and five syncs for each group.
        """
        tier = member_of(StorageHint, target, "target")
        backend = self._usable()
        wanted = existing_ids(ledger_ids)
        with operation(self._on_span, "pybk.ledger.move", ledgers=len(wanted), tier=tier.name):
            backend.move_all((self._entitled(ledger_id, password, secret) for ledger_id in wanted), tier)

    move_ledgers_async = asyncio_form(move_ledgers)

    def _entitled(
        self, ledger_id: int, password: bytes | Secret | None, secret: bytes | Secret | None
    ) -> LedgerDescriptor:
        """Return the descriptor of a ledger to delete or move; check the password if one is given or required."""
        backend = self._usable()
        descriptor = backend.descriptor(existing_id(ledger_id))
        if password is not None or secret is not None or backend.changes_by_password:
            self._unlock(descriptor, read_credentials(password, secret))
        return descriptor

    def replicate(self, what: int | str) -> Replicated:
        """Re-replicate: copy the entries of lost bookies, byte for byte, to other bookies, which take their places.

        Args:
            what: The id of a ledger: its fragments on bookies that are not registered, or that lack entries, are
                completed. Or the name of a bookie, which then counts as lost even if it is registered: its fragments of
                all ledgers are completed.

        Returns:
            What was copied, and what could not be copied now. The last fragment of an open ledger has no end yet and
            is left out: call ``open_ledger(id, recover=True)`` if its writer has died.

        Raises:
            NoSuchLedgerError: The ledger was never created, or was deleted.
            UsageError: The cluster knows no bookie of this name; the error names those that it knows.
            IllegalOperationError: The manager is that of a store, not of a cluster.

        Durability: A fragment names a new bookie only after all its entries are durable there.
        """
        backend, what = self._replicated(), what if isinstance(what, str) else existing_id(what)
        named: dict[str, str | int] = {"bookie": what[:100]} if isinstance(what, str) else {"ledger_id": what}
        with operation(self._on_span, "pybk.ledger.replicate", **named) as replicating:
            done = backend.replicate(what)
            replicating.note(ledgers=done.ledgers, fragments=done.fragments, left=len(done.left))
        return done

    replicate_async = asyncio_form(replicate)

    def bookies(self) -> tuple[BookieRegistration, ...]:
        """Return the available bookies of the cluster by name, as registered in the metadata store.

        Raises:
            IllegalOperationError: The manager is that of a store, which has no bookies.
            MetadataUnreachableError: The metadata store does not answer.

        Cost: One or two round trips to the metadata store.
        """
        return tuple(self._replicated().bookies())

    bookies_async = asyncio_form(bookies)

    def _replicated(self) -> ReplicatedLedgers:
        """Return the backend, which has bookies."""
        backend = self._usable()
        if isinstance(backend, ReplicatedLedgers):
            return backend
        raise IllegalOperationError(
            f"{self.location} is a store of one process, which keeps one copy and has no bookies; "
            "LedgerManager.connect(url) uses the ledgers of a cluster"
        )

    def transaction(self) -> AtomicGroup:
        """Return an atomic group: records of several logs, acknowledgements, blobs and properties, with one sync.

        Leaving its ``with`` commits. A cluster refuses a group of more than records of one log, because the bookies of
        different ledgers could have a part of it and not the rest.

        Raises:
            IllegalOperationError: The manager is read-only.
        """
        backend = self._usable()
        backend.check_writable()
        return handles.AtomicGroup(backend)

    # ---- the store -----------------------------------------------------------------------------------------------

    def checkpoint(self) -> None:
        """Write all durable entries to their tiers and into the index now, and delete files without live entries.

        Reads and appends continue meanwhile. In a cluster it does nothing, because bookies do this by themselves.
        """
        backend = self._usable()
        if isinstance(backend, StoreUpkeep):
            with operation(self._on_span, "pybk.store.checkpoint"):
                backend.checkpoint()

    checkpoint_async = asyncio_form(checkpoint)

    def scrub(self, *, progress: Callable[[int, int], None] | None = None) -> ScrubReport:
        """Check the checksum of each stored entry now, in the calling thread, as fast as possible.

        A store checks all of its entries in the background as well, once in ``StoreConfig.scrub_seconds``; this counts
        as such a check. ``pybk.verify`` also checks files, index, digests and seals, of a store that no other manager
        of this process has open.

        Args:
            progress: Called with the bytes of entries that were checked and the bytes to check in all, in the calling
                thread.

        Returns:
            The damaged entries, none if all are sound. ``health`` names their ledgers until the files were restored or
            the ledgers deleted, unless the store is open read-only.

        Raises:
            IllegalOperationError: The manager is that of a cluster, where ``ClusterAdmin.scrub`` asks the bookies.
            ClosedError: The manager was closed.
            UsageError: Entries are compressed and the extra ``pybk[zstd]`` is not installed.

        Threads: Any; appends and reads continue meanwhile.
        Cost: Reads every entry once, past the page cache.
        """
        backend = self._own_disks("scrub")
        said = progress_of(progress)
        with operation(self._on_span, "pybk.store.scrub"):
            return backend.check_entries(said)

    scrub_async = asyncio_form(scrub)

    def scrub_status(self) -> ScrubStatus:
        """Return how the checks of the store's entries proceed: since when everything was checked, and what is damaged.

        A read-only manager returns what the process that writes the store noted last.

        Raises:
            IllegalOperationError: The manager is that of a cluster, where ``ClusterAdmin.scrub_status`` has it.
        """
        return self._own_disks("scrub_status").scrub_status()

    scrub_status_async = asyncio_form(scrub_status)

    def _own_disks(self, call: str) -> StoreUpkeep:
        """Return the backend, whose disks are the manager's own; ``ClusterAdmin`` has the call for a cluster."""
        backend = self._usable()
        if isinstance(backend, StoreUpkeep):
            return backend
        raise IllegalOperationError(
            f"{self.location} is a cluster, whose bookies check their own entries; ask them by ClusterAdmin.{call}"
        )

    def health(self) -> Health:
        """Return the health of the manager: whether it accepts appends, and the reason if not; see ``Health``."""
        return self._usable().health()

    health_async = asyncio_form(health)

    def metrics(self) -> MetricsSnapshot:
        """Return counters and latency histograms since opening, split by ledger type and tier; after closing, too."""
        if self._backend.forked:
            self._backend.check_usable()
        return self._backend.metrics.snapshot()

    metrics_async = asyncio_form(metrics)


def _live(store: Store) -> StoreBackend:
    """Return the backend of a live store, whose entries are checked in the background."""
    backend = StoreBackend(store)
    with ExitStack() as undo:
        undo.callback(backend.close)
        if store.config.background:
            backend.scrub = BackgroundScrub(store)
        undo.pop_all()
    return backend


def backend_of(manager: LedgerManager) -> LedgerBackend:
    """Return the backend of a manager, for layers that keep named records, too."""
    if not isinstance(manager, LedgerManager):
        raise UsageError(
            f"manager is {cut_value(manager, 50)}; it takes a LedgerManager, such as of LedgerManager.open(path)"
        )
    return manager._usable()


def create_when_full(
    manager: LedgerManager,
    *,
    entries: int,
    given: Credentials,
    ledger_type: str,
    storage_hints: Iterable[StorageHint],
    write_flags: WriteFlag,
    digest_type: DigestType,
    custom_metadata: Mapping[str, bytes],
    quorums: tuple[int | None, int | None, int | None],
    insecure: bool,
) -> LedgerWriter:
    """Create a ledger as ``create_ledger`` does, but a store takes its first entries even if it is full.

    Args:
        manager: The manager of the store or cluster.
        entries: The number of these entries; unless it is 0, the ledger is created even in a full store.
        given: Its password or secret.
        ledger_type: Its type.
        storage_hints: Its tiers.
        write_flags: How its entries are written.
        digest_type: The digest that its entries carry.
        custom_metadata: The application's own metadata of it.
        quorums: Ensemble size, write quorum and ack quorum.
        insecure: Whether it may be without protection.
    """
    return manager._create_ledger(
        user_type(ledger_type),
        given,
        storage_hints=storage_hints,
        write_flags=write_flags,
        digest_type=digest_type,
        custom_metadata=custom_metadata,
        quorums=quorums_of(*quorums),
        insecure=insecure,
        entries_when_full=entries,
    )


def _unauthorized(metadata: LedgerMetadata, given: Credentials) -> UnauthorizedError:
    """Return the error for a password or secret that is not the ledger's."""
    text = wrong_credentials(metadata.key_kind, given, f"ledger {metadata.ledger_id}")
    also = "; or its digest type, write flags or key salt were changed" if metadata.key_format else ""
    return UnauthorizedError(f"{text}{also}; nothing was changed")

"""``Namespace``: the named logs of a store or a cluster, to be created, listed, renamed, deleted and watched."""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from functools import partial
from weakref import WeakSet

from pybk.config import StoreConfig
from pybk.credentials import Secret
from pybk.errors import ClosedError, IllegalOperationError, LogExistsError, UsageError
from pybk.flags import StorageHint
from pybk.ledger.digest import DigestType
from pybk.manager.arguments import hints_of
from pybk.manager.handle import Handle, opening_form, where_called
from pybk.manager.ledger_manager import LedgerManager, backend_of
from pybk.metadata.store import Watch
from pybk.streams import ledger_list
from pybk.streams.ledger_steps import LedgerSteps, names_of
from pybk.streams.list_record import UID_BYTES, ListKind, checked_name
from pybk.streams.list_writer import ListWriter
from pybk.streams.log import FIRST_SEQ, Log
from pybk.streams.log_settings import LedgerSpec, LogSettings, RollPolicy, spec_of
from pybk.streams.name_watch import NameWatch
from pybk.streams.named_list import delete_log, manager_at
from pybk.streams.sweep import check_not_lost
from pybk.threads.call_threads import asyncio_form
from pybk.values import flag_of


class Namespace(Handle):
    """The named logs of a store or a cluster that have one password.

    ::

        with Namespace.open("data/app", password=password) as logs:
            with logs.create("orders/eu") as log, log.writer() as writer:
                writer.append(b"one")
            logs.rename("orders/eu", "orders/europe")
            print(logs.names("orders/"))

    Threads: any.
    """

    def __init__(self, manager: LedgerManager, spec: LedgerSpec, mode: str, *, owns: bool) -> None:
        """Use ``Namespace.open`` instead."""
        self._manager = manager
        self._spec = spec
        self._mode = mode
        self._owns_manager = owns
        self._closed = False
        self._logs: WeakSet[Log] = WeakSet()

    # ---- opening and closing -------------------------------------------------------------------------------------

    @classmethod
    def open(
        cls,
        where: str | os.PathLike[str] | LedgerManager,
        *,
        mode: str = "w",
        password: bytes | Secret | None = None,
        secret: bytes | Secret | None = None,
        insecure: bool = False,
        digest_type: DigestType | None = None,
        storage_hints: Iterable[StorageHint] = (),
        quorums: tuple[int | None, int | None, int | None] = (None, None, None),
        config: StoreConfig | None = None,
    ) -> Namespace:
        """Open the namespace of a store or a cluster.

        Args:
            where: The directory of a store, which is created if needed and belongs to this namespace alone; or the
                manager of a store or a cluster, which it shares with other users.
            mode: ``"w"`` to read and change logs. ``"r"`` to read them in a directory that another process writes to.
            password: The password of their ledgers, as for ``WriteAheadLog.open``.
            secret: Random bytes instead of a password, as for ``WriteAheadLog.open``.
            insecure: Allow neither a password nor a secret; records are then guarded against damage, not against
                forgery.
            digest_type: The digest of the entries with the records; None for HMAC-SHA256, or for CRC32C without a
                password or secret.
            storage_hints: The tiers where their ledgers should live.
            quorums: Ensemble size, write quorum and ack quorum in a cluster; None for the manager's defaults.
            config: Settings of the store, if ``where`` is a directory.

        Raises:
            StoreLockedError: Another process has the directory open for writing.
            UsageError: There is neither password nor secret, or another argument is invalid.
        """
        hints = hints_of(storage_hints)
        asked = LogSettings(quorums=quorums, digest_type=digest_type, storage_hints=hints)
        spec = spec_of(ListKind.LOG, password, secret, insecure, asked)
        if mode not in ("r", "w"):
            raise UsageError(f"mode is {mode!r:.20}; it takes 'r' or 'w'")
        with ExitStack() as undo:
            manager = manager_at(where, undo, read_only=mode == "r", config=config)
            names = cls(manager, spec, mode, owns=manager is not where)
            undo.pop_all()
        return names

    open_async = classmethod(opening_form(open))

    def close(self) -> None:
        """Close the logs that this namespace has opened, and its manager if ``open`` opened one.

        A second call does nothing, or completes one that was interrupted.

        Raises:
            IllegalOperationError: Called by a signal handler or a finaliser that interrupted a call of pybk; nothing
                was done.
        """
        where_called("Namespace.close()", of_log=True)
        self._closed = True
        with ExitStack() as ending:
            if self._owns_manager:
                ending.callback(self._manager.close)
            for log in list(self._logs):
                ending.callback(log.close)

    def __repr__(self) -> str:
        """Say where the logs are."""
        return f"<Namespace of {self._manager.location}{', closed' if self._closed else ''}>"

    def _check_open(self) -> None:
        if self._closed:
            raise ClosedError(f"the namespace of {self._manager.location} is closed here; open it again")

    def _check_writable(self) -> None:
        self._check_open()
        if self._mode == "r":
            raise IllegalOperationError(
                f'the namespace of {self._manager.location} is open for reading; open it with mode="w" to change it'
            )

    def _steps(self, name: str) -> LedgerSteps:
        return LedgerSteps(self._manager, checked_name(name), self._spec)

    # ---- logs ----------------------------------------------------------------------------------------------------

    def create(self, name: str) -> Log:
        """Create a log, and open it.

        A log has no password of its own before its first writer, because it has no ledger yet: that of the first writer
        counts, and others get UnauthorizedError from then on.

        Args:
            name: Its name; see ``docs/concepts/streams.md`` for the rules of names.

        Raises:
            LogExistsError: A log of that name exists.
            CorruptError: Ledgers have records of such a log, but its record was lost; see ``Log.rebuild``.
            IllegalOperationError: The namespace is open for reading.
            UsageError: The name is not valid.

        Durability: The log is durable on return.
        Cost: One synced write, shared by threads that create logs meanwhile, however many logs there are.
        """
        self._check_writable()
        uid = secrets.token_bytes(UID_BYTES)
        steps = self._steps(name)
        check_not_lost(steps)
        if steps.perform(ledger_list.create(name, ListKind.LOG, uid, FIRST_SEQ)).uid != uid:
            raise LogExistsError(f"log {name!r} exists in {self._manager.location}; open it, or choose another name")
        return self.log(name, create=False)

    create_async = opening_form(create)

    def log(self, name: str, *, create: bool = True) -> Log:
        """Open a log.

        Args:
            name: Its name.
            create: Whether to create it if it does not exist and the namespace is open for writing.

        Raises:
            NoSuchLogError: It does not exist, and was not created.
            UnauthorizedError: The password is not the log's.
        """
        self._check_open()
        begin = partial(Log._find, create=flag_of(create, "create") and self._mode == "w")
        log = Log._opened(self._manager, name, self._spec, self._mode, begin, create=create, config=None)
        self._logs.add(log)
        return log

    log_async = opening_form(log)

    def exists(self, name: str) -> bool:
        """Return whether there is a log of a name."""
        self._check_open()
        return self._steps(name).read() is not None

    exists_async = asyncio_form(exists)

    def names(self, prefix: str = "") -> list[str]:
        """Return the names of the logs that begin with ``prefix``, ascending.

        Raises:
            UsageError: ``prefix`` is not a string.

        Cost: In a store one pass over the logs' records; in a cluster one round trip.
        """
        self._check_open()
        return names_of(self._manager, ListKind.LOG, prefix)

    names_async = asyncio_form(names)

    def delete(self, name: str, *, steal: bool = False) -> None:
        """Delete a log for good, with its records and subscriptions.

        Args:
            name: Its name.
            steal: Whether to delete it even if it has a live writer, or one of its durable subscriptions has a live
                owner. These are fenced, and their records are deleted.

        Raises:
            NoSuchLogError: It does not exist.
            LogLockedError: It has a live writer, or one of its durable subscriptions has a live owner, and ``steal`` is
                False; nothing was deleted.
            IllegalOperationError: The namespace is open for reading.
            UnauthorizedError: The password is not the log's; nothing was deleted.
            PybkError: A part of the log could not be deleted; call this again.
        """
        self._check_writable()
        delete_log(self._manager, checked_name(name), self._spec, steal=flag_of(steal, "steal"))

    delete_async = asyncio_form(delete)

    def rename(self, name: str, target: str) -> None:
        """Give a log without a live writer another name, as one change: it always has exactly one of the names.

        Readers and subscriptions that are open under the old name raise NoSuchLogError from then on; a dead writer is
        fenced.

        Args:
            name: Its name.
            target: Its new name.

        Raises:
            NoSuchLogError: It does not exist.
            LogExistsError: A log of the new name exists, or the log has that name already.
            LogLockedError: It has a live writer.
            IllegalOperationError: It has durable subscriptions, whose cursors are kept under its name.
            UnauthorizedError: The password is not the log's; nothing was changed.

        Durability: On return it has the new name for good.
        Cost: One synced write; in ZooKeeper two round trips.
        """
        self._check_writable()
        target = checked_name(target)
        self._steps(name).check_password()
        if target == name:
            raise LogExistsError(f"log {name!r} has that name already; choose another one")
        ListWriter(self._manager, name, self._spec, RollPolicy()).rename(target)

    rename_async = asyncio_form(rename)

    def watch(self, callback: Callable[[list[str], list[str]], None]) -> Watch:
        """Call ``callback(added, removed)`` with the names of logs that were created and deleted, until cancelled.

        A rename removes one name and adds another. Changes that cancel out between two looks are not reported. The
        callback is called from a background thread, one call at a time.

        Args:
            callback: Takes two lists of names, at least one of them not empty.

        Returns:
            The watch, whose ``cancel()`` ends the calls.

        Raises:
            UsageError: ``callback`` cannot be called.

        Cost: In a store, even a read-only one, one look-up for each change of a log's record. In a cluster each change
            lists the names of all logs, once for all changes that were made meanwhile.
        """
        self._check_open()
        if not callable(callback):
            raise UsageError(f"callback is {callback!r:.50}; it takes a function of two lists of names")
        return NameWatch(backend_of(self._manager), ListKind.LOG, callback)

    watch_async = asyncio_form(watch)

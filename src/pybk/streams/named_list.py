"""The verbs that logs of both sorts have: of a log as a whole in ``NamedList``, of its writer in ``RecordWriter``.

Logs are in a store that is opened for them, or with a manager that others use as well (``manager_at``). ``Log`` and
``WriteAheadLog`` add what depends on the form of their records, and on who owns the writer.
"""

from __future__ import annotations

import logging
import os
import secrets
from abc import abstractmethod
from collections.abc import Callable, Iterable
from contextlib import ExitStack, suppress
from typing import TYPE_CHECKING, ClassVar, Final, Generic, Self, TypeVar
from weakref import ref

from pybk import streams
from pybk.config import StoreConfig
from pybk.credentials import Secret
from pybk.errors import (
    ClosedError,
    NoSuchLogError,
    StorageRefusedError,
    UnauthorizedError,
    UsageError,
)
from pybk.manager.arguments import store_path_of
from pybk.manager.handle import Handle, where_called
from pybk.manager.ledger_manager import LedgerManager, backend_of
from pybk.streams import ledger_list
from pybk.streams.ledger_list import Owned
from pybk.streams.ledger_steps import UNREADABLE, LedgerSteps, names_of
from pybk.streams.list_record import UID_BYTES, ListKind, ListRecord, checked_name, cursor_list_name
from pybk.streams.list_writer import OPEN_REMEDY, ListWriter
from pybk.streams.log_settings import LedgerSpec, LogSettings, RollPolicy, spec_of
from pybk.threads.call_threads import asyncio_form
from pybk.values import flag_of

if TYPE_CHECKING:
    from pybk.manager.opening import Closing
    from pybk.streams.appender import Batch, RecordFuture

logger = logging.getLogger(__name__)

R = TypeVar("R")
P = TypeVar("P")

_DELETE_REMEDY: Final = (
    "close it there, or delete the log with steal=True (in a shell: --steal), which fences it and loses what it wrote"
)


class NamedList(Handle):
    """A log of either sort: a ledger list that has a name, in a store or a cluster."""

    __slots__ = ("_closed", "_manager", "_opened_here", "_owns_manager", "_spec", "_steps", "name")

    _kinds: ClassVar[tuple[ListKind, ...]]
    """Its own kind of ledger list, and those of what belongs to it."""

    _first_seq: ClassVar[int]
    """The number of the first record of a log."""

    def __init_subclass__(cls, *, kinds: tuple[ListKind, ...] = (), first_seq: int = 0, **options: object) -> None:
        super().__init_subclass__(**options)
        cls._kinds, cls._first_seq = (kinds, first_seq) if kinds else (cls._kinds, cls._first_seq)

    def __init__(self, manager: LedgerManager, name: str, spec: LedgerSpec, *, owns: bool) -> None:
        """Use ``open`` instead."""
        self.name: Final = name
        self._manager = manager
        self._owns_manager = owns
        self._spec = spec
        self._steps = LedgerSteps(manager, name, spec)
        self._closed = False
        self._opened_here: list[ref[Closing]] = []
        """The handles that are closed with it; not in a WeakSet, which takes 800 bytes if it is empty."""

    # ---- opening and closing -------------------------------------------------------------------------------------

    @classmethod
    def _opened(
        cls,
        where: str | os.PathLike[str] | LedgerManager,
        name: str,
        spec: LedgerSpec,
        mode: str,
        begin: Callable[[Self], None],
        *,
        create: bool,
        config: StoreConfig | None,
    ) -> Self:
        """Return a log once ``begin`` was called with it; if that raises, what was opened is closed."""
        if mode not in ("r", "w"):
            raise UsageError(f"mode is {mode!r:.20}; it takes 'r' or 'w'")
        name = checked_name(name)
        with ExitStack() as undo:
            manager = manager_at(where, undo, read_only=mode == "r", create=create, config=config)
            log = cls(manager, name, spec, owns=manager is not where)
            begin(log)
            undo.pop_all()
        return log

    def _find(self, *, create: bool) -> None:
        """Find the log that has the name, and check the password.

        Args:
            create: Make it if there is none.

        Raises:
            NoSuchLogError: There is none.
            CorruptError: It has ledgers, but its record was lost.
            UnauthorizedError: The password is not the log's.
        """
        if create:
            backend = backend_of(self._manager)
            is_new = backend.single_writer and self._steps.read() is None
            if is_new and next(backend.ledgers(), None) is not None:
                streams.sweep.check_not_lost(self._steps)
            uid, kept = secrets.token_bytes(UID_BYTES), self._spec.asked.as_properties()
            self._steps.perform(ledger_list.create(self.name, self._kinds[0], uid, self._first_seq, kept))
        self._steps.pin()
        self._steps.check_password()

    def _taken_over(
        self, rolls: LogSettings, *, wait_s: float, steal: bool, remedy: str = OPEN_REMEDY
    ) -> tuple[ListWriter, Owned]:
        """Become the log's writer; settings of segments that ``rolls`` lacks are those that the log keeps."""
        policy = RollPolicy.of(rolls.over(self._steps.settings()))
        writer = ListWriter(self._manager, self.name, self._spec, policy)
        writer.steps.uid = self._steps.uid
        return writer, writer.take_over(wait_s=wait_s, steal=steal, remedy=remedy)

    def close(self) -> None:
        """Wait for outstanding appends, and release the log with its readers, writers and subscriptions.

        A manager that ``open`` opened is closed as well. A second call does nothing, or completes one that was
        interrupted. A write-ahead log that is dropped without a close is closed in the background, with a
        ResourceWarning.

        Raises:
            LogFencedError: Another writer has the log, or another owner a subscription.
            IllegalOperationError: Called by a signal handler or a finaliser that interrupted a call of pybk; nothing
                was done.
            PybkError: Closing failed; the next writer recovers the log.
        """
        where_called(f"{type(self).__name__}.close()", of_log=True)
        self._closed = True
        self._end()

    @abstractmethod
    def _end(self) -> None:
        """Close what was opened here, readers first."""

    def _keep(self, opened: Closing) -> None:
        """Have something closed with the log."""
        self._opened_here.append(ref(opened, self._opened_here.remove))

    def _alive(self) -> list[Closing]:
        """Return what was opened here and is alive."""
        return [opened for each in list(self._opened_here) if (opened := each()) is not None]

    def _check_open(self) -> None:
        if self._closed:
            raise ClosedError(f"log {self.name!r} is closed here; open it again")

    def __bool__(self) -> bool:
        """Return True, also for a log without records."""
        return True

    # ---- settings ------------------------------------------------------------------------------------------------

    def _record(self) -> ListRecord:
        return self._steps.existing().record

    def settings(self) -> LogSettings:
        """Return the settings of its ledgers, which apply unless the arguments of an opening replace them."""
        return LogSettings.kept_in(self._record().properties, self.name)

    settings_async = asyncio_form(settings)

    def set_settings(self, settings: LogSettings) -> None:
        """Replace the settings of its ledgers, for the next ledgers of its writer and for all later openings.

        Args:
            settings: All settings, such as ``replace(log.settings(), quorums=(1, 1, 1))``. Those of segments apply from
                the next writer on.

        Durability: They are stored with the log, durably on return.
        """
        self._check_open()
        self._steps.keep_settings(settings)

    set_settings_async = asyncio_form(set_settings)

    # ---- by name -------------------------------------------------------------------------------------------------

    @classmethod
    def names(cls, manager: LedgerManager, prefix: str = "") -> list[str]:
        """Return the names of the logs of this sort of a store or cluster, ascending.

        Args:
            manager: Its manager.
            prefix: Return only names that begin with it.

        Raises:
            MetadataUnreachableError: The cluster's metadata store does not answer.

        Cost: In a store one pass over the logs' records; in a cluster a round trip for 500 logs.
        """
        return names_of(manager, cls._kinds[0], prefix)

    names_async = classmethod(asyncio_form(names))

    @classmethod
    def delete(
        cls,
        manager: LedgerManager,
        name: str,
        *,
        password: bytes | Secret | None = None,
        secret: bytes | Secret | None = None,
        insecure: bool = False,
        steal: bool = False,
    ) -> None:
        """Delete a log for good: its records, its checkpoints, and its subscriptions.

        Readers, writers and subscriptions that have it open raise NoSuchLogError from then on.

        Args:
            manager: The manager that has the log.
            name: The name of the log.
            password: As for ``open``.
            secret: As for ``open``.
            insecure: As for ``open``.
            steal: Whether to delete it even if it has a live writer, or one of its durable subscriptions has a live
                owner. These are fenced, and their records are deleted.

        Raises:
            NoSuchLogError: It does not exist.
            LogLockedError: It has a live writer, or one of its durable subscriptions has a live owner, and ``steal`` is
                False; nothing was deleted. One that died releases the log by itself: at once in a store, after the
                lease time in a cluster.
            UnauthorizedError: The password is not the log's; nothing was deleted.
            PybkError: A part of the log could not be deleted; call this again.

        Durability: On return the log is deleted for good. The next deletion completes one that was interrupted; until
            then the log's name is taken, and opening it raises NoSuchLogError.
        Cost: Synced writes for each of its ledgers. That of a log which adopted ledgers reads the metadata of all
            ledgers, because those of failed attempts are deleted as well.
        """
        delete_log(
            manager,
            checked_name(name),
            spec_of(cls._kinds[0], password, secret, insecure),
            steal=flag_of(steal, "steal"),
        )

    delete_async = classmethod(asyncio_form(delete))

    @classmethod
    def sweep(
        cls,
        manager: LedgerManager,
        prefix: str = "",
        *,
        password: bytes | Secret | None = None,
        secret: bytes | Secret | None = None,
        insecure: bool = False,
    ) -> list[int]:
        """Delete ledgers that processes created for such logs before they died, and that no log will ever name.

        Logs may be in use meanwhile. Ledgers of logs that do not exist are kept; see ``rebuild``. Ledgers of a log's
        subscriptions are swept with the log, and so are the remains of subscriptions whose deletion was interrupted.

        Args:
            manager: The manager that has the logs.
            prefix: Only ledgers of logs whose names begin with it.
            password: As for ``open``; ledgers that have another password are left, with a warning in the log of
                ``logging``.
            secret: As for ``open``; likewise.
            insecure: As for ``open``.

        Returns:
            The ledgers that were deleted.

        Cost: Reads the metadata of all ledgers, and the records of the logs.
        """
        specs = [spec_of(kind, password, secret, insecure) for kind in cls._kinds]
        deleted = [each for spec in specs for each in streams.sweep.sweep(manager, spec, prefix)]
        if ListKind.CURSOR in cls._kinds:
            names = names_of(manager, ListKind.CURSOR, prefix)
            deleted += _sweep_cursors(manager, names, spec_of(ListKind.LOG, password, secret, insecure))
        return deleted

    sweep_async = classmethod(asyncio_form(sweep))


class RecordWriter(Handle, Generic[R, P]):
    """The verbs of a log's writer that are alike for logs of both sorts.

    ``R`` is what may be appended; ``P`` has the places of some new records.
    """

    __slots__ = ()

    @abstractmethod
    def _writing(self) -> ListWriter:
        """Return the writer of the list; raises if the log is closed here, or open for reading."""

    @abstractmethod
    def _batch(self, records: Iterable[R]) -> Batch[P]:
        """Return records as what is appended; raises UsageError if they are not valid, or none."""

    def append_many(self, records: Iterable[R]) -> P:
        """Append records as one transaction, and wait until they are durable; after a crash the log has all or none.

        Args:
            records: Any number, at least one, each as for ``append``.

        Returns:
            Their places: a range of LSNs in a write-ahead log, a list of positions in another.

        Raises:
            PybkError: As ``append``. With ``outcome_unknown`` the log has all or none.

        Cost: One sync for up to 4 MiB. Records share entries of 64 KiB, so batches are read several times faster than
            single records.
        """
        writer = self._writing()
        return writer.result_of(writer.append_batch(self._batch(records), kick=False))

    def append_many_async(self, records: Iterable[R]) -> RecordFuture[P]:
        """Append records as ``append_many`` does, without waiting for them to be durable.

        It waits if ``max_outstanding_bytes`` are not durable yet; coroutines use ``append_many_coro``.
        """
        return self._writing().append_batch(self._batch(records), kick=True)

    async def append_many_coro(self, records: Iterable[R]) -> P:
        """Append records as ``append_many`` does, without blocking the event loop; otherwise as ``append_coro``."""
        return await self._writing().append_coro(self._batch(records))

    def sync(self) -> int:
        """Wait until all records that were appended so far are durable; return the number of the last of them."""
        writer = self._writing()
        last = writer.appender.next_seq - 1
        writer.flush()
        return last

    sync_async = asyncio_form(sync, own_thread=True)

    def roll(self) -> None:
        """Continue in a new ledger now; appends wait only for the moment of the switch.

        Raises:
            LogFencedError: Another writer has the log.
            IllegalOperationError: As for ``close``.
        """
        where_called(f"{type(self).__name__}.roll()", of_log=True)
        self._writing().roll()

    roll_async = asyncio_form(roll, own_thread=True)


def delete_log(manager: LedgerManager, name: str, spec: LedgerSpec, *, steal: bool) -> None:
    """Delete a log with its subscriptions, or the parts that an interrupted deletion has left.

    Arguments and errors are those of ``NamedList.delete``.
    """
    owner = ListWriter(manager, name, spec, RollPolicy())
    steps = owner.steps
    steps.check_password(of_dropped=True)
    cursors: dict[str, ListWriter] = {}
    with ExitStack() as locks:
        locks.enter_context(owner.kept_away(steal=steal, remedy=_DELETE_REMEDY))
        steps.uid = steps.existing(of_dropped=True).record.uid
        while True:  # until no subscription was added meanwhile
            # Another process may have given the log its first ledger before the lock was taken.
            steps.check_password(of_dropped=True)
            bounds = steps.perform(ledger_list.begin_drop(name, cursors))
            new = [each.name for each in bounds if each.name not in cursors]
            if not new:
                break
            for each in new:
                cursors[each] = cursor = ListWriter(
                    manager, cursor_list_name(name, each), spec.of_cursors(), RollPolicy()
                )
                locks.enter_context(cursor.kept_away(steal=steal, remedy=_DELETE_REMEDY))
                with suppress(NoSuchLogError):
                    cursor.steps.check_password(of_dropped=True)
        for cursor in cursors.values():
            with suppress(NoSuchLogError):
                cursor.steps.delete_list()
        names = names_of(manager, ListKind.CURSOR, cursor_list_name(name, "")) if spec.kind is ListKind.LOG else []
        _sweep_cursors(manager, [each for each in names if each.rpartition("@")[0] == name], spec)
        streams.sweep.sweep_dropped(steps)
        steps.delete_list()


def _sweep_cursors(manager: LedgerManager, names: Iterable[str], spec: LedgerSpec) -> list[int]:
    """Delete ledger lists of cursors that the record of their log does not name, and never will (rule T9).

    Args:
        manager: The manager that has the logs.
        names: The lists. Those of logs that have no record are left, because a lost record can be made again.
        spec: That of the logs; lists that have another password are left with a warning in the log of ``logging``.

    Returns:
        The ledgers that were deleted.
    """
    deleted: list[int] = []
    for name in names:
        log, _, subscription = name.rpartition("@")
        steps = LedgerSteps(manager, name, spec.of_cursors())
        try:
            found = steps.read()  # before the record of the log, which names a subscription before its list exists
            log_steps = LedgerSteps(manager, log, spec)
            of_log = log_steps.read()
            if found is None or of_log is None:
                continue
            steps.uid = found.record.uid
            bound = log_steps.bound_in(of_log.record, subscription)
            if bound is None or bound.uid != steps.uid.hex():
                steps.delete_list()
                deleted += [*found.record.ledgers, *found.record.pending_deletes]
        except NoSuchLogError:
            continue  # another process has deleted it
        except (*UNREADABLE, StorageRefusedError, UnauthorizedError) as error:
            logger.warning("%s", error)
    return deleted


def manager_at(
    where: str | os.PathLike[str] | LedgerManager,
    undo: ExitStack,
    *,
    read_only: bool,
    create: bool = True,
    config: StoreConfig | None = None,
) -> LedgerManager:
    """Return a manager as it is, or open the store in a directory.

    Args:
        where: The manager, or the directory.
        undo: Gets the close of a manager that this opens.
        read_only: Whether to open the directory for reading.
        create: Whether to create a store that does not exist.
        config: Settings of the store.

    Raises:
        NoSuchLogError: The store does not exist, and ``create`` is False.
        UsageError: ``where`` is the URL of a cluster, or not a valid directory.
        PybkError: As ``LedgerManager.open``.
    """
    if isinstance(where, LedgerManager):
        return where
    store_path_of(where)
    if not create and not read_only and not _has_files(where):
        raise NoSuchLogError(f"there is no store at {where}: check the path, or open with create=True")
    return undo.enter_context(LedgerManager.open(where, read_only=read_only, config=config))


def _has_files(path: str | os.PathLike[str]) -> bool:
    try:
        return bool(os.listdir(path))
    except FileNotFoundError:
        return False
    except OSError:  # opening it says what is wrong
        return True

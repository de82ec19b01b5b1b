"""``NamedList``: what can be done with a ledger list by its name alone, whether or not it is open."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from contextlib import ExitStack, suppress
from dataclasses import replace
from functools import partial
from typing import ClassVar, Final

from pybk.credentials import Secret
from pybk.errors import CorruptError, NoSuchLogError, StorageRefusedError, UnauthorizedError
from pybk.manager.arguments import flag_of
from pybk.manager.handle import Handle
from pybk.manager.ledger_manager import LedgerManager
from pybk.streams import ledger_list
from pybk.streams.ledger_spec import LedgerSpec, spec_of
from pybk.streams.ledger_steps import LedgerSteps, names_of
from pybk.streams.list_record import ListKind
from pybk.streams.list_writer import ListWriter, RollPolicy
from pybk.streams.names import checked_name, cursor_list_name
from pybk.streams.sweep import sweep
from pybk.threads.call_threads import in_thread

logger = logging.getLogger(__name__)

_DELETE_REMEDY: Final = (
    "close it there, or delete the log with steal=True (in a shell: --steal), which fences it and loses what it wrote"
)


class NamedList(Handle):
    """A log of either sort, which can be deleted by its name, and whose leftovers can be swept."""

    __slots__ = ()

    _kinds: ClassVar[tuple[ListKind, ...]]
    """Its own kind of ledger list, and those of what belongs to it."""

    def __init_subclass__(cls, *, kinds: tuple[ListKind, ...] = (), **options: object) -> None:
        super().__init_subclass__(**options)
        cls._kinds = kinds or cls._kinds

    @classmethod
    def delete(
        cls,
        manager: LedgerManager,
        name: str,
        *,
        password: bytes | Secret | None = None,
        insecure: bool = False,
        steal: bool = False,
    ) -> None:
        """Delete a log for good: its records, its checkpoints, and its subscriptions.

        What has it open raises NoSuchLogError from then on.

        Args:
            manager: Has the log.
            name: The log's.
            password: As for ``open``.
            insecure: As for ``open``.
            steal: Delete it also while it has a live writer, or a durable subscription a live owner: they are fenced,
                and what they have written is gone.

        Raises:
            NoSuchLogError: It does not exist.
            LogLockedError: It has a live writer, or one of its durable subscriptions has a live owner, and ``steal`` is
                False; nothing was deleted. One that died lets go by itself: at once in a store, after the lease time in
                a cluster.
            UnauthorizedError: The password is not the log's; nothing was deleted.
            PybkError: Something could not be deleted; call it again.

        Durability: On return it is gone for good. A deletion that was interrupted is completed by the next one; until
            then the log's name is taken, and opening it raises NoSuchLogError.
        """
        delete_log(
            manager, checked_name(name), spec_of(cls._kinds[0], password, insecure), steal=flag_of(steal, "steal")
        )

    @classmethod
    async def delete_async(
        cls,
        manager: LedgerManager,
        name: str,
        *,
        password: bytes | Secret | None = None,
        insecure: bool = False,
        steal: bool = False,
    ) -> None:
        """Delete a log in a thread, so that the event loop keeps running."""
        await in_thread(partial(cls.delete, manager, name, password=password, insecure=insecure, steal=steal))

    @classmethod
    def sweep(
        cls,
        manager: LedgerManager,
        prefix: str = "",
        *,
        password: bytes | Secret | None = None,
        insecure: bool = False,
    ) -> list[int]:
        """Delete ledgers that processes which died had created for such logs, and that no log will ever name.

        Logs may be in use meanwhile. Ledgers of logs that do not exist are kept; see ``rebuild``. Those of a log's
        subscriptions are swept with it, and what is left of subscriptions whose deletion was interrupted.

        Args:
            manager: Has the logs.
            prefix: Only ledgers of logs whose names begin with it.
            password: As for ``open``; ledgers that have another password are left, with a warning in the log of
                ``logging``.
            insecure: As for ``open``.

        Returns:
            The ledgers that were deleted.

        Cost: Reads the metadata of all ledgers, and the records of the logs.
        """
        deleted = [each for kind in cls._kinds for each in sweep(manager, spec_of(kind, password, insecure), prefix)]
        if ListKind.CURSOR in cls._kinds:
            names = names_of(manager, ListKind.CURSOR, prefix)
            deleted += _sweep_cursors(manager, names, spec_of(ListKind.LOG, password, insecure))
        return deleted

    @classmethod
    async def sweep_async(
        cls,
        manager: LedgerManager,
        prefix: str = "",
        *,
        password: bytes | Secret | None = None,
        insecure: bool = False,
    ) -> list[int]:
        """Sweep in a thread, so that the event loop keeps running."""
        return await in_thread(partial(cls.sweep, manager, prefix, password=password, insecure=insecure))


def delete_log(manager: LedgerManager, name: str, spec: LedgerSpec, *, steal: bool) -> None:
    """Delete a log with its subscriptions, or what a deletion that was interrupted has left of it.

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
                cursors[each] = _cursor_of(manager, name, each, spec)
                locks.enter_context(cursors[each].kept_away(steal=steal, remedy=_DELETE_REMEDY))
                with suppress(NoSuchLogError):
                    cursors[each].steps.check_password(of_dropped=True)
        for cursor in cursors.values():
            with suppress(NoSuchLogError):
                cursor.steps.delete_list()
        names = names_of(manager, ListKind.CURSOR, cursor_list_name(name, "")) if spec.kind is ListKind.LOG else []
        _sweep_cursors(manager, [each for each in names if each.rpartition("@")[0] == name], spec)
        steps.delete_list()


def _sweep_cursors(manager: LedgerManager, names: Iterable[str], spec: LedgerSpec) -> list[int]:
    """Delete ledger lists of cursors that the record of their log does not name, and never will (rule T9).

    Args:
        manager: Has the logs.
        names: The lists. Those of logs that have no record are left, because a lost record can be made again.
        spec: That of the logs; lists that have another password are left with a warning in the log of ``logging``.

    Returns:
        The ledgers that were deleted.
    """
    deleted: list[int] = []
    for name in names:
        log, _, subscription = name.rpartition("@")
        steps = LedgerSteps(manager, name, _cursor_spec(spec))
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
        except (CorruptError, StorageRefusedError, UnauthorizedError) as error:
            logger.warning("%s", error)
    return deleted


def _cursor_spec(spec: LedgerSpec) -> LedgerSpec:
    return replace(spec, kind=ListKind.CURSOR, ledger_type=ListKind.CURSOR.value)


def _cursor_of(manager: LedgerManager, log: str, subscription: str, spec: LedgerSpec) -> ListWriter:
    """Return what owns the ledger list of a subscription's cursor once it has the lock."""
    return ListWriter(manager, cursor_list_name(log, subscription), _cursor_spec(spec), RollPolicy())

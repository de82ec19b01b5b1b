"""``NamedList``: what can be done with a ledger list by its name alone, whether or not it is open."""

from __future__ import annotations

import asyncio
from functools import partial
from typing import ClassVar

from pybk.credentials import Secret
from pybk.handle import Handle
from pybk.manager import LedgerManager
from pybk.streams.cursor import delete_cursor
from pybk.streams.ledger_spec import spec_of
from pybk.streams.ledger_steps import LedgerSteps
from pybk.streams.list_record import ListKind
from pybk.streams.names import checked_name
from pybk.streams.sweep import sweep


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
        cls, manager: LedgerManager, name: str, *, password: bytes | Secret | None = None, insecure: bool = False
    ) -> None:
        """Delete a log for good: its writer is fenced, its record emptied, its ledgers deleted, its record removed.

        Args:
            manager: Has the log.
            name: The log's.
            password: As for ``open``.
            insecure: As for ``open``.

        Raises:
            NoSuchLogError: It does not exist.
            UnauthorizedError: The password is not the log's; nothing was deleted.
            PybkError: Something could not be deleted; call it again.
        """
        steps = LedgerSteps(manager, checked_name(name), spec_of(cls._kinds[0], password, insecure))
        steps.check_password()
        for cursor in steps.existing().record.cursors:
            delete_cursor(manager, steps, cursor.name, steal=True)
        steps.delete_list()

    @classmethod
    async def delete_async(
        cls, manager: LedgerManager, name: str, *, password: bytes | Secret | None = None, insecure: bool = False
    ) -> None:
        """Delete a log in a thread, so that the event loop keeps running."""
        await asyncio.to_thread(cls.delete, manager, name, password=password, insecure=insecure)

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
        subscriptions are swept with it.

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
        return [each for kind in cls._kinds for each in sweep(manager, spec_of(kind, password, insecure), prefix)]

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
        return await asyncio.to_thread(partial(cls.sweep, manager, prefix, password=password, insecure=insecure))

"""``AtomicGroup``: one atomic change of several things in a store, made durable by one sync.

A *member* of a group is a log, a subscription, a blob that is published, or the properties of a log. A commit holds the
locks of all members. It takes them in the order of their keys, so two groups never wait for each other. While it holds
the locks, each member names the entries that it appends, or the named record that it changes. The store stages all of
them as one group (``pybk.storage.transaction_group``), the members note that, and the locks are released. Only then
does the commit wait for durability, so groups and appends of other threads share syncs.

If a member cannot take part now, because its log has to be repaired first, or because another writer changed its
record, nothing is staged, and the commit begins again.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, ClassVar, Final, NamedTuple, Protocol, TypeVar, runtime_checkable

from pybk.backend import AtomicGroups, LedgerBackend
from pybk.errors import ClosedError, IllegalOperationError, PybkError, UsageError, VersionConflictError
from pybk.manager.handle import WithBlock
from pybk.spans import operation
from pybk.storage.descriptor import DisplacedError
from pybk.storage.named_records import NamedChange
from pybk.threads.call_threads import asyncio_form

if TYPE_CHECKING:
    from pybk.storage.transaction_group import LedgerEntries

R = TypeVar("R")


class GroupPart(NamedTuple):
    """The part that one member adds to a group.

    Attributes:
        entries: The entries that it appends to a ledger; None for none.
        change: The named record that it changes; None for none.
    """

    entries: LedgerEntries | None = None
    change: NamedChange | None = None


class GroupMember(ABC):
    """A log, a subscription, a blob or the properties of a log, as one group changes it.

    Attributes:
        call: The name of the method of ``AtomicGroup`` that adds changes of it.
        alone: The call that makes the change without a group; the error of a group over ensembles names it.
        key: Its name among all members; members are locked in the order of their keys.
        backend: The store that it is in.
        results: The result of each change that was added, once the group is durable.
    """

    call: ClassVar[str]
    alone: ClassVar[str] = ""
    results: Sequence[Any] = ()

    def __init__(self, key: str, backend: LedgerBackend) -> None:
        self.key: Final = key
        self.backend: Final = backend

    @abstractmethod
    def add(self, *arguments: Any, **options: Any) -> None:
        """Add a change that the group makes to the target; raises UsageError for one that it cannot make."""

    @abstractmethod
    def hold(self, stage: Callable[[GroupPart], R | None]) -> R | None:
        """Call ``stage`` with the target's locks held, and note what was staged unless it returned None.

        Returns:
            The result of ``stage``; None, with nothing staged, if ``prepare`` has to be called first.

        Raises:
            PybkError: It takes no changes; nothing was staged.
        """

    def prepare(self) -> None:  # noqa: B027  # most have nothing to do
        """Prepare the target to take part; called without locks."""

    def commit_alone(self) -> None:
        """Make the added changes without a group; durable on return.

        Raises:
            IllegalOperationError: That needs a group.
        """
        raise IllegalOperationError(f"a group over ensembles has records of one log only; {self.alone}")

    def committed(self) -> None:  # noqa: B027
        """Note that the group is durable."""

    def abandon(self) -> None:  # noqa: B027
        """Drop the added changes, because the group was not committed; called once, and must not raise.

        An interrupted commit may have staged the group nevertheless; this call does not undo that.
        """


@runtime_checkable
class GroupTarget(Protocol):
    """A handle that can take part in a group."""

    def _group_member(self) -> GroupMember:
        """Return the member by which it takes part in one group; raises PybkError if it is closed."""


class AtomicGroup(WithBlock):
    """One atomic change of several logs, subscriptions, blobs and properties; made by ``LedgerManager.transaction``.

    Example::

        with manager.transaction() as group:
            group.append(out_log, data)
            group.ack(subscription, record)

    Leaving the ``with`` commits the group, unless the block raised: all changes become durable with one sync, or none
    does, also after a crash. No change is visible before the commit. While the process lives, another thread may see
    one log's records a moment before those of another.

    Threads: one.
    """

    def __init__(self, backend: LedgerBackend) -> None:
        """Use ``LedgerManager.transaction`` instead."""
        self._backend: Final = backend
        self._groups: Final = backend if isinstance(backend, AtomicGroups) else None
        self._members: dict[int, GroupMember] = {}
        self._targets: list[object] = []
        self._ended = False

    # ---- what it does --------------------------------------------------------------------------------------------

    def append(self, log: object, data: bytes, **options: Any) -> None:
        """Add a record to a log.

        Args:
            log: A ``WriteAheadLog`` that is open for writing, or a ``LogWriter``.
            data: As for its ``append``.
            **options: As for ``LogWriter.append``: txid, key, headers, time_ns. A ``WriteAheadLog`` takes none.

        Raises:
            UsageError: An argument is invalid, or the log is in another store.
        """
        self._add("append", log, data, **options)

    def ack(self, subscription: object, records: Any, **options: Any) -> None:
        """Acknowledge records of a subscription; arguments and errors as for ``Subscription.ack``."""
        self._add("ack", subscription, records, **options)

    def publish(self, upload: object) -> None:
        """Publish a blob that was written with ``BlobStore.create_blob``, instead of committing it.

        Cost: Closes its ledger at once, with a synced write.
        """
        self._add("publish", upload)

    def set_properties(self, log: object, changes: Any) -> None:
        """Change properties of a log; arguments and errors as for ``Log.set_properties``."""
        self._add("set_properties", log, changes)

    def results(self, target: object) -> Sequence[Any]:
        """Return the results of the changes that were added to a target, in order, once the group is committed.

        Returns:
            LSNs for a ``WriteAheadLog``, positions for a ``LogWriter``; what its own call returns for all else.
        """
        return self._members[id(target)].results if id(target) in self._members else ()

    def _add(self, call: str, target: object, *arguments: Any, **options: Any) -> None:
        if self._ended:
            raise ClosedError("the group was committed or given up; begin another")
        member = self._members.get(id(target)) or self._new_member(target)
        if member.call != call:
            raise UsageError(f"{target!r:.100} takes {member.call}() in a group, not {call}()")
        member.add(*arguments, **options)
        if id(target) not in self._members:
            self._targets.append(target)  # so that its id is not given to another object
            self._members[id(target)] = member

    def _new_member(self, target: object) -> GroupMember:
        if not isinstance(target, GroupTarget):
            raise UsageError(
                f"{target!r:.100} cannot take part in a group; what can are write-ahead logs that are open for "
                "writing, writers and properties of logs, subscriptions, and blobs that are being written"
            )
        member = target._group_member()
        if member.backend is not self._backend:
            where = self._backend.where
            raise UsageError(f"{target!r:.100} is in another store than {where}; a group is in one store")
        return member

    # ---- commit --------------------------------------------------------------------------------------------------

    def commit(self) -> None:
        """Make all changes durable, or none. Leaving the ``with`` calls it.

        Raises:
            LogFencedError, LogSealedError, ClosedError: A log takes no more records; nothing was changed.
            IllegalOperationError: In a cluster, the group has more than records of one log; nothing was changed.
            UsageError: The group is larger than 16 MiB, or has more than 256 logs; nothing was changed.
            StorageFullError: There is no space; nothing was changed.
            StorageFailedError: Either all changes are durable or none; open the store again to find out which.

        Durability: All changes are on disk on return.
        Cost: One synced write, shared with concurrent appends.
        """
        if self._ended:
            raise ClosedError("the group was committed or given up; begin another")
        with operation(self._backend.config.on_span, "pybk.transaction.commit", members=len(self._members)):
            self._commit()

    commit_async = asyncio_form(commit, own_thread=True)

    def _commit(self) -> None:
        """Commit the group as ``commit`` does."""
        sent = False
        try:
            self._ended = True
            members = sorted(self._members.values(), key=lambda member: member.key)
            if self._groups is None:
                sent = True
                self._commit_alone(members)
            else:
                wait = self._staged(members, self._groups)
                sent = True
                wait()
        except BaseException as error:
            if not (sent and isinstance(error, PybkError) and error.outcome_unknown):
                _abandon(self._members.values())
            raise
        for member in members:
            member.committed()

    def abort(self) -> None:
        """Drop the group; none of its changes is made."""
        if not self._ended:
            self._ended = True
            _abandon(self._members.values())

    def _commit_alone(self, members: Sequence[GroupMember]) -> None:
        if len(members) > 1:
            raise IllegalOperationError(
                f"a group cannot be atomic over ensembles: {', '.join(each.key for each in members)} are in "
                f"different ledgers of {self._backend.where}, whose bookies could have a part of it and not the "
                "rest; append to one log only, or use an embedded store"
            )
        for member in members:
            member.commit_alone()

    def _staged(self, members: Sequence[GroupMember], groups: AtomicGroups) -> Callable[[], int]:
        """Stage the group; returns a function that waits for it. From then on the store decides its outcome."""
        while True:
            try:
                wait = self._hold(members, [], groups)
            except (VersionConflictError, DisplacedError):
                continue  # a record was changed by another, or a log ends elsewhere
            if wait is not None:
                return wait
            for member in members:
                member.prepare()

    def _hold(
        self, members: Sequence[GroupMember], parts: list[GroupPart], groups: AtomicGroups
    ) -> Callable[[], int] | None:
        """Stage the group with the locks of the members that follow held, too; returns a function that waits for it."""
        if len(parts) < len(members):
            return members[len(parts)].hold(lambda part: self._hold(members, [*parts, part], groups))
        entries = [part.entries for part in parts if part.entries is not None]
        changes = [part.change for part in parts if part.change is not None]
        if not entries and not changes:
            return lambda: 0
        return groups.stage_group(entries, changes)

    # ---- with ----------------------------------------------------------------------------------------------------

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Commit the group, or drop it if the block raised."""
        if kind is None:
            self.commit()
        else:
            self.abort()


def _abandon(members: Iterable[GroupMember]) -> None:
    for member in members:
        member.abandon()

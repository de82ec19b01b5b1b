"""Groups: entries of several ledgers and changes of named records that are replayed all or not at all.

A group lies in one commit of the log, and so in one log file and under one sync. A commit that was torn is invisible,
so a torn group is, too. In the commit a record of kind GROUP stands before the records of the group and binds them
(``docs/reference/format.md``): they stay one wherever a log is read record by record, as when a damaged store is
salvaged. The records are ordinary ones, so reads, checkpoints, moves and checks treat grouped entries as any others.

How a group is staged:

1. The locks of its ledgers are taken in the order of their ids, so two groups never wait for each other.
2. Each ledger is checked, and its entries get their ids, lengths and digests.
3. The named records are checked, under the lock that orders their changes.
4. ``Log.stage_group`` puts all of it into the forming commit by one step.

If there is no space, all locks are released, and the group waits in the queue of the log with a ticket of all its
ledgers. If a named record has an earlier change on its way, the group waits for that commit and begins again.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Final, NamedTuple, Protocol

from pybk.errors import (
    IllegalOperationError,
    LedgerClosedError,
    NoSuchLedgerError,
    UsageError,
    not_done,
    without_frames,
)
from pybk.ledger.digest import EntryDigest
from pybk.ledger.entry import ENTRY_HEADER_BYTES
from pybk.ledger.ledger_metadata import LedgerState
from pybk.storage.descriptor import DisplacedError, LedgerDescriptor
from pybk.storage.format.index_rows import NamedRow, encode_named
from pybk.storage.format.log_file import GROUP_RECORD_BYTES, RECORD_HEADER_BYTES
from pybk.storage.log.commit import Commit, Control, GroupPart
from pybk.storage.log.log import Ticket
from pybk.storage.named_records import Earlier, NamedChange, check_change, check_level
from pybk.threads.interrupts import Holding, guarded

if TYPE_CHECKING:
    from pybk.config import StoreConfig
    from pybk.feature_level import FeatureLevel
    from pybk.storage.log.log import Log
    from pybk.storage.named_records import NamedRecords

GROUP_BYTES_MAX: Final = 16 << 20
"""The records of a group with their headers; a commit, which holds the group, is written by one call."""

GROUP_LEDGERS_MAX: Final = 256
"""Ledgers in a group, whose locks are held together."""

_TABLE_ENTRY_BYTES: Final = 4


class LedgerEntries(NamedTuple):
    """The entries that a group appends to one ledger.

    Attributes:
        descriptor: The ledger.
        digest: Makes the digests of its entries.
        payloads: The entries, at least one.
        after: The entry that they must follow; None for the last one, whichever that is.
    """

    descriptor: LedgerDescriptor
    digest: EntryDigest
    payloads: Sequence[bytes]
    after: int | None = None


class GroupAppended(NamedTuple):
    """The entries that became durable.

    Attributes:
        entry_ids: The ids that the entries got, in the order in which the ledgers were given.
        version: The new version of each named record that was changed.
    """

    entry_ids: tuple[range, ...]
    version: int


class GroupStore(Protocol):
    """The parts of a live store that a group uses."""

    config: StoreConfig
    feature_level: FeatureLevel
    log: Log
    named: NamedRecords

    def check_usable(self) -> None:
        """Raise unless the store is open."""

    def wait_for_admission(self) -> None:
        """Return when an append that was not admitted may try again."""


class GroupAppend:
    """One group on its way into the log; see ``Store.append_group``. First ``stage`` it, then ``finish`` it.

    Raises:
        UsageError, IllegalOperationError: The group cannot be appended, whatever the state of its ledgers.
    """

    def __init__(self, store: GroupStore, entries: Sequence[LedgerEntries], changes: Sequence[NamedChange]) -> None:
        store.check_usable()
        check_level(store.feature_level, "groups")
        self._store = store
        self._log = store.log
        self._entries = entries
        self._ordered = sorted(entries, key=lambda each: each.descriptor.ledger_id)
        self._changes = changes
        self._ids: dict[int, range] = {}
        self._commit: Commit | None = None
        self._sizes = [
            array("q", (ENTRY_HEADER_BYTES + each.digest.size + len(payload) for payload in each.payloads))
            for each in self._ordered
        ]
        self._entry_bytes = sum(map(sum, self._sizes))
        self._check()

    def stage(self) -> None:
        """Give the entries their ids and put the group into the forming commit, once the log admits it.

        Raises:
            DisplacedError: A ledger ends elsewhere.
            PybkError: As ``Store.append_group``; nothing was staged.
        """
        guarded(self._stage_guarded)

    def _stage_guarded(self) -> None:
        commit = self._stage_at_once(None)
        self._commit = self._stage_in_turn() if commit is None else commit

    def finish(self) -> GroupAppended:
        """Return when the staged group is durable."""
        commit = self._commit
        assert commit is not None, "it is staged first"
        self._log.wait(commit)
        self._store.named.complete(self._changes, commit)
        if commit.error is not None:
            raise without_frames(commit.error)
        return GroupAppended(tuple(self._ids[each.descriptor.ledger_id] for each in self._entries), commit.lsn)

    # ---- what can be grouped -------------------------------------------------------------------------------------

    def _check(self) -> None:
        if not self._entries and not self._changes:
            raise UsageError("the group is empty; give it entries or changes of named records")
        if len(self._entries) > GROUP_LEDGERS_MAX:
            raise UsageError(
                f"the group has entries of {len(self._entries)} ledgers; it takes at most {GROUP_LEDGERS_MAX}"
            )
        _check_once((each.descriptor.ledger_id for each in self._entries), "ledger")
        _check_once((change.name for change in self._changes), "named record")
        for change in self._changes:
            check_change(change)
        for each in self._entries:
            self._check_entries(each)
        nbytes = self._record_bytes()
        if nbytes > GROUP_BYTES_MAX:
            raise UsageError(
                f"the records of the group have {nbytes} bytes; a group takes at most {GROUP_BYTES_MAX}: append large "
                "entries first, and group what refers to them"
            )

    def _check_entries(self, each: LedgerEntries) -> None:
        metadata = each.descriptor.metadata
        if metadata.advanced or each.descriptor.deferred:
            what = "advanced" if metadata.advanced else "DEFERRED_FORCE"
            raise IllegalOperationError(
                f"ledger {metadata.ledger_id} is {what}; a group takes ledgers that give entry ids themselves and "
                "confirm entries once they are durable"
            )
        if not each.payloads:
            raise UsageError(f"the group has no entries of ledger {metadata.ledger_id}; leave the ledger out")
        largest, limit = max(map(len, each.payloads)), self._store.config.max_entry_bytes
        if largest > limit:
            raise UsageError(
                f"a payload of ledger {metadata.ledger_id} has {largest} bytes; max_entry_bytes is {limit}: split it, "
                "or open the store with StoreConfig(max_entry_bytes=...)"
            )

    def _record_bytes(self) -> int:
        """Return the bytes of the group's records in the log."""
        tables = sum(_TABLE_ENTRY_BYTES * len(sizes) for sizes in self._sizes if len(sizes) > 1)
        named = sum(len(encode_named(NamedRow(change.name, 0, change.value))) for change in self._changes)
        headers = RECORD_HEADER_BYTES * (len(self._entries) + len(self._changes))
        return GROUP_RECORD_BYTES + headers + tables + named + self._entry_bytes

    # ---- staging -------------------------------------------------------------------------------------------------

    def _stage_in_turn(self) -> Commit:
        """Stage the group once the log admits it; all that wait for admission are admitted in the order of arrival."""
        first, *others = (each.descriptor for each in self._ordered)
        ticket = Ticket(first, self._entry_bytes, *others)
        admission = self._log.admission
        try:
            admission.join(ticket)
            ticket.wait()
            while (commit := self._stage_at_once(ticket)) is None:
                self._store.wait_for_admission()
            return commit
        finally:
            admission.leave(ticket)

    def _stage_at_once(self, ticket: Ticket | None) -> Commit | None:
        """Stage the group, and return its commit; None, with nothing done, if there is no space."""
        while isinstance(staged := self._stage_holding(0, ticket), Earlier):
            self._log.wait(staged.commit)
        return staged

    def _stage_holding(self, number: int, ticket: Ticket | None) -> Commit | Earlier | None:
        """Stage the group with the locks of its ledgers from a number on held, too."""
        if number == len(self._ordered):
            return self._stage(ticket)
        with Holding(self._ordered[number].descriptor.lock):
            return self._stage_holding(number + 1, ticket)

    def _stage(self, ticket: Ticket | None) -> Commit | Earlier | None:
        """Stage the group; the caller holds the locks of all its ledgers."""
        parts = []
        prefixes = []
        for each, sizes in zip(self._ordered, self._sizes, strict=True):
            _check_open(each.descriptor)
            _check_end(each)
            part, last_prefix = _sealed(each, sizes)
            self._ids[each.descriptor.ledger_id] = range(part.first_entry_id, part.first_entry_id + len(sizes))
            parts.append(part)
            prefixes.append(last_prefix)

        def stage(controls: list[Control], claim: Callable[[Commit], None]) -> Commit | None:
            return self._log.stage_group(parts, controls, nbytes=self._entry_bytes, ticket=ticket, claim=claim)

        staged = self._store.named.stage_group(self._changes, stage)
        if isinstance(staged, Commit):
            for part, last_prefix in zip(parts, prefixes, strict=True):
                part.descriptor.account_staged()
                part.descriptor.last_prefix = last_prefix
        return staged


def _check_once(names: Iterable[int | str], what: str) -> None:
    """Raise UsageError if a ledger or a named record comes twice."""
    seen = set()
    for name in names:
        if name in seen:
            raise UsageError(f"the group names {what} {name!r:.50} twice; put all that it does to it together")
        seen.add(name)


def _check_open(descriptor: LedgerDescriptor) -> None:
    """Raise unless a ledger takes entries; the caller holds its lock."""
    if descriptor.deleted:
        raise NoSuchLedgerError(f"ledger {descriptor.ledger_id} was deleted")
    if descriptor.error is not None:
        raise not_done(descriptor.error)
    descriptor.settle()
    if descriptor.metadata_pushed.state is LedgerState.CLOSED:
        raise LedgerClosedError(f"ledger {descriptor.ledger_id} is closed; create another ledger to append more")


def _check_end(each: LedgerEntries) -> None:
    """Raise DisplacedError unless a ledger ends with the entry that the group follows; the caller holds its lock."""
    each.descriptor.account_staged()
    if each.after is not None and each.descriptor.last_pushed != each.after:
        raise DisplacedError(f"ledger {each.descriptor.ledger_id} does not end with entry {each.after}")


def _sealed(each: LedgerEntries, sizes: array[int]) -> tuple[GroupPart, bytes]:
    """Give a ledger's entries their ids and digests; return them, and the prefix of the last one's payload.

    The caller holds the ledger's lock.
    """
    descriptor, digest, payloads, _ = each
    descriptor.account_staged()
    first, before = descriptor.last_pushed + 1, descriptor.length_pushed
    prefixes = digest.prefixes(first, descriptor.last_add_confirmed, before, payloads)
    parts: list[bytes | memoryview] = [b""] * (2 * len(payloads))
    parts[::2] = prefixes
    parts[1::2] = payloads
    overhead = ENTRY_HEADER_BYTES + digest.size
    return GroupPart(descriptor, first, sizes[:], parts, before, overhead), prefixes[-1]

"""The queue of under-replicated ledgers; BookKeeper's LedgerUnderreplicationManager.

A *mark* is a key ``underreplicated/ddd/dddd/dddd/dddd/dddd-INSTANCE``, one for each ledger and bookie. Its value has
the *causes*: each reason for the mark, with the first entry that the bookie may miss for that reason. Writers,
recoveries and scrubs *observe* that entries are missing or damaged; this is recorded nowhere else, so such a cause
stays until the entries were replicated. The auditor *derives* the other reasons from the state of the cluster, and
withdraws them when they no longer hold. A reader of a mark sees the most urgent reason and the lowest first entry.

A writer or a recovery reports entries that a bookie has *not* acknowledged (``MISSED``); the bookie has kept all that
it did acknowledge. Every other observation may be about entries that it acknowledged. So a reason that is not known is
read as ``MISSING``: one of a newer pybk, and one that an older pybk has written again without its name.

Removing a mark must not lose a cause that was added meanwhile. So each change of a mark draws a new random token, and a
second observation of the same entries is a change, too. ``unmark_under_replicated`` and ``update_mark`` take effect
only on the mark whose token their caller has read. The token also distinguishes a mark from one that was removed and
made again.

A member with an older pybk, which does not know reasons, reads ``first_entry_id`` only, and writes a mark without
``causes`` if it lowers that number. So ``first_entry_id`` in the value is the lowest of the observed causes; if no
cause was observed, it is above every entry. Thus an observation of such a member is always recorded, and the auditor
derives the causes that it drops again.

A watch reports changes of one level of keys only, so each new mark also changes the key ``underreplicated-news``, which
is watched.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import suppress
from enum import StrEnum
from typing import Any, Final, NamedTuple

from pybk.errors import (
    CorruptError,
    MetadataExistsError,
    MetadataForgedError,
    MetadataVersionError,
    UnsupportedFormatError,
    UsageError,
)
from pybk.ledger.ledger_metadata import Bookie
from pybk.metadata.authenticated_values import AuthenticatedValues, ValueKind, new_token, token_of
from pybk.metadata.ledgers import leaves_after, ledger_path
from pybk.metadata.store import Node, Watch
from pybk.values import INT64_MAX, decode_json, encode_json, from_base64, to_base64

logger = logging.getLogger(__name__)

UNDER_REPLICATED_KEY: Final = "underreplicated"
NEWS_KEY: Final = "underreplicated-news"
"""The key that is changed after each new mark, because a watch reports changes of one level of keys only."""

MARKS_PAGE: Final = 1000
"""Marks that one request reads."""

MARK_ERROR_CHARS_MAX: Final = 500
"""Characters of an error that a mark keeps; the rest is cut off."""

MARK_TRIES_MAX: Final = 1 << 31

_TARGET_CHARS_MAX: Final = 128
_LAST_DIGITS: Final = 4
"""Digits of a ledger's id in the last component of a key."""


class RepairReason(StrEnum):
    """The reason why a ledger was marked, the most urgent one first."""

    LOST = "lost"
    """The bookie has been absent for longer than the grace."""

    DAMAGED = "damaged"
    """Entries cannot be read, or have a wrong checksum."""

    MISSING = "missing"
    """The bookie does not have the entries. It may have had them, and acknowledged them."""

    MISSED = "missed"
    """The bookie has not acknowledged the entries to a writer or a recovery; it has kept what it acknowledged."""

    DRAINING = "draining"
    """The bookie is being emptied."""

    MISPLACED = "misplaced"
    """The ensemble breaks the rules of placement."""

    REBALANCE = "rebalance"
    """The bookie is fuller than others."""

    @property
    def observed(self) -> bool:
        """True if a process observed it at the bookie; it cannot be derived from the state of the cluster."""
        return self in (RepairReason.DAMAGED, RepairReason.MISSING, RepairReason.MISSED)

    @property
    def rank(self) -> int:
        """The urgency; 0 is the most urgent."""
        return _RANKS[self]


_RANKS: Final = {reason: rank for rank, reason in enumerate(RepairReason)}


class RepairState(StrEnum):
    """The state of the repair of a marked ledger."""

    QUEUED = "queued"
    """It is to be tried."""

    LOST = "lost"
    """No sound copy is left."""

    WAITING_FOR_OWNER = "waiting_for_owner"
    """It needs a recovery by a client that has the ledger's password."""

    NO_TARGET = "no_target"
    """No bookie can take the copies."""

    STUCK = "stuck"
    """It failed repeatedly."""


class UnderReplicatedLedger(NamedTuple):
    """A mark: a bookie of a ledger's ensembles misses entries of it, or is to be replaced.

    Attributes:
        ledger_id: The ledger.
        bookie: The bookie.
        first_entry_id: The first entry that it may miss: the lowest of its causes.
        reason: The most urgent reason of its causes.
        since_ns: The time of the first mark, in nanoseconds since 1970 by the clock of the marking process; 0 if
            unknown. It only shows the age, because clocks may be wrong.
        size_bytes: The bytes to copy, about; 0 if unknown.
        state: The state of its repair.
        tries: The number of failed repairs.
        error: The error of the last try; at most ``MARK_ERROR_CHARS_MAX`` characters.
        target: The name of the bookie that takes the copies of a rebalance; empty for other reasons, for which any
            bookie does.
        causes: Each reason, and the first entry that may be missing for that reason, the most urgent one first; empty
            stands for ``reason`` and ``first_entry_id``.
        token: Random; new with each change of the mark. Empty for a mark that was not read from the metadata store.
    """

    ledger_id: int
    bookie: Bookie
    first_entry_id: int
    reason: RepairReason = RepairReason.MISSING
    since_ns: int = 0
    size_bytes: int = 0
    state: RepairState = RepairState.QUEUED
    tries: int = 0
    error: str = ""
    target: str = ""
    causes: tuple[tuple[RepairReason, int], ...] = ()
    token: bytes = b""

    def with_causes(self, causes: dict[RepairReason, int]) -> UnderReplicatedLedger:
        """Return the mark with other causes, at least one, and the reason and first entry that follow from them."""
        ordered = tuple(sorted(causes.items(), key=lambda cause: cause[0].rank))
        return self._replace(reason=ordered[0][0], first_entry_id=min(causes.values()), causes=ordered)

    def causes_by_reason(self) -> dict[RepairReason, int]:
        """Return the first entry of each reason."""
        return dict(self.causes or ((self.reason, self.first_entry_id),))


class UnderReplication(AuthenticatedValues):
    """The under-replicated ledgers of a cluster. Threads: any.

    Every method may raise MetadataUnreachableError.
    """

    def mark_under_replicated(
        self,
        ledger_id: int,
        bookie: Bookie,
        first_entry_id: int,
        *,
        reason: RepairReason = RepairReason.MISSING,
        size_bytes: int = 0,
        since_ns: int | None = None,
        target: str = "",
        state: RepairState = RepairState.QUEUED,
        announce: bool = True,
    ) -> None:
        """Record durably that a bookie misses entries of a ledger, or is to be replaced.

        If the ledger and bookie are marked already, the mark gets another cause, or a lower first entry; the earlier
        time and the larger size count, and state, tries and error stay. A mark that cannot be decoded is replaced by
        one of all entries.

        Args:
            ledger_id: The ledger.
            bookie: The bookie.
            first_entry_id: The first entry that it may miss.
            reason: The reason.
            size_bytes: The bytes to copy, about; 0 if unknown.
            since_ns: The time of the mark, nanoseconds since 1970; None for now.
            target: The name of the bookie that takes the copies of a rebalance; empty leaves that of the mark.
            state: The state of a new mark.
            announce: Whether the workers are notified; False if the caller writes more marks and then calls
                ``announce_marks``.

        Raises:
            UsageError: A number is out of its range.

        Cost: Two reads and two writes, or one of each without an announcement; one read if the mark has the derived
        cause already.
        """
        key = missing_key(ledger_id, bookie)
        new = UnderReplicatedLedger(
            ledger_id,
            bookie,
            _checked(first_entry_id, "first_entry_id"),
            reason,
            _checked(time.time_ns() if since_ns is None else since_ns, "since_ns"),
            _checked(size_bytes, "size_bytes"),
            state=state,
            target=target[:_TARGET_CHARS_MAX],
        )
        while True:
            node = self._store.get(key, latest=True)
            try:
                if node is None:
                    self.create_value(ValueKind.UNDER_REPLICATED, key, record_json(new))
                elif (merged := self._merged(key, node, new)) is not None:
                    self._put(ValueKind.UNDER_REPLICATED, key, record_json(merged), node.version, reused=True)
                else:
                    return
            except (MetadataExistsError, MetadataVersionError):
                continue
            if announce:
                self.announce_marks()
            return

    def marks(self, *, after: int = -1) -> Iterator[UnderReplicatedLedger]:
        """Yield the marks of the ledgers above an id, ordered by ledger, read in pages.

        Damaged marks are left out, and logged.
        """
        while leaves := leaves_after(self._store, UNDER_REPLICATED_KEY, after, MARKS_PAGE):
            yield from self._records([key for _, key in leaves])
            after = leaves[-1][0]

    def marks_of(self, ledger_id: int) -> list[UnderReplicatedLedger]:
        """Return the marks of a ledger. Damaged marks are left out, and logged.

        Cost: Two round trips.
        """
        keys = self._keys_of(ledger_id)
        return self._records(keys) if keys else []

    def is_marked(self, ledger_id: int) -> bool:
        """Return whether a ledger has a mark, damaged ones included; one round trip."""
        return bool(self._keys_of(ledger_id))

    def _keys_of(self, ledger_id: int) -> list[str]:
        root, _, last = f"{UNDER_REPLICATED_KEY}/{ledger_path(ledger_id)}".rpartition("/")
        return [f"{root}/{name}" for name in self._store.children(root) if name[:_LAST_DIGITS] == last]

    def marks_at(self, keys: Sequence[str]) -> list[UnderReplicatedLedger]:
        """Return the marks at keys that ``missing_key`` made; a key without a mark has none.

        Damaged marks are left out, and logged.

        Cost: As ``MetadataStore.get_many``, however many marks there are.
        """
        return self._records(list(keys))

    def unmark_under_replicated(self, record: UnderReplicatedLedger) -> bool:
        """Remove a mark after its entries were replicated again.

        Args:
            record: The mark, as it was read before the copies were made.

        Returns:
            Whether the mark is gone; False if it has changed since it was read; entries may still be missing then.
        """
        key = missing_key(record.ledger_id, record.bookie)
        while (node := self._store.get(key, latest=True)) is not None:
            if token_of(node.value) != record.token:
                return False
            try:
                self._delete(key, node.version, reused=True)
            except MetadataVersionError:
                continue
        return True

    def update_mark(
        self,
        record: UnderReplicatedLedger,
        *,
        state: RepairState | None = None,
        tries: int | None = None,
        error: str | None = None,
        missing_from: int | None = None,
    ) -> UnderReplicatedLedger | None:
        """Record the progress of the repair of a marked ledger, durably; values that are None stay.

        Args:
            record: The mark, as it was read.
            state: The state of the repair.
            tries: The number of failed repairs.
            error: The error of the last try, cut off after ``MARK_ERROR_CHARS_MAX``.
            missing_from: The first entry that the bookie may still miss, or have damaged; a lower one is raised to it.

        Returns:
            The mark as it is now; None if it was changed or removed since it was read, in which case nothing was
            written.

        Raises:
            UsageError: A number is out of its range.
        """
        new = record._replace(
            state=record.state if state is None else state,
            tries=record.tries if tries is None else _checked(tries, "tries", MARK_TRIES_MAX),
            error=record.error if error is None else error.encode(errors="replace").decode()[:MARK_ERROR_CHARS_MAX],
            token=new_token(),
        )
        if missing_from is not None:
            causes = record.causes_by_reason().items()
            new = new.with_causes({why: max(first, missing_from) if why.observed else first for why, first in causes})
        key = missing_key(record.ledger_id, record.bookie)
        node = self._store.get(key, latest=True)
        if node is None or token_of(node.value) != record.token:
            return None
        if new._replace(token=record.token) == record:
            return record
        with suppress(MetadataVersionError):
            self._put(ValueKind.UNDER_REPLICATED, key, record_json(new), node.version, reused=True, token=new.token)
            return new
        return None

    def withdraw_mark(self, ledger_id: int, bookie: Bookie, reasons: Collection[RepairReason]) -> bool:
        """Remove causes that no longer hold from a mark; a mark without causes is removed.

        A mark that keeps other causes is queued again, because its state may be due to the removed ones.

        Args:
            ledger_id: The ledger.
            bookie: The bookie.
            reasons: The reasons; observed ones are refused, because only a copy ends them.

        Returns:
            Whether the mark is gone; False if it has other causes.

        Raises:
            UsageError: One of the reasons was observed.
            CorruptError, MetadataForgedError, UnsupportedFormatError: The mark cannot be read.
        """
        for reason in reasons:
            if reason.observed:
                raise UsageError(f"reason {reason} was observed and cannot be withdrawn; unmark it after a copy")
        key = missing_key(ledger_id, bookie)
        while (node := self._store.get(key, latest=True)) is not None:
            record = self._record(key, node)
            causes = record.causes_by_reason()
            left = {reason: first for reason, first in causes.items() if reason not in reasons}
            try:
                if not left:
                    self._delete(key, node.version, reused=True)
                    continue
                if left != causes:
                    target = record.target if RepairReason.REBALANCE in left else ""
                    rest = record.with_causes(left)._replace(target=target, state=RepairState.QUEUED, tries=0)
                    payload = record_json(rest)
                    self._put(ValueKind.UNDER_REPLICATED, key, payload, node.version, reused=True)
                return False
            except MetadataVersionError:
                continue
        return True

    def watch_under_replicated(self, callback: Callable[[], None]) -> Watch:
        """Call ``callback`` after marks were added, as ``MetadataStore.watch`` does; removed marks cause no call."""
        return self._store.watch(NEWS_KEY, callback)

    def announce_marks(self) -> None:
        """Trigger the callbacks of ``watch_under_replicated``, because marks were added."""
        node = self._store.get(NEWS_KEY)
        with suppress(MetadataExistsError, MetadataVersionError):  # another process has announced at this moment
            if node is None:
                self.create_value(ValueKind.NEWS, NEWS_KEY, b"")
            else:
                self._put(ValueKind.NEWS, NEWS_KEY, b"", node.version)

    def _merged(self, key: str, node: Node, new: UnderReplicatedLedger) -> UnderReplicatedLedger | None:
        """Return the mark at ``key`` with the cause of another one; None if nothing has to be written."""
        try:
            found = self._record(key, node)
        except (CorruptError, MetadataForgedError, UnsupportedFormatError) as error:
            logger.warning("a mark of an under-replicated ledger is replaced by one of all entries: %s", error)
            return new.with_causes({RepairReason.MISSING: 0, new.reason: 0})._replace(state=RepairState.QUEUED)
        causes = found.causes_by_reason()
        causes[new.reason] = min(new.first_entry_id, causes.get(new.reason, INT64_MAX))
        merged = found.with_causes(causes)._replace(
            since_ns=min(found.since_ns or new.since_ns, new.since_ns),
            size_bytes=max(found.size_bytes, new.size_bytes),
            target=new.target or found.target,
        )
        # An equal observation is written again, so that a repair that began before does not remove it.
        same = (
            causes == found.causes_by_reason()
            and merged.size_bytes == found.size_bytes
            and merged.target == found.target
        )
        return None if same and not new.reason.observed else merged

    def _records(self, keys: list[str]) -> list[UnderReplicatedLedger]:
        records = []
        for key, node in zip(keys, self._store.get_many(keys), strict=True):
            try:
                if node is not None:
                    records.append(self._record(key, node))
            except (CorruptError, MetadataForgedError, UnsupportedFormatError) as error:
                logger.warning("a mark of an under-replicated ledger is left out of a listing: %s", error)
        return records

    def _record(self, key: str, node: Node) -> UnderReplicatedLedger:
        payload = self._payload_of(ValueKind.UNDER_REPLICATED, key, node.value)
        record = decode_json(payload, decode_record, where=f"metadata key {key!r}")
        if missing_key(record.ledger_id, record.bookie) != key:
            raise CorruptError(
                f"metadata key {key!r} is a mark of ledger {record.ledger_id}, {record.bookie}; remove it"
            )
        return record._replace(token=token_of(node.value))


def missing_key(ledger_id: int, bookie: Bookie) -> str:
    """Return the key of the record that a bookie misses entries of a ledger."""
    return f"{UNDER_REPLICATED_KEY}/{ledger_path(ledger_id)}-{bookie.instance.hex()}"


def _checked(number: int, name: str, most: int = INT64_MAX) -> int:
    if type(number) is not int or not 0 <= number <= most:
        raise UsageError(f"{name} of a mark is {number!r}; it takes a whole number from 0 to {most}")
    return number


def record_json(record: UnderReplicatedLedger) -> bytes:
    """Encode a record; values equal to their defaults are left out."""
    causes = record.causes_by_reason()
    values: dict[str, Any] = {
        "ledger_id": record.ledger_id,
        "bookie_id": record.bookie.bookie_id,
        "instance": to_base64(record.bookie.instance),
        "first_entry_id": min((first for reason, first in causes.items() if reason.observed), default=INT64_MAX),
    }
    if causes.keys() != {RepairReason.MISSING}:
        values["causes"] = {reason.value: first for reason, first in causes.items()}
    if record.state is not RepairState.QUEUED:
        values["state"] = record.state.value
    for name in ("since_ns", "size_bytes", "tries", "error", "target"):
        if value := getattr(record, name):
            values[name] = value
    return encode_json(values)


def decode_record(values: dict[str, Any]) -> UnderReplicatedLedger:
    """Return the record in the decoded payload of a value; raises KeyError or ValueError if it is not one.

    A reason or state of a newer pybk is read as ``MISSING`` or ``QUEUED``.
    """
    causes: dict[RepairReason, int] = {}
    for name, first in dict(values.get("causes", {RepairReason.MISSING: values["first_entry_id"]})).items():
        reason = RepairReason(name) if name in _RANKS else RepairReason.MISSING
        causes[reason] = min(_number(first), causes.get(reason, INT64_MAX))
    if not causes:
        raise ValueError("no causes")
    state = values.get("state", RepairState.QUEUED.value)
    error, target = str(values.get("error", "")), str(values.get("target", ""))
    bookie_id = str(values["bookie_id"])
    for text in (bookie_id, error, target):
        text.encode()  # raises a ValueError for what could not be written again
    record = UnderReplicatedLedger(
        ledger_id=_number(values["ledger_id"]),
        bookie=Bookie(bookie_id, from_base64(values["instance"])),
        first_entry_id=0,
        since_ns=_number(values.get("since_ns", 0)),
        size_bytes=_number(values.get("size_bytes", 0)),
        state=RepairState(state) if state in set(RepairState) else RepairState.QUEUED,
        tries=min(_number(values.get("tries", 0)), MARK_TRIES_MAX),
        error=error[:MARK_ERROR_CHARS_MAX],
        target=target[:_TARGET_CHARS_MAX],
    )
    return record.with_causes(causes)


def _number(value: object) -> int:
    if type(value) is not int or not 0 <= value <= INT64_MAX:
        raise ValueError(f"{value!r} is not a whole number from 0 to {INT64_MAX}")
    return value

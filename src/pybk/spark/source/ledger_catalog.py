"""The ledgers of a read, with the end up to which each can be read now.

A catalog of a batch looks once, and lists the ledgers. One of a streaming query in a cluster *follows* them: its first
look reads the metadata of all ledgers, and a later one those of the ledgers that have changed (``ledger_changes``). It
forgets ledgers that the query has finished. It asks each bookie once for the ends of all open ledgers, and reads those
that have moved. So a look costs what changed, and misses no entry that an ack quorum knew as confirmed before it began.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection, Container, Iterable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Final

from pybk.credentials import mismatch
from pybk.errors import CorruptError, NoSuchLedgerError, UnauthorizedError, UsageError
from pybk.ledger.ledger_metadata import LedgerState
from pybk.manager.ledger_manager import HOW_TO_SEAL
from pybk.manager.ledger_reader import moved
from pybk.metadata.ledgers import LEDGERS_PAGE
from pybk.spark.connection import Connection, connection, ledger_seal, refuse_bookie_directory
from pybk.spark.finished_ledgers import is_selected, within
from pybk.spark.noted_changes import NotedChanges
from pybk.spark.options import nearest
from pybk.spark.sink.manifest import SINK_KEY, SINKS, FollowedSink, read_sinks
from pybk.spark.source.ledger_changes import LedgerChanges
from pybk.spark.source.planning import ReadableLedger, intersect
from pybk.spark.source.reading import lost_ledgers_error
from pybk.streams.format import DETACHED_KEY, SEGMENT_KEY, DetachedHeader, SegmentHeader

if TYPE_CHECKING:
    from pybk.flags import LedgerType
    from pybk.ledger.ledger_metadata import LedgerMetadata
    from pybk.manager.ledger_reader import LedgerReader
    from pybk.metadata.cluster import ClusterMetadata
    from pybk.spark.options import Positions, Ranges, SourceOptions

_LIST_SHARE: Final = 10

_READ_BY_NAME: Final = ("log", "wal")
"""The types of the segments of what is read by name."""


class LedgerCatalog:
    """The ledgers of a read.

    Ledgers that a sink has written and not committed are hidden. Ledgers of system types are left out unless a type is
    selected.

    Args:
        options: The options of the read.
        ids: Ranges of ledger ids to which the read is restricted; None for all.
        follow: Whether many looks are made, which see what has changed since the one before. In an embedded store, and
            if the options name each ledger, every look lists nevertheless.

    Attributes:
        list_at: The time of the next listing of ledgers, by the monotonic clock.
        others: Ledgers that a catalog that follows has seen, and that are not read or were deleted.

    Threads: one.
    """

    def __init__(self, options: SourceOptions, ids: Ranges | None = None, *, follow: bool = False) -> None:
        asked = options.ledgers
        self._where: Final = options.where
        self._given: Final = options.given.read()
        self._type: Final = options.ledger_type
        self._asked: Final = asked
        self._pushed: Final = ids
        self._ids: Final = asked if ids is None else ids if asked is None else intersect(asked, ids)
        self._named: Final = tuple(low for low, high in asked or () if low == high and within(low, ids))
        self._all_named: Final = asked is not None and all(low == high for low, high in asked)
        self._follow: Final = follow and not self._all_named
        self._changes: LedgerChanges | None = None
        """The changes of ledgers; None unless they are followed."""
        self._commits: NotedChanges[str] | None = None
        """The sinks whose records have changed, likewise."""
        self._is_finished: Callable[[int, int], bool] = _nothing_is
        self._closed: dict[int, ReadableLedger] = {}
        self._open: dict[int, LedgerReader] = {}
        self._uncommitted: dict[int, LedgerMetadata] = {}
        """The ledgers that are hidden."""
        self._sinks: dict[str, FollowedSink] = {}
        self._unlocked = False
        self._require_seal: Final = options.require_seal
        self._allow_missing: Final = options.allow_missing
        self._raw: Final = options.raw
        self._fail_on_data_loss: Final = options.fail_on_data_loss
        self._types: set[str] = set()
        """The types of the ledgers of the last listing, except the system's; if a type selects the ledgers."""
        self._checked: dict[int, LedgerMetadata] = {}
        self.list_at = 0.0
        self.others: set[int] = set()

    @property
    def hidden(self) -> dict[int, int]:
        """The creation times of the ledgers that were hidden at the last look, by id."""
        return {ledger_id: each.creation_time_ns for ledger_id, each in self._uncommitted.items()}

    @property
    def missing(self) -> list[int]:
        """The ids of ledgers that the options name one by one and that did not exist."""
        return [each for each in self._named if not self._has(each)]

    def _has(self, ledger_id: int) -> bool:
        """Return whether the last look has seen a ledger that is to be read, even if it is hidden."""
        return self._is_shown(ledger_id) or ledger_id in self._uncommitted

    def _is_shown(self, ledger_id: int) -> bool:
        return ledger_id in self._closed or ledger_id in self._open

    def source(self) -> str:
        """Return the store or cluster and the selection of ledgers, as text."""
        store = connection(self._where).manager.store_id.hex()
        if self._type is not None:
            return f"{store} type {self._type}"
        return f"{store} ledgers {','.join(f'{low}-{high}' for low, high in self._asked or ())}"

    def check_type(self) -> None:
        """Check that the last look found ledgers of the type that is selected, unless ``allow_missing`` is set.

        Raises:
            NoSuchLedgerError: It found none, not even one that is hidden.
        """
        if self._type is None or self._allow_missing or self._type in self._types:
            return
        names = sorted(filter(None, self._types))
        raise NoSuchLedgerError(
            f"no ledger of {self._where} has type {self._type!r:.100}; {nearest(self._type, names, 'types')}"
        )

    def check_selection(self) -> None:
        """Check that what the options select exists, before ledgers are opened; as far as the options demand it.

        Raises:
            NoSuchLedgerError: No ledger has the selected type; or a ledger that is selected by its id does not exist.
            UsageError: The directory is that of a bookie; or a ledger is a segment of a log, and ``raw`` is not set.
            PybkError: The metadata store cannot be read.

        Cost: One read of the metadata store per ledger that is selected by its id; for a type, a listing up to the
            first ledger that has it.
        """
        found = connection(self._where)
        if self._type is not None:
            if not self._allow_missing and next(self._selected(self.there(found)), None) is None:
                self.check_type()
        elif self._fail_on_data_loss and (missing := self.deleted(self._named)):
            refuse_bookie_directory(self._where, found.backend.ledgers())
            raise lost_ledgers_error(sorted(missing))

    def deleted(self, ledger_ids: Iterable[int]) -> set[int]:
        """Return those of some ledgers that were deleted, by the metadata of each, because listings may be late.

        Raises:
            PybkError: The metadata store cannot be read.

        Cost: One read of the metadata store per ledger.
        """
        manager = connection(self._where).manager
        found = set()
        for ledger_id in ledger_ids:
            try:
                manager.ledger_metadata(ledger_id)
            except NoSuchLedgerError:
                found.add(ledger_id)
        return found

    def absent(self, *positions: Positions) -> list[int]:
        """Return the ledgers that positions name and that do not exist.

        Raises:
            UsageError: Such a ledger exists, but is not among the selected ledgers.
            PybkError: The metadata store cannot be read.
        """
        manager = connection(self._where).manager
        named = {ledger_id for each in positions for ledger_id in each.entries if within(ledger_id, self._pushed)}
        absent = []
        for ledger_id in sorted(each for each in named if not self._has(each)):
            try:
                found = manager.ledger_metadata(ledger_id)
            except NoSuchLedgerError:
                absent.append(ledger_id)
                continue
            if not self._wants(found):
                raise UsageError(
                    f"startingOffsets or endingOffsets names ledger {ledger_id} of type {str(found.ledger_type)!r}, "
                    "which is not among the ledgers that are read; leave it out there, or read it too"
                )
        return absent

    def look(self, *, now: bool = True) -> dict[int, ReadableLedger]:
        """Return the ledgers by ascending id, each with the end up to which it can be read.

        Args:
            now: Whether to see every ledger that exists now. If False, a catalog that follows sees those of which it
                was notified, and another one uses the last listing while a new one would take too long.

        Raises:
            UnauthorizedError: The password is not that of a ledger.
            LedgerUnsealedError, SealMismatchError: A seal is required, and a ledger is open or unsealed, or its seal
                does not match its kind or end.
            UsageError: The directory is that of a bookie; or a ledger is a segment of a log, and ``raw`` is not set.
            PybkError: The metadata store or bookies cannot be read.

        Cost: A request to each bookie, one for each open ledger that has moved, and with ``now=False`` reading the
            metadata of changed ledgers.
        """
        began = time.monotonic()
        found = connection(self._where)
        listing = now or began >= self.list_at
        if self._follow and found.metadata is not None:
            self._update(found, *self._followed(found.metadata), listing=listing)
            self.list_at = math.inf
        elif listing:
            self._list(found)
            ended = time.monotonic()
            self.list_at = ended + _LIST_SHARE * (ended - began)
        shown = {**self._closed, **dict(self._advanced())}
        return dict(sorted(shown.items()))

    def forget(self, is_finished: Callable[[int, int], bool]) -> None:
        """Leave ledgers out of further looks.

        Args:
            is_finished: Returns whether a ledger, by its id and creation time, is read no more; for ever.
        """
        self._is_finished = is_finished
        finished = [each.ledger_id for each in self._closed.values() if is_finished(each.ledger_id, each.created_ns)]
        finished += [
            ledger_id
            for ledger_id, reader in self._open.items()
            if is_finished(ledger_id, reader.metadata.creation_time_ns)
        ]
        for ledger_id in finished:
            self._drop(ledger_id)

    def remember(self) -> None:
        """Have the next look return all ledgers again, also those that ``forget`` has left out."""
        self._is_finished = _nothing_is
        if self._changes is not None:
            self._changes.begin_again()

    def close(self) -> None:
        """End the feeds of changes."""
        if self._changes is not None:
            self._changes.close()
        if self._commits is not None:
            self._commits.close()
        self._changes = self._commits = None

    # ---- which ledgers there are ---------------------------------------------------------------------------------

    def _followed(self, metadata: ClusterMetadata) -> tuple[LedgerChanges, NotedChanges[str]]:
        """Return the changes of a cluster's ledgers and sinks; from the first one on if the directory was replaced."""
        changes, commits = self._changes, self._commits
        if changes is None or commits is None or changes.metadata is not metadata:
            self.close()
            for ledger_id in [*self._closed, *self._open, *self._uncommitted]:
                self._drop(ledger_id)
            self._sinks.clear()
            self.others.clear()
            self._changes = changes = LedgerChanges(metadata, self._type)
            self._commits = commits = NotedChanges(partial(metadata.feed_pointers, SINKS))
        return changes, commits

    def _update(self, found: Connection, changes: LedgerChanges, commits: NotedChanges[str], *, listing: bool) -> None:
        """Take in what has changed."""
        if listing:
            changes.list_again()
            commits.note(None)
        committed, changed = commits.take(), changes.look()
        try:
            for ledger_id in changed.gone:
                self._drop(ledger_id)
            self.others |= changed.deleted
            for ledger_id, kind in changed.others.items():
                self._note_other(ledger_id, kind)
            named = [each for each in self._named if not changes.knows(each)]
            new = [*changed.ledgers, *self._existing(found, named)]
            self._take(found, {each.ledger_id: each for each in self._selected(new)}, committed)
        except BaseException:
            changes.begin_again()
            raise

    def _list(self, found: Connection) -> None:
        """Take in all ledgers."""
        listed = {each.ledger_id: each for each in self._selected(self.there(found))}
        for ledger_id in {*self._closed, *self._open, *self._uncommitted}.difference(listed):
            self._drop(ledger_id)
        self._take(found, listed)

    def _drop(self, ledger_id: int) -> None:
        """Leave out a ledger that does not exist any more, or was finished."""
        self._closed.pop(ledger_id, None)
        self._uncommitted.pop(ledger_id, None)
        self._checked.pop(ledger_id, None)
        reader = self._open.pop(ledger_id, None)
        if reader is not None:
            reader.close()

    def _take(
        self, found: Connection, listed: dict[int, LedgerMetadata], committed: Collection[str] | None = None
    ) -> None:
        """Take in new or changed ledgers; of each commit of a sink all ledgers or none.

        Args:
            found: The connection.
            listed: The ledgers.
            committed: The sinks that may have committed ledgers; None if any may.
        """
        if found.metadata is not None:
            apps = {_app(each) for ledger_id, each in listed.items() if not self._is_shown(ledger_id)}
            hiding = {_app(each) for each in self._uncommitted.values()}
            apps |= hiding if committed is None else hiding.intersection(committed)
            listed = self._uncommitted | listed
            for metadata in self._newly_committed(found, found.metadata, listed, sorted(apps - {""})):
                listed[metadata.ledger_id] = metadata
        for ledger_id, metadata in listed.items():
            app = _app(metadata)
            sink = self._sinks.get(app) if app else None
            if sink is None or self._is_shown(ledger_id) or ledger_id in sink.committed:
                self._uncommitted.pop(ledger_id, None)
                self._show(found, metadata)
            else:
                self._uncommitted[ledger_id] = metadata

    def _newly_committed(
        self, found: Connection, metadata: ClusterMetadata, listed: Container[int], apps: Sequence[str]
    ) -> list[LedgerMetadata]:
        """Look at sinks; return the ledgers that they have committed and that are not listed.

        A commit may have added ledgers of which this catalog was not notified, or which a listing under way missed.
        """
        unseen = []
        for app, pointer in read_sinks(metadata, apps).items():
            if app not in self._sinks:
                self._sinks[app] = FollowedSink(found, app)
            new = self._sinks[app].look(pointer)
            unseen += [each for each in new if each not in listed and within(each, self._ids) and not self._knows(each)]
        more: list[LedgerMetadata] = []
        for at in range(0, len(unseen), LEDGERS_PAGE):
            read = metadata.read_sound_ledgers(unseen[at : at + LEDGERS_PAGE])
            more += self._selected(each.metadata for each in read)
        return more

    def _knows(self, ledger_id: int) -> bool:
        """Return whether this catalog has seen a ledger, even if it is not to be read."""
        return self._has(ledger_id) or (self._changes is not None and self._changes.knows(ledger_id))

    def _show(self, found: Connection, metadata: LedgerMetadata) -> None:
        ledger_id = metadata.ledger_id
        if metadata.state is LedgerState.CLOSED:
            self._check_password(found, ledger_id)
            self._check_seal(found, metadata)
            reader = self._open.pop(ledger_id, None)
            if reader is not None:
                reader.close()
            end, length = metadata.last_entry_id + 1, metadata.length
            self._closed[ledger_id] = ReadableLedger(ledger_id, metadata.creation_time_ns, end, length, True)
        elif ledger_id not in self._open:
            self._open_ledger(found, ledger_id)

    def _selected(self, ledgers: Iterable[LedgerMetadata]) -> Iterator[LedgerMetadata]:
        """Yield the metadata of the ledgers that are to be read: of the selection, and not finished."""
        for metadata in ledgers:
            refuse_bookie_directory(self._where, (metadata,))
            if not self._wants(metadata):
                self._note_other(metadata.ledger_id, metadata.ledger_type)
                continue
            self._note_type(metadata.ledger_type)
            if not self._is_finished(metadata.ledger_id, metadata.creation_time_ns):
                if not self._raw:
                    refuse_segment(metadata)
                yield metadata

    def _note_other(self, ledger_id: int, kind: LedgerType) -> None:
        """Note a ledger that is not to be read."""
        self._note_type(kind)
        if self._follow:
            self.others.add(ledger_id)

    def _note_type(self, kind: LedgerType) -> None:
        if self._type is not None and not kind.is_system:
            self._types.add(str(kind))

    def _wants(self, metadata: LedgerMetadata) -> bool:
        return is_selected(metadata, self._type, self._ids)

    def there(self, found: Connection) -> Iterator[LedgerMetadata]:
        """Yield the metadata of the ledgers that exist and may be asked for."""
        left = set(self._named)
        if not self._all_named:
            found.backend.catch_up()
            for metadata in found.backend.ledgers():
                left.discard(metadata.ledger_id)
                yield metadata
        yield from self._existing(found, sorted(left))

    def _existing(self, found: Connection, ledger_ids: Iterable[int]) -> Iterator[LedgerMetadata]:
        """Yield the metadata of those ledgers that exist, although a listing may be late."""
        for ledger_id in ledger_ids:
            try:
                yield found.manager.ledger_metadata(ledger_id)
            except NoSuchLedgerError:
                # The ids of a bookie's store are not those of the cluster.
                refuse_bookie_directory(self._where, found.backend.ledgers())

    def _check_password(self, found: Connection, ledger_id: int) -> None:
        """Open one ledger, so that a wrong password is reported before reading begins."""
        if not self._unlocked:
            self._open_ledger(found, ledger_id)
            self._open.pop(ledger_id, None)

    def _check_seal(self, found: Connection, metadata: LedgerMetadata) -> None:
        """Check the seal of a closed ledger if one is required.

        The tasks check the ledgers that they open. A ledger that was truncated to zero entries is not opened by any
        task, so it must be checked here. A ledger is checked again only if its metadata have changed.
        """
        if not self._require_seal or self._checked.get(metadata.ledger_id) == metadata:
            return
        seal = ledger_seal(found, metadata, self._given)
        if seal is None:
            raise UnauthorizedError(mismatch(metadata.key_kind, self._given, f"ledger {metadata.ledger_id}"))
        seal.require(metadata, HOW_TO_SEAL)
        self._checked[metadata.ledger_id] = metadata

    def _open_ledger(self, found: Connection, ledger_id: int) -> None:
        try:
            self._open[ledger_id] = found.manager.open_ledger(
                ledger_id,
                password=self._given.password,
                secret=self._given.secret,
                recover=False,
                require_seal=self._require_seal,
            )
        except NoSuchLedgerError:  # deleted since it was listed
            return
        self._unlocked = True

    def _advanced(self) -> Iterator[tuple[int, ReadableLedger]]:
        """Read the last add confirmed of the open ledgers: that of each which has moved since the last look."""
        unread = set(map(id, moved(list(self._open.values()))))
        for ledger_id, reader in list(self._open.items()):
            try:
                last = reader.read_last_add_confirmed() if id(reader) in unread else reader.last_add_confirmed
            except NoSuchLedgerError:
                del self._open[ledger_id]
                continue
            closed = reader.is_closed
            if closed:  # perhaps since the read above
                last = reader.metadata.last_entry_id
            yield (
                ledger_id,
                ReadableLedger(ledger_id, reader.metadata.creation_time_ns, last + 1, reader.length, closed),
            )


def refuse_segment(metadata: LedgerMetadata) -> None:
    """Raise an error if a ledger is a segment of a log, because its entries are not the log's records.

    Raises:
        UsageError: It is one; the error names the log.
    """
    segment, detached = (metadata.custom_metadata.get(key) for key in (SEGMENT_KEY, DETACHED_KEY))
    where = f"ledger {metadata.ledger_id}"
    try:
        if segment is not None:
            name = SegmentHeader.describes(segment, where=where).name
        elif detached is not None:
            name = DetachedHeader.describes(detached, where=where).name
        else:
            return
    except CorruptError:  # the application's own value
        return
    kind = str(metadata.ledger_type)
    remedy = f"read it by option {kind}={name!r}, or" if kind in _READ_BY_NAME else "to"
    raise UsageError(
        f"ledger {metadata.ledger_id} is a segment of {kind} {name!r}, and its entries are not records: {remedy} read "
        "the entries as they are with raw=true"
    )


def _nothing_is(_ledger_id: int, _created_ns: int) -> bool:
    """Return that a ledger is not finished."""
    return False


def _app(metadata: LedgerMetadata) -> str:
    """Return the app id of the sink that wrote a ledger; empty if no sink did."""
    return metadata.custom_metadata.get(SINK_KEY, b"").decode(errors="replace")

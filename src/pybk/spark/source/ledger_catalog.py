"""The ledgers of a read, with the end up to which each can be read now.

A catalog of a batch looks once, and lists the ledgers. One of a streaming query in a cluster *follows* them: its first
look reads the metadata of all ledgers, and a later one those of the ledgers that have changed (``ledger_changes``). It
forgets ledgers that the query has finished. It asks each bookie once for the ends of all open ledgers, and reads those
that have moved. So a look costs what changed, and misses no entry that an ack quorum knew as confirmed before it began.


A ledger that is a member of a merged one (``pybk.spark.sink.manifest``) is shown whether its own metadata exist or not.
So a ledger that is gone is looked up in the record of its sink before it is left out, and a look that finds a merged
ledger reads that record. Members' own ledgers are deleted only after the record names the merged one, so a record that
is read after one of them was found deleted says where its entries are. A merged ledger itself is never shown.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Final

from pybk.errors import (
    CorruptError,
    MetadataForgedError,
    NoSuchLedgerError,
    UnauthorizedError,
    UnsupportedFormatError,
    UsageError,
)
from pybk.ledger.keys import wrong_credentials
from pybk.ledger.ledger_metadata import LedgerState
from pybk.manager.ledger_manager import HOW_TO_SEAL
from pybk.manager.ledger_reader import moved
from pybk.metadata.ledgers import LEDGERS_PAGE
from pybk.spark.connection import Connection, connection, ledger_seal, refuse_bookie_directory
from pybk.spark.finished_ledgers import is_selected, within
from pybk.spark.noted_changes import NotedChanges
from pybk.spark.options import nearest
from pybk.spark.places import ITSELF, Place
from pybk.spark.sink.manifest import (
    SINK_KEY,
    SINKS,
    FollowedSink,
    is_merged,
    member_metadata,
    places_in_merged,
    read_sinks,
)
from pybk.spark.source.ledger_changes import LedgerChanges
from pybk.spark.source.planning import EntryRange, ReadableLedger, intersect
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
        self._merging: set[str] = set()
        """The sinks of merged ledgers that were found since the sinks were last looked at."""
        self._holders: dict[int, LedgerMetadata] = {}
        """Merged ledgers that were read."""
        self._sought: dict[int, str] = {}
        """The sinks whose merged ledgers have ledgers that were gone; empty for one that none had."""
        self._unlocked = False
        self._require_seal: Final = options.require_seal
        self._allow_missing: Final = options.allow_missing
        self._raw: Final = options.raw
        self._fail_on_data_loss: Final = options.fail_on_data_loss
        self._types: set[str] = set()
        """The types of the ledgers of the last listing, except the system's; if a type selects the ledgers."""
        self._checked: dict[int, LedgerMetadata] = {}
        self._gone: set[int] = set()
        """Ledgers that changes report as gone, and that a look which failed has not left out."""
        self._has_looked = False
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

        Those that merged ledgers have were not; the next look shows them.

        Raises:
            PybkError: The metadata store cannot be read.

        Cost: One read of the metadata store per ledger; if one is gone, as ``places_in_merged``.
        """
        connected = connection(self._where)
        gone = set()
        for ledger_id in ledger_ids:
            try:
                connected.manager.ledger_metadata(ledger_id)
            except NoSuchLedgerError:
                gone.add(ledger_id)
        return gone - self._sought_in_merged(connected, gone)

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
        advanced = self._advanced(found)
        self._has_looked = True
        return dict(sorted({**self._closed, **advanced}.items()))

    def placed(self, entry_ranges: Sequence[EntryRange], is_finished: Callable[[int, int], bool]) -> list[EntryRange]:
        """Return ranges of entries with their places, as far as this catalog knows them.

        A task finds its entries also if they are moved after that, but of a ledger that is gone it needs the sink. So a
        catalog that has not looked looks first, such as for a micro-batch that is repeated after a restart.

        Args:
            entry_ranges: The ranges.
            is_finished: As for ``forget``; the ledgers of the ranges are not finished.

        Raises:
            PybkError: As ``look``.
        """
        if entry_ranges and not self._has_looked and connection(self._where).metadata is not None:
            self.forget(is_finished)
            self.look(now=False)
        return [replace(each, place=self._known_place(each.ledger_id)) for each in entry_ranges]

    def _known_place(self, ledger_id: int) -> Place | None:
        readable = self._closed.get(ledger_id)
        if readable is not None:
            return readable.place
        if ledger_id in self._open:
            return self._place_of(self._open[ledger_id])
        sinks = (each for each in self._sinks.values() if ledger_id in each.committed)
        return next((each.place(ledger_id) for each in sinks), None)

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
        self._begin_again()

    def _begin_again(self) -> None:
        """Have the next look take in everything; members of merged ledgers are new again as sinks are."""
        if self._changes is not None:
            self._changes.begin_again()
        if self._commits is not None:
            self._commits.note(None)
        self._merging |= self._sinks.keys()
        self._sinks.clear()

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
            self._holders.clear()
            self._merging.clear()
            self._gone.clear()
            self.others.clear()
            self._changes = changes = LedgerChanges(metadata, self._type)
            self._commits = commits = NotedChanges(partial(metadata.feed_pointers, SINKS))
        return changes, commits

    def _update(self, found: Connection, changes: LedgerChanges, commits: NotedChanges[str], *, listing: bool) -> None:
        """Take in what has changed."""
        if listing:
            changes.metadata.catch_up()
            changes.list_again()
            commits.note(None)
        committed, changed = commits.take(), changes.look()
        self._gone |= changed.gone
        try:
            self._leave_out(found, self._gone.difference(each.ledger_id for each in changed.ledgers))
            self._gone.clear()
            for ledger_id, kind in changed.others.items():
                self._note_other(ledger_id, kind)
            named = [each for each in self._named if not changes.knows(each)]
            new = [*changed.ledgers, *self._existing(found, named)]
            self._take(found, {each.ledger_id: each for each in self._selected(new)}, committed)
            self.others |= {each for each in changed.deleted if not self._has(each)}
        except BaseException:
            self._begin_again()
            raise

    def _list(self, found: Connection) -> None:
        """Take in all ledgers."""
        listed = {each.ledger_id: each for each in self._selected(self.there(found))}
        for ledger_id in {*self._closed, *self._open, *self._uncommitted}.difference(listed):
            self._drop(ledger_id)
        self._merging |= self._sinks.keys()
        self._sinks.clear()  # so that members of merged ledgers, which no listing has, are taken in again
        self._holders.clear()
        if self._all_named:
            missing = {*self._named}.difference(listed)
            self._sought_in_merged(found, missing.difference(self._sought))
            self._merging |= {app for each in missing if (app := self._sought.get(each))}
        self._take(found, listed)

    def _leave_out(self, found: Connection, gone: Collection[int]) -> None:
        """Leave out ledgers that are gone, except those that a merged ledger has."""
        if not gone:
            return
        for ledger_id in gone:
            self._holders.pop(ledger_id, None)
        apps = {each: app for each in gone if (app := self._app_of(each))}
        for ledger_id, readable in self._closed.items():
            if readable.place is not None and readable.place.holder in gone:
                apps[ledger_id] = readable.place.sink
        there = self._members_of_now(found, apps)
        for ledger_id in {*gone, *apps}:
            self._drop(ledger_id)
            if ledger_id in there:
                self._show(found, *there[ledger_id])

    def _app_of(self, ledger_id: int) -> str:
        """Return the app id of the sink of a ledger that this catalog has; empty if it has none."""
        readable = self._closed.get(ledger_id)
        if readable is not None:
            return "" if readable.place is None else readable.place.sink
        reader = self._open.get(ledger_id)
        metadata = self._uncommitted.get(ledger_id) if reader is None else reader.metadata
        return "" if metadata is None else _app(metadata)

    def _members_of_now(self, found: Connection, apps: Mapping[int, str]) -> dict[int, tuple[LedgerMetadata, Place]]:
        """Look up ledgers that are gone in their sinks.

        Args:
            found: The connection.
            apps: The app ids of the sinks by ledger.

        Returns:
            The metadata and the places of those that merged ledgers have now.
        """
        there: dict[int, tuple[LedgerMetadata, Place]] = {}
        tried: set[int] = set()
        while found.metadata is not None and apps:
            for app, pointer in read_sinks(found.metadata, sorted({*apps.values()})).items():
                self._sinks.setdefault(app, FollowedSink(found, app)).update(pointer)
            lost: set[int] = set()
            for ledger_id, app in apps.items():
                row = self._sinks[app].merged.get(ledger_id)
                holder = None if row is None else self._holder(found, row.holder)
                if row is not None and holder is not None:
                    there[ledger_id] = member_metadata(holder, row), self._sinks[app].place(ledger_id)
                elif row is not None:
                    lost.add(row.holder)
            if lost <= tried:  # else a merged ledger may have been merged again since the record was read
                break
            tried |= lost
        return there

    def _holder(self, found: Connection, ledger_id: int) -> LedgerMetadata | None:
        """Return the metadata of a merged ledger; None if it does not exist."""
        if ledger_id not in self._holders:
            try:
                self._holders[ledger_id] = found.manager.ledger_metadata(ledger_id)
            except NoSuchLedgerError:
                return None
        return self._holders[ledger_id]

    def _sought_in_merged(self, found: Connection, ledger_ids: Collection[int]) -> set[int]:
        """Return those of some ledgers that merged ledgers of any sink have; the next look takes in these sinks.

        Raises:
            CorruptError, MetadataForgedError, UnsupportedFormatError: The record of a sink cannot be read, so it may
                have one of them; the error names these, too.
        """
        try:
            places = places_in_merged(found, ledger_ids)
        except (CorruptError, MetadataForgedError, UnsupportedFormatError) as error:
            names = ", ".join(map(str, sorted(ledger_ids)))
            error.args = (
                f"ledger {names:.200} does not exist, and whether a merged one has its entries is not known: {error}",
            )
            raise
        for place in places.values():
            self._sinks.pop(place.sink, None)
            self._merging.add(place.sink)
        self._sought.update({each: places[each].sink if each in places else "" for each in ledger_ids})
        return {*places}

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
            apps |= self._merging
            self._merging = set()
            listed = self._uncommitted | listed
            for metadata in self._newly_committed(found, found.metadata, listed, sorted(apps - {""})):
                listed[metadata.ledger_id] = metadata
        for ledger_id, metadata in listed.items():
            app = _app(metadata)
            sink = self._sinks.get(app) if app else None
            if sink is None or self._is_shown(ledger_id) or ledger_id in sink.committed:
                self._uncommitted.pop(ledger_id, None)
                self._show(found, metadata, self._place(found, ledger_id, app))
            else:
                self._uncommitted[ledger_id] = metadata

    def _newly_committed(
        self, found: Connection, metadata: ClusterMetadata, listed: Container[int], apps: Sequence[str]
    ) -> list[LedgerMetadata]:
        """Look at sinks; return the ledgers that they have committed and that are not listed.

        A commit may have added ledgers of which this catalog was not notified, or which a listing under way missed.
        """
        unseen: dict[int, str] = {}
        for app, pointer in read_sinks(metadata, apps).items():
            if app not in self._sinks:
                self._sinks[app] = FollowedSink(found, app)
            sink = self._sinks[app]
            for each in sink.look(pointer):
                if each in listed or not within(each, self._ids) or self._knows(each):
                    continue
                if each not in sink.merged or not self._is_finished(each, sink.merged[each].created_ns):
                    unseen[each] = app
        there: list[LedgerMetadata] = []
        left = sorted(unseen)
        own = [each for each in left if each not in self._sinks[unseen[each]].merged]
        for at in range(0, len(own), LEDGERS_PAGE):
            there += [each.metadata for each in metadata.read_sound_ledgers(own[at : at + LEDGERS_PAGE])]
        gone = {*left}.difference(each.ledger_id for each in there)
        there += [each for each, _ in self._members_of_now(found, {each: unseen[each] for each in gone}).values()]
        return list(self._selected(there))

    def _place(self, found: Connection, ledger_id: int, app: str) -> Place | None:
        """Return where the entries of a ledger of a sink lie; None for a ledger that no sink wrote."""
        if not app:
            return None
        place = self._sinks[app].place(ledger_id) if app in self._sinks else Place(app)
        return place if place.holder == ITSELF or self._holder(found, place.holder) else Place(app)

    def _knows(self, ledger_id: int) -> bool:
        """Return whether this catalog has seen a ledger, even if it is not to be read."""
        return self._has(ledger_id) or (self._changes is not None and self._changes.knows(ledger_id))

    def _show(self, found: Connection, metadata: LedgerMetadata, place: Place | None) -> None:
        ledger_id = metadata.ledger_id
        self.others.discard(ledger_id)
        if metadata.state is LedgerState.CLOSED:
            stored = metadata if place is None or place.holder == ITSELF else self._holders[place.holder]
            self._check_password(found, stored.ledger_id)
            self._check_seal(found, stored)
            reader = self._open.pop(ledger_id, None)
            if reader is not None:
                reader.close()
            end, length = metadata.last_entry_id + 1, metadata.length
            self._closed[ledger_id] = ReadableLedger(ledger_id, metadata.creation_time_ns, end, length, True, place)
        elif ledger_id not in self._open:
            self._open_ledger(found, ledger_id)

    def _selected(self, ledgers: Iterable[LedgerMetadata]) -> Iterator[LedgerMetadata]:
        """Yield the metadata of the ledgers that are to be read: of the selection, and not finished."""
        for metadata in ledgers:
            refuse_bookie_directory(self._where, (metadata,))
            if is_merged(metadata):
                self._note_merged(metadata)
                continue
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

    def _note_merged(self, metadata: LedgerMetadata) -> None:
        """Note the sink of a ledger that has the entries of others, if those may be selected.

        Raises:
            UsageError: The ledger is named itself.
        """
        if metadata.ledger_id in self._named:
            raise UsageError(
                f"ledger {metadata.ledger_id} has the entries of others of sink {_app(metadata)!r:.100}, which are "
                f"read by their own numbers: name those, or option ledgerType={str(metadata.ledger_type)!r}"
            )
        self._note_other(metadata.ledger_id, metadata.ledger_type)
        if is_selected(metadata, self._type, None):
            self._merging.add(_app(metadata))

    def _wants(self, metadata: LedgerMetadata) -> bool:
        return is_selected(metadata, self._type, self._ids)

    def there(self, found: Connection) -> Iterator[LedgerMetadata]:
        """Yield the metadata of the ledgers that exist and may be asked for."""
        left = set(self._named)
        if not self._all_named:
            found.backend.catch_up()
            if found.metadata is not None:
                found.metadata.catch_up()
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
            raise UnauthorizedError(wrong_credentials(metadata.key_kind, self._given, f"ledger {metadata.ledger_id}"))
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

    def _advanced(self, found: Connection) -> dict[int, ReadableLedger]:
        """Read the last add confirmed of the open ledgers: that of each which has moved since the last look."""
        unread = set(map(id, moved(list(self._open.values()))))
        advanced: dict[int, ReadableLedger] = {}
        gone: set[int] = set()
        for ledger_id, reader in self._open.items():
            try:
                last = reader.read_last_add_confirmed() if id(reader) in unread else reader.last_add_confirmed
            except NoSuchLedgerError:
                gone.add(ledger_id)
                continue
            closed = reader.is_closed
            if closed:  # perhaps since the read above
                last = reader.metadata.last_entry_id
            advanced[ledger_id] = ReadableLedger(
                ledger_id, reader.metadata.creation_time_ns, last + 1, reader.length, closed, self._place_of(reader)
            )
        self._leave_out(found, gone)
        return advanced

    def _place_of(self, reader: LedgerReader) -> Place | None:
        app = _app(reader.metadata)
        return Place(app) if app else None


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

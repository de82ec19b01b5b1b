"""The auditor of a process: takes part in the election, and runs ``AuditorMachine`` against the metadata store.

Theory of operation
-------------------

Every process with a bookie has an ``AuditorDriver``; the one that is elected leads. It is a chore (``chores``), so it
makes one call at a time. Other threads, those of the metadata store, only put calls into its inbox: each call reads
what has changed, and yields events for the machine. Between these calls the next page of all ledgers is read, if that
is under way, and every ``TICK_S`` the bookies are read again, because a changed registration may not be reported; or
earlier, when the grace of an absent bookie ends.

    feed of ledgers, of marks; watches of bookies, cookies, settings; election -> inbox -> events -> step -> effects

Reading everything. The first reading after the election decodes all ledgers. Later ones decode those whose version is
not the known one. A reading after missed changes takes all the time that it needs; one that is made only because the
last was long ago takes ``1 / (1 + SPREAD)`` of a core. Tombstones that a reading finds are announced.

The feeds' keys are collected, and read together when their turn comes: first the marks, then the metadata of the same
ledgers. A worker changes a ledger before it removes the mark (H5). So a mark that is gone is never compared with
metadata from before its repair, which would publish it again.

A step looks at all marks that are wanted, however few have changed. So after a reading of changes the driver rests
``_REST`` times as long as the reading took, and one step handles all changes that came meanwhile.

Each write of a mark takes a round trip, and a plan may want a thousand. After ``TRUST_NS`` the remaining effects are
given up, and the changes that came meanwhile are read. Then the machine asks again for the effects that it still wants.

A lost election, or a lost metadata store, only ends the work under way: the machine starts from nothing when it is
elected again. While the store cannot be reached, it is tried once per tick, and the machine is notified, because a
bookie that cannot be seen does not count as absent.

The marks that effects wrote are read again at once and reported to the machine, which corrects itself if an effect was
refused.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from queue import SimpleQueue
from typing import TYPE_CHECKING, Final, TypeVar

from pybk.errors import CorruptError, MetadataForgedError, MetadataUnreachableError, PybkError, UnsupportedFormatError
from pybk.flags import StorageHint
from pybk.healing.auditor import (
    AuditorMachine,
    BookiesRead,
    ChangeMark,
    ChangesMissed,
    DropMark,
    Effect,
    Elected,
    Event,
    LeaseExtended,
    LedgersChanged,
    LedgersRead,
    LostElection,
    MarksChanged,
    MarksRead,
    PublishMark,
    ReadEverything,
    ReadLedgers,
    ReplicaChecked,
    SavedState,
    SaveState,
    SettingsRead,
    StoreBack,
    StoreLost,
    Tick,
    WithdrawMark,
    WritersMoved,
    decode_state,
    encode_state,
)
from pybk.healing.chores import Work
from pybk.healing.repair_report import Report, encode_report
from pybk.healing.situation import BookieFacts, MarkKey, Space
from pybk.ledger.ledger_metadata import LedgerMetadata
from pybk.log_events import log_event
from pybk.metadata.deletions import PAGE_LEDGERS_MAX
from pybk.metadata.ledgers import LEDGERS_PAGE, ledger_in_key
from pybk.metadata.locks import Election
from pybk.metadata.registration import (
    BOOKIES_KEY,
    COOKIES_KEY,
    REQUESTS_SECONDS,
    BookieCookie,
    BookieRegistration,
    BookieState,
)
from pybk.metadata.removed_bookies import collect_removed
from pybk.metadata.underreplication import UNDER_REPLICATED_KEY, UnderReplicatedLedger, missing_key
from pybk.metrics import AUDITOR_FINDINGS

if TYPE_CHECKING:
    from pybk.metadata.cluster import ClusterMetadata
    from pybk.metrics import Metrics

logger = logging.getLogger(__name__)

ELECTION: Final = "auditor"
TICK_S: Final = 10.0
"""Seconds between two looks at the bookies."""

_DUE_S: Final = 0.05
"""The time after the end of a grace when the bookies are read: by then it has ended by the machine's clock, too."""

ANNOUNCE_S: Final = 60.0
"""Seconds between two pages of deleted ledgers."""

TRUST_NS: Final = 10**9
"""The time after a check of the lease in which effects may still be performed."""

SPREAD: Final = 9
"""The wait before the next page of a reading, in multiples of the last page's time, if nothing is known to be
missing."""

_REST: Final = 100
"""The time for which the next changes are collected, in multiples of the time that the last took to handle.

So it takes a hundredth of the time, which appends do not notice, unless ``_REST_MAX_S`` is shorter.
"""

_REST_MAX_S: Final = 1.0

T = TypeVar("T")

Call = Callable[[], Iterable[Event]]
"""A function that another thread passes to the driver: it reads changes, and returns the resulting events."""


class AuditorDriver:
    """One candidate for the auditor of a cluster, from its creation until ``close``; a chore.

    Args:
        metadata: The cluster's metadata.
        name: The name of the bookie of this process, for people.
        metrics: Counts what is found.
        wake: Makes the thread of the chores ask again for due work.

    Attributes:
        report: The machine's last report; None while this process does not lead.
        reported_ns: The time when it was made, nanoseconds since 1970.

    Threads: any.
    """

    def __init__(self, metadata: ClusterMetadata, name: str, metrics: Metrics, wake: Callable[[], None]) -> None:
        self.trouble: Final = f"the auditor {name} could not do what was due"
        self._metadata = metadata
        self._name = name
        self._metrics = metrics
        self._wake = wake
        self._machine = AuditorMachine()
        self._machine_lock = threading.Lock()
        """Held while the machine takes an event, and while other threads read its state; not during requests to the
        store."""
        self.report: Report | None = None
        self.reported_ns = 0
        self._inbox: SimpleQueue[Call] = SimpleQueue()
        self._reading: Iterator[Event] | None = None
        """The rest of a reading of everything; None if nothing is left."""
        self._spread = False
        """True if the reading waits between its pages (``SPREAD``)."""
        self._page_at = 0.0
        """The time when the next page is read, by the monotonic clock."""
        self._clock_ns = time.time_ns() - time.monotonic_ns()
        self._session_ns = self._now_ns()
        self._lost_store = False
        self._tick_at = time.monotonic() + TICK_S
        """The time of the next report of the time to the machine, by the monotonic clock."""
        self._deleted: set[int] = set()
        """Ledgers whose deletion was not announced to bookies yet."""
        self._swept = False
        """True if all deletions from before the election were announced to bookies."""
        self._announce_at = 0.0
        self._changes_lock = threading.Lock()
        """Guards the four attributes below."""
        self._changed_ledgers: set[int] = set()
        """Ledgers whose metadata have changed, and were not read since."""
        self._changed_marks: set[str] = set()
        """Keys of marks that have changed, and were not read since."""
        self._tried_marks: set[MarkKey] = set()
        """Marks that effects may have changed, and whose present values the machine awaits."""
        self._changes_due = False
        """True if one of the sets above is not empty."""
        self._was_elected = False
        """True if changes are collected; before its election an auditor collects none, because it then reads
        everything."""
        self._rest_until = 0.0
        """The time until which changes are collected, by the monotonic clock."""
        self._gave_up = False
        """True if the last step has given up effects; later changes are then read without a rest."""
        with ExitStack() as undo:
            watches = (
                metadata.watch_ledgers(partial(self._feed, self._note_ledgers)),
                metadata.watch_below(UNDER_REPLICATED_KEY, partial(self._feed, self._note_marks)),
                metadata.watch_below(BOOKIES_KEY, lambda _: self._post(self._bookies)),
                metadata.watch_below(COOKIES_KEY, lambda _: self._post(self._bookies)),
                metadata.watch_settings(lambda _: self._post(self._settings)),
                metadata.on_session_end(lambda: self._post(self._session_ended)),
            )
            for watch in watches:
                undo.callback(watch.cancel)
            self._election = Election(metadata, ELECTION, name, self._elected)
            undo.callback(self._election.close)
            self._watches = undo.pop_all()

    @property
    def leads(self) -> bool:
        """True if this process is the auditor, as far as it knows."""
        return self._election.leads

    @property
    def grace_ns(self) -> int:
        """The time for which a bookie may be absent, by the settings that the machine knows, nanoseconds."""
        return int(self._machine.situation.settings.repair.grace_s * 1e9)

    def report_check(self, event: ReplicaChecked) -> None:
        """Report to the machine the result of a check of a bookie's replica of a ledger; any thread."""
        self._post(lambda: (event,))

    def ledger_ids(self) -> list[int]:
        """Return the ledgers that the machine knows, in any order; any thread."""
        with self._machine_lock:
            return list(self._machine.map)

    def short_ledgers(self) -> list[int]:
        """Return the open ledgers that are not whole; any thread."""
        with self._machine_lock:
            return self._machine.open_short

    def report_writer(self, ledger_id: int) -> None:
        """Report to the machine that the writer of an open ledger lives; any thread."""
        event = WritersMoved(frozenset({ledger_id}))
        self._post(lambda: (event,))

    def _post(self, call: Call) -> None:
        """Have a call made; any thread."""
        self._inbox.put(call)
        self._wake()

    def close(self) -> None:
        """Leave the election, and end the watches; to be called once the thread of the chores has ended."""
        self._watches.close()

    # ---- what is due ---------------------------------------------------------------------------------------------

    def due(self, now: float) -> Work | float:
        """Return the next work: a tick, changes, a call, or a page of a reading; or the time of the next."""
        if now >= self._tick_at:
            return partial(self._make, self._tick)
        again = self._tick_at
        if self._changes_due:
            if now >= self._rest_until or self._gave_up:
                return partial(self._make, self._changes)
            again = min(again, self._rest_until)
        if not self._inbox.empty():
            return partial(self._make, None)
        if self._reading is not None:
            if now >= self._page_at:
                return partial(self._make, self._read_page)
            again = min(again, self._page_at)
        return again

    def _make(self, call: Call | None) -> None:
        """Make a call, or the first of the inbox, and choose when the next ones may follow."""
        call = call or self._inbox.get_nowait()
        began = time.monotonic()
        self.do(call)
        due_s = self._due_s()
        ended = time.monotonic()
        if call == self._tick:
            self._tick_at = began + TICK_S
        elif call == self._read_page:
            self._page_at = ended + (SPREAD * (ended - began) if self._spread else 0.0)
        elif call == self._changes:
            self._rest_until = ended + min(_REST * (ended - began), _REST_MAX_S)
        self._tick_at = min(self._tick_at, began + due_s)

    def _due_s(self) -> float:
        """Return in how many seconds the next absent bookie is lost; ``TICK_S`` if none is before."""
        now_ns = self._now_ns()
        dues_ns = [since + self.grace_ns - now_ns for since in self._machine.situation.absent_since_ns.values()]
        return min([TICK_S, *(due_ns / 1e9 + _DUE_S for due_ns in dues_ns if due_ns > 0)])

    def do(self, call: Call) -> None:
        """Make a call, and give its events to the machine; a failure is logged."""
        try:
            for event in call():
                self._step(event)
        except MetadataUnreachableError as error:
            if not self._lost_store:
                self._lost_store = True
                logger.warning("the auditor %s cannot reach the metadata store: %s", self._name, error)
                self._step(StoreLost())
        except PybkError as error:
            logger.warning("%s: %s", self.trouble, error)
        except Exception:  # the machine has to be asked again, or nothing would be repaired any more
            logger.exception("%s", self.trouble)

    def _step(self, event: Event) -> None:
        """Give an event to the machine, and perform the effects; what they changed is a further event."""
        now_ns = self._now_ns()
        effects: list[Effect] = []
        with self._machine_lock:
            if self._election.leads:
                effects += self._machine.step(LeaseExtended(now_ns + TRUST_NS), now_ns)
            effects += self._machine.step(event, now_ns)
        until = time.monotonic() + TRUST_NS / 1e9
        tried: set[MarkKey] = set()
        given_up: list[MarkKey] = []
        try:
            for effect in effects:
                key = _key_of(effect)
                if tried and key is not None and time.monotonic() > until and not isinstance(effect, DropMark):
                    given_up.append(key)
                    continue
                if key is not None:
                    tried.add(key)
                self._try(effect)
        finally:
            with self._changes_lock:
                self._tried_marks |= tried
                self._changes_due |= bool(tried)
            self._gave_up = bool(given_up)
            if given_up:
                self._post(partial(self._ask_again, given_up))
        if any(isinstance(effect, PublishMark) for effect in effects):
            self._metadata.announce_marks()

    def _now_ns(self) -> int:
        """Return the time: nanoseconds since 1970 when this began, and since then by a clock that is not set."""
        return self._clock_ns + time.monotonic_ns()

    # ---- what happened -------------------------------------------------------------------------------------------

    def _elected(self, leads: bool) -> None:
        """Handle the outcome of the election for this process; called by a thread of the metadata store."""
        self._was_elected = leads
        self._post(self._lead if leads else self._follow)

    def _lead(self) -> Iterator[Event]:
        fields = {"bookie": self._name}
        logger.info("%s is the auditor of the cluster", self._name, extra=log_event("auditor.elected", **fields))
        yield Elected(self._saved_state(), self._now_ns() + TRUST_NS, self._session_ns)

    def _saved_state(self) -> SavedState:
        """Return the state that the previous auditor left; a damaged value counts as none, and graces begin anew."""
        try:
            return decode_state(self._metadata.read_auditor_state())
        except (CorruptError, MetadataForgedError, UnsupportedFormatError, ValueError, KeyError, TypeError) as error:
            logger.warning("the last auditor's state cannot be used, so absences are counted from now on: %s", error)
            return SavedState()

    def _follow(self) -> Iterator[Event]:
        self.report = None
        self._reading = None
        self._deleted.clear()
        self._swept = False
        yield LostElection()

    def _session_ended(self) -> Iterator[Event]:
        self._session_ns = self._now_ns()
        yield StoreLost()
        yield from self._back()

    def _back(self) -> Iterator[Event]:
        """Yield the events that follow when the metadata store answers again."""
        found = self._read_bookies()  # raises as long as it does not
        missed, self._lost_store = self._lost_store, False  # the call that failed has read nothing
        self._session_ns = self._now_ns()
        yield StoreBack()
        yield found
        if missed:
            yield ChangesMissed()

    def _tick(self) -> Iterator[Event]:
        if self._lost_store:
            yield from self._back()
        elif self._election.leads:
            yield self._read_bookies()
        yield Tick()
        if self._election.leads:
            self._end_drains()
            self._announce_deletions()

    def _end_drains(self) -> None:
        """Note in the cookie of each bookie that is being drained that no ledger names it any more, and none will."""
        machine = self._machine
        if not machine.leading or machine.frozen:
            return

        def ended(cookie: BookieCookie) -> BookieCookie:
            is_meant = (cookie.bookie, cookie.state_since_ns) == (facts.bookie, facts.state_since_ns)
            return replace(cookie, state=BookieState.DRAINED) if is_meant else cookie

        for facts in machine.situation.bookies.values():
            number = machine.map.number_of(facts.bookie)
            named = number is not None and bool(machine.map.ledgers_of(number))
            since_s = (time.time_ns() - facts.state_since_ns) / 1e9
            if facts.state.value == BookieState.DRAINING.value and not named and since_s >= REQUESTS_SECONDS:
                self._metadata.change_cookie(facts.bookie.bookie_id, ended)

    def _announce_deletions(self) -> None:
        """Announce to bookies, once a minute, which ledgers were deleted; the first time, all that have a tombstone.

        At each tick while a bookie is read-only, because a full one has no space before it knows of deletions.

        What is not needed any more is removed then: the pages that all bookies are past, with the tombstones that they
        announced, and what removed bookies left.
        """
        now = time.monotonic()
        any_read_only = any(facts.read_only for facts in self._machine.situation.bookies.values())
        if now < self._announce_at and not any_read_only:
            return
        self._announce_at = now + ANNOUNCE_S
        if not self._swept:
            return
        ledger_ids = sorted(self._deleted)[:PAGE_LEDGERS_MAX]
        proofs = self._metadata.deletion_proofs(ledger_ids)
        deleted = [ledger_id for ledger_id, proof in zip(ledger_ids, proofs, strict=True) if proof is not None]
        if deleted:
            self._metadata.append_deletions(deleted)
        self._deleted.difference_update(ledger_ids)
        self._metadata.trim_deletions()
        collect_removed(self._metadata)

    def _feed(self, note: Callable[[frozenset[T]], bool], found: frozenset[T] | None) -> None:
        """Take the changes that a feed reports; called by a thread of the metadata store."""
        if found is None:
            self._post(lambda: (ChangesMissed(),))
            return
        if not self._was_elected:
            return
        with self._changes_lock:
            due = self._changes_due
            self._changes_due |= note(found)
            woken = self._changes_due and not due
        if woken:
            self._wake()

    def _note_ledgers(self, ledger_ids: frozenset[int]) -> bool:
        """Note that ledgers have changed; the caller holds the lock. Return whether any have."""
        self._changed_ledgers |= ledger_ids
        return bool(ledger_ids)

    def _note_marks(self, keys: frozenset[str]) -> bool:
        """Note that marks have changed; the caller holds the lock. Return whether any have."""
        found = {key for key in keys if ledger_in_key(key) is not None}
        self._changed_marks |= found
        return bool(found)

    def _changes(self) -> Iterator[Event]:
        """Yield the present state of all that has changed."""
        with self._changes_lock:
            ledger_ids, keys, tried = set(self._changed_ledgers), set(self._changed_marks), set(self._tried_marks)
            for changed in (self._changed_ledgers, self._changed_marks, self._tried_marks):
                changed.clear()
            self._changes_due = False
        if not self._was_elected:  # it was deposed, and not only its heartbeat late
            return
        marked = {found for key in keys if (found := ledger_in_key(key)) is not None}
        marks = self._marks_at(keys, marked, tried)  # before the metadata (H5)
        ledger_ids |= marked | {key.ledger_id for key in tried}
        if ledger_ids:
            yield self._read_ledgers(sorted(ledger_ids))
        if marks:
            yield MarksChanged(marks)

    def _ask_again(self, keys: Iterable[MarkKey]) -> Iterator[Event]:
        """Yield the known state of marks whose effects were given up; the machine asks for effects again."""
        known = self._machine.situation.marks
        yield MarksChanged({key: known.get(key) for key in keys})

    def _marks_at(
        self, keys: set[str], ledger_ids: set[int], tried: set[MarkKey]
    ) -> dict[MarkKey, UnderReplicatedLedger | None]:
        """Return the marks at keys, of ledgers and of effects; None for those that do not exist any more."""
        known = self._machine.situation.marks
        marks: dict[MarkKey, UnderReplicatedLedger | None] = dict.fromkeys(tried)
        for ledger_id in ledger_ids:
            marks |= {MarkKey(ledger_id, bookie): None for bookie in known.of_ledger(ledger_id)}
        found = self._metadata.marks_at(sorted(keys | {missing_key(*key) for key in marks}))
        return marks | {MarkKey(mark.ledger_id, mark.bookie): mark for mark in found}

    def _settings(self) -> Iterator[Event]:
        yield SettingsRead(self._metadata.read_settings())

    def _bookies(self) -> Iterator[Event]:
        if self._election.leads:
            yield self._read_bookies()

    def _read_bookies(self) -> BookiesRead:
        """Read all cookies and registrations."""
        cookies = self._metadata.list_cookies()
        registered = {found.bookie: found for found in self._metadata.list_bookies()}
        facts = []
        for cookie in cookies:
            found = registered.get(cookie.bookie)
            facts.append(
                BookieFacts(
                    bookie=cookie.bookie,
                    boots=cookie.boots,
                    state=cookie.state,
                    state_since_ns=cookie.state_since_ns,
                    until_ns=cookie.until_ns,
                    location=cookie.location,
                    registered=found is not None,
                    read_only=found is not None and found.read_only,
                    in_limbo=0 if found is None else found.in_limbo,
                    tiers={} if found is None else _space(found),
                )
            )
        return BookiesRead(tuple(facts))

    def _read_ledgers(self, ledger_ids: list[int]) -> LedgersChanged:
        """Read the metadata of some ledgers."""
        found, unknown = self._stored(ledger_ids)
        self._deleted.update(each for each in ledger_ids if each not in found and each not in unknown)
        return LedgersChanged({each: found.get(each) for each in ledger_ids if each not in unknown}, unknown)

    def _stored(self, ledger_ids: list[int]) -> tuple[dict[int, tuple[LedgerMetadata, int]], frozenset[int]]:
        """Return metadata and version of ledgers, and those whose metadata cannot be read."""
        unknown: set[int] = set()

        def damaged(ledger_id: int, error: PybkError) -> None:
            logger.warning("ledger %d cannot be judged: %s", ledger_id, error)
            unknown.add(ledger_id)

        stored = self._metadata.read_ledgers(ledger_ids, damaged=damaged)
        pairs = zip(ledger_ids, stored, strict=True)
        return {each: (found.metadata, found.version) for each, found in pairs if found is not None}, frozenset(unknown)

    # ---- reading everything --------------------------------------------------------------------------------------

    def _read_page(self) -> Iterator[Event]:
        """Yield the next page of a reading; one that fails ends, and the machine asks for another one in time."""
        reading, self._reading = self._reading, None
        event = None if reading is None else next(reading, None)
        if event is not None:
            self._reading = reading
            yield event

    def _read_everything(self, reading: int) -> Iterator[Event]:
        """Yield settings, bookies and marks, and then all ledgers in pages."""
        yield SettingsRead(self._metadata.read_settings())
        yield self._read_bookies()
        yield MarksRead(tuple(self._metadata.marks()))
        if not self._swept:
            self._metadata.begin_deletions()  # bookies look at pages from now on
        after = -1
        for page in self._metadata.ledger_pages(count=LEDGERS_PAGE, known=self._version):
            self._deleted.update(each for each in page.deleted if not self._swept or each in self._machine.map)
            ledgers = {each: (stored.metadata, stored.version) for each, stored in page.ledgers.items()}
            yield LedgersRead(reading, after, page.through, ledgers, page.unknown, page.same)
            after = after if page.through is None else page.through
        self._swept = True

    def _version(self, ledger_id: int) -> int | None:
        """Return the version of a ledger that the machine has; None if it does not have the ledger."""
        found = self._machine.map.get(ledger_id)
        return None if found is None else found.version

    # ---- effects -------------------------------------------------------------------------------------------------

    def _try(self, effect: Effect) -> None:
        """Perform an effect; one that is refused is logged, and keeps no other ledger from its repair.

        Raises:
            MetadataUnreachableError: The others could not be performed either.
        """
        try:
            self._perform(effect)
        except MetadataUnreachableError:
            raise
        except PybkError as error:
            logger.warning("%s: %s", self.trouble, error)

    def _perform(self, effect: Effect) -> None:
        """Perform an effect."""
        metadata = self._metadata
        if isinstance(effect, ReadEverything):
            self._reading, self._spread = self._read_everything(effect.reading), effect.spread
            self._page_at = 0.0
        elif isinstance(effect, ReadLedgers):
            self._post(partial(self._read_again, sorted(effect.ledgers)))
        elif isinstance(effect, PublishMark):
            metadata.mark_under_replicated(
                effect.key.ledger_id,
                effect.key.bookie,
                effect.first_entry_id,
                reason=effect.reason,
                size_bytes=effect.size_bytes,
                since_ns=effect.since_ns,
                state=effect.state,
                announce=False,
            )
            self._metrics.add(AUDITOR_FINDINGS, labels=(("reason", effect.reason.value),))
        elif isinstance(effect, WithdrawMark):
            metadata.withdraw_mark(effect.key.ledger_id, effect.key.bookie, effect.reasons)
        elif isinstance(effect, ChangeMark):
            metadata.update_mark(effect.mark, state=effect.state, tries=0)
        elif isinstance(effect, DropMark):
            metadata.unmark_under_replicated(effect.mark)
        elif isinstance(effect, SaveState):
            metadata.write_auditor_state(encode_state(effect.state))
        else:
            assert isinstance(effect, Report)
            self.reported_ns = self._now_ns()
            self.report = effect
            metadata.write_auditor_report(encode_report(effect, self._name, self.reported_ns))

    def _read_again(self, ledger_ids: list[int]) -> Iterator[Event]:
        yield self._read_ledgers(ledger_ids)


def _key_of(effect: Effect) -> MarkKey | None:
    """Return the mark that an effect changes; None if it changes none."""
    if isinstance(effect, PublishMark | WithdrawMark):
        return effect.key
    if isinstance(effect, ChangeMark | DropMark):
        return MarkKey(effect.mark.ledger_id, effect.mark.bookie)
    return None


def _space(found: BookieRegistration) -> dict[StorageHint, Space]:
    """Return the space of each tier of a bookie; all bytes are 0, unknown, with a version that does not register it."""
    return {tier: Space(free, found.capacity.get(tier, 0)) for tier, free in found.tiers.items()}

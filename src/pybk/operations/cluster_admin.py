"""``ClusterAdmin``: shows the state of a cluster, drains and removes bookies, pauses repairs, and changes settings."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from datetime import UTC, datetime
from functools import partial
from typing import TYPE_CHECKING, Any, Final, TypeVar

from pybk.backend import ReplicatedLedgers
from pybk.client.backend import ClusterBackend
from pybk.client.replica_check import check_replicas
from pybk.errors import (
    CorruptError,
    IllegalOperationError,
    MetadataForgedError,
    NoSuchBookieError,
    NoSuchLedgerError,
    PybkError,
    SafetyCheckError,
    UnsupportedFormatError,
    UsageError,
)
from pybk.healing.cluster_map import ClusterMap
from pybk.healing.rebalance import RebalancePlan, placed_fragments, plan_rebalance
from pybk.healing.scrub import ScrubStatus, status_of_notes, status_of_quick
from pybk.healing.scrub_schedule import ScrubKind
from pybk.ledger.ledger_metadata import Bookie, LedgerState
from pybk.manager.arguments import existing_id, member_of, progress_of
from pybk.manager.ledger_manager import LedgerManager, backend_of
from pybk.metadata import resealing
from pybk.metadata.ledgers import LEDGERS_PAGE
from pybk.metadata.registration import REQUESTS_SECONDS, BookieCookie, BookieState
from pybk.metadata.resealing import SecretStatus
from pybk.metadata.settings import ClusterSettings
from pybk.metadata.underreplication import RepairReason, RepairState, UnderReplicatedLedger
from pybk.operations.cluster_checks import (
    BookieStatus,
    ClusterStatus,
    Copies,
    DrainProgress,
    OrphanReport,
    RebalanceProgress,
    RebalanceStart,
    RemovalProof,
    StopCheck,
    by_urgency,
    bytes_on,
    drain_failures,
    drain_waits,
    hold_failures,
    ledgers_on,
    rebalance_candidates,
    rebalance_failures,
    rebalance_progress,
    status_with_report,
    status_without_report,
    statuses_of,
    stop_check,
    waiting_for_repair,
)
from pybk.replication.locations import PlacementPolicy
from pybk.replication.replica_check import ReplicasCheck
from pybk.spans import operation
from pybk.threads.call_threads import asyncio_form, in_thread
from pybk.values import flag_of, listed

if TYPE_CHECKING:
    from pybk.metadata.cluster import ClusterMetadata

logger = logging.getLogger(__name__)

PAUSE_SECONDS_MAX: Final = 86_400.0
"""The longest pause of repairs."""

MAINTENANCE_SECONDS_MAX: Final = 30 * 86_400.0
"""The longest maintenance of a bookie."""

LONG_OPEN_NS: Final = 7 * 86_400 * 10**9
"""The age from which on an open ledger may have been forgotten."""

RETRY_S: Final = 1.0
"""Seconds between two tries of a call that is refused for a reason that passes by itself."""

T = TypeVar("T")

_EMPTYING: Final = frozenset({BookieState.DRAINING, BookieState.DRAINED})


class ClusterAdmin:
    """The administration of a cluster.

    All calls read from the metadata store, and write to it; only ``scrub_ledger`` and ``ok_to_stop`` ask bookies. Every
    call may raise MetadataUnreachableError, and ClosedError after the manager was closed. Changes are durable on
    return.

    Args:
        manager: A manager of the cluster, by ``LedgerManager.connect`` or of a bookie; it is not closed.

    Raises:
        UsageError: The manager is that of a store, which has no bookies.

    Threads: any.
    """

    def __init__(self, manager: LedgerManager) -> None:
        if not isinstance(backend_of(manager), ReplicatedLedgers):
            raise UsageError(
                f"{manager.location} is a store, which has no bookies; ClusterAdmin takes a manager of a cluster, such "
                "as of LedgerManager.connect(url)"
            )
        self._manager = manager

    @property
    def _backend(self) -> ClusterBackend:
        backend = backend_of(self._manager)
        assert isinstance(backend, ClusterBackend)
        return backend

    @property
    def _metadata(self) -> ClusterMetadata:
        return self._backend.membership.metadata

    # ---- looking -------------------------------------------------------------------------------------------------

    def status(self) -> ClusterStatus:
        """Return the state of the cluster, with the reasons for the verdict.

        The auditor counts the ledgers. Without its report, the status says so, and counts only marked ledgers.

        Cost: Some round trips; without an auditor the metadata of all marked ledgers are read.
        """
        metadata = self._metadata
        bookies, settings = self.bookies(), metadata.read_settings()
        report = _report_of(metadata)
        if report is not None:
            return status_with_report(report, bookies, settings, time.time_ns())
        marks = list(metadata.marks())
        copies = _copies_of(metadata, bookies, marks)
        return status_without_report(copies, marks, bookies, settings, time.time_ns())

    status_async = asyncio_form(status)

    def bookies(self, *, removed: bool = False) -> tuple[BookieStatus, ...]:
        """Return the bookies that belong to the cluster, running or not, by name.

        Args:
            removed: Include those that were removed.

        Cost: Some round trips, for all bookies together.
        """
        metadata = self._metadata
        flag_of(removed, "removed")
        return tuple(statuses_of(metadata.list_cookies(removed=removed), metadata.list_bookies()))

    bookies_async = asyncio_form(bookies)

    def bookie(self, name: str) -> BookieStatus:
        """Return a bookie, running or not, even one that was removed.

        Args:
            name: The bookie.

        Raises:
            NoSuchBookieError: No bookie has this name.

        Cost: Some round trips.
        """
        return self._status_of(self._cookie(name))

    bookie_async = asyncio_form(bookie)

    # ---- the cluster's secret ----------------------------------------------------------------------------------

    def secret_status(self) -> SecretStatus:
        """Return the progress of the replacement of the cluster's secret; ``docs/reference/metadata.md`` has the steps.

        Cost: Reads every value of the metadata.
        """
        return resealing.secret_status(self._metadata)

    secret_status_async = asyncio_form(secret_status)

    def add_secret(self) -> None:
        """Make the cluster accept the new secret, which the manager was given in addition to the present one.

        A repeated call changes nothing, but makes members that lack the new secret look again for the file that has it.

        Raises:
            UsageError: The manager was not given both.
            IllegalOperationError: The cluster has no secret, has two already, or its feature level is below HEALING.
        """
        self._metadata.add_secret()

    add_secret_async = asyncio_form(add_secret)

    def switch_secret(self) -> None:
        """Make the cluster use the secret that was added last, for values that are written and for new sessions.

        The cluster knows no clients other than bookies, so the caller has to give the new secret to each of them
        before. A client that lacks it cannot read values that are written from now on, and continues once it has it. A
        repeated call changes nothing, but makes members look again for the file. ``secret_status`` counts the sessions
        of such clients.

        Raises:
            SafetyCheckError: A running bookie does not have it; nothing was changed.
            IllegalOperationError: No secret was added.
            UsageError: The manager was not given it.
        """
        resealing.switch(self._metadata)

    switch_secret_async = asyncio_form(switch_secret)

    def reseal_metadata(
        self, *, values_per_second: float = 500.0, progress: Callable[[int, int], None] | None = None
    ) -> int:
        """Give values that were written with the old secret a MAC of the new one.

        It may be stopped and repeated at any time.

        Args:
            values_per_second: The most values that are written in a second.
            progress: Called after each page with the numbers of values that were read and that were resealed.

        Returns:
            The number of values that were resealed.

        Raises:
            UsageError: ``values_per_second`` is not above 0.
            MetadataForgedError, CorruptError: A value is damaged and has to be restored first.
        """
        if not 0 < values_per_second < float("inf"):
            raise UsageError(f"values_per_second is {values_per_second!r}; it takes a finite number above 0")
        report = progress_of(progress)

        def wait(done: resealing.ResealProgress, written: int) -> None:
            report(done.looked_at, done.resealed)
            time.sleep(written / values_per_second)

        return resealing.reseal(self._metadata, wait).resealed

    reseal_metadata_async = asyncio_form(reseal_metadata)

    def retire_secret(self) -> None:
        """Make the cluster refuse the old secret, which gives no access any more. A repeated call does nothing.

        Raises:
            SafetyCheckError: A value, a bookie or a session still uses it; nothing was changed.
            IllegalOperationError: There is no old secret.

        Cost: Waits 20 seconds, and reads every value of the metadata.
        """
        resealing.retire(self._metadata, time.sleep)

    retire_secret_async = asyncio_form(retire_secret)

    # ---- draining ------------------------------------------------------------------------------------------------

    def drain(self, name: str, *, wait_s: float = 0.0) -> DrainProgress:
        """Begin to empty a bookie: it becomes read-only, and its entries are copied to others.

        A bookie that is drained already stays as it is. A bookie that does not run is drained by copies from its peers.

        Args:
            name: The bookie.
            wait_s: Seconds for which the call tries again if all failed checks will pass by themselves, as after the
                start of an auditor.

        Returns:
            The data of the bookie at the beginning.

        Raises:
            SafetyCheckError: The other bookies could not take its entries: too few are writable, their free space or
                zones do not suffice, or repairs are on hold. Its ``failures`` name each check; nothing was changed.
            IllegalOperationError: Its state allows no drain, or the cluster's feature level is below HEALING.
            NoSuchBookieError: No bookie has this name.

        Durability: The state is in the bookie's cookie on return, and outlives restarts.
        Cost: Reads the metadata of all ledgers, as ``drain_progress``.
        """
        with operation(self._backend.config.on_span, "pybk.cluster.drain", bookie=f"{name:.100}"):
            return _patiently(partial(self._drain, name), wait_s)

    def _drain(self, name: str) -> DrainProgress:
        """Begin to empty a bookie as ``drain`` does."""
        metadata = self._metadata
        cookie = self._cookie(name)
        found = _scan(metadata)
        cluster = found[0]
        if cookie.state not in _EMPTYING:
            self._check_drain(cluster, cookie.bookie)
            cookie = self._change(name, _to(BookieState.DRAINING, cookie))
            try:
                # Another drain may have begun since the check, and counted on this bookie.
                self._check_drain(cluster, cookie.bookie)
            except SafetyCheckError:
                self._change(name, _to(BookieState.ACTIVE, cookie))
                raise
        return self._progress(found, cookie)

    async def drain_async(self, name: str, *, wait_s: float = 0.0) -> DrainProgress:
        """Begin as ``drain`` does, in a thread; the event loop keeps running."""
        return await _patiently_async(partial(self.drain, name), wait_s)

    def _check_drain(self, cluster: ClusterMap, bookie: Bookie) -> None:
        metadata = self._metadata
        lasting = drain_failures(cluster, self.bookies(), bookie, metadata.read_settings())
        holds, passing = hold_failures(_report_of(metadata))
        if failures := (*lasting, *holds):
            raise SafetyCheckError(
                f"bookie {bookie.bookie_id} cannot be drained, and stays as it is: {'; '.join(failures)}",
                failures=failures,
                passing=passing and not lasting,
            )

    def cancel_drain(self, name: str) -> BookieStatus:
        """End the drain of a bookie: it takes entries again. Copies that were made stay.

        Args:
            name: The bookie; one that is active stays so.

        Raises:
            IllegalOperationError: It is in maintenance, or was removed.
            NoSuchBookieError: No bookie has this name.
        """
        self._cookie(name)

        def cancelled(found: BookieCookie) -> BookieCookie:
            if found.state is BookieState.MAINTENANCE:
                raise IllegalOperationError(f"bookie {name} is in maintenance, and not drained; end its maintenance")
            return replace(found, state=BookieState.ACTIVE)

        return self._status_of(self._change(name, cancelled))

    cancel_drain_async = asyncio_form(cancel_drain)

    def drain_progress(self, name: str) -> DrainProgress:
        """Return the data that a bookie still has, and its ledgers that cannot be copied now.

        Args:
            name: The bookie, in any state.

        Raises:
            NoSuchBookieError: No bookie has this name.

        Cost: Reads the metadata of all ledgers, 500 at a time, and all marks: about 0.1 ms and 500 bytes a ledger.
        """
        cookie = self._cookie(name)
        return self._progress(_scan(self._metadata), cookie)

    drain_progress_async = asyncio_form(drain_progress)

    def _progress(self, found: tuple[ClusterMap, list[int]], cookie: BookieCookie) -> DrainProgress:
        cluster, unreadable = found
        marks = [mark for mark in self._metadata.marks() if mark.bookie == cookie.bookie]
        waits = []
        if cookie.state in _EMPTYING:
            waits = [*self._passing(cookie, time.time_ns()), *drain_waits(cluster, cookie)]
            for ids, text in (
                ({mark.ledger_id for mark in marks}, "are marked because of it"),
                (set(unreadable), "have metadata that cannot be read"),
            ):
                if ids:
                    waits.append(f"ledgers {text}: {listed(sorted(ids))}")
        return DrainProgress(
            bookie=cookie.bookie,
            state=cookie.state,
            ledgers_left=len(ledgers_on(cluster, cookie.bookie)),
            bytes_left=sum(bytes_on(cluster, cookie.bookie).values()),
            stuck=tuple(mark for mark in marks if mark.state is not RepairState.QUEUED),
            waits=tuple(waits),
        )

    # ---- maintenance ---------------------------------------------------------------------------------------------

    def maintenance(self, name: str, seconds: float) -> BookieStatus:
        """Announce that a bookie may be absent for some time: its copies do not count as lost until then.

        Maintenance does not stop the bookie. ``ok_to_stop`` returns whether it may be stopped.

        Args:
            name: The bookie, active or in maintenance, which then gets a new end.
            seconds: The seconds from now on; at most ``MAINTENANCE_SECONDS_MAX``, which is 30 days.

        Raises:
            NoSuchBookieError: No bookie has this name.
            UsageError: The time is out of range.
            IllegalOperationError: It is being drained or was removed, or the feature level is below HEALING.
        """
        until_ns = _deadline(seconds, MAINTENANCE_SECONDS_MAX, "maintenance")
        self._cookie(name)
        changed = self._change(name, lambda found: replace(found, state=BookieState.MAINTENANCE, until_ns=until_ns))
        return self._status_of(changed)

    maintenance_async = asyncio_form(maintenance)

    def end_maintenance(self, name: str) -> BookieStatus:
        """End the maintenance of a bookie; one that is active stays so.

        Args:
            name: The bookie.

        Raises:
            IllegalOperationError: It is being drained, or was removed.
            NoSuchBookieError: No bookie has this name.
        """
        self._cookie(name)

        def ended(found: BookieCookie) -> BookieCookie:
            if found.state in _EMPTYING:
                raise IllegalOperationError(f"bookie {name} is {found.state}, and not in maintenance; cancel its drain")
            return replace(found, state=BookieState.ACTIVE, until_ns=0)

        return self._status_of(self._change(name, ended))

    end_maintenance_async = asyncio_form(end_maintenance)

    def ok_to_stop(self, *names: str) -> StopCheck:
        """Return whether bookies may be stopped, all at once: ledgers stay readable, and open ones writable.

        One sound copy of each entry must keep running, and fewer than an ack quorum cause a warning. A copy that was
        reported as missing or damaged is not sound; neither is any copy of a bookie that still has to check its losses.
        Unless its bookies report that its writer is gone, an open ledger also needs an ack quorum of each write set
        that takes its entries; or as many writable bookies as an ensemble has, from which its writer may choose others.
        Nothing is changed, so the answer holds until another bookie fails or is stopped.

        Args:
            names: The bookies.

        Raises:
            NoSuchBookieError: No bookie has one of the names.
            UsageError: No name is given.

        Cost: As ``drain_progress``, and one short request to each bookie of the open ledgers that refuse.
        """
        if not names:
            raise UsageError("ok_to_stop takes the names of one or more bookies")
        stopped = {self._cookie(name).bookie for name in names}
        metadata = self._metadata
        placement = metadata.read_settings().placement
        return stop_check(
            _scan(metadata)[0],
            self.bookies(),
            stopped,
            list(metadata.marks()),
            self._has_writer,
            policy=PlacementPolicy(placement.min_zones, placement.strict),
            in_limbo={each.bookie: each.in_limbo for each in metadata.list_bookies() if each.in_limbo},
        )

    ok_to_stop_async = asyncio_form(ok_to_stop)

    def _has_writer(self, ledger_id: int) -> bool:
        """Return whether an open ledger may have a writer: False only if its bookies deny one."""
        try:
            return self._backend.has_writer(ledger_id) is not False
        except NoSuchLedgerError:
            return False

    # ---- removing ------------------------------------------------------------------------------------------------

    def ok_to_remove(self, name: str, *, wait_s: float = 0.0) -> RemovalProof:
        """Prove that no ledger needs a bookie, which can then be removed; nothing is changed.

        Its drain must have begun ``REQUESTS_SECONDS`` ago, because requests that were sent before may still name it.
        Then two successive searches must find neither a ledger nor a mark that names it.

        Args:
            name: The bookie, which may run or not.
            wait_s: Seconds for which the call tries again if its drain began just now.

        Returns:
            The proof, which ``remove`` takes; it holds until the drain is cancelled.

        Raises:
            SafetyCheckError: It is not drained, nor being drained, or its drain began just now; or ledgers name it, of
                which up to 20 are named, or have metadata that cannot be read.
            NoSuchBookieError: No bookie has this name.

        Cost: Twice that of ``drain_progress``.
        """
        return _patiently(partial(self._prove, name), wait_s)

    def _prove(self, name: str) -> RemovalProof:
        """Prove as ``ok_to_remove`` does."""
        cookie = self._cookie(name)
        began_ns = time.time_ns()
        self._check_emptying(cookie, began_ns)
        count = 0
        for _ in range(2):
            count = self._check_unnamed(cookie.bookie, frozenset())
        if _began(self._cookie(name)) != _began(cookie):
            raise _refused(name, "its drain was cancelled during the search: drain it, and ask again")
        return RemovalProof(
            bookie=cookie.bookie,
            state=cookie.state,
            state_since_ns=cookie.state_since_ns,
            scanned_ns=began_ns,
            ledgers=count,
        )

    async def ok_to_remove_async(self, name: str, *, wait_s: float = 0.0) -> RemovalProof:
        """Prove as ``ok_to_remove`` does, in a thread; the event loop keeps running."""
        return await _patiently_async(partial(self.ok_to_remove, name), wait_s)

    def _check_emptying(self, cookie: BookieCookie, now_ns: int) -> None:
        """Raise SafetyCheckError unless a bookie has been draining or drained for long enough."""
        name = cookie.bookie.bookie_id
        if cookie.state is BookieState.REMOVED:
            raise _refused(name, "it was removed already, and nothing is left to do")
        if cookie.state not in _EMPTYING:
            raise _refused(name, f"it is {cookie.state}, so ledgers may still choose it: drain it first")
        if waits := self._passing(cookie, now_ns):
            raise _refused(name, *waits, passing=True)

    def _passing(self, cookie: BookieCookie, now_ns: int) -> list[str]:
        """Return why a bookie that is draining or drained may still be chosen, which passes by itself."""
        waits = []
        until_ns = cookie.state_since_ns + int(REQUESTS_SECONDS * 1e9)
        if now_ns < until_ns:
            until = datetime.fromtimestamp(until_ns / 1e9, UTC)
            waits.append(f"it is {cookie.state} since just now: ask again after {until:%H:%M:%S} UTC")
        if any(each.bookie == cookie.bookie and not each.read_only for each in self._metadata.list_bookies()):
            waits.append("it runs and has not become read-only yet: ask again, or look at its log")
        return waits

    def _check_unnamed(self, bookie: Bookie, accepted: frozenset[int]) -> int:
        """Search for ledgers and marks that name a bookie; return how many ledgers were searched.

        Raises:
            SafetyCheckError: One that is not accepted names it, or cannot be read.
        """
        metadata = self._metadata
        cluster, unreadable = _scan(metadata)
        naming = sorted(ledgers_on(cluster, bookie) - accepted)
        marked = sorted({mark.ledger_id for mark in metadata.marks() if mark.bookie == bookie} - accepted)
        unknown = sorted(set(unreadable) - accepted)
        failures = []
        for ids, one, more in (
            (naming, "ledger names it", "ledgers name it"),
            (marked, "ledger is marked because of it", "ledgers are marked because of it"),
            (unknown, "ledger has metadata that cannot be read", "ledgers have metadata that cannot be read"),
        ):
            if ids:
                failures.append(f"{len(ids)} {one if len(ids) == 1 else more}: {listed(ids)}")
        if failures:
            raise _refused(
                bookie.bookie_id,
                *failures,
                remedy="wait for the end of the drain, or name the ledgers whose loss is accepted",
            )
        return len(cluster)

    def remove(
        self, name: str, proof: RemovalProof | None = None, *, accept_loss: Iterable[int] | None = None
    ) -> BookieStatus:
        """Remove a bookie from the cluster for good: its directories are refused from now on.

        Args:
            name: The bookie.
            proof: The result of ``ok_to_remove``.
            accept_loss: Instead of a proof, all ledgers that still name it, whose copies on it are given up. A bookie
                that does not run may then have any state.

        Returns:
            The bookie, which is removed.

        Raises:
            SafetyCheckError: There is no proof, or it is of another instance or of an earlier drain; or ledgers that
                ``accept_loss`` does not list name the bookie. Nothing was changed.
            NoSuchBookieError: No bookie has this name.
            UsageError: Both arguments are given.

        Durability: The state is in the bookie's cookie on return.
        Cost: Some round trips with a proof; with ``accept_loss`` as ``drain_progress``.
        """
        if proof is not None and accept_loss is not None:
            raise UsageError("remove takes a proof or accept_loss, not both")
        with operation(self._backend.config.on_span, "pybk.cluster.remove", bookie=f"{name:.100}"):
            return self._remove(name, proof, accept_loss)

    remove_async = asyncio_form(remove)

    def _remove(self, name: str, proof: RemovalProof | None, accept_loss: Iterable[int] | None) -> BookieStatus:
        """Remove a bookie as ``remove`` does."""
        cookie = self._cookie(name)
        if proof is not None:
            if (proof.bookie, proof.state_since_ns) != _began(cookie):
                raise _refused(name, f"it is {cookie.state}, and the proof is of an earlier drain: ask for another one")
        elif accept_loss is None:
            raise _refused(name, "there is no proof that no ledger needs it: pass what ok_to_remove returned")
        else:
            cookie = self._give_up(cookie, _ledger_ids(accept_loss))
        if cookie.state is BookieState.DRAINING:
            cookie = self._change(name, _to(BookieState.DRAINED, cookie))
        cookie = self._change(name, _to(BookieState.REMOVED, cookie))
        logger.warning("bookie %s was removed from the cluster", cookie.bookie)
        return self._status_of(cookie)

    def _give_up(self, cookie: BookieCookie, accepted: frozenset[int]) -> BookieCookie:
        """Return the cookie of a bookie, draining or drained, that only accepted ledgers name."""
        name = cookie.bookie.bookie_id
        runs = any(each.bookie == cookie.bookie for each in self._metadata.list_bookies())
        if cookie.state not in _EMPTYING and runs:
            raise _refused(name, f"it runs and is {cookie.state}: drain it first, or stop it")
        if cookie.state in _EMPTYING:
            self._check_emptying(cookie, time.time_ns())
        self._check_unnamed(cookie.bookie, accepted)
        if cookie.state is BookieState.MAINTENANCE:
            cookie = self._change(name, _to(BookieState.ACTIVE, cookie))
        if cookie.state is BookieState.ACTIVE:
            cookie = self._change(name, _to(BookieState.DRAINING, cookie))
            if self._status_of(cookie).registered:
                self._change(name, _to(BookieState.ACTIVE, cookie))
                raise _refused(name, "it has started meanwhile: drain it first, or stop it")
        logger.warning("bookie %s is given up with its copies of ledgers %s", cookie.bookie, listed(sorted(accepted)))
        return cookie

    # ---- repairs -------------------------------------------------------------------------------------------------

    def repairs(self) -> tuple[UnderReplicatedLedger, ...]:
        """Return the marks of ledgers that wait for a repair, the most urgent first.

        They are ordered by the copies that are left, then by reason and age. Damaged marks are left out, and logged.

        Cost: Reads all marks, and the metadata of their ledgers, 500 at a time.
        """
        metadata = self._metadata
        marks = list(metadata.marks())
        return tuple(by_urgency(marks, _copies_of(metadata, self.bookies(), marks)))

    repairs_async = asyncio_form(repairs)

    def pause_repair(self, seconds: float, by: str) -> ClusterSettings:
        """Pause the repairs of the cluster for some time; they resume by themselves.

        Args:
            seconds: The seconds from now on; at most ``PAUSE_SECONDS_MAX``, which is a day.
            by: The name of the person who pauses them, which is recorded.

        Raises:
            UsageError: The time or the name is out of range.
        """
        if not by:
            raise UsageError("pause_repair takes the name of the person who pauses repairs, for others")
        until_ns = _deadline(seconds, PAUSE_SECONDS_MAX, "a pause of repairs")
        return self.change_settings(
            lambda found: replace(found, repair=replace(found.repair, paused_until_ns=until_ns, paused_by=by)), by
        )

    pause_repair_async = asyncio_form(pause_repair)

    def resume_repair(self, accept_loss_of: Iterable[str] = (), by: str = "") -> ClusterSettings:
        """End a pause of the repairs, and accept the loss of bookies, which then no longer holds repairs.

        Args:
            accept_loss_of: Names of bookies that do not run; added to ``repair.accepted_losses``. Names there of
                bookies that run again are removed, because their next failure is another loss.
            by: The name of the person who resumes them, which is recorded.

        Raises:
            NoSuchBookieError: No bookie has one of the names; nothing was changed.
            UsageError: One of them runs; nothing was changed.
        """
        names = (accept_loss_of,) if isinstance(accept_loss_of, str) else tuple(accept_loss_of)
        for name in names:
            self._cookie(name)
        running = {each.bookie.bookie_id for each in self._metadata.list_bookies()}
        if wrong := sorted(running.intersection(names)):
            raise UsageError(f"there is no loss to accept of a bookie that runs: leave out {listed(wrong)}")

        def resumed(found: ClusterSettings) -> ClusterSettings:
            earlier = [name for name in found.repair.accepted_losses if name not in running]
            accepted = tuple(dict.fromkeys((*earlier, *names)))
            repair = replace(found.repair, paused_until_ns=0, paused_by="", accepted_losses=accepted)
            return replace(found, repair=repair)

        return self.change_settings(resumed, by)

    resume_repair_async = asyncio_form(resume_repair)

    def withdraw_losses(self, names: Iterable[str], by: str = "") -> ClusterSettings:
        """Withdraw the acceptance of the loss of bookies: their absence can hold repairs again.

        Args:
            names: Names among ``repair.accepted_losses``.
            by: The name of the person who withdraws them, which is recorded.

        Raises:
            UsageError: The loss of one of them is not accepted; nothing was changed.
        """
        given = (names,) if isinstance(names, str) else tuple(names)

        def withdrawn(found: ClusterSettings) -> ClusterSettings:
            accepted = found.repair.accepted_losses
            if wrong := sorted(set(given) - set(accepted)):
                shown = listed(accepted) or "that of none"
                raise UsageError(f"the loss of {listed(wrong)} is not accepted; accepted is {shown}")
            left = tuple(each for each in accepted if each not in given)
            return replace(found, repair=replace(found.repair, accepted_losses=left))

        return self.change_settings(withdrawn, by)

    withdraw_losses_async = asyncio_form(withdraw_losses)

    # ---- scrubs --------------------------------------------------------------------------------------------------

    def scrub(self, kind: ScrubKind = ScrubKind.DEEP, by: str = "") -> ClusterSettings:
        """Ask all bookies, including those that do not run now, to check their stored entries at once; returns at once.

        Bookies check at ``scrub.bytes_per_second``, and copy damaged entries from their peers. ``scrub_status`` shows
        their progress.

        Args:
            kind: ``DEEP``: the checksum of each record. ``LIGHT``: the index against the files. ``QUICK``: the auditor
                reads a few entries of each replica.
            by: The name of the person who asks, which is recorded.

        Raises:
            UsageError: ``kind`` or ``by`` is not valid.

        Durability: The request is among the settings of the cluster on return.
        """
        wanted = f"{member_of(ScrubKind, kind, 'kind')}_asked_ns"

        def asked(found: ClusterSettings) -> ClusterSettings:
            later_ns = max(time.time_ns(), getattr(found.scrub, wanted) + 1)  # whatever the clock of the last person
            return replace(found, scrub=replace(found.scrub, **{wanted: later_ns}))

        return self.change_settings(asked, by)

    scrub_async = asyncio_form(scrub)

    def scrub_status(self) -> tuple[ScrubStatus, ...]:
        """Return the progress of the checks of each bookie, by name, and then of the quick audits of the auditor.

        Bookies look for requests and note their progress once a minute. A request that a bookie has not noted yet
        counts as not begun.

        Cost: One round trip for each bookie.
        """
        metadata = self._metadata
        scrub = metadata.read_settings().scrub
        asked_ns = {kind: int(getattr(scrub, f"{kind}_asked_ns")) for kind in ScrubKind}
        bookies = [
            status_of_notes(each.bookie.bookie_id, _noted(partial(metadata.read_scrub, each.bookie)), asked_ns)
            for each in self.bookies()
        ]
        return (*bookies, status_of_quick(_noted(metadata.read_quick_audit), asked_ns))

    scrub_status_async = asyncio_form(scrub_status)

    def scrub_ledger(self, ledger_id: int) -> ReplicasCheck:
        """Read all entries of a ledger from each of its bookies now, which check their checksums.

        Nothing is marked or repaired, because one denial proves nothing: the entries may be under way. ``scrub`` makes
        the bookies repair damaged entries, and ``LedgerManager.replicate`` copies missing ones.

        Args:
            ledger_id: The ledger. The fragment of an open ledger that has no end yet is left out.

        Returns:
            The faults of each bookie's copies.

        Raises:
            NoSuchLedgerError: The ledger was never created, or was deleted.

        Cost: Reads each copy of each entry, at the rate at which bookies answer reads for copies.
        """
        return check_replicas(self._backend, existing_id(ledger_id))

    scrub_ledger_async = asyncio_form(scrub_ledger)

    # ---- rebalance -----------------------------------------------------------------------------------------------

    def plan_rebalance(self) -> RebalancePlan:
        """Plan which copies of closed ledgers would move from full bookies to empty ones; nothing is changed.

        A plan moves at most 5 % of the bytes of all copies, and at most 1000 copies. Its aim is that bookies differ by
        at most 10 % of their capacity from the cluster's fullness. If some still differ by more afterwards, plan again.

        Returns:
            The plan, with each bookie's fullness before, during and after it. ``refused`` has the reason if nothing is
            planned: a ledger waits for a repair, repairs are held or paused, no auditor has looked, or a rebalance is
            under way.

        Cost: Reads the metadata of all ledgers, as ``drain_progress``.
        """
        metadata = self._metadata
        settings, report, marks = metadata.read_settings(), _report_of(metadata), list(metadata.marks())
        cluster, _ = _scan(metadata)
        return plan_rebalance(
            placed_fragments(cluster),
            rebalance_candidates(self.bookies(), report),
            PlacementPolicy(settings.placement.min_zones, settings.placement.strict),
            held=rebalance_failures(report, marks, settings, time.time_ns()),
            short=waiting_for_repair(marks),
        )

    plan_rebalance_async = asyncio_form(plan_rebalance)

    def apply_rebalance(self, plan: RebalancePlan) -> RebalanceStart:
        """Begin the moves of a plan: each is marked, and the worker of its target copies when nothing is more urgent.

        A move changes the metadata once its copy is complete, so no entry has fewer copies meanwhile. Moves are
        paced by ``repair.background_bytes_per_second``, and wait while repairs are held or paused.

        Args:
            plan: The result of ``plan_rebalance``. Moves of ledgers whose metadata have changed since are left out.

        Returns:
            The number of moves that began, and of those that were left out.

        Raises:
            SafetyCheckError: The plan was refused, or would be now; nothing was changed.

        Durability: The marks are durable on return. If the call fails, some marks may exist.
        Cost: Reads the metadata of the plan's ledgers, and writes two values for each move.
        """
        metadata = self._metadata
        settings, report, marks = metadata.read_settings(), _report_of(metadata), list(metadata.marks())
        failures = list(plan.refused) or rebalance_failures(report, marks, settings, time.time_ns())
        if waiting := sorted(waiting_for_repair(marks)):
            failures.append(f"ledgers wait for repairs: {listed(waiting)}")
        if failures:
            raise SafetyCheckError(f"no copy is moved: {'; '.join(failures)}", failures=tuple(failures))
        moves = skipped = 0
        for begin in range(0, len(plan.moves), LEDGERS_PAGE):
            page = plan.moves[begin : begin + LEDGERS_PAGE]
            for move, version in zip(page, metadata.ledger_versions([each.ledger_id for each in page]), strict=True):
                if version != move.version:
                    skipped += 1
                    continue
                metadata.mark_under_replicated(
                    move.ledger_id,
                    move.source,
                    move.first_entry_id,
                    reason=RepairReason.REBALANCE,
                    size_bytes=move.size_bytes,
                    target=move.target.bookie_id,
                )
                moves += 1
        return RebalanceStart(moves, skipped)

    apply_rebalance_async = asyncio_form(apply_rebalance)

    def rebalance_progress(self) -> RebalanceProgress:
        """Return the moves of a rebalance that are left, and those that do not proceed.

        Cost: Reads all marks.
        """
        return rebalance_progress(list(self._metadata.marks()), self.bookies())

    rebalance_progress_async = asyncio_form(rebalance_progress)

    def abort_rebalance(self) -> int:
        """End a rebalance, at any moment: no further move begins. Copies that were moved stay where they are.

        Returns:
            The number of moves that were left. Some of them may be under way, and either complete or have no effect.

        Cost: Reads all marks, and changes those of the moves.
        """
        metadata = self._metadata
        marks = [mark for mark in metadata.marks() if RepairReason.REBALANCE in mark.causes_by_reason()]
        for mark in marks:
            metadata.withdraw_mark(mark.ledger_id, mark.bookie, {RepairReason.REBALANCE})
        return len(marks)

    abort_rebalance_async = asyncio_form(abort_rebalance)

    # ---- orphans -------------------------------------------------------------------------------------------------

    def orphans(self) -> OrphanReport:
        """Return data that belong to no ledger, or may have been forgotten; nothing is changed or deleted.

        Raises:
            CorruptError, MetadataForgedError, UnsupportedFormatError: The record of a bookie cannot be used.

        Cost: Reads the metadata of all ledgers and all marks, as ``drain_progress``.
        """
        metadata = self._metadata
        marks, cluster, long_open = list(metadata.marks()), ClusterMap(), list[int]()
        before_ns = time.time_ns() - LONG_OPEN_NS
        for stored in metadata.sound_ledgers():
            found = stored.metadata
            cluster.apply(found.ledger_id, found, stored.version)
            is_open = found.state is not LedgerState.CLOSED and len(found.fragments) == 1
            if is_open and found.creation_time_ns < before_ns:
                long_open.append(found.ledger_id)
        copies = Copies(cluster, {each.bookie for each in self.bookies() if each.registered}, marks)
        marked = sorted({mark.ledger_id for mark in marks if mark.ledger_id not in cluster})
        proofs = metadata.deletion_proofs(marked)
        return OrphanReport(
            tuple(metadata.list_orphans()),
            tuple(sorted(each for each in cluster if copies.fewest(each) == 0)),
            tuple(long_open),
            tuple(each for each, proof in zip(marked, proofs, strict=True) if proof is not None),
        )

    orphans_async = asyncio_form(orphans)

    # ---- settings ------------------------------------------------------------------------------------------------

    def settings(self) -> ClusterSettings:
        """Return the settings of the cluster.

        Raises:
            MetadataForgedError, CorruptError: They were not written with the cluster's secret, or are damaged.
        """
        return self._metadata.read_settings()

    settings_async = asyncio_form(settings)

    def change_settings(self, change: Callable[[ClusterSettings], ClusterSettings], by: str = "") -> ClusterSettings:
        """Change the settings of the cluster; all members follow. Equal settings are not written.

        Args:
            change: Returns the new settings for the present ones. It may be called more than once, because others may
                change them meanwhile.
            by: The name of the person who changes them, which is recorded.

        Returns:
            The settings now.

        Raises:
            UsageError: A value is out of range.
            MetadataForgedError, CorruptError: As ``settings``; nothing was written.
        """
        return self._metadata.change_settings(change, by=by)

    change_settings_async = asyncio_form(change_settings)

    # ---- cookies -------------------------------------------------------------------------------------------------

    def _cookie(self, name: str) -> BookieCookie:
        """Return the cookie of a bookie; raises NoSuchBookieError, which names the bookies, if there is none."""
        found = self._metadata.read_cookie(name)
        if found is None:
            names = listed([cookie.bookie.bookie_id for cookie in self._metadata.list_cookies()]) or "none"
            raise NoSuchBookieError(f"no bookie of {self._manager.location} is called {name!r:.100}; there are {names}")
        return found

    def _change(self, name: str, change: Callable[[BookieCookie], BookieCookie]) -> BookieCookie:
        return self._metadata.change_cookie(name, change)

    def _status_of(self, cookie: BookieCookie) -> BookieStatus:
        return statuses_of([cookie], self._metadata.list_bookies())[0]


def _to(state: BookieState, expected: BookieCookie) -> Callable[[BookieCookie], BookieCookie]:
    """Return a change to another state, of a cookie whose state is still the expected one; a drain may have ended."""

    def changed(found: BookieCookie) -> BookieCookie:
        if _began(found) != _began(expected):
            raise _refused(found.bookie.bookie_id, f"it has become {found.state} meanwhile: look at it again")
        return replace(found, state=state, until_ns=0)

    return changed


def _began(cookie: BookieCookie) -> tuple[Bookie, int]:
    """Return what distinguishes the state of a bookie from earlier ones; the end of a drain begins no other one."""
    return cookie.bookie, cookie.state_since_ns


def _refused(name: str, *failures: str, remedy: str = "", passing: bool = False) -> SafetyCheckError:
    text = "; ".join((*failures, *([remedy] if remedy else [])))
    return SafetyCheckError(f"bookie {name} stays as it is: {text}", failures=failures, passing=passing)


def _patiently(call: Callable[[], T], wait_s: float) -> T:
    """Return what a call returns, made again for so many seconds while it is refused for what passes by itself."""
    until = time.monotonic() + wait_s
    while True:
        try:
            return call()
        except SafetyCheckError as error:
            if not error.passing or time.monotonic() >= until:
                raise
        time.sleep(RETRY_S)


async def _patiently_async(call: Callable[[], T], wait_s: float) -> T:
    """Call as ``_patiently`` does, each time in a thread, which the pauses do not hold."""
    until = time.monotonic() + wait_s
    while True:
        try:
            return await in_thread(call)
        except SafetyCheckError as error:
            if not error.passing or time.monotonic() >= until:
                raise
        await asyncio.sleep(RETRY_S)


def _deadline(seconds: Any, most: float, what: str) -> int:
    """Return when a time that begins now ends, in nanoseconds since 1970."""
    if isinstance(seconds, bool) or not isinstance(seconds, int | float) or not 0 < seconds <= most:
        raise UsageError(f"{what} lasts {seconds!r:.50} s; it takes a number above 0, at most {most:.0f}")
    return time.time_ns() + int(seconds * 1e9)


def _ledger_ids(ids: Iterable[Any]) -> frozenset[int]:
    found = frozenset(ids)
    for each in found:
        if type(each) is not int or each < 0:
            raise UsageError(f"accept_loss names {each!r:.50}; it takes ids of ledgers")
    return found


# ---- reading -------------------------------------------------------------------------------------------------------


def _noted(read: Callable[[], dict[str, Any] | None]) -> dict[str, Any] | None:
    """Return notes; None if there are none, or they cannot be used."""
    try:
        return read()
    except (CorruptError, MetadataForgedError, UnsupportedFormatError) as error:
        logger.warning("notes of checks cannot be used: %s", error)
        return None


def _report_of(metadata: ClusterMetadata) -> dict[str, Any] | None:
    """Return what the auditor reports; None without an auditor, or if its report cannot be used."""
    try:
        return metadata.read_auditor_report()
    except (CorruptError, MetadataForgedError, UnsupportedFormatError) as error:
        logger.warning("the auditor's report cannot be used: %s", error)
        return None


def _scan(metadata: ClusterMetadata) -> tuple[ClusterMap, list[int]]:
    """Read the metadata of all ledgers; return them, and the ledgers whose metadata cannot be read."""
    cluster = ClusterMap()
    unreadable: list[int] = []
    for ids in metadata.id_pages():
        unreadable += _read_into(cluster, metadata, ids)
    return cluster, unreadable


def _read_into(cluster: ClusterMap, metadata: ClusterMetadata, ids: list[int]) -> list[int]:
    """Read the metadata of some ledgers into a map; return those that cannot be read."""
    unreadable: list[int] = []

    def damaged(ledger_id: int, error: PybkError) -> None:
        logger.warning("ledger %d cannot be examined: %s", ledger_id, error)
        unreadable.append(ledger_id)

    for ledger_id, stored in zip(ids, metadata.read_ledgers(ids, damaged=damaged), strict=True):
        if stored is not None:
            cluster.apply(ledger_id, stored.metadata, stored.version)
    return unreadable


def _copies_of(
    metadata: ClusterMetadata, bookies: Iterable[BookieStatus], marks: list[UnderReplicatedLedger]
) -> Copies:
    """Return the copies of the ledgers that are marked."""
    cluster = ClusterMap()
    ids = sorted({mark.ledger_id for mark in marks})
    for begin in range(0, len(ids), LEDGERS_PAGE):
        _read_into(cluster, metadata, ids[begin : begin + LEDGERS_PAGE])
    return Copies(cluster, {each.bookie for each in bookies if each.registered}, marks)

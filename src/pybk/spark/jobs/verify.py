"""Check of every entry of every replica on executors, and repair of the replicas that are damaged or incomplete.

Theory of operation: the driver lists the ledgers and cuts each fragment on each bookie into units of about 64 MiB
(``planned``). Executors check units independently (``_check``), and the driver merges the results of the units of each
replica. Three things can change meanwhile. A deleted ledger is left out. A ledger whose ensemble changed is planned and
checked once more, and reported in ``left`` if its ensemble changed again. The last fragment of an open ledger grows:
entries that a bookie does not have yet are ``late``. They are a problem only if more bookies lack an entry than the ack
quorum allows (``mark_short``). At the end, the driver checks the seals and lengths of whole ledgers, from the metadata
and from the lengths that each unit reports.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np

from pybk.client.backend import ClusterBackend
from pybk.client.remote_ledger import RemoteLedger
from pybk.client.replica_check import check_replica
from pybk.credentials import NO_CREDENTIALS, Credentials, CredentialSources, Passwords, Secret, known_credentials
from pybk.errors import (
    CorruptError,
    DigestMismatchError,
    NoSuchLedgerError,
    PybkError,
    SealMismatchError,
    UnauthorizedError,
    UsageError,
)
from pybk.ledger.digest import DigestType, entry_digest
from pybk.ledger.ledger_check import LengthCheck, SealState, check_last, check_seal, contradictions, digest_with
from pybk.ledger.ledger_metadata import Bookie
from pybk.manager.local_backend import StoreBackend
from pybk.replication.fragments import fragment_end, fragment_of, fragment_ranges
from pybk.replication.replica_check import Span, joined
from pybk.spark.connection import Connection, StoreOrCluster, connection
from pybk.spark.jobs.ledgers import StoreOrUrl, end_of, existing, seal_for, selected_ledgers, where_of
from pybk.spark.jobs.spreading import spread
from pybk.values import flag_of

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from pybk.backend import Replicated
    from pybk.credentials import Secret
    from pybk.ledger.digest import EntryDigest
    from pybk.ledger.keys import LedgerSeal
    from pybk.ledger.ledger_metadata import LedgerMetadata

_UNIT_BYTES: Final = 64 << 20
"""Approximate bytes of a unit, the part of a replica that one check reads."""

_BATCH_BYTES: Final = 8 << 20

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class CheckedReplica:
    """The result of checking one bookie's part of a fragment, or the single copy of a store's ledger.

    Attributes:
        ledger_id: The ledger.
        first_entry_id: The first entry of the fragment.
        last_entry_id: The last entry that was checked.
        bookie: The bookie; None for a store.
        growing: Whether the ledger's writer may still be sending entries; missing entries are then a problem only if
            ``short``.
        short: Whether more bookies deny one of the missing entries than the ack quorum allows for a confirmed entry.
        entries: The number of sound entries, whose bytes are those that the writer made.
        bytes: The encoded bytes of the sound entries.
        missing: Entries that the bookie denies.
        damaged: Entries whose bytes differ from those that were written.
        unknown: Entries that the bookie neither returns nor denies: it cannot read them, or may have lost them in a
            crash.
        silent: Whether the bookie does not answer; the state of entries that are not counted is then not known.
        authenticated: Whether digests were checked; False if the password is missing or wrong, and only the bookie's
            own checksums were checked.
        marks: Some entry ids, each with the ledger's length up to that entry, as the entry states it.
        contradicting: Errors in the lengths that entries state, or in the last entry of a sealed ledger.
    """

    ledger_id: int
    first_entry_id: int
    last_entry_id: int
    bookie: Bookie | None
    growing: bool = False
    short: bool = False
    entries: int = 0
    bytes: int = 0
    missing: tuple[Span, ...] = ()
    damaged: tuple[Span, ...] = ()
    unknown: tuple[Span, ...] = ()
    silent: bool = False
    authenticated: bool = True
    marks: tuple[tuple[int, int], ...] = ()
    contradicting: tuple[str, ...] = ()

    @property
    def sound(self) -> bool:
        """True if the replica's entries are complete and unchanged; their lengths are checked per ledger."""
        late = self.growing and not self.short
        return (late or not self.missing) and not (self.damaged or self.unknown or self.silent)


@dataclass(frozen=True, slots=True)
class VerifiedLedgers:
    """The result of a verification.

    Attributes:
        ledgers: The number of ledgers that were checked.
        replicas: The number of replicas that were checked; a replica is one bookie's part of a fragment.
        entries: The number of sound entries, counted once per replica.
        bytes: Their encoded bytes.
        problems: The replicas that are not sound, after the repair if one was requested.
        repaired: The number of replicas that the repair made sound.
        not_opened: Ids of ledgers whose password is not the one given; their replicas were checked by the bookies' own
            checksums alone.
        unauthenticated: Ids of ledgers for which no password was given; checked in the same way.
        unread: Ids of ledgers that are not closed and for which no password was given; only their ended fragments were
            checked.
        late: The number of entries of open ledgers that bookies do not have yet, counted once per replica; enough
            bookies have each of them to confirm it.
        left: Descriptions of ledgers and replicas that could not be checked or repaired, with the reasons.
        ledger_problems: Ids of ledgers, each with an error of the ledger as a whole: its seal, its kind or its lengths.
        unsealed: Ids of closed ledgers without a seal, whose end is not proven.
        seals_unchecked: Ids of sealed ledgers whose password was not given or is wrong.
    """

    ledgers: int
    replicas: int
    entries: int
    bytes: int
    problems: tuple[CheckedReplica, ...] = ()
    repaired: int = 0
    not_opened: tuple[int, ...] = ()
    unauthenticated: tuple[int, ...] = ()
    unread: tuple[int, ...] = ()
    late: int = 0
    left: tuple[str, ...] = ()
    ledger_problems: tuple[tuple[int, str], ...] = ()
    unsealed: tuple[int, ...] = ()
    seals_unchecked: tuple[int, ...] = ()

    @property
    def sound(self) -> bool:
        """True if no error was found."""
        return not (self.problems or self.ledger_problems or self.not_opened or self.left)

    @property
    def complete(self) -> bool:
        """True if everything could be checked."""
        unchecked = self.not_opened or self.unauthenticated or self.unread or self.unsealed or self.seals_unchecked
        return not (unchecked or self.left)

    @property
    def unreachable(self) -> tuple[str, ...]:
        """The names of the bookies that do not answer."""
        return tuple(sorted({str(each.bookie) for each in self.problems if each.silent}))


class _CheckUnit(NamedTuple):
    """Entries of one replica that one call of ``_check`` checks."""

    ledger_id: int
    fragment: int
    place: int
    bookie: Bookie | None
    first: int
    last: int
    entry_bytes: int
    growing: bool


def verify(
    spark: SparkSession,
    where: StoreOrUrl,
    *,
    cluster_secret: bytes | Secret | None = None,
    password: bytes | Secret | None = None,
    secret: bytes | Secret | None = None,
    passwords: Passwords | None = None,
    ledgers: Iterable[int] | None = None,
    ledger_type: str | None = None,
    repair: bool = False,
    quiet: bool = False,
) -> VerifiedLedgers:
    """Read and check every entry on every bookie that should have it, and check each ledger's lengths and seal.

    Args:
        spark: The session whose executors read.
        where: A store's directory, which may be open for writing; or a cluster's metadata URL.
        cluster_secret: The secret of the cluster.
        password: The password of the HMAC_SHA256 ledgers; None stands for the empty one. Ledgers with another password
            are checked by the bookies' own checksums, and are ``not_opened`` if a password was given. The password is
            read on the driver and sent to executors with the tasks.
        secret: The secret of the ledgers that were created with one; likewise.
        passwords: The passwords, in place of ``password`` and ``secret``, if ledgers have different ones. A wrong
            password that is given for a ledger's id is a problem.
        ledgers: Ids of the ledgers to check; None for all.
        ledger_type: Check only ledgers of this type.
        repair: Repair replicas that are not sound from sound ones, and check them again.
        quiet: Do not show progress.

    Returns:
        The result. An open ledger is checked up to its last add confirmed; without its password, only its ended
        fragments are checked.

    Raises:
        NoSuchLedgerError: A ledger of ``ledgers`` does not exist.
        UsageError: A repair of a store was requested; a store has only one copy of each entry.
        PybkError: The store or cluster cannot be opened.

    Cost: Reads every replica once. A repair sends whole fragments. The driver checks the seals in about 0.1 ms per
        ledger, and keeps at most two numbers per MiB of a replica.
    """
    place = where_of(where, cluster_secret)
    if flag_of(repair, "repair") and place.path is not None:
        raise UsageError(
            f"{place} is a store, which has only one copy of each entry, so it cannot be repaired: restore a backup"
        )
    known = passwords or _passwords_of(password, secret)
    left: list[str] = []
    unread: list[int] = []
    wanted = selected_ledgers(place, ledgers, ledger_type, system=ledger_type is None)
    units = planned(place, known, wanted, left, unread)
    found = checked(spark, place, known, units, left, quiet)
    bad = [each for each in found if not each.sound]
    repaired = 0
    if repair and bad:
        ledgers_then = {each.ledger_id for each in bad}
        again, could_not = _repaired(spark, place, known, bad, quiet)
        found = [each for each in found if each.ledger_id not in ledgers_then] + again
        before, bad = len(bad), [each for each in again if not each.sound]
        repaired = max(0, before - len(bad))
        left += could_not
    verified = _verified(place, known, wanted, found)
    return replace(
        verified,
        problems=tuple(bad),
        repaired=repaired,
        unread=tuple(sorted(set(unread))),
        left=tuple(dict.fromkeys(left)),
    )


def _verified(
    place: StoreOrCluster, known: Passwords, wanted: Sequence[LedgerMetadata], found: Sequence[CheckedReplica]
) -> VerifiedLedgers:
    """Return the result for ledgers from the results of their replicas and from their metadata."""
    sealing = _sealing(connection(place), known, wanted)
    unchecked = {each.ledger_id for each in found if not each.authenticated} - {each for each, _ in sealing.problems}
    plain = [each for each in wanted if each.ledger_id in unchecked]
    given = {each.ledger_id for each in plain if known.of(each.ledger_id, str(each.ledger_type)) is not None}
    return VerifiedLedgers(
        ledgers=len(wanted),
        replicas=len(found),
        entries=sum(each.entries for each in found),
        bytes=sum(each.bytes for each in found),
        not_opened=tuple(sorted(given)),
        unauthenticated=tuple(sorted(unchecked - given)),
        late=sum(span.entries for each in found if each.sound for span in each.missing),
        ledger_problems=tuple(sorted({*sealing.problems, *_contradictions(wanted, found)})),
        unsealed=tuple(sealing.unsealed),
        seals_unchecked=tuple(sealing.unchecked),
    )


# ---- ledgers as a whole ------------------------------------------------------------------------------------------


class _SealFindings(NamedTuple):
    """The results of checking seals: ledgers with errors, without a seal, and with a seal that was not checked."""

    problems: list[tuple[int, str]]
    unsealed: list[int]
    unchecked: list[int]


def _sealing(found: Connection, passwords: Passwords, wanted: Iterable[LedgerMetadata]) -> _SealFindings:
    """Return the results of checking the seals of ledgers against their metadata."""
    sealing = _SealFindings([], [], [])
    for metadata in wanted:
        try:
            state = check_seal(metadata, seal_for(found, metadata, passwords))
        except SealMismatchError as error:
            sealing.problems.append((metadata.ledger_id, str(error)))
            continue
        if state is SealState.UNSEALED:
            sealing.unsealed.append(metadata.ledger_id)
        elif state is SealState.UNCHECKED:
            sealing.unchecked.append(metadata.ledger_id)
    return sealing


def _contradictions(wanted: Iterable[LedgerMetadata], found: Iterable[CheckedReplica]) -> Iterator[tuple[int, str]]:
    """Yield ledger ids, each with a contradiction among the lengths that replicas and metadata state."""
    marks: dict[int, set[tuple[int, int]]] = {}
    for each in found:
        marks.setdefault(each.ledger_id, set()).update(each.marks)
        yield from ((each.ledger_id, text) for text in each.contradicting)
    for metadata in wanted:
        if metadata.ledger_id in marks:
            yield from ((metadata.ledger_id, text) for text in contradictions(metadata, marks[metadata.ledger_id]))


def _passwords_of(password: bytes | Secret | None, secret: bytes | Secret | None) -> Passwords:
    given = CredentialSources.of(password, secret).read()
    return Passwords(given.password or (None if password is None else b""), secret=given.secret)


# ---- planning ----------------------------------------------------------------------------------------------------


def planned(
    where: StoreOrCluster,
    passwords: Passwords,
    wanted: Sequence[LedgerMetadata],
    left: list[str],
    unread: list[int] | None = None,
) -> list[_CheckUnit]:
    """Return the units to check; add ledgers whose end cannot be found to ``left`` or ``unread``."""
    found = connection(where)
    units: list[_CheckUnit] = []
    for metadata in wanted:
        try:
            if found.metadata is None:
                units += _units_of_store(found, metadata)
            else:
                given = known_credentials(passwords, metadata.ledger_id, str(metadata.ledger_type), metadata.key_kind)
                units += _units_of(metadata, *_end(found, metadata, given, left, unread))
        except NoSuchLedgerError:
            continue
        except PybkError as error:
            left.append(f"ledger {metadata.ledger_id}: {error}")
    return units


def _end(
    found: Connection, metadata: LedgerMetadata, given: Credentials | None, left: list[str], unread: list[int] | None
) -> tuple[int, int]:
    """Return the last entry of a ledger that can be checked, and the approximate bytes up to it, 0 if not known."""
    try:
        return end_of(found, metadata, given or NO_CREDENTIALS)
    except NoSuchLedgerError:
        raise
    except PybkError as error:
        if not isinstance(error, UnauthorizedError):
            left.append(f"ledger {metadata.ledger_id}: its last add confirmed cannot be read: {error}")
        elif given is not None:
            left.append(f"ledger {metadata.ledger_id} is {metadata.state.value}, and the password is wrong")
        elif unread is not None:
            unread.append(metadata.ledger_id)
        ended = fragment_end(metadata, len(metadata.fragments) - 2) if len(metadata.fragments) > 1 else None
        return (-1 if ended is None else ended), 0


def _units_of(metadata: LedgerMetadata, last: int, length: int) -> list[_CheckUnit]:
    """Cut a ledger's replicas into units; consecutive units are on different bookies, so that all bookies have work."""
    units = []
    entry_bytes = _entry_bytes(last, length)
    step = max(1, _UNIT_BYTES // entry_bytes)
    for number, (fragment, low, high) in enumerate(fragment_ranges(metadata.fragments, 0, last)):
        growing = fragment_end(metadata, number) is None
        units += [
            _CheckUnit(metadata.ledger_id, low, place, bookie, first, min(first + step - 1, high), entry_bytes, growing)
            for first in range(low, high + 1, step)
            for place, bookie in enumerate(fragment.ensemble)
        ]
    return units


def _units_of_store(found: Connection, metadata: LedgerMetadata) -> list[_CheckUnit]:
    """Cut a store's ledger into units."""
    descriptor = found.backend.descriptor(metadata.ledger_id)
    last = descriptor.last_add_confirmed
    entry_bytes = _entry_bytes(last, descriptor.length_durable)
    step = max(1, _UNIT_BYTES // entry_bytes)
    return [
        _CheckUnit(metadata.ledger_id, 0, 0, None, first, min(first + step - 1, last), entry_bytes, False)
        for first in range(0, last + 1, step)
    ]


def _entry_bytes(last: int, length: int) -> int:
    return length // (last + 1) + 64 if last >= 0 else 64


# ---- checking ----------------------------------------------------------------------------------------------------


def checked(
    spark: SparkSession,
    where: StoreOrCluster,
    passwords: Passwords,
    units: Sequence[_CheckUnit],
    left: list[str],
    quiet: bool,
) -> list[CheckedReplica]:
    """Check units on executors, and return the result of each replica."""
    parts, moved = _parts(spark, where, passwords, units, quiet)
    if moved:  # ensembles changed meanwhile, so bookies of units were replaced
        wanted = existing(connection(where), moved)
        again, still = _parts(spark, where, passwords, planned(where, passwords, wanted, left), quiet)
        parts = {name: pieces for name, pieces in parts.items() if name[0] not in moved} | again
        changing = existing(connection(where), still)
        left += [f"ledger {each.ledger_id}: its bookies changed during the check: check it again" for each in changing]
    whole = [_merged(pieces) for pieces in parts.values()]
    late = existing(connection(where), {each.ledger_id for each in whole if each.growing and each.missing})
    whole = mark_short(whole, {each.ledger_id: each.write_quorum - each.ack_quorum for each in late})
    there = {each.ledger_id for each in existing(connection(where), (r.ledger_id for r in whole if not r.sound))}
    return [each for each in whole if each.sound or each.ledger_id in there]


def _parts(
    spark: SparkSession, where: StoreOrCluster, passwords: Passwords, units: Sequence[_CheckUnit], quiet: bool
) -> tuple[dict[tuple[int, int, Bookie | None], list[CheckedReplica]], set[int]]:
    """Check units on executors.

    Returns:
        The results by ledger, fragment and bookie; and the ids of ledgers that were deleted, or some of whose bookies
        were replaced meanwhile.
    """
    sizes = [(unit.last - unit.first + 1) * unit.entry_bytes for unit in units]
    # The tasks carry the passwords, so these do not appear in settings, plans, event logs or pages.
    work = partial(_check, where, passwords)
    found = spread(spark, work, units, sizes=sizes, what=f"pybk: verify {where}", quiet=quiet)
    parts: dict[tuple[int, int, Bookie | None], list[CheckedReplica]] = {}
    moved = set()
    for unit, part in zip(units, found, strict=True):
        if part is None:
            moved.add(unit.ledger_id)
        else:
            parts.setdefault((unit.ledger_id, unit.fragment, unit.bookie), []).append(part)
    return parts, moved


def _merged(pieces: Sequence[CheckedReplica]) -> CheckedReplica:
    """Return the result of one replica from the results of its units."""
    return replace(
        pieces[0],
        last_entry_id=max(piece.last_entry_id for piece in pieces),
        entries=sum(piece.entries for piece in pieces),
        bytes=sum(piece.bytes for piece in pieces),
        missing=joined(span for piece in pieces for span in piece.missing),
        damaged=joined(span for piece in pieces for span in piece.damaged),
        unknown=joined(span for piece in pieces for span in piece.unknown),
        silent=any(piece.silent for piece in pieces),
        authenticated=all(piece.authenticated for piece in pieces),
        marks=tuple(mark for piece in pieces for mark in piece.marks),
        contradicting=tuple(text for piece in pieces for text in piece.contradicting),
    )


def mark_short(replicas: Sequence[CheckedReplica], spare: Mapping[int, int]) -> list[CheckedReplica]:
    """Return the replicas, with ``short`` set on those that lack an entry which too many bookies deny.

    Args:
        replicas: The results of checking.
        spare: The number of bookies that may lack a confirmed entry while its writer is sending, by ledger.
    """
    groups: dict[tuple[int, int], list[CheckedReplica]] = {}
    for each in replicas:
        if each.growing and each.missing and each.ledger_id in spare:
            groups.setdefault((each.ledger_id, each.first_entry_id), []).append(each)
    short = set()
    for group in groups.values():
        low = min(span.first for each in group for span in each.missing)
        high = max(span.last for each in group for span in each.missing)
        denied = np.zeros(high - low + 1, np.uint8)
        cuts = [
            (each, slice(span.first - low, span.last - low + 1, span.step)) for each in group for span in each.missing
        ]
        for _, cut in cuts:
            denied[cut] += 1
        short |= {each for each, cut in cuts if (denied[cut] > spare[each.ledger_id]).any()}
    return [replace(each, short=True) if each in short else each for each in replicas]


def _check(where: StoreOrCluster, passwords: Passwords, unit: _CheckUnit) -> CheckedReplica | None:
    """Check one unit; runs in an executor. Returns None if the ledger was deleted or the bookie replaced meanwhile."""
    found = connection(where)
    backend = found.backend
    try:
        if isinstance(backend, ClusterBackend):
            return _check_replica(found, backend, passwords, unit)
        assert isinstance(backend, StoreBackend), "ledgers live in a cluster or a store"
        return _check_store(found, backend, passwords, unit)
    except NoSuchLedgerError:
        return None


def _seal_of(found: Connection, metadata: LedgerMetadata, passwords: Passwords) -> LedgerSeal | None:
    """Return the verifier of a ledger's entries and seal; None if there is none, or if the driver reports its seal."""
    try:
        return seal_for(found, metadata, passwords)
    except SealMismatchError:
        return None


def _contradicting(metadata: LedgerMetadata, seal: LedgerSeal | None, lengths: LengthCheck) -> tuple[str, ...]:
    """Return the errors in lengths that entries state, and in the last entry of a sealed ledger."""
    found = list(lengths.problems)
    if metadata.sealed and seal is not None and lengths.last is not None:
        try:
            check_last(metadata, lengths.last)
        except SealMismatchError as error:
            found.append(str(error))
    return tuple(found)


def _check_replica(
    found: Connection, backend: ClusterBackend, passwords: Passwords, unit: _CheckUnit
) -> CheckedReplica | None:
    """Check the entries of a unit on its bookie; None if that bookie was replaced meanwhile."""
    stored = backend.membership.metadata.read_ledger(unit.ledger_id)
    if fragment_of(stored.metadata.fragments, unit.first).ensemble[unit.place] != unit.bookie:
        return None
    seal = _seal_of(found, stored.metadata, passwords)
    digest = digest_with(seal, stored.metadata, unit.ledger_id)
    ledger = RemoteLedger(*stored, backend.membership.metadata.describe(stored.metadata))
    audited = check_replica(
        backend.driver, ledger, unit.place, unit.first, unit.last, digest=digest, entry_bytes=unit.entry_bytes
    )
    return CheckedReplica(
        unit.ledger_id,
        unit.fragment,
        unit.last,
        unit.bookie,
        growing=unit.growing,
        entries=audited.entries,
        bytes=audited.bytes,
        missing=audited.machine.missing,
        damaged=audited.machine.damaged,
        unknown=audited.machine.unknown,
        silent=audited.machine.silent,
        authenticated=digest is not None,
        marks=audited.lengths.marks(),
        contradicting=_contradicting(stored.metadata, seal, audited.lengths),
    )


def _check_store(found: Connection, backend: StoreBackend, passwords: Passwords, unit: _CheckUnit) -> CheckedReplica:
    """Check the entries of a unit of a store; a batch with damage is read again in smaller pieces."""
    backend.catch_up()
    descriptor = backend.descriptor(unit.ledger_id)
    metadata = descriptor.metadata
    seal = _seal_of(found, metadata, passwords)
    digest = digest_with(seal, metadata, unit.ledger_id)
    lengths = LengthCheck(metadata)
    # Without a digest the store checks the records, and here only the ids in the entries' headers are checked.
    checks: EntryDigest = digest or entry_digest(DigestType.NONE, unit.ledger_id)
    at, most = unit.first, _BATCH_BYTES
    entries = size = 0
    damaged: list[Span] = []
    while at <= unit.last:
        last = unit.last if most > 1 else at
        try:
            batch = backend.store.read_batch(descriptor, at, last, most, digest_bytes=checks.size, direct=False)
            checks.check_many(batch)
        except (CorruptError, DigestMismatchError) as error:
            if most > 1:
                most = max(1, most // 64)
                continue
            logger.warning("%s", error)
            damaged.append(Span(at, at, 1))
            at += 1
        else:
            lengths.add(batch, 1)
            entries += len(batch)
            size += int(batch.sizes.sum())
            at = int(batch.entry_ids[-1]) + 1
            most = min(_BATCH_BYTES, most * 8)
    return CheckedReplica(
        unit.ledger_id,
        unit.fragment,
        unit.last,
        None,
        entries=entries,
        bytes=size,
        damaged=joined(damaged),
        authenticated=digest is not None,
        marks=lengths.marks(),
        contradicting=_contradicting(metadata, seal, lengths),
    )


# ---- repairing ---------------------------------------------------------------------------------------------------


def _repaired(
    spark: SparkSession, where: StoreOrCluster, passwords: Passwords, bad: Sequence[CheckedReplica], quiet: bool
) -> tuple[list[CheckedReplica], list[str]]:
    """Re-replicate the ledgers of replicas that are not sound, and check them again.

    Returns:
        The new results of their replicas, and descriptions of what could not be repaired.
    """
    here = connection(where)
    assert here.metadata is not None, "only a cluster's replicas are repaired"
    for each in bad:
        if each.bookie is not None and not each.silent and not each.growing:
            here.metadata.mark_under_replicated(each.ledger_id, each.bookie, each.first_entry_id)
    before = existing(here, (each.ledger_id for each in bad))
    ledgers, sizes = [each.ledger_id for each in before], [each.length for each in before]
    done = spread(spark, partial(_replicate, where), ledgers, sizes=sizes, what=f"pybk: repair {where}", quiet=quiet)
    left = [reason for replicated in filter(None, done) for reason in replicated.left]
    wanted = existing(here, ledgers)
    return checked(spark, where, passwords, planned(where, passwords, wanted, left), left, quiet), left


def _replicate(where: StoreOrCluster, ledger_id: int) -> Replicated | None:
    """Re-replicate a ledger; runs in an executor. Returns None if it was deleted meanwhile."""
    try:
        return connection(where).manager.replicate(ledger_id)
    except NoSuchLedgerError:
        return None

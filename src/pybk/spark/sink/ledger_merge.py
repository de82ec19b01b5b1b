"""Merges small ledgers of a sink into few, large ones, while queries write and read them.

``pybk.spark.sink.manifest`` explains what a merge is. Here are the choice of the ledgers, which is that of segments of
a log, and the copies. A copy has the entries of committed ledgers in the order of their commits, under new ids, and the
kind, quorums and password of all of them. Copies are named in rounds, each by one compare-and-set, so a run that is
interrupted has done all rounds but one.
"""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from itertools import groupby
from operator import attrgetter
from typing import TYPE_CHECKING, Final, NamedTuple

from pybk.credentials import Credentials, KeyKind
from pybk.errors import (
    IllegalOperationError,
    LedgerRecoveryError,
    NoSuchLedgerError,
    PybkError,
    UnauthorizedError,
)
from pybk.feature_level import FeatureLevel
from pybk.ledger.digest import DigestType
from pybk.ledger.ledger_metadata import LedgerState
from pybk.manager.ledger_manager import backend_of
from pybk.metadata.ledgers import LEDGERS_PAGE
from pybk.spark.places import MERGED_KEY, of_member
from pybk.spark.sink.sink_record import LedgerMerge, ManifestRow, is_one_off
from pybk.streams.log_settings import RollPolicy
from pybk.streams.segment_merge import KEPT_MERGES_MAX, groups_worth_merging

if TYPE_CHECKING:
    from pybk.ledger.ledger_metadata import LedgerMetadata
    from pybk.manager.append_future import AppendFuture
    from pybk.manager.ledger_manager import LedgerManager
    from pybk.manager.ledger_writer import LedgerWriter
    from pybk.metadata.cluster import ClusterMetadata
    from pybk.spark.sink.manifest import Sink

MEMBERS_MAX: Final = 1 << 14
"""Members of a merged ledger; a reader of one of its rows reads the names of all."""

ROUND_BYTES: Final = 4 << 30
"""The payload bytes of the copies that are named together, unless a single one has more."""

ROUND_MEMBERS: Final = 100_000
"""Likewise the number of their members, so that many small ledgers are not copied for hours before any is named."""

_BATCH_BYTES: Final = 4 << 20


class MergedLedgers(NamedTuple):
    """The result of merging ledgers of a sink.

    Attributes:
        ledgers: The number of ledgers that were written.
        replaced: The number of ledgers in place of which the sink has them.
        entries: The number of their entries.
        nbytes: Payload bytes of these ledgers.
        left: The number of ledgers that have the entries of the sink afterwards, but for those committed meanwhile.
        stay: Ledgers that earlier merges have replaced and that could not be deleted, each with the reason.
        failed: The reason why later rounds of copies were not made; empty if all were.
    """

    ledgers: int
    replaced: int
    entries: int
    nbytes: int
    left: int
    stay: tuple[tuple[int, str], ...] = ()
    failed: str = ""


class MergePlan(NamedTuple):
    """One merge that is to be made; it can be pickled.

    Attributes:
        members: The committed ledgers, in the order of their commits.
    """

    members: tuple[ManifestRow, ...]

    @property
    def nbytes(self) -> int:
        """Payload bytes of the members."""
        return sum(row.payload_bytes for row in self.members)


Copies = Callable[[Sequence[MergePlan]], Iterable[LedgerMerge | None]]
"""Makes the copy of each plan as ``copied`` does, in their order."""


def merge_ledgers(
    sink: Sink, manager: LedgerManager, policy: RollPolicy, keep_s: float, copies: Copies, kind: str | None = None
) -> MergedLedgers:
    """Merge small ledgers of a sink, and delete what earlier merges have replaced and whose time is over.

    Args:
        sink: The sink.
        manager: The ledgers of its cluster.
        policy: The limits of a merged ledger.
        keep_s: Seconds for which the ledgers that it replaces are kept.
        copies: Makes the copies.
        kind: Merge only ledgers of this type; None for all.

    Raises:
        IllegalOperationError: The feature level does not have merges, or another process merges ledgers of the sink.
        PybkError: As the metadata store and ledgers, before any merge was made. Later ones end the call, which returns
            what was made.

    Durability: Merges are durable on return.
    Bounds: The replaced ledgers of ``KEPT_MERGES_MAX`` merges are kept at a time; what else is worth it is left for a
        later call.
    """
    if manager.feature_level < FeatureLevel.STREAMS:
        raise IllegalOperationError(
            f"sink {sink.app_id!r} merges no ledgers below the feature level STREAMS; raise the level: `pybk cluster "
            "upgrade URL --finalize`"
        )
    made: list[LedgerMerge] = []
    failed = ""
    with _locked(sink, manager):
        stay = sink.release_replaced(time.time_ns()).stay
        rows = sink.rows()
        if not is_one_off(sink.app_id):  # its record, which has no manifest, names few
            # The record names the merges whose old ledgers are kept, and needs space for commits.
            space = max(0, KEPT_MERGES_MAX - len(sink.record().replaced))
            for plans in _rounds(plans_of(sink.metadata, rows, policy, kind)[:space]):
                try:
                    made += sink.merge([each for each in copies(plans) if each is not None], keep_s)
                except PybkError as error:
                    if not made:
                        raise
                    failed = str(error)  # the caller reports it with what was made
                    break
    replaced = sum(len({row.stored_in for row in each.members}) for each in made)
    return MergedLedgers(
        len(made),
        replaced,
        sum(row.entries for each in made for row in each.members),
        sum(row.payload_bytes for each in made for row in each.members),
        len({row.stored_in for row in rows}) + len(made) - replaced,
        tuple(stay.items()),
        failed,
    )


@contextmanager
def _locked(sink: Sink, manager: LedgerManager) -> Iterator[None]:
    """Keep other processes from merging ledgers of the sink."""
    backend = backend_of(manager)
    # An app id may be longer than the name of a lock.
    name = f"sink-merge.{hashlib.sha256(sink.app_id.encode()).hexdigest()}"
    lock = backend.try_lock(name, f"{os.uname().nodename}, process {os.getpid()}")
    if lock is None:
        raise IllegalOperationError(
            f"ledgers of sink {sink.app_id!r} are being merged ({backend.lock_owner(name)}); wait for the end of that"
        )
    try:
        yield
    finally:
        lock.release()


# ---- the ledgers to merge --------------------------------------------------------------------------------------------


class _Part(NamedTuple):
    """A ledger that has entries of a sink, and the members that they belong to: itself, or those of a merge."""

    rows: tuple[ManifestRow, ...]
    kind: Hashable
    """The properties that ledgers of one merge share; None for one that is not merged."""

    @property
    def nbytes(self) -> int:
        """Payload bytes."""
        return sum(row.payload_bytes for row in self.rows)


def plans_of(
    metadata: ClusterMetadata, rows: Sequence[ManifestRow], policy: RollPolicy, kind: str | None = None
) -> list[MergePlan]:
    """Return the merges that are worth it, each of consecutive ledgers within the limits of a merged one.

    As for segments of logs, a ledger is merged only with others that have two thirds of its bytes in all.

    Args:
        metadata: The metadata of the cluster.
        rows: The committed ledgers of a sink.
        policy: The limits.
        kind: Merge only ledgers of this type; None for all.

    Cost: Reads the metadata of the ledgers that are smaller than a merged one may be.
    """
    parts = [tuple(found) for _, found in groupby(rows, key=attrgetter("stored_in"))]
    small = [found[0].stored_in for found in parts if sum(row.payload_bytes for row in found) < policy.nbytes]
    kinds: dict[int, Hashable] = {}
    for at in range(0, len(small), LEDGERS_PAGE):
        for each in metadata.read_sound_ledgers(small[at : at + LEDGERS_PAGE]):
            found = each.metadata
            if found.state is LedgerState.CLOSED and kind in (None, str(found.ledger_type)):
                kinds[found.ledger_id] = _kind_of(found)
    # A manifest of an older version has no creation times, which a member needs.
    known = [
        _Part(found, kinds.get(found[0].stored_in) if all(row.created_ns for row in found) else None) for found in parts
    ]
    groups = groups_worth_merging(tuple(known), partial(_reach, policy=policy))
    return [MergePlan(tuple(row for part in group for row in part.rows)) for group in groups]


def _kind_of(metadata: LedgerMetadata) -> Hashable:
    """Return what ledgers have in common that may be merged."""
    custom = of_member(metadata, metadata.ledger_id).custom_metadata
    return (
        str(metadata.ledger_type),
        metadata.storage_hints,
        metadata.digest_type,
        metadata.write_flags,
        metadata.key_kind,
        (metadata.ensemble_size, metadata.write_quorum, metadata.ack_quorum),
        tuple(sorted(custom.items())),
    )


def _reach(parts: Sequence[_Part], low: int, policy: RollPolicy) -> int:
    """Return the index after the last ledger that can be merged with one and with all between them."""
    first = parts[low]
    nbytes = entries = members = 0
    for high in range(low, len(parts)):
        part = parts[high]
        nbytes += part.nbytes
        entries += sum(row.entries for row in part.rows)
        members += len(part.rows)
        age_s = (part.rows[-1].created_ns - first.rows[0].created_ns) / 1e9
        fits = nbytes <= policy.nbytes and entries <= policy.records and age_s <= policy.age_s
        fits = fits and members <= MEMBERS_MAX
        if high > low and not (fits and part.kind is not None and part.kind == first.kind):
            return high
    return len(parts)


def _rounds(plans: Sequence[MergePlan]) -> Iterator[list[MergePlan]]:
    """Yield plans in groups that are copied and named together."""
    group: list[MergePlan] = []
    nbytes = members = 0
    for plan in plans:
        if group and (nbytes + plan.nbytes > ROUND_BYTES or members + len(plan.members) > ROUND_MEMBERS):
            yield group
            group, nbytes, members = [], 0, 0
        group.append(plan)
        nbytes += plan.nbytes
        members += len(plan.members)
    if group:
        yield group


# ---- copying ---------------------------------------------------------------------------------------------------------


def copied(manager: LedgerManager, given: Credentials, plan: MergePlan) -> LedgerMerge | None:
    """Copy the entries of committed ledgers into one ledger, which nothing names yet.

    Returns:
        The merge; None if a ledger was deleted meanwhile.

    Raises:
        UnauthorizedError: The ledgers have another password.
        LedgerRecoveryError: The copy does not have as many entries and bytes as the ledgers.
        PybkError: As the ledgers. What was written is deleted if that is possible, and is an orphan otherwise.

    Durability: All entries are durable on return, and the ledger is closed.
    """
    writer: LedgerWriter | None = None
    try:
        first = manager.ledger_metadata(plan.members[0].stored_in)
        if not manager.check_password(first, given.password, secret=given.secret):
            raise UnauthorizedError(f"ledger {first.ledger_id} has another password or secret; give that")
        writer = _new_ledger(manager, given, first, len(plan.members))
        pending: AppendFuture[range] | None = None
        for run in _runs(plan.members):
            pending = _append_entries(manager, given, run, writer)
        if pending is not None:
            pending.result()
        writer.close()
        _check_complete(plan, writer)
    except BaseException as error:
        if writer is not None:
            with suppress(PybkError):
                manager.delete_ledger(writer.ledger_id, password=given.password, secret=given.secret)
        if isinstance(error, NoSuchLedgerError):
            return None
        raise
    return LedgerMerge(writer.ledger_id, writer.metadata.creation_time_ns, plan.members)


def _new_ledger(manager: LedgerManager, given: Credentials, like: LedgerMetadata, members: int) -> LedgerWriter:
    """Create the ledger of a merge, of the kind of one of the ledgers that it replaces."""
    value = given.of(like.key_kind) or b""
    is_secret = like.key_kind is KeyKind.SECRET
    custom = {**of_member(like, like.ledger_id).custom_metadata, MERGED_KEY: b"%d" % members}
    return manager.create_ledger(
        password=b"" if is_secret else value,
        secret=value if is_secret else None,
        ledger_type=str(like.ledger_type),
        storage_hints=like.storage_hints,
        write_flags=like.write_flags,
        digest_type=like.digest_type,
        insecure=like.digest_type is DigestType.NONE or not value,
        custom_metadata=custom,
        ensemble_size=like.ensemble_size,
        write_quorum=like.write_quorum,
        ack_quorum=like.ack_quorum,
    )


class _Run(NamedTuple):
    """Entries that follow each other in one ledger."""

    ledger_id: int
    first: int
    end: int


def _runs(rows: Iterable[ManifestRow]) -> Iterator[_Run]:
    """Yield the entries of committed ledgers, in their order."""
    run: _Run | None = None
    for row in rows:
        if run is not None and row.holder == run.ledger_id and row.first == run.end:
            run = run._replace(end=run.end + row.entries)
            continue
        if run is not None:
            yield run
        run = _Run(row.stored_in, row.first, row.first + row.entries)
    if run is not None:
        yield run


def _append_entries(
    manager: LedgerManager, given: Credentials, run: _Run, writer: LedgerWriter
) -> AppendFuture[range] | None:
    """Append entries of another ledger; return the future of the last append."""
    at, pending = run.first, None
    with manager.open_ledger(run.ledger_id, password=given.password, secret=given.secret, recover=False) as reader:
        while at < run.end:
            batch = reader.read_batch(at, max_bytes=_BATCH_BYTES, last=run.end - 1)
            pending = writer.append_many_async([entry.payload for entry in batch])
            at += len(batch)
    return pending


def _check_complete(plan: MergePlan, writer: LedgerWriter) -> None:
    """Raise LedgerRecoveryError unless a copy has the entries and bytes of its members."""
    wanted = sum(row.entries for row in plan.members), plan.nbytes
    found = writer.last_add_confirmed + 1, writer.length
    if found != wanted:
        raise LedgerRecoveryError(
            f"ledger {writer.ledger_id}, made from {len(plan.members)} ledgers, has {found[0]} entries of {found[1]} "
            f"bytes instead of {wanted[0]} of {wanted[1]}: the entries that were read are incomplete"
        )

"""The check that the metadata store is not older than the bookie has seen it, and the effects of a new epoch.

A start refuses a store that was put back to an older state (``check_age``), and records that in the store, so all other
processes that connect refuse it as well. While the bookie runs, ``AgeWatch`` raises the epoch's ticks and checks the
epoch. What is recognised, and what is not, is in ``docs/reference/metadata.md``.

A higher epoch number means that a person restored or rebuilt the metadata (``adopt_epoch``). Earlier writers may still
be alive, and the ensembles in the metadata may differ from theirs. So each ledger that is not closed is fenced. If not
every bookie's directory was read, all ledgers go into limbo, because an ensemble may lack the bookies that have the
entries, and a denial of this bookie would count.
"""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING, Final

from pybk.bookie.directory_identity import SeenEpoch
from pybk.bookie.startup import put_all_in_limbo
from pybk.flags import WriteFlag
from pybk.ledger.ledger_metadata import LedgerState
from pybk.metadata.epochs import MetadataEpoch, outdated
from pybk.metadata.ledgers import LEDGERS_PAGE
from pybk.metadata.registration import BookieState
from pybk.values import listed

if TYPE_CHECKING:
    from collections.abc import Callable

    from pybk.bookie.replicas import Replicas
    from pybk.errors import MetadataOutdatedError
    from pybk.ledger.ledger_metadata import Bookie
    from pybk.metadata.cluster import ClusterMetadata

logger = logging.getLogger(__name__)

GROW_SECONDS: Final = 600.0
"""The time for which the epoch's ticks may stay the same while a bookie runs."""

_NAMED_MAX: Final = 5
"""Ledgers that an error names; the rest is counted."""


def check_age(replicas: Replicas, metadata: ClusterMetadata) -> MetadataEpoch | None:
    """Check that the metadata store is at least as new as what the bookie has seen, and raise the epoch's ticks.

    Call it first. ``Replicas.record_start`` stores an epoch without effects in the directory.

    Returns:
        The epoch, for ``adopt_epoch``; None if the directory is another cluster's, or another instance has its name.

    Raises:
        MetadataOutdatedError: The store was put back to an older state. That is recorded in the store as well.

    Cost: Three reads and a write of the metadata store, and one pipelined read for each of the bookie's newest extents.
    """
    identity, seen = replicas.identity, replicas.seen
    member = False
    if identity is not None:
        if identity.cluster_id != metadata.cluster_id:
            return None
        cookie = metadata.read_cookie(identity.bookie_id)
        if cookie is not None and cookie.bookie.instance != identity.instance:
            return None
        member = cookie is not None and cookie.state is not BookieState.REMOVED  # or its ledgers may be gone for good
    found = metadata.read_epoch()
    if seen is not None:
        reason = _why_older(replicas, found, seen.epoch)
        if reason is None and member and found is not None and found.number == seen.epoch.number:
            reason = _why_incomplete(replicas, metadata, seen.first)
        if reason is not None:
            raise _noted(metadata, reason)
    epoch = metadata.grow_epoch()
    if seen is not None and seen.epoch.number == epoch.number:
        replicas.seen = seen._replace(epoch=epoch)
    elif not epoch.number:
        replicas.seen = SeenEpoch(epoch, replicas.store.new_ledger_id())
    return epoch


def _why_older(replicas: Replicas, epoch: MetadataEpoch | None, seen: MetadataEpoch) -> str | None:
    if epoch is None:
        return f"it has no epoch, and {_name(replicas)} has seen {seen}"
    if epoch.age < seen.age:
        return f"its epoch is {epoch}, and {_name(replicas)} has seen {seen}"
    return None


def _name(replicas: Replicas) -> str:
    identity = replicas.identity
    assert identity is not None, "it has seen an epoch, so it was started"
    return f"bookie {identity.bookie_id}"


def _noted(metadata: ClusterMetadata, reason: str) -> MetadataOutdatedError:
    """Record in the store that it is outdated, and return the error."""
    metadata.note_outdated(reason)
    return outdated(reason)


def _why_incomplete(replicas: Replicas, metadata: ClusterMetadata, first: int) -> str | None:
    """Return why the store is older than the newest extents, from an id of the bookie's store on; None if it is not.

    A client writes a ledger's metadata before the first entry, and a deletion leaves a tombstone. When that is folded,
    the id is known as that of a deleted ledger (DT3), which this directory may have if it was put back.
    """
    ids = sorted({ledger_id for number, ledger_id in replicas.newest if number >= first})
    suspects = [each for each, version in zip(ids, metadata.ledger_versions(ids), strict=True) if version is None]
    # Reads of many keys may be stale; a tombstone or a ledger that is there now counts.
    missing = [each for each in suspects if metadata.is_unheard_of(each)]
    if not missing:
        return None
    named = listed(missing, _NAMED_MAX)
    return f"{_name(replicas)} has entries of {len(missing)} ledgers that it never heard of ({named})"


def adopt_epoch(
    replicas: Replicas, metadata: ClusterMetadata, bookie: Bookie, epoch: MetadataEpoch, *, lost: bool
) -> None:
    """Apply the effects of a new epoch, and then store it in the directory.

    Call it after the start was recorded, and before the bookie answers any request.

    Args:
        replicas: The open directory.
        metadata: The cluster's metadata.
        bookie: The bookie.
        epoch: The result of ``check_age``.
        lost: Whether this start put all ledgers in limbo already, because the directory lost data.

    Durability: Fences, limbo and, after them, the epoch are durable on return.
    """
    seen = replicas.seen
    if seen is not None and lost and seen.liftable:
        seen = seen._replace(liftable=False)
        replicas.note_seen(seen)
    if seen is not None and seen.epoch.number == epoch.number:
        return
    first = replicas.store.new_ledger_id()
    liftable = _begin(replicas, metadata, bookie, epoch, seen) if epoch.number else False
    replicas.note_seen(SeenEpoch(epoch, first, liftable))


def _begin(
    replicas: Replicas, metadata: ClusterMetadata, bookie: Bookie, epoch: MetadataEpoch, seen: SeenEpoch | None
) -> bool:
    """Fence what is not closed, and begin or end limbo; return whether the limbo is due to restored metadata alone."""
    known = replicas.ledgers()
    if not known:
        return False
    logger.warning("bookie %s: the cluster's metadata were restored or rebuilt (epoch %s)", bookie, epoch)
    closed: dict[int, bool] = {}
    for at in range(0, len(known), LEDGERS_PAGE):
        page = known[at : at + LEDGERS_PAGE]
        for ledger_id, found in zip(page, metadata.read_ledgers(page, damaged=_log_damaged), strict=True):
            closed[ledger_id] = found is not None and found.metadata.state is LedgerState.CLOSED
            if not closed[ledger_id]:
                replicas.fence(ledger_id, None)
    liftable = seen is not None and seen.liftable
    if not epoch.limbo:
        for ledger_id in replicas.in_limbo() if liftable else ():
            if not _is_deferred(replicas, ledger_id):  # whose limbo may have begun with a crash
                replicas.end_limbo(ledger_id, closed=closed.get(ledger_id, False))
        return False
    liftable = liftable or not replicas.in_limbo()
    losses = ["the cluster's metadata were restored without a look at every bookie's directory"]
    put_all_in_limbo(replicas, metadata, bookie, losses)
    return liftable


def _is_deferred(replicas: Replicas, ledger_id: int) -> bool:
    state = replicas.state(ledger_id)
    return state is None or state.header is None or bool(state.header.write_flags & WriteFlag.DEFERRED_FORCE)


def _log_damaged(ledger_id: int, error: Exception) -> None:
    logger.warning("ledger %d is fenced, because its metadata is damaged: %s", ledger_id, error)


class AgeWatch:
    """Watches the epoch while the bookie runs. Threads: one.

    Args:
        metadata: The cluster's metadata.
        replicas: The open directory, after ``adopt_epoch``.
        keep: Stores the epoch that was seen in the directory; may return before that is done.

    Attributes:
        error: The error if the store was put back to an older state; None otherwise.
    """

    def __init__(self, metadata: ClusterMetadata, replicas: Replicas, keep: Callable[[SeenEpoch], None]) -> None:
        assert replicas.seen is not None, "the start adopted an epoch"
        self._metadata = metadata
        self._seen = replicas.seen
        self._keep = keep
        self._grow_at = time.monotonic() + GROW_SECONDS
        self.error: MetadataOutdatedError | None = None

    def look(self) -> bool:
        """Compare the epoch with the highest one seen; raise its ticks if that is due.

        Returns:
            Whether the store was put back to an older state. That is recorded in the store as well.

        Raises:
            MetadataUnreachableError: The store did not answer.
        """
        epoch = self._metadata.read_epoch()
        seen = self._seen.epoch
        if epoch is None or epoch.age < seen.age:
            self.error = _noted(self._metadata, f"its epoch is {epoch}, and a running bookie has seen {seen}")
            return True
        if epoch.number != seen.number:
            return False  # restored by choice while this bookie runs: its next start does what that asks for
        if epoch.ticks == seen.ticks and time.monotonic() >= self._grow_at:
            epoch = self._metadata.grow_epoch()
        if epoch.ticks != seen.ticks:
            self._grow_at = time.monotonic() + GROW_SECONDS
            self._seen = self._seen._replace(epoch=epoch)
            self._keep(self._seen)
        return False

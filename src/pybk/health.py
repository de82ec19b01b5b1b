"""The health of a manager: its states, and every rule that decides which one holds.

To add a state, add it to ``HealthState`` and return it from the rule below that can see the condition. The Prometheus
exporter shows all states in ``HEALTH_STATES``.

| backend | rule | input |
|---|---|---|
| a live store | ``store_health`` | ``Log.error``, ``Log.refusal``, free space, ``Store.troubles`` |
| a read-only store | ``read_only_store_health`` | none |
| a bookie | ``bookie_health`` | its store's health, whether its thread runs, ledgers in limbo |
| a cluster's client without a bookie | ``client_health`` | the registered bookies |

Where several states apply, the worse one is returned: ``failed``, ``read_only``, ``in_limbo``, ``degraded``, ``ok``.
A part of the store that works around a failure and retries reports it in ``Store.troubles``
(``pybk.storage.troubles``), and removes it once the retry succeeds.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final, Literal, get_args

if TYPE_CHECKING:
    from pybk.ledger import Bookie
    from pybk.storage.readonly import ReadOnlyStore
    from pybk.storage.store import Store

HealthState = Literal["ok", "degraded", "in_limbo", "read_only", "failed"]
"""What ``Health.state`` may be; ``Health`` explains each."""

HEALTH_STATES: Final[tuple[HealthState, ...]] = get_args(HealthState)
"""All states, each worse than those before it."""


@dataclass(frozen=True, slots=True)
class Health:
    """The health of a manager at one moment.

    Attributes:
        state: ``"ok"``; ``"degraded"`` (all calls work, and ``troubles`` says what failed and is retried);
            ``"in_limbo"`` (a bookie that ended by accident copies back from its peers what it may have lost);
            ``"read_only"`` (opened read-only, or short of space); or ``"failed"`` (close it and open it again).
        reason: The reason for a state other than ``"ok"``; empty for ``"ok"``.
        outstanding_bytes: Bytes appended and not durable yet.
        tail_bytes: Bytes of log that the next open would replay.
        free_bytes: Free bytes by directory.
        troubles: Failures and refusals that are being retried, one text each. None of them affects durable entries.
    """

    state: HealthState
    reason: str
    outstanding_bytes: int
    tail_bytes: int
    free_bytes: Mapping[str, int]
    troubles: tuple[str, ...] = ()


def store_health(store: Store) -> Health:
    """Return the health of a live store; reads the free space of each directory."""
    state: HealthState = "ok"
    reason = ""
    troubles = store.troubles.all()
    refusal = store.log.refusal
    if refusal is not None:
        troubles = (f"appending: {refusal}", *troubles)
    if store.log.error is not None:
        state, reason = "failed", str(store.log.error)
    elif store.scheduler.full is not None:
        state, reason = "read_only", store.scheduler.full
    elif troubles:
        state, reason = "degraded", troubles[0]
    return Health(state, reason, store.log.outstanding_bytes, store.tail_bytes, _free_bytes(store), troubles)


def read_only_store_health(store: ReadOnlyStore) -> Health:
    """Return the health of a store that is open read-only."""
    return Health("read_only", "opened read-only", 0, 0, _free_bytes(store))


def _free_bytes(store: Store | ReadOnlyStore) -> dict[str, int]:
    return {directory.path: store.fs.free_bytes(directory.path) for directory in store.volumes.directories}


def bookie_health(
    store: Store, bookie: Bookie, error: BaseException | None, in_limbo: Callable[[], Sequence[int]]
) -> Health:
    """Return the health of a bookie.

    Args:
        store: The bookie's store.
        bookie: The bookie, for the reason.
        error: The error that ended the bookie's thread, None while it serves.
        in_limbo: Returns the ledgers in limbo; called only if nothing worse is found.
    """
    health = store_health(store)
    if error is not None:
        return replace(health, state="failed", reason=f"bookie {bookie} serves no more: {error!r}")
    limbo = in_limbo() if health.state in ("ok", "degraded") else ()
    if not limbo:
        return health
    reason = f"{len(limbo)} ledgers are in limbo until bookie {bookie} has got back what it may lack of them"
    return replace(health, state="in_limbo", reason=reason)


def client_health(where: str, bookies: int, outstanding_bytes: int) -> Health:
    """Return the health of a cluster's client that is not a bookie.

    Args:
        where: The name of the metadata store in the reason.
        bookies: The number of registered bookies.
        outstanding_bytes: Bytes appended and not acknowledged by an ack quorum yet.
    """
    if bookies:
        return Health("ok", "", outstanding_bytes, 0, {})
    return Health("failed", f"no bookie is registered at {where}", outstanding_bytes, 0, {})

"""Finds values whose MAC was made with an old secret of the cluster, and gives them a MAC of the current one.

A value that is resealed keeps its payload and its token, and names the version since which it has them. So a writer
that has read it before can still change it (``authenticated_values``). Leased keys are not resealed, because the
holders of the leases write them again by themselves. The pages are small, because the metadata of a cluster may not fit
in memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Final, NamedTuple

from pybk.errors import MetadataVersionError, SafetyCheckError
from pybk.metadata import authenticated_values
from pybk.metadata.auditor_records import AUDITOR_KEY, REPORT_KEY
from pybk.metadata.authenticated_values import (
    VALUE_FORMAT_BASE,
    decode_authenticated,
    encode_authenticated,
    epoch_of,
    token_of,
    unchanged_since,
)
from pybk.metadata.cluster import CLUSTER_KEY, ClusterMetadata
from pybk.metadata.deletions import DELETION_HEAD_KEY, DELETION_POSITIONS_KEY, DELETIONS_KEY
from pybk.metadata.durable_positions import POSITIONS_KEY
from pybk.metadata.epochs import EPOCH_KEY, OUTDATED_KEY
from pybk.metadata.ledgers import IDS_KEY, LEDGERS_KEY, leaves_after
from pybk.metadata.locks import LOCKS_KEY
from pybk.metadata.lost_answers import settle
from pybk.metadata.metadata_keys import MetadataKeys
from pybk.metadata.orphan_records import ORPHANS_KEY
from pybk.metadata.pointers import POINTERS_KEY
from pybk.metadata.registration import BOOKIES_KEY, COOKIES_KEY
from pybk.metadata.scrub_records import QUICK_KEY, SCRUB_KEY
from pybk.metadata.settings import SETTINGS_KEY
from pybk.metadata.store import MetadataStore, Node
from pybk.metadata.underreplication import NEWS_KEY, UNDER_REPLICATED_KEY

PAGE: Final = 500
"""Values that are read at a time."""

_LEASED: Final = {BOOKIES_KEY: 1, LOCKS_KEY: 1, REPORT_KEY: 0, ORPHANS_KEY: 1}
"""The number of levels below a key where its leased values are."""

_SINGLE: Final = (
    *(IDS_KEY, NEWS_KEY, SETTINGS_KEY, DELETION_HEAD_KEY, AUDITOR_KEY, EPOCH_KEY, OUTDATED_KEY, QUICK_KEY),
)
_BRANCHES: Final = {
    COOKIES_KEY: 1,
    POSITIONS_KEY: 1,
    POINTERS_KEY: 2,
    DELETIONS_KEY: 1,
    DELETION_POSITIONS_KEY: 1,
    SCRUB_KEY: 1,
    ORPHANS_KEY: 1,
}
"""The number of levels below a key where its values are."""


class ResealProgress(NamedTuple):
    """The progress of resealing.

    Attributes:
        looked_at: Values that were read.
        resealed: Values that got the MAC of the current secret.
    """

    looked_at: int
    resealed: int


@dataclass(frozen=True, slots=True)
class SecretStatus:
    """The progress of the replacement of a cluster's secret.

    Attributes:
        current: The epoch of the secret that is in use: 0 for the first one, and one more for each later one.
        valid: The epochs of the secrets that are accepted.
        retired: The epochs of the secrets that were retired.
        lacking: Names of running bookies that do not have the newest secret yet.
        old_sessions: Sessions that clients began with another secret than the current one, by name of bookie.
        old_values: Values of the metadata that were written with another secret than the current one.
        old_keys: The keys of some of these values.
    """

    current: int
    valid: tuple[int, ...]
    retired: tuple[int, ...]
    lacking: tuple[str, ...]
    old_sessions: Mapping[str, int]
    old_values: int
    old_keys: tuple[str, ...]

    @property
    def hindrances(self) -> tuple[str, ...]:
        """The reasons why the old secret cannot be retired yet; empty if it can, or if the cluster has none."""
        if len(self.valid) < 2:
            return ()
        found = []
        if self.current != max(self.valid):
            found.append(f"the cluster still uses secret {self.current}: switch first")
        found += [f"bookie {name} does not have the new secret" for name in self.lacking]
        found += [
            f"bookie {name} has {count} sessions of the old secret: give the new one to its clients"
            if count >= 0
            else f"bookie {name} does not use the new secret yet: wait some seconds"
            for name, count in self.old_sessions.items()
        ]
        if self.old_values:
            found.append(
                f"{self.old_values} values were written with the old secret, such as {', '.join(self.old_keys)}: "
                "reseal; leased ones follow by themselves, once their holders have the new secret"
            )
        return tuple(found)


def secret_status(metadata: ClusterMetadata) -> SecretStatus:
    """Return the progress of the replacement of a cluster's secret; reads every value."""
    metadata.refresh_keys()
    epochs = metadata.secret_epochs
    bookies = metadata.list_bookies()
    old = {
        each.bookie.bookie_id: each.old_sessions if each.key_epoch == epochs.current else -1
        for each in bookies
        if each.key_epoch != epochs.current or each.old_sessions
    }
    count, some = old_values(metadata._store, epochs.current)
    return SecretStatus(
        epochs.current,
        tuple(sorted(epochs.proofs)),
        tuple(sorted(epochs.retired)),
        tuple(each.bookie.bookie_id for each in bookies if epochs.newest not in each.key_epochs),
        old,
        count,
        some,
    )


def switch(metadata: ClusterMetadata) -> None:
    """Make the newest secret of a cluster the current one, unless a running bookie does not have it.

    Raises:
        SafetyCheckError: A bookie does not have it; nothing was changed.
        PybkError: As ``ClusterMetadata.switch_secret``.
    """
    metadata.refresh_keys()
    epochs = metadata.secret_epochs
    without = [each.bookie.bookie_id for each in metadata.list_bookies() if epochs.newest not in each.key_epochs]
    if without and epochs.current != epochs.newest:
        failures = tuple(f"bookie {name} does not have secret {epochs.newest}" for name in without)
        raise SafetyCheckError(
            f"the cluster keeps using secret {epochs.current}: {'; '.join(failures)}: give it both, and wait ten "
            "seconds or restart it",
            failures=failures,
        )
    metadata.switch_secret()


def retire(metadata: ClusterMetadata, wait: Callable[[float], None]) -> None:
    """Make a cluster refuse the secret before the current one, unless a member, session or value still uses it.

    Args:
        metadata: The cluster.
        wait: Waits some seconds. A process writes with a secret that it looked up less than ``SECRETS_AGE_SECONDS``
            ago, so all new values have the current secret after twice that time.

    Raises:
        SafetyCheckError: The secret is still in use; nothing was changed.
        PybkError: As ``ClusterMetadata.retire_secret``.
    """
    metadata.refresh_keys()
    epochs = metadata.secret_epochs
    if len(epochs.proofs) == 2 and epochs.current == epochs.newest:
        wait(2 * authenticated_values.SECRETS_AGE_SECONDS)
    failures = secret_status(metadata).hindrances
    if failures and metadata.secret_epochs.current > 0:
        raise SafetyCheckError(f"the old secret is not retired: {'; '.join(failures)}", failures=failures)
    metadata.retire_secret()


def reseal(metadata: ClusterMetadata, wait: Callable[[ResealProgress, int], None]) -> ResealProgress:
    """Give all values but leased ones the MAC of the cluster's current secret.

    It may be stopped and repeated at any time; values that are resealed already are only read.

    Args:
        metadata: The cluster.
        wait: Called after each page with the progress and the number of values of the page that were written; it may
            pause to pace the work.

    Raises:
        MetadataForgedError, CorruptError: A value is damaged, and has to be restored first; those before it are
            resealed.
    """
    metadata.refresh_keys()
    keys, store = metadata.keys, metadata._store
    if keys is None:
        return ResealProgress(0, 0)
    progress = ResealProgress(0, 0)
    for page in _pages(store):
        written = sum(_reseal(metadata, store, key, keys) for key in _stale(store, page, keys.current))
        progress = ResealProgress(progress.looked_at + len(page), progress.resealed + written)
        wait(progress, written)
    return progress


def _pages(store: MetadataStore) -> Iterator[list[str]]:
    """Yield the keys that have values, except that of the cluster itself and leased ones, in pages."""
    yield list(_SINGLE)
    for root, depth in _BRANCHES.items():
        keys = list(_below(store, root, depth))
        yield from (keys[at : at + PAGE] for at in range(0, len(keys), PAGE))
    for root in (LEDGERS_KEY, UNDER_REPLICATED_KEY):
        after = -1
        while leaves := leaves_after(store, root, after, PAGE):
            yield [key for _, key in leaves]
            after = leaves[-1][0]


def _below(store: MetadataStore, key: str, depth: int) -> Iterator[str]:
    if depth == 0:
        yield key
        return
    for name in sorted(store.children(key)):
        yield from _below(store, f"{key}/{name}", depth - 1)


def _stale(store: MetadataStore, page: list[str], current: int) -> list[str]:
    nodes = zip(page, store.get_many(page), strict=True)
    return [key for key, node in nodes if node is not None and _is_old(node.value, current)]


def _is_old(value: bytes, current: int) -> bool:
    """Return whether a value has the MAC of a secret that is not the current one."""
    return bool(value) and (value[0] == VALUE_FORMAT_BASE or epoch_of(value) != current)


def _reseal(metadata: ClusterMetadata, store: MetadataStore, key: str, keys: MetadataKeys) -> bool:
    """Give a value the MAC of the current secret; return False if another process has changed it meanwhile."""
    while (node := store.get(key, latest=True)) is not None and _is_old(node.value, keys.current):
        kind, payload = decode_authenticated(key, node.value, keys)
        since = unchanged_since(node.value, node.version)
        token = token_of(node.value)
        value = encode_authenticated(kind, key, token, payload, keys, metadata.feature_level, since)
        with suppress(MetadataVersionError):
            _replace(store, key, node, value)
            return True
    return False


def _replace(store: MetadataStore, key: str, node: Node, value: bytes) -> None:
    # Keys of ledgers are never removed; others may be removed and created again with an equal version. ZooKeeper cannot
    # exclude that for a leased key, which has no children; the next pass of its bookie mends it.
    reused = key.partition("/")[0] not in (LEDGERS_KEY, ORPHANS_KEY)
    settle(
        store,
        key,
        lambda: store.put(key, value, node.version, reused=reused),
        lambda found: found is not None and found.value == value,
    )


def old_values(store: MetadataStore, current: int, *, most: int = 10) -> tuple[int, tuple[str, ...]]:
    """Return the number of values with the MAC of a secret that is not the current one, and the keys of some.

    Args:
        store: The store.
        current: The current epoch.
        most: The number of keys wanted, at most.

    Cost: Reads every value.
    """
    count = 0
    some: list[str] = []
    for key, value in _all_values(store):
        if _is_old(value, current):
            count += 1
            if len(some) < most:
                some.append(key)
    return count, tuple(some)


def _all_values(store: MetadataStore) -> Iterator[tuple[str, bytes]]:
    """Yield all keys and values except the key ``cluster``; only some stores list leased keys by themselves."""
    for key, node in store.walk():
        if key != CLUSTER_KEY and key.partition("/")[0] not in _LEASED:
            yield key, node.value
    for root, depth in _LEASED.items():
        keys = list(_below(store, root, depth))
        yield from ((key, node.value) for key, node in zip(keys, store.get_many(keys), strict=True) if node is not None)

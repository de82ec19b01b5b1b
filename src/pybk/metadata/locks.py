"""Locks and elections in the metadata store.

A lock is a leased key: the store removes it when the session of its holder ends. A lock is advisory: a holder that was
suspended may learn late that it has lost it. So an action that must not happen twice needs a compare-and-set as well.
"""

from __future__ import annotations

import logging
import secrets
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Final

from pybk.errors import (
    MetadataExistsError,
    MetadataVersionError,
)
from pybk.metadata.authenticated_values import AuthenticatedValues, ValueKind
from pybk.metadata.metadata_keys import MetadataKeys
from pybk.metadata.registration import OWNER_BYTES, name_in_key
from pybk.metadata.store import MetadataStore, Node, Watch
from pybk.threads import in_children
from pybk.values import decode_json, encode_json

logger = logging.getLogger(__name__)

LOCKS_KEY: Final = "locks"


class Lease:
    """A lock that this process holds, until it is released or the store's session ends; made by ``Locks.try_lock``.

    It is advisory, as the head of this module says. Threads: any.

    Attributes:
        name: The name of the lock.
        owner: Describes the holder, for people.
        version: The version of its key in the store.
        epoch: The epoch of the secret of its value's MAC, or the one before; 0 without a secret.
    """

    def __init__(self, locks: Locks, name: str, owner: str, session: int, version: int, epoch: int) -> None:
        self.name = name
        self.owner = owner
        self.version = version
        self.epoch = epoch
        self._locks = locks
        self._session = session
        self._released = False

    @property
    def held(self) -> bool:
        """True if the lock is still held, as far as this process knows without a round trip to the store."""
        return not self._released and self._locks._store.alive(self._session)

    def release(self) -> None:
        """Release the lock; a second call does nothing, nor does one in a forked child, which does not hold it.

        Raises:
            MetadataUnreachableError: It could not be released; try again, or close the store.
        """
        if not (self._released or self._locks._forked):
            self._locks._release(self)
            self._released = True


class Election:
    """One candidate of an election, until it is closed. Whenever the leader ends, another candidate becomes leader.

    The leader is the candidate that holds the election's lock; ``campaign`` tries to take the lock after each change
    of its key and after the end of a session. Being leader is advisory, as the lock is.

    Args:
        locks: The cluster's locks.
        name: The name of the election, such as ``auditor``.
        owner: Describes this candidate; others see it while it leads.
        on_change: Called with True when this candidate becomes leader, and with False when it may no longer be; in a
            thread of the store, except for the first call, which comes before the constructor returns.

    Threads: any.
    """

    def __init__(self, locks: Locks, name: str, owner: str, on_change: Callable[[bool], None]) -> None:
        self._locks = locks
        self._name = name
        self._owner = owner
        self._on_change = on_change
        self._lock = threading.RLock()  # reentrant, because ``on_change`` may call ``close``
        self._lease: Lease | None = None
        self._reported = False
        self._closed = False
        self._watches = (
            locks.watch_lock(name, self.campaign),
            locks._store.on_session_end(self.campaign),
        )
        self.campaign()

    @property
    def leads(self) -> bool:
        """True if this candidate leads, as far as this process knows without a round trip to the store."""
        lease = self._lease
        return lease is not None and lease.held

    def close(self) -> None:
        """Leave the election; if this candidate leads, another one becomes leader."""
        with self._lock:
            self._closed = True
            for watch in self._watches:
                watch.cancel()
            if self._lease is not None:
                self._lease.release()
                self._lease = None

    def campaign(self) -> None:
        """Try to get or to keep the lease, and report whether this process leads."""
        with self._lock:
            if self._closed:
                return
            self._report()
            if not self.leads:
                # The attempt may also show that the session still lives, and with it the old lease, which is then kept.
                self._lease = self._locks.try_lock(self._name, self._owner) or self._lease
            self._report()

    def _report(self) -> None:
        """Call ``on_change`` if leadership differs from what was reported last."""
        if self.leads is not self._reported:
            self._reported = not self._reported
            self._on_change(self._reported)


class Locks(AuthenticatedValues):
    """Locks and elections of a cluster. Threads: any.

    Every method may also raise MetadataUnreachableError.
    """

    def __init__(self, store: MetadataStore, keys: MetadataKeys | None) -> None:
        super().__init__(store, keys)
        self._by = secrets.token_hex(OWNER_BYTES)  # in each lock's value, so that this client recognises its own locks
        self._leases: dict[str, Lease] = {}
        self._leases_lock = threading.Lock()
        self._forked = False
        in_children(self, type(self)._disable)

    def _disable(self) -> None:
        """Note in a forked child that it holds no lock of its parent."""
        self._forked = True

    def try_lock(self, name: str, owner: str) -> Lease | None:
        """Take a lock if it is free.

        Args:
            name: The name of the lock, 1 to 128 bytes.
            owner: Describes the holder, for people.

        Returns:
            The lease; None if the lock is held, by this client or another. The store removes the lock when this
            process ends.
        """
        key = _lock_key(name)
        payload = self._lock_payload(owner)
        with self._leases_lock:
            while True:
                session, epoch = self._store.session(), self._epoch
                try:
                    version = self.create_value(ValueKind.LOCK, key, payload, leased=True)
                except MetadataExistsError:
                    if not self._drop_orphan(name):
                        return None
                    continue
                if self._store.alive(session):
                    lease = self._leases[name] = Lease(self, name, owner, session, version, epoch)
                    return lease

    def _lock_payload(self, owner: str) -> bytes:
        return encode_json({"by": self._by, "owner": owner})

    @property
    def _epoch(self) -> int:
        return 0 if self.keys is None else self.keys.current

    def rewrite_locks(self) -> None:
        """Write the locks of this client again if the cluster's secret has changed; no other client can do so.

        Cost: None while the secret is the same.
        """
        with self._leases_lock:
            for lease in self._leases.values():
                if lease.held and lease.epoch != self._epoch:
                    self._rewrite(lease)

    def _rewrite(self, lease: Lease) -> None:
        key, epoch = _lock_key(lease.name), self._epoch
        node = self._store.get(key, latest=True)
        if node is None or self._lock(key, node)[0] != self._by:
            return  # it was broken, and ZooKeeper may have given its version again
        with suppress(MetadataVersionError):  # it was lost at this moment
            lease.version = self._put(ValueKind.LOCK, key, self._lock_payload(lease.owner), lease.version)
            lease.epoch = epoch

    def _drop_orphan(self, name: str) -> bool:
        """Remove a lock that this client created and has no lease for, and return whether the lock may be free now.

        Such a lock remains if the answer to its creation was lost, or the session ended at that moment.
        """
        key = _lock_key(name)
        node = self._store.get(key, latest=True)
        if node is None:
            return True
        by, _ = self._lock(key, node)
        lease = self._leases.get(name)
        if by != self._by or (lease is not None and lease.version == node.version):
            return False
        with suppress(MetadataVersionError):
            self._delete(key, node.version)
        return True

    def _release(self, lease: Lease) -> None:
        with self._leases_lock:
            with suppress(MetadataVersionError):  # the session had ended, and another client has the lock by now
                self._delete(_lock_key(lease.name), lease.version)
            if self._leases.get(lease.name) is lease:
                del self._leases[lease.name]

    def _lock(self, key: str, node: Node) -> tuple[str, str]:
        """Decode a lock's value: the random name of the client that made it, and the owner."""
        payload = self._payload_of(ValueKind.LOCK, key, node.value)
        return decode_json(
            payload, lambda values: (str(values["by"]), str(values["owner"])), where=f"metadata key {key!r}"
        )

    def break_lock(self, name: str) -> None:
        """Remove a lock that this or another client holds; the holder's lease is not notified."""
        key = _lock_key(name)
        node = self._store.get(key, latest=True)
        if node is not None:
            with suppress(MetadataVersionError):
                self._delete(key, node.version)

    def lock_owner(self, name: str) -> str | None:
        """Return the owner of a lock, as its holder gave it to ``try_lock``; None if the lock is free."""
        key = _lock_key(name)
        node = self._store.get(key, latest=True)
        return None if node is None else self._lock(key, node)[1]

    def watch_lock(self, name: str, callback: Callable[[], None]) -> Watch:
        """Call ``callback`` after a lock was taken or released, as ``MetadataStore.watch`` does."""
        return self._store.watch(_lock_key(name), callback)


def _lock_key(name: str) -> str:
    return f"{LOCKS_KEY}/{name_in_key(name)}"

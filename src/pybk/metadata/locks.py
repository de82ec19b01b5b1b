"""Locks and elections in the metadata store.

A lock is a leased key: the store removes it when the session of its holder ends. A lease tells others to keep away and
is no more than that, so an action that must not happen twice needs a compare-and-set as well.
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
from pybk.metadata.authenticated_values import (
    AuthenticatedValues,
    ValueKind,
    decode_json,
    encode_json,
)
from pybk.metadata.registration import OWNER_BYTES, name_in_key
from pybk.metadata.store import MetadataStore, Node, Watch

logger = logging.getLogger(__name__)

LOCKS_KEY: Final = "locks"


class Lease:
    """A lock that this process holds, until it is released or the store's session ends. Threads: any.

    A lease tells others to keep away; a holder that was stopped may find out late that it has lost it. So what must not
    be done twice needs a compare-and-swap as well.

    Attributes:
        name: The lock's.
        version: Its key's in the store.
    """

    def __init__(self, locks: Locks, name: str, session: int, version: int) -> None:
        self.name = name
        self.version = version
        self._locks = locks
        self._session = session
        self._released = False

    @property
    def held(self) -> bool:
        """Whether it is still held, as far as can be known without asking."""
        return not self._released and self._locks._store.alive(self._session)

    def release(self) -> None:
        """Let others have the lock; again does nothing.

        Raises:
            MetadataUnreachableError: It could not be released; try again, or close the store.
        """
        if not self._released:
            self._locks._release(self)
            self._released = True


class Election:
    """Takes part in an election until closed: as soon as nobody leads, one of those who take part does.

    Args:
        locks: The cluster's.
        name: What is led, such as ``auditor``.
        owner: Who takes part; others see it when it leads.
        on_change: Called with True when this one begins to lead, and False when it may have ceased to; in a thread of
            the store, except for the first call, which comes before the constructor returns.

    Threads: any.
    """

    def __init__(self, locks: Locks, name: str, owner: str, on_change: Callable[[bool], None]) -> None:
        self._locks = locks
        self._name = name
        self._owner = owner
        self._on_change = on_change
        self._lock = threading.RLock()
        self._lease: Lease | None = None
        self._told = False
        self._closed = False
        self._watches = (
            locks.watch_lock(name, self._campaign),
            locks._store.on_session_end(self._campaign),
        )
        self._campaign()

    @property
    def leads(self) -> bool:
        """Whether this one leads, as far as can be known without asking."""
        lease = self._lease
        return lease is not None and lease.held

    def close(self) -> None:
        """Take part no more, and let another one lead."""
        with self._lock:
            self._closed = True
            for watch in self._watches:
                watch.cancel()
            if self._lease is not None:
                self._lease.release()
                self._lease = None

    def _campaign(self) -> None:
        with self._lock:
            if self._closed:
                return
            self._tell()
            if not self.leads:
                # Asking may show as well that the session goes on, and with it the lease.
                self._lease = self._locks.try_lock(self._name, self._owner) or self._lease
            self._tell()

    def _tell(self) -> None:
        if self.leads is not self._told:
            self._told = not self._told
            self._on_change(self._told)


class Locks(AuthenticatedValues):
    """Locks and elections of a cluster. Threads: any.

    Every method raises MetadataUnreachableError, too.
    """

    def __init__(self, store: MetadataStore, mac_key: bytes | None) -> None:
        super().__init__(store, mac_key)
        self._by = secrets.token_hex(OWNER_BYTES)
        self._leases: dict[str, Lease] = {}
        self._leases_lock = threading.Lock()

    def try_lock(self, name: str, owner: str) -> Lease | None:
        """Take a lock if nobody has it.

        Args:
            name: The lock's, 1 to 128 bytes.
            owner: Who takes it, for people.

        Returns:
            The lease, None if somebody has it; the store gives it back when this process is no more.
        """
        key = _lock_key(name)
        payload = encode_json({"by": self._by, "owner": owner})
        with self._leases_lock:
            while True:
                session = self._store.session()
                try:
                    version = self._create(ValueKind.LOCK, key, payload, leased=True)
                except MetadataExistsError:
                    if not self._drop_orphan(name):
                        return None
                    continue
                if self._store.alive(session):
                    lease = self._leases[name] = Lease(self, name, session, version)
                    return lease

    def _drop_orphan(self, name: str) -> bool:
        """Remove a lock that this one made without learning of it, as the answer was lost or the session in doubt."""
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
            with suppress(MetadataVersionError):  # the session had ended, and somebody else has the lock by now
                self._delete(_lock_key(lease.name), lease.version)
            if self._leases.get(lease.name) is lease:
                del self._leases[lease.name]

    def _lock(self, key: str, node: Node) -> tuple[str, str]:
        """Return by whom a lock was made, and its owner."""
        payload = self._payload_of(ValueKind.LOCK, key, node.value)
        return decode_json(
            payload, lambda values: (str(values["by"]), str(values["owner"])), where=f"metadata key {key!r}"
        )

    def lock_owner(self, name: str) -> str | None:
        """Return who has a lock, None for nobody."""
        key = _lock_key(name)
        node = self._store.get(key, latest=True)
        return None if node is None else self._lock(key, node)[1]

    def watch_lock(self, name: str, callback: Callable[[], None]) -> Watch:
        """Call ``callback`` after somebody took or released a lock, as ``MetadataStore.watch`` does."""
        return self._store.watch(_lock_key(name), callback)


def _lock_key(name: str) -> str:
    return f"{LOCKS_KEY}/{name_in_key(name)}"

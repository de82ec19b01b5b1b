"""The interface of metadata stores: keys and values with compare-and-set, leases and watches.

The interface is the smallest useful part of ZooKeeper's. ``lmdb_store`` and ``zookeeper_store`` implement
it; ``url`` lists them. Another store is one more module with a class that implements ``MetadataStore`` and a function
``open_url(url, options)``, and one line in ``url.SCHEMES``; ``tests/metadata/test_store.py`` is its conformance test.

**Keys** are names separated by ``/``, such as ``bookies/a``. A key has either a value or keys below it, never both.
Parents are created with the first key below them.

**Values** are not empty. Each has a version, an integer that grows with each change of the value and has no other
meaning.

**Leases.** A leased value is removed when the *session* of the store object that created it ends. A session ends when
the store object is closed, when its process dies, or after the lease time without a sign of life (``lease_time``).
The store object begins another session when it needs one.

**Errors.** Every call has the store's timeout as its deadline. If a lost connection or a missed deadline leaves the
outcome of a change open, the call raises MetadataUnreachableError with ``outcome_unknown``. A store never repeats a
change by itself; ``lost_answers`` does, where that is safe.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Final, NamedTuple, Protocol
from urllib.parse import SplitResult

from pybk.credentials import without_credentials
from pybk.errors import UsageError

KEY_BYTES_MAX: Final = 480
VALUE_BYTES_MAX: Final = 512 << 10
"""The limit on the size of a value. ZooKeeper takes requests of up to 1 MiB, which also have the key and headers."""

CALL_TIMEOUT_S: Final = 10.0
"""The default deadline of each call, seconds."""

SETTINGS: Final = frozenset({"group", "tls_ca", "tls_cert", "tls_key", "tls_verify", "auth_file", "acl"})
"""The names of the settings that URLs of stores may have in their query; none holds a secret."""


class Node(NamedTuple):
    """A key's value and version.

    Attributes:
        value: The value.
        version: The version that the next compare-and-set names.
    """

    value: bytes
    version: int


class Watch(Protocol):
    """A registered callback, which is called until it is cancelled."""

    def cancel(self) -> None:
        """End the calls of the callback; a call that is running in another thread is not interrupted. Idempotent."""
        ...


class MetadataStore(Protocol):
    """A metadata store as one process uses it; see this module. Threads: any.

    Each method raises MetadataUnreachableError if the store does not answer in time, CorruptError for a damaged value,
    ClosedError after ``close``, ForkedProcessError in a forked child, and UsageError for an invalid key.
    """

    def get(self, key: str, *, latest: bool = False) -> Node | None:
        """Return a key's value, None if it has none.

        Args:
            key: The key.
            latest: Whether every change that took effect before the call is seen, including changes of this store
                object whose answer was lost. If False, the value may be stale, but not older than the last change that
                this object has seen or made, because changes take effect in one order.
        """
        ...

    def recall(self, key: str) -> Node | None:
        """Return a key's value as ``get`` does with ``latest=False``.

        The store object may keep and watch the value, so that another call costs no round trip until it changes. For
        values that are read often and change seldom.
        """
        ...

    def get_many(self, keys: Sequence[str], *, latest: bool = False) -> list[Node | None]:
        """Return the values of many keys, as ``get`` does for each, in few round trips.

        Args:
            keys: The keys.
            latest: As for ``get``.
        """
        ...

    def children(self, key: str) -> list[str]:
        """Return the last names of the keys directly below, ascending; an empty list if the key does not exist."""
        ...

    def walk(self) -> Iterator[tuple[str, Node]]:
        """Yield every key with its value, except leased ones as far as the store distinguishes them.

        They are from one snapshot if the store has snapshots. Otherwise a concurrent change may be seen or not, and the
        key ``ids`` comes last, so its value is above the ids of all ledgers that were seen.
        """
        ...

    def create(self, key: str, value: bytes, *, leased: bool = False) -> int:
        """Create a key, durably.

        Args:
            key: The key.
            value: 1 to ``VALUE_BYTES_MAX`` bytes.
            leased: Whether the key is removed when the session ends.

        Returns:
            Its version.

        Raises:
            MetadataExistsError: The key has a value.
        """
        ...

    def put(self, key: str, value: bytes, version: int, *, reused: bool = False) -> int:
        """Replace a key's value, durably.

        Args:
            key: The key.
            value: 1 to ``VALUE_BYTES_MAX`` bytes.
            version: The version of the value that is replaced.
            reused: Whether the key may have been removed and created again since it had this version. A store that
                could confuse the two then compares more than the version, at the cost of another round trip.

        Returns:
            The new version.

        Raises:
            MetadataVersionError: The key has another version, or no value.
        """
        ...

    def delete(self, key: str, version: int, *, reused: bool = False) -> None:
        """Remove a key, durably.

        Args:
            key: The key.
            version: The version of the value that is removed.
            reused: As for ``put``.

        Raises:
            MetadataVersionError: The key has another version, or no value.
        """
        ...

    def rename(self, key: str, target: str, value: bytes, version: int) -> None:
        """Remove a key and create another one as one change, durably: at any time exactly one of them exists.

        Args:
            key: The key that is removed.
            target: The key that is created, directly below the same key.
            value: Its value, 1 to ``VALUE_BYTES_MAX`` bytes.
            version: The version of the value that is removed.

        Raises:
            MetadataVersionError: The key has another version, or no value.
            MetadataExistsError: ``target`` has a value.
        """
        ...

    def watch(self, key: str, callback: Callable[[], None]) -> Watch:
        """Call ``callback`` after each change of the key's value or of the set of keys directly below it.

        The callback runs in a thread of the store, one at a time with the store's other callbacks, and may use the
        store. Changes that follow each other closely cause one call, and none if they cancel out. A call may also come
        without a change, such as after a lost connection, because changes may have been missed.
        """
        ...

    def watch_below(self, key: str, callback: Callable[[frozenset[str] | None], None]) -> Watch:
        """Call ``callback`` with the keys below a key, at any depth, that were created, changed or removed.

        The callback runs like those of ``watch``. Each call has the keys that changed since the one before, each once,
        and possibly others below the key, such as those without a value. None means that changes may have been missed,
        and that all keys below must be read again. The callback gets None in its first call, soon after this call, and
        after a lost connection or more than ``change_feed.KEYS_MAX`` changed keys. The time between two calls with None
        is at least ``change_feed.REST_S``, and at least the duration of the first one. If the callback raises an
        exception, a later call repeats its keys.
        """
        ...

    def session(self) -> int:
        """Return the number of the session, above 0; begin a session if none exists."""
        ...

    def alive(self, session: int) -> bool:
        """Return whether a session still exists, as far as this process can know without a request. Never blocks."""
        ...

    def on_session_end(self, callback: Callable[[], None]) -> Watch:
        """Call ``callback`` after a session has ended other than by ``close``; it may create leases again.

        It runs like callbacks of ``watch``, and is repeated after a pause while it raises MetadataUnreachableError.
        """
        ...

    def close(self) -> None:
        """End the session and the watches. Idempotent."""
        ...


class StoreUrl(NamedTuple):
    """The parts of a metadata store's URL; made by ``url.parse_url``.

    Attributes:
        text: The URL as the user gave it.
        parts: Its parts, without a fragment.
        forms: The forms of URL that are known, for error messages.
    """

    text: str
    parts: SplitResult
    forms: str

    def invalid(self, reason: str) -> UsageError:
        """Return the error for a URL that is not usable, for ``reason``."""
        return UsageError(f"metadata URL {without_secrets(self.text)!r:.300}{reason}; use {self.forms}")


def without_secrets(url: str) -> str:
    """Return a metadata URL for messages: without user and password, and only with the settings that hold no secret."""
    return without_credentials(url, SETTINGS)


class StoreOptions(NamedTuple):
    """The options with which a store is opened.

    Attributes:
        timeout_s: Deadline of each call, seconds.
        lease_time_s: Lease time, seconds; None for the store's default (``lease_time``).
        create: Whether to create the directory of a store on disk if it is missing.
    """

    timeout_s: float = CALL_TIMEOUT_S
    lease_time_s: float | None = None
    create: bool = True


_NO_NAMES: Final = frozenset({"", ".", ".."})


def checked_key(key: str) -> str:
    """Return a key; raises UsageError if it is not valid."""
    if type(key) is not str or len(key.encode()) > KEY_BYTES_MAX or "\0" in key:
        raise UsageError(f"metadata key {key!r:.100}: a string of at most {KEY_BYTES_MAX} bytes without NUL is needed")
    if not _NO_NAMES.isdisjoint(key.split("/")):
        raise UsageError(f"metadata key {key!r}: no name may be empty, '.' or '..'")
    return key


def checked_value(key: str, value: bytes) -> bytes:
    """Return a value; raises UsageError if it is not bytes of a valid size."""
    if type(value) is not bytes or not 0 < len(value) <= VALUE_BYTES_MAX:
        size = f"{len(value)} bytes" if type(value) is bytes else type(value).__name__
        raise UsageError(f"value of metadata key {key!r} is {size}; it takes 1 to {VALUE_BYTES_MAX} bytes")
    return value

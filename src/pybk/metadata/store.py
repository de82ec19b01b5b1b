"""The small tree of keys that a metadata store is, with compare-and-swap, leases and watches.

Keys are names separated by ``/``: ``bookies/a``. A key has either a value or keys below it, never both. What stands
above a key comes into being with it. Values are not empty and have versions: whole numbers that grow with each change
of the value, and mean nothing else.

A *leased* value lives no longer than the *session* of the tree that made it. A session ends when its tree is closed,
its process dies, or nothing is heard of it for the session timeout; the tree then begins another when it needs one.

Every call has the tree's timeout as its deadline. What a lost connection or a missed deadline leaves open raises
MetadataUnreachableError with ``outcome_unknown``; no tree sends a change twice by itself.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final, NamedTuple, Protocol

from pybk.errors import UsageError

KEY_BYTES_MAX: Final = 480
VALUE_BYTES_MAX: Final = 512 << 10
"""Bound on a value, which leaves room in the 1 MiB that ZooKeeper takes at once."""


class Node(NamedTuple):
    """A key's value.

    Attributes:
        value: The value.
        version: For the next compare-and-swap.
    """

    value: bytes
    version: int


class Watch(Protocol):
    """A callback that is called until it is cancelled."""

    def cancel(self) -> None:
        """Call no more; a call under way in another thread goes on. Again does nothing."""
        ...


class MetadataStore(Protocol):
    """A metadata store; see this module. Threads: any.

    Each method raises MetadataUnreachableError if the store does not answer in time, CorruptError for a damaged value,
    ClosedError after ``close``, ForkedProcessError in a forked child, UsageError for a key that is none.
    """

    def get(self, key: str, *, latest: bool = False) -> Node | None:
        """Return a key's value, None if it has none.

        Args:
            key: The key.
            latest: See every change that took effect before the call, and every one of this tree's whose answer was
                lost. Otherwise the value may be an older one, but never older than what this tree saw before.
        """
        ...

    def get_many(self, keys: Sequence[str]) -> list[Node | None]:
        """Return the values of many keys, as ``get`` does each, at the cost of few round trips."""
        ...

    def children(self, key: str) -> list[str]:
        """Return the last names of the keys right below, ascending; none if there is no such key."""
        ...

    def create(self, key: str, value: bytes, *, leased: bool = False) -> int:
        """Make a key.

        Args:
            key: The key.
            value: 1 to ``VALUE_BYTES_MAX`` bytes.
            leased: Remove it when the session ends.

        Returns:
            Its version.

        Raises:
            MetadataExistsError: It has a value.
        """
        ...

    def put(self, key: str, value: bytes, version: int) -> int:
        """Replace a key's value, durably.

        Args:
            key: The key.
            value: 1 to ``VALUE_BYTES_MAX`` bytes.
            version: Of the value that it replaces.

        Returns:
            The new version.

        Raises:
            MetadataVersionError: The key has another version, or no value.
        """
        ...

    def delete(self, key: str, version: int) -> None:
        """Remove a key.

        Raises:
            MetadataVersionError: The key has another version, or no value.
        """
        ...

    def watch(self, key: str, callback: Callable[[], None]) -> Watch:
        """Call ``callback`` after each change of the key's value and of which keys are right below it.

        It is called again and again until cancelled, in a thread of the store that makes no other calls meanwhile; it
        may use the tree. Changes that come close together make one call, and none if they undo each other; a call may
        also come without a change, as after a lost connection, when changes may have been missed.
        """
        ...

    def session(self) -> int:
        """Return a number above 0 that names the tree's session, beginning one if there is none."""
        ...

    def alive(self, session: int) -> bool:
        """Tell whether a session has not ended, as far as this process can know without asking. Does not block."""
        ...

    def on_session_end(self, callback: Callable[[], None]) -> Watch:
        """Call ``callback`` when a session ended otherwise than by ``close``, so that leases can be made again.

        Called as callbacks of ``watch`` are, and again after a pause while it raises MetadataUnreachableError.
        """
        ...

    def close(self) -> None:
        """End the session and the watches; again does nothing."""
        ...


_NO_NAMES: Final = frozenset({"", ".", ".."})


def checked_key(key: str) -> str:
    """Return a key, or raise UsageError saying why it is none."""
    if type(key) is not str or len(key.encode()) > KEY_BYTES_MAX or "\0" in key:
        raise UsageError(f"metadata key {key!r:.100}: a string of at most {KEY_BYTES_MAX} bytes without NUL is needed")
    if not _NO_NAMES.isdisjoint(key.split("/")):
        raise UsageError(f"metadata key {key!r}: no name may be empty, '.' or '..'")
    return key


def checked_value(key: str, value: bytes) -> bytes:
    """Return a value, or raise UsageError saying why it is none."""
    if type(value) is not bytes or not 0 < len(value) <= VALUE_BYTES_MAX:
        size = f"{len(value)} bytes" if type(value) is bytes else type(value).__name__
        raise UsageError(f"value of metadata key {key!r} is {size}; it takes 1 to {VALUE_BYTES_MAX} bytes")
    return value

"""The values that a ZooKeeper store knows without a request, because they have not changed since it read them.

ZooKeeper sends a connection the event of a change before the answer to any request that it handles after the change. So
if a value was read and watched on a connection, and no event came since, the key still had this value when the last
answer came. kazoo hands events to another thread, in which they may come after that answer. Therefore this module sees
each event before kazoo does, in the thread that reads the answers, as ``zookeeper_feed`` does.

A server forgets the watches of a connection when it ends, so no value is known after a lost connection.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from kazoo.protocol.serialization import Watch

from pybk.metadata.store import Node

KNOWN_MAX: Final = 100
"""The most values that are known; one more clears them all, because most are no longer used by then."""


class KnownValue:
    """A value that is being read, or was read.

    Attributes:
        is_read: Whether ``node`` is the value.
        node: The value; None if the key has none.
    """

    __slots__ = ("is_read", "node")

    def __init__(self) -> None:
        self.is_read = False
        self.node: Node | None = None


class KnownValues:
    """The values that one store object knows; see this module.

    A value that is being read is in the dictionary already, and an event removes it. So no lock is needed: each change
    of the dictionary is a single operation.

    Args:
        client: The connection.

    Threads: any.
    """

    def __init__(self, client: Any) -> None:
        self._client = client
        self._by_path: dict[str, KnownValue] = {}
        connection = client._connection
        self._read_event = connection._read_watch_event
        connection._read_watch_event = self._on_event

    def find(self, path: str) -> KnownValue | None:
        """Return the value at a path as of the last answer on the connection; None if it has to be read."""
        found = self._by_path.get(path)
        return found if found is not None and found.is_read else None

    def read(self, path: str, answer: Callable[[Any], Any], node: Callable[[Any], Node | None]) -> Node | None:
        """Read a value, which is known from now on until it changes; one round trip.

        Args:
            path: The path of its znode.
            answer: Waits for an answer.
            node: Waits for the answer to a read, and makes it a node.
        """
        if len(self._by_path) >= KNOWN_MAX:
            self._by_path = {}
        known = self._by_path[path] = KnownValue()
        # Of a znode that does not exist only this request reports the creation. It is answered before the next one.
        watched = self._client.exists_async(path, watch=_pass)
        found = self._client.get_async(path)
        answer(watched)
        known.node = node(found)
        known.is_read = True
        return known.node

    def disconnected(self) -> None:
        """Note that the connection was lost; called by kazoo's thread."""
        self._by_path = {}

    def _on_event(self, data: bytes, offset: int) -> None:
        """Forget what has changed, and pass the event on; called by kazoo's thread, so it must not block."""
        self._by_path.pop(Watch.deserialize(data, offset)[0].path, None)
        self._read_event(data, offset)


def _pass(_: object) -> None:
    """Do nothing: ``KnownValues`` has seen the event."""

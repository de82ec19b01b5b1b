"""The changed keys of a ZooKeeper store: a persistent recursive watch, for ``watch_below``.

ZooKeeper has such watches since version 3.6. One on the store's root serves all feeds of a store object: a server
before 3.9 forgets that a watch is recursive when an ordinary watch is set on the same znode, and no ordinary watch is
set on the root, because it is not a key.

kazoo has no call for them, and drops events of znodes that it has no watch for. So this module sends the request
itself, and sees each event before kazoo does.

A server forgets the watches of a connection when the connection ends. So after each lost connection the watch is set
again, and then the feeds report None. If the server has no such watches, the feeds report None every ``UNSUPPORTED_S``;
their users then see changes later, and at a higher cost.
"""

from __future__ import annotations

import logging
import threading
import time
from typing import Any, ClassVar, Final

from kazoo.exceptions import MarshallingError, UnimplementedError
from kazoo.protocol.serialization import Watch, int_struct, write_string

from pybk.metadata.callbacks import Callback, Callbacks
from pybk.metadata.change_feed import ChangeFeed

logger = logging.getLogger(__name__)

UNSUPPORTED_S: Final = 300.0
"""Seconds between two reports of None if the server has no recursive watches."""

RECURSIVE: Final = 1
"""ZooKeeper's number for a persistent recursive watch."""


class AddWatch:
    """ZooKeeper's request for a persistent recursive watch, in the form that kazoo sends.

    Args:
        path: The path of the znode.
    """

    type: ClassVar[int] = 106

    def __init__(self, path: str) -> None:
        self._path = path

    def serialize(self) -> bytes:
        """Return the body of the request."""
        body: bytes = write_string(self._path) + int_struct.pack(RECURSIVE)
        return body

    @classmethod
    def deserialize(cls, data: bytes, offset: int) -> bool:
        """Return the result of the answer, whose body is empty."""
        return True


class ZooKeeperFeeds:
    """The feeds of one store object; see this module. Threads: any.

    Args:
        client: The connection.
        root: The znode that all keys are below.
        callbacks: Runs the callbacks.
        passed_over: The prefix of the last names of znodes that are not keys.
    """

    def __init__(self, client: Any, root: str, callbacks: Callbacks, passed_over: str) -> None:
        self._client = client
        self._root = root
        self._passed_over = f"/{passed_over}"
        self._callbacks = callbacks
        self._lock = threading.Lock()
        self._feeds: dict[Callback, ChangeFeed] = {}  # replaced as a whole under _lock
        self._connection = 0  # the number of the connection; changes when it is lost
        self._armed = -1  # the connection that the watch was set on
        self.supported = True
        """False if the server refused a recursive watch, else True."""
        connection = client._connection
        self._read_event = connection._read_watch_event
        connection._read_watch_event = self._on_event

    def add(self, watch: Callback, feed: ChangeFeed) -> None:
        """Add a feed, whose callback is scheduled when it has something to report."""
        with self._lock:
            watched = set(self._callbacks.watched())
            self._feeds = {other: known for other, known in {**self._feeds, watch: feed}.items() if other in watched}

    def arm(self, deadline: float) -> None:
        """Set the watch, unless it is set on this connection; raises kazoo's errors."""
        while self.supported and self._armed != (connection := self._connection):
            result = self._client.handler.async_result()
            self._client._call(AddWatch(self._root), result)
            try:
                result.get(timeout=max(0.0, deadline - time.monotonic()))
            except (UnimplementedError, MarshallingError) as error:
                self.supported = False
                logger.warning(
                    "the ZooKeeper server has no recursive watches (%s), so all metadata is read again every %.0f s; "
                    "use ZooKeeper 3.6 or newer, with its default watch manager",
                    type(error).__name__,
                    UNSUPPORTED_S,
                )
            else:
                self._armed = connection

    def disconnected(self) -> None:
        """Note that the connection was lost."""
        self._connection += 1
        for feed in self._feeds.values():
            feed.note(None)

    def connected(self) -> None:
        """Schedule all feeds, which set the watch again and report, once the connection exists again."""
        if self.supported and self._armed != self._connection:
            for watch, feed in self._feeds.items():
                self._callbacks.schedule(watch, feed.rest_s())

    def _on_event(self, data: bytes, offset: int) -> None:
        """Pass an event on to the feeds and to kazoo; called by kazoo's thread, so it must not block."""
        path: str = Watch.deserialize(data, offset)[0].path
        if path.startswith(f"{self._root}/") and not path[path.rindex("/") :].startswith(self._passed_over):
            keys = (path[len(self._root) + 1 :],)
            for watch, feed in self._feeds.items():
                if feed.note(keys):
                    self._callbacks.schedule(watch, feed.rest_s())
        self._read_event(data, offset)

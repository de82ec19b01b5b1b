"""A metadata store in memory that loses answers and reads stale values when told to: no threads, no clock, no chance.

It is :class:`pybk.metadata.store.MetadataStore` in its simplest form, and the store of the simulator.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from enum import Enum

from pybk.errors import (
    ClosedError,
    MetadataExistsError,
    MetadataUnreachableError,
    MetadataVersionError,
)
from pybk.metadata.change_feed import ChangeFeed
from pybk.metadata.store import Node, checked_key, checked_value


class Fault(Enum):
    """What goes wrong with one call.

    ``REPLY_LOST``: it takes effect, and the answer is lost. ``REQUEST_LOST``: it takes no effect, and the caller cannot
    know. ``REFUSED``: it takes no effect, and the caller knows. ``STALE``: a read that need not be the latest sees the
    value before the last change, unless this store saw that change or a later one.
    """

    REPLY_LOST = 1
    REQUEST_LOST = 2
    REFUSED = 3
    STALE = 4


Faults = Callable[[str, str], Fault | None]
"""Asked with the name of the method and the key before each call."""


class SimNode:
    """A key's value: what it is, was, and which session it ends with."""

    __slots__ = ("before", "node", "session")

    def __init__(self, node: Node, session: int) -> None:
        self.node = node
        self.before: Node | None = None
        self.session = session


class SimWatch:
    """A callback that is called by ``SimServer.deliver`` until it is cancelled; with a feed it watches keys below."""

    def __init__(
        self,
        server: SimServer,
        store: SimMetadataStore,
        key: str | None,
        callback: Callable[[], None],
        feed: ChangeFeed | None = None,
    ) -> None:
        self.server = server
        self.store = store
        self.key = key
        self.callback = callback
        self.feed = feed

    def cancel(self) -> None:
        """Call no more."""
        self.server.watches.pop(self, None)


class SimServer:
    """The store that many stores share.

    Attributes:
        nodes: All keys with values.
        changes: How many changes took effect; also what names versions and sessions.
        watches: All watches, in the order in which they began.
    """

    def __init__(self) -> None:
        self.nodes: dict[str, SimNode] = {}
        self.changes = 0
        self.watches: dict[SimWatch, None] = {}
        self._sessions: dict[int, SimMetadataStore] = {}
        self._due: deque[SimWatch] = deque()

    def store(self, faults: Faults | None = None) -> SimMetadataStore:
        """Open the store."""
        return SimMetadataStore(self, faults)

    def begin_feed(self, watch: SimWatch) -> None:
        """Have a new feed report None."""
        self._due.append(watch)

    def deliver(self) -> int:
        """Call the callbacks that are due, and say how many; those that cannot reach the store are due again."""
        due = list(dict.fromkeys(self._due))
        self._due.clear()
        for watch in due:
            if watch in self.watches:
                try:
                    watch.callback()
                except MetadataUnreachableError:
                    self._due.append(watch)
        return len(due)

    def expire(self, session: int) -> None:
        """End a session as if nothing had been heard of it."""
        store = self._sessions.pop(session, None)
        for key in [key for key, found in self.nodes.items() if found.session == session]:
            self.changed(key, None)
        if store is not None:
            self._due.extend(watch for watch in self.watches if watch.store is store and watch.key is None)

    def begin(self, store: SimMetadataStore) -> int:
        """Begin a session."""
        self.changes += 1
        self._sessions[self.changes] = store
        return self.changes

    def is_live(self, session: int) -> bool:
        """Return whether a session lives."""
        return session in self._sessions

    def changed(self, key: str, value: bytes | None, session: int = 0) -> int:
        """Set or remove a key's value; returns the version."""
        self.changes += 1
        if value is None:
            del self.nodes[key]
        elif key in self.nodes:
            found = self.nodes[key]
            found.before, found.node = found.node, Node(value, self.changes)
        else:
            self.nodes[key] = SimNode(Node(value, self.changes), session)
        for watch in self.watches:
            if watch.feed is not None:
                if watch.feed.note((key,)):
                    self._due.append(watch)
            elif watch.key is not None and (watch.key == key or key.startswith(watch.key + "/")):
                self._due.append(watch)
        return self.changes


class SimMetadataStore:
    """One client of the store.

    Args:
        server: What its clients share.
        faults: Says what goes wrong; may be replaced at any time.
    """

    def __init__(self, server: SimServer, faults: Faults | None) -> None:
        self.server = server
        self.faults = faults
        self._session = 0
        self._closed = False
        self._seen = 0

    def get(self, key: str, *, latest: bool = False) -> Node | None:
        """See ``MetadataStore.get``."""
        fault = self._fault("get", key)
        if fault in (Fault.REPLY_LOST, Fault.REQUEST_LOST, Fault.REFUSED):
            raise MetadataUnreachableError(f"get {key}: no answer")
        found = self.server.nodes.get(key)
        node = None if found is None else found.node
        if fault is Fault.STALE and not latest and found is not None and found.node.version > self._seen:
            node = found.before
        if node is not None:
            self._seen = max(self._seen, node.version)
        return node

    def recall(self, key: str) -> Node | None:
        """See ``MetadataStore.recall``."""
        return self.get(key)

    def get_many(self, keys: Sequence[str], *, latest: bool = False) -> list[Node | None]:
        """See ``MetadataStore.get_many``."""
        return [self.get(key, latest=latest) for key in keys]

    def children(self, key: str) -> list[str]:
        """See ``MetadataStore.children``."""
        if self._fault("children", key) in (Fault.REPLY_LOST, Fault.REQUEST_LOST, Fault.REFUSED):
            raise MetadataUnreachableError(f"children of {key}: no answer")
        prefix = key + "/"
        return sorted({name[len(prefix) :].split("/")[0] for name in self.server.nodes if name.startswith(prefix)})

    def walk(self) -> Iterator[tuple[str, Node]]:
        """See ``MetadataStore.walk``."""
        return iter([(key, found.node) for key, found in sorted(self.server.nodes.items()) if not found.session])

    def create(self, key: str, value: bytes, *, leased: bool = False) -> int:
        """See ``MetadataStore.create``."""
        checked_value(key, value)

        def change() -> int:
            if key in self.server.nodes:
                raise MetadataExistsError(f"{key} exists")
            return self.server.changed(key, value, self.session() if leased else 0)

        return self._change("create", key, change)

    def put(self, key: str, value: bytes, version: int, *, reused: bool = False) -> int:
        """See ``MetadataStore.put``."""
        checked_value(key, value)

        def change() -> int:
            self._expect(key, version)
            return self.server.changed(key, value)

        return self._change("put", key, change)

    def delete(self, key: str, version: int, *, reused: bool = False) -> None:
        """See ``MetadataStore.delete``."""

        def change() -> int:
            self._expect(key, version)
            return self.server.changed(key, None)

        self._change("delete", key, change)

    def rename(self, key: str, target: str, value: bytes, version: int) -> None:
        """See ``MetadataStore.rename``."""
        checked_value(target, value)

        def change() -> int:
            self._expect(key, version)
            if target in self.server.nodes:
                raise MetadataExistsError(f"{target} exists")
            self.server.changed(key, None)
            return self.server.changed(target, value)

        self._change("rename", key, change)

    def watch(self, key: str, callback: Callable[[], None]) -> SimWatch:
        """See ``MetadataStore.watch``."""
        return self._watch(checked_key(key), callback)

    def watch_below(self, key: str, callback: Callable[[frozenset[str] | None], None]) -> SimWatch:
        """See ``MetadataStore.watch_below``."""
        self._fault("watch_below", key)
        feed = ChangeFeed(key, callback)
        watch = self._watch(key, feed.report, feed)
        self.server.begin_feed(watch)
        return watch

    def on_session_end(self, callback: Callable[[], None]) -> SimWatch:
        """See ``MetadataStore.on_session_end``."""
        return self._watch(None, callback)

    def session(self) -> int:
        """See ``MetadataStore.session``."""
        if not self.alive(self._session):
            self._fault("session", "session")
            self._session = self.server.begin(self)
        return self._session

    def alive(self, session: int) -> bool:
        """See ``MetadataStore.alive``."""
        return session == self._session and self.server.is_live(session)

    def close(self) -> None:
        """See ``MetadataStore.close``."""
        if not self._closed:
            self._closed = True
            for watch in [watch for watch in self.server.watches if watch.store is self]:
                watch.cancel()
            self.server.expire(self._session)

    def _watch(self, key: str | None, callback: Callable[[], None], feed: ChangeFeed | None = None) -> SimWatch:
        watch = SimWatch(self.server, self, key, callback, feed)
        self.server.watches[watch] = None
        return watch

    def _fault(self, operation: str, key: str) -> Fault | None:
        if self._closed:
            raise ClosedError("this metadata store is closed")
        checked_key(key)
        return None if self.faults is None else self.faults(operation, key)

    def _change(self, operation: str, key: str, change: Callable[[], int]) -> int:
        fault = self._fault(operation, key)
        if fault is Fault.REFUSED:
            raise MetadataUnreachableError(f"{operation} {key}: not sent")
        if fault is Fault.REQUEST_LOST:
            raise MetadataUnreachableError(f"{operation} {key}: no answer", outcome_unknown=True)
        if fault is Fault.REPLY_LOST:
            try:
                change()
            except (MetadataExistsError, MetadataVersionError) as error:
                raise MetadataUnreachableError(f"{operation} {key}: no answer", outcome_unknown=True) from error
            raise MetadataUnreachableError(f"{operation} {key}: no answer", outcome_unknown=True)
        self._seen = max(self._seen, version := change())
        return version

    def _expect(self, key: str, version: int) -> None:
        found = self.server.nodes.get(key)
        if found is None or found.node.version != version:
            raise MetadataVersionError(f"{key} is {found and found.node}, not of version {version}")

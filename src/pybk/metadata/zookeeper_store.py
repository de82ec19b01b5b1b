"""The metadata store of many hosts: ZooKeeper, through its client kazoo.

Theory of operation
-------------------

Mapping. Each key is a znode below ``root``; znodes that only have children are empty. Leases are ephemeral znodes, and
a session is ZooKeeper's session. A version consists of the znode's creation (``czxid``) and its data version, so a key
that was removed and created again never has the same version twice. ZooKeeper compares only the data version. So before
a key is removed, or a leased key is replaced, this module reads the key and compares its creation.

Guards. A key that may be used again, such as the name of a log, must not be removed and created again between that
comparison and the change. So a *guard* is created first, an ephemeral child of the key, because ZooKeeper removes no
znode that has children. Then the key is read, and a transaction removes the guard and makes the change; it fails if the
guard is gone. A change that meets the guard of another change removes it, and the change that has lost its guard fails
as if it had lost a race. A rename is such a transaction, which removes one key and creates another.

Connection. kazoo's own thread connects, reconnects and reports each change of state to ``_state_changed``:

    CONNECTED --connection lost--> SUSPENDED --reconnected in time--> CONNECTED, same session
                                   SUSPENDED --session expired--> LOST --reconnected--> CONNECTED, new session

While the state is not CONNECTED, requests wait for the connection (``_wait_connected``) until their deadline, so a
request that was not sent is known not to have taken effect. LOST calls the ``on_session_end`` callbacks. ``alive``
trusts the session for ``lease_time.trusted_after_loss`` after the connection was lost.

Lost answers. A request whose connection is lost while it is under way has an unknown outcome. Reads are repeated until
the deadline (``_read``). Changes are not (``_write``): they raise MetadataUnreachableError with ``outcome_unknown``.
Reads of the latest value are preceded by a ``sync``. So they see the outcome of a change whose answer was lost, because
ZooKeeper refuses requests that an earlier connection of the session sent.

Watches. ZooKeeper reports one change for each watch that was set. So the callback thread (``Callbacks``) first sets
the watch again and then calls the callback, which reads the current values; no change goes unnoticed in between. Feeds
of ``watch_below`` share one recursive watch (``zookeeper_feed``). Values that ``recall`` read are known until an event
of theirs comes (``zookeeper_known``).

Threads. kazoo's thread only schedules callbacks and never waits. Callbacks run in the callback thread, requests in
the threads of their callers.
"""

from __future__ import annotations

import logging
import os
import secrets
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from typing import Any, Final, TypeVar

from kazoo.exceptions import (
    BadVersionError,
    ConnectionLoss,
    KazooException,
    NodeExistsError,
    NoNodeError,
    NotEmptyError,
    OperationTimeoutError,
    RequestTimeoutError,
    RolledBackError,
    RuntimeInconsistency,
    SessionExpiredError,
    SessionMovedError,
    ZookeeperError,
)
from kazoo.handlers.threading import KazooTimeoutError
from kazoo.protocol.states import KazooState

from pybk.errors import (
    ClosedError,
    ForkedProcessError,
    MetadataError,
    MetadataExistsError,
    MetadataUnreachableError,
    MetadataVersionError,
    UsageError,
)
from pybk.metadata.callbacks import Callback, Callbacks
from pybk.metadata.change_feed import ChangeFeed
from pybk.metadata.lease_time import ZOOKEEPER_LEASE_TIME_S, trusted_after_loss
from pybk.metadata.store import CALL_TIMEOUT_S, Node, StoreOptions, StoreUrl, checked_key, checked_value
from pybk.metadata.zookeeper_access import OPEN, ZOOKEEPER_AUTH, Client, ZooKeeperAccess, access_of
from pybk.metadata.zookeeper_acls import ForeignZnode, foreign_znodes
from pybk.metadata.zookeeper_feed import UNSUPPORTED_S, ZooKeeperFeeds
from pybk.metadata.zookeeper_known import KnownValues

logger = logging.getLogger(__name__)
logging.getLogger("kazoo").addHandler(logging.NullHandler())  # without a handler it writes to stderr

T = TypeVar("T")

_LOST: Final = (
    ConnectionLoss,
    SessionExpiredError,
    SessionMovedError,
    OperationTimeoutError,
    RequestTimeoutError,
    KazooTimeoutError,
)
"""Errors that leave the outcome of a request unknown."""

_PIPELINE: Final = 500
"""Reads that ``get_many`` sends before it waits for their answers."""

_GUARD: Final = "~guard-"
"""The prefix of the names of guards; see this module."""

_VERSION_BITS: Final = 32
_READ_PAUSE_S: Final = 0.05


def open_url(url: StoreUrl, options: StoreOptions) -> ZooKeeperMetadataStore:
    """Open the store of a URL; see ``pybk.metadata.url``. Raises UsageError if the URL is invalid."""
    hosts, root = _hosts(url), _root(url)
    return ZooKeeperMetadataStore(
        hosts,
        root,
        timeout_s=options.timeout_s,
        lease_time_s=ZOOKEEPER_LEASE_TIME_S if options.lease_time_s is None else options.lease_time_s,
        access=access_of(url),
    )


def _hosts(url: StoreUrl) -> str:
    """Return ZooKeeper's hosts in the form that its client takes."""
    netloc = url.parts.netloc
    if "@" in netloc:
        raise UsageError(
            "a metadata URL takes no user or password: name a file that holds user:password by auth_file=FILE in the "
            f"query, or set the environment variable {ZOOKEEPER_AUTH} or {ZOOKEEPER_AUTH}_FILE"
        )
    for host in netloc.split(","):
        name, colon, port = host.rpartition(":")
        if not name or not colon or not port.isascii() or not port.isdecimal() or not 0 < int(port) < 1 << 16:
            raise url.invalid(f": {host!r:.100} is not host:port with a port from 1 to 65535")
    return netloc


def _root(url: StoreUrl) -> str:
    """Return the path of the znode above all keys."""
    names = url.parts.path.strip("/").split("/")
    if not all(names) or any(name in (".", "..", "zookeeper") for name in names):
        raise url.invalid(" needs a path of its own in ZooKeeper, such as /ledgers")
    return "/" + "/".join(names)


class ZooKeeperMetadataStore:
    """A metadata store in ZooKeeper; see this module and :class:`pybk.metadata.store.MetadataStore`.

    Args:
        hosts: ``host:port``, several separated by commas.
        root: Path of a znode; created if it is missing.
        timeout_s: Deadline of each call, seconds.
        lease_time_s: Lease time that the servers are asked for, seconds; see ``lease_time``.
        access: TLS, and the access control list of the znodes that this process creates. A warning is logged if those
            of the store's root belong to others.

    Raises:
        MetadataUnreachableError: No server answered in time.
        MetadataError: The servers refused access.

    Threads: any. In a forked child every call raises ForkedProcessError; open another store there.
    """

    def __init__(
        self,
        hosts: str,
        root: str,
        *,
        timeout_s: float = CALL_TIMEOUT_S,
        lease_time_s: float = ZOOKEEPER_LEASE_TIME_S,
        access: ZooKeeperAccess = OPEN,
    ) -> None:
        self.hosts = hosts
        """The hosts of the ensemble, in kazoo's form."""
        self.root = root
        """The znode above all keys."""
        self._timeout_s = timeout_s
        self._lease_time_s = lease_time_s
        self._pid = os.getpid()
        self._closed = False
        self.connected = threading.Event()
        """An event that is set while the connection exists."""
        self.session_id = 0  # 0 for none
        self._lost_at: float | None = None  # when the connection was lost, None while it exists
        self._leased: set[str] = set()  # leased keys that this object created, ever
        self._callbacks = Callbacks(f"pybk metadata {hosts}{root}")
        self.access = access
        """The access to the servers."""
        self.client = Client(hosts, lease_time_s, access)
        """The connection to ZooKeeper."""
        self._feeds = ZooKeeperFeeds(self.client, root, self._callbacks, _GUARD)
        self._known = KnownValues(self.client)
        self.client.add_listener(self._state_changed)
        self.client.start_async()
        try:
            deadline = self._deadline()
            self._wait_connected(deadline)
            self._outcome(self.client.ensure_path_async(root), deadline)
            if access.identity:
                self._check_root(self._outcome(self.client.get_acls_async(root), deadline)[0])
        except BaseException as error:
            self.close()
            if isinstance(error, _LOST):
                raise self._unreachable(f"make {root}", error) from error
            if isinstance(error, ZookeeperError):
                raise self._refused(f"make {root}", error) from error
            raise

    # ---- keys ----------------------------------------------------------------------------------------------------

    def get(self, key: str, *, latest: bool = False) -> Node | None:
        """See ``MetadataStore.get``; one round trip."""
        path = self._path(key)

        def read(deadline: float) -> Node | None:
            # A session's requests are answered in order, so the read is sent without waiting for the sync.
            synced = self.client.sync_async(path) if latest else None
            result = self.client.get_async(path)
            if synced is not None:
                self._outcome(synced, deadline)
            return self.node(result, deadline)

        return self._read(f"get {key!r}", read)

    def recall(self, key: str) -> Node | None:
        """See ``MetadataStore.recall``; a round trip if the value is not known (``zookeeper_known``)."""
        path = self._path(key)
        known = self._known.find(path)
        if known is not None:
            return known.node

        def read(deadline: float) -> Node | None:
            return self._known.read(
                path, lambda result: self._outcome(result, deadline), lambda result: self.node(result, deadline)
            )

        return self._read(f"recall {key!r}", read)

    def get_many(self, keys: Sequence[str], *, latest: bool = False) -> list[Node | None]:
        """See ``MetadataStore.get_many``; up to ``_PIPELINE`` requests are under way at a time."""
        paths = [self._path(key) for key in keys]

        def read(deadline: float) -> list[Node | None]:
            synced = self.client.sync_async(paths[0]) if latest and paths else None  # as in ``get``
            found: list[Node | None] = []
            for at in range(0, len(paths), _PIPELINE):
                results = [self.client.get_async(path) for path in paths[at : at + _PIPELINE]]
                found += [self.node(result, deadline) for result in results]
            if synced is not None:
                self._outcome(synced, deadline)
            return found

        return self._read(f"get {len(keys)} keys", read)

    def children(self, key: str) -> list[str]:
        """See ``MetadataStore.children``; one round trip."""
        path = self._path(key)

        def read(deadline: float) -> list[str]:
            try:
                return sorted(self._outcome(self.client.get_children_async(path), deadline))
            except NoNodeError:
                return []

        return self._read(f"children of {key!r}", read)

    def walk(self) -> Iterator[tuple[str, Node]]:
        """See ``MetadataStore.walk``; one round trip for each key that has others below it, and those of its values."""

        def read(deadline: float) -> list[str]:
            return list(self._outcome(self.client.get_children_async(self.root), deadline))

        names = self._read("children of the root", read)
        yield from self._walk(sorted(names, key=lambda name: (name == "ids", name)))

    def _walk(self, keys: list[str]) -> Iterator[tuple[str, Node]]:
        for at in range(0, len(keys), _PIPELINE):
            page = keys[at : at + _PIPELINE]
            for key, node in zip(page, self.get_many(page), strict=True):
                if node is not None:
                    yield key, node
                else:
                    names = self.children(key)
                    yield from self._walk([f"{key}/{name}" for name in names if not name.startswith(_GUARD)])

    def create(self, key: str, value: bytes, *, leased: bool = False) -> int:
        """See ``MetadataStore.create``; one round trip, and more if a parent of the key is missing."""
        path, value = self._path(key), checked_value(key, value)
        if leased:
            self._leased.add(key)

        def write(deadline: float) -> int:
            result = self.client.create_async(path, value, ephemeral=leased, makepath=True, include_data=True)
            try:
                return _version(self._outcome(result, deadline)[1])
            except NodeExistsError as error:
                raise MetadataExistsError(f"metadata key {key!r} exists") from error

        return self._write(f"create {key!r}", write)

    def put(self, key: str, value: bytes, version: int, *, reused: bool = False) -> int:
        """See ``MetadataStore.put``; one round trip, two for a key that is leased or used again."""
        path, value = self._path(key), checked_value(key, value)
        if reused:

            def put(transaction: Any) -> None:
                transaction.set_data(path, value, _data_version(version))

            return _version(self._write(f"put {key!r}", self._guarded(path, version, put), key, version)[1])
        if key in self._leased:
            self._check_creation(key, version)

        def write(deadline: float) -> int:
            return _version(self._outcome(self.client.set_async(path, value, _data_version(version)), deadline))

        return self._write(f"put {key!r}", write, key, version)

    def delete(self, key: str, version: int, *, reused: bool = False) -> None:
        """See ``MetadataStore.delete``; two round trips."""
        path = self._path(key)
        if reused:

            def delete(transaction: Any) -> None:
                transaction.delete(path, _data_version(version))

            self._write(f"delete {key!r}", self._guarded(path, version, delete), key, version)
            return
        self._check_creation(key, version)

        def write(deadline: float) -> None:
            self._outcome(self.client.delete_async(path, _data_version(version)), deadline)

        self._write(f"delete {key!r}", write, key, version)

    def rename(self, key: str, target: str, value: bytes, version: int) -> None:
        """See ``MetadataStore.rename``; two round trips."""
        path, target_path, value = self._path(key), self._path(target), checked_value(target, value)

        def rename(transaction: Any) -> None:
            transaction.delete(path, _data_version(version))
            transaction.create(target_path, value)

        guarded = self._guarded(path, version, rename)

        def write(deadline: float) -> None:
            try:
                guarded(deadline)
            except NodeExistsError as error:
                raise MetadataExistsError(f"metadata key {target!r} exists") from error

        self._write(f"rename {key!r} to {target!r}", write, key, version)

    def _guarded(self, path: str, version: int, change: Callable[[Any], None]) -> Callable[[float], list[Any]]:
        """Return a write that adds a change to a transaction, and commits it if a key still has a version.

        The write returns the result of each operation, that of the guard first.
        """

        def write(deadline: float) -> list[Any]:
            while (results := attempt(deadline)) is None:
                continue
            return results

        def attempt(deadline: float) -> list[Any] | None:
            """Try once; return None if another change had its guard there or removed this one."""
            guard = f"{path}/{_GUARD}{secrets.token_hex(8)}"
            guarded = self.client.create_async(guard, ephemeral=True)
            found = self.client.get_async(path)
            self._outcome(guarded, deadline)
            try:
                node = self.node(found, deadline)
                if node is None or node.version != version:
                    raise BadVersionError
                transaction = self.client.transaction()
                transaction.delete(guard)
                change(transaction)
                results: list[Any] = self._outcome(transaction.commit_async(), deadline)
            except BaseException:
                self.client.delete_async(guard)  # otherwise it would stay until the session ends
                raise
            # Each operation of a failed transaction has an error, and one of these errors is the reason.
            errors = [each for each in results if isinstance(each, Exception)]
            reasons = [each for each in errors if not isinstance(each, RolledBackError | RuntimeInconsistency)]
            if not errors:
                return results
            if isinstance(results[0], NoNodeError):
                return None
            if any(isinstance(each, NotEmptyError) for each in reasons):
                self._remove_guards(path, deadline)
                return None
            self.client.delete_async(guard)
            raise reasons[0] if reasons else BadVersionError

        return write

    def _remove_guards(self, path: str, deadline: float) -> None:
        """Remove the guards of other changes, which then begin again."""
        for child in self._outcome(self.client.get_children_async(path), deadline):
            if child.startswith(_GUARD):
                with suppress(NoNodeError):
                    self._outcome(self.client.delete_async(f"{path}/{child}"), deadline)

    # ---- sessions and watches ------------------------------------------------------------------------------------

    def session(self) -> int:
        """See ``MetadataStore.session``; waits for the connection until the deadline."""
        self._wait_connected(self._deadline())
        return self.session_id

    def alive(self, session: int) -> bool:
        """See ``MetadataStore.alive``; after a lost connection for ``lease_time.trusted_after_loss``."""
        lost_at = self._lost_at
        trusted = lost_at is None or time.monotonic() - lost_at < trusted_after_loss(self._lease_time_s)
        return 0 != session == self.session_id and trusted and not self._closed and os.getpid() == self._pid

    def watch(self, key: str, callback: Callable[[], None]) -> Callback:
        """See ``MetadataStore.watch``."""
        path = self._path(key)

        def changed(_: object) -> None:
            self._callbacks.schedule(watch)

        def arm(deadline: float) -> None:
            # Each watch reports one change. Both requests must be answered, because either one may fail.
            exists = self.client.exists_async(path, watch=changed)
            children = self.client.get_children_async(path, watch=changed)
            self._outcome(exists, deadline)
            try:
                self._outcome(children, deadline)
            except NoNodeError:
                return  # the watch on the key's existence reports its creation

        def call() -> None:
            self._read(f"watch {key!r}", arm)
            callback()

        watch = self._callbacks.add(key, call)
        try:
            self._read(f"watch {key!r}", arm)
        except BaseException:
            watch.cancel()
            raise
        return watch

    def watch_below(self, key: str, callback: Callable[[frozenset[str] | None], None]) -> Callback:
        """See ``MetadataStore.watch_below``; for servers before ZooKeeper 3.6 see ``zookeeper_feed``."""
        self._path(key)
        feed = ChangeFeed(key, callback)

        def call() -> None:
            self._read(f"watch below {key!r}", self._feeds.arm)
            feed.report()
            if not self._feeds.supported:
                feed.note(None)
                self._callbacks.schedule(watch, UNSUPPORTED_S)

        watch = self._callbacks.add(key, call)
        self._feeds.add(watch, feed)
        try:
            self._read(f"watch below {key!r}", self._feeds.arm)
        except BaseException:
            watch.cancel()
            raise
        self._callbacks.schedule(watch)
        return watch

    def foreign_znodes(self, *, change: bool = False) -> list[ForeignZnode]:
        """Return the znodes that do not belong to the identity of this store's access alone.

        Args:
            change: Whether to give them to that identity.

        Raises:
            MetadataUnreachableError: The servers do not answer; znodes that were changed stay changed.
        """
        self._wait_connected(self._deadline())
        try:
            found = foreign_znodes(self.client, self.root, self.access, change=change, timeout_s=self._timeout_s)
            return list(found)
        except _LOST as error:
            raise self._unreachable("read access control lists", error) from error
        except ZookeeperError as error:
            raise self._refused("read access control lists", error) from error

    def on_session_end(self, callback: Callable[[], None]) -> Callback:
        """See ``MetadataStore.on_session_end``."""
        return self._callbacks.add(None, callback)

    def close(self) -> None:
        """See ``MetadataStore.close``; in a forked child it does nothing."""
        if self._closed or os.getpid() != self._pid:
            return
        self._closed = True
        self._callbacks.close()
        try:
            self.client.stop()
            self.client.close()
        except KazooException as error:
            logger.warning("%s: the connection could not be closed properly: %s", self.hosts, error)
        self.connected.set()  # calls that wait for the connection then raise ClosedError

    # ---- requests ------------------------------------------------------------------------------------------------

    def _path(self, key: str) -> str:
        if os.getpid() != self._pid:
            raise ForkedProcessError(f"{self.hosts}: opened before the fork that made this process; open it again here")
        if self._closed:
            raise ClosedError(f"{self.hosts}: this metadata store is closed")
        return f"{self.root}/{checked_key(key)}"

    def _deadline(self) -> float:
        return time.monotonic() + self._timeout_s

    def _outcome(self, result: Any, deadline: float) -> Any:
        return result.get(timeout=max(0.0, deadline - time.monotonic()))

    def node(self, result: Any, deadline: float) -> Node | None:
        """Wait for the answer to a read, and return the node; None if the znode does not exist."""
        try:
            value, stat = self._outcome(result, deadline)
        except NoNodeError:
            return None
        return Node(value, _version(stat)) if value else None

    def _wait_connected(self, deadline: float) -> None:
        """Wait for the connection, so that a request that could not be sent is known to have no effect."""
        if not self.connected.wait(max(0.0, deadline - time.monotonic())):
            raise MetadataUnreachableError(
                f"{self.hosts}: no ZooKeeper server could be reached within {self._timeout_s} s; check that they run"
                f"{self.client.trouble}"
            )
        if self._closed:
            raise ClosedError(f"{self.hosts}: this metadata store is closed")

    def _check_root(self, found: list[Any]) -> None:
        """Log a warning if the root's access control list is not that of new znodes."""
        if not self.access.matches(found):
            logger.warning(
                "%s: the znode %s does not belong to %s alone, so others may change the metadata; find all such znodes "
                "with `pybk permissions URL`, and change them with its --narrow",
                self.hosts,
                self.root,
                self.access.identity,
            )

    def _refused(self, what: str, error: ZookeeperError) -> MetadataError:
        remedy = self.access.refusal(error)
        problem = f"{type(error).__name__} {error}".strip()
        return MetadataError(f"{self.hosts}: {what}: {problem}" + (remedy and f"; {remedy}"))

    def _unreachable(self, what: str, error: Exception, *, unknown: bool = False) -> MetadataUnreachableError:
        return MetadataUnreachableError(
            f"{self.hosts}: {what}: no answer ({type(error).__name__} {error}); check that the servers run",
            outcome_unknown=unknown,
        )

    def _read(self, what: str, read: Callable[[float], T]) -> T:
        """Run a read, and repeat it after a lost connection, until the deadline."""
        deadline = self._deadline()
        while True:
            self._wait_connected(deadline)
            try:
                return read(deadline)
            except _LOST as error:
                if time.monotonic() + _READ_PAUSE_S >= deadline:
                    raise self._unreachable(what, error) from error
                time.sleep(_READ_PAUSE_S)
            except ZookeeperError as error:
                raise self._refused(what, error) from error

    def _write(self, what: str, write: Callable[[float], T], key: str = "", version: int = 0) -> T:
        """Run a change, once."""
        deadline = self._deadline()
        self._wait_connected(deadline)
        try:
            return write(deadline)
        except (BadVersionError, NoNodeError) as error:
            raise MetadataVersionError(
                f"metadata key {key!r} has another version than {version}, or no value; read it again"
            ) from error
        except _LOST as error:
            raise self._unreachable(what, error, unknown=True) from error
        except ZookeeperError as error:
            raise self._refused(what, error) from error

    def _check_creation(self, key: str, version: int) -> None:
        """Raise MetadataVersionError if a key was removed, or removed and created again, since it had this version."""
        node = self.get(key, latest=True)
        if node is None or node.version >> _VERSION_BITS != version >> _VERSION_BITS:
            raise MetadataVersionError(
                f"metadata key {key!r} was removed since it had version {version}; read it again"
            )

    def _state_changed(self, state: str) -> None:
        """Note a change of the connection's state; called by kazoo's thread, so it must not block."""
        if state == KazooState.CONNECTED:
            self.session_id = self.client.client_id[0]
            self._lost_at = None
            self.connected.set()
            self._feeds.connected()
            return
        self.connected.clear()
        self._feeds.disconnected()
        self._known.disconnected()
        if self._lost_at is None:
            self._lost_at = time.monotonic()
        if state == KazooState.LOST:
            self.session_id = 0
            self._callbacks.session_ended()


def _version(stat: Any) -> int:
    return int(stat.czxid) << _VERSION_BITS | int(stat.version)


def _data_version(version: int) -> int:
    return version & ((1 << _VERSION_BITS) - 1)

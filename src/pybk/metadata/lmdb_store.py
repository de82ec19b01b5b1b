"""The metadata store of one host: an LMDB environment that several processes share.

Theory of operation
-------------------

Files. A directory holds an LMDB environment (``data.mdb``, ``lock.mdb``) with the values (``lmdb_rows``), and the file
``sessions`` with the locks and heartbeats of the processes (``host_file``). No process is a server: each one that opens
the store does a share of the work described here.

Changes. Each change is one LMDB transaction and is on disk when the call returns, after about 0.3 ms. Changes are
numbered; a value's version is the number of the change that wrote it, so no key ever has the same version twice.
LMDB's pages have no checksums, therefore each row carries a CRC32C.

The write lock. LMDB has one writer at a time, and its own lock cannot be taken from a process that is stopped
(SIGSTOP, Ctrl-Z) while it holds it. So a writer first takes the *write lock* of the host file, then opens the
transaction. The kernel releases the lock of a process that dies. If the holder is stopped, the first process that
waits for it resumes it with SIGCONT; the holder finishes its transaction and stops itself again, within about a
millisecond. This takes the permission to signal the holder. Where that is missing, or where a debugger or the freezer
of a container stopped the holder, waiting processes raise MetadataUnreachableError at their deadline, and the error
names the holder. Readers and heartbeats never wait for the write lock.

Sessions. A session is a row in the environment and a slot of the host file. The slot is locked by the session's
process and holds the time of its last heartbeat. A session has ended when its slot is not locked or its heartbeat is
older than the lease time. Its states:

    none  --session()-->  alive  --silent for the lease time, or process died-->  ended  --sweep-->  removed

Heartbeats (``heartbeat``) write the slot and cost no transaction. Any process may notice that a session has ended and
remove its row and leases (``sweep``). The keeper threads look for ended sessions, four times a second over all
processes together. Readers look as well, because they must not return leases of a dead process. A process whose session
was removed by others notices it with its next heartbeat or leased ``create``, and calls the ``on_session_end``
callbacks.

Watches. ``ChangeSignal`` reports that the environment's file was written to (inotify). The keeper thread then
compares the watched keys with what it saw last (``poll``), and schedules the callbacks of those that differ. It also
compares every 2 s without a signal. While only other keys change, it does so at most every 40 ms. At the same times
it reads which keys the latest changes wrote (``lmdb_changes``), for the feeds of ``watch_below``.

Threads. The *keeper* thread (``keep``) sends heartbeats, looks for ended sessions and polls watches; it starts with
the first session or watch. The *callback* thread (``Callbacks``) runs callbacks and removes ended sessions, because a
transaction may take long and heartbeats must not wait for it. Calls of the application run in their own threads.
``thread_lock`` serialises the writers of this process before the write lock serialises processes. ``_lock`` guards
``session_id``, ``slot``, ``seen``, ``_feeds``, ``_fed_number``, ``_keeper`` and ``closed``; the callbacks' own lock is
only taken after it.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Final, NamedTuple, TypeVar
from urllib.parse import quote, unquote

from pybk.errors import (
    ClosedError,
    CorruptError,
    MetadataError,
    MetadataExistsError,
    MetadataUnreachableError,
    MetadataVersionError,
    StorageError,
    UnsupportedFormatError,
)
from pybk.metadata import lmdb_rows as rows
from pybk.metadata.callbacks import Callback, Callbacks
from pybk.metadata.change_feed import ChangeFeed
from pybk.metadata.change_signal import ChangeSignal
from pybk.metadata.host_file import SESSION_SLOTS, HostFile, is_stopped
from pybk.metadata.lease_time import LMDB_LEASE_TIME_S, heartbeat_interval, sweep_interval
from pybk.metadata.lmdb_changes import NotedWrites, changed_keys
from pybk.metadata.lmdb_rows import FORMAT_NAME, Session, StoredValue, node_name
from pybk.metadata.store import CALL_TIMEOUT_S, Node, StoreOptions, StoreUrl, checked_key, checked_value
from pybk.storage.io.failures import is_full
from pybk.storage.io.filesystem import OsFileSystem
from pybk.storage.io.lmdb_environment import LMDB_LOCK, LmdbEnvironment, ReadTransaction, WriteTransaction
from pybk.storage.io.permissions import PRIVATE, Access, access_of, excess_warning, paths_too_open
from pybk.threads import start_thread
from pybk.threads.interrupts import acquire, checkpoint, guarded

logger = logging.getLogger(__name__)

T = TypeVar("T")

STORE_FORMAT: Final = 1
HOST_FILE: Final = "sessions"
_DATA_FILE: Final = "data.mdb"
MAP_BYTES: Final = 1 << 36
"""The bound on the size of the environment."""

_GROUP: Final = "group"
"""The name of the URL's query parameter."""

SWEEP_MAX_S: Final = 2.0
"""The longest time between two searches for ended sessions by an idle process; processes share the searches."""

_CHECK_S: Final = 1.0
"""The time between two checks whether another process ended this process's session."""

_POLL_S: Final = 2.0
"""The time after which watched keys are compared even if no change of the environment was reported."""

PACE_S: Final = 0.01
"""The least time between two comparisons of the watched keys, however often the environment changes."""

_PACE_MAX_S: Final = 0.04
"""The limit to which ``PACE_S`` grows: it doubles with each comparison that finds no watched key changed."""

_PACE_LEAST_S: Final = 0.004
"""The shortest rest of the pace for which the keeper waits."""

PAUSE_MIN_S: Final = 0.0001
PAUSE_MAX_S: Final = 0.0005
"""The pauses between two attempts to take the write lock grow from the first to the second value."""

_READERS_S: Final = 10.0
"""The time between two searches for entries of killed processes in LMDB's reader table."""

_RESERVE_BYTES: Final = 1 << 20
"""The space that LMDB has allocated in advance."""

PATIENCE_S: Final = 0.05
"""The time that another process may hold the write lock before this one checks whether it is stopped."""


class LmdbLocation(NamedTuple):
    """The location of an LMDB metadata store.

    Attributes:
        path: Its directory.
        group: The group with which the URL shares the directory, by name or number; None if the URL names no group.
    """

    path: str
    group: str | None


def open_url(url: StoreUrl, options: StoreOptions) -> LmdbMetadataStore:
    """Open the store of a URL; see ``pybk.metadata.url``.

    Raises:
        UsageError: The URL is invalid, or its group does not exist or does not have this process as a member.
        MetadataError: The directory is missing and must not or cannot be created.
    """
    path, group = location_of(url)
    if not options.create and not os.path.isdir(path):
        raise MetadataError(f"there is no metadata store at {url.text}: check the URL, or start the first bookie")
    access = access_of(os.path.join(path, HOST_FILE), group)
    try:
        OsFileSystem(access).make_directory(path)
    except OSError as error:
        raise MetadataError(f"{path} cannot be made: {error}; name a directory that can") from error
    lease_time_s = LMDB_LEASE_TIME_S if options.lease_time_s is None else options.lease_time_s
    return LmdbMetadataStore(path, timeout_s=options.timeout_s, lease_time_s=lease_time_s, access=access)


def location_of(url: StoreUrl) -> LmdbLocation:
    """Return the directory and the group of an LMDB metadata store; raises UsageError for any other URL."""
    parts = url.parts
    path = unquote(parts.path)
    if parts.scheme != "lmdb" or parts.netloc or len(path) < 2 or "\0" in path:
        raise url.invalid(" needs three slashes and an absolute path")
    group = None
    if parts.query:
        name, _, value = parts.query.partition("=")
        group = unquote(value)
        if name != _GROUP or not group or "&" in value:
            raise url.invalid(f" has the query {parts.query!r}")
    return LmdbLocation(path, group)


class LmdbMetadataStore:
    """A metadata store in an LMDB environment; see this module and :class:`pybk.metadata.store.MetadataStore`.

    Args:
        path: A directory on a local disk; created if it is missing, with an existing parent.
        timeout_s: Deadline of each call, seconds.
        lease_time_s: Seconds without a heartbeat after which a process loses its leases; see ``lease_time``.
        access: Permissions of a new directory and its files. A process that can open ``sessions`` can lock any slot and
            stop a writer, so only the users of the store may have access to the file.

    Raises:
        CorruptError: The environment is damaged.
        UnsupportedFormatError: It is of another format.
        OSError: The directory or a file in it cannot be created.

    Changes may raise StorageFullError, without effect, and StorageFailedError, which is final for this process.
    Threads: any. In a forked child every call raises ForkedProcessError; open another store there.

    Cost: Some 10 microseconds per read, 0.3 ms per change.
    """

    def __init__(
        self,
        path: str,
        *,
        timeout_s: float = CALL_TIMEOUT_S,
        lease_time_s: float = LMDB_LEASE_TIME_S,
        access: Access = PRIVATE,
    ) -> None:
        self.path = os.path.realpath(path)
        """The directory of the environment."""
        self._timeout_s = timeout_s
        self._lease_time_s = lease_time_s
        self.heartbeat_s = heartbeat_interval(lease_time_s)
        """The seconds between two heartbeats."""
        self.sweep_s = sweep_interval(lease_time_s)
        """The seconds between two searches for ended sessions, of all processes together."""
        with self._explained():
            self._environment = LmdbEnvironment(self.path, map_bytes=MAP_BYTES, access=access)
        self.host_file = HostFile(os.path.join(self.path, HOST_FILE), access)
        """The file in which processes of this host share slots and locks."""
        self._callbacks = Callbacks(f"pybk metadata {self.path}")
        self._sweeping = self._callbacks.add("", self.sweep)
        self.thread_lock = threading.Lock()
        """Held by the thread of this process that changes the environment."""
        self._lock = threading.Lock()
        self.session_id = 0  # 0 for none
        self.slot = 0
        """The slot of the session in the host file."""
        self._heartbeat_at = 0.0
        self.swept_at = 0.0
        """The time of the last search for ended sessions."""
        self.sessions_seen = 1  # sessions of all processes at the last search
        self._sessions: list[Session] = []  # as of change number _sessions_at
        self._sessions_at = -1
        self.polled_at = 0.0
        """The time of the last comparison of the watched keys."""
        self._pace_s = PACE_S
        self._checked_at = 0.0
        self.readers_due = time.monotonic() + _READERS_S
        """The time when the slots of killed readers are freed next."""
        self.seen: dict[Callback, tuple[int, object]] = {}  # change number and fingerprint of each watched key
        self._feeds: dict[Callback, ChangeFeed] = {}
        self._fed_number = 0  # the last change that the feeds know of
        self.closed = False
        """True once ``close`` was called."""
        self.change_signal = ChangeSignal(os.path.join(self.path, _DATA_FILE))
        """The signal that wakes the keeper."""
        self._keeper: threading.Thread | None = None
        try:
            self._warn_of_wide_access(access)
            self._check_format()
            self._reserve()
        except BaseException:
            self.change_signal.close()
            self.host_file.close()
            self._environment.close()
            raise

    # ---- keys ----------------------------------------------------------------------------------------------------

    def get(self, key: str, *, latest: bool = False) -> Node | None:
        """See ``MetadataStore.get``; every read returns the latest value."""
        return self.get_many((key,))[0]

    def recall(self, key: str) -> Node | None:
        """See ``MetadataStore.recall``; nothing is kept, because every read is short."""
        return self.get_many((key,))[0]

    def get_many(self, keys: Sequence[str], *, latest: bool = False) -> list[Node | None]:
        """See ``MetadataStore.get_many``; all values are from one snapshot."""
        names = [node_name(key) for key in keys]
        if self._sweep_is_due():
            self.sweep()
        with self._explained(), self._environment.read() as transaction:
            found = [rows.get_value(transaction, name) for name in names]
        return [None if each is None else Node(each.value, each.version) for each in found]

    def children(self, key: str) -> list[str]:
        """See ``MetadataStore.children``."""
        name = node_name(key)
        if self._sweep_is_due():
            self.sweep()
        with self._explained(), self._environment.read() as transaction:
            return [child for child, _ in rows.children(transaction, name)]

    def walk(self) -> Iterator[tuple[str, Node]]:
        """See ``MetadataStore.walk``; one snapshot, without leased keys."""
        with self._explained(), self._environment.read() as transaction:
            for key, stored in rows.all_values(transaction):
                if not stored.session:
                    yield key, Node(stored.value, stored.version)

    def create(self, key: str, value: bytes, *, leased: bool = False) -> int:
        """See ``MetadataStore.create``."""
        name, value = node_name(key), checked_value(key, value)
        while True:
            session = self.session() if leased else 0

            def change(transaction: WriteTransaction, number: int, session: int = session) -> bool:
                if session and rows.get_session(transaction, session) is None:
                    return False
                found = rows.get_value(transaction, name)
                if found is not None and found.session and self._is_dead(transaction, found.session):
                    rows.end_session(transaction, found.session)
                    found = None
                if found is not None:
                    raise MetadataExistsError(f"metadata key {key!r} exists, with version {found.version}")
                rows.put_value(transaction, name, StoredValue(number, number, session, value))
                return True

            done, number = self.change(change)
            if done:
                return number
            self.session_lost(session)

    def put(self, key: str, value: bytes, version: int, *, reused: bool = False) -> int:
        """See ``MetadataStore.put``; versions are never used again."""
        name, value = node_name(key), checked_value(key, value)

        def change(transaction: WriteTransaction, number: int) -> None:
            found = self._expected(transaction, key, name, version)
            rows.put_value(transaction, name, found._replace(version=number, value=value))

        return self.change(change)[1]

    def delete(self, key: str, version: int, *, reused: bool = False) -> None:
        """See ``MetadataStore.delete``; versions are never used again."""
        name = node_name(key)

        def change(transaction: WriteTransaction, number: int) -> None:
            found = self._expected(transaction, key, name, version)
            rows.delete_value(transaction, name, found.session)

        self.change(change)

    def rename(self, key: str, target: str, value: bytes, version: int) -> None:
        """See ``MetadataStore.rename``."""
        name, target_name, value = node_name(key), node_name(target), checked_value(target, value)

        def change(transaction: WriteTransaction, number: int) -> None:
            found = self._expected(transaction, key, name, version)
            taken = rows.get_value(transaction, target_name)
            if taken is not None:
                raise MetadataExistsError(f"metadata key {target!r} exists, with version {taken.version}")
            rows.delete_value(transaction, name, found.session)
            rows.put_value(transaction, target_name, StoredValue(number, number, 0, value))

        self.change(change)

    # ---- sessions and watches ------------------------------------------------------------------------------------

    def session(self) -> int:
        """See ``MetadataStore.session``."""
        self.host_file.descriptor()
        with self._lock:
            if self.closed:
                raise ClosedError(f"{self.path}: this metadata store is closed")
            if not self.session_id:
                self.slot, self.session_id = self.change(self._begin)
                self._heartbeat_at = time.monotonic()
                self.start_keeper()
            return self.session_id

    def alive(self, session: int) -> bool:
        """See ``MetadataStore.alive``."""
        fresh = time.monotonic() - self._heartbeat_at < self._lease_time_s
        return 0 != session == self.session_id and fresh and not self.closed and not self.host_file.forked

    def watch(self, key: str, callback: Callable[[], None]) -> Callback:
        """See ``MetadataStore.watch``."""
        checked_key(key)
        watch = self._callbacks.add(key, callback)
        with self._explained(), self._environment.read() as transaction:
            seen = (rows.last_number(transaction), self.look(transaction, key))
        with self._lock:
            self.seen[watch] = seen
            self.start_keeper()
        return watch

    def watch_below(self, key: str, callback: Callable[[frozenset[str] | None], None]) -> Callback:
        """See ``MetadataStore.watch_below``; changes by processes of older versions of pybk are reported as None."""
        feed = ChangeFeed(checked_key(key), callback)
        watch = self._callbacks.add("", feed.report)
        with self._explained(), self._environment.read() as transaction:
            number = rows.last_number(transaction)
        with self._lock:
            if not self._feeds:
                self._fed_number = number
            self._feeds[watch] = feed
            self.start_keeper()
        self._callbacks.schedule(watch)
        return watch

    def on_session_end(self, callback: Callable[[], None]) -> Callback:
        """See ``MetadataStore.on_session_end``."""
        return self._callbacks.add(None, callback)

    def close(self) -> None:
        """See ``MetadataStore.close``; in a forked child it does nothing."""
        if self.host_file.forked:
            return  # without the lock, which a thread of the parent may have held at the fork
        with self._lock:
            if self.closed:
                return
            self.closed = True
            session, keeper = self.session_id, self._keeper
        self._callbacks.close()
        self.change_signal.set()
        if keeper is not None and keeper is not threading.current_thread():
            keeper.join()
        if session:
            try:
                self.change(lambda transaction, number: rows.end_session(transaction, session))
            except (MetadataUnreachableError, StorageError) as error:
                logger.info(
                    "%s: the leases of this process remain until another one removes them: %s", self.path, error
                )
        self.change_signal.close()
        self.host_file.close()
        self._environment.close()

    def _care_for_space(self) -> None:
        """Remove entries of killed processes from LMDB's reader table, so that pages are reused, and reserve space."""
        if time.monotonic() >= self.readers_due:
            self.readers_due = time.monotonic() + _READERS_S
            with self._explained():
                self._environment.release_dead_readers()
            self._reserve()

    def _reserve(self) -> None:
        """Allocate space in advance, so that a full disk takes deletes; on a disk that is too full, do nothing."""
        try:
            self._environment.reserve(_RESERVE_BYTES)
        except OSError as error:
            if not is_full(error):
                logger.warning("%s: no space can be reserved for deletes: %s", self.path, error)

    # ---- transactions --------------------------------------------------------------------------------------------

    def change(self, change: Callable[[WriteTransaction, int], T], *, timeout_s: float | None = None) -> tuple[T, int]:
        """Run a change in a transaction of its own, with its number; return its result and the number."""
        self._care_for_space()
        with self._explained():
            return guarded(self._write, change, self._timeout_s if timeout_s is None else timeout_s)

    def _write(self, change: Callable[[WriteTransaction, int], T], timeout_s: float) -> tuple[T, int]:
        """Take the write lock before the deadline, and run the change in a transaction; in a guard."""
        self.host_file.descriptor()
        deadline = time.monotonic() + timeout_s
        if not acquire(self.thread_lock, timeout_s):
            raise MetadataUnreachableError(
                f"{self.path}: other threads of this process have used the metadata store's write lock for "
                f"{timeout_s} s"
            )
        try:
            ticket = self._wait_for_write_lock(deadline, timeout_s)
            try:
                with self._environment.write() as transaction:
                    number = rows.last_number(transaction) + 1
                    noted = NotedWrites(transaction)
                    result = change(noted, number)
                    noted.put_changes(number)
                    rows.put_last_number(transaction, number)
                return result, number
            finally:
                self.host_file.release_write_lock(ticket)
        finally:
            self.thread_lock.release()

    def _wait_for_write_lock(self, deadline: float, timeout_s: float) -> int:
        """Wait until no other process has the write lock, and take it; return the ticket."""
        pause = PAUSE_MIN_S
        patient = time.monotonic() + PATIENCE_S
        while not (ticket := self.host_file.try_write_lock()):
            now = time.monotonic()
            checkpoint()
            if now >= deadline:
                raise self._write_lock_timeout(timeout_s)
            if now >= patient:
                self.host_file.resume_stopped_writer()
                patient = now + PATIENCE_S
            time.sleep(pause)
            pause = min(pause * 1.5, PAUSE_MAX_S)
        return ticket

    def _write_lock_timeout(self, timeout_s: float) -> MetadataUnreachableError:
        pid = self.host_file.writer_pid()
        state = f"is stopped: resume it (kill -CONT {pid}) or end it" if is_stopped(pid) else "is slow: check its disk"
        return MetadataUnreachableError(
            f"{self.path}: the metadata store's write lock was not free within {timeout_s} s; process {pid} holds it "
            f"and {state}"
        )

    @contextmanager
    def _explained(self) -> Iterator[None]:
        """Replace the CorruptError of a damaged environment by one with the remedy for a metadata store."""
        try:
            yield
        except CorruptError as error:
            found = error.__cause__ or (error if error.path is None else "its file was cut")
            raise CorruptError(
                f"{self.path}: the metadata store is damaged ({found}); stop the processes that use it and restore it "
                "from a copy",
                path=self.path,
            ) from error

    def _warn_of_wide_access(self, access: Access) -> None:
        """Log one warning if users without permission can reach the store's directory or take its locks."""
        names = ("", HOST_FILE, LMDB_LOCK)
        found = paths_too_open(access, [os.path.join(self.path, name).rstrip(os.sep) for name in names])
        if found:
            logger.warning("%s", excess_warning(access, f"lmdb://{quote(self.path)}", found))

    def _check_format(self) -> None:
        """Check the format of the environment; an empty one gets the current format."""
        with self._explained(), self._environment.read() as transaction:
            found = rows.get(transaction, FORMAT_NAME)
        if found is None:

            def change(transaction: WriteTransaction, number: int) -> None:
                if transaction.get(FORMAT_NAME) is None:
                    rows.put(transaction, FORMAT_NAME, bytes((STORE_FORMAT,)))

            self.change(change)
        elif found != bytes((STORE_FORMAT,)):
            raise UnsupportedFormatError(
                f"{self.path}: a metadata store of format {found[0]}; this pybk reads {STORE_FORMAT}: use a newer one"
            )

    def _expected(self, transaction: WriteTransaction, key: str, name: bytes, version: int) -> StoredValue:
        """Return a key's value, which must have this version; raises MetadataVersionError otherwise."""
        found = rows.get_value(transaction, name)
        if found is None or found.version != version:
            raise MetadataVersionError(
                f"metadata key {key!r} has {'no value' if found is None else f'version {found.version}'} instead of "
                f"version {version}; read it again"
            )
        return found

    # ---- ended sessions ------------------------------------------------------------------------------------------

    def _begin(self, transaction: WriteTransaction, number: int) -> int:
        """Begin a session, whose number is that of the change; return its slot."""
        taken = {session.slot for session in rows.sessions(transaction)}
        slot = SESSION_SLOTS
        while slot in taken or not self.host_file.try_lock(slot):
            slot += 1
        timeout_ms = round(self._lease_time_s * 1000)
        rows.put_session(transaction, Session(number, slot, timeout_ms))
        return slot

    def _is_dead(self, transaction: ReadTransaction, session: int) -> bool:
        """Return whether a session has ended or was removed."""
        found = rows.get_session(transaction, session)
        if found is None:
            return True
        return self._is_silent(found)

    def _is_silent(self, found: Session) -> bool:
        """Return whether a session of another process has an unlocked slot, or no heartbeat for its lease time."""
        if found.number == self.session_id:
            return False
        return not self.host_file.locked(found.slot) or self.host_file.age_ns(found.slot) > found.timeout_ms * 1_000_000

    def _sweep_is_due(self, pause: float | None = None, *, early: bool = False) -> bool:
        """Return whether a search for ended sessions is due; the caller then makes it.

        Args:
            pause: Seconds between two searches; None for ``sweep_interval``.
            early: Whether a search that is nearly due counts, as for ``_is_nearly_due``.
        """
        now = time.monotonic()
        pause = self.sweep_s if pause is None else pause
        due = _is_nearly_due(now, self.swept_at, pause) if early else now - self.swept_at >= pause
        if due:
            self.swept_at = now
        return due

    def sweep_rest(self) -> float:
        """Return the seconds between two searches for ended sessions by this process while it is idle.

        Each search checks all sessions, so the processes that have a session share the searches. A process without a
        session does not search if another process has one.
        """
        longest = max(self.sweep_s, SWEEP_MAX_S)
        if self.session_id or not self.sessions_seen:
            return min(self.sweep_s * max(self.sessions_seen, 1), longest)
        return longest

    def dead(self) -> list[int]:
        """Return the sessions that have ended."""
        with self._explained(), self._environment.read() as transaction:
            number = rows.last_number(transaction)
            if number != self._sessions_at:
                self._sessions = rows.sessions(transaction)
                self._sessions_at = number
        self.sessions_seen = len(self._sessions)
        return [session.number for session in self._sessions if self._is_silent(session)]

    def sweep(self) -> None:
        """Remove ended sessions and their leases; if the write lock is not free soon, a later search removes them."""
        dead = self.dead()
        if not dead:
            return

        def change(transaction: WriteTransaction, number: int) -> None:
            for session in dead:
                if self._is_dead(transaction, session):
                    rows.end_session(transaction, session)

        try:
            self.change(change, timeout_s=self.sweep_s)
        except MetadataUnreachableError as error:
            logger.info("%s: ended sessions %s are removed later: %s", self.path, dead, error)

    def session_lost(self, session: int) -> None:
        """Forget a session that another process has removed, and schedule the callbacks for its end."""
        with self._lock:
            if self.session_id != session:
                return
            self.session_id = 0
            self.host_file.unlock(self.slot)
        self._callbacks.session_ended()

    # ---- the keeper thread ---------------------------------------------------------------------------------------

    def start_keeper(self) -> None:
        """Start the keeper thread if it does not run, and wake it; the caller holds ``_lock``."""
        if self._keeper is None and not self.closed:
            keeper = threading.Thread(target=self.keep, name=f"pybk metadata keeper {self.path}", daemon=True)
            start_thread(keeper)
            self._keeper = keeper
        self.change_signal.set()

    def keep(self) -> None:
        """Run the keeper: send heartbeats, compare the watched keys, and have ended sessions removed."""
        failed = False
        while not self.closed:
            watching = bool(self.seen or self._feeds)
            rest = self.sweep_s if failed else self._rest(watching=watching)
            changed = self.change_signal.wait(rest, changes=watching, rest_s=self._pace_s)
            try:
                pause = self.polled_at + PACE_S - time.monotonic()
                if changed and pause > _PACE_LEAST_S:
                    time.sleep(pause)
                if changed or _is_nearly_due(time.monotonic(), self.polled_at, _POLL_S):
                    self.polled_at = time.monotonic()
                    # Every commit to the environment is reported, and few of them change a watched key.
                    self._feed()
                    self._pace_s = PACE_S if self.poll() or not changed else min(2 * self._pace_s, _PACE_MAX_S)
                if self.session_id and _is_nearly_due(time.monotonic(), self._heartbeat_at, self.heartbeat_s):
                    self.heartbeat()
                self._care_for_space()
                if self._sweep_is_due(self.sweep_rest(), early=True) and self.dead():
                    # The callback thread does this: a sync may take long, and heartbeats must not wait for it.
                    self._callbacks.schedule(self._sweeping)
                failed = False
            except ClosedError:
                return
            except Exception:
                if not failed:
                    logger.exception("%s: watches and leases of this process do not work", self.path)
                failed = True

    def _rest(self, *, watching: bool) -> float | None:
        """Return the seconds until the keeper has work to do; None if it has none until it is woken."""
        if not watching and not self.session_id:
            return None
        due = self.swept_at + self.sweep_rest()
        if watching:
            due = min(due, self.polled_at + _POLL_S)
        if self.session_id:
            due = min(due, self._heartbeat_at + self.heartbeat_s)
        return max(0.0, due - time.monotonic())

    def heartbeat(self) -> None:
        """Send a heartbeat, unless another process has removed the session."""
        session = self.session_id
        if _is_nearly_due(time.monotonic(), self._checked_at, _CHECK_S):
            self._checked_at = time.monotonic()
            with self._explained(), self._environment.read() as transaction:
                found = rows.get_session(transaction, session)
            if found is None:
                self.session_lost(session)
                return
        self.host_file.heartbeat(self.slot)
        self._heartbeat_at = time.monotonic()

    def poll(self) -> bool:
        """Compare the watched keys with their last state, and schedule the callbacks of those that changed.

        Returns:
            Whether any key changed.
        """
        with self._lock:
            watched = set(self._callbacks.watched())
            self.seen = {watch: seen for watch, seen in self.seen.items() if watch in watched}
            before = dict(self.seen)
        if not before:
            return False
        with self._explained(), self._environment.read() as transaction:
            number = rows.last_number(transaction)
            found = {
                watch: (number, self.look(transaction, watch.key or ""))
                for watch, (looked_at, _) in before.items()
                if looked_at != number
            }
        changed = [watch for watch, (_, seen) in found.items() if seen != before[watch][1]]
        with self._lock:
            self.seen.update(found)
        for watch in changed:
            self._callbacks.schedule(watch)
        return bool(changed)

    def _feed(self) -> None:
        """Note the changed keys in the feeds, and schedule the callbacks of feeds that have keys to report."""
        with self._lock:
            watched = set(self._callbacks.watched())
            self._feeds = {watch: feed for watch, feed in self._feeds.items() if watch in watched}
            after, feeding = self._fed_number, bool(self._feeds)
        if not feeding:
            return
        with self._explained(), self._environment.read() as transaction:
            last = rows.last_number(transaction)
            keys = changed_keys(transaction, after, last)
        with self._lock:
            # All feeds are noted, also those that began meanwhile, because ``_fed_number`` counts for all of them.
            self._fed_number = last
            due = [(watch, feed.rest_s()) for watch, feed in self._feeds.items() if feed.note(keys)]
        for watch, rest_s in due:
            self._callbacks.schedule(watch, rest_s)

    def look(self, transaction: ReadTransaction, key: str) -> object:
        """Return an object that compares equal as long as a key's value and the keys directly below it are the same."""
        name = node_name(key)
        stored = rows.get_value(transaction, name)
        return (stored and stored.version, list(rows.children(transaction, name)))


def _is_nearly_due(now: float, last: float, pause: float) -> bool:
    """Return whether a repeated task, done last at ``last`` and due every ``pause`` seconds, is due or nearly so.

    A thread that is awake does nearly due tasks together with the due ones, so it wakes once for all of them.
    """
    return now - last >= 0.6 * pause

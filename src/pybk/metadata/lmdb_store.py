"""The metadata store of one host: an LMDB environment that several processes share. See :class:`LmdbMetadataStore`."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Final, TypeVar
from urllib.parse import quote

from pybk.errors import (
    ClosedError,
    CorruptError,
    MetadataExistsError,
    MetadataUnreachableError,
    MetadataVersionError,
    StorageError,
    UnsupportedFormatError,
)
from pybk.metadata import lmdb_records as records
from pybk.metadata.callbacks import Callback, Callbacks
from pybk.metadata.change_signal import ChangeSignal
from pybk.metadata.host_file import SESSION_SLOTS, HostFile, is_stopped
from pybk.metadata.lmdb_records import FORMAT_NAME, Session, StoredValue, node_name
from pybk.metadata.store import Node, checked_key, checked_value
from pybk.storage.io.failures import start_thread
from pybk.storage.io.lmdb_environment import LmdbEnvironment, ReadTransaction, WriteTransaction
from pybk.storage.io.lmdb_file import LMDB_LOCK
from pybk.storage.io.permissions import PRIVATE, Access, exceeding, excess_warning

logger = logging.getLogger(__name__)

T = TypeVar("T")

STORE_FORMAT: Final = 1
HOST_FILE: Final = "sessions"
BEAT_S: Final = 1.0
"""How often a session is kept alive, at least; also five times per timeout."""

_SWEEP_S: Final = 0.25
"""How often dead sessions are looked for, at most; also five times per timeout."""

_DATA_FILE: Final = "data.mdb"
_SWEEP_MAX_S: Final = 2.0
"""How long a process at rest looks for no dead sessions at most, however many others do, or if it has none itself."""

_CHECK_S: Final = 1.0
"""How often a process looks whether others ended its session."""

_LOOK_S: Final = 2.0
"""How often a process looks at what it watches without a sign of a change."""

_PACE_S: Final = 0.01
"""Least time between two looks at the watched keys, however often the environment changes."""

_PACE_MAX_S: Final = 0.04
"""The longest that this time grows to, doubling with each look that finds no watched key changed."""

_PACE_LEAST_S: Final = 0.004
"""What is left of that which is not waited for."""

_MAP_BYTES: Final = 1 << 36
_PAUSE_MIN_S: Final = 0.0001
_PAUSE_MAX_S: Final = 0.0005
_READERS_S: Final = 10.0
"""How often places of killed processes in LMDB's reader table are looked for."""
_PATIENCE_S: Final = 0.05
"""How long another one's turn may take before it is looked at."""


class LmdbMetadataStore:
    """A metadata tree in an LMDB environment; see :class:`pybk.metadata.store.MetadataStore`.

    Every change is one transaction, on disk when the call returns (some 0.3 ms). Every record carries a checksum, as
    LMDB's pages have none. Versions are the number of the change, so no key ever has the same version twice.

    **Who is alive.** A session is a slot of the file ``sessions`` beside the environment: locked by its process, which
    the kernel undoes when that dies, and with the time of the last sign of life, so that a process that was stopped
    loses its session after ``session_timeout_s`` as well. The processes that have sessions look for dead ones four
    times a second together; processes that read look, too. The process that finds a dead session removes its leases.
    Heartbeats, one a second, are no transactions.

    **Who writes.** LMDB has one writer at a time, and nobody could get past one that was stopped in the middle. So
    transactions are prepared before and take no longer than the sync, and the writer's turn is a lock of its own. Where
    a process was stopped (SIGSTOP, Ctrl-Z) during its turn, the first who waits for it resumes it; it ends its turn and
    stops itself again, within a millisecond or so. That takes the rights to send it a signal; where they are missing,
    or a debugger or the freezer of a container stopped it, who waits raises MetadataUnreachableError at its deadline,
    naming the process. A process that is killed loses its turn at once. Readers and heartbeats never wait.

    **Watches** wait until the system reports that the environment's file was written to, and look every 2 s even if
    it does not. While only keys change that this process does not watch, it looks every 40 ms.

    Args:
        path: A directory on a local disk; made if it is missing. Its parent must be there.
        timeout_s: Deadline of each call, seconds.
        session_timeout_s: Seconds without a sign of life after which a process has lost its leases.
        access: For whom the directory and its files are made. A process that can open ``sessions`` can lock any slot,
            and have a process that writes stopped, so it is made for those alone who may use the store.

    Raises:
        CorruptError: The environment is damaged.
        UnsupportedFormatError: It is of another format.
        OSError: The directory or a file in it cannot be made.

    Changes may raise StorageFullError, without effect, and StorageFailedError, which is final for this process.
    Threads: any. In a forked child every call raises ForkedProcessError; open another there.
    """

    def __init__(
        self, path: str, *, timeout_s: float = 10.0, session_timeout_s: float = 5.0, access: Access = PRIVATE
    ) -> None:
        self._path = os.path.realpath(path)
        self._timeout_s = timeout_s
        self._session_timeout_s = session_timeout_s
        self._beat_s = min(BEAT_S, session_timeout_s / 5)
        self._sweep_s = min(_SWEEP_S, session_timeout_s / 5)
        with self._damage():
            self._environment = LmdbEnvironment(self._path, map_bytes=_MAP_BYTES, access=access)
        self._file = HostFile(os.path.join(self._path, HOST_FILE), access)
        self._callbacks = Callbacks(f"pybk metadata {self._path}")
        self._sweeping = self._callbacks.add("", self._sweep)
        self._turn_lock = threading.Lock()
        self._lock = threading.Lock()
        self._session = 0
        self._slot = 0
        self._beat_at = 0.0
        self._swept_at = 0.0
        self._sessions_seen = 1
        self._sessions: list[Session] = []
        self._sessions_at = -1
        self._polled_at = 0.0
        self._pace_s = _PACE_S
        self._checked_at = 0.0
        self._readers_due = time.monotonic() + _READERS_S
        self._seen: dict[Callback, tuple[int, object]] = {}
        self._closed = False
        self._wake = ChangeSignal(os.path.join(self._path, _DATA_FILE))
        self._keeper: threading.Thread | None = None
        try:
            self._warn_of_others(access)
            self._check_format()
        except BaseException:
            self._wake.close()
            self._file.close()
            self._environment.close()
            raise

    # ---- keys ----------------------------------------------------------------------------------------------------

    def get(self, key: str, *, latest: bool = False) -> Node | None:
        """See ``MetadataStore.get``; what is read is always the latest. Costs some 10 microseconds."""
        return self.get_many((key,))[0]

    def get_many(self, keys: Sequence[str]) -> list[Node | None]:
        """See ``MetadataStore.get_many``; all values are of one moment."""
        names = [node_name(key) for key in keys]
        if self._sweep_is_due():
            self._sweep()
        with self._damage(), self._environment.read() as transaction:
            found = [records.get_value(transaction, name) for name in names]
        return [None if record is None else Node(record.value, record.version) for record in found]

    def children(self, key: str) -> list[str]:
        """See ``MetadataStore.children``."""
        name = node_name(key)
        if self._sweep_is_due():
            self._sweep()
        with self._damage(), self._environment.read() as transaction:
            return [child for child, _ in records.children(transaction, name)]

    def create(self, key: str, value: bytes, *, leased: bool = False) -> int:
        """See ``MetadataStore.create``."""
        name, value = node_name(key), checked_value(key, value)
        while True:
            session = self.session() if leased else 0

            def change(transaction: WriteTransaction, number: int, session: int = session) -> bool:
                if session and records.get_session(transaction, session) is None:
                    return False
                found = records.get_value(transaction, name)
                if found is not None and found.session and self._is_dead(transaction, found.session):
                    records.end_session(transaction, found.session)
                    found = None
                if found is not None:
                    raise MetadataExistsError(f"metadata key {key!r} exists, with version {found.version}")
                records.put_value(transaction, name, StoredValue(number, number, session, value))
                return True

            done, number = self._change(change)
            if done:
                return number
            self._session_lost(session)

    def put(self, key: str, value: bytes, version: int) -> int:
        """See ``MetadataStore.put``."""
        name, value = node_name(key), checked_value(key, value)

        def change(transaction: WriteTransaction, number: int) -> None:
            found = self._expected(transaction, key, name, version)
            records.put_value(transaction, name, found._replace(version=number, value=value))

        return self._change(change)[1]

    def delete(self, key: str, version: int) -> None:
        """See ``MetadataStore.delete``."""
        name = node_name(key)

        def change(transaction: WriteTransaction, number: int) -> None:
            found = self._expected(transaction, key, name, version)
            records.delete_value(transaction, name, found.session)

        self._change(change)

    # ---- sessions and watches ------------------------------------------------------------------------------------

    def session(self) -> int:
        """See ``MetadataStore.session``."""
        self._file.usable()
        with self._lock:
            if self._closed:
                raise ClosedError(f"{self._path}: this metadata store is closed")
            if not self._session:
                self._slot, self._session = self._change(self._begin)
                self._beat_at = time.monotonic()
                self._start_keeper()
            return self._session

    def alive(self, session: int) -> bool:
        """See ``MetadataStore.alive``."""
        fresh = time.monotonic() - self._beat_at < self._session_timeout_s
        return 0 != session == self._session and fresh and not self._closed and not self._file.forked

    def watch(self, key: str, callback: Callable[[], None]) -> Callback:
        """See ``MetadataStore.watch``."""
        checked_key(key)
        watch = self._callbacks.add(key, callback)
        with self._damage(), self._environment.read() as transaction:
            seen = (records.last_number(transaction), self._look(transaction, key))
        with self._lock:
            self._seen[watch] = seen
            self._start_keeper()
        return watch

    def on_session_end(self, callback: Callable[[], None]) -> Callback:
        """See ``MetadataStore.on_session_end``."""
        return self._callbacks.add(None, callback)

    def close(self) -> None:
        """See ``MetadataStore.close``; in a forked child it does nothing."""
        with self._lock:
            if self._closed or self._file.forked:
                return
            self._closed = True
            session, keeper = self._session, self._keeper
        self._callbacks.close()
        self._wake.set()
        if keeper is not None and keeper is not threading.current_thread():
            keeper.join()
        if session:
            try:
                self._change(lambda transaction, number: records.end_session(transaction, session))
            except (MetadataUnreachableError, StorageError) as error:
                logger.info("%s: leases are left for others to remove: %s", self._path, error)
        self._wake.close()
        self._file.close()
        self._environment.close()

    def _release_dead_readers(self) -> None:
        """Free now and then what killed processes hold, so that pages of the environment are used again."""
        if time.monotonic() >= self._readers_due:
            self._readers_due = time.monotonic() + _READERS_S
            with self._damage():
                self._environment.release_dead_readers()

    # ---- transactions --------------------------------------------------------------------------------------------

    def _change(self, change: Callable[[WriteTransaction, int], T], *, timeout_s: float | None = None) -> tuple[T, int]:
        """Run a change in a transaction of its own, with its number; returns its result and the number."""
        self._release_dead_readers()
        with self._damage():
            return self._in_turn(change, self._timeout_s if timeout_s is None else timeout_s)

    def _in_turn(self, change: Callable[[WriteTransaction, int], T], timeout_s: float) -> tuple[T, int]:
        """Wait for this writer's turn, no longer than the deadline, and make the change."""
        self._file.usable()
        deadline = time.monotonic() + timeout_s
        turn, taken = 0, list[bool]()
        # No context managers of generators: an interrupt on the way into or out of one would leave the turn with it.
        try:
            # One call into C takes the lock and keeps the answer: an interrupt between the two would leave it locked.
            taken.extend(map(self._turn_lock.acquire, (True,), (timeout_s,)))
            if True not in taken:
                raise MetadataUnreachableError(
                    f"{self._path}: other threads of this process have been changing the metadata store for "
                    f"{timeout_s} s"
                )
            try:
                turn = self._wait_for_turn(deadline, timeout_s)
                with self._environment.write() as transaction:
                    number = records.last_number(transaction) + 1
                    result = change(transaction, number)
                    records.put_last_number(transaction, number)
                return result, number
            finally:
                # Whether there is a turn to end or not: an interrupt may have come before it was known.
                try:
                    self._file.end_turn(turn)
                except KeyboardInterrupt:
                    self._file.end_turn(turn)  # the first may not have come so far, and other processes wait for it
                    raise
        finally:
            if True in taken:
                self._turn_lock.release()

    def _wait_for_turn(self, deadline: float, timeout_s: float) -> int:
        """Wait until no other process has the turn; returns its name."""
        pause = _PAUSE_MIN_S
        patient = time.monotonic() + _PATIENCE_S
        while not (turn := self._file.try_turn()):
            now = time.monotonic()
            if now >= deadline:
                raise self._turn_denied(timeout_s)
            if now >= patient:
                self._file.let_finish()
                patient = now + _PATIENCE_S
            time.sleep(pause)
            pause = min(pause * 1.5, _PAUSE_MAX_S)
        return turn

    def _turn_denied(self, timeout_s: float) -> MetadataUnreachableError:
        pid = self._file.turn_holder()
        state = (
            f"is stopped: resume it (kill -CONT {pid}) or end it" if is_stopped(pid) else "is slow: look at its disk"
        )
        return MetadataUnreachableError(
            f"{self._path}: no turn to change the metadata store within {timeout_s} s; process {pid} has it: it {state}"
        )

    @contextmanager
    def _damage(self) -> Iterator[None]:
        """Say what to do about a damaged environment, which is not what helps a store's index."""
        try:
            yield
        except CorruptError as error:
            found = error.__cause__ or (error if error.path is None else "its file was cut")
            raise CorruptError(
                f"{self._path}: the metadata store is damaged ({found}); stop those who "
                "use it and restore it from a copy",
                path=self._path,
            ) from error

    def _warn_of_others(self, access: Access) -> None:
        """Log one warning if more users than those of the store can reach its directory or take its locks."""
        names = ("", HOST_FILE, LMDB_LOCK)
        found = exceeding(access, [os.path.join(self._path, name).rstrip(os.sep) for name in names])
        if found:
            logger.warning("%s", excess_warning(access, f"lmdb://{quote(self._path)}", found))

    def _check_format(self) -> None:
        """Make sure that the environment is of this format, giving it to an empty one."""
        with self._damage(), self._environment.read() as transaction:
            found = records.get(transaction, FORMAT_NAME)
        if found is None:

            def change(transaction: WriteTransaction, number: int) -> None:
                if transaction.get(FORMAT_NAME) is None:
                    records.put(transaction, FORMAT_NAME, bytes((STORE_FORMAT,)))

            self._change(change)
        elif found != bytes((STORE_FORMAT,)):
            raise UnsupportedFormatError(
                f"{self._path}: a metadata store of format {found[0]}; this pybk reads {STORE_FORMAT}: use a newer one"
            )

    def _expected(self, transaction: WriteTransaction, key: str, name: bytes, version: int) -> StoredValue:
        """Return a key's record, which must have this version."""
        found = records.get_value(transaction, name)
        if found is None or found.version != version:
            raise MetadataVersionError(
                f"metadata key {key!r} has {'no value' if found is None else f'version {found.version}'} instead of "
                f"version {version}; read it again"
            )
        return found

    # ---- who is alive --------------------------------------------------------------------------------------------

    def _begin(self, transaction: WriteTransaction, number: int) -> int:
        """Begin a session, named by the change's number; returns its slot."""
        taken = {session.slot for session in records.sessions(transaction)}
        slot = SESSION_SLOTS
        while slot in taken or not self._file.try_lock(slot):
            slot += 1
        timeout_ms = round(self._session_timeout_s * 1000)
        records.put_session(transaction, Session(number, slot, timeout_ms))
        return slot

    def _is_dead(self, transaction: ReadTransaction, session: int) -> bool:
        """Tell whether the owner of a session gives no sign of life."""
        found = records.get_session(transaction, session)
        if found is None:
            return True
        return self._gives_no_sign(found)

    def _gives_no_sign(self, found: Session) -> bool:
        """Return whether the owner of a session, unless that is this process, is gone or was stopped for too long."""
        if found.number == self._session:
            return False
        return not self._file.locked(found.slot) or self._file.age_ns(found.slot) > found.timeout_ms * 1_000_000

    def _sweep_is_due(self, pause: float | None = None, *, early: bool = False) -> bool:
        """Return whether it is time to look for dead sessions; then the caller looks.

        Args:
            pause: Seconds from one look to the next; None for the least.
            early: As ``_is_nearly_due``.
        """
        now = time.monotonic()
        pause = self._sweep_s if pause is None else pause
        due = _is_nearly_due(now, self._swept_at, pause) if early else now - self._swept_at >= pause
        if due:
            self._swept_at = now
        return due

    def _sweep_rest(self) -> float:
        """Return how long this process looks for no dead sessions while it is at rest.

        All who have a session share that, as all would look at all; who has none leaves it to them, if there are any.
        """
        longest = max(self._sweep_s, _SWEEP_MAX_S)
        if self._session or not self._sessions_seen:
            return min(self._sweep_s * max(self._sessions_seen, 1), longest)
        return longest

    def _dead(self) -> list[int]:
        """Return the sessions whose owners give no sign of life."""
        with self._damage(), self._environment.read() as transaction:
            number = records.last_number(transaction)
            if number != self._sessions_at:
                self._sessions = records.sessions(transaction)
                self._sessions_at = number
        self._sessions_seen = len(self._sessions)
        return [session.number for session in self._sessions if self._gives_no_sign(session)]

    def _sweep(self) -> None:
        """Remove the leases of the dead, unless somebody else is writing for long."""
        dead = self._dead()
        if not dead:
            return

        def change(transaction: WriteTransaction, number: int) -> None:
            for session in dead:
                if self._is_dead(transaction, session):
                    records.end_session(transaction, session)

        try:
            self._change(change, timeout_s=self._sweep_s)
        except MetadataUnreachableError as error:
            logger.info("%s: dead sessions %s are removed later: %s", self._path, dead, error)

    def _session_lost(self, session: int) -> None:
        """Forget a session that others have ended."""
        with self._lock:
            if self._session != session:
                return
            self._session = 0
            self._file.unlock(self._slot)
        self._callbacks.session_ended()

    # ---- the thread ----------------------------------------------------------------------------------------------

    def _start_keeper(self) -> None:
        """Start the thread that beats, sweeps and polls; called with the lock held."""
        if self._keeper is None and not self._closed:
            keeper = threading.Thread(target=self._keep, name=f"pybk metadata keeper {self._path}", daemon=True)
            start_thread(keeper)
            self._keeper = keeper
        self._wake.set()

    def _keep(self) -> None:
        failed = False
        while not self._closed:
            watching = bool(self._seen)
            rest = self._sweep_s if failed else self._rest(watching=watching)
            changed = self._wake.wait(rest, changes=watching, rest_s=self._pace_s)
            try:
                pause = self._polled_at + _PACE_S - time.monotonic()
                if changed and pause > _PACE_LEAST_S:
                    time.sleep(pause)
                if changed or _is_nearly_due(time.monotonic(), self._polled_at, _LOOK_S):
                    self._polled_at = time.monotonic()
                    # Every commit to the environment is reported, and few are of what a process watches.
                    self._pace_s = _PACE_S if self._poll() or not changed else min(2 * self._pace_s, _PACE_MAX_S)
                if self._session and _is_nearly_due(time.monotonic(), self._beat_at, self._beat_s):
                    self._beat()
                self._release_dead_readers()
                if self._sweep_is_due(self._sweep_rest(), early=True) and self._dead():
                    # Not here: a sync may take long, and signs of life must not wait for it.
                    self._callbacks.due(self._sweeping)
                failed = False
            except ClosedError:
                return
            except Exception:
                if not failed:
                    logger.exception("%s: watches and leases of this process fail", self._path)
                failed = True

    def _rest(self, *, watching: bool) -> float | None:
        """Return how long nothing is due; None if nothing ever is."""
        if not watching and not self._session:
            return None
        due = self._swept_at + self._sweep_rest()
        if watching:
            due = min(due, self._polled_at + _LOOK_S)
        if self._session:
            due = min(due, self._beat_at + self._beat_s)
        return max(0.0, due - time.monotonic())

    def _beat(self) -> None:
        """Give a sign of life, unless others have ended the session."""
        session = self._session
        if _is_nearly_due(time.monotonic(), self._checked_at, _CHECK_S):
            self._checked_at = time.monotonic()
            with self._damage(), self._environment.read() as transaction:
                found = records.get_session(transaction, session)
            if found is None:
                self._session_lost(session)
                return
        self._file.beat(self._slot)
        self._beat_at = time.monotonic()

    def _poll(self) -> bool:
        """Look at the watched keys and call the callbacks of those that changed; return whether any did."""
        with self._lock:
            watched = set(self._callbacks.watched())
            self._seen = {watch: seen for watch, seen in self._seen.items() if watch in watched}
            before = dict(self._seen)
        if not before:
            return False
        with self._damage(), self._environment.read() as transaction:
            number = records.last_number(transaction)
            found = {
                watch: (number, self._look(transaction, watch.key or ""))
                for watch, (looked_at, _) in before.items()
                if looked_at != number
            }
        changed = [watch for watch, (_, seen) in found.items() if seen != before[watch][1]]
        with self._lock:
            self._seen.update(found)
        for watch in changed:
            self._callbacks.due(watch)
        return bool(changed)

    def _look(self, transaction: ReadTransaction, key: str) -> object:
        """Return something that differs whenever a key or which keys are right below it differs."""
        name = node_name(key)
        record = records.get_value(transaction, name)
        return (record and record.version, list(records.children(transaction, name)))


def _is_nearly_due(now: float, last: float, pause: float) -> bool:
    """Return whether to do something again that was done last at a time, and is due after a pause.

    A thread that is awake does what is nearly due with what is due. So all of it comes to be done in one go, and the
    thread wakes once where it would wake once for each.
    """
    return now - last >= 0.6 * pause

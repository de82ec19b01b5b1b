"""Makes recorders from an application's environment. Applications of one process share the stores that they name."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from contextlib import ExitStack
from typing import Final, TypeVar
from weakref import WeakSet, WeakValueDictionary

from eventsourcing.persistence import (
    AggregateRecorder,
    ApplicationRecorder,
    InfrastructureFactory,
    ProcessRecorder,
)
from eventsourcing.utils import Environment, EnvType, resolve_topic, strtobool

from pybk.adapters.eventsourcing.event_log import EventLog
from pybk.adapters.eventsourcing.recorders import (
    PybkAggregateRecorder,
    PybkApplicationRecorder,
    PybkProcessRecorder,
    PybkTrackingRecorder,
)
from pybk.adapters.eventsourcing.tracking_log import TrackingLog
from pybk.credentials import CLUSTER_SECRET, PASSWORD, SECRET, Credentials, Secret, read_credentials
from pybk.errors import UsageError
from pybk.manager.ledger_manager import LedgerManager
from pybk.streams.wal import WriteAheadLog
from pybk.threads import in_children

STORE: Final = "PYBK_STORE"
"""The setting of the directory of a store, or the metadata URL of a cluster."""
LOG: Final = "PYBK_LOG"
"""The setting of the first part of the names of the application's logs; by default the application's name."""
INSECURE: Final = "PYBK_INSECURE"
"""The setting that allows logs without a password or secret."""

T = TypeVar("T", EventLog, TrackingLog)
R = TypeVar("R")


class _Store:
    """A store or cluster that factories of this process share, and the logs that they have opened in it."""

    def __init__(self, where: str, cluster_secret: bytes | None) -> None:
        if "://" in where:
            self._manager = LedgerManager.connect(where, cluster_secret=cluster_secret)
        else:
            self._manager = LedgerManager.open(where)
        self.users = WeakSet[PybkFactory]()
        """The factories that use it and were not closed."""
        self._lock = threading.Lock()
        self._logs: dict[str, tuple[EventLog | TrackingLog, Credentials]] = {}
        """The logs by name, with their passwords or secrets."""
        in_children(self)

    def log(self, name: str, kind: Callable[[WriteAheadLog, object], T], given: Credentials, *, insecure: bool) -> T:
        """Return a log, and open it if needed."""
        with self._lock:
            if name not in self._logs:
                wal = WriteAheadLog.open(
                    self._manager, name, password=given.password, secret=given.secret, insecure=insecure
                )
                try:
                    self._logs[name] = kind(wal, self), given
                except BaseException:
                    wal.close()
                    raise
            found, its = self._logs[name]
        if its != given:
            raise UsageError(
                f"log {name!r} is open in this process with another password or secret; give both factories one"
            )
        return found  # type: ignore[return-value]  # the last part of the name decides the kind

    def close(self) -> None:
        """Close the logs and the store."""
        with ExitStack() as closing:
            closing.callback(self._manager.close)
            for log, _ in self._logs.values():
                closing.callback(log.close)


_stores: Final = WeakValueDictionary[str, _Store]()
_stores_lock = threading.Lock()


def _after_fork() -> None:
    """Begin with no stores in a forked child, where those of the parent are of no use."""
    global _stores_lock
    _stores_lock = threading.Lock()
    _stores.clear()


os.register_at_fork(after_in_child=_after_fork)


class PybkFactory(InfrastructureFactory[PybkTrackingRecorder]):
    """Makes recorders that keep an application's events in logs of pybk; ``PERSISTENCE_MODULE`` selects it.

    See ``docs/howto/eventsourcing.md`` for the settings in the environment.

    Raises:
        UsageError: A setting is missing or invalid.
        StoreLockedError: Another process has the store open.
        PybkError: As ``LedgerManager.open``.
    """

    def __init__(self, env: Environment | EnvType | None) -> None:
        super().__init__(env)
        where = self.env.get(STORE)
        if not where:
            raise UsageError(f"set {STORE} in the environment to the directory of a store, or to a cluster's URL")
        self._given = read_credentials(self._secret(PASSWORD), self._secret(SECRET) or None)
        try:
            self._insecure = strtobool(self.env.get(INSECURE, "no"))
        except ValueError:
            raise UsageError(
                f"{INSECURE} is {self.env.get(INSECURE)!r:.50}; it takes y, yes, t, true, on or 1 to do without a "
                "password, and n, no, f, false, off or 0 otherwise"
            ) from None
        if not self._given and not self._insecure:
            raise UsageError(
                f"set {SECRET}, {PASSWORD}, {SECRET}_FILE or {PASSWORD}_FILE in the environment, or {INSECURE}=y to do "
                "without"
            )
        key = where if "://" in where else os.path.realpath(where)
        with _stores_lock:
            store = _stores.get(key)
            if store is None:
                store = _stores[key] = _Store(where, self._secret(CLUSTER_SECRET))
            store.users.add(self)
        self._key = key
        self._store: _Store | None = store

    def _secret(self, name: str) -> bytes | None:
        """Return a secret, or the content of the file that the setting ``_FILE`` names."""
        file, value = self.env.get(f"{name}_FILE"), self.env.get(name)
        if file:
            return Secret(file=file).read()
        return None if value is None else os.fsencode(value)

    def close(self) -> None:
        """Close the recorders' logs and the store, unless other factories of this process use them."""
        with _stores_lock:
            store, self._store = self._store, None
            if store is None:
                return
            store.users.discard(self)
            if not store.users:
                if _stores.get(self._key) is store:  # not so in a forked child, which may have opened another one
                    del _stores[self._key]
                store.close()

    def _log(self, purpose: str, kind: Callable[[WriteAheadLog, object], T]) -> T:
        if self._store is None:
            raise UsageError("the application or its factory was closed; make another")
        name = self.env.get(LOG) or self.env.name or "eventsourcing"
        return self._store.log(f"{name}/{purpose}", kind, self._given, insecure=self._insecure)

    def _class(self, setting: str, default: type[R]) -> type[R]:
        """Return the class of a recorder: a subclass that a setting names by its topic, or the default."""
        topic = self.env.get(setting)
        if not topic:
            return default
        found: type[R] = resolve_topic(topic)
        if not issubclass(found, default):
            raise UsageError(f"{setting} names {topic!r}, which is not a subclass of {default.__name__}")
        return found

    def aggregate_recorder(self, purpose: str = "events") -> AggregateRecorder:
        """Return a recorder of events, or of snapshots."""
        return PybkAggregateRecorder(self._log(purpose, EventLog))

    def application_recorder(self) -> ApplicationRecorder:
        """Return the recorder of the application's events."""
        return self._class(self.APPLICATION_RECORDER_TOPIC, PybkApplicationRecorder)(self._log("events", EventLog))

    def tracking_recorder(
        self, tracking_recorder_class: type[PybkTrackingRecorder] | None = None
    ) -> PybkTrackingRecorder:
        """Return a recorder of positions in upstream applications, of a subclass if one is given."""
        chosen = tracking_recorder_class or self._class(self.TRACKING_RECORDER_TOPIC, PybkTrackingRecorder)
        return chosen(self._log("tracking", TrackingLog))

    def process_recorder(self) -> ProcessRecorder:
        """Return the recorder of an application that processes other applications' events."""
        chosen = self._class(self.PROCESS_RECORDER_TOPIC, PybkProcessRecorder)
        return chosen(self._log("events", EventLog), self._log("tracking", TrackingLog))

"""The keeper of a running bookie: its registration and its state in the cluster, its position, its deleted ledgers.

Theory of operation. ``begin`` registers the bookie, which serves by then, and starts one thread. That thread repeats
``_keep``: while requests arrive, it records each ``POSITION_SECONDS`` how far the log is durable; each
``STATE_SECONDS`` it compares the bookie's state with its registration and the metadata's epoch with the last one, and
each ``COLLECT_SECONDS`` it looks for deleted ledgers. The metadata store calls ``_state_changed`` and
``_follow_secrets`` in threads of its own. Whatever changes the replicas or the machine is posted to the serving thread
(``server.py``). If another process has the bookie's name, or the bookie was removed, the keeper ends the serving.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack, suppress
from functools import partial
from typing import TYPE_CHECKING, Final, Protocol

from pybk.bookie.advertising import is_notable
from pybk.bookie.deleted_ledgers import DeletedLedgers
from pybk.bookie.metadata_age import AgeWatch
from pybk.bookie.own_cookie import OwnCookie
from pybk.bookie.own_position import PositionRecorder
from pybk.errors import CookieError, PybkError, StorageError
from pybk.feature_level import NEWEST_LEVEL
from pybk.health import BookieCondition
from pybk.log_events import log_event
from pybk.metadata.registration import BookieRegistration, BookieState, RegisteredBookie
from pybk.replication.locations import Location
from pybk.threads import start_thread
from pybk.version import __version__

if TYPE_CHECKING:
    from pybk.bookie.directory_identity import SeenEpoch
    from pybk.bookie.replica_state import ReplicasHealth
    from pybk.bookie.replicas import Replicas
    from pybk.ledger.ledger_metadata import Bookie
    from pybk.metadata.cluster import ClusterMetadata
    from pybk.replication.bookie import BookieEffect, BookieMachine
    from pybk.transport.server import Server

logger = logging.getLogger(__name__)

STATE_SECONDS: Final = 10.0
"""The interval at which a bookie compares its state with its registration; it registers again if ``is_notable``."""

REGISTER_SECONDS: Final = 300.0
"""The interval of registrations without a notable change; long, because each wakes every watching client."""

POSITION_SECONDS: Final = 1.0
"""The interval at which a bookie records its log's durable end, if that has moved, while requests arrive."""

COLLECT_SECONDS: Final = 60.0
"""The interval of searches for deleted ledgers; the first one, this long after the start, checks all ledgers.

A bookie without space searches every ``STATE_SECONDS``, because deleted ledgers give it space again.
"""


class KeptBookie(Protocol):
    """The serving bookie, as its keeper uses it."""

    @property
    def bookie(self) -> Bookie:
        """Its name and instance."""

    @property
    def addresses(self) -> tuple[str, ...]:
        """The addresses to register."""

    @property
    def replicas(self) -> Replicas:
        """Its replicas of ledgers."""

    @property
    def machine(self) -> BookieMachine:
        """The protocol's state machine, which only posted calls use, except for ``read_only``."""

    @property
    def server(self) -> Server:
        """The sockets."""

    @property
    def stopping(self) -> threading.Event:
        """Set once the bookie ends."""

    @property
    def error(self) -> BaseException | None:
        """The error that ended the serving; None while it serves."""

    def post(self, call: Callable[[], list[BookieEffect]]) -> None:
        """Let the serving thread make a call and perform its effects."""

    def end(self, error: CookieError) -> None:
        """End the serving with an error, and do not wait for that."""


class Keeper:
    """Keeps a running bookie registered, and looks after what no request does.

    Args:
        host: The bookie.
        metadata: The cluster's metadata.
        rack: Its location, as it is registered.

    Attributes:
        registered: The registration; None until ``begin``, so a bookie may serve before it is registered.
        served: The requests since the last registration, approximately: two threads change it without a lock.
        rests: True if the keeper skips its next records until a request arrives. The keeper sets it, ``wake`` resets
            it.
        position: Records the log's durable position in the metadata store; since ``begin``.

    Raises:
        PybkError: The bookie's cookie cannot be read.

    Threads: any thread may call. The keeper's own is in the theory of operation above.
    """

    position: PositionRecorder

    def __init__(self, host: KeptBookie, metadata: ClusterMetadata, rack: str) -> None:
        self._host: Final = host
        self._bookie: Final = host.bookie
        self._replicas: Final = host.replicas
        self._metadata: Final = metadata
        self._rack: Final = rack
        self.registered: RegisteredBookie | None = None
        self.served = 0
        self.rests = False
        self._wakes: Final = threading.Event()
        self._registering: Final = threading.Lock()
        """Held while the registration is computed and written; otherwise an older one might be written last."""
        self._retired = False  # set by ``retire``: the bookie stays read-only
        self._sessions = 0, 0
        """The epoch of the cluster's secret, and the sessions that had another one when they were counted last."""
        self._cookie: Final = OwnCookie(metadata, self._bookie, str(Location.parse(rack)))
        self._deleted_ledgers: Final = DeletedLedgers(
            metadata,
            self._replicas,
            self._bookie,
            lambda ledger_id: host.post(partial(self._drop, ledger_id)),
            self._rest,
            remember=lambda proofs: host.post(partial(self._remember_deleted, proofs)),
        )
        self._thread: threading.Thread | None = None
        self._closing: Final = ExitStack()
        """The watches that ``close`` ends."""
        self._closing.callback(self._cookie.close)

    @property
    def state(self) -> BookieState:
        """The state in the bookie's cookie, as of the last notification from the metadata store."""
        return self._cookie.state

    def begin(self) -> None:
        """Register the bookie, which serves already, and look after it from now on.

        Raises:
            PybkError: The metadata store cannot be reached, or another process has the bookie's name.
        """
        self._sessions = (0 if self._metadata.keys is None else self._metadata.keys.current), 0
        address = self._host.addresses[0]
        registered = self.registered = self._metadata.register(self.registration())
        logger.info(
            "bookie %s is registered at %s",
            self._bookie,
            address,
            extra=log_event("bookie.registered", bookie=str(self._bookie), address=address),
        )
        self._cookie.follow(self._state_changed)
        self._closing.callback(self._metadata.watch_secrets(self._follow_secrets).cancel)
        identity = self._replicas.identity
        assert identity is not None, "the start recorded whose directory it is"
        self.position = PositionRecorder(self._replicas.store, self._metadata, self._bookie, identity.boots)
        self.position.record()
        self._age = AgeWatch(
            self._metadata, self._replicas, lambda seen: self._host.post(partial(self._note_seen, seen))
        )
        self._thread = threading.Thread(target=self._keep, args=(registered,), name="pybk-bookie-keeper", daemon=True)
        start_thread(self._thread)

    def wake(self) -> None:
        """End the keeper's rest, because requests arrived, or the bookie ends; any thread may call it."""
        self.rests = False
        self._wakes.set()

    def _keep(self, registered: RegisteredBookie) -> None:
        """Body of the thread: record the durable position, register changes, drop deleted ledgers."""
        self._read_settings()
        now = time.monotonic()
        look_at, register_at, collect_at = now + STATE_SECONDS, now + REGISTER_SECONDS, now + COLLECT_SECONDS
        while not self._host.stopping.wait(POSITION_SECONDS):
            # Set before the position is read, so that a request that moves it later ends the wait.
            self.rests = True
            if not self.position.record():
                self._wakes.wait(max(0.0, look_at - time.monotonic()))
            self._wakes.clear()
            now = time.monotonic()
            due = now >= look_at
            try:
                self._look_at_secrets(registered, again=due)
                if not due:
                    continue
                look_at = now + STATE_SECONDS
                self._look_at_age()
                if self._register(registered, small=now >= register_at):
                    register_at = now + REGISTER_SECONDS
                self._cookie.record_place(NEWEST_LEVEL)
                if (now >= collect_at or self._replicas.health().full) and self._age.error is None:
                    self.collect()
                    collect_at = now + COLLECT_SECONDS
            except CookieError as error:
                logger.exception(
                    "bookie %s ends: another process has registered under its name",
                    self._bookie,
                    extra=log_event("bookie.superseded", bookie=str(self._bookie)),
                )
                self._host.end(error)
            except (PybkError, OSError) as error:
                logger.warning("bookie %s: its upkeep failed, and is tried again: %s", self._bookie, error)
        if self._host.error is not None:
            self.unregister()

    def _read_settings(self) -> None:
        """Read the cluster's settings, so that the serving thread, which needs them, does not wait for them.

        If they cannot be read now, the serving thread reads them when it needs them.
        """
        if self._host.server.member_key is not None:
            with suppress(PybkError):
                self._metadata.current_settings()

    # ---- the registration ----------------------------------------------------------------------------------------

    def registration(self) -> BookieRegistration:
        """Return the registration that the bookie would write now."""
        health = self._replicas.health()
        served, self.served = self.served, 0
        why = self._why_read_only(health)
        return BookieRegistration(
            bookie=self._bookie,
            addresses=self._host.addresses,
            public_key=self._host.server.public_key or b"",
            tiers=dict(health.free_bytes),
            capacity=dict(health.capacity_bytes),
            devices=dict(health.devices),
            load=served / STATE_SECONDS,
            rack=self._rack,
            read_only=bool(why),
            why_read_only=why,
            level_max=NEWEST_LEVEL,
            version=__version__,
            key_epochs=self._held_epochs(),
            key_epoch=self._sessions[0],
            old_sessions=self._sessions[1],
            in_limbo=len(self._replicas.in_limbo()),
        )

    def _register(self, registered: RegisteredBookie, *, small: bool = True) -> bool:
        """Follow the bookie's own state, and register it; return whether that was due.

        Args:
            registered: The registration.
            small: Register small changes, too.
        """
        with self._registering:
            registration = self.registration()
            self._set_read_only(registration.read_only)
            due = small or is_notable(registered.written, registration)
            if due:
                registered.update(registration)
            return due

    def unregister(self) -> None:
        """Remove the registration; an error of the metadata store is logged, and the bookie ends anyway."""
        try:
            if self.registered is not None:
                self.registered.close()
        except (PybkError, OSError) as error:
            logger.warning("bookie %s stays registered until its session ends: %s", self._bookie, error)

    # ---- the state -----------------------------------------------------------------------------------------------

    def condition(self) -> BookieCondition:
        """Return the condition of the bookie, from which its health is made; no request, and no input or output."""
        registered = self.registered
        return BookieCondition(
            bookie=self._bookie,
            state=self._cookie.state,
            error=self._host.error,
            superseded=registered is not None and registered.superseded,
            registered=registered is None or registered.registered,
            outdated=self._age.error,
            retired=self._retired,
            in_limbo=self._replicas.in_limbo,
        )

    def _why_read_only(self, health: ReplicasHealth) -> str:
        """Return why the bookie takes no entries of writers, "" if it takes them."""
        if self._retired:
            return "retired"
        if self._cookie.state.read_only:
            return self._cookie.state.value
        return "store_failed" if health.error else "store_full" if health.full else ""

    def _set_read_only(self, read_only: bool) -> None:
        """Take no entries of writers, or take them, and log a change."""
        machine = self._host.machine
        if read_only == machine.read_only:
            return
        machine.read_only = read_only
        if read_only:
            reason = self._why_read_only(self._replicas.health())
            fields = {"bookie": str(self._bookie), "reason": reason}
            logger.warning(
                "bookie %s is read-only: %s", self._bookie, reason, extra=log_event("bookie.read_only", **fields)
            )
        else:
            fields = {"bookie": str(self._bookie)}
            logger.info("bookie %s takes entries again", self._bookie, extra=log_event("bookie.writable", **fields))

    def retire(self) -> None:
        """Become read-only, and register that: refuse writers' entries, but still serve reads and re-replication.

        Raises:
            CookieError: Another process has registered as this bookie.
            MetadataError: The metadata store is unreachable; the bookie registers later.
        """
        self._retired = True
        self._set_read_only(True)
        if self.registered is not None:
            self._register(self.registered)

    def _state_changed(self) -> None:
        """Follow a new state in the cookie; the metadata store calls it."""
        if self._cookie.state is BookieState.REMOVED:
            fields = {"bookie": str(self._bookie)}
            logger.error(
                "bookie %s ends: it was removed from the cluster",
                self._bookie,
                extra=log_event("bookie.removed", **fields),
            )
            self._host.end(CookieError(f"{self._bookie} was removed from the cluster"))
        elif self.registered is not None:
            self._register(self.registered)

    def _look_at_age(self) -> None:
        """Become read-only if the metadata store was put back to an older state; see ``metadata_age``."""
        if self._age.error is None and self._age.look():
            fields = {"bookie": str(self._bookie)}
            logger.error(
                "bookie %s takes no more entries: %s",
                self._bookie,
                self._age.error,
                extra=log_event("bookie.metadata_outdated", **fields),
            )
            self._retired = True

    def _note_seen(self, seen: SeenEpoch) -> list[BookieEffect]:
        """Keep the newest metadata that the bookie has seen; if that fails, the next ones are kept."""
        try:
            self._replicas.note_seen(seen)
        except StorageError as error:
            logger.warning("bookie %s: the epoch of its metadata cannot be stored now: %s", self._bookie, error)
        return []

    # ---- the cluster's secrets -----------------------------------------------------------------------------------

    def _held_epochs(self) -> tuple[int, ...]:
        keys = self._metadata.keys
        return (0,) if keys is None else tuple(sorted(keys.held))

    def _follow_secrets(self) -> None:
        """Keep what the cluster says of its secrets, and register which of them are here; any thread may call it."""
        self._host.post(self._count_sessions)
        self._host.post(partial(self._note_about, self._metadata.about))
        self.wake()

    def _count_sessions(self) -> list[BookieEffect]:
        """Count the sessions of an old secret; the keeper registers how many there are."""
        keys = self._metadata.keys
        if keys is not None:
            counted = keys.current, self._host.server.old_sessions()
            if counted != self._sessions:
                self._sessions = counted
                self.wake()
        return []

    def _note_about(self, about: bytes) -> list[BookieEffect]:
        """Keep the cluster's own metadata value; if that fails, the next start keeps it."""
        try:
            self._replicas.note_about(about)
        except StorageError as error:
            logger.warning("bookie %s: the cluster's own metadata cannot be kept now: %s", self._bookie, error)
        return []

    def _look_at_secrets(self, registered: RegisteredBookie, *, again: bool) -> None:
        """Register what changed with the cluster's secrets, and look for one that is missing here.

        Args:
            registered: The registration.
            again: Look for a missing one, such as in the file that may have it by now.
        """
        keys = self._metadata.keys
        if keys is None:
            return
        if again and self._metadata.secret_epochs.newest not in keys.held:
            self._metadata.refresh_keys()
        if len(self._metadata.secret_epochs.proofs) > 1:
            self._host.post(self._count_sessions)
            self._metadata.rewrite_locks()
        written = registered.written
        if (written.key_epochs, written.key_epoch, written.old_sessions) != (self._held_epochs(), *self._sessions):
            self._register(registered)

    # ---- deleted ledgers -----------------------------------------------------------------------------------------

    def collect(self) -> None:
        """Drop the ledgers that both this call and the last one found deleted; see ``DeletedLedgers``."""
        self._deleted_ledgers.look()

    def _rest(self, seconds: float) -> bool:
        """Wait in the middle of a long look, and return whether the bookie ends; the position is not held up by it."""
        self.position.record()
        return self._host.stopping.wait(seconds)

    def _remember_deleted(self, proofs: Mapping[int, bytes]) -> list[BookieEffect]:
        """Remember the deletion of ledgers that are about to be dropped.

        Metadata that are made again from bookies' directories must not bring back a ledger that another bookie has not
        dropped yet.
        """
        try:
            self._replicas.remember_deleted(proofs)
        except StorageError as error:
            logger.warning("the deletion of %d ledgers cannot be remembered: %s", len(proofs), error)
        return []

    def _drop(self, ledger_id: int) -> list[BookieEffect]:
        """Delete the replica of a deleted ledger; if that fails, the next collection tries again."""
        try:
            return self._host.machine.ledger_deleted(ledger_id)
        except StorageError as error:
            logger.warning("deleted ledger %d cannot be dropped now: %s", ledger_id, error)
            return []

    # ---- the end -------------------------------------------------------------------------------------------------

    def join(self) -> None:
        """Wait for the end of the keeper's thread, which ``stopping`` and ``wake`` bring about."""
        if self._thread is not None:
            self._thread.join()

    def close(self) -> None:
        """End the watches, and record the last position, which the store has once it is closed; may be repeated."""
        with self._closing:
            if self._thread is not None:
                self.position.record()

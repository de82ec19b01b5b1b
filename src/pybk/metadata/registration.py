"""Bookies in the metadata store: cookies (instances that belong to the cluster) and registrations (those that run).

Theory of operation
-------------------

A *cookie* is a key ``cookies/NAME`` that lives for ever. It names the one instance of the bookie NAME that belongs to
the cluster, and counts its starts. So an empty, foreign or restored directory is recognised when its bookie starts. It
changes by compare-and-set only. From the feature level HEALING on it also has the bookie's *state*, which outlives
restarts, and its location and version, which stay known when the bookie has ended:

    ACTIVE --> DRAINING --> DRAINED --> REMOVED       ACTIVE <--> MAINTENANCE
       ^----------+------------+

``TRANSITIONS`` is this figure as a table. ``REMOVED`` is final: the instance is refused at its start, and another one
may take the name.

A *registration* is a key ``bookies/NAME`` with a lease: the store removes it when the session of its process ends. Its
value has the addresses and properties of the bookie. ``RegisteredBookie`` keeps it in the store:

    REGISTERED --session ended, or key removed--> LOST --_write_registration--> REGISTERED
    REGISTERED or LOST --the key has another owner--> SUPERSEDED --that key is gone--> LOST
    any state --close--> closed

Each ``register`` draws a random *owner*, which the value carries. It distinguishes this registration from one of a
process that runs on a copy of the directories and so has the same instance. ``register`` replaces a registration that
the same instance left, because a restarted bookie must not wait for the lease of its predecessor to end. Registering
*again* does not replace one, because two processes on copies of one directory would replace each other for ever.

``_check`` makes all transitions. The store calls it, in a thread of its own, after a change of the key and at the end
of a session; ``update`` and the constructor call it, too. ``RegisteredBookie._lock`` guards its state, and is reentrant
because ``update`` calls ``_check`` while it holds the lock.
"""

from __future__ import annotations

import logging
import secrets
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any, Final
from urllib.parse import quote, unquote

from pybk.errors import (
    ClosedError,
    CookieError,
    CorruptError,
    IllegalOperationError,
    MetadataExistsError,
    MetadataForgedError,
    MetadataVersionError,
    PybkError,
    UnsupportedFormatError,
    UsageError,
)
from pybk.feature_level import FeatureLevel
from pybk.flags import StorageHint
from pybk.ledger.ledger_metadata import INSTANCE_BYTES, Bookie
from pybk.log_events import log_event
from pybk.metadata.authenticated_values import AuthenticatedValues, ValueKind
from pybk.metadata.store import Node, Watch
from pybk.replication.locations import Location
from pybk.values import INT64_MAX, FrozenDict, decode_json, encode_json, from_base64, to_base64

logger = logging.getLogger(__name__)

BOOKIES_KEY: Final = "bookies"
COOKIES_KEY: Final = "cookies"
BOOKIE_ID_BYTES_MAX: Final = 128
OWNER_BYTES: Final = 16
REGISTRATION_BYTES_MAX: Final = 64 << 10
VERSION_BYTES_MAX: Final = 64


def _is_text(name: str) -> bool:
    """Return whether a string has no surrogates; JSON can contain them, and they have no bytes in UTF-8."""
    return not any("\ud800" <= each <= "\udfff" for each in name)


def name_in_key(name: str) -> str:
    """Return a name escaped so that it is one component of a key; ``unquote`` returns the original.

    Raises:
        UsageError: The name is not a string of 1 to ``BOOKIE_ID_BYTES_MAX`` bytes.
    """
    if type(name) is not str or not _is_text(name) or not 0 < len(name.encode()) <= BOOKIE_ID_BYTES_MAX:
        raise UsageError(f"name {name!r:.200} takes a string of 1 to {BOOKIE_ID_BYTES_MAX} bytes")
    return quote(name, safe="") if name.strip(".") else name.replace(".", "%2E")


def check_new_name(name: str) -> None:
    """Check the name of a bookie that is new.

    Raises:
        UsageError: It is too long, or has characters that cannot be printed.
    """
    name_in_key(name)
    if not name.isprintable() or name.isspace():
        raise UsageError(
            f"the name {name!r} of a bookie takes printable characters, and not blanks alone; name another one"
        )


REQUESTS_SECONDS: Final = 10.0
"""The time for which a request from before a bookie began to drain may still change the metadata of a ledger.

Writers choose bookies just before they write the metadata that name them. Re-replication and recovery may take long, so
they read the cookies of the bookies just before they write (H14).
"""


class BookieState(StrEnum):
    """The state of a bookie in its cluster, as an operator or its drain set it."""

    ACTIVE = "active"
    """It serves."""

    MAINTENANCE = "maintenance"
    """It may be absent until a given time."""

    DRAINING = "draining"
    """It is read-only, and its entries are copied to others."""

    DRAINED = "drained"
    """No ledger names it, now or later, so it can be removed."""

    REMOVED = "removed"
    """It no longer belongs to the cluster."""

    @property
    def read_only(self) -> bool:
        """True if a bookie in this state takes no entries of writers."""
        return self in (BookieState.DRAINING, BookieState.DRAINED, BookieState.REMOVED)


TRANSITIONS: Final = {
    BookieState.ACTIVE: frozenset({BookieState.DRAINING, BookieState.MAINTENANCE}),
    BookieState.MAINTENANCE: frozenset({BookieState.ACTIVE}),
    BookieState.DRAINING: frozenset({BookieState.DRAINED, BookieState.ACTIVE}),
    BookieState.DRAINED: frozenset({BookieState.REMOVED, BookieState.ACTIVE}),
    BookieState.REMOVED: frozenset[BookieState](),
}
"""The states that may follow each state."""


@dataclass(frozen=True, slots=True)
class BookieCookie:
    """The instance of a bookie that belongs to the cluster, and its state there.

    Attributes:
        bookie: The bookie.
        cluster_id: The cluster.
        boots: The number of the last recorded start.
        state: Its state in the cluster.
        state_since_ns: The time when the state began, nanoseconds since 1970; 0 for a state that never changed. For a
            drained bookie, the time when its drain began; no ledger has chosen it since then.
        until_ns: The end of maintenance, nanoseconds since 1970; 0 in other states.
        location: Its location at its last start, ``zone/rack/host`` or less; empty if unknown.
        level_max: The highest feature level that its pybk knew at its last start; 0 if unknown.
        version: The version of pybk that it ran then; empty if unknown.

    Raises:
        UsageError: A value is out of range.
    """

    bookie: Bookie
    cluster_id: bytes
    boots: int = 0
    state: BookieState = BookieState.ACTIVE
    state_since_ns: int = 0
    until_ns: int = 0
    location: str = ""
    level_max: int = 0
    version: str = ""

    def __post_init__(self) -> None:
        """Check the values."""
        for name in ("boots", "state_since_ns", "until_ns", "level_max"):
            number: Any = getattr(self, name)
            if type(number) is not int or not 0 <= number <= INT64_MAX:
                raise UsageError(f"{self.bookie}: {name} is {number!r}; it takes a whole number from 0 to {INT64_MAX}")
        if (self.until_ns > 0) != (self.state is BookieState.MAINTENANCE):
            raise UsageError(
                f"{self.bookie}: state {self.state} with until_ns {self.until_ns}; only maintenance has an end"
            )
        if str(Location.parse(self.location)) != self.location:
            raise UsageError(f"{self.bookie}: location {self.location!r} begins with a slash; leave it out")
        if len(self.version.encode(errors="replace")) > VERSION_BYTES_MAX:
            raise UsageError(f"{self.bookie}: version is {self.version!r:.100}; it takes {VERSION_BYTES_MAX} bytes")


@dataclass(frozen=True, slots=True, kw_only=True)
class BookieRegistration:
    """The data that a running bookie reports about itself.

    Attributes:
        bookie: The bookie.
        addresses: The addresses where it listens, such as ``tcp://10.0.0.1:3181``.
        public_key: Its CURVE public key, empty without a cluster secret.
        tiers: Free bytes of each tier that it has.
        capacity: All bytes of each tier, used and free; empty for versions of pybk that do not register it.
        devices: The device of each tier (tiers may share one), by a name that no device of another host has; empty for
            versions of pybk that do not register it.
        load: Its load, from 0 up; meaningful only in comparison with other bookies.
        rack: Its location, ``zone/rack/host`` or less; empty if unknown.
        read_only: Whether it takes no entries of writers.
        why_read_only: The reason; a code for people and messages, empty for versions of pybk that do not register it.
        level_max: The highest feature level that it knows; 0 for versions of pybk that do not register one.
        version: The version of pybk that it runs; empty for versions that do not register it.
        key_epochs: The valid epochs of the cluster's secret that it has; (0,) without a secret.
        key_epoch: The epoch that it uses.
        old_sessions: Sessions of clients that began with another epoch than ``key_epoch``, and have not ended.
        in_limbo: The number of its ledgers that are in limbo; 0 for versions of pybk that do not register it.
    """

    bookie: Bookie
    addresses: tuple[str, ...]
    public_key: bytes = b""
    tiers: Mapping[StorageHint, int] = field(default_factory=dict, hash=False)
    capacity: Mapping[StorageHint, int] = field(default_factory=dict, hash=False)
    devices: Mapping[StorageHint, str] = field(default_factory=dict, hash=False)
    load: float = 0.0
    rack: str = ""
    read_only: bool = False
    why_read_only: str = ""
    level_max: int = 0
    version: str = ""
    key_epochs: tuple[int, ...] = (0,)
    key_epoch: int = 0
    old_sessions: int = 0
    in_limbo: int = 0

    def __post_init__(self) -> None:
        """Check the values."""
        name_in_key(self.bookie.bookie_id)
        if len(self.bookie.instance) != INSTANCE_BYTES:
            raise UsageError(f"{self.bookie}: its instance has {len(self.bookie.instance)} bytes, not {INSTANCE_BYTES}")
        if not self.addresses or not all(type(address) is str and address for address in self.addresses):
            raise UsageError(f"{self.bookie}: addresses are {self.addresses!r}; at least one string is needed")
        for tier, size in (*self.tiers.items(), *self.capacity.items()):
            if type(size) is not int or size < 0:
                raise UsageError(f"{self.bookie}: bytes of {tier} are {size!r}; it takes a whole number from 0 up")
        if not 0.0 <= self.load < float("inf"):
            raise UsageError(f"{self.bookie}: load is {self.load!r}; it takes a finite number from 0 up")
        object.__setattr__(self, "addresses", tuple(self.addresses))
        for name in ("tiers", "capacity"):
            sizes = {StorageHint(tier): size for tier, size in getattr(self, name).items()}
            object.__setattr__(self, name, FrozenDict(sizes))
        object.__setattr__(
            self, "devices", FrozenDict({StorageHint(tier): name for tier, name in self.devices.items()})
        )


class RegisteredBookie:
    """Keeps a running bookie registered; made by ``Bookies.register``.

    When the store's session ends, the bookie is registered again as soon as that is possible. Threads: any.

    Attributes:
        key: The registration's key in the store.
        written: The registration that this process wrote to the store last.
    """

    def __init__(self, bookies: Bookies, registration: BookieRegistration) -> None:
        self.key = f"{BOOKIES_KEY}/{name_in_key(registration.bookie.bookie_id)}"
        self._bookies = bookies
        self._registration = registration
        self.written = registration
        self._lock = threading.RLock()
        self._closed = False
        self._owner = secrets.token_hex(OWNER_BYTES)
        self.superseded = False
        """True if another process has registered as this bookie, as of the last notification from the store."""
        self._watches: list[Watch] = []
        store = bookies._store
        self._session, self._version = bookies._write_registration(self.key, registration, self._owner, old=True)
        try:
            # The key is watched, too, because a registration that was removed by hand must be made again.
            self._watches.append(store.on_session_end(self._check))
            self._watches.append(store.watch(self.key, self._check))
            self._check()
        except BaseException:
            self.close()
            raise

    @property
    def registered(self) -> bool:
        """True if others see the registration, as far as this process knows without a round trip to the store."""
        return not self._closed and self._bookies._store.alive(self._session)

    def update(self, registration: BookieRegistration) -> None:
        """Replace the registration by another one of the same instance of the bookie.

        While the bookie is not registered, the new values are kept and written when it is registered again.

        Raises:
            CookieError: Another instance, or another process with a copy of the directories, has registered meanwhile.
            UsageError: ``registration`` is of another bookie.
            ClosedError: The registration is closed.
        """
        with self._lock:
            if self._closed:
                raise ClosedError(f"the registration of {self._registration.bookie} is closed")
            if registration.bookie != self._registration.bookie:
                raise UsageError(f"{registration.bookie} cannot update the registration of {self._registration.bookie}")
            self._registration = registration
            if self.registered:
                payload = encode_registration(registration, self._owner)
                try:
                    self._version = self._bookies._put(ValueKind.BOOKIE, self.key, payload, self._version)
                    self.written = registration
                except MetadataVersionError:
                    store = self._bookies._store
                    self.superseded = store.alive(self._session) and store.get(self.key, latest=True) is not None
                    self._check()
            if self.superseded:
                raise CookieError(
                    f"{registration.bookie}: another process has registered as this bookie; end one of the two"
                )

    def close(self) -> None:
        """Remove the registration; a second call does nothing.

        Raises:
            MetadataUnreachableError: It could not be removed; the store removes it when the session ends.
        """
        with self._lock:
            if self._closed:
                return
            self._cancel()
            try:
                self._bookies._delete(self.key, self._version)
            except MetadataVersionError:
                logger.info("%s: the registration is another process's by now, and stays", self._registration.bookie)

    def _cancel(self) -> None:
        self._closed = True
        for watch in self._watches:
            watch.cancel()

    def _check(self) -> None:
        """Register again if the registration is gone, and notice if another process has registered instead."""
        with self._lock:
            if self._closed:
                return
            alive = self._bookies._store.alive(self._session)
            node = self._bookies._store.get(self.key, latest=True) if alive else None
            if node is not None and node.version == self._version:
                return  # unchanged: most notifications are of this process's own writes
            if node is not None:
                _, owner = self._bookies.registration(self.key, node)
                if owner != self._owner and not self.superseded:
                    self.superseded = True
                    bookie = self._registration.bookie
                    logger.warning(
                        "%s is registered by another process now",
                        bookie,
                        extra=log_event("bookie.superseded", bookie=str(bookie)),
                    )
                return
            bookie = self._registration.bookie
            was_lost, self._session = self._session == 0, 0
            if not was_lost:
                fields = {"bookie": str(bookie)}
                logger.warning(
                    "%s: the registration is gone, and is made again",
                    bookie,
                    extra=log_event("bookie.session_lost", **fields),
                )
            try:
                self._session, self._version = self._bookies._write_registration(
                    self.key, self._registration, self._owner, old=False
                )
                self.superseded = False
                self.written = self._registration
            except CookieError as error:
                # Two processes have directories of one instance. Replacing each other's registration would never end.
                self.superseded = True
                logger.warning(
                    "%s is registered by another process now: %s",
                    bookie,
                    error,
                    extra=log_event("bookie.superseded", bookie=str(bookie)),
                )
                return
            logger.info("%s is registered again", bookie, extra=log_event("bookie.registered", bookie=str(bookie)))


class Bookies(AuthenticatedValues):
    """The bookies of a cluster: cookies and registrations.

    Every method may also raise MetadataUnreachableError. Threads: any.

    Attributes:
        cluster_id: The cluster's id, ``CLUSTER_ID_BYTES`` bytes.
    """

    cluster_id: bytes
    _registrations: dict[str, tuple[bytes, tuple[BookieRegistration, str]]]
    """Cache of decoded registrations by key: the encoded value, and the registration with its owner."""

    def claim_cookie(self, bookie: Bookie, *, replace: bool = False) -> BookieCookie:
        """Return the cookie of a bookie, and create it if the bookie has none; the bookie then belongs to the cluster.

        A cookie without a recorded start belongs to an instance that ended during its first start, before it served.
        That instance holds no entries, so another one replaces it; :meth:`record_boot` refuses a later start of the
        former.

        Args:
            bookie: The bookie, with the instance that its directories name.
            replace: Replace the cookie of another instance, whose entries then count as lost.

        Returns:
            The cookie.

        Raises:
            CookieError: Another instance of the bookie belongs to the cluster, or this one was removed from it.
            UsageError: The name is one that ``check_new_name`` refuses, and the bookie is new.
        """
        key = f"{COOKIES_KEY}/{name_in_key(bookie.bookie_id)}"
        cookie = BookieCookie(bookie, self.cluster_id)
        while True:
            node = self._store.get(key, latest=True)
            try:
                if node is None:
                    check_new_name(bookie.bookie_id)
                    self.create_value(ValueKind.COOKIE, key, encode_cookie(cookie))
                    return cookie
                found = self._cookie(key, node)
                if found.bookie == bookie:
                    _check_not_removed(found)
                    return found
                if found.boots and not replace and found.state is not BookieState.REMOVED:
                    raise CookieError(
                        f"bookie {bookie.bookie_id!r} of this cluster is instance {found.bookie.instance.hex()}, "
                        f"and these directories are of {bookie.instance.hex()}: start it on its own directories, "
                        "under another name, or, if those are lost for good, replace them: replace=True, or "
                        "`pybk bookie --replace`"
                    )
                self._put(ValueKind.COOKIE, key, encode_cookie(cookie), node.version)
                return cookie
            except (MetadataExistsError, MetadataVersionError):
                continue

    def read_cookie(self, bookie_id: str) -> BookieCookie | None:
        """Return the cookie of a bookie, also in state ``REMOVED``; None if there is none of this name."""
        key = f"{COOKIES_KEY}/{name_in_key(bookie_id)}"
        node = self._store.get(key, latest=True)
        return None if node is None else self._cookie(key, node)

    def list_cookies(self, *, removed: bool = False) -> list[BookieCookie]:
        """Return the cookies of all bookies that belong to the cluster, running or not, ordered by name.

        A cookie that is damaged or forged is left out, with a warning in the log.

        Args:
            removed: Include those of bookies in state ``REMOVED``.
        """
        keys = [f"{COOKIES_KEY}/{name}" for name in self._store.children(COOKIES_KEY)]
        cookies = []
        for key, node in zip(keys, self._store.get_many(keys), strict=True):
            try:
                cookie = None if node is None else self._cookie(key, node)
            except (CookieError, CorruptError, MetadataForgedError, UnsupportedFormatError) as error:
                logger.warning("a bookie's cookie is left out of a listing: %s", error)
                continue
            if cookie is not None and (removed or cookie.state is not BookieState.REMOVED):
                cookies.append(cookie)
        return cookies

    def change_cookie(self, bookie_id: str, change: Callable[[BookieCookie], BookieCookie]) -> BookieCookie:
        """Change the state of a bookie, or the end of its maintenance, durably; an equal cookie is not written.

        Args:
            bookie_id: The bookie's name.
            change: Returns the new cookie for the present one, with another ``state`` or ``until_ns``; the time of a
                new state is filled in. It may be called more than once, because the cookie may change meanwhile.

        Returns:
            The cookie now.

        Raises:
            IllegalOperationError: The new state may not follow the present one, or the cluster's feature level is below
                HEALING.
            CookieError: No bookie of this name belongs to the cluster.
            UsageError: ``change`` returned a value out of range, or changed something else.
        """
        if self.feature_level < FeatureLevel.HEALING:
            raise IllegalOperationError(
                f"the cluster is at feature level {self.feature_level.name}, at which bookies have no states; run "
                "`pybk cluster upgrade URL --finalize` once all members run this version of pybk"
            )

        def changed(found: BookieCookie) -> BookieCookie:
            new = change(found)
            if new != replace(found, state=new.state, until_ns=new.until_ns):
                raise UsageError(f"the change of {found} returned {new}; it may change state and until_ns alone")
            if new.state is found.state:
                return new
            if new.state not in TRANSITIONS[found.state]:
                allowed = " or ".join(state for state in BookieState if state in TRANSITIONS[found.state])
                raise IllegalOperationError(
                    f"bookie {bookie_id} is {found.state} and cannot become {new.state}; it can become "
                    f"{allowed or 'nothing else: start a new instance of it in an empty directory'}"
                )
            if new.state is BookieState.DRAINED:
                return new  # counted from the begin of the drain, so that a proof that the bookie is empty stays valid
            return replace(new, state_since_ns=time.time_ns())

        return self._change_cookie(bookie_id, changed)

    def record_place(self, bookie: Bookie, *, location: str, level_max: int, version: str) -> bool:
        """Record the location and version of a running bookie; writes nothing if they are recorded already.

        Returns:
            Whether they are recorded; False below the feature level HEALING, at which they cannot be.

        Raises:
            CookieError: The cookie is missing or another instance's.
        """
        if self.feature_level < FeatureLevel.HEALING:
            return False

        def changed(found: BookieCookie) -> BookieCookie:
            _check_is_of(found, bookie)
            return replace(found, location=location, level_max=int(level_max), version=version)

        self._change_cookie(bookie.bookie_id, changed)
        return True

    def watch_cookie(self, bookie_id: str, callback: Callable[[], None]) -> Watch:
        """Call ``callback`` after changes of a bookie's cookie, as ``MetadataStore.watch`` does."""
        return self._store.watch(f"{COOKIES_KEY}/{name_in_key(bookie_id)}", callback)

    def _change_cookie(self, bookie_id: str, change: Callable[[BookieCookie], BookieCookie]) -> BookieCookie:
        """Change a cookie by compare-and-set, unless ``change`` returns an equal one; return the present cookie."""
        key = f"{COOKIES_KEY}/{name_in_key(bookie_id)}"
        while True:
            node = self._store.get(key, latest=True)
            if node is None:
                raise CookieError(
                    f"the cluster has no cookie of a bookie {bookie_id!r}: claim it first, or check the name"
                )
            found = self._cookie(key, node)
            new = change(found)
            if new == found:
                return found
            with suppress(MetadataVersionError):
                self._put(ValueKind.COOKIE, key, encode_cookie(new), node.version)
                return new

    def record_boot(
        self, bookie: Bookie, boot: int, *, location: str = "", level_max: int = 0, version: str = ""
    ) -> bool:
        """Record a start of a bookie, and return whether its directories are as new as its last start.

        Args:
            bookie: The bookie.
            boot: The number of this start: one more than that of the last start which the directories know. The caller
                has written it to the directories durably, because two starts must not have one number.
            location: Its location; recorded from the feature level HEALING on, as are the next two.
            level_max: The highest feature level that it knows.
            version: The version of pybk that it runs.

        Returns:
            False if a start of this number or a later one is on record: the directories were restored to an older
            state, so entries that were acknowledged since are missing.

        Raises:
            CookieError: The cookie is missing, or another instance's, or the bookie was removed.
        """
        older = False

        def changed(found: BookieCookie) -> BookieCookie:
            nonlocal older
            _check_is_of(found, bookie)
            older = found.boots >= boot
            if older:
                return found
            if self.feature_level < FeatureLevel.HEALING:
                return replace(found, boots=boot)
            return replace(found, boots=boot, location=location, level_max=int(level_max), version=version)

        self._change_cookie(bookie.bookie_id, changed)
        return not older

    def register(self, registration: BookieRegistration) -> RegisteredBookie:
        """Register a running bookie, until the result is closed or this process ends.

        Replaces a registration that the same instance left.

        Args:
            registration: The data that the bookie reports about itself.

        Raises:
            CookieError: The cookie is missing or names another instance, or another instance is registered.
        """
        found = self.read_cookie(registration.bookie.bookie_id)
        if found is None or found.bookie != registration.bookie:
            raise CookieError(f"the cluster has no cookie of {registration.bookie}, but {found}; claim it first")
        _check_not_removed(found)
        return RegisteredBookie(self, registration)

    def list_bookies(self, unusable: Callable[[PybkError], None] | None = None) -> list[BookieRegistration]:
        """Return the registrations of all running bookies, ordered by name.

        A registration that is damaged or forged is left out, with a warning in the log: its bookie counts as absent.

        Args:
            unusable: Called with the error for each registration that is left out.

        Cost: As ``children`` and ``get_many`` of the store; a registration that has not changed is not decoded again.
        """
        keys = [f"{BOOKIES_KEY}/{name}" for name in self._store.children(BOOKIES_KEY)]
        found = []
        for key, node in zip(keys, self._store.get_many(keys), strict=True):
            if node is None:
                continue
            try:
                found.append(self.registration(key, node)[0])
            except (CorruptError, MetadataForgedError, UnsupportedFormatError) as error:
                logger.warning("a bookie counts as absent, because its registration cannot be used: %s", error)
                if unusable is not None:
                    unusable(error)
        for key in set(self._registrations) - set(keys):
            self._registrations.pop(key, None)
        return found

    def find_bookie(self, bookie_id: str) -> BookieRegistration | None:
        """Return a bookie's registration; None if it is not registered.

        Raises:
            CorruptError: The value is not a registration.
            MetadataForgedError: The value was not written with the cluster's secret.
            UnsupportedFormatError: The value has a format of a newer pybk.
        """
        key = f"{BOOKIES_KEY}/{name_in_key(bookie_id)}"
        node = self._store.get(key, latest=True)
        return None if node is None else self.registration(key, node)[0]

    def watch_bookies(self, callback: Callable[[], None]) -> Watch:
        """Call ``callback`` after a bookie was registered or its registration ended, as ``MetadataStore.watch`` does.

        An update of a registration need not cause a call.
        """
        return self._store.watch(BOOKIES_KEY, callback)

    def _write_registration(
        self, key: str, registration: BookieRegistration, owner: str, *, old: bool
    ) -> tuple[int, int]:
        """Write a registration under a lease; return the session of the lease and the version of the key.

        Args:
            key: The registration's key.
            registration: The data that the bookie reports about itself.
            owner: Identifies the ``RegisteredBookie`` that writes it.
            old: Replace a registration that the same instance left, whatever its owner.

        Raises:
            CookieError: Another registration is there that must not be replaced.
        """
        payload = encode_registration(registration, owner)
        while True:
            session = self._store.session()
            try:
                version = self.create_value(ValueKind.BOOKIE, key, payload, leased=True)
                if self._store.alive(session):
                    return session, version
                continue
            except MetadataExistsError:
                node = self._store.get(key, latest=True)
            if node is None:
                continue
            found, by = self.registration(key, node)
            if by != owner and (found.bookie != registration.bookie or not old):
                raise CookieError(
                    f"{found.bookie} is registered, so {registration.bookie} cannot be: end that one first"
                )
            with suppress(MetadataVersionError):
                self._delete(key, node.version)

    def _cookie(self, key: str, node: Node) -> BookieCookie:
        payload = self._payload_of(ValueKind.COOKIE, key, node.value)
        cookie = decode_json(payload, decode_cookie, where=f"metadata key {key!r}")
        if cookie.cluster_id != self.cluster_id:
            raise CookieError(
                f"metadata key {key!r} is of cluster {cookie.cluster_id.hex()}, not {self.cluster_id.hex()}"
            )
        return cookie

    def registration(self, key: str, node: Node) -> tuple[BookieRegistration, str]:
        """Return a registration and its owner, from the cache if the value has not changed."""
        known = self._registrations.get(key)
        if known is not None and known[0] == node.value:
            return known[1]
        where = f"metadata key {key!r}"
        if len(node.value) > REGISTRATION_BYTES_MAX:
            raise CorruptError(f"{where}: {len(node.value)} bytes; a registration has at most {REGISTRATION_BYTES_MAX}")
        found, owner = decode_json(
            self._payload_of(ValueKind.BOOKIE, key, node.value), decode_registration, where=where
        )
        if found.bookie.bookie_id != unquote(key.rpartition("/")[2]):
            raise CorruptError(f"{where} holds the registration of {found.bookie}")
        self._registrations[key] = node.value, (found, owner)
        return found, owner


def _check_is_of(found: BookieCookie, bookie: Bookie) -> None:
    if found.bookie != bookie:
        raise CookieError(f"the cluster has no cookie of {bookie}, but {found}; claim it first")
    _check_not_removed(found)


def _check_not_removed(cookie: BookieCookie) -> None:
    if cookie.state is BookieState.REMOVED:
        raise CookieError(
            f"{cookie.bookie} was removed from the cluster, which no longer counts on its entries: begin with an empty "
            "directory, under its name or another; keep this one until you have checked that nothing is missed"
        )


def encode_cookie(cookie: BookieCookie) -> bytes:
    """Return the payload of a cookie's value.

    Values equal to their defaults are left out. A cookie has others only from the feature level HEALING on.
    """
    values: dict[str, Any] = {
        "bookie_id": cookie.bookie.bookie_id,
        "instance": to_base64(cookie.bookie.instance),
        "cluster_id": to_base64(cookie.cluster_id),
        "boots": cookie.boots,
    }
    if cookie.state is not BookieState.ACTIVE:
        values["state"] = cookie.state.value
    for name in ("state_since_ns", "until_ns", "location", "level_max", "version"):
        if value := getattr(cookie, name):
            values[name] = value
    return encode_json(values)


def decode_cookie(values: dict[str, Any]) -> BookieCookie:
    """Return the cookie in the decoded payload of a value; raises ValueError if it is not one."""
    cookie = BookieCookie(
        bookie=Bookie(str(values["bookie_id"]), from_base64(values["instance"])),
        cluster_id=from_base64(values["cluster_id"]),
        boots=int(values["boots"]),
        state=BookieState(values.get("state", BookieState.ACTIVE.value)),
        state_since_ns=values.get("state_since_ns", 0),
        until_ns=values.get("until_ns", 0),
        location=values.get("location", ""),
        level_max=values.get("level_max", 0),
        version=values.get("version", ""),
    )
    encode_cookie(cookie)  # raises a ValueError for a text that could not be written again
    return cookie


_FIRST_SECRET: Final[dict[str, Any]] = {"key_epochs": [0], "key_epoch": 0, "old_sessions": 0}
"""Values that are left out of a registration, because a cluster has them while its first secret is in use."""


def encode_registration(registration: BookieRegistration, owner: str) -> bytes:
    """Return the payload of a registration's value; ``owner`` identifies the ``RegisteredBookie`` that writes it."""
    values: dict[str, Any] = {
        "bookie_id": registration.bookie.bookie_id,
        "instance": to_base64(registration.bookie.instance),
        "addresses": list(registration.addresses),
        "public_key": to_base64(registration.public_key),
        "tiers": {tier.value: free for tier, free in registration.tiers.items()},
        "load": float(registration.load),
        "rack": registration.rack,
        "read_only": registration.read_only,
        "level": registration.level_max,
        "version": registration.version,
        "owner": owner,
    }
    if registration.why_read_only:
        values["why_read_only"] = registration.why_read_only
    if registration.in_limbo:
        values["in_limbo"] = registration.in_limbo
    if registration.capacity:
        values["capacity"] = {tier.value: size for tier, size in registration.capacity.items()}
    if registration.devices:
        values["devices"] = {tier.value: name for tier, name in registration.devices.items()}
    secret: dict[str, Any] = {
        "key_epochs": list(registration.key_epochs),
        "key_epoch": registration.key_epoch,
        "old_sessions": registration.old_sessions,
    }
    return encode_json(values if secret == _FIRST_SECRET else values | secret)


def decode_registration(values: dict[str, Any]) -> tuple[BookieRegistration, str]:
    """Return the registration and its owner in the decoded payload of a value; raises ValueError if it is not one."""
    if not isinstance(values["rack"], str) or type(values["read_only"]) is not bool:
        raise ValueError("rack is not a string, or read_only not a boolean")
    level_max, version = values.get("level", 0), values.get("version", "")
    if type(level_max) is not int or level_max < 0 or not isinstance(version, str):
        raise ValueError("level is not a whole number from 0 up, or version not a string")
    why_read_only = values.get("why_read_only", "")
    if not isinstance(why_read_only, str):
        raise ValueError("why_read_only is not a string")
    in_limbo = values.get("in_limbo", 0)
    if type(in_limbo) is not int or in_limbo < 0:
        raise ValueError("in_limbo is not a whole number from 0 up")
    found = _FIRST_SECRET | {name: values[name] for name in _FIRST_SECRET if name in values}
    key_epochs, key_epoch, old_sessions = found.values()
    if not isinstance(key_epochs, list) or not all(
        type(number) is int and number >= 0 for number in (*key_epochs, key_epoch, old_sessions)
    ):
        raise ValueError("key epochs or sessions are not whole numbers from 0 up")
    registration = BookieRegistration(
        bookie=Bookie(values["bookie_id"], from_base64(values["instance"])),
        addresses=tuple(values["addresses"]),
        public_key=from_base64(values["public_key"]),
        tiers={StorageHint(tier): free for tier, free in values["tiers"].items()},
        capacity={StorageHint(tier): size for tier, size in values.get("capacity", {}).items()},
        devices={StorageHint(tier): str(name) for tier, name in values.get("devices", {}).items()},
        load=float(values["load"]),
        rack=values["rack"],
        read_only=values["read_only"],
        why_read_only=why_read_only,
        level_max=level_max,
        version=version,
        key_epochs=tuple(key_epochs),
        key_epoch=key_epoch,
        old_sessions=old_sessions,
        in_limbo=in_limbo,
    )
    return registration, str(values["owner"])

"""The settings of a cluster: one value that all members follow, changed by compare-and-set while they run.

The value is JSON with named keys. A member reads the names that it knows, takes the default for a missing one, and
keeps unknown ones when it writes the value again. So members of several versions can share it. ``ClusterSettings``
checks all values, also those that are read.
"""

from __future__ import annotations

import json
import logging
import threading
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any, ClassVar, Final

from pybk.deferral import without
from pybk.errors import (
    CorruptError,
    MetadataExistsError,
    MetadataForgedError,
    MetadataVersionError,
    UnsupportedFormatError,
    UsageError,
)
from pybk.metadata.authenticated_values import AuthenticatedValues, ValueKind
from pybk.metadata.metadata_keys import MetadataKeys
from pybk.metadata.store import MetadataStore, Node, Watch
from pybk.values import INT64_MAX, decode_json, encode_json, whole

logger = logging.getLogger(__name__)

SETTINGS_KEY: Final = "settings"
SETTINGS_BYTES_MAX: Final = 64 << 10
ACCEPTED_LOSSES_MAX: Final = 100
NAME_BYTES_MAX: Final = 128
"""The limit on the size of the name of a bookie or of a person."""

_DAY_S: Final = 86_400.0
_YEAR_S: Final = 365 * _DAY_S
_BYTES_MIN: Final = 64 << 10
_BYTES_MAX: Final = 1 << 40


class _Section:
    """A group of settings, which checks and encodes its values.

    Attributes:
        section: The group's name.
        limits: The least and the greatest value of each number.
    """

    __slots__ = ()

    section: ClassVar[str]
    limits: ClassVar[Mapping[str, tuple[float, float]]]

    def __post_init__(self) -> None:
        """Refuse values that cannot work, naming them, and give each number its own type."""
        for name, value in self.as_dict().items():
            default = type(self)._default_of(name)
            if isinstance(default, bool):
                if type(value) is not bool:
                    raise UsageError(f"setting {self.section}.{name} is {value!r:.100}; it takes True or False")
            elif isinstance(default, str):
                _check_text(f"{self.section}.{name}", value)
            elif isinstance(default, tuple):
                object.__setattr__(self, name, _names(f"{self.section}.{name}", value))
            else:
                object.__setattr__(self, name, self._number(name, value, default))

    def _number(self, name: str, value: Any, default: Any) -> float:
        least, most = self.limits[name]
        found: Any = whole(value)
        if found is None and isinstance(default, float) and isinstance(value, float):
            found = value
        if found is None or not least <= found <= most:
            kind = "number" if isinstance(default, float) else "whole number"
            raise UsageError(
                f"setting {self.section}.{name} is {value!r:.100}; it takes a {kind} from {least} to {most}"
            )
        return float(found) if isinstance(default, float) else int(found)

    @classmethod
    def _default_of(cls, name: str) -> Any:
        """Return a setting's default."""
        return next(each.default for each in fields(cls) if each.name == name)  # type: ignore[arg-type]

    def as_dict(self) -> dict[str, Any]:
        """Return the settings by name."""
        return {each.name: getattr(self, each.name) for each in fields(self)}  # type: ignore[arg-type]


def _check_text(name: str, value: Any) -> str:
    try:
        right = isinstance(value, str) and len(value.encode()) <= NAME_BYTES_MAX
    except UnicodeEncodeError:  # JSON can have halves of characters
        right = False
    if not right:
        raise UsageError(f"setting {name} is {value!r:.100}; it takes a string of at most {NAME_BYTES_MAX} bytes")
    return str(value)


def _names(name: str, value: Any) -> tuple[str, ...]:
    if not isinstance(value, Collection) or isinstance(value, str) or len(value) > ACCEPTED_LOSSES_MAX:
        raise UsageError(f"setting {name} is {value!r:.100}; it takes at most {ACCEPTED_LOSSES_MAX} names of bookies")
    return tuple(_check_text(name, each) for each in value)


@without(default_of="RepairSettings() has the defaults")
@dataclass(frozen=True, slots=True, kw_only=True)
class RepairSettings(_Section):
    """Settings of re-replication.

    Args:
        grace_s: Seconds that a bookie may be absent before its copies count as lost.
        open_grace_s: Seconds without progress after which the writer of an open ledger counts as gone.
        recover_abandoned: Whether bookies recover and close a ledger whose writer is gone, without its password.
        bytes_per_second: Bytes per second that a bookie copies in each direction.
        urgent_bytes_per_second: The same rate while only one sound copy is left.
        background_bytes_per_second: The same rate for moves that are not needed for safety.
        least_bytes_per_second: The lowest rate, even if appends take longer because of it.
        surplus_delay_s: The least seconds for which a copy that no fragment names is kept.
        hold_below: The part of the members that must be registered; with fewer, bulk copying waits.
        accepted_losses: Names of bookies whose loss does not make bulk copying wait.
        paused_until_ns: The time until which repairs pause, in nanoseconds since 1970.
        paused_by: The name of the person who paused them.

    Raises:
        UsageError: A value is out of range.
    """

    section: ClassVar[str] = "repair"
    limits: ClassVar[Mapping[str, tuple[float, float]]] = {
        "grace_s": (0.0, _YEAR_S),
        "open_grace_s": (0.0, _YEAR_S),
        "bytes_per_second": (_BYTES_MIN, _BYTES_MAX),
        "urgent_bytes_per_second": (_BYTES_MIN, _BYTES_MAX),
        "background_bytes_per_second": (_BYTES_MIN, _BYTES_MAX),
        "least_bytes_per_second": (_BYTES_MIN, _BYTES_MAX),
        "surplus_delay_s": (0.0, _YEAR_S),
        "hold_below": (0.0, 1.0),
        "paused_until_ns": (0, INT64_MAX),
    }

    grace_s: float = 600.0
    open_grace_s: float = 3_600.0
    recover_abandoned: bool = False
    bytes_per_second: int = 32 << 20
    urgent_bytes_per_second: int = 128 << 20
    background_bytes_per_second: int = 8 << 20
    least_bytes_per_second: int = 128 << 10
    surplus_delay_s: float = 3_600.0
    hold_below: float = 0.75
    accepted_losses: tuple[str, ...] = ()
    paused_until_ns: int = 0
    paused_by: str = ""


@without(default_of="PlacementSettings() has the defaults")
@dataclass(frozen=True, slots=True, kw_only=True)
class PlacementSettings(_Section):
    """Settings of the placement of copies.

    Args:
        min_zones: The number of zones that each write set should have copies in.
        strict: Whether an ensemble that has fewer is refused.
        repair: Whether misplaced copies are moved.

    Raises:
        UsageError: A value is out of range.
    """

    section: ClassVar[str] = "placement"
    limits: ClassVar[Mapping[str, tuple[float, float]]] = {"min_zones": (1, 64)}

    min_zones: int = 1
    strict: bool = False
    repair: bool = False


@without(default_of="ScrubSettings() has the defaults")
@dataclass(frozen=True, slots=True, kw_only=True)
class ScrubSettings(_Section):
    """Settings of the checks of stored copies.

    Args:
        quick_s: Seconds between two checks of a few entries of each copy.
        light_s: Seconds between two checks of the index against the files.
        deep_s: Seconds between two checks of every checksum.
        bytes_per_second: Bytes per second that a bookie reads for these checks.
        quick_asked_ns: The time of the last request for a quick check, in nanoseconds since 1970; copies whose last
            quick check is older are checked at once. 0 for never.
        light_asked_ns: The same time for checks of the index.
        deep_asked_ns: The same time for checks of every checksum.

    Raises:
        UsageError: A value is out of range.
    """

    section: ClassVar[str] = "scrub"
    limits: ClassVar[Mapping[str, tuple[float, float]]] = {
        "quick_s": (1.0, 10 * _YEAR_S),
        "light_s": (1.0, 10 * _YEAR_S),
        "deep_s": (1.0, 10 * _YEAR_S),
        "bytes_per_second": (_BYTES_MIN, _BYTES_MAX),
        "quick_asked_ns": (0, INT64_MAX),
        "light_asked_ns": (0, INT64_MAX),
        "deep_asked_ns": (0, INT64_MAX),
    }

    quick_s: float = 7 * _DAY_S
    light_s: float = _DAY_S
    deep_s: float = 30 * _DAY_S
    bytes_per_second: int = 32 << 20
    quick_asked_ns: int = 0
    light_asked_ns: int = 0
    deep_asked_ns: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterSettings:
    """The settings of a cluster.

    Args:
        repair: The settings of re-replication.
        placement: The settings of the placement of copies.
        scrub: The settings of the checks of copies.
        changed_by: The person or process that changed them last; not compared.
        changed_ns: The time of that change, in nanoseconds since 1970; not compared. 0 for a cluster that has the
            defaults.
    """

    repair: RepairSettings = RepairSettings()
    placement: PlacementSettings = PlacementSettings()
    scrub: ScrubSettings = ScrubSettings()
    changed_by: str = field(default="", compare=False)
    changed_ns: int = field(default=0, compare=False)

    def __post_init__(self) -> None:
        """Refuse values of other types."""
        for name, kind in _SECTIONS.items():
            if not isinstance(getattr(self, name), kind):
                raise UsageError(f"settings {name} are {getattr(self, name)!r:.100}; they take a {kind.__name__}")
        _check_text("changed_by", self.changed_by)

    def as_dict(self) -> dict[str, dict[str, Any]]:
        """Return the settings by group and name."""
        return {name: getattr(self, name).as_dict() for name in _SECTIONS}

    def changed(self, values: Mapping[str, Any]) -> ClusterSettings:
        """Return the settings with other values.

        Args:
            values: The new values by name, such as ``repair.grace_s``.

        Raises:
            UsageError: A setting does not exist, or a value is out of range.
        """
        groups = self.as_dict()
        for name, value in values.items():
            group, _, key = name.partition(".")
            if key not in groups.get(group, {}):
                known = ", ".join(f"{each}.{key}" for each, found in groups.items() for key in found)
                raise UsageError(f"there is no setting {name!r:.100}; there are {known}")
            groups[group][key] = value
        parts = {name: _SECTIONS[name](**found) for name, found in groups.items()}
        return replace(self, **parts)  # type: ignore[arg-type]


_SECTIONS: Final[dict[str, type[RepairSettings | PlacementSettings | ScrubSettings]]] = {
    each.section: each for each in (RepairSettings, PlacementSettings, ScrubSettings)
}


class Settings(AuthenticatedValues):
    """The settings of a cluster in its metadata store. Threads: any.

    Every method may raise MetadataUnreachableError.
    """

    def __init__(self, store: MetadataStore, keys: MetadataKeys | None) -> None:
        super().__init__(store, keys)
        self._settings_lock = threading.Lock()
        """Guards the attributes below."""
        self._settings: ClusterSettings | None = None
        """The settings that were read last; None before the first ``current_settings``."""
        self._settings_version = -1
        self._settings_watch: Watch | None = None

    def current_settings(self) -> ClusterSettings:
        """Return the settings as of the last notification from the store; only the first call costs a round trip.

        Raises:
            MetadataForgedError, CorruptError, UnsupportedFormatError: The first time, as ``read_settings``.
        """
        with self._settings_lock:
            if self._settings_watch is None:
                self._settings_watch = self.watch_settings(lambda settings: None)  # reading them keeps them
        return self._settings if self._settings is not None else self.read_settings()

    def read_settings(self) -> ClusterSettings:
        """Return the settings, with every change that took effect before the call.

        Raises:
            MetadataForgedError: They were not written with the cluster's secret.
            CorruptError: The key does not hold settings, or holds a value that this pybk refuses.
        """
        node = self._store.get(SETTINGS_KEY, latest=True)
        settings, _ = self._decoded(node)
        return self._adopt(settings, 0 if node is None else node.version)

    def change_settings(self, change: Callable[[ClusterSettings], ClusterSettings], *, by: str = "") -> ClusterSettings:
        """Change the settings, durably; equal settings are not written.

        Args:
            change: Returns the new settings for the present ones. It may be called more than once, because another
                process may change them meanwhile.
            by: The person or process that makes the change, at most ``NAME_BYTES_MAX`` bytes; kept for people.

        Returns:
            The settings now.

        Raises:
            UsageError: ``change`` did not return settings, or ``by`` is invalid.
            MetadataForgedError, CorruptError, UnsupportedFormatError: As ``read_settings``; nothing is written.
        """
        _check_text("changed_by", by)
        if not by.isprintable():  # logs and terminals show it
            raise UsageError(f"setting changed_by is {by!r:.100}; it takes characters that can be printed")
        while True:
            node = self._store.get(SETTINGS_KEY, latest=True)
            found, raw = self._decoded(node)
            new = change(found)
            if not isinstance(new, ClusterSettings):
                raise UsageError(f"the change of the settings returned {new!r:.100}; it takes a ClusterSettings")
            if new == found:
                return found
            new = replace(new, changed_by=by, changed_ns=time.time_ns())
            payload = encode_settings(new, raw)
            try:
                if node is None:
                    version = self.create_value(ValueKind.SETTINGS, SETTINGS_KEY, payload)
                else:
                    version = self._put(ValueKind.SETTINGS, SETTINGS_KEY, payload, node.version)
            except (MetadataExistsError, MetadataVersionError):
                continue
            self._adopt(new, version)
            return new

    def watch_settings(self, callback: Callable[[ClusterSettings], None]) -> Watch:
        """Call ``callback`` with the settings after each change, as ``MetadataStore.watch`` does."""

        def changed() -> None:
            if (settings := self._look_at_settings()) is not None:
                callback(settings)

        return self._store.watch(SETTINGS_KEY, changed)

    def _look_at_settings(self) -> ClusterSettings | None:
        """Return the settings after a change; None if they cannot be used."""
        try:
            return self.read_settings()
        except (CorruptError, MetadataForgedError, UnsupportedFormatError) as error:
            logger.warning("the settings of the cluster cannot be used, so those read last stay: %s", error)
            return None

    def _adopt(self, settings: ClusterSettings, version: int) -> ClusterSettings:
        """Keep settings unless newer ones are known, and return the newest ones."""
        with self._settings_lock:
            if self._settings is None or version >= self._settings_version:
                self._settings, self._settings_version = settings, version
            return self._settings

    def _decoded(self, node: Node | None) -> tuple[ClusterSettings, dict[str, Any]]:
        """Return the settings in a value, and all that it has by name."""
        if node is None:
            return ClusterSettings(), {}
        where = f"metadata key {SETTINGS_KEY!r}"
        payload = self._payload_of(ValueKind.SETTINGS, SETTINGS_KEY, node.value)
        if len(payload) > SETTINGS_BYTES_MAX:
            raise CorruptError(f"{where}: {len(payload)} bytes; settings have at most {SETTINGS_BYTES_MAX}; restore it")
        return decode_json(payload, decode_settings, where=where), json.loads(payload)


def encode_settings(settings: ClusterSettings, known: Mapping[str, Any]) -> bytes:
    """Return the payload of the settings' value.

    Args:
        settings: The settings.
        known: The present content of the value, of which names that this pybk does not know are kept.

    Raises:
        UsageError: They are too large.
    """
    values: dict[str, Any] = {**known, "changed_by": settings.changed_by, "changed_ns": settings.changed_ns}
    for name in _SECTIONS:
        values[name] = {**known.get(name, {}), **getattr(settings, name).as_dict()}
    payload = encode_json(values)
    if len(payload) > SETTINGS_BYTES_MAX:
        raise UsageError(f"the settings have {len(payload)} bytes; they may have {SETTINGS_BYTES_MAX}: shorten names")
    return payload


def decode_settings(values: dict[str, Any]) -> ClusterSettings:
    """Return the settings in the decoded payload of a value; raises ValueError if it is not one."""
    found: dict[str, Any] = {}
    for name, kind in _SECTIONS.items():
        section = values.get(name, {})
        if not isinstance(section, dict):
            raise ValueError(f"{name} is {section!r:.100}")
        found[name] = kind(**{each.name: section[each.name] for each in fields(kind) if each.name in section})
    changed_ns = values.get("changed_ns", 0)
    if type(changed_ns) is not int or not 0 <= changed_ns <= INT64_MAX:
        raise ValueError(f"changed_ns is {changed_ns!r}")
    encode_json(values)  # raises a ValueError for a text that could not be written again
    return ClusterSettings(**found, changed_by=values.get("changed_by", ""), changed_ns=changed_ns)

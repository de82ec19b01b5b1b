"""What is kept with a log of how its ledgers are made, so that all who open it make them alike."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, Final

from pybk.backend.ledger_backend import Quorums
from pybk.errors import UsageError
from pybk.flags import StorageHint
from pybk.ledger.digest import DigestType
from pybk.manager.arguments import hints_of, member_of, quorums_of, whole_from
from pybk.values.json_text import decode_json, encode_json

logger = logging.getLogger(__name__)

SETTINGS_PROPERTY: Final = "pybk.settings"
"""The property of a list that has its settings, as JSON; it is missing if none was given."""

_DEFAULTS: Final = "/".join(map(str, Quorums.of((None, None, None))))
_SEQ_MAX: Final = (1 << 63) - 2


def _quorums_of(quorums: object) -> tuple[int | None, int | None, int | None]:
    if not isinstance(quorums, (tuple, list)) or len(quorums) != 3:
        raise UsageError(f"quorums is {quorums!r:.50}; it takes ensemble size, write quorum and ack quorum: (3, 2, 2)")
    plain = quorums_of(*quorums)
    if not _can_be(plain):
        raise UsageError(
            f"quorums is {plain}; ensemble size, write quorum and ack quorum are each at least 1, and none larger than "
            f"the one before it, where None stands for {_DEFAULTS}: give for example (3, 2, 2)"
        )
    return plain


def _can_be(quorums: tuple[int | None, int | None, int | None]) -> bool:
    try:
        Quorums.of(quorums)
    except UsageError:
        return False
    return True


@dataclass(frozen=True, slots=True, kw_only=True)
class LogSettings:
    """How the ledgers of a log are made, kept with the log; None, or no hints, for the defaults of those who open it.

    The first opening of a log stores what it was given. Each argument of a later opening replaces one of them for this
    opening alone; ``set_settings`` changes them for all.

    Attributes:
        quorums: Ensemble size, write quorum and ack quorum in a cluster, of its subscriptions' cursors, too.
        digest_type: What guards the records.
        storage_hints: Where its ledgers should live.
        segment_bytes: Bytes after which the log continues in a new ledger.
        segment_age_s: Seconds after the first record of a ledger after which it does, also without traffic.
        segment_records: Records after which it does.
    """

    quorums: tuple[int | None, int | None, int | None] = (None, None, None)
    digest_type: DigestType | None = None
    storage_hints: frozenset[StorageHint] = frozenset()
    segment_bytes: int | None = None
    segment_age_s: float | None = None
    segment_records: int | None = None

    def __post_init__(self) -> None:
        """Check the values; raises UsageError."""
        put = object.__setattr__
        put(self, "quorums", _quorums_of(self.quorums))
        put(self, "storage_hints", hints_of(self.storage_hints))
        if self.digest_type is not None:
            put(self, "digest_type", member_of(DigestType, self.digest_type, "digest_type"))
        if self.segment_bytes is not None:
            put(self, "segment_bytes", whole_from(self.segment_bytes, 1, "segment_bytes", "bytes"))
        if self.segment_records is not None:
            count = whole_from(self.segment_records, 1, "segment_records", "a number of records", _SEQ_MAX)
            put(self, "segment_records", count)
        age: object = self.segment_age_s
        if age is not None and (isinstance(age, bool) or not isinstance(age, int | float) or not age > 0):
            raise UsageError(f"segment_age_s is {age!r:.50}; it takes seconds, above 0")

    def over(self, kept: LogSettings) -> LogSettings:
        """Return these settings, and those of ``kept`` where these have none."""
        ensemble, write, ack = self.quorums
        quorums = kept.quorums if (ensemble, write, ack) == (None, None, None) else self.quorums
        given = {each.name: getattr(self, each.name) for each in fields(self) if each.name != "quorums"}
        return replace(kept, quorums=quorums, **{name: value for name, value in given.items() if value})

    def as_properties(self) -> dict[str, str]:
        """Return the property that keeps them; none if none is given."""
        if self == NO_SETTINGS:
            return {}
        values = {each.name: getattr(self, each.name) for each in fields(self)}
        values["storage_hints"] = sorted(each.value for each in self.storage_hints)
        values["digest_type"] = None if self.digest_type is None else self.digest_type.name
        return {SETTINGS_PROPERTY: encode_json(values).decode()}

    @classmethod
    def kept_in(cls, properties: Mapping[str, str], name: str) -> LogSettings:
        """Return those that the properties of a log keep.

        Raises:
            CorruptError: The property is damaged.
        """
        text = properties.get(SETTINGS_PROPERTY)
        if text is None:
            return cls()

        def make(values: dict[str, Any]) -> LogSettings:
            digest = values["digest_type"]
            hints = frozenset(map(StorageHint, values["storage_hints"]))
            digest_type = None if digest is None else DigestType[digest]
            quorums = quorums_of(*values["quorums"])
            if not _can_be(quorums):  # kept by a version that did not refuse them; no ledger was made with them
                logger.warning("log %r keeps the quorums %s, which cannot be; the defaults count", name, quorums)
                quorums = (None, None, None)
            return cls(**{**values, "storage_hints": hints, "digest_type": digest_type, "quorums": quorums})

        return decode_json(text.encode(), make, where=f"the settings of log {name!r}")


NO_SETTINGS: Final = LogSettings()
"""Those of a log that was made with the defaults of those who open it."""

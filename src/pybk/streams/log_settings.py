"""The settings of a log: how its ledgers are made and opened, and when it continues in a new one.

Part of them is kept with the log (``LogSettings``), so every process that opens it makes its ledgers alike. Blob stores
make their ledgers by the same specification (``LedgerSpec``).
"""

from __future__ import annotations

import logging
import math
import sys
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, Final, NamedTuple

from pybk.backend import Quorums
from pybk.credentials import (
    NO_CREDENTIALS,
    PASSWORD,
    SECRET,
    Credentials,
    KeyKind,
    Secret,
    environment_credentials,
    read_credentials,
)
from pybk.errors import NoSuchLedgerError, PybkError, UnauthorizedError, UsageError
from pybk.flags import StorageHint, WriteFlag
from pybk.ledger.digest import DigestType
from pybk.ledger.keys import wrong_credentials
from pybk.manager.arguments import hints_of, member_of, quorums_of, whole_from
from pybk.manager.ledger_manager import LedgerManager, create_when_full
from pybk.manager.ledger_reader import LedgerReader
from pybk.manager.ledger_writer import LedgerWriter
from pybk.streams.list_record import SEQ_MAX, ListKind
from pybk.values import decode_json, encode_json, flag_of

logger = logging.getLogger(__name__)

SETTINGS_PROPERTY: Final = "pybk.settings"
"""The property of a list that has its settings, as JSON; it is missing if none was given."""

SEGMENT_BYTES: Final = 64 << 20
"""The payload bytes after which a log continues in a new ledger, unless its settings say otherwise."""

SEGMENT_AGE_S: Final = 4 * 3600.0
"""The age of a ledger, in seconds, after which a log continues in a new one, unless its settings say otherwise."""

_DEFAULTS: Final = "/".join(map(str, Quorums.of((None, None, None))))


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
    """The settings of a log's ledgers, kept with the log; None, or no hints, means the defaults of the opener.

    The first opening of a log stores the settings that it was given. An argument of a later opening replaces one of
    them for that opening alone; ``set_settings`` changes them for all.

    Attributes:
        quorums: Ensemble size, write quorum and ack quorum in a cluster, also of its subscriptions' cursors.
        digest_type: The digest of the records' entries.
        storage_hints: The tiers where its ledgers should live.
        segment_bytes: Bytes after which the log continues in a new ledger.
        segment_age_s: Seconds after the first record of a ledger after which the log continues in a new ledger, even
            without further records.
        segment_records: Records after which the log continues in a new ledger.
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
            count = whole_from(self.segment_records, 1, "segment_records", "a number of records", SEQ_MAX)
            put(self, "segment_records", count)
        age: object = self.segment_age_s
        if age is not None and (isinstance(age, bool) or not isinstance(age, int | float) or not _is_age(age)):
            raise UsageError(f"segment_age_s is {age!r:.50}; it takes seconds, above 0")

    def over(self, kept: LogSettings) -> LogSettings:
        """Return these settings, completed by those of ``kept``."""
        ensemble, write, ack = self.quorums
        quorums = kept.quorums if (ensemble, write, ack) == (None, None, None) else self.quorums
        given = {each.name: getattr(self, each.name) for each in fields(self) if each.name != "quorums"}
        return replace(kept, quorums=quorums, **{name: value for name, value in given.items() if value})

    def as_properties(self) -> dict[str, str]:
        """Return the property that keeps them; an empty mapping if no setting is given."""
        if self == NO_SETTINGS:
            return {}
        return {SETTINGS_PROPERTY: encode_json(self.described()).decode()}

    def described(self) -> dict[str, Any]:
        """Return them by name, as JSON has them."""
        values = {each.name: getattr(self, each.name) for each in fields(self)}
        values["storage_hints"] = sorted(each.value for each in self.storage_hints)
        values["digest_type"] = None if self.digest_type is None else self.digest_type.name
        return values

    @classmethod
    def kept_in(cls, properties: Mapping[str, str], name: str) -> LogSettings:
        """Return the settings that the properties of a log keep.

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
                logger.warning("log %r keeps the quorums %s, which are not valid; the defaults are used", name, quorums)
                quorums = (None, None, None)
            return cls(**{**values, "storage_hints": hints, "digest_type": digest_type, "quorums": quorums})

        return decode_json(text.encode(), make, where=f"the settings of log {name!r}")


NO_SETTINGS: Final = LogSettings()
"""The settings of a log whose ledgers are made with the defaults of the process that opens it."""


class RollPolicy(NamedTuple):
    """The limits of a segment; when it reaches one of them, the log continues in a new ledger.

    Attributes:
        nbytes: Payload bytes of a segment.
        age_s: Seconds after the first record of a segment, even if no other follows.
        records: Records of a segment.
    """

    nbytes: int = SEGMENT_BYTES
    age_s: float = SEGMENT_AGE_S
    records: int = SEQ_MAX

    @classmethod
    def of(cls, settings: LogSettings) -> RollPolicy:
        """Return the policy in settings."""
        return cls(
            settings.segment_bytes or SEGMENT_BYTES,
            float(settings.segment_age_s or SEGMENT_AGE_S),
            settings.segment_records or SEQ_MAX,
        )

    def is_reached(self, nbytes: int, records: int) -> bool:
        """Return whether a segment with so many payload bytes and records has reached a limit; its age may, too."""
        return nbytes >= self.nbytes or records >= self.records


@dataclass(frozen=True, slots=True, kw_only=True)
class LedgerSpec:
    """The type, the password and the settings of the ledgers of a log or a blob store.

    Attributes:
        ledger_type: Their type, by which metrics are split; for a log, the kind of its list.
        given: Their password or secret.
        asked: The settings with which it was opened, which replace those that a log keeps.
        insecure: Whether to allow neither a password nor a secret.
    """

    ledger_type: str
    given: Credentials = NO_CREDENTIALS
    asked: LogSettings = NO_SETTINGS
    insecure: bool = False

    @property
    def kind(self) -> ListKind:
        """The kind of the list that they are the ledgers of; not for a blob store."""
        return ListKind(self.ledger_type)

    def completed(self, kept: LogSettings) -> LedgerSpec:
        """Return the specification for the ledgers of a log that keeps these settings."""
        return replace(self, asked=self.asked.over(kept))

    def of_cursors(self) -> LedgerSpec:
        """Return the specification for the ledgers of the cursors of a log's subscriptions."""
        return replace(self, ledger_type=ListKind.CURSOR)

    def create(
        self, manager: LedgerManager, custom_metadata: Mapping[str, bytes], *, entries_when_full: int = 0
    ) -> LedgerWriter:
        """Create a ledger.

        Args:
            manager: The manager of the store or cluster.
            custom_metadata: The custom metadata of the ledger.
            entries_when_full: The number of its first entries that a store takes even if it is full; unless it is 0,
                the ledger is created even in a full store.
        """
        default = DigestType.HMAC_SHA256 if self.given else DigestType.CRC32C
        return create_when_full(
            manager,
            entries=entries_when_full,
            given=self.given,
            ledger_type=str(self.ledger_type),
            storage_hints=self.asked.storage_hints,
            write_flags=WriteFlag.NONE,
            digest_type=default if self.asked.digest_type is None else self.asked.digest_type,
            custom_metadata=custom_metadata,
            quorums=self.asked.quorums,
            insecure=self.insecure,
        )

    def opens(self, manager: LedgerManager, ledger_id: int) -> bool:
        """Return whether a ledger has this password or secret; raises as ``LedgerManager.check_password``."""
        return manager.check_password(ledger_id, self.given.password, secret=self.given.secret)

    def open_ledger(self, manager: LedgerManager, ledger_id: int, *, recover: bool) -> LedgerReader:
        """Open a ledger; raises as ``LedgerManager.open_ledger``."""
        given = self.given
        return manager.open_ledger(ledger_id, password=given.password, secret=given.secret, recover=recover)

    def delete_ledger(self, manager: LedgerManager, ledger_id: int, what: str) -> bool:
        """Delete an unneeded ledger, and return whether it is gone; the log names it ``what`` in an error."""
        try:
            manager.delete_ledger(ledger_id, password=self.given.password, secret=self.given.secret)
        except NoSuchLedgerError:
            return True
        except (PybkError, OSError) as error:
            logger.warning("%s: ledger %d is not needed, and could not be deleted: %s", what, ledger_id, error)
            return False
        return True


def wrong_password(manager: LedgerManager, ledger_id: int, what: str, given: Credentials) -> UnauthorizedError:
    """Return the error for a password or secret that is not that of a ledger.

    Args:
        manager: The manager that has the ledger.
        ledger_id: The ledger.
        what: The log or store that it belongs to, such as "log 'orders'".
        given: The password or secret that was given.
    """
    kind = manager.ledger_metadata(ledger_id).key_kind
    if kind is KeyKind.PASSWORD and given.password and _has_none(manager, ledger_id):
        kind = KeyKind.NOTHING
    return UnauthorizedError(f"{wrong_credentials(kind, given, what)}; nothing was changed")


def _has_none(manager: LedgerManager, ledger_id: int) -> bool:
    try:
        return manager.check_password(ledger_id, b"")
    except PybkError:  # what is wrong is the password that was given
        return False


def _is_age(seconds: float) -> bool:
    return 0 < seconds <= sys.float_info.max or seconds == math.inf  # no float holds a larger whole number


_WITHOUT: Final = "pass insecure=True (in a shell: --insecure) to do without"


def _credentials_of(password: bytes | Secret | None, secret: bytes | Secret | None, insecure: bool) -> Credentials:
    """Return the password and secret with which a log or a blob store is opened, or those in the environment."""
    named = Secret(variable=PASSWORD) if password is None else password
    from_environment = password is None and secret is None
    given = environment_credentials() if from_environment else read_credentials(password, secret)
    if flag_of(insecure, "insecure") or given:
        return given
    source = named.source if isinstance(named, Secret) else None
    if isinstance(named, Secret) and source is not None and (password is not None or named.read() is not None):
        raise UsageError(f"{source} holds no password: put one there, or {_WITHOUT}")
    raise UsageError(
        "there is no password and no secret: pass secret=... or password=... (in a shell: --secret-file FILE or "
        f"--password-file FILE), set {SECRET}, {PASSWORD}, {SECRET}_FILE or {PASSWORD}_FILE in the environment, or "
        f"{_WITHOUT}"
    )


def spec_of(
    ledger_type: str,
    password: bytes | Secret | None,
    secret: bytes | Secret | None,
    insecure: bool,
    asked: LogSettings = NO_SETTINGS,
) -> LedgerSpec:
    """Return the specification that the arguments give with which a log or a blob store is opened.

    Raises:
        UsageError: There is neither password nor secret, and ``insecure`` is not set; or another argument is invalid.
    """
    given = _credentials_of(password, secret, insecure)
    return LedgerSpec(ledger_type=ledger_type, given=given, asked=asked, insecure=insecure)

"""How the ledgers of a log or a blob store are created and opened."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields, replace

from pybk.credentials import PASSWORD, Secret, checked_password
from pybk.errors import PybkError, UnauthorizedError, UsageError
from pybk.flags import StorageHint, WriteFlag
from pybk.ledger.digest import DigestType
from pybk.manager.arguments import flag_of, hints_of
from pybk.manager.ledger_manager import LedgerManager, create_when_full
from pybk.manager.ledger_writer import LedgerWriter
from pybk.streams.list_record import ListKind
from pybk.streams.log_settings import NO_SETTINGS, LogSettings


@dataclass(frozen=True, slots=True, kw_only=True)
class LedgerSettings:
    """How ledgers are created and opened.

    Attributes:
        password: Their password.
        digest_type: What guards their entries.
        storage_hints: Where they should live.
        write_flags: How they are written.
        ledger_type: Their type, by which metrics are split.
        quorums: Ensemble size, write quorum and ack quorum; None for the manager's defaults.
        insecure: Allow an empty password.
    """

    password: bytes = field(default=b"", repr=False)
    digest_type: DigestType = DigestType.HMAC_SHA256
    storage_hints: frozenset[StorageHint] = frozenset()
    write_flags: WriteFlag = WriteFlag.NONE
    ledger_type: str = ""
    quorums: tuple[int | None, int | None, int | None] = (None, None, None)
    insecure: bool = False

    def create(
        self, manager: LedgerManager, custom_metadata: Mapping[str, bytes], *, entries_when_full: int = 0
    ) -> LedgerWriter:
        """Create a ledger.

        Args:
            manager: Where.
            custom_metadata: The ledger's.
            entries_when_full: How many of its first entries a store takes although it is too full for others; if any,
                the ledger is created even then.
        """
        return create_when_full(
            manager,
            entries=entries_when_full,
            password=self.password,
            ledger_type=self.ledger_type,
            storage_hints=self.storage_hints,
            write_flags=self.write_flags,
            digest_type=self.digest_type,
            custom_metadata=custom_metadata,
            quorums=self.quorums,
            insecure=self.insecure,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class LedgerSpec(LedgerSettings):
    """How the ledgers of a log are created and opened.

    Attributes:
        kind: What they are the ledgers of.
        asked: The settings with which the log was opened, which replace those that it keeps.
    """

    kind: ListKind
    asked: LogSettings = NO_SETTINGS

    def completed(self, kept: LogSettings) -> LedgerSpec:
        """Return how ledgers are made of a log that keeps these settings."""
        found = self.asked.over(kept)
        digest_type = self.digest_type if found.digest_type is None else found.digest_type
        return replace(
            self, quorums=found.quorums, digest_type=digest_type, storage_hints=found.storage_hints, asked=found
        )


def wrong_password(manager: LedgerManager, ledger_id: int, what: str, password: bytes) -> UnauthorizedError:
    """Return the error for a password that is not that of a ledger.

    Args:
        manager: Has the ledger.
        ledger_id: The ledger.
        what: What it belongs to, such as "log 'orders'".
        password: What was given; empty for none.
    """
    if not password:
        text = (
            f"{what} has a password, and none was given: pass password=... (in a shell: --password-file FILE) or set "
            f"{PASSWORD}"
        )
    elif _has_none(manager, ledger_id):
        text = (
            f"{what} has no password, and one was given: unset {PASSWORD} and {PASSWORD}_FILE, or pass password=b'' "
            "(in a shell: leave --password-file out), and pass insecure=True"
        )
    else:
        text = f"the password is not that of {what}"
    return UnauthorizedError(f"{text}; nothing was changed")


def _has_none(manager: LedgerManager, ledger_id: int) -> bool:
    try:
        return manager.check_password(ledger_id, b"")
    except PybkError:  # what is wrong is the password that was given
        return False


def settings_of(
    ledger_type: str,
    password: bytes | Secret | None,
    insecure: bool,
    digest_type: DigestType | None = None,
    storage_hints: Iterable[StorageHint] = (),
    quorums: tuple[int | None, int | None, int | None] = (None, None, None),
) -> LedgerSettings:
    """Return how ledgers are made, from the arguments with which a log or a blob store is opened.

    Raises:
        UsageError: There is no password, and ``insecure`` is not set; or another argument cannot be.
    """
    found = Secret(variable=PASSWORD) if password is None else password
    value = found.read() if isinstance(found, Secret) else checked_password(found)
    if not value and not flag_of(insecure, "insecure"):
        source = found.source if isinstance(found, Secret) else None
        if source is not None and (password is not None or value is not None):
            raise UsageError(f"{source} holds no password: put one there, or pass insecure=True to do without")
        raise UsageError(
            f"there is no password: pass password=... (in a shell: --password-file FILE), set {PASSWORD} or "
            f"{PASSWORD}_FILE in the environment, or pass insecure=True to do without"
        )
    asked = LogSettings(quorums=quorums, digest_type=digest_type, storage_hints=hints_of(storage_hints))
    default = DigestType.HMAC_SHA256 if value else DigestType.CRC32C
    return LedgerSettings(
        password=value or b"",
        digest_type=default if asked.digest_type is None else asked.digest_type,
        storage_hints=asked.storage_hints,
        ledger_type=ledger_type,
        quorums=asked.quorums,
        insecure=insecure,
    )


def spec_of(
    kind: ListKind,
    password: bytes | Secret | None,
    insecure: bool,
    asked: LogSettings = NO_SETTINGS,
) -> LedgerSpec:
    """Return how the ledgers of a log are made, as ``settings_of`` does, if the log keeps nothing of it."""
    settings = settings_of(kind.value, password, insecure, asked.digest_type, asked.storage_hints, asked.quorums)
    return LedgerSpec(kind=kind, asked=asked, **{each.name: getattr(settings, each.name) for each in fields(settings)})

"""How the ledgers of a log or a blob store are created and opened."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields, replace
from typing import Final

from pybk.credentials import (
    NO_CREDENTIALS,
    PASSWORD,
    SECRET,
    Credentials,
    KeyKind,
    Secret,
    environment_credentials,
    mismatch,
    read_credentials,
)
from pybk.errors import PybkError, UnauthorizedError, UsageError
from pybk.flags import StorageHint, WriteFlag
from pybk.ledger.digest import DigestType
from pybk.manager.arguments import flag_of, hints_of
from pybk.manager.ledger_manager import LedgerManager, create_when_full
from pybk.manager.ledger_reader import LedgerReader
from pybk.manager.ledger_writer import LedgerWriter
from pybk.streams.list_record import ListKind
from pybk.streams.log_settings import NO_SETTINGS, LogSettings


@dataclass(frozen=True, slots=True, kw_only=True)
class LedgerSettings:
    """How ledgers are created and opened.

    Attributes:
        given: Their password or secret.
        digest_type: What guards their entries.
        storage_hints: Where they should live.
        write_flags: How they are written.
        ledger_type: Their type, by which metrics are split.
        quorums: Ensemble size, write quorum and ack quorum; None for the manager's defaults.
        insecure: Allow to do without both.
    """

    given: Credentials = NO_CREDENTIALS
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
            given=self.given,
            ledger_type=self.ledger_type,
            storage_hints=self.storage_hints,
            write_flags=self.write_flags,
            digest_type=self.digest_type,
            custom_metadata=custom_metadata,
            quorums=self.quorums,
            insecure=self.insecure,
        )

    def opens(self, manager: LedgerManager, ledger_id: int) -> bool:
        """Return whether a ledger has this password or secret; raises as ``LedgerManager.check_password``."""
        return manager.check_password(ledger_id, self.given.password, secret=self.given.secret)

    def open_ledger(self, manager: LedgerManager, ledger_id: int, *, recover: bool) -> LedgerReader:
        """Open a ledger; raises as ``LedgerManager.open_ledger``."""
        given = self.given
        return manager.open_ledger(ledger_id, password=given.password, secret=given.secret, recover=recover)

    def delete_ledger(self, manager: LedgerManager, ledger_id: int) -> None:
        """Delete a ledger; raises as ``LedgerManager.delete_ledger``."""
        manager.delete_ledger(ledger_id, password=self.given.password, secret=self.given.secret)


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


def wrong_password(manager: LedgerManager, ledger_id: int, what: str, given: Credentials) -> UnauthorizedError:
    """Return the error for a password or secret that is not that of a ledger.

    Args:
        manager: Has the ledger.
        ledger_id: The ledger.
        what: What it belongs to, such as "log 'orders'".
        given: What was given.
    """
    kind = manager.ledger_metadata(ledger_id).key_kind
    if kind is KeyKind.PASSWORD and given.password and _has_none(manager, ledger_id):
        kind = KeyKind.NOTHING
    return UnauthorizedError(f"{mismatch(kind, given, what)}; nothing was changed")


def _has_none(manager: LedgerManager, ledger_id: int) -> bool:
    try:
        return manager.check_password(ledger_id, b"")
    except PybkError:  # what is wrong is the password that was given
        return False


_WITHOUT: Final = "pass insecure=True (in a shell: --insecure) to do without"


def _credentials_of(password: bytes | Secret | None, secret: bytes | Secret | None, insecure: bool) -> Credentials:
    """Return the password and secret with which a log or a blob store is opened, or those in the environment."""
    named = Secret(variable=PASSWORD) if password is None else password
    from_environment = password is None and secret is None
    given = environment_credentials() if from_environment else read_credentials(password, secret)
    if given or flag_of(insecure, "insecure"):
        return given
    source = named.source if isinstance(named, Secret) else None
    if isinstance(named, Secret) and source is not None and (password is not None or named.read() is not None):
        raise UsageError(f"{source} holds no password: put one there, or {_WITHOUT}")
    raise UsageError(
        "there is no password and no secret: pass secret=... or password=... (in a shell: --secret-file FILE or "
        f"--password-file FILE), set {SECRET}, {PASSWORD}, {SECRET}_FILE or {PASSWORD}_FILE in the environment, or "
        f"{_WITHOUT}"
    )


def settings_of(
    ledger_type: str,
    password: bytes | Secret | None,
    secret: bytes | Secret | None,
    insecure: bool,
    digest_type: DigestType | None = None,
    storage_hints: Iterable[StorageHint] = (),
    quorums: tuple[int | None, int | None, int | None] = (None, None, None),
) -> LedgerSettings:
    """Return how ledgers are made, from the arguments with which a log or a blob store is opened.

    Raises:
        UsageError: There is neither password nor secret, and ``insecure`` is not set; or another argument cannot be.
    """
    given = _credentials_of(password, secret, insecure)
    asked = LogSettings(quorums=quorums, digest_type=digest_type, storage_hints=hints_of(storage_hints))
    default = DigestType.HMAC_SHA256 if given else DigestType.CRC32C
    return LedgerSettings(
        given=given,
        digest_type=default if asked.digest_type is None else asked.digest_type,
        storage_hints=asked.storage_hints,
        ledger_type=ledger_type,
        quorums=asked.quorums,
        insecure=insecure,
    )


def spec_of(
    kind: ListKind,
    password: bytes | Secret | None,
    secret: bytes | Secret | None,
    insecure: bool,
    asked: LogSettings = NO_SETTINGS,
) -> LedgerSpec:
    """Return how the ledgers of a log are made, as ``settings_of`` does, if the log keeps nothing of it."""
    settings = settings_of(
        kind.value, password, secret, insecure, asked.digest_type, asked.storage_hints, asked.quorums
    )
    return LedgerSpec(kind=kind, asked=asked, **{each.name: getattr(settings, each.name) for each in fields(settings)})

"""How the ledgers of a log are created and opened."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from pybk.credentials import PASSWORD, Secret
from pybk.digest import DigestType
from pybk.errors import UsageError
from pybk.flags import StorageHint, WriteFlag
from pybk.streams.list_record import ListKind


@dataclass(frozen=True, slots=True, kw_only=True)
class LedgerSpec:
    """How the ledgers of a log are created and opened.

    Attributes:
        kind: What they are the ledgers of.
        password: Their password.
        digest_type: What guards their entries.
        storage_hints: Where they should live.
        write_flags: How they are written.
        ledger_type: Their type, by which metrics are split.
        quorums: Ensemble size, write quorum and ack quorum; None for the manager's defaults.
        insecure: Allow an empty password.
    """

    kind: ListKind
    password: bytes = field(default=b"", repr=False)
    digest_type: DigestType = DigestType.HMAC_SHA256
    storage_hints: frozenset[StorageHint] = frozenset()
    write_flags: WriteFlag = WriteFlag.NONE
    ledger_type: str = ""
    quorums: tuple[int | None, int | None, int | None] = (None, None, None)
    insecure: bool = False


def spec_of(
    kind: ListKind,
    password: bytes | Secret | None,
    insecure: bool,
    digest_type: DigestType | None = None,
    storage_hints: Iterable[StorageHint] = (),
    quorums: tuple[int | None, int | None, int | None] = (None, None, None),
) -> LedgerSpec:
    """Return how the ledgers of a log are made, from the arguments with which it is opened.

    Raises:
        UsageError: There is no password, and ``insecure`` is not set.
    """
    found = Secret(variable=PASSWORD) if password is None else password
    value = found.read() if isinstance(found, Secret) else found
    if not value and not insecure:
        raise UsageError(
            f"the log has no password: pass password=..., set {PASSWORD} or {PASSWORD}_FILE in the environment, or "
            "pass insecure=True to do without"
        )
    if digest_type is None:
        digest_type = DigestType.HMAC_SHA256 if value else DigestType.CRC32C
    return LedgerSpec(
        kind=kind,
        password=value or b"",
        digest_type=digest_type,
        storage_hints=frozenset(storage_hints),
        ledger_type=kind.value,
        quorums=quorums,
        insecure=insecure,
    )

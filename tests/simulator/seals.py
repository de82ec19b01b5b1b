"""The password of the simulation's ledgers: what seals an end, and what a sealed end must not bear."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import lru_cache
from typing import Any, Final, cast

from pybk.errors import SealMismatchError
from pybk.flags import LedgerType, WriteFlag
from pybk.ledger.digest import DigestType, EntryDigest
from pybk.ledger.entry import ENTRY_HEADER_BYTES
from pybk.ledger.keys import KeyRing, LedgerKeys, LedgerSeal
from pybk.ledger.ledger_metadata import LedgerMetadata, LedgerState

PASSWORD: Final = b"the password of a simulated ledger"
KEY_SALT: Final = bytes(16)


class PayloadDigest:
    """Stands for the digest of entries, which have none here: the payload's first bytes, which name the entry."""

    size = 8


@lru_cache
def _ring() -> KeyRing:
    return KeyRing(b"a simulated store", bytes(16), cost=2)


@lru_cache(64)
def _keys(ledger_id: int, digest_type: DigestType, write_flags: WriteFlag) -> LedgerKeys:
    kinds = digest_type.to_bytes(4, "big"), write_flags.to_bytes(4, "big")
    return _ring().ledger_keys(PASSWORD, ledger_id, KEY_SALT, 0, binding=kinds)


def with_password(metadata: LedgerMetadata) -> LedgerMetadata:
    """Return the metadata of a new ledger that has the password."""
    keys = _keys(metadata.ledger_id, metadata.digest_type, metadata.write_flags)
    return replace(metadata, key_salt=KEY_SALT, key_format=1, verifier=keys.verifier)


def seal_of(metadata: LedgerMetadata) -> LedgerSeal:
    """Return what a client that knows the password seals and checks a ledger with."""
    keys = _keys(metadata.ledger_id, metadata.digest_type, metadata.write_flags)
    return LedgerSeal(keys, cast(EntryDigest, PayloadDigest))


def digest_in(entry: bytes) -> bytes:
    """Return what stands for an entry's digest."""
    return entry[ENTRY_HEADER_BYTES : ENTRY_HEADER_BYTES + PayloadDigest.size]


def forgeries(sealed: LedgerMetadata) -> Iterator[tuple[str, LedgerMetadata]]:
    """Yield a sealed ledger's metadata as somebody without the password may change it, each with what is changed."""
    values: dict[str, Any] = dict(_forged(sealed))
    for name, value in values.items():
        yield name, replace(sealed, **{name: value})


def _forged(sealed: LedgerMetadata) -> tuple[tuple[str, object], ...]:
    return (
        ("last_entry_id", sealed.last_entry_id + 1),
        ("length", sealed.length + 1),
        ("last_digest", bytes(byte ^ 1 for byte in sealed.last_digest) or b"another"),
        ("seal", bytes(32)),
        ("ledger_id", sealed.ledger_id + 1),
        ("ledger_type", LedgerType("another")),
        ("custom_metadata", {"schema": b"another"}),
        ("write_flags", WriteFlag.DEFERRED_FORCE),
        ("digest_type", DigestType.CRC32C),
        ("key_salt", b"another salt ..."),
        ("creation_time_ns", sealed.creation_time_ns + 1),
        ("creation_sequence", sealed.creation_sequence + 1),
        ("advanced", not sealed.advanced),
        ("key_epoch", sealed.key_epoch + 1),
        ("state", LedgerState.IN_RECOVERY),
    )


def is_right(seal: LedgerSeal, metadata: LedgerMetadata) -> bool:
    """Return whether a reader takes a ledger's seal."""
    try:
        seal.check(metadata)
    except SealMismatchError:
        return False
    return True

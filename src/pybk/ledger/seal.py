"""Seals: a MAC in a ledger's metadata proves to holders of its password that its kind and end were not changed.

A seal is a MAC over a ledger's immutable metadata, last entry id, length and last digest, under a key that is derived
from the ledger's password. The writer makes it when it closes the ledger, or recovery does. It is deterministic: two
recoveries that find the same end make the same seal. See ``docs/concepts/seals.md`` and ``docs/reference/format.md``.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import logging
from binascii import b2a_base64
from collections.abc import Callable, Mapping
from dataclasses import replace
from struct import Struct
from typing import Final

from pybk.credentials import Credentials, KeyKind
from pybk.errors import LedgerUnsealedError, SealMismatchError
from pybk.flags import WriteFlag
from pybk.ledger.digest import DigestType, EntryDigest, entry_digest
from pybk.ledger.entry import ENTRY_HEADER_BYTES, EntryBatch
from pybk.ledger.keys import KeyRing, LedgerKeys
from pybk.ledger.ledger_metadata import KEY_FORMAT_MAX, LedgerMetadata, LedgerState, key_kind

logger = logging.getLogger(__name__)

_LABEL: Final = b"pybk ledger seal 1\0"
_unpack_header = Struct(">qqqq").unpack_from
_pack_id = Struct(">IQI").pack
_pack_kind = Struct(">II II I? IQ IQ I32s I").pack
_pack_end = Struct(">IQ II Iq IQ I").pack
_NO_CUSTOM_HASH: Final = hashlib.sha256(b"{}").digest()
_encode_json = json.JSONEncoder(ensure_ascii=False, sort_keys=True, separators=(",", ":")).encode

Verifier = Callable[[LedgerKeys], bytes]
"""Returns the verifier of a ledger's keys that metadata stores; ``LedgerBackend.verifier``."""


def keys_of(ring: KeyRing, given: Credentials, metadata: LedgerMetadata) -> LedgerKeys | None:
    """Derive the keys of a ledger as its metadata describes it; None if nothing of its kind is given."""
    value = given.of(metadata.key_kind)
    if value is None:
        return None
    return ring.ledger_keys(
        value,
        metadata.ledger_id,
        metadata.key_salt,
        metadata.key_epoch,
        kind=metadata.key_kind,
        binding=metadata.key_binding,
    )


def unlocked(ring: KeyRing, verifier: Verifier, given: Credentials, metadata: LedgerMetadata) -> LedgerKeys | None:
    """Derive the keys of a ledger, and check that the password or secret is the ledger's.

    Args:
        ring: Derives keys.
        verifier: Returns the verifier of keys that metadata stores.
        given: The password, the secret, or both.
        metadata: The ledger's metadata.

    Returns:
        The keys; None if what is given is wrong, or nothing of the ledger's kind.

    Raises:
        SealMismatchError: The password or secret is right, but the ledger was created with another digest type, other
            write flags or another key format.

    Cost: As ``KeyRing.ledger_keys``; ten times that for a wrong password.
    """

    def opens(described: LedgerMetadata) -> LedgerKeys | None:
        keys = keys_of(ring, given, described)
        return keys if keys is not None and hmac.compare_digest(verifier(keys), metadata.verifier) else None

    keys = opens(metadata)
    if keys is not None:
        return keys
    for kind in _other_kinds(metadata, given):
        if opens(kind) is not None:
            raise SealMismatchError(
                f"ledger {metadata.ledger_id} was created with digest {kind.digest_type.name}, write flags "
                f"{kind.write_flags!r} and key format {kind.key_format}, but its metadata say "
                f"{metadata.digest_type.name}, {metadata.write_flags!r} and {metadata.key_format}: they were changed; "
                "restore them"
            )
    return None


def _other_kinds(metadata: LedgerMetadata, given: Credentials) -> list[LedgerMetadata]:
    """Return the ledger as it would be with other immutable metadata that its keys may be bound to.

    A password stands for those of key format 0 and 1, the others for one each. The empty password is stretched for a
    ledger alone whose metadata say that it has a password.
    """
    formats = {metadata.key_format, *(each for each in range(KEY_FORMAT_MAX + 1) if given.of(key_kind(each)))}
    if key_kind(metadata.key_format) is KeyKind.PASSWORD:
        formats |= {0, 1}
    kinds = [
        replace(metadata, digest_type=digest_type, write_flags=flags, key_format=key_format)
        for key_format in sorted(formats - {0})
        for digest_type in DigestType
        for flags in {WriteFlag.NONE, *WriteFlag}
    ]
    if 0 in formats:
        kinds.append(replace(metadata, key_format=0))
    return [kind for kind in kinds if kind != metadata]


class LedgerSeal:
    """Makes and checks the seal of one ledger.

    Args:
        keys: The ledger's keys.
        digest: Checks the ledger's entries.

    Threads: any.
    """

    def __init__(self, keys: LedgerKeys, digest: EntryDigest) -> None:
        self._keys = keys
        self.digest: Final = digest

    def sealed(self, closed: LedgerMetadata, last_entry: bytes | memoryview) -> LedgerMetadata:
        """Return the metadata of a closed ledger with its seal.

        Args:
            closed: The metadata to be written; state, last entry id and length are final.
            last_entry: The encoded last entry, or its header and digest; nothing for an empty ledger. The caller has
                checked its digest.

        Returns:
            The metadata; without a seal, and a warning in the log, if ``last_entry`` is another entry than the last.

        Cost: Two HMACs.
        """
        if not names(last_entry, closed):
            logger.warning(
                "ledger %d is closed without a seal: its last entry is not entry %d with %d bytes in all; check the "
                "ledger with verify",
                closed.ledger_id,
                closed.last_entry_id,
                closed.length,
            )
            return closed.with_seal(b"", b"")
        last_digest = b""
        if closed.last_entry_id >= 0:
            last_digest = bytes(last_entry[ENTRY_HEADER_BYTES : ENTRY_HEADER_BYTES + self.digest.size])
        return closed.with_seal(self._seal_of(closed, last_digest), last_digest)

    def check(self, metadata: LedgerMetadata) -> None:
        """Check the seal of a sealed ledger.

        Raises:
            SealMismatchError: The seal does not match the ledger's kind or end.
        """
        right = metadata.state is LedgerState.CLOSED and hmac.compare_digest(
            self._seal_of(metadata, metadata.last_digest), metadata.seal
        )
        if not right:
            raise SealMismatchError(
                f"ledger {metadata.ledger_id}: the seal is not that of a {metadata.digest_type.name} ledger that ends "
                f"with entry {metadata.last_entry_id} and {metadata.length} bytes: its metadata were changed after it "
                "was sealed; restore them"
            )

    def require(self, metadata: LedgerMetadata, remedy: str) -> None:
        """Check that a ledger is closed and sealed.

        Args:
            metadata: The metadata of the ledger.
            remedy: The remedy in the error for a ledger without a seal.

        Raises:
            LedgerUnsealedError: The ledger has no seal.
            SealMismatchError: As ``check``.
        """
        if not metadata.sealed:
            raise LedgerUnsealedError(
                f"ledger {metadata.ledger_id} is {metadata.state.value} and not sealed, and require_seal is given; "
                f"{remedy}"
            )
        self.check(metadata)

    @staticmethod
    def check_end(metadata: LedgerMetadata, proven: int) -> None:
        """Check that a ledger without a seal was not closed short of an entry that was confirmed.

        Args:
            metadata: The metadata of the closed ledger.
            proven: The highest last add confirmed that authentic entries prove.

        Raises:
            SealMismatchError: It is beyond the end.
        """
        if proven > metadata.last_entry_id:
            raise SealMismatchError(
                f"ledger {metadata.ledger_id} is closed at entry {metadata.last_entry_id}, but an authentic entry of "
                f"its bookies proves that entry {proven} was confirmed: somebody without its password closed it short; "
                "restore its metadata while the bookies have the entries"
            )

    def check_last(self, metadata: LedgerMetadata, batch: EntryBatch) -> None:
        """Check that a batch that holds a sealed ledger's last entry holds the one that was sealed.

        Raises:
            SealMismatchError: It is a different entry.
        """
        if int(batch.entry_ids[-1]) == metadata.last_entry_id:
            self.check_digest(metadata, batch.buffer, int(batch.offsets[-1]))

    @staticmethod
    def check_digest(metadata: LedgerMetadata, buffer: memoryview, start: int) -> None:
        """Check that the encoded entry at ``buffer[start:]`` carries the digest of a sealed ledger's last entry.

        Raises:
            SealMismatchError: It carries another.
        """
        at = start + ENTRY_HEADER_BYTES
        if bytes(buffer[at : at + len(metadata.last_digest)]) != metadata.last_digest:
            raise SealMismatchError(
                f"ledger {metadata.ledger_id}: entry {metadata.last_entry_id}, its last, is not the one that was "
                "sealed; restore the file it lies in"
            )

    def _seal_of(self, metadata: LedgerMetadata, last_digest: bytes) -> bytes:
        # Each part follows its length. Parts of fixed length are packed together with the length of the next part.
        ledger_type, salt = str(metadata.ledger_type).encode(), metadata.key_salt
        content = b"".join(
            (
                _LABEL,
                _pack_id(8, metadata.ledger_id, len(ledger_type)),
                ledger_type,
                _pack_kind(
                    *(4, metadata.write_flags, 4, metadata.digest_type, 1, metadata.advanced),
                    *(8, metadata.creation_time_ns, 8, metadata.creation_sequence),
                    *(32, _custom_hash(metadata.custom_metadata), len(salt)),
                ),
                salt,
                _pack_end(
                    *(8, metadata.key_epoch, 4, metadata.key_format),
                    *(8, metadata.last_entry_id, 8, metadata.length, len(last_digest)),
                ),
            )
        )
        return hmac.digest(self._keys.seal_key(), content + last_digest, "sha256")


def _custom_hash(custom_metadata: Mapping[str, bytes]) -> bytes:
    if not custom_metadata:
        return _NO_CUSTOM_HASH
    custom = {key: b2a_base64(value, newline=False).decode() for key, value in custom_metadata.items()}
    return hashlib.sha256(_encode_json(custom).encode()).digest()


def end_is_sealed(metadata: LedgerMetadata) -> bool | None:
    """Return whether a closed ledger has a seal; None if the ledger is not closed, or has no password.

    A ledger without a verifier has no password: the ledger is a store's own, or a bookie's part of one. This does not
    check the seal, which needs the password.
    """
    if metadata.state is not LedgerState.CLOSED or not metadata.verifier:
        return None
    return metadata.sealed


def names(entry: bytes | memoryview, closed: LedgerMetadata) -> bool:
    """Return whether an encoded entry, or its header, is the last one of a closed ledger by id and length."""
    if closed.last_entry_id < 0:
        return not closed.length
    if len(entry) < ENTRY_HEADER_BYTES:
        return False
    ledger_id, entry_id, _, length = _unpack_header(entry)
    return (ledger_id, entry_id, length) == (closed.ledger_id, closed.last_entry_id, closed.length)


def seal_of(ring: KeyRing, verifier: Verifier, given: Credentials, metadata: LedgerMetadata) -> LedgerSeal | None:
    """Return the checker of a ledger's seal and entries, None if what is given is wrong; raises as ``unlocked``."""
    keys = unlocked(ring, verifier, given, metadata)
    if keys is None:
        return None
    return LedgerSeal(keys, entry_digest(metadata.digest_type, metadata.ledger_id, keys.entry_key))

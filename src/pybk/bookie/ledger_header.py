"""The header of a replicated ledger: its unchanging facts, sent with the first request that stores part of it."""

from __future__ import annotations

from dataclasses import replace
from typing import Final, NamedTuple, Protocol

from pybk.flags import LedgerType, StorageHint, WriteFlag, is_bookie_record
from pybk.ledger.digest import DigestType
from pybk.ledger.ledger_metadata import LedgerMetadata
from pybk.metadata.ledger_description import description_body
from pybk.storage.format.extent import Extent

_DESCRIPTION_KEY: Final = ".description"
_TYPE_KEY: Final = ".type"


class HeaderFields(Protocol):
    """The fields of a ledger that a bookie needs to store it; ledger metadata and ledger descriptions have them."""

    @property
    def ledger_type(self) -> LedgerType:
        """The application's name for the ledger's purpose."""

    @property
    def storage_hints(self) -> frozenset[StorageHint]:
        """The tiers where its entries should live."""

    @property
    def write_flags(self) -> WriteFlag:
        """The write flags of its entries."""

    @property
    def digest_type(self) -> DigestType:
        """The digest that its entries carry."""


class LedgerHeader(NamedTuple):
    """The unchanging facts of a replicated ledger, which come with the first request that stores part of it.

    Attributes:
        encoded: The authenticated description as the client sent it; stored and returned byte by byte.
        ledger_type: The purpose of the ledger.
        storage_hints: The tiers where its entries should live.
        write_flags: How its entries are written.
        digest_type: The digest that its entries carry.
    """

    encoded: bytes
    ledger_type: LedgerType
    storage_hints: frozenset[StorageHint]
    write_flags: WriteFlag
    digest_type: DigestType

    @classmethod
    def of(cls, described: HeaderFields, encoded: bytes) -> LedgerHeader:
        """Return the header from a description or metadata; ``encoded`` is its authenticated form."""
        return cls(
            encoded, described.ledger_type, described.storage_hints, described.write_flags, described.digest_type
        )

    def is_of(self, encoded: bytes) -> bool:
        """Return whether a verified description has the same facts; its MAC may be of another secret."""
        return description_body(self.encoded) == description_body(encoded)

    @property
    def stored_type(self) -> LedgerType:
        """The type of the ledger's extents in the store; a type of a bookie's own records becomes the default type."""
        return LedgerType("") if is_bookie_record(self.ledger_type) else self.ledger_type

    def keep(self) -> dict[str, bytes]:
        """Return the custom metadata in which a part of the ledger stores this header; see ``kept``."""
        return {_DESCRIPTION_KEY: self.encoded, _TYPE_KEY: self.ledger_type.encode()}

    @classmethod
    def kept(cls, metadata: LedgerMetadata, extent: Extent) -> LedgerHeader | None:
        """Return the header that a ledger of the store carries, None if it has none."""
        encoded = metadata.custom_metadata.get(_DESCRIPTION_KEY)
        if encoded is None:
            return None
        kind = LedgerType(metadata.custom_metadata.get(_TYPE_KEY, b"").decode())
        return cls.of(replace(metadata, ledger_type=kind, write_flags=WriteFlag(extent.write_flags)), encoded)


def names_bookie_record(metadata: LedgerMetadata) -> bool:
    """Return whether the header stored with a part of a ledger names a type reserved for bookies' own records.

    This version refuses such headers from clients; older versions accepted them, so a directory may have some.
    """
    named = metadata.custom_metadata.get(_TYPE_KEY, b"")
    return is_bookie_record(LedgerType(named.decode()))

"""The record of a blob's name: the ledgers that it refers to, as one value that is changed by compare-and-set.

This module decides and checks, without input or output; ``pybk.streams.blob_catalog`` reads and writes the records, and
deletes ledgers. ``docs/concepts/blobs.md`` has the rules and the format of the bytes.

Each blob is one ledger. The record of the name under which a ledger was uploaded is the ledger's *home*: it alone
decides whether the ledger lives. Another name that refers to the ledger, after a copy or a rename, has a *hold* in the
home's record. A ledger goes from ``uploads`` to ``versions`` when it is published, from there to ``dropped``, and is
deleted once it is dropped and no copy holds it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from itertools import starmap
from typing import Any, Final, NamedTuple

from pybk.errors import BlobGivenUpError, CorruptError, StorageRefusedError
from pybk.streams.list_record import RECORD_BYTES_MAX
from pybk.values import decode_json, encode_json

BLOB_RECORD_FORMAT: Final = 1


class Reference(NamedTuple):
    """The relation of a name to a ledger.

    Attributes:
        token: Random, hexadecimal; no two references have the same.
        ledger_id: The ledger.
        home: The name whose record has a hold of this token; empty if this record itself is the ledger's home.
        since_ns: The time when it was reserved or dropped, nanoseconds since 1970; 0 for a version.
    """

    token: str
    ledger_id: int
    home: str
    since_ns: int = 0


class Hold(NamedTuple):
    """A reference to a ledger of this home from a name.

    Attributes:
        ledger_id: The ledger.
        token: The token of the reference.
        name: The name that has the reference.
    """

    ledger_id: int
    token: str
    name: str


class BlobVersion(NamedTuple):
    """A published blob, of a number from 1 up; the digest is XXH3-128, hexadecimal."""

    number: int
    reference: Reference
    size: int
    digest: str
    chunk_bytes: int
    created_ns: int
    meta: Mapping[str, str]


class BlobRecord(NamedTuple):
    """A name at one moment.

    Attributes:
        name: The name.
        next_version: The number of the version that is published next.
        versions: The versions that are kept, the newest last; none for a name that does not exist.
        uploads: The references of uploads that may still be published.
        dropped: The references whose ledgers are to be deleted or released.
        holds: The references of copies to ledgers whose home this is.
    """

    name: str
    next_version: int = 1
    versions: tuple[BlobVersion, ...] = ()
    uploads: tuple[Reference, ...] = ()
    dropped: tuple[Reference, ...] = ()
    holds: tuple[Hold, ...] = ()

    @property
    def is_empty(self) -> bool:
        """True if it has neither references nor holds; it can be removed then."""
        return not (self.versions or self.uploads or self.dropped or self.holds)

    @property
    def latest(self) -> BlobVersion | None:
        """The version that the name stands for; None if it does not exist."""
        return self.versions[-1] if self.versions else None

    @property
    def references(self) -> tuple[Reference, ...]:
        """All references of the name."""
        return (*self.uploads, *self.dropped, *(each.reference for each in self.versions))

    @property
    def owned(self) -> frozenset[int]:
        """The ledgers whose home this is, except those that are only held."""
        return frozenset(each.ledger_id for each in self.references if not each.home)

    def is_held(self, ledger_id: int) -> bool:
        """Return whether a copy refers to a ledger of this home."""
        return any(each.ledger_id == ledger_id for each in self.holds)

    # ---- changes -------------------------------------------------------------------------------------------------

    def reserved(self, reference: Reference) -> BlobRecord:
        """Return the record that names an upload, so that it may be published.

        Raises:
            StorageRefusedError: The record is too long.
        """
        if reference in self.uploads:
            return self
        self._check_room()
        return self._replace(uploads=(*self.uploads, reference))

    def given_up(self, tokens: Iterable[str], now_ns: int) -> BlobRecord:
        """Return the record in which these uploads can no longer be published."""
        gone = set(tokens)
        dropped = tuple(each._replace(since_ns=now_ns) for each in self.uploads if each.token in gone)
        left = tuple(each for each in self.uploads if each.token not in gone)
        return self._replace(uploads=left, dropped=(*self.dropped, *dropped))

    def published(self, version: BlobVersion, keep: int, check: Callable[[BlobRecord], object]) -> BlobRecord:
        """Return the record in which an upload is the newest version, and only the ``keep`` newest versions are left.

        Args:
            version: The version that is published; its number is replaced by the next one.
            keep: The number of versions to keep, at least 1.
            check: Raises if it must not be published on top of the record that it is given.

        Raises:
            BlobGivenUpError: The upload was given up.
        """
        token = version.reference.token
        if any(each.reference.token == token for each in self.versions):
            return self  # by an attempt whose answer was lost
        check(self)
        if all(each.token != token for each in self.uploads):
            raise BlobGivenUpError(f"the upload of blob {self.name!r} was given up, by a sweep; put it again")
        versions = (*self.versions, version._replace(number=self.next_version))
        uploads = tuple(each for each in self.uploads if each.token != token)
        changed = self._replace(next_version=self.next_version + 1, versions=versions, uploads=uploads)
        gone = versions[:-keep]
        return changed.without(gone[-1].number, version.created_ns) if gone else changed

    def without(self, number: int, now_ns: int) -> BlobRecord:
        """Return the record without the versions up to a number."""
        gone = tuple(each.reference._replace(since_ns=now_ns) for each in self.versions if each.number <= number)
        left = tuple(each for each in self.versions if each.number > number)
        return self._replace(versions=left, dropped=(*self.dropped, *gone))

    def held(self, hold: Hold) -> BlobRecord | None:
        """Return the record with one more hold; None if its ledger was dropped, and may be deleted at any time."""
        owned = any(not each.reference.home and each.reference.ledger_id == hold.ledger_id for each in self.versions)
        if hold in self.holds:
            return self
        if not owned and not self.is_held(hold.ledger_id):
            return None
        self._check_room()
        return self._replace(holds=(*self.holds, hold))

    def released(self, token: str) -> BlobRecord:
        """Return the record without a hold."""
        return self._replace(holds=tuple(each for each in self.holds if each.token != token))

    def forgotten(self, tokens: Iterable[str]) -> BlobRecord:
        """Return the record without dropped references whose ledgers were deleted or released."""
        gone = set(tokens)
        return self._replace(dropped=tuple(each for each in self.dropped if each.token not in gone))

    def _check_room(self) -> None:
        if len(self.encode()) > RECORD_BYTES_MAX:
            raise StorageRefusedError(
                f"blob {self.name!r} has {len(self.versions)} versions, {len(self.uploads)} uploads and "
                f"{len(self.holds)} copies, and its record {RECORD_BYTES_MAX} bytes: keep fewer, or call sweep()"
            )

    # ---- bytes ---------------------------------------------------------------------------------------------------

    def encode(self) -> bytes:
        """Return the record as JSON."""
        return encode_json({"format": BLOB_RECORD_FORMAT, **self._asdict()})

    @classmethod
    def decode(cls, data: bytes, *, where: str) -> BlobRecord:
        """Decode the result of ``encode``; ``where`` names the record in errors.

        Raises:
            CorruptError: The bytes are not a record.
            UnsupportedFormatError: A newer pybk wrote it.
        """

        def make(values: dict[str, Any]) -> BlobRecord:
            versions = tuple(BlobVersion(each[0], Reference(*each[1]), *each[2:]) for each in values.pop("versions"))
            parts: dict[str, Any] = {key: tuple(starmap(kind, values.pop(key))) for key, kind in _PARTS}
            record = cls(**values | parts, versions=versions)
            numbers = [0, *(each.number for each in versions), record.next_version]
            if numbers != sorted(set(numbers)):
                raise CorruptError(f"{where}: versions {numbers[1:-1]} do not ascend below {record.next_version}")
            return record

        return decode_json(data, make, where=where, number=BLOB_RECORD_FORMAT)


_PARTS: Final[tuple[tuple[str, Any], ...]] = (("uploads", Reference), ("dropped", Reference), ("holds", Hold))

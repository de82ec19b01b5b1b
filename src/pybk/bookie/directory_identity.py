"""The bookie and the cluster to which a directory belongs.

It is kept in the store itself, as a ledger of type ``.bookie``, whose custom metadata has the cluster, the bookie, its
instance and the number of its starts. Each start makes a new such ledger and then deletes the one before. The same
ledger keeps the data that must survive the loss of the metadata store: the cluster's own value, the newest metadata
epoch that the bookie has seen, and the ledgers that it dropped because they were deleted.
"""

from __future__ import annotations

import json
import struct
import zlib
from collections.abc import Mapping
from typing import Final, NamedTuple, Self

from pybk.errors import CookieError, CorruptError, UnsupportedFormatError
from pybk.ledger.ledger_metadata import LedgerMetadata
from pybk.metadata.epochs import MetadataEpoch

IDENTITY_KEY: Final = ".bookie"
IDENTITY_FORMAT: Final = 1
RESTORED_FORMAT: Final = 2
"""Format of the identity in a directory that was restored from a backup: that of format 1, and the incarnation."""

CLUSTER_KEY: Final = ".cluster"
"""Key of a copy of the cluster's own metadata value: id, scrypt salt and cost, proof of the secret, feature level.

The copy survives the loss of the metadata store. Without the salt, no password opens a ledger."""

SEEN_KEY: Final = ".seen"
"""Key of the ``SeenEpoch``."""

DELETED_KEY: Final = ".deleted"
"""Key of the deletions that ``encode_deletions`` encodes."""

DELETIONS_MAX: Final = 1500
"""The most deletions that a directory records, the newest ones; with their proofs they take some 110 KiB."""

_DELETION: Final = struct.Struct(">qB")


class SeenEpoch(NamedTuple):
    """The newest metadata that a bookie has seen.

    Attributes:
        epoch: The highest epoch.
        first: The lowest id, in the bookie's store, of the ledgers that this epoch's metadata must have. Earlier ones
            may be missing, because the metadata were restored without them, or an older pybk stored them.
        liftable: Whether the bookie is in limbo because of this epoch alone; a later epoch without limbo then ends it.
    """

    epoch: MetadataEpoch
    first: int = 0
    liftable: bool = False

    def encode(self) -> bytes:
        """Return the value of ``SEEN_KEY``."""
        fields = {
            "ticks": self.epoch.ticks,
            "first": self.first,
            "liftable": self.liftable,
            "limbo": self.epoch.limbo,
            "number": self.epoch.number,
        }
        return json.dumps(fields, sort_keys=True).encode()

    @classmethod
    def of(cls, metadata: LedgerMetadata) -> Self | None:
        """Decode the value that a ledger of type ``.bookie`` carries; None if it is from an older pybk.

        Raises:
            CorruptError: It is not valid.
        """
        data = metadata.custom_metadata.get(SEEN_KEY, b"")
        if not data:
            return None
        try:
            fields = json.loads(data)
            epoch = MetadataEpoch(fields["number"], fields["ticks"], fields["limbo"])
            seen = cls(epoch, fields["first"], fields["liftable"])
            sound = seen.encode() == data
        except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError, RecursionError) as error:
            raise _damaged(metadata, data) from error
        if not sound:
            raise _damaged(metadata, data)
        return seen


def encode_deletions(proofs: Mapping[int, bytes]) -> bytes:
    """Return the value of ``DELETED_KEY``: the proofs of deletions by ledger, the newest ``DELETIONS_MAX`` of them."""
    newest = list(proofs.items())[-DELETIONS_MAX:]
    return zlib.compress(b"".join(_DELETION.pack(ledger_id, len(proof)) + proof for ledger_id, proof in newest))


def decode_deletions(metadata: LedgerMetadata) -> dict[int, bytes]:
    """Return the deletions that a ledger of type ``.bookie`` carries, the oldest first; raises CorruptError."""
    data = metadata.custom_metadata.get(DELETED_KEY, b"")
    proofs = {}
    try:
        rest = zlib.decompress(data) if data else b""
        while rest:
            ledger_id, size = _DELETION.unpack_from(rest)
            proofs[ledger_id] = rest[_DELETION.size : _DELETION.size + size]
            rest = rest[_DELETION.size + size :]
    except (zlib.error, struct.error) as error:
        raise _damaged(metadata, data) from error
    return proofs


class DirectoryIdentity(NamedTuple):
    """The cookie of a bookie's directory: the bookie and the cluster that it belongs to.

    Attributes:
        cluster_id: The cluster's id, any bytes.
        bookie_id: The bookie's name.
        instance: Random bytes that distinguish this bookie from earlier bookies of the same name.
        boots: The number of starts. It grows with each start, so an older copy of the directory has a lower number.
        inode: The directory's inode number; a copy of the directory has another.
        incarnation: The incarnation in the store's cookie at this start. A store that was restored from a backup has
            another one until the bookie is started on it.
    """

    cluster_id: bytes
    bookie_id: str
    instance: bytes
    boots: int
    inode: int
    incarnation: int = 0

    def __str__(self) -> str:
        """Name the bookie and the cluster."""
        return (
            f"bookie {self.bookie_id!r} (instance {self.instance.hex()}) of cluster {self.cluster_id.hex()}, started "
            f"{self.boots} times"
        )

    def encode(self) -> bytes:
        """Return the value of ``IDENTITY_KEY``."""
        fields: dict[str, str | int] = {
            "bookie": self.bookie_id,
            "boots": self.boots,
            "cluster": self.cluster_id.hex(),
            "format": RESTORED_FORMAT if self.incarnation else IDENTITY_FORMAT,
            "inode": self.inode,
            "instance": self.instance.hex(),
        }
        if self.incarnation:
            fields["incarnation"] = f"{self.incarnation:016x}"
        return json.dumps(fields, sort_keys=True).encode()

    @classmethod
    def of(cls, metadata: LedgerMetadata) -> Self:
        """Decode the identity that a ledger of type ``.bookie`` carries.

        Raises:
            CorruptError: It carries no valid identity.
            UnsupportedFormatError: The identity has another format version.
        """
        data = metadata.custom_metadata.get(IDENTITY_KEY, b"")
        try:
            fields = json.loads(data)
            if fields["format"] not in (IDENTITY_FORMAT, RESTORED_FORMAT):
                raise UnsupportedFormatError(
                    f"ledger {metadata.ledger_id}: a bookie's identity of format {fields['format']!r}; this pybk reads "
                    f"{IDENTITY_FORMAT} and {RESTORED_FORMAT}: open the directory with the pybk that wrote it, or newer"
                )
            identity = cls(
                bytes.fromhex(fields["cluster"]),
                fields["bookie"],
                bytes.fromhex(fields["instance"]),
                fields["boots"],
                fields["inode"],
                int(fields.get("incarnation", "0"), 16),
            )
            sound = identity.encode() == data
        except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError, RecursionError) as error:
            raise _damaged(metadata, data) from error
        if not sound:
            raise _damaged(metadata, data)
        return identity

    def check_place(self, inode: int, root: str) -> None:
        """Check that a directory is the one that the bookie was last started on.

        Raises:
            CookieError: It has another inode, so it is a copy or was moved.
        """
        if self.inode != inode:
            raise CookieError(
                f"{root} is a copy of the directory of {self}: the original may have gone on, and two would answer as "
                "one. Start the original; or, if this is it on another device or restored without loss, and no other "
                "is left, say so: moved=True, or `pybk bookie --moved`"
            )

    def check(self, expected: DirectoryIdentity, root: str) -> None:
        """Check that the directory is the one that the metadata store records for this bookie.

        Args:
            expected: The identity that the metadata store records.
            root: The directory's path, for errors.

        Raises:
            CookieError: It is of another cluster or bookie, of another instance, or older than the last start.
        """
        if self.cluster_id != expected.cluster_id:
            remedy = (
                "name this bookie's own directory, or the metadata store of the other cluster; if that store was "
                "emptied, make its metadata again in an empty one: `pybk metadata rebuild URL DIRECTORY...`"
            )
        elif self.bookie_id != expected.bookie_id:
            remedy = "give the bookie the name of its directory, or name another directory"
        elif self.instance != expected.instance:
            remedy = (
                "the bookie of this name was replaced: choose another name and an empty directory, or bring back the "
                "directory that is recorded"
            )
        elif self.boots < expected.boots:
            remedy = (
                "it is a copy or from an older backup, and may lack what was acknowledged since: bring back the "
                "directory that was last used, or begin with an empty one under another name and have the ledgers "
                "replicated"
            )
        else:
            return
        raise CookieError(f"{root} is {self}; the metadata store knows {expected}; {remedy}")


def _damaged(metadata: LedgerMetadata, data: bytes) -> CorruptError:
    return CorruptError(
        f"ledger {metadata.ledger_id}: {data[:200]!r} names no bookie; restore the bookie's directory from a copy"
    )

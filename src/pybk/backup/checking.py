"""Checks of the entries of a backup: while they are copied, when a backup is verified, and when it is restored.

Each entry's authentication code is checked if the ledger's digest needs no key, or its password is known; otherwise
only the entry's ids and sizes are checked. The store or ``read_pack`` always checks the checksums of records. The
cumulative lengths in the entries' headers must add up to the recorded length of the ledger, which proves that no entry
is missing in between.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import numpy as np

from pybk.backup.manifest import CLUSTER, SourceIdentity
from pybk.backup.pack import Int64s
from pybk.credentials import NO_CREDENTIALS, Credentials, Passwords, known_credentials
from pybk.deferral import LateModule
from pybk.errors import CorruptError
from pybk.ledger.digest import DigestType, digest_bytes, entry_digest
from pybk.ledger.entry import ENTRY_HEADER_BYTES, EntryBatch
from pybk.ledger.keys import KeyRing, LedgerKeys, LedgerSeal, unlocked
from pybk.ledger.ledger_check import LastEntry, SealState, check_last, check_seal, digest_with, end_of, find_seal
from pybk.ledger.ledger_metadata import LedgerMetadata, LedgerState
from pybk.storage.format.extent import Extent

if TYPE_CHECKING:
    from pybk.transport import cluster_keys
else:
    cluster_keys = LateModule("pybk.transport.cluster_keys")  # an embedded store does not need ZeroMQ


class LedgerCheck:
    """Checks the entries of one ledger, in the order of their ids; made by ``LedgerChecks``.

    Args:
        checks: The checks that made this one, with the passwords.
        metadata: The ledger's metadata.
        first: The id of the first entry that ``add`` gets.
        length: The ledger's payload bytes before it; None if they are not known.

    Attributes:
        authenticated: Whether the entries' digests are checked.
    """

    def __init__(self, checks: LedgerChecks, metadata: LedgerMetadata, first: int, length: int | None) -> None:
        self._checks = checks
        self._metadata = metadata
        self._seal = checks.seal_of(metadata)
        self._extent = Extent.of(metadata) or Extent(metadata.ledger_id, 0, 1, 0)
        digest = digest_with(self._seal, metadata, self._extent.ledger_id)
        self.authenticated: Final = digest is not None
        self._digest = digest or entry_digest(DigestType.NONE, self._extent.ledger_id)
        self._overhead = ENTRY_HEADER_BYTES + digest_bytes(metadata.digest_type)
        if first == 0 and self._extent.first == 0:
            length = 0
        self._end: LastEntry | None = None if length is None else LastEntry(length, b"")

    @property
    def length(self) -> int | None:
        """The ledger's payload bytes up to the last entry that was added; None before the first if not known."""
        return None if self._end is None else self._end.length

    def add(self, first: int, buffer: memoryview, offsets: Int64s, sizes: Int64s) -> int:
        """Check entries that follow those of the call before, and return their payload bytes.

        Args:
            first: The id of the first entry in the store.
            buffer: The entries.
            offsets: The offset of each, ``(n,)`` int64, bytes.
            sizes: The encoded bytes of each, ``(n,)`` int64.

        Raises:
            CorruptError, DigestMismatchError: An entry is damaged or was changed.
        """
        extent = self._extent
        ids = extent.entry_ids(np.arange(first, first + len(sizes), dtype=np.int64))
        batch = EntryBatch(extent.ledger_id, ids, buffer, offsets, sizes, self._digest.size)
        self._digest.check_many(batch)
        dense = extent.stride == 1
        before = self._end.length if self._end is not None and dense else None
        try:
            self._end = end_of(batch, self._metadata.digest_type, before, dense=dense)
        except CorruptError as error:
            raise CorruptError(f"ledger {self._metadata.ledger_id}: {error}") from error
        return int(sizes.sum()) - self._overhead * len(sizes)

    def finish(self, last: int, length: int, metadata: LedgerMetadata | None = None) -> None:
        """Check the end of the ledger, after its last entry was added.

        Args:
            last: The recorded last entry.
            length: The recorded payload bytes.
            metadata: The ledger's metadata as of this end; None for the present ones.

        Raises:
            CorruptError, SealMismatchError: The ledger ends elsewhere.
        """
        end, seal = self._end, self._seal
        if metadata is None:
            metadata = self._metadata
        elif metadata != self._metadata:
            seal = self._checks.seal_of(metadata)
        closed = metadata.state is LedgerState.CLOSED
        if (end is not None and end.length != length) or (
            closed and (metadata.last_entry_id, metadata.length) != (last, length)
        ):
            raise CorruptError(
                f"ledger {metadata.ledger_id}: its entries up to {last} have "
                f"{'unknown' if end is None else end.length} bytes, but {length} are recorded"
            )
        if check_seal(metadata, seal) is SealState.RIGHT and end is not None:
            check_last(metadata, end)


class LedgerChecks:
    """Makes the checks of ledgers.

    Args:
        source: The identity of the store or cluster that is backed up; its salt makes keys of passwords.
        passwords: The known passwords.

    Attributes:
        unauthenticated: The ledgers whose digests need a password that is not known.
    """

    def __init__(self, source: SourceIdentity, passwords: Passwords) -> None:
        self._ring = KeyRing(source.store_id, source.salt, cost=source.scrypt_cost)
        self._is_cluster = source.kind == CLUSTER
        self._passwords = passwords
        self.unauthenticated: set[int] = set()

    def seal_of(self, metadata: LedgerMetadata) -> LedgerSeal | None:
        """Return the checker of a ledger's seal; None if its password is not known. Raises as ``find_seal``."""
        return find_seal(self._ring, self._verifier, self._passwords, metadata)

    def credentials_of(self, metadata: LedgerMetadata) -> Credentials | None:
        """Return the password or secret of a ledger, which may have neither; None if it is not known.

        Raises:
            SealMismatchError: The password is right, but the ledger's kind was changed.
        """
        known = known_credentials(self._passwords, metadata.ledger_id, str(metadata.ledger_type), metadata.key_kind)
        for given in (known, NO_CREDENTIALS):
            if given is not None and unlocked(self._ring, self._verifier, given, metadata) is not None:
                return given
        return None

    def _verifier(self, keys: LedgerKeys) -> bytes:
        if not self._is_cluster:
            return keys.verifier
        return cluster_keys.RightsKey(keys.right_key).public

    def of(self, metadata: LedgerMetadata, first: int, length: int | None = None) -> LedgerCheck:
        """Return the check of a ledger's entries from ``first`` on; ``length`` is the payload bytes before."""
        check = LedgerCheck(self, metadata, first, length)
        if not check.authenticated:
            self.unauthenticated.add(metadata.ledger_id)
        return check

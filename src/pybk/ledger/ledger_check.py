"""Checks of a whole ledger: its kind, its seal, and whether the cumulative lengths in its entries add up.

The verification of a store and that of a cluster's replicas both use this module, so they find the same problems.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from enum import Enum
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from pybk.credentials import NO_CREDENTIALS, KeyKind, Passwords, known_credentials
from pybk.errors import CorruptError, SealMismatchError
from pybk.ledger.digest import DigestType, EntryDigest, digest_bytes, entry_digest, is_keyed
from pybk.ledger.entry import ENTRY_HEADER_BYTES, EntryBatch, gather
from pybk.ledger.keys import KeyRing, LedgerSeal, Verifier, end_is_sealed, seal_of
from pybk.ledger.ledger_metadata import LedgerMetadata, LedgerState

_RESTORE: Final = "restore the file from a backup"


class LastEntry(NamedTuple):
    """The last entry read so far: the ledger's length up to and including it, and its digest."""

    length: int
    digest: bytes


class SealState(Enum):
    """The result of a check of a ledger's seal.

    ``NONE_DUE``: the ledger is not closed, or has no password, so it needs no seal. ``UNSEALED``: it is closed without
    a seal, so its end is not proven. ``UNCHECKED``: its password is not known. ``RIGHT``: the seal is right.
    """

    NONE_DUE = 0
    UNSEALED = 1
    UNCHECKED = 2
    RIGHT = 3


def find_seal(ring: KeyRing, verifier: Verifier, passwords: Passwords, metadata: LedgerMetadata) -> LedgerSeal | None:
    """Return the checker of a ledger's seal and entries, None if its password is not known.

    If no given password is right, the empty password is tried.

    Args:
        ring: Derives keys.
        verifier: Returns the verifier of keys that metadata stores.
        passwords: The known passwords.
        metadata: The metadata of the ledger.

    Raises:
        SealMismatchError: The password is right, but the ledger's kind was changed; or the password that is given for
            this ledger's id is wrong.
    """
    if not metadata.verifier:
        return None
    candidates = [known_credentials(passwords, metadata.ledger_id, str(metadata.ledger_type), metadata.key_kind)]
    if metadata.sealed or is_keyed(metadata.digest_type):
        candidates.append(NO_CREDENTIALS)
    for given in dict.fromkeys(candidates):
        seal = None if given is None else seal_of(ring, verifier, given, metadata)
        if seal is not None:
            return seal
    if metadata.ledger_id in passwords.ledgers:
        word = "secret" if metadata.key_kind is KeyKind.SECRET else "password"
        raise SealMismatchError(
            f"ledger {metadata.ledger_id}: the {word} that is given for it is another, or its id, digest type, "
            f"write flags or key salt were changed; correct the {word}, or {_RESTORE}"
        )
    return None


def digest_with(seal: LedgerSeal | None, metadata: LedgerMetadata, ledger_id: int) -> EntryDigest | None:
    """Return the digest that checks a ledger's entries, None if that needs its unknown password.

    Args:
        seal: The result of ``find_seal``.
        metadata: The ledger's metadata.
        ledger_id: The id in the entries' headers: for an extent in a bookie's store, that of the replicated ledger.
    """
    if not is_keyed(metadata.digest_type):
        return entry_digest(metadata.digest_type, ledger_id)
    return None if seal is None else seal.digest


def check_seal(metadata: LedgerMetadata, seal: LedgerSeal | None) -> SealState:
    """Check a closed ledger's seal against its metadata.

    Args:
        metadata: The metadata of the ledger.
        seal: The result of ``find_seal``.

    Raises:
        SealMismatchError: The seal is that of another kind or end.
    """
    sealed = end_is_sealed(metadata)
    if sealed is None:
        return SealState.NONE_DUE
    if not sealed:
        return SealState.UNSEALED
    if seal is None:
        return SealState.UNCHECKED
    seal.check(metadata)
    return SealState.RIGHT


def check_last(metadata: LedgerMetadata, end: LastEntry) -> None:
    """Check that the last entry of a sealed ledger is the one that was sealed.

    Raises:
        SealMismatchError: It is another entry.
    """
    if end.digest != metadata.last_digest:
        raise SealMismatchError(
            f"ledger {metadata.ledger_id}: entry {metadata.last_entry_id}, its last, is not the one that was "
            f"sealed; {_RESTORE}"
        )


def length_before(batch: EntryBatch, digest_type: DigestType) -> int:
    """Return the ledger's length before the first entry of a batch, from the length in this entry."""
    at = int(batch.offsets[0]) + ENTRY_HEADER_BYTES
    length = int.from_bytes(batch.buffer[at - 8 : at], "big", signed=True)
    return length - int(batch.sizes[0]) + ENTRY_HEADER_BYTES + digest_bytes(digest_type)


def end_of(batch: EntryBatch, digest_type: DigestType, before: int | None, *, dense: bool) -> LastEntry:
    """Check that the cumulative lengths in entries add up, and return the length and digest of the last entry.

    Args:
        batch: The entries, at least one.
        digest_type: The digest type of the ledger.
        before: The ledger's length before the first entry; None if it is not known.
        dense: Whether the entry ids are consecutive; otherwise other bookies hold the entries in between.

    Raises:
        CorruptError: The lengths do not add up.
    """
    starts, size = batch.offsets, digest_bytes(digest_type)
    payloads = batch.sizes - ENTRY_HEADER_BYTES - size
    if int(payloads.min()) < 0:
        raise CorruptError(f"entry {batch.entry_ids[int(payloads.argmin())]} is shorter than its header and digest")
    headers = np.frombuffer(gather(batch.buffer, starts, ENTRY_HEADER_BYTES), ">i8").reshape(-1, 4)
    lengths: npt.NDArray[np.int64] = headers[:, 3].astype(np.int64)
    first = int(lengths[0] - payloads[0]) if before is None else before
    grown = np.diff(lengths, prepend=first)
    wrong = np.flatnonzero(grown != payloads if dense else grown < payloads)
    if len(wrong) or first < 0:
        number = int(wrong[0]) if len(wrong) else 0
        raise CorruptError(
            f"entry {batch.entry_ids[number]} says that the ledger has {lengths[number]} bytes up to it, but "
            f"{payloads[number]} of its own after {lengths[number] - grown[number]}"
        )
    at = int(starts[-1]) + ENTRY_HEADER_BYTES
    return LastEntry(int(lengths[-1]), bytes(batch.buffer[at : at + size]))


class LengthCheck:
    """Collects the cumulative lengths of a ledger's entries from one source; entries come in runs, in any order.

    Args:
        metadata: The metadata of the ledger.

    Attributes:
        problems: A sentence for each length that does not add up.
        last: The facts from the ledger's last entry; None if the ledger is open, or the entry was not added yet.

    Threads: one at a time.
    """

    __slots__ = ("_metadata", "_runs", "last", "problems")

    def __init__(self, metadata: LedgerMetadata) -> None:
        self._metadata = metadata
        self._runs: list[tuple[int, int, int, int, int]] = []
        self.problems: list[str] = []
        self.last: LastEntry | None = None

    def add(self, batch: EntryBatch, stride: int) -> None:
        """Add entries whose digests were verified.

        Args:
            batch: The entries, at least one.
            stride: The distance of their ids; if it is not 1, other bookies hold the entries in between.
        """
        metadata = self._metadata
        try:
            end = end_of(batch, metadata.digest_type, None, dense=stride == 1)
        except CorruptError as error:
            self.problems.append(str(error))
            return
        first, last = int(batch.entry_ids[0]), int(batch.entry_ids[-1])
        self._runs.append((first % stride, first, last, length_before(batch, metadata.digest_type), end.length))
        if last == metadata.last_entry_id and metadata.state is LedgerState.CLOSED:
            self.last = end

    def marks(self) -> tuple[tuple[int, int], ...]:
        """Return the lengths up to the entries at both ends of each run without a gap, for ``contradictions``.

        Lengths that shrink from run to run are added to ``problems``.
        """
        marks: list[tuple[int, int]] = []
        residue, end, length = -1, -1, 0
        for each, first, last, before, after in sorted(self._runs):
            follows = each == residue and first - 1 == end
            if each == residue and (before != length if follows else before < length):
                self.problems.append(
                    f"entry {first} says that the ledger has {before} bytes before it, but entry {end} says {length}"
                )
            if not follows:
                marks += [(end, length), (first - 1, before)]
            residue, end, length = each, last, after
        return (*marks[1:], (end, length)) if self._runs else ()


def contradictions(metadata: LedgerMetadata, marks: Iterable[tuple[int, int]]) -> Iterator[str]:
    """Compare the lengths of one ledger that several sources state with each other and with the metadata.

    Args:
        metadata: The metadata of the ledger.
        marks: Entry ids, each with the ledger's length up to and including the entry.

    Returns:
        A sentence for each contradiction.
    """
    said: dict[int, set[int]] = {-1: {0}}
    if metadata.state is LedgerState.CLOSED:
        said.setdefault(metadata.last_entry_id, set()).add(metadata.length)
    for entry_id, length in marks:
        said.setdefault(entry_id, set()).add(length)
    for entry_id, lengths in sorted(said.items()):
        if len(lengths) > 1:
            yield (
                f"the ledger's length up to entry {entry_id} is {' or '.join(map(str, sorted(lengths)))}, as its "
                "copies, the entries after it and the metadata say"
            )

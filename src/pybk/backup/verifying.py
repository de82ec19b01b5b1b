"""Verification of a backup: every manifest, every pack and every entry that one of its runs has."""

from __future__ import annotations

from collections.abc import Callable, Collection
from functools import partial
from typing import NamedTuple

from pybk.backup.chain import BackupRunInfo, Chain, existing_chain
from pybk.backup.checking import LedgerCheck, LedgerChecks
from pybk.backup.manifest import STORE, KeptLedger, SourceIdentity
from pybk.backup.pack import LedgerKey, PackedEntries, Piece
from pybk.backup.target import Target
from pybk.credentials import Passwords
from pybk.errors import CorruptError, DigestMismatchError, UnsupportedFormatError
from pybk.flags import WriteFlag
from pybk.ledger.ledger_metadata import LedgerState
from pybk.manager.arguments import Progress


class BackupCheckReport(NamedTuple):
    """The result of the verification of a backup.

    Attributes:
        problems: A sentence for each problem; none for a sound backup.
        source: The kind and id of the store or cluster that is backed up.
        runs: The runs, the oldest first.
        ledgers: Ledgers that were checked: those of the last run, and those that only earlier runs have.
        entries: Their entries.
        unauthenticated: Ledgers whose digests could not be checked, because the right password was not given; the
            checksums of their records were checked.
        left_out: A sentence for each ledger that the last run could not copy, or only in part.
    """

    problems: tuple[str, ...]
    source: str
    runs: tuple[BackupRunInfo, ...]
    ledgers: int
    entries: int
    unauthenticated: int
    left_out: tuple[str, ...]

    @property
    def complete(self) -> bool:
        """True if every entry's authentication code was checked."""
        return not self.unauthenticated


class WantedEntries(NamedTuple):
    """Entries of a pack that a ledger of the chain consists of.

    Attributes:
        ledger_id: The ledger.
        kept: The ledger as of the chain's run.
        found: The record that holds them, and maybe other entries.
        low: The number of the first of these entries in the record.
        high: The number after the last.
    """

    ledger_id: int
    kept: KeptLedger
    found: PackedEntries
    low: int
    high: int

    @property
    def first(self) -> int:
        """The id of the first entry."""
        return self.found.first + self.low

    @property
    def last(self) -> int:
        """The id of the last entry."""
        return self.found.first + self.high - 1


class ChainReader:
    """Reads the entries of a chain in the order of its packs, which keeps the entries of each ledger in order.

    Args:
        chain: The chain.
        target: The target with its packs.
    """

    def __init__(self, chain: Chain, target: Target) -> None:
        self._chain = chain
        self._target = target
        self._ledgers = {LedgerKey.of(kept.decoded()): kept for kept in (*chain.earlier, *chain.ledgers.values())}
        self._wanted: dict[int, dict[LedgerKey, list[Piece]]] = {}
        for key, kept in self._ledgers.items():
            for piece in kept.pieces:
                self._wanted.setdefault(piece.pack, {}).setdefault(key, []).append(piece)
        self.packs = sorted(self._wanted)
        """The packs that hold entries of the chain's ledgers."""

    def keys_in(self, number: int) -> Collection[LedgerKey]:
        """Return the ledgers that have entries in a pack."""
        return self._wanted[number].keys()

    def read(self, number: int) -> list[WantedEntries]:
        """Return the entries of a pack that the chain's ledgers consist of.

        Raises:
            CorruptError: The pack is damaged or missing.
        """
        wanted = []
        pieces = self._wanted[number]
        for found in self._chain.read_pack(self._target, number):
            for piece in pieces.get(found.key, ()):  # empty for a ledger that is gone
                first, last = max(piece.first, found.first), min(piece.last, found.last)
                if first <= last:
                    low, high = first - found.first, last + 1 - found.first
                    wanted.append(WantedEntries(found.key.ledger_id, self._ledgers[found.key], found, low, high))
        return wanted


class EntriesCheck:
    """Checks the entries that a ``ChainReader`` returns, and that none is missing.

    Args:
        chain: The chain.
        passwords: The known passwords.

    Attributes:
        entries: The number of checked entries.
    """

    def __init__(self, chain: Chain, passwords: Passwords) -> None:
        source = _source_of(chain)
        self._checks = LedgerChecks(source, passwords)
        self._open: dict[LedgerKey, LedgerCheck] = {}
        """The ledgers of which some but not all entries were added."""
        self._expected = {
            LedgerKey.of(kept.decoded()): (0, kept.last)
            for kept in (*chain.earlier, *chain.ledgers.values())
            if kept.last >= 0
        }
        """The next and the last entry of the ledgers of which not all entries were added."""
        self._is_store = source.kind == STORE
        self._before: dict[LedgerKey, list[KeptLedger]] = {}
        """The states of ledgers in earlier runs, by ascending last entry."""
        for kept in chain.before:
            self._before.setdefault(LedgerKey.of(kept.decoded()), []).append(kept)
        self.entries = 0

    @property
    def unauthenticated(self) -> int:
        """The number of ledgers whose digests could not be checked."""
        return len(self._checks.unauthenticated)

    def add(self, wanted: WantedEntries) -> bool:
        """Check entries; return whether they are the last of their ledger.

        Raises:
            CorruptError, DigestMismatchError, SealMismatchError: They are damaged or changed, or some are missing.
        """
        found, kept = wanted.found, wanted.kept
        expected, _ = self._expected[found.key]
        check = self._open.pop(found.key, None) or self._checks.of(kept.decoded(), 0)
        if wanted.first != expected:
            raise _lacking(wanted.ledger_id, expected, wanted.first - 1)
        low = wanted.low
        for state in (*self._before.get(found.key, ()), kept):
            if wanted.first <= state.last <= wanted.last:
                low = self._add_part(check, wanted, low, state.last + 1 - found.first)
                self._finish(check, state)
        self._add_part(check, wanted, low, wanted.high)
        self.entries += wanted.high - wanted.low
        if wanted.last < kept.last:
            self._open[found.key], self._expected[found.key] = check, (wanted.last + 1, kept.last)
            return False
        del self._expected[found.key]
        return True

    @staticmethod
    def _add_part(check: LedgerCheck, wanted: WantedEntries, low: int, high: int) -> int:
        """Check the entries of a record from the one numbered ``low`` up to that before ``high``; return ``high``."""
        found, part = wanted.found, slice(low, high)
        if low < high:
            check.add(found.first + low, found.buffer, found.offsets[part], found.sizes[part])
        return high

    def check_empty(self, kept: KeptLedger) -> None:
        """Check a ledger without entries; raises as ``add``."""
        self._finish(self._checks.of(kept.decoded(), 0), kept)

    def _finish(self, check: LedgerCheck, kept: KeptLedger) -> None:
        """Check that the end and metadata of a ledger with these entries are those that the backup records.

        Raises:
            CorruptError, SealMismatchError: They differ.
        """
        metadata = kept.decoded()
        check.finish(kept.last, kept.length, metadata)
        if not self._is_store:
            return
        unconfirmed = WriteFlag.DEFERRED_FORCE in metadata.write_flags and metadata.state is not LedgerState.CLOSED
        if kept.lac != kept.last and not unconfirmed:
            raise CorruptError(
                f"ledger {metadata.ledger_id}: the backup says that entries up to {kept.lac} are confirmed, of "
                f"{kept.last}, and the ledger confirms each of its entries"
            )
        if metadata.encode() != kept.metadata:
            raise CorruptError(f"ledger {metadata.ledger_id}: the backup has metadata that no version of pybk writes")

    def lacking(self) -> dict[LedgerKey, CorruptError]:
        """Return an error for each ledger with missing entries."""
        return {key: _lacking(key.ledger_id, *expected) for key, expected in self._expected.items()}


def _lacking(ledger_id: int, first: int, last: int) -> CorruptError:
    return CorruptError(f"ledger {ledger_id}: entries {first} to {last} are not in the backup")


def _source_of(chain: Chain) -> SourceIdentity:
    assert chain.source is not None, "the caller read a chain that exists"
    return chain.source


class _Verification:
    """Checks a whole chain; a problem of one pack or ledger does not end it."""

    def __init__(self, chain: Chain, target: Target, passwords: Passwords) -> None:
        self._chain = chain
        self._reader = ChainReader(chain, target)
        self._bad: set[LedgerKey] = set()
        self.check = EntriesCheck(chain, passwords)
        self.problems: list[str] = []

    def run(self, progress: Progress) -> None:
        chain, reader = self._chain, self._reader
        done, total = 0, sum(chain.packs[number].nbytes for number in reader.packs if number in chain.packs)
        for number in reader.packs:
            self._check_pack(number)
            done += chain.packs[number].nbytes if number in chain.packs else 0
            progress(done, total)
        for kept in (*chain.before, *chain.earlier, *chain.ledgers.values()):
            if kept.last < 0:
                self._attempt(LedgerKey.of(kept.decoded()), partial(self.check.check_empty, kept))
        self.problems += [str(error) for key, error in self.check.lacking().items() if key not in self._bad]

    def _check_pack(self, number: int) -> None:
        try:
            found = self._reader.read(number)
        except (CorruptError, UnsupportedFormatError) as error:
            self.problems.append(str(error))
            self._bad.update(self._reader.keys_in(number))
            return
        for wanted in found:
            self._attempt(wanted.found.key, partial(self.check.add, wanted))

    def _attempt(self, key: LedgerKey, call: Callable[[], object]) -> None:
        if key in self._bad:
            return
        try:
            call()
        except (CorruptError, DigestMismatchError) as error:
            self._bad.add(key)
            self.problems.append(str(error))


def verify_target(target: Target, passwords: Passwords, progress: Progress) -> BackupCheckReport:
    """Verify all runs of a backup; a problem of one pack or ledger does not end the verification.

    Raises:
        UsageError: The target has no backup.
        CorruptError: A manifest is damaged; the content of the backup is unknown then.
    """
    chain = existing_chain(target, collects_earlier=True)
    verification = _Verification(chain, target, passwords)
    verification.run(progress)
    return BackupCheckReport(
        problems=tuple(verification.problems),
        source=str(chain.source),
        runs=tuple(chain.runs),
        ledgers=len(chain.earlier) + len(chain.ledgers),
        entries=verification.check.entries,
        unauthenticated=verification.check.unauthenticated,
        left_out=tuple(chain.left_out.values()),
    )

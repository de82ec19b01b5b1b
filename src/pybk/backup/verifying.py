"""Verification of a backup: every manifest, every pack and every entry, as of its last run."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from pybk.backup.chain import BackupRunInfo, Chain, existing_chain
from pybk.backup.checking import LedgerCheck, LedgerChecks
from pybk.backup.manifest import KeptLedger, SourceIdentity
from pybk.backup.pack import LedgerKey, PackedEntries, Piece
from pybk.backup.target import Target
from pybk.credentials import Passwords
from pybk.errors import CorruptError, DigestMismatchError, PybkError, SealMismatchError

Progress = Callable[[int, int], None]


class BackupCheckReport(NamedTuple):
    """The result of the verification of a backup.

    Attributes:
        problems: A sentence for each problem; none for a sound backup.
        source: What is backed up: its kind and id.
        runs: The runs, the oldest first.
        ledgers: Ledgers that were checked.
        entries: Entries that were checked.
        unauthenticated: Ledgers whose digests could not be checked, because the right password was not given; the
            checksums of their records were checked.
    """

    problems: tuple[str, ...]
    source: str
    runs: tuple[BackupRunInfo, ...]
    ledgers: int
    entries: int
    unauthenticated: int

    @property
    def complete(self) -> bool:
        """Whether every entry's authentication code was checked."""
        return not self.unauthenticated


class WantedEntries(NamedTuple):
    """Entries of a pack that a ledger of the chain consists of.

    Attributes:
        ledger_id: The ledger.
        kept: The ledger as of the chain's run.
        found: The record that holds them, and maybe others.
        low: The number of the first of them in the record.
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
    """Reads the entries of a chain, in the order of its packs, so that those of each ledger come in order.

    Args:
        chain: The chain.
        target: Where its packs are.
    """

    def __init__(self, chain: Chain, target: Target) -> None:
        self._chain = chain
        self._target = target
        self._wanted: dict[int, dict[int, list[Piece]]] = {}
        for ledger_id, kept in chain.ledgers.items():
            for piece in kept.pieces:
                self._wanted.setdefault(piece.pack, {}).setdefault(ledger_id, []).append(piece)
        self.packs = sorted(self._wanted)
        """The packs that hold entries of the chain's ledgers."""
        self._keys = {ledger_id: LedgerKey.of(kept.decoded()) for ledger_id, kept in chain.ledgers.items()}

    def read(self, number: int) -> list[WantedEntries]:
        """Return the entries of a pack that the chain's ledgers consist of.

        Raises:
            CorruptError: The pack is damaged or missing.
        """
        wanted = []
        pieces = self._wanted[number]
        for found in self._chain.read_pack(self._target, number):
            ledger_id = found.key.ledger_id
            if self._keys.get(ledger_id) != found.key:
                continue  # of a ledger that is gone, maybe with the id of one that is there
            for piece in pieces.get(ledger_id, ()):
                first, last = max(piece.first, found.first), min(piece.last, found.last)
                if first <= last:
                    low, high = first - found.first, last + 1 - found.first
                    wanted.append(WantedEntries(ledger_id, self._chain.ledgers[ledger_id], found, low, high))
        return wanted


class EntriesCheck:
    """Checks the entries that a ``ChainReader`` returns, and that they are all.

    Args:
        chain: The chain.
        passwords: The known passwords.

    Attributes:
        entries: How many were checked.
    """

    def __init__(self, chain: Chain, passwords: Passwords) -> None:
        source = _source_of(chain)
        self._checks = LedgerChecks(source, passwords)
        self._chain = chain
        self._next: dict[int, tuple[LedgerCheck, int]] = {}
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
        ledger_id, kept = wanted.ledger_id, wanted.kept
        check, expected = self._next.pop(ledger_id, (None, 0))
        if check is None:
            check = self._checks.of(kept.decoded(), 0)
        if wanted.first != expected:
            raise CorruptError(f"ledger {ledger_id}: entries {expected} to {wanted.first - 1} are not in the backup")
        found, part = wanted.found, slice(wanted.low, wanted.high)
        check.add(wanted.first, found.buffer, found.offsets[part], found.sizes[part])
        self.entries += wanted.high - wanted.low
        if wanted.last < kept.last:
            self._next[ledger_id] = check, wanted.last + 1
            return False
        check.finish(kept.last, kept.length)
        return True

    def check_empty(self, ledger_id: int, kept: KeptLedger) -> None:
        """Check a ledger without entries; raises as ``add``."""
        self._checks.of(kept.decoded(), 0).finish(kept.last, kept.length)

    def finish(self) -> None:
        """Raise CorruptError if entries of a ledger did not come."""
        for ledger_id, (_, expected) in self._next.items():
            raise CorruptError(
                f"ledger {ledger_id}: entries {expected} to {self._chain.ledgers[ledger_id].last} are not in the backup"
            )


def _source_of(chain: Chain) -> SourceIdentity:
    assert chain.source is not None, "the caller read a chain that exists"
    return chain.source


def verify_target(target: Target, passwords: Passwords, progress: Progress) -> BackupCheckReport:
    """Verify a backup as of its last run; a problem of one pack or ledger does not end the verification.

    Raises:
        UsageError: There is no backup.
        CorruptError: A manifest is damaged, so that it is unknown what the backup should hold.
    """
    chain = existing_chain(target)
    reader, check = ChainReader(chain, target), EntriesCheck(chain, passwords)
    total = sum(chain.packs[number].nbytes for number in reader.packs if number in chain.packs)
    problems: list[str] = []
    bad: set[int] = set()
    done = 0

    def attempt(ledger_id: int, call: Callable[[], object]) -> None:
        if ledger_id in bad:
            return
        try:
            call()
        except (CorruptError, DigestMismatchError, SealMismatchError) as error:
            bad.add(ledger_id)
            problems.append(str(error))

    for number in reader.packs:
        try:
            found = reader.read(number)
        except PybkError as error:
            problems.append(str(error))
            bad.update(each for each, kept in chain.ledgers.items() if any(p.pack == number for p in kept.pieces))
            continue
        for wanted in found:
            attempt(wanted.ledger_id, lambda wanted=wanted: check.add(wanted))  # type: ignore[misc]
        done += chain.packs[number].nbytes
        progress(done, total)
    for ledger_id, kept in chain.ledgers.items():
        if kept.last < 0:
            attempt(ledger_id, lambda ledger_id=ledger_id, kept=kept: check.check_empty(ledger_id, kept))  # type: ignore[misc]
    if not problems:
        check.finish()
    return BackupCheckReport(
        tuple(problems),
        str(chain.source),
        tuple(chain.runs),
        len(chain.ledgers),
        check.entries,
        check.unauthenticated,
    )

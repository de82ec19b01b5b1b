"""The chain of a backup's runs, read from its target."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final, NamedTuple

from pybk.backup.manifest import KeptLedger, Manifest, PackInfo, SourceIdentity, manifest_hash
from pybk.backup.pack import PackedEntries, pack_hash, read_pack
from pybk.backup.target import Target
from pybk.errors import CorruptError, UsageError
from pybk.storage.format.index_rows import NamedRow

_RUN: Final = "run-"
_PACK: Final = "pack-"
_DIGITS: Final = 8


def run_name(number: int) -> str:
    """Return the name of a run's manifest."""
    return f"{_RUN}{number:0{_DIGITS}d}"


def pack_name(number: int) -> str:
    """Return the name of a pack."""
    return f"{_PACK}{number:0{_DIGITS}d}"


def numbers_of(names: list[str], prefix: str) -> list[int]:
    """Return the numbers of the files that ``run_name`` or ``pack_name`` names, ascending."""
    return sorted(int(name[len(prefix) :]) for name in names if name.startswith(prefix) and _is_number(name, prefix))


def _is_number(name: str, prefix: str) -> bool:
    digits = name[len(prefix) :]
    return len(digits) >= _DIGITS and digits.isascii() and digits.isdecimal()


class BackupRunInfo(NamedTuple):
    """One run of a backup.

    Attributes:
        run: Its number.
        created_ns: When it ended, nanoseconds since 1970.
        durable_lsn: The LSN of the last commit in it; 0 for a cluster.
        ledgers: The ledgers in it.
        changed: The ledgers that changed since the run before, those that are gone not counted.
        gone: The ledgers that are gone since the run before.
        nbytes: The bytes that it has written.
    """

    run: int
    created_ns: int
    durable_lsn: int
    ledgers: int
    changed: int
    gone: int
    nbytes: int


class Chain:
    """The state of a backup as of one run. Run 0 is empty: it is written before the first, to name what is backed up.

    Attributes:
        backup_id: The 16 bytes of the backup; empty before run 0.
        source: What is backed up; None before run 0.
        last: The manifest of the run; None before run 0.
        last_hash: The SHA-256 of that manifest; empty before run 0.
        ledgers: The ledgers, by id.
        named: The named records, by name.
        packs: The packs of all runs, by number.
        runs: The runs from 1 on.
    """

    def __init__(self) -> None:
        self.backup_id = b""
        self.source: SourceIdentity | None = None
        self.last: Manifest | None = None
        self.last_hash = b""
        self.ledgers: dict[int, KeptLedger] = {}
        self.named: dict[str, NamedRow] = {}
        self.packs: dict[int, PackInfo] = {}
        self.runs: list[BackupRunInfo] = []

    def apply(self, data: bytes, number: int, *, where: str) -> None:
        """Apply the manifest of the next run.

        Raises:
            CorruptError: It is damaged, or it is not that of the next run of this backup.
        """
        manifest = Manifest.decode(data, where=where)
        first = self.source is None
        expected = (number, self.last_hash, self.backup_id, self.source)
        backup_id, source = (self.backup_id, self.source) if first else (manifest.backup_id, manifest.source)
        if (manifest.run, manifest.previous, backup_id, source) != expected:
            raise CorruptError(
                f"{where}: run {manifest.run} of backup {manifest.backup_id.hex()} of {manifest.source} does not "
                f"follow the run before it; put the right file in its place",
                path=where,
            )
        gone = 0
        for ledger_id, kept in manifest.ledgers.items():
            if kept is None:
                self.ledgers.pop(ledger_id, None)
                gone += 1
            else:
                self.ledgers[ledger_id] = kept
        for row in manifest.named:
            if row.value is None:
                self.named.pop(row.name, None)
            else:
                self.named[row.name] = row
        self.packs.update((pack.number, pack) for pack in manifest.packs)
        self.backup_id, self.source, self.last = manifest.backup_id, manifest.source, manifest
        self.last_hash = manifest_hash(data)
        if not number:
            return
        nbytes = len(data) + sum(pack.nbytes for pack in manifest.packs)
        changed = len(manifest.ledgers) - gone
        self.runs.append(
            BackupRunInfo(number, manifest.created_ns, manifest.durable_lsn, len(self.ledgers), changed, gone, nbytes)
        )

    def read_pack(self, target: Target, number: int) -> Iterator[PackedEntries]:
        """Yield the entries of a pack that a manifest names.

        Raises:
            CorruptError: It is missing or damaged, or another file than the manifest names.
        """
        where = f"{target.where}/{pack_name(number)}"
        known = self.packs.get(number)
        if known is None:
            raise CorruptError(f"{where}: no run names this pack, but a ledger's entries are in it", path=where)
        data = target.read(pack_name(number))
        if (len(data), pack_hash(data)) != (known.nbytes, known.sha256):
            raise CorruptError(
                f"{where}: {len(data)} bytes that are not those that the backup wrote; restore the file from another "
                "copy of the backup",
                path=where,
            )
        yield from read_pack(data, self.backup_id, number, where=where)


def read_chain(target: Target, *, run: int | None = None) -> Chain:
    """Read the manifests of a backup up to a run.

    Args:
        target: The backup.
        run: The last run to read; None for all. An interrupted run has no manifest, and counts for nothing.

    Returns:
        The chain; empty if there is no run.

    Raises:
        CorruptError: A manifest is missing, damaged, cut or foreign.
        UsageError: There is no such run.

    Cost: Reads all manifests; some 2 KiB of memory for each ledger.
    """
    numbers = numbers_of(target.names(), _RUN)
    if run is not None and run not in numbers[1:]:
        raise UsageError(f"{target.where} has no run {run}; its runs are {_listed(numbers[1:])}")
    chain = Chain()
    for expected, number in enumerate(numbers if run is None else numbers[: numbers.index(run) + 1]):
        where = f"{target.where}/{run_name(number)}"
        if number != expected:
            raise CorruptError(
                f"{target.where}/{run_name(expected)} is missing, but there is a later run; restore the file from "
                "another copy of the backup",
                path=where,
            )
        chain.apply(target.read(run_name(number)), number, where=where)
    return chain


def existing_chain(target: Target, *, run: int | None = None) -> Chain:
    """Read a backup that exists, as ``read_chain``.

    Raises:
        UsageError: There is no backup at the target, or none whose first run ended.
    """
    chain = read_chain(target, run=run)
    if not chain.runs:
        raise UsageError(f"there is no backup at {target.where}, or its first run did not end; check the path")
    return chain


def unnamed_packs(target: Target, chain: Chain) -> list[int]:
    """Return the numbers of the packs that no run names, because the run that wrote them was interrupted."""
    return [number for number in numbers_of(target.names(), _PACK) if number not in chain.packs]


def _listed(numbers: list[int]) -> str:
    return f"{numbers[0]} to {numbers[-1]}" if numbers else "none"

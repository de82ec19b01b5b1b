"""The chain of a backup's runs, read from its target."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Final, NamedTuple

from pybk.backup.manifest import MANIFEST_BYTES_MAX, KeptLedger, Manifest, PackInfo, SourceIdentity, manifest_hash
from pybk.backup.pack import PackedEntries, pack_hash, read_pack
from pybk.backup.target import Target, missing
from pybk.errors import CorruptError, StorageRefusedError, UsageError
from pybk.storage.format.index_rows import NamedRow

_BASE: Final = "base-"
_RUN: Final = "run-"
_PACK: Final = "pack-"
_DIGITS: Final = 8


def manifest_name(number: int, *, base: bool) -> str:
    """Return the name of the manifest of a run, or of the base in its place."""
    return f"{_BASE if base else _RUN}{number:0{_DIGITS}d}"


def pack_name(number: int) -> str:
    """Return the name of a pack."""
    return f"{_PACK}{number:0{_DIGITS}d}"


def numbers_of(names: list[str], prefix: str) -> list[int]:
    """Return the numbers of the files that ``manifest_name`` or ``pack_name`` names, ascending."""
    return sorted(int(name[len(prefix) :]) for name in names if name.startswith(prefix) and _is_number(name, prefix))


def _is_number(name: str, prefix: str) -> bool:
    digits = name[len(prefix) :]
    return len(digits) >= _DIGITS and digits.isascii() and digits.isdecimal()


class BackupRunInfo(NamedTuple):
    """One run of a backup.

    Attributes:
        run: Its number.
        created_ns: The time when it ended, nanoseconds since 1970.
        durable_lsn: The LSN of the last commit in it; 0 for a cluster.
        ledgers: The ledgers in it.
        changed: The ledgers that changed since the run before, without deleted ones; all ledgers for the first run, and
            for a run before which runs were removed.
        gone: The ledgers that were deleted since the run before.
        nbytes: The bytes that it has written; for a run before which runs were removed, all bytes of which it consists.
        left_out: The ledgers that it could not copy, or only in part.
    """

    run: int
    created_ns: int
    durable_lsn: int
    ledgers: int
    changed: int
    gone: int
    nbytes: int
    left_out: int


class Chain:
    """The state of a backup as of one run. Base 0 is empty: it is written before the first run, to name the source.

    Args:
        collects_earlier: Whether ``earlier`` is filled, which takes memory.

    Attributes:
        base: The number of the base.
        backup_id: The 16 bytes of the backup; empty before the base.
        source: The store or cluster that is backed up; None before the base.
        last: The manifest of the run; None before the base.
        last_hash: The SHA-256 of that manifest; empty before the base.
        ledgers: The ledgers, by id.
        earlier: The last state of each ledger that an earlier run has and this run does not have.
        before: The states, in earlier runs, of ledgers that got more entries or other metadata later.
        named: The named records, by name.
        packs: The packs of all runs, by number.
        runs: The runs, the oldest first.
    """

    def __init__(self, *, collects_earlier: bool = False) -> None:
        self._collects_earlier = collects_earlier
        self.base = 0
        self.backup_id = b""
        self.source: SourceIdentity | None = None
        self.last: Manifest | None = None
        self.last_hash = b""
        self.ledgers: dict[int, KeptLedger] = {}
        self.earlier: list[KeptLedger] = []
        self.before: list[KeptLedger] = []
        self.named: dict[str, NamedRow] = {}
        self.packs: dict[int, PackInfo] = {}
        self.runs: list[BackupRunInfo] = []

    @property
    def left_out(self) -> Mapping[int, str]:
        """A sentence for each ledger that the run could not copy, or only in part, by id."""
        return {} if self.last is None else self.last.left_out

    def apply(self, data: bytes, number: int, *, where: str) -> None:
        """Apply the base, or the manifest of the next run.

        Raises:
            CorruptError: It is damaged, or it is not that of the next run of this backup.
        """
        manifest = Manifest.decode(data, where=where)
        base = self.source is None
        expected = (base, number, self.last_hash, self.backup_id, self.source)
        previous, backup_id, source = (
            (self.last_hash, self.backup_id, self.source)
            if base
            else (manifest.previous, manifest.backup_id, manifest.source)
        )
        if (manifest.base, manifest.run, previous, backup_id, source) != expected:
            raise CorruptError(
                f"{where}: run {manifest.run} of backup {manifest.backup_id.hex()} of {manifest.source} does not "
                f"follow the run before it; put the right file in its place",
                path=where,
            )
        gone = 0
        for ledger_id, kept in manifest.ledgers.items():
            before = self.ledgers.get(ledger_id)
            if self._collects_earlier and before is not None:
                (self.before if _begins_with(kept, before) else self.earlier).append(before)
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
        if base:
            self.base = number
        self.last_hash = manifest.previous if base and number else manifest_hash(data)
        if not number:
            return
        nbytes = len(data) + sum(pack.nbytes for pack in manifest.packs)
        changed = len(manifest.ledgers) - gone
        self.runs.append(
            BackupRunInfo(
                number,
                manifest.created_ns,
                manifest.durable_lsn,
                len(self.ledgers),
                changed,
                gone,
                nbytes,
                len(manifest.left_out),
            )
        )

    def read_pack(self, target: Target, number: int) -> Iterator[PackedEntries]:
        """Yield the entries of a pack that a manifest names.

        Raises:
            CorruptError: It is missing or damaged, or not the file that the manifest names.
        """
        where = f"{target.where}/{pack_name(number)}"
        known = self.packs.get(number)
        if known is None:
            raise CorruptError(f"{where}: no run names this pack, but a ledger's entries are in it", path=where)
        data = target.read(pack_name(number), known.nbytes)
        if (len(data), pack_hash(data)) != (known.nbytes, known.sha256):
            raise CorruptError(
                f"{where}: {len(data)} bytes that are not those that the backup wrote; restore the file from another "
                "copy of the backup",
                path=where,
            )
        yield from read_pack(data, self.backup_id, number, where=where)


def _begins_with(kept: KeptLedger | None, before: KeptLedger) -> bool:
    """Return whether a ledger consists of the entries of an earlier state of it, and maybe more."""
    return kept is not None and kept.pieces[: len(before.pieces)] == before.pieces


def read_chain(target: Target, *, run: int | None = None, collects_earlier: bool = False) -> Chain:
    """Read the manifests of a backup up to a run.

    Args:
        target: The backup.
        run: The last run to read; None for all. An interrupted run has no manifest, and does not count.
        collects_earlier: As for ``Chain``.

    Returns:
        The chain; empty without a run.

    Raises:
        CorruptError: A manifest is missing, damaged, cut or foreign.
        UsageError: The backup does not have this run.

    Cost: Reads all manifests; some 2 KiB of memory for each ledger.
    """
    names = target.names()
    bases, all_runs = numbers_of(names, _BASE), numbers_of(names, _RUN)
    chain = Chain(collects_earlier=collects_earlier)
    if not bases:
        if all_runs:
            raise missing(f"{target.where}/{manifest_name(0, base=True)}")
        return chain
    base = bases[-1]
    runs = [number for number in all_runs if number > base]
    found = [base, *runs] if base else runs
    if run is not None:
        if run not in found:
            raise UsageError(f"{target.where} has no run {run}; its runs are {_listed(found)}")
        runs = [number for number in runs if number <= run]
    _apply(chain, target, base, base=True)
    for expected, number in enumerate(runs, base + 1):
        if number != expected:
            raise missing(f"{target.where}/{manifest_name(expected, base=False)}")
        _apply(chain, target, number, base=False)
    return chain


def _apply(chain: Chain, target: Target, number: int, *, base: bool) -> None:
    name = manifest_name(number, base=base)
    chain.apply(target.read(name, MANIFEST_BYTES_MAX), number, where=f"{target.where}/{name}")


def put_manifest(target: Target, manifest: Manifest) -> int:
    """Write a manifest, and return its bytes.

    Raises:
        StorageRefusedError: It is too large; or another process has written one of this run.
    """
    data, name = manifest.encode(), manifest_name(manifest.run, base=manifest.base)
    if len(data) > MANIFEST_BYTES_MAX:
        raise StorageRefusedError(
            f"{target.where}/{name} would have {len(data)} bytes, but at most {MANIFEST_BYTES_MAX} are read again; "
            "begin a new backup in an empty directory"
        )
    target.put(name, data)
    return len(data)


def existing_chain(target: Target, *, run: int | None = None, collects_earlier: bool = False) -> Chain:
    """Read a backup that exists; otherwise as ``read_chain``.

    Raises:
        UsageError: The target has no backup, or one whose first run did not end.
    """
    chain = read_chain(target, run=run, collects_earlier=collects_earlier)
    if not chain.runs:
        raise UsageError(f"there is no backup at {target.where}, or its first run did not end; check the path")
    return chain


def superseded(target: Target, chain: Chain) -> list[tuple[int, bool]]:
    """Return the manifests that an interrupted removal of runs left before the chain: number, whether it is a base.

    The oldest come first, because a file may be removed only when no other refers to it.
    """
    names, first = target.names(), chain.base
    old = [(number, True) for number in numbers_of(names, _BASE) if number < first]
    return sorted(old + [(number, False) for number in numbers_of(names, _RUN) if number <= first])


def unnamed_packs(target: Target, chain: Chain) -> list[int]:
    """Return the numbers of the packs that no run names, because the run that wrote them was interrupted."""
    return [number for number in numbers_of(target.names(), _PACK) if number not in chain.packs]


def _listed(numbers: list[int]) -> str:
    return f"{numbers[0]} to {numbers[-1]}" if numbers else "none"

"""Removes the oldest runs of a backup, and the packs that only they need.

Theory of operation
===================

1. Put a *base*: a manifest with the whole state of the oldest kept run, with which the chain begins from then on. It is
   one step, and the manifests of later runs stay as they are.
2. For each earlier manifest, the oldest first, remove the packs that it names and the chain does not, then the
   manifest.

A stop after step 1 leaves manifests that are not read any more; the next removal or the next run of the backup
continues with step 2. A pack is kept as long as a kept run needs one entry in it.
"""

from __future__ import annotations

import time
from dataclasses import replace
from typing import NamedTuple

from pybk.backup.chain import BackupRunInfo, Chain, existing_chain, manifest_name, pack_name, put_manifest, superseded
from pybk.backup.manifest import MANIFEST_BYTES_MAX, Manifest
from pybk.backup.target import Target
from pybk.errors import CorruptError


class PruneReport(NamedTuple):
    """The result of the removal of old runs.

    Attributes:
        target: The directory or URL, without a password.
        kept: The runs that stay, the oldest first.
        removed: The runs that were removed, or would be.
        packs: The packs that were removed with them, or would be.
        nbytes: The bytes of those packs.
    """

    target: str
    kept: tuple[BackupRunInfo, ...]
    removed: tuple[BackupRunInfo, ...]
    packs: int
    nbytes: int


class Pruning:
    """One removal of old runs; see the head of this module.

    Args:
        target: The backup.
        keep: The number of last runs that are kept.
        keep_seconds: The age in seconds up to which runs are kept; all later runs are kept as well, whatever their
            times are.

    Raises:
        UsageError: The target has no backup.
        CorruptError: A manifest is damaged or missing.
    """

    def __init__(self, target: Target, *, keep: int, keep_seconds: float | None) -> None:
        self._target = target
        runs = existing_chain(target).runs
        kept_from = max(len(runs) - keep, 0)
        if keep_seconds is not None:
            begin = time.time_ns() - int(keep_seconds * 1e9)
            kept_from = next((at for at, run in enumerate(runs[:kept_from]) if run.created_ns >= begin), kept_from)
        self._kept, self._removed = tuple(runs[kept_from:]), tuple(runs[:kept_from])
        self._chain = existing_chain(target, run=self._kept[0].run)
        ledgers = self._chain.ledgers.values()
        needed = {piece.pack for ledger in ledgers for piece in ledger.pieces}
        for number in needed - self._chain.packs.keys():
            raise CorruptError(f"{target.where}: no run names {pack_name(number)}, but a ledger's entries are in it")
        self._needed = tuple(self._chain.packs[number] for number in sorted(needed))
        self._dropped = [pack for number, pack in self._chain.packs.items() if number not in needed]

    def plan(self) -> PruneReport:
        """Return the report of the removal without making it; nothing is changed."""
        nbytes = sum(pack.nbytes for pack in self._dropped)
        return PruneReport(self._target.where, self._kept, self._removed, len(self._dropped), nbytes)

    def run(self) -> PruneReport:
        """Remove the runs, and the leftovers of interrupted runs."""
        if self._removed:
            put_manifest(self._target, self._base())
        remove_superseded(self._target, existing_chain(self._target))
        for name in self._target.unfinished():
            self._target.remove(name)
        return self.plan()

    def _base(self) -> Manifest:
        """Return the manifest that replaces that of the oldest kept run."""
        last = self._chain.last
        assert last is not None, "the chain has a run"
        return replace(
            last,
            base=True,
            previous=self._chain.last_hash,
            packs=self._needed,
            ledgers=self._chain.ledgers,
            named=tuple(row for _, row in sorted(self._chain.named.items())),
        )


def remove_superseded(target: Target, chain: Chain) -> None:
    """Remove the manifests before the chain's base, and the packs that only they name."""
    for number, base in superseded(target, chain):
        name = manifest_name(number, base=base)
        try:
            packs = Manifest.decode(target.read(name, MANIFEST_BYTES_MAX), where=f"{target.where}/{name}").packs
        except CorruptError:
            packs = ()  # no manifest names its packs any more; the next run of the backup removes them
        for pack in packs:
            if pack.number not in chain.packs:
                target.remove(pack_name(pack.number))
        target.remove(name)

"""Restores the ledgers of a cluster from a backup, to a cluster.

The entries are written again, by writers that have the ledgers' passwords: a cluster derives the keys of a ledger from
its own id and salt, and bookies take entries only from a writer that proves the password. So each ledger's password is
needed, and the ledgers can be restored to any cluster. The backup's entries are checked with the keys of the cluster
that was backed up before they are written with those of the new one.

A ledger gets its former id, because lists of ledgers and applications name ledgers by their ids. A cluster that has or
had a ledger with this id refuses it, because ids are given once; ``new_ids`` gives new ones.

Every ledger is closed at its last entry, because the writer of an open one is gone. Ledgers are restored one after the
other; one that could not be restored whole is deleted again. An interrupted restore is repeated, and keeps whole
ledgers.
"""

from __future__ import annotations

import secrets
from collections.abc import Collection, Iterator
from dataclasses import replace
from functools import lru_cache

from pybk.backend import LedgerBackend
from pybk.backup.chain import existing_chain
from pybk.backup.checking import LedgerChecks
from pybk.backup.manifest import CLUSTER, KeptLedger, opened
from pybk.backup.restoring import RestoreReport, planned
from pybk.backup.target import Target
from pybk.backup.verifying import ChainReader, WantedEntries
from pybk.credentials import Credentials, Passwords
from pybk.errors import CorruptError, LedgerExistsError, NoSuchLedgerError, UsageError
from pybk.ledger.digest import digest_bytes, entry_digest
from pybk.ledger.entry import ENTRY_HEADER_BYTES
from pybk.ledger.keys import LedgerSeal
from pybk.ledger.ledger_metadata import LedgerMetadata, LedgerState, key_binding, key_kind, new_key_format
from pybk.manager.arguments import Progress
from pybk.manager.ledger_manager import LedgerManager, backend_of
from pybk.manager.ledger_writer import LedgerWriter


class LedgersRestore:
    """One restore to a cluster.

    Args:
        target: The backup.
        manager: A manager that is connected to the cluster.
        run: The run to restore; None for the last.
        passwords: The passwords of the ledgers.
        new_ids: Whether ledgers get new ids.
        ledgers: The ids of the ledgers to restore; None for all.
        progress: Called with the payload bytes restored and to restore.

    Raises:
        UsageError: The backup is that of a store, or has no such run or ledger.
    """

    def __init__(
        self,
        target: Target,
        manager: LedgerManager,
        *,
        run: int | None,
        passwords: Passwords,
        new_ids: bool,
        ledgers: Collection[int] | None,
        progress: Progress,
    ) -> None:
        self._chain = existing_chain(target, run=run)
        source = self._chain.source
        if source is None or source.kind != CLUSTER:
            raise UsageError(f"{target.where} is the backup of a store; it is restored to a directory: give its path")
        self._ledgers = self._chain.ledgers if ledgers is None else {each: self._kept(each, target) for each in ledgers}
        self._left_out = [text for each, text in self._chain.left_out.items() if ledgers is None or each in ledgers]
        self._manager = manager
        self._backend: LedgerBackend = backend_of(manager)
        self._checks = LedgerChecks(source, passwords)
        self._new_ids = new_ids
        self._progress = progress
        self._done, self._total = 0, sum(kept.length for kept in self._ledgers.values())
        reader = ChainReader(self._chain, target)
        self._read_pack = lru_cache(maxsize=2)(reader.read)

    def _kept(self, ledger_id: int, target: Target) -> KeptLedger:
        kept = self._chain.ledgers.get(ledger_id)
        if kept is None:
            run = self._chain.runs[-1].run
            raise UsageError(
                f"run {run} of {target.where} has no ledger {ledger_id}: name another run or backup; nothing was "
                "restored"
            )
        return kept

    def plan(self) -> RestoreReport:
        """Return the report of a restore without making it; nothing is written."""
        left_out = [text for each in self._ledgers.values() if (text := self._needed(each.decoded()))]
        return planned(self._chain, self._ledgers.values())._replace(left_out=(*self._left_out, *left_out))

    def _needed(self, metadata: LedgerMetadata) -> str:
        if self._checks.credentials_of(metadata) is not None:
            return ""
        return f"ledger {metadata.ledger_id} was not restored: its {metadata.key_kind.value} was not given"

    def run(self) -> RestoreReport:
        """Restore the ledgers; those that are restored are durable on return.

        Raises:
            CorruptError, DigestMismatchError, SealMismatchError: The backup is damaged; the ledgers before the damaged
                one are restored.
            NotEnoughBookiesError: The cluster has fewer bookies than a ledger's ensemble takes.
        """
        ids: dict[int, int] = {}
        left_out = [*self._left_out]
        entries = 0
        for ledger_id, kept in self._order():
            metadata = kept.decoded()
            given = self._checks.credentials_of(metadata)
            if given is None:
                left_out.append(self._needed(metadata))
                continue
            problem = "" if self._new_ids else self._taken(metadata, kept)
            if problem is None:
                ids[ledger_id] = ledger_id
                self._add_progress(kept.length)
            elif problem:
                left_out.append(problem)
                continue
            else:
                ids[ledger_id] = self._restore(metadata, kept, given)
            entries += kept.last + 1
        nbytes = sum(self._ledgers[each].length for each in ids)
        return RestoreReport(self._chain.runs[-1].run, len(ids), entries, nbytes, 0, 0, ids, tuple(left_out))

    def _add_progress(self, nbytes: int) -> None:
        self._done += nbytes
        self._progress(self._done, self._total)

    def _order(self) -> list[tuple[int, KeptLedger]]:
        """Return the ledgers in the order of their first packs, so that a pack is seldom read twice."""
        return sorted(self._ledgers.items(), key=lambda each: [piece.pack for piece in each[1].pieces[:1]])

    def _taken(self, metadata: LedgerMetadata, kept: KeptLedger) -> str | None:
        """Return "" if a ledger's id is free, None if the whole ledger was restored before, else the error text."""
        ledger_id = metadata.ledger_id
        try:
            found = self._backend.metadata(ledger_id)
        except NoSuchLedgerError:
            return ""  # the creation of the ledger finds a tombstone
        same = found.creation_time_ns == metadata.creation_time_ns
        if same and (found.state, found.last_entry_id, found.length) == (LedgerState.CLOSED, kept.last, kept.length):
            return None
        what = "another ledger has its id"
        if same:
            what = "it exists with another end, as after an interrupted restore, or with entries after the run"
        return f"ledger {ledger_id} was not restored: {what}; restore it under a new id (new_ids=True, --new-ids)"

    def _restore(self, metadata: LedgerMetadata, kept: KeptLedger, given: Credentials) -> int:
        """Restore a ledger, and return its id."""
        writer = self._created(metadata, given)
        ledger_id = writer.metadata.ledger_id
        try:
            self._append(writer, metadata, kept)
            writer.close()
            made = writer.metadata
            if (made.last_entry_id, made.length) != (kept.last, kept.length):
                raise CorruptError(
                    f"ledger {ledger_id} was restored up to entry {made.last_entry_id} with {made.length} bytes, but "
                    f"the backup says {kept.last} and {kept.length}; verify the backup"
                )
        except BaseException:
            self._manager.delete_ledger(ledger_id, password=given.password, secret=given.secret)
            raise
        return ledger_id

    def _append(self, writer: LedgerWriter, metadata: LedgerMetadata, kept: KeptLedger) -> None:
        check = self._checks.of(metadata, 0)
        skipped = ENTRY_HEADER_BYTES + digest_bytes(metadata.digest_type)
        expected = 0
        for wanted in self._entries(metadata.ledger_id, kept):
            if wanted.first != expected:
                raise CorruptError(f"ledger {metadata.ledger_id}: entry {expected} is not in the backup; verify it")
            found, part = wanted.found, slice(wanted.low, wanted.high)
            offsets, sizes = found.offsets[part], found.sizes[part]
            nbytes = check.add(wanted.first, found.buffer, offsets, sizes)
            payloads = [
                found.buffer[start + skipped : start + size]
                for start, size in zip(offsets.tolist(), sizes.tolist(), strict=True)
            ]
            if metadata.advanced:
                futures = [
                    writer.append_async(payload, entry_id=number)
                    for number, payload in enumerate(payloads, wanted.first)
                ]
                for future in futures:
                    future.result()
            else:
                writer.append_many(payloads)
            expected = wanted.last + 1
            self._add_progress(nbytes)
        check.finish(kept.last, kept.length)

    def _entries(self, ledger_id: int, kept: KeptLedger) -> Iterator[WantedEntries]:
        for number in dict.fromkeys(piece.pack for piece in kept.pieces):
            yield from (each for each in self._read_pack(number) if each.ledger_id == ledger_id)

    def _created(self, metadata: LedgerMetadata, given: Credentials) -> LedgerWriter:
        """Create a ledger like one of the backup, with keys of this cluster."""
        backend = self._backend
        key_format = new_key_format(given.kind, backend.feature_level, backend.where)
        key_salt = secrets.token_bytes(16)
        binding = key_binding(key_format, metadata.digest_type, metadata.write_flags)
        while True:
            ledger_id = backend.new_ledger_id() if self._new_ids else metadata.ledger_id
            keys = backend.key_ring.ledger_keys(
                given.value, ledger_id, key_salt, 0, kind=key_kind(key_format), binding=binding
            )
            wanted = replace(
                opened(metadata),
                ledger_id=ledger_id,
                key_salt=key_salt,
                key_epoch=0,
                key_format=key_format,
                verifier=backend.verifier(keys),
                creation_sequence=backend.new_creation_sequence(),
            )
            try:
                descriptor = backend.create(wanted)
            except LedgerExistsError as error:
                if self._new_ids:
                    continue
                raise LedgerExistsError(
                    f"ledger {ledger_id} existed in this cluster and was deleted, and ids are given once; restore to "
                    "new ids (new_ids=True, --new-ids)"
                ) from error
            seal = LedgerSeal(keys, entry_digest(wanted.digest_type, ledger_id, keys.entry_key))
            backend.unlock(descriptor, keys, seal)
            return LedgerWriter(backend, descriptor, seal.digest, self._manager)

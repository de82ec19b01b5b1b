"""One run of a backup: copies the changes since the run before, while writers continue.

Theory of operation
===================

1. *Read* the chain of the target. An empty target gets an empty base first. A target with another store's backup, or
   with files that are not a backup, is refused.
2. *Cut*: the source returns the state of all ledgers after one commit. Writers never stop.
3. *Copy*: for each ledger that grew, the entries after those that the backup has go into packs. Entries are immutable,
   so copying them later than the cut makes no difference. If a ledger is deleted before its new entries were copied, it
   can no longer be copied as of the cut, and the run returns to step 2. It keeps the copied entries. So each cut leaves
   less to copy, and less time in which a ledger can be deleted.
4. *Publish*: the manifest of the run is put, in one step. Only then does the backup have another state; a run that ends
   earlier leaves the backup as it was.

A damaged entry ends the run; or its ledger is copied up to the entry before it, the manifest says so, and the next run
tries the rest again. In a cluster, which has other copies, a ledger that cannot be read stays as the last run has it.

An interrupted run leaves packs that no manifest names. The next run checks them, and takes over the entries of whole
ones; so it continues the interrupted run.

Why the result is a consistent prefix: every ledger is copied up to exactly its end in one cut, with the metadata, last
add confirmed and length of that cut; lengths are checked against the entries. A cut holds everything that was
acknowledged before it.
"""

from __future__ import annotations

import secrets
import time
from collections import defaultdict
from collections.abc import Callable
from typing import Final, NamedTuple, TypeVar

from pybk.backup.chain import pack_name, put_manifest, read_chain, unnamed_packs
from pybk.backup.checking import LedgerCheck, LedgerChecks
from pybk.backup.manifest import KeptLedger, Manifest, PackInfo, opened
from pybk.backup.pack import (
    BACKUP_ID_BYTES,
    PACK_BYTES,
    PACK_BYTES_MAX,
    LedgerKey,
    PackBuilder,
    Piece,
    pack_hash,
    read_pack,
)
from pybk.backup.pruning import remove_superseded
from pybk.backup.source import Cut, LedgerCut, Source
from pybk.backup.target import Target
from pybk.credentials import Passwords
from pybk.errors import (
    ClosedError,
    CookieError,
    CorruptError,
    DigestMismatchError,
    NoSuchLedgerError,
    PybkError,
    StorageRefusedError,
    UsageError,
)
from pybk.ledger.entry import EntryBatch
from pybk.manager.arguments import Progress

CUTS_MAX: Final = 100
"""The cuts of one run before it ends because ledgers are deleted faster than they are copied."""

_BATCH_BYTES: Final = 1 << 20

_T = TypeVar("_T")


class BackupReport(NamedTuple):
    """The result of a run.

    Attributes:
        run: The number of the run; with ``dry_run``, the number that it would have.
        ledgers: The ledgers in the backup now.
        changed: The ledgers that are new or changed since the run before.
        gone: The ledgers that were deleted since the run before.
        entries: The entries that were copied, or would be.
        payload_bytes: Their payload bytes.
        continued_entries: The entries that an interrupted run had copied, which were taken over.
        written_bytes: The bytes that were written to the target; 0 with ``dry_run``.
        durable_lsn: The backup has everything up to this commit of the store's log; 0 for a cluster.
        unauthenticated: The ledgers whose new entries were checked by checksum alone, because their digests need a
            password that was not given.
        left_out: A sentence for each ledger that could not be copied, or not whole; the manifest has them, too.
    """

    run: int
    ledgers: int
    changed: int
    gone: int
    entries: int
    payload_bytes: int
    continued_entries: int
    written_bytes: int
    durable_lsn: int
    unauthenticated: int
    left_out: tuple[str, ...]


class _LeftOutError(PybkError):
    """A ledger cannot be copied, or only in part, and the run continues.

    Args:
        message: A sentence for the manifest.
        rest: The ledger as the backup then has it; None if it has no entry of it.
    """

    def __init__(self, message: str, rest: LedgerCut | None) -> None:
        super().__init__(message)
        self.rest = rest


class BackupRun:
    """One run; see the head of this module.

    Args:
        source: The source of the entries.
        target: The target of the backup.
        passwords: The known passwords.
        progress: Called with the payload bytes copied and to copy.
        skip_damaged: Whether a damaged ledger of a store is copied up to its first damaged entry; otherwise it ends the
            run.
        pack_bytes: A pack with more bytes takes no more records.
    """

    def __init__(
        self,
        source: Source,
        target: Target,
        passwords: Passwords,
        progress: Progress,
        *,
        skip_damaged: bool = False,
        pack_bytes: int = PACK_BYTES,
    ) -> None:
        self._source = source
        self._target = target
        self._progress = progress
        self._skip_damaged = skip_damaged
        self._pack_bytes = pack_bytes
        self._identity = source.identity
        self._checks = LedgerChecks(self._identity, passwords)
        self._chain = read_chain(target)
        self._check_chain()
        self._keys: dict[int, LedgerKey] = {}
        """The keys of those ledgers of the chain that were decoded."""
        self._copied: dict[LedgerKey, list[Piece]] = defaultdict(list)
        """Pieces in packs that no manifest names, by ledger, ascending."""
        self._packs: dict[int, PackInfo] = {}
        """The packs that no manifest names."""
        self._pack: PackBuilder | None = None
        self._entries = self._payload_bytes = self._continued = self._written = 0
        self._done_bytes = self._total_bytes = 0

    def _check_chain(self) -> None:
        found = self._chain.source
        if found is None and self._target.names():
            raise UsageError(
                f"{self._target.where} is not empty and not a backup: {self._target.names()[0]}; name an empty or new "
                "directory"
            )
        if found is not None and found != self._identity:
            raise CookieError(
                f"{self._target.where} is the backup of {found}, and not of {self._identity}; name the backup of this "
                "one, or an empty directory for a new backup"
            )

    # ---- the run -----------------------------------------------------------------------------------------------------

    def plan(self) -> BackupReport:
        """Return the report of a run without making it; nothing is written."""
        self._take_unnamed()
        cut = self._cut()
        for ledger in cut.ledgers:
            first = self._pieces(ledger)[1]
            if first <= ledger.last:
                self._entries += ledger.last + 1 - first
                known = self._known(ledger)
                self._payload_bytes += ledger.length - (0 if known is None or first <= known.last else known.length)
        changed = self._changes(cut, planned=True)
        return self._report(cut, changed, self._next_run)

    def run(self) -> BackupReport:
        """Make the run; durable on return.

        Raises:
            CorruptError, DigestMismatchError, StorageError: An entry is damaged or cannot be read; the backup is as it
                was before.
            StorageRefusedError: Ledgers are deleted faster than they are copied; or another process writes to the
                backup.
        """
        self._begin()
        remove_superseded(self._target, self._chain)
        self._take_unnamed(remove=True)
        for _ in range(CUTS_MAX):
            cut = self._cut()
            try:
                cut = self._copy(cut)
                break
            except NoSuchLedgerError:
                continue  # it was deleted after the cut: the next cut does not have it
        else:
            raise StorageRefusedError(
                f"ledgers were deleted during each of {CUTS_MAX} attempts to copy their new entries; what was copied "
                "is kept: run the backup again when fewer are deleted"
            )
        return self._publish(cut)

    def _begin(self) -> None:
        """Write an empty base to an empty target."""
        if self._chain.source is None:
            backup_id, now = secrets.token_bytes(BACKUP_ID_BYTES), time.time_ns()
            base = Manifest(True, backup_id, 0, b"", self._identity, now, 0, 0, 0, ())
            self._written += put_manifest(self._target, base)
            self._chain = read_chain(self._target)

    @property
    def _next_run(self) -> int:
        return self._chain.last.run + 1 if self._chain.last is not None else 1

    def _cut(self) -> Cut:
        """Return a cut of the source, which must not be older than the backup."""
        cut = self._source.cut()
        before = self._chain.last
        older = f"{self._identity} was put back to an older state than {self._target.where} has; begin a new backup"
        if before is not None and cut.durable_lsn < before.durable_lsn:
            raise CookieError(f"{older}: its log ends at LSN {cut.durable_lsn}, the backup's at {before.durable_lsn}")
        for ledger in cut.ledgers:
            known = self._known(ledger)
            if known is not None and ledger.last < known.last:
                raise CookieError(
                    f"{older}: ledger {ledger.metadata.ledger_id} ends with entry {ledger.last}, in the backup with "
                    f"{known.last}"
                )
        return cut

    # ---- the backup so far ---------------------------------------------------------------------------------------

    def _take_unnamed(self, *, remove: bool = False) -> None:
        """Take over the packs of an interrupted run that are whole; remove others if asked to."""
        for number in unnamed_packs(self._target, self._chain):
            where = f"{self._target.where}/{pack_name(number)}"
            try:
                data = self._target.read(pack_name(number), PACK_BYTES_MAX)
                found = list(read_pack(data, self._chain.backup_id, number, where=where))
            except CorruptError:
                if remove:
                    self._target.remove(pack_name(number))
                continue
            self._packs[number] = PackInfo(number, len(data), pack_hash(data))
            for entries in found:
                self._continued += entries.last + 1 - entries.first
                self._copied[entries.key].append(Piece(number, entries.first, entries.last))

    def _known(self, ledger: LedgerCut) -> KeptLedger | None:
        """Return a ledger as the last run has it; None if it does not have it, or has another one of this id."""
        ledger_id = ledger.metadata.ledger_id
        kept = self._chain.ledgers.get(ledger_id)
        if kept is None:
            return None
        key = self._keys.get(ledger_id)
        if key is None:
            key = self._keys[ledger_id] = LedgerKey.of(kept.decoded())
        return kept if key == LedgerKey.of(ledger.metadata) else None

    def _pieces(self, ledger: LedgerCut) -> tuple[list[Piece], int]:
        """Return the pieces of a ledger in the backup so far, and the first entry to copy."""
        known = self._known(ledger)
        pieces, first = ([], 0) if known is None else (list(known.pieces), known.last + 1)
        for piece in self._copied.get(LedgerKey.of(ledger.metadata), ()):
            if piece.first <= first <= piece.last and first <= ledger.last:
                last = min(piece.last, ledger.last)
                if pieces and pieces[-1].pack == piece.pack and pieces[-1].last == first - 1:
                    pieces[-1] = pieces[-1]._replace(last=last)
                else:
                    pieces.append(Piece(piece.pack, first, last))
                first = last + 1
        return pieces, first

    # ---- copying -----------------------------------------------------------------------------------------------------

    def _copy(self, cut: Cut) -> Cut:
        """Copy the entries of a cut that the backup lacks; return it as far as it could be read.

        Raises:
            NoSuchLedgerError: A ledger was deleted meanwhile; the entries that were copied so far are remembered.
        """
        known = (self._known(ledger) for ledger in cut.ledgers)
        grown = sum(
            each.length - (0 if kept is None else kept.length) for each, kept in zip(cut.ledgers, known, strict=True)
        )
        self._total_bytes = max(grown, self._done_bytes)
        copied: list[LedgerCut] = []
        left_out = dict(cut.left_out)
        try:
            for ledger in cut.ledgers:
                try:
                    self._copy_ledger(ledger)
                    copied.append(ledger)
                except _LeftOutError as error:
                    left_out[ledger.metadata.ledger_id] = str(error)
                    if error.rest is not None:
                        copied.append(error.rest)
        finally:
            self._put_pack()
        return cut._replace(ledgers=copied, left_out=left_out)

    def _copy_ledger(self, ledger: LedgerCut) -> None:
        """Copy the entries of a ledger that the backup lacks.

        Raises:
            _LeftOutError: It cannot be copied whole, and the run continues.
        """
        known, first = self._known(ledger), self._pieces(ledger)[1]
        if ledger.last == (-1 if known is None else known.last):
            return
        length = known.length if known is not None and first == known.last + 1 else None
        check = self._attempt(ledger, lambda: self._checks.of(ledger.metadata, min(first, ledger.last), length))
        if first > ledger.last:  # an interrupted run had copied them all, and may have ended because of the next check
            self._read(ledger, check, ledger.last)
        while first <= ledger.last:
            found, nbytes = self._read(ledger, check, first)
            if self._pack is None:
                number = max([0, *self._chain.packs, *self._packs]) + 1
                self._pack = PackBuilder(self._chain.backup_id, number)
            self._pack.add(ledger.metadata, first, found)
            first += len(found)
            self._entries += len(found)
            self._payload_bytes += nbytes
            self._done_bytes += nbytes
            self._progress(self._done_bytes, max(self._total_bytes, self._done_bytes))
            if self._pack.nbytes >= self._pack_bytes:
                self._put_pack()
        self._attempt(ledger, lambda: check.finish(ledger.last, ledger.length))

    def _attempt(self, ledger: LedgerCut, call: Callable[[], _T]) -> _T:
        """Return the result of a check of a whole ledger; if it fails, leave out the ledger's new entries, or raise."""
        try:
            return call()
        except PybkError as error:
            if not (self._source.has_replicas or self._skip_damaged):
                raise
            raise self._all_left_out(ledger, error) from error

    def _read(self, ledger: LedgerCut, check: LedgerCheck, first: int) -> tuple[EntryBatch, int]:
        """Return sound entries of a ledger from ``first`` on, and their payload bytes.

        If an entry is damaged, ever fewer entries are read, until those before it can be read, or it is the only one
        left.
        """
        last = ledger.last
        while True:
            try:
                found = self._source.read(ledger.metadata, first, last, _BATCH_BYTES)
                return found, check.add(first, found.buffer, found.offsets, found.sizes)
            except (ClosedError, NoSuchLedgerError, StorageRefusedError):
                raise
            except PybkError as error:
                if self._source.has_replicas:
                    raise self._all_left_out(ledger, error) from error
                if last == first:
                    raise self._damaged(ledger, check, first, error) from error
            last = first + (last - first) // 2

    def _damaged(self, ledger: LedgerCut, check: LedgerCheck, first: int, error: PybkError) -> PybkError:
        """Return the error of a ledger whose entry ``first`` is damaged."""
        ledger_id = ledger.metadata.ledger_id
        if not self._skip_damaged:
            text = (
                f"entry {first} of ledger {ledger_id} cannot be copied: {error}; or copy the ledger up to the entry "
                "before it: skip_damaged=True, --skip-damaged"
            )
            return DigestMismatchError(text) if isinstance(error, DigestMismatchError) else CorruptError(text)
        try:
            length = self._length_before(ledger, check, first)
        except (CorruptError, DigestMismatchError):
            return self._all_left_out(ledger, error)
        rest = LedgerCut(opened(ledger.metadata), first - 1, min(ledger.lac, first - 1), length)
        return _LeftOutError(f"entries {first} to {ledger.last} of ledger {ledger_id} are left out: {error}", rest)

    def _length_before(self, ledger: LedgerCut, check: LedgerCheck, first: int) -> int:
        """Return the payload bytes of a ledger before entry ``first``, the next that the check expects."""
        if check.length is not None:
            return check.length
        # An interrupted run had copied the entry before it, whose header has the length.
        before = self._checks.of(ledger.metadata, first - 1)
        found = self._source.read(ledger.metadata, first - 1, first - 1, _BATCH_BYTES)
        before.add(first - 1, found.buffer, found.offsets, found.sizes)
        assert before.length is not None, "an entry was added"
        return before.length

    def _all_left_out(self, ledger: LedgerCut, error: PybkError) -> _LeftOutError:
        """Return the error of a ledger that stays as the last run has it."""
        known = self._known(ledger)
        rest = None if known is None else LedgerCut(known.decoded(), known.last, known.lac, known.length)
        first = 0 if known is None else known.last + 1
        text = f"entries {first} to {ledger.last} of ledger {ledger.metadata.ledger_id} are left out: {error}"
        return _LeftOutError(text, rest)

    def _put_pack(self) -> None:
        """Write the pack that is being filled."""
        pack, self._pack = self._pack, None
        if pack is None or not pack.pieces:
            return
        data = pack.finish()
        self._target.put(pack_name(pack.number), data)
        self._written += len(data)
        self._packs[pack.number] = PackInfo(pack.number, len(data), pack_hash(data))
        for key, piece in pack.pieces:
            self._copied[key].append(piece)

    # ---- publishing --------------------------------------------------------------------------------------------------

    def _changes(self, cut: Cut, *, planned: bool = False) -> dict[int, KeptLedger | None]:
        """Return the ledgers that differ from the last run; with ``planned``, although entries are not copied yet."""
        changes: dict[int, KeptLedger | None] = {}
        kept_ids = {*cut.left_out}
        for ledger in cut.ledgers:
            pieces, first = self._pieces(ledger)
            assert planned or first == ledger.last + 1, "all entries were copied"
            kept = KeptLedger(ledger.metadata.encode(), ledger.last, ledger.lac, ledger.length, tuple(pieces))
            kept_ids.add(ledger.metadata.ledger_id)
            if self._chain.ledgers.get(ledger.metadata.ledger_id) != kept:
                changes[ledger.metadata.ledger_id] = kept
        changes.update((ledger_id, None) for ledger_id in self._chain.ledgers if ledger_id not in kept_ids)
        return changes

    def _publish(self, cut: Cut) -> BackupReport:
        changes = self._changes(cut)
        used = {piece.pack for kept in changes.values() if kept is not None for piece in kept.pieces}
        named = {row.name: row for row in cut.named}
        changed = [row for row in cut.named if self._chain.named.get(row.name) != row]
        removed = [row._replace(value=None) for row in self._chain.named.values() if row.name not in named]
        run = self._next_run
        self._written += put_manifest(
            self._target,
            Manifest(
                base=False,
                backup_id=self._chain.backup_id,
                run=run,
                previous=self._chain.last_hash,
                source=self._identity,
                created_ns=time.time_ns(),
                durable_lsn=cut.durable_lsn,
                next_ledger_id=cut.next_ledger_id,
                next_creation_sequence=cut.next_creation_sequence,
                packs=tuple(info for number, info in sorted(self._packs.items()) if number in used),
                ledgers=changes,
                named=(*changed, *removed),
                left_out=cut.left_out,
            ),
        )
        for number in self._packs.keys() - used:
            self._target.remove(pack_name(number))  # all of its ledgers were deleted before the run ended
        return self._report(cut, changes, run)

    def _report(self, cut: Cut, changes: dict[int, KeptLedger | None], run: int) -> BackupReport:
        gone = sum(kept is None for kept in changes.values())
        kept_as_they_were = cut.left_out.keys() & self._chain.ledgers
        return BackupReport(
            run=run,
            ledgers=len({*(each.metadata.ledger_id for each in cut.ledgers), *kept_as_they_were}),
            changed=len(changes) - gone,
            gone=gone,
            entries=self._entries,
            payload_bytes=self._payload_bytes,
            continued_entries=self._continued,
            written_bytes=self._written,
            durable_lsn=cut.durable_lsn,
            unauthenticated=len(self._checks.unauthenticated),
            left_out=tuple(cut.left_out.values()),
        )

"""Restores a store from a backup, into a new directory.

Theory of operation
===================

The store is made in a directory next to the requested one, with the suffix ``.restoring``, and renamed when it is
complete, durable and closed. So after a stop the path has either no store or the whole store; the next restore to the
same path removes the leftovers of an interrupted one.

1. Read the chain of the backup, and check it.
2. Make the directory with the file ``accepted-loss``: a bookie that starts on it puts all its ledgers in limbo, because
   it may have acknowledged entries after the backup. The file comes first, because the next restore recognises
   leftovers by it.
3. Make an empty store with the id, the salt, the scrypt cost and the named records of the backup, and a new
   incarnation. Its log begins after the last LSN that was backed up.
4. Check the entries and append them, byte for byte. Each ledger gets its last metadata when all its entries are
   durable.
5. Compare each ledger's end, length and last add confirmed with the backup, close the store, and rename it.
"""

from __future__ import annotations

import os
import shutil
from array import array
from collections.abc import Collection
from contextlib import ExitStack
from struct import Struct
from typing import Final, NamedTuple

from pybk.backup.chain import Chain, existing_chain
from pybk.backup.manifest import STORE, KeptLedger, opened
from pybk.backup.target import UNFINISHED, Target
from pybk.backup.verifying import ChainReader, EntriesCheck, WantedEntries
from pybk.config import StoreConfig
from pybk.credentials import Passwords
from pybk.errors import CorruptError, StoreLockedError, UsageError
from pybk.ledger.digest import digest_bytes
from pybk.ledger.entry import ENTRY_HEADER_BYTES
from pybk.ledger.ledger_metadata import LedgerMetadata
from pybk.manager.arguments import Progress
from pybk.storage.descriptor import LedgerDescriptor
from pybk.storage.directories import ACCEPTED_LOSS, RestoredStore, create_store, note_accepted_loss
from pybk.storage.format.cookie import read_cookie
from pybk.storage.io.failures import storage_error
from pybk.storage.io.filesystem import OsFileSystem
from pybk.storage.store import Store, open_environment

SUFFIX: Final = ".restoring"
_LOCK: Final = "LOCK"
_LENGTH: Final = Struct(">q")
_LENGTH_AT: Final = 24


class RestoreReport(NamedTuple):
    """The result of a restore.

    Attributes:
        run: The run that was restored.
        ledgers: The ledgers that were restored, or would be.
        entries: Their entries.
        payload_bytes: Their payload bytes.
        incarnation: The new incarnation of a store; 0 for ledgers of a cluster, and with ``dry_run``.
        unauthenticated: Ledgers whose digests could not be checked, because the right password was not given; the
            checksums of their records were checked.
        ids: For ledgers of a cluster, the new ids by those in the backup.
        left_out: A sentence for each ledger that was not restored whole, because the restore or the run of the backup
            could not copy it.
    """

    run: int
    ledgers: int
    entries: int
    payload_bytes: int
    incarnation: int
    unauthenticated: int
    ids: dict[int, int]
    left_out: tuple[str, ...] = ()


def planned(chain: Chain, ledgers: Collection[KeptLedger]) -> RestoreReport:
    """Return the report of a restore of some ledgers of a chain, without making it."""
    entries, nbytes = sum(kept.last + 1 for kept in ledgers), sum(kept.length for kept in ledgers)
    return RestoreReport(chain.runs[-1].run, len(ledgers), entries, nbytes, 0, 0, {}, tuple(chain.left_out.values()))


def check_free(path: str) -> None:
    """Raise UsageError unless a path does not exist, or is an empty directory that a rename can replace."""
    if os.path.lexists(path) and (not os.path.isdir(path) or os.listdir(path)):
        raise UsageError(f"{path} is not empty; a store is restored to an empty or a new directory, name another path")
    if os.path.ismount(path):
        raise UsageError(f"{path} is a mount point, which a rename cannot replace; name a new directory in it")


def restore_store(
    target: Target, path: str, *, run: int | None, passwords: Passwords, progress: Progress, dry_run: bool
) -> RestoreReport:
    """Restore a store to a directory.

    Raises:
        UsageError: The directory is not empty, or the backup is not that of a store, or has no such run.
        CorruptError, DigestMismatchError, SealMismatchError: The backup is damaged; nothing was restored.
    """
    path = os.path.realpath(path)  # a link to an empty directory cannot be replaced by a directory
    check_free(path)
    chain = existing_chain(target, run=run)
    if chain.source is None or chain.source.kind != STORE:
        raise UsageError(
            f"{target.where} is the backup of a cluster's ledgers; they are restored to a cluster: give the URL of its "
            "metadata store"
        )
    if dry_run:
        return planned(chain, chain.ledgers.values())
    staging = path + SUFFIX
    fs = OsFileSystem()
    with ExitStack() as undo:
        try:
            _remove_leftovers(fs, staging)
            undo.callback(shutil.rmtree, staging, ignore_errors=True)
            report = _Restore(chain, target, staging, passwords, progress).run()
            _check_own(fs, staging, report.incarnation)
            check_free(path)
            os.rename(staging, path)  # also onto an empty directory
            fs.sync_directory(os.path.dirname(path))
        except OSError as error:
            remedy = "name another directory, or mend the device, and restore again"
            raise storage_error(error, f"restoring {path}", remedy) from error
        undo.pop_all()
    return report


def _remove_leftovers(fs: OsFileSystem, staging: str) -> None:
    """Remove the leftovers of an interrupted restore.

    Raises:
        StoreLockedError: Another restore is under way.
        UsageError: The directory exists and was not made by a restore; nothing was changed.
    """
    if os.path.lexists(staging):
        _check_leftover(staging)
        fs.lock(os.path.join(staging, _LOCK)).release()
        shutil.rmtree(staging)
    fs.make_directory(os.path.dirname(staging))


def _check_leftover(staging: str) -> None:
    """Raise UsageError unless a restore made a directory: it has the first file of a restore, or no files."""
    if os.path.isdir(staging) and not os.path.islink(staging):
        names = set(os.listdir(staging))
        if ACCEPTED_LOSS in names or names <= {_LOCK, ACCEPTED_LOSS + UNFINISHED}:
            return
    raise UsageError(
        f"a restore writes to {staging} first, and that exists without being the beginning of a restore: move it away, "
        "or name another directory"
    )


def _check_own(fs: OsFileSystem, staging: str, incarnation: int) -> None:
    """Raise StoreLockedError if a restore that began at the same moment has replaced the store of this one."""
    cookie = read_cookie(fs, staging)
    if cookie is None or cookie.incarnation != incarnation:
        raise StoreLockedError(f"another restore to {staging.removesuffix(SUFFIX)} has begun; wait for its end")


class _Restore:
    """One restore to the directory ``staging``."""

    def __init__(self, chain: Chain, target: Target, staging: str, passwords: Passwords, progress: Progress) -> None:
        self._chain = chain
        self._reader = ChainReader(chain, target)
        self._check = EntriesCheck(chain, passwords)
        self._staging = staging
        self._progress = progress
        self._open: dict[int, LedgerDescriptor] = {}
        """The ledgers of which not all entries were appended."""

    def run(self) -> RestoreReport:
        fs = OsFileSystem()
        fs.make_directory(self._staging)
        note_accepted_loss(fs, self._staging)
        cookie = create_store(fs, self._staging, None, open_environment, self._restored())
        store = Store.open(self._staging, config=StoreConfig())
        try:
            self._fill(store)
            for ledger_id, kept in self._chain.ledgers.items():
                _compare(store.descriptor(ledger_id), kept)
        except BaseException as error:
            store.close(clean=False)
            cause, failed = error.__cause__, store.log.error
            if isinstance(cause, OSError) and failed is not None and repr(cause) == repr(failed.__cause__):
                raise OSError(str(cause)) from error  # the remedy of that error is for a store that stays
            raise
        store.close()
        report = planned(self._chain, self._chain.ledgers.values())
        return report._replace(incarnation=cookie.incarnation, unauthenticated=self._check.unauthenticated)

    def _restored(self) -> RestoredStore:
        source, last = self._chain.source, self._chain.last
        assert source is not None, "the chain exists"
        assert last is not None, "the chain exists"
        return RestoredStore(
            source.store_id,
            source.salt,
            source.scrypt_cost,
            last.durable_lsn,
            last.next_ledger_id,
            last.next_creation_sequence,
            [row for _, row in sorted(self._chain.named.items())],
        )

    def _fill(self, store: Store) -> None:
        """Create all ledgers and append their entries, in the order of the packs."""
        done, total = 0, sum(kept.length for kept in self._chain.ledgers.values())
        for number in self._reader.packs:
            complete = []
            for wanted in self._reader.read(number):
                if self._check.add(wanted):
                    complete.append((wanted.ledger_id, wanted.kept))
                self._append(store, wanted)
                done += int(wanted.found.sizes[wanted.low : wanted.high].sum())
                self._progress(min(done, total), total)
            store.log.flush(kept=True)
            self._complete(store, complete)
        for error in self._check.lacking().values():
            raise error
        empty = [(ledger_id, kept) for ledger_id, kept in self._chain.ledgers.items() if kept.last < 0]
        for ledger_id, kept in empty:
            self._check.check_empty(kept)
            self._descriptor(store, ledger_id, kept)
        store.log.flush(kept=True)
        self._complete(store, empty)

    def _descriptor(self, store: Store, ledger_id: int, kept: KeptLedger) -> LedgerDescriptor:
        """Return a ledger's descriptor; the ledger is created, open, in the commit that is forming."""
        found = self._open.get(ledger_id)
        if found is None:
            found, _ = store.stage_create(opened(kept.decoded()))
            self._open[ledger_id] = found
        return found

    def _append(self, store: Store, wanted: WantedEntries) -> None:
        """Append entries unchanged, and restore the last add confirmed of a deferred ledger."""
        descriptor, kept = self._descriptor(store, wanted.ledger_id, wanted.kept), wanted.kept
        if descriptor.deferred and wanted.first <= kept.lac <= wanted.last:
            high = kept.lac + 1 - wanted.found.first
            _stage(store, descriptor, wanted._replace(high=high))
            store.force(descriptor)
            wanted = wanted._replace(low=high)
        if wanted.low < wanted.high:
            _stage(store, descriptor, wanted)

    def _complete(self, store: Store, ledgers: list[tuple[int, KeptLedger]]) -> None:
        """Give ledgers their last metadata, now that all their entries are durable."""
        changes: list[tuple[LedgerDescriptor, LedgerMetadata]] = []
        for ledger_id, kept in ledgers:
            descriptor, metadata = self._open.pop(ledger_id), kept.decoded()
            if descriptor.metadata != metadata:
                changes.append((descriptor, metadata))
        store.change_all(changes)


def _stage(store: Store, descriptor: LedgerDescriptor, wanted: WantedEntries) -> None:
    """Stage entries in the log, once it admits them."""
    found, part = wanted.found, slice(wanted.low, wanted.high)
    starts, sizes = found.offsets[part], found.sizes[part]
    count, overhead = len(sizes), ENTRY_HEADER_BYTES + digest_bytes(descriptor.metadata.digest_type)
    start, end = int(starts[0]), int(starts[-1] + sizes[-1])
    (length,) = _LENGTH.unpack_from(found.buffer, int(starts[-1]) + _LENGTH_AT)
    parts: list[bytes | memoryview] = [b""] * (2 * count)
    parts[0] = found.buffer[start:end]
    with descriptor.lock:
        descriptor.account_staged()
        while (
            store.log.stage(
                descriptor,
                descriptor.last_pushed + 1,
                array("q", sizes.tolist()),
                parts,
                nbytes=end - start,
                base_length=length - (end - start - overhead * count),
                overhead=overhead,
                wanted=True,
            )
            is None
        ):
            store.wait_for_admission()
        descriptor.last_pushed += count
        descriptor.length_pushed = length


def _compare(descriptor: LedgerDescriptor, kept: KeptLedger) -> None:
    """Raise CorruptError unless a restored ledger has the end, length and LAC that the backup records."""
    found = (
        descriptor.last_durable,
        descriptor.last_add_confirmed,
        descriptor.length_durable,
        descriptor.metadata.encode(),
    )
    if found != (kept.last, kept.lac, kept.length, kept.metadata):
        raise CorruptError(
            f"ledger {descriptor.ledger_id}: restored up to entry {found[0]}, LAC {found[1]}, {found[2]} bytes, but "
            f"the backup says {kept.last}, {kept.lac} and {kept.length}; the backup contradicts itself: verify it"
        )

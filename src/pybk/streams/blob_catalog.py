"""The names of a blob store, in the named records of its manager, and the deletion of their ledgers.

``pybk.streams.blob_record`` has the states of a record. This module has the order of the steps, and the rules that make
it safe to stop after any step; ``docs/concepts/blobs.md`` lists the rules:

- **B1** An upload is named in its record before anything is written to its ledger, and published only from there.
- **B2** A name changes from one blob to the next by one compare-and-set, after the ledger of the new one is sealed.
- **B3** The home's record alone decides about a ledger. A copy is named in its own record, then holds the ledger at its
  home, and only then is published.
- **B4** A ledger is deleted once its home has dropped it and has no hold of it. No copy can get a hold of it then.
- **B5** An upload is given up by a compare-and-set after which it cannot be published; only then its ledger is deleted.
- **B6** A ledger that its home does not name, because its upload ended before rule B1 was kept, is fenced first, so its
  writer can no longer complete it. Then the record is read again, and the ledger is deleted if the record still does
  not name it.
"""

from __future__ import annotations

import logging
import secrets
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from operator import itemgetter
from typing import Final
from weakref import WeakKeyDictionary

from pybk.backend import LedgerBackend
from pybk.errors import (
    BlobError,
    NoSuchBlobError,
    NoSuchLedgerError,
    PybkError,
    UnauthorizedError,
    VersionConflictError,
)
from pybk.ledger.ledger_metadata import LedgerMetadata
from pybk.manager.arguments import whole_from
from pybk.manager.ledger_manager import LedgerManager, backend_of
from pybk.manager.ledger_reader import LedgerReader
from pybk.manager.ledger_writer import LedgerWriter
from pybk.storage.named_records import NamedChange
from pybk.streams.blob_record import BlobRecord, BlobVersion, Hold, Reference
from pybk.streams.log_settings import LedgerSpec, wrong_password
from pybk.threads import hold_over_forks, in_children
from pybk.values import decode_json, encode_json

logger = logging.getLogger(__name__)

GROUP: Final = "blobs"
"""The names of a store are the named records of the group ``blobs.STORE``."""

BLOB_KEY: Final = "pybk.blob"
"""Custom metadata of a blob's ledger: its store, the name under which it was uploaded, and the token of the upload."""

_TOKEN_BYTES: Final = 12


class _InUse:
    """The ledgers of one backend that this process reads or deletes, and its uploads there.

    Threads: any. ``readers`` is changed by single steps, also where a finaliser interrupts another call.
    """

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.readers: dict[object, int] = {}
        """The ledger of each open reader."""
        self.dying: set[int] = set()
        """Ledgers that are deleted now, which cannot be opened any more."""
        self.uploads: set[str] = set()
        """Tokens of uploads that this process may publish yet."""
        self.abandoned: set[str] = set()
        """Tokens of uploads that this process will not publish, and has not given up yet."""
        in_children(self)

    def is_read(self, ledger_id: int) -> bool:
        """Return whether a ledger is open for reading."""
        return ledger_id in self.readers.copy().values()


_IN_USE: Final[WeakKeyDictionary[LedgerBackend, _InUse]] = WeakKeyDictionary()
_IN_USE_LOCK: Final = threading.RLock()
hold_over_forks(_IN_USE_LOCK)


def new_token() -> str:
    """Return a token that no reference has."""
    return secrets.token_hex(_TOKEN_BYTES)


class BlobCatalog:
    """The names and ledgers of one blob store.

    Args:
        manager: The manager that has them.
        store: The name of the blob store.
        spec: The specification by which its ledgers are created and opened.
        grace_s: Seconds for which a dropped ledger is kept for readers in other processes.

    Threads: any.
    """

    def __init__(self, manager: LedgerManager, store: str, spec: LedgerSpec, grace_s: float) -> None:
        self.manager = manager
        self.store = store
        self.spec = spec
        self._grace_ns = round(grace_s * 1e9)
        self.backend: Final = backend_of(manager)
        """The store or cluster that it is in."""
        self._group = f"{GROUP}.{store}"
        self._late: set[str] = set()
        """Names with dropped ledgers that could not be deleted yet."""
        with _IN_USE_LOCK:
            self._in_use = _IN_USE.setdefault(self.backend, _InUse())

    # ---- records -------------------------------------------------------------------------------------------------

    def _decode(self, name: str, value: bytes) -> BlobRecord:
        return BlobRecord.decode(value, where=f"the record of blob {name!r} in {self.store!r}")

    def record_name(self, name: str) -> str:
        """Return the name of the named record of a blob's name."""
        return f"{self._group}/{name}"

    def read(self, name: str) -> BlobRecord:
        """Return the record of a name, empty if there is none."""
        return self._found(name)[0]

    def _found(self, name: str) -> tuple[BlobRecord, int | None]:
        """Return the record of a name, and its version in the backend, None if there is none."""
        found = self.backend.read_record(self.record_name(name))
        return (BlobRecord(name), None) if found is None else (self._decode(name, found.value), found.version)

    def records(self, prefix: str = "") -> Iterator[BlobRecord]:
        """Yield the records of names that begin with ``prefix``, by name."""
        for each in self.backend.records(f"{self._group}/{prefix}"):
            yield self._decode(each.name, each.value)

    def update(self, name: str, change: Callable[[BlobRecord], BlobRecord]) -> BlobRecord:
        """Write the record that ``change`` returns; a change that is applied twice must have the same result as once.

        Returns:
            The record, in which the change has taken effect.

        Raises:
            MetadataUnreachableError: With ``outcome_unknown`` the change may have been made, or may be yet.
        """
        unknown = False
        while True:
            record, version = self._found(name)
            try:
                changed = change(record)
            except BlobError as error:
                error.outcome_unknown = unknown
                raise
            if changed.is_empty if version is None else changed == record and not changed.is_empty:
                return changed
            try:
                value = None if changed.is_empty else changed.encode()
                self.backend.write_record(self.record_name(name), value, version)
            except VersionConflictError as error:  # read it again, and decide anew
                unknown = unknown or error.outcome_unknown
            else:
                return changed

    def version(self, name: str, number: int | None = None) -> BlobVersion:
        """Return a version of a name, the newest for None; NoSuchBlobError if it does not exist."""
        if number is not None:
            number = whole_from(number, 1, "version", "the number of a version")
        versions = self.read(name).versions
        for each in reversed(versions):
            if number is None or each.number == number:
                return each
        kept = f"; kept are {', '.join(str(each.number) for each in versions)}" if versions else ""
        which = "" if number is None else f"version {number} of "
        raise NoSuchBlobError(f"{which}blob {name!r} does not exist in {self.store!r}{kept}")

    # ---- uploads -------------------------------------------------------------------------------------------------

    def begin(self, name: str) -> tuple[LedgerWriter, Reference]:
        """Create the ledger of an upload, and name it in the record (rule B1)."""
        token = new_token()
        self._in_use.uploads.add(token)
        try:
            self.check_password(self.read(name))
            description = {"store": self.store, "name": name, "token": token}
            writer = self.spec.create(self.manager, {BLOB_KEY: encode_json(description)})
            reference = Reference(token, writer.ledger_id, "", time.time_ns())
            try:
                self.update(name, lambda record: record.reserved(reference))
            except PybkError as error:
                if not error.outcome_unknown:
                    self._delete_ledger(writer.ledger_id)
                raise
        except BaseException:
            self._in_use.uploads.discard(token)
            raise
        return writer, reference

    def publish(self, name: str, version: BlobVersion, keep: int, check: Callable[[BlobRecord], object]) -> BlobVersion:
        """Make an upload or a copy the newest version of its name (rule B2).

        Args:
            name: The name.
            version: The version that is published.
            keep: The number of versions to keep.
            check: Raises if it must not be published on top of the record that it is given.

        Raises:
            BlobGivenUpError: The upload was given up.
        """
        record = self.update(name, lambda record: record.published(version, keep, check))
        return self.published(name, record, version)

    def proposed(
        self, name: str, version: BlobVersion, keep: int, check: Callable[[BlobRecord], object]
    ) -> tuple[NamedChange, BlobRecord]:
        """Return the change of a named record that ``publish`` would make, and the changed record; for a group."""
        record, record_version = self._found(name)
        changed = record.published(version, keep, check)
        return NamedChange(self.record_name(name), record_version, changed.encode()), changed

    def published(self, name: str, record: BlobRecord, version: BlobVersion) -> BlobVersion:
        """Note that a version is published; return it with its number."""
        token = version.reference.token
        self._in_use.uploads.discard(token)
        self.clean(name)
        return next(each for each in record.versions if each.reference.token == token)

    def give_up(self, name: str, token: str) -> None:
        """Give up an upload (rule B5), and delete its ledger if that works now."""
        self.abandon(name, token)
        self.update(name, lambda record: record.given_up([token], 0))
        self._in_use.abandoned.discard(token)
        self.clean(name)

    def abandon(self, name: str, token: str) -> None:
        """Leave an upload to be given up later. A finaliser may call this."""
        self._in_use.abandoned.add(token)
        self._in_use.uploads.discard(token)
        self._late.add(name)

    def copy(
        self, source: str, version: BlobVersion, name: str, keep: int, check: Callable[[BlobRecord], object]
    ) -> BlobVersion:
        """Publish a version under another name; both names refer to its ledger, which its home holds (rule B3).

        Args:
            source: The name that has the version.
            version: The version.
            name: The other name.
            keep: As for ``publish``.
            check: As for ``publish``.

        Raises:
            NoSuchBlobError: The version was dropped meanwhile.
            BlobGivenUpError: The copy was given up.
        """
        home = version.reference.home or source
        reference = Reference(new_token(), version.reference.ledger_id, home, time.time_ns())
        hold = Hold(reference.ledger_id, reference.token, name)
        self._in_use.uploads.add(reference.token)

        def held(record: BlobRecord) -> BlobRecord:
            changed = record.held(hold)
            if changed is None:
                raise NoSuchBlobError(f"version {version.number} of blob {source!r} was replaced or deleted")
            return changed

        try:
            self.update(name, lambda record: record.reserved(reference))
            self.update(home, held)
            return self.publish(name, version._replace(reference=reference, created_ns=time.time_ns()), keep, check)
        except PybkError as error:
            if not error.outcome_unknown:
                self._let_go(name, reference)
            raise

    def _let_go(self, name: str, reference: Reference) -> None:
        """Give up a copy that is not published, even if a sweep gave it up before it held its ledger."""
        with suppress(PybkError):  # a later change of the name, or a sweep, does it
            self.give_up(name, reference.token)
            self.update(reference.home, partial(BlobRecord.released, token=reference.token))
            self.clean(reference.home)

    def drop(self, name: str, number: int) -> None:
        """Drop the versions of a name up to a number."""
        now_ns = time.time_ns()
        self.update(name, lambda record: record.without(number, now_ns))
        self.clean(name)

    # ---- ledgers -------------------------------------------------------------------------------------------------

    def check_password(self, record: BlobRecord) -> None:
        """Raise UnauthorizedError if the password is not that of a name's newest blob."""
        if record.latest is not None:
            ledger_id = record.latest.reference.ledger_id
            with suppress(NoSuchLedgerError):
                if not self.spec.opens(self.manager, ledger_id):
                    raise self._unauthorized(record.name, ledger_id)

    def _unauthorized(self, name: str, ledger_id: int) -> UnauthorizedError:
        """Return the error for a password that is not that of a blob's ledger."""
        return wrong_password(self.manager, ledger_id, f"blob {name!r}", self.spec.given)

    def open_ledger(self, name: str, ledger_id: int, key: object) -> LedgerReader:
        """Open the ledger of a blob for reading; this process does not delete it until ``close_ledger(key)``.

        That is to be called if this raises, too.

        Raises:
            NoSuchLedgerError: It was deleted.
            UnauthorizedError: The password is not the blob's.
        """
        with self._in_use.lock:
            if ledger_id in self._in_use.dying:
                raise NoSuchLedgerError(f"ledger {ledger_id} is being deleted")
            self._in_use.readers[key] = ledger_id
        try:
            return self.spec.open_ledger(self.manager, ledger_id, recover=False)
        except UnauthorizedError as error:
            raise self._unauthorized(name, ledger_id) from error

    def close_ledger(self, key: object) -> None:
        """Release a ledger that was opened for reading. A finaliser may call this."""
        self._in_use.readers.pop(key, None)

    def is_deleted(self, ledger_id: int) -> bool:
        """Return whether a ledger is known to be deleted."""
        try:
            self.manager.ledger_metadata(ledger_id)
        except PybkError as error:
            return isinstance(error, NoSuchLedgerError)
        return False

    def _delete_ledger(self, ledger_id: int) -> bool:
        """Delete a ledger that no record refers to, unless it is being read here; returns whether it is gone."""
        in_use = self._in_use
        with in_use.lock:
            if in_use.is_read(ledger_id) or ledger_id in in_use.dying:
                return False
            in_use.dying.add(ledger_id)
        try:
            return self.spec.delete_ledger(self.manager, ledger_id, f"blob store {self.store!r}")
        finally:
            with in_use.lock:
                in_use.dying.discard(ledger_id)

    # ---- cleaning ------------------------------------------------------------------------------------------------

    def clean(self, name: str) -> None:
        """Delete the ledgers that a name has dropped, if their grace is over, and those of earlier failed deletions.

        A failure is logged, and the deletion is left for later, because the caller's change was made.
        """
        self._late.add(name)
        self.clean_late()

    def clean_late(self) -> None:
        """Clean all names with ledgers that could not be deleted before; a forked child leaves that to its parent."""
        for each in () if self.backend.forked else tuple(self._late):
            try:
                self.clean_name(each)
            except PybkError as error:
                logger.warning("blob store %r: blob %r could not be cleaned up: %s", self.store, each, error)

    def clean_name(self, name: str, before_ns: int = 0) -> int:
        """Delete or release the ledgers that one name has dropped, if their grace is over.

        Args:
            name: The name.
            before_ns: Also give up uploads of other processes that were begun before this time.

        Returns:
            The number of ledgers that were deleted.
        """
        self._late.discard(name)  # before the record is read: what others note from here on stays noted
        left = True
        try:
            deleted, others, left = self._clean_name(name, before_ns)
            return deleted + sum(map(self.clean_name, others))
        finally:
            if left:
                self._late.add(name)

    def _clean_name(self, name: str, before_ns: int) -> tuple[int, set[str], bool]:
        """Clean a name; returns how many ledgers were deleted, homes to clean, and whether something is left."""
        record = self.read(name)
        dead = [each.token for each in record.uploads if self._is_dead(each, before_ns)]
        if dead:
            record = self.update(name, lambda found: found.given_up(dead, 0))
        due = time.time_ns() - self._grace_ns
        deleted: set[int] = set()
        gone: list[str] = []
        others: set[str] = set()
        for each in record.dropped:
            if each.since_ns > due or (each.home and self._in_use.is_read(each.ledger_id)):
                continue
            if each.home:
                self.update(each.home, partial(BlobRecord.released, token=each.token))
                others.add(each.home)
                gone.append(each.token)
            elif each.ledger_id in deleted:
                gone.append(each.token)
            elif not record.is_held(each.ledger_id) and self._delete_ledger(each.ledger_id):
                deleted.add(each.ledger_id)
                gone.append(each.token)
        if gone:
            record = self.update(name, lambda found: found.forgotten(gone))
        left = any(each.home or not record.is_held(each.ledger_id) for each in record.dropped)
        return len(deleted), others, left

    def sweep(self, before_ns: int) -> int:
        """Clean all names, and delete ledgers that no name will ever refer to.

        Args:
            before_ns: Give up uploads of other processes that were begun before this time, nanoseconds since 1970.

        Returns:
            The number of ledgers that were deleted.
        """
        deleted = 0
        for record in list(self.records()):
            for each in record.holds:
                if not self._has_reference(each.name, each.token):
                    self.update(record.name, partial(BlobRecord.released, token=each.token))
            deleted += self.clean_name(record.name, before_ns)
        for summary in self.manager.ledgers(ledger_type=self.spec.ledger_type):
            description = summary.metadata.custom_metadata.get(BLOB_KEY)
            if description is not None:
                deleted += self._sweep_ledger(summary.metadata, description, before_ns)
        return deleted

    def _has_reference(self, name: str, token: str) -> bool:
        """Return whether a name refers to a ledger by a token, or may yet: it is named there first (rule B3)."""
        return any(each.token == token for each in self.read(name).references)

    def _sweep_ledger(self, metadata: LedgerMetadata, description: bytes, before_ns: int) -> bool:
        """Delete a ledger unless its home names it or may do so yet (rule B6); returns whether it is gone."""
        where = f"the custom metadata {BLOB_KEY} of ledger {metadata.ledger_id}"
        store, name, token = decode_json(description, itemgetter("store", "name", "token"), where=where)
        upload = Reference(token, metadata.ledger_id, "", metadata.creation_time_ns)
        if store != self.store or metadata.ledger_id in self.read(name).owned or not self._is_dead(upload, before_ns):
            return False
        try:
            self.spec.open_ledger(self.manager, metadata.ledger_id, recover=True).close()
        except NoSuchLedgerError:
            return True
        return metadata.ledger_id not in self.read(name).owned and self._delete_ledger(metadata.ledger_id)

    def _is_dead(self, upload: Reference, before_ns: int) -> bool:
        """Return whether no process, as far as this one knows, will publish an upload."""
        in_use = self._in_use
        if upload.token in in_use.uploads:
            return False
        return upload.token in in_use.abandoned or self.backend.single_writer or upload.since_ns < before_ns

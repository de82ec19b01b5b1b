"""All errors of pybk, as one tree of classes.

Each error answers three questions: whether the operation may have taken effect (``outcome_unknown``), whether a retry
may succeed (``retryable``), and what the cause is (the class). ``code`` is BookKeeper's code for the error; an error
that BookKeeper does not have inherits the code of its base class.

Docstrings end with the columns of ``docs/reference/errors.md``: "Outcome" if the operation may have taken effect in
some cases only, "Retry" if it needs more words than ``retryable``, and "Remedy", the action for the caller.
"""

from __future__ import annotations

from copy import copy
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from typing import Any


class PybkError(Exception):
    """Base class of all errors that pybk raises on purpose.

    Args:
        message: The cause, with the values, the limit and the remedy.
        outcome_unknown: Overrides the class attribute for this one error; None keeps it.

    Attributes:
        code: BookKeeper's error code.
        outcome_unknown: The operation may have taken effect although it raised. Appends that are under way when a
            cluster's writer fails have it set, whatever the class.
        retryable: The same call may succeed later, once its cause is over, without any other action of the caller.
    """

    code: int = -999
    outcome_unknown: bool = False
    retryable: bool = False

    def __init__(self, message: str = "", *, outcome_unknown: bool | None = None) -> None:
        super().__init__(message)
        if outcome_unknown is not None:
            self.outcome_unknown = outcome_unknown

    def __reduce__(self) -> tuple[object, ...]:
        """Return what a copy is made of: not the arguments of the class, which may be more than the message."""
        return _restored, (type(self), self.args), self.__dict__


class UsageError(PybkError, ValueError):
    """An argument or a call is invalid and can never succeed; raised before any effect.

    Remedy: Correct the call; the message names the value, and what is accepted.
    """

    code = -14


class NoSuchBookieError(UsageError):
    """No bookie of the cluster has this name.

    Remedy: Take one of the names that ``ClusterAdmin.bookies`` or ``pybk bookie list`` shows.
    """


class ClosedError(PybkError):
    """The manager or reader was closed; a closed writer raises LedgerClosedError.

    Outcome: No. Appends that a close interrupted have ``outcome_unknown`` set.
    Remedy: Open the manager or the reader again.
    """

    code = -19


class IllegalOperationError(PybkError):
    """This kind of ledger, handle or manager does not support the operation, or does not in its present state.

    Remedy: Do what the message says; often another kind of handle or manager is needed, or an upgrade.
    """

    code = -100


class SafetyCheckError(IllegalOperationError):
    """A change of the cluster was refused, because it could endanger entries; nothing was changed.

    Args:
        message: The refused change, with all failures and the remedy.
        failures: The checks that failed, a sentence each.
        passing: Whether all of them usually pass by themselves within a minute.
        outcome_unknown: As in PybkError.

    Retry: Only if ``passing`` is true, which sets ``retryable``: then the checks in ``failures`` pass by themselves.
    Remedy: Call with ``wait_s`` if ``passing`` is true. Otherwise wait until repairs are done, or mend what
        ``failures`` names, and call again.
    """

    def __init__(
        self,
        message: str = "",
        *,
        failures: tuple[str, ...] = (),
        passing: bool = False,
        outcome_unknown: bool | None = None,
    ) -> None:
        super().__init__(message, outcome_unknown=outcome_unknown)
        self.failures = failures
        self.passing = self.retryable = passing


class ForkedProcessError(IllegalOperationError):
    """This process was forked from the one that opened the manager; open another manager in this process.

    Remedy: Open a manager in this process, or start processes by spawn instead of fork.
    """


class LedgerError(PybkError):
    """Base class of errors about a ledger as a whole."""


class NoSuchLedgerError(LedgerError):
    """The ledger was never created, or it was deleted.

    Remedy: Check the id, and that the manager is that of the right store or cluster.
    """

    code = -7


class LedgerDeletedError(NoSuchLedgerError):
    """The metadata store records that the ledger was deleted; its id is never assigned again.

    Remedy: Drop references to the ledger; a backup of it can be restored under a new id.
    """


class LedgerExistsError(LedgerError):
    """A ledger with this id already exists, or existed.

    Remedy: Take another ``ledger_id``, or None to be given one.
    """

    code = -20


class LedgerClosedError(LedgerError):
    """The ledger is closed and accepts no more entries.

    Remedy: Create another ledger to append more.
    """

    code = -11


class LedgerFencedError(LedgerError):
    """Another client opened the ledger with recovery, which fenced the ledger, so this writer cannot append any more.

    The recovery may or may not have kept the entries that were being appended; handle the error like a timeout. Appends
    that are made afterwards are refused, with ``outcome_unknown`` False.

    Remedy: Stop writing, because the ledger has another owner. To find out which entries were kept, open the ledger and
        read its end.
    """

    code = -101
    outcome_unknown = True


class LedgerRecoveryError(LedgerError):
    """Recovery could not find the end of a ledger that was not closed.

    Outcome: The ledger may be fenced, and is not closed. ``outcome_unknown`` is set if the recovery was interrupted.
    Retry: Yes, once more of the ledger's bookies run.
    Remedy: Start the bookies that are missing, and open the ledger with ``recover=True`` again.
    """

    code = -10
    retryable = True


class OwnerNeededError(LedgerRecoveryError):
    """A recovery without the password met a question that only the password can decide; open the ledger with it.

    Retry: No; with the password, yes.
    Remedy: Open the ledger with its password and ``recover=True``.
    """

    retryable = False


class LedgerUnsealedError(LedgerError):
    """The caller requires a sealed ledger, but this one is open or was closed without a seal.

    Remedy: Close the ledger, or check and seal it with ``LedgerManager.reseal``; or do not require a seal.
    """


class EntryError(PybkError):
    """Base class of errors about entries of a ledger."""


class NoSuchEntryError(EntryError):
    """The ledger certainly does not have this entry.

    Remedy: Read entries up to the last add confirmed.
    """

    code = -13


class ReadRangeError(EntryError):
    """The range to read does not lie between 0 and the last add confirmed.

    Retry: No; a ledger that is open can be asked for its last add confirmed again, which may have reached the range.
    Remedy: Read up to ``last_add_confirmed``, or follow the ledger.
    """

    code = -1


class EntryUnknownError(EntryError):
    """It is unknown whether the entry exists: too few bookies answered, or one of them may have lost the entry.

    Retry: Yes, once more bookies run.
    Remedy: Start the bookies that are missing, and read again.
    """

    code = -108
    retryable = True


class DuplicateEntryError(EntryError):
    """An entry with this id was appended before.

    Outcome: No. The entry that was appended before is unchanged.
    Remedy: Append the next id; read the entry if its origin is in doubt.
    """

    code = -22


class DigestMismatchError(EntryError):
    """The digest of an entry does not match: the key is wrong, or the entry was changed or belongs to another place.

    Remedy: Check the password. If it is right, have the copy repaired, or restore the entry from a backup.
    """

    code = -5


class NotEnoughBookiesError(PybkError):
    """Too few bookies are available for the operation; acknowledged entries are not lost.

    An append raises it after the writer has waited ``bookie_patience_seconds`` for bookies. The writer of a ledger has
    ended then, so ``retryable`` is False.

    Outcome: No. Appends that were under way have ``outcome_unknown`` set.
    Retry: Yes, once enough bookies run; for appends to a ledger, no.
    Remedy: Start bookies, or free space on them. After a failed append to a ledger, open it with ``recover=True`` to
        find its end, and continue in another ledger.
    """

    code = -6
    retryable = True


class UnauthorizedError(PybkError):
    """The password is not that of the ledger.

    Remedy: Give the password with which the ledger was created.
    """

    code = -102


class TooManyRequestsError(PybkError):
    """A limit is reached, such as the one on outstanding bytes; wait until some of the outstanding work is done.

    Remedy: Wait for some of the futures, and call again; or raise the limit that the message names.
    """

    code = -105
    retryable = True


class AppendTimeoutError(PybkError, TimeoutError):
    """An append was not durable in time; it continues and may still succeed.

    Retry: No: a repeated append would be a second entry.
    Remedy: Wait for the same future again, or read the ledger to see whether the entry is there.
    """

    code = -23
    outcome_unknown = True


class OutOfMemoryError(PybkError, MemoryError):
    """The call needs more memory than is free; it changed nothing and can be repeated.

    Retry: Yes, once memory is free.
    Remedy: Free memory, or raise the limit of the process.
    """

    retryable = True


class VersionConflictError(PybkError):
    """Another client changed the record meanwhile; ``version`` is its present version, None if it does not exist.

    Outcome: No, unless ``outcome_unknown`` is set: then the change may have been made, and replaced since.
    Retry: No; with the version that the record has now, yes.
    Remedy: Read the record, decide again, and change it with its present version.
    """

    def __init__(self, message: str, *, version: int | None = None, outcome_unknown: bool | None = None) -> None:
        super().__init__(message, outcome_unknown=outcome_unknown)
        self.version = version


class StorageError(PybkError):
    """Base class of errors about the disks of this store.

    Remedy: Look at the device that the message names, and at the kernel's log.
    """


class CorruptError(StorageError):
    """Bytes on disk are missing, or differ from those that were written.

    Args:
        message: The found and the expected values, and the remedy.
        path: The file; None if the error is not about one file.
        offset: The offset in the file, in bytes; None if it is not known.
        outcome_unknown: As in PybkError.

    Remedy: Run ``pybk store verify``. Restore the file from a backup; of a bookie, have its copies repaired.
    """

    def __init__(
        self,
        message: str = "",
        *,
        path: str | None = None,
        offset: int | None = None,
        outcome_unknown: bool | None = None,
    ) -> None:
        super().__init__(message, outcome_unknown=outcome_unknown)
        self.path = path
        self.offset = offset


class SealMismatchError(CorruptError):
    """A ledger's recorded kind or end differs from the one that its seal proves, so it was changed after sealing.

    Remedy: Find out who changed the metadata, and restore them from an export or a backup.
    """


class UnsupportedFormatError(StorageError):
    """The bytes are intact, but have a format that this version does not read.

    Remedy: Install the version of pybk that the message asks for.
    """


class StorageRefusedError(StorageError):
    """The storage refused a call, which changed nothing: descriptors, memory, threads or space ran out.

    The store continues to serve, and the call can be repeated.

    Retry: Yes, once more of the resource is free.
    Remedy: Free what the message names, or raise its limit.
    """

    retryable = True


class StorageFullError(StorageRefusedError):
    """A tier is short of space. Ledgers can still be deleted; appends succeed again once space is free.

    Retry: Yes, once space is free; the store need not be opened again.
    Remedy: Free space on the device, or delete ledgers.
    """

    code = -104


class StorageFailedError(StorageError):
    """A write or a sync failed, now or earlier; the store refuses appends until it is closed and opened again.

    ``outcome_unknown`` is False for appends that are made after that.

    Retry: No: close the store and open it again first, which finds out which entries are durable.
    Remedy: Close the store, mend the device, open the store again, and look for the entries.
    """

    outcome_unknown = True


class StoreLockedError(StorageError):
    """Another manager holds the lock of the directory.

    Args:
        message: The directory, and the process that holds its lock.
        pid: The id of that process; None if it is not known.
        outcome_unknown: As in PybkError.

    Retry: Yes, once the other process has closed it.
    Remedy: End the process ``pid``, or open with ``read_only=True``.
    """

    retryable = True

    def __init__(self, message: str = "", *, pid: int | None = None, outcome_unknown: bool | None = None) -> None:
        super().__init__(message, outcome_unknown=outcome_unknown)
        self.pid = pid


class CookieError(StorageError):
    """The directory is not the expected one: it is empty, was moved or copied, or belongs to another store.

    Remedy: Check the path and the mounts; the message names the expected store.
    """


class MetadataError(PybkError):
    """Base class of errors about the metadata store, or about its contents.

    Remedy: Check the URL, and that the first bookie of the cluster was started.
    """

    code = -18


class MetadataUnreachableError(MetadataError):
    """The metadata store did not answer in time, or the connection to it was lost.

    ``outcome_unknown`` is set if the request may have taken effect, or may still do so.

    Outcome: No, unless ``outcome_unknown`` is set: then the request may have taken effect, or may still do so.
    Remedy: Check that the metadata store runs, and call again; look first if ``outcome_unknown`` is set.
    """

    retryable = True


class MetadataVersionError(MetadataError):
    """A compare-and-set found another version than the expected one, or no value; read again.

    ``outcome_unknown`` is set if an earlier answer was lost: the change may have been made, and overwritten since.

    Outcome: No, unless ``outcome_unknown`` is set: then the change may have been made, and replaced since.
    Retry: No; with the version that the value has now, yes.
    Remedy: Read the value again, and decide again.
    """

    code = -17


class MetadataExistsError(MetadataError):
    """The key already exists in the metadata store.

    Outcome: No, unless ``outcome_unknown`` is set.
    Remedy: Use the value that exists, or choose another name.
    """


class MetadataForgedError(MetadataError):
    """A value in the metadata store was not written with the cluster secret that this process uses.

    Remedy: Give the secret of the cluster. If it is right, find out who can write to the metadata store.
    """


class MetadataOutdatedError(MetadataError):
    """The metadata store was put back to an older state, or emptied; the message names the remedies.

    Remedy: Restore or rebuild the metadata; see docs/admin/restoring.md.
    """


class LogError(PybkError):
    """Base class of errors about a log as a whole: its ledgers, its writer or its readers."""


class NoSuchLogError(LogError):
    """The log was never created, or it was deleted.

    Remedy: Check the name, or create the log.
    """

    code = -7


class LogFencedError(LogError):
    """Another writer took the log over; unacknowledged records of this writer may be in the log or not.

    Later calls of this writer are refused, with ``outcome_unknown`` False.

    Remedy: Stop writing. If this process should have the log, open it again, and look for the records.
    """

    code = -101
    outcome_unknown = True


class LogLockedError(LogError):
    """A live writer has the log.

    Retry: Yes, once that writer has closed, or has died.
    Remedy: Wait for the writer that the message names, or end it.
    """

    retryable = True


class LogExistsError(LogError):
    """A log with this name exists; nothing was changed.

    Remedy: Open the log, or choose another name.
    """

    code = -20


class OutOfOrderError(LogError, UsageError):
    """A transaction id is below that of an earlier record; nothing was appended.

    Attributes:
        txid: The id that was refused.
        last: The highest id so far.

    Remedy: Give ids that never decrease, or open the writer with ``ordered_txids=False``.
    """

    code = UsageError.code

    def __init__(
        self, message: str = "", *, txid: int = -1, last: int = -1, outcome_unknown: bool | None = None
    ) -> None:
        super().__init__(message, outcome_unknown=outcome_unknown)
        self.txid = txid
        self.last = last


class LogSealedError(LogError):
    """The log has ended for good, so it takes no more records.

    Remedy: Write to another log.
    """

    code = -11


class TruncatedError(LogError):
    """The record was dropped.

    Attributes:
        first_seq: The first record that was kept; -1 if it is not known.

    Remedy: Continue with the record ``first_seq``; a snapshot has the earlier records, if the application made one.
    """

    code = -13

    def __init__(self, message: str = "", *, first_seq: int = -1, outcome_unknown: bool | None = None) -> None:
        super().__init__(message, outcome_unknown=outcome_unknown)
        self.first_seq = first_seq


class TruncateGuardError(LogError, UsageError):
    """The call would drop records that a checkpoint or a subscription needs; nothing was dropped.

    Remedy: Make a checkpoint first, or let the subscriptions acknowledge the records; the message names them.
    """

    code = UsageError.code


class RewoundError(TruncatedError):
    """The log was cut before this reader's position, so it has read void records; read again from ``seq`` + 1.

    Attributes:
        seq: The last record that was kept.

    Remedy: Drop the records after ``seq``, and read again from ``seq`` + 1.
    """

    def __init__(self, message: str = "", *, seq: int = -1, outcome_unknown: bool | None = None) -> None:
        super().__init__(message, outcome_unknown=outcome_unknown)
        self.seq = seq


class BlobError(PybkError):
    """Base class of errors about a blob as a whole: its name, its versions or its upload."""


class NoSuchBlobError(BlobError, FileNotFoundError):
    """The blob, or this version of it, was never published, or it was replaced or deleted.

    Remedy: Check the name; open the blob again if it was replaced while it was read.
    """

    code = -7


class BlobExistsError(BlobError, FileExistsError):
    """A blob of this name exists, and the call did not allow replacing it.

    Remedy: Put it with ``overwrite=True``, or choose another name.
    """

    code = -20


class BlobLockedError(BlobError):
    """Another caller saves or prunes the snapshots of this name.

    Remedy: Call again when the other caller is done.
    """

    retryable = True


class BlobGivenUpError(BlobError):
    """The upload cannot be published any more; nothing was changed, and the blob can be put again.

    Retry: Yes, as a new upload.
    Remedy: Put the blob again.
    """


def without_frames(error: PybkError) -> PybkError:
    """Return a copy of an error, with copies of its causes, that refers to no frames.

    An object that keeps an error, to raise it later, keeps such a copy, and raises a copy of that each time. An
    exception refers to the frames through which it passed, and each frame to its variables and to its caller. So a
    store that kept the exception itself would keep the variables of all callers, among them its own manager, which
    could then not be dropped. Two threads that raised one exception would also mix their tracebacks. The causes are
    copied, too, because the caller that raised one may still show its traceback.
    """
    free: PybkError = _copied(error)
    seen = {id(error)}
    last: BaseException = free
    cause = error.__cause__
    while cause is not None and id(cause) not in seen:
        seen.add(id(cause))
        copied = last.__cause__ = _copied(cause)
        last, cause = copied, cause.__cause__
    return free


def _copied(error: BaseException) -> Any:
    """Return a copy of an exception without its traceback, cause and context."""
    try:
        free = copy(error)
    except Exception:  # noqa: BLE001  # its class takes other arguments than it passed on
        free = _restored(type(error), error.args)
        free.__dict__.update(error.__dict__)
    if "__notes__" in free.__dict__:
        free.__notes__ = list(free.__notes__)
    return free


def _restored(kind: type[BaseException], arguments: tuple[object, ...]) -> Any:
    """Return an exception with the arguments that one of its class passed on, and without a call of its class."""
    base: Any = kind
    while base.__module__ != "builtins":
        base = base.__base__  # Python takes no other one for classes with two of its errors among their bases
    made = base.__new__(kind, *arguments)
    made.args = arguments  # those of an OSError whose class has its own __init__ are not set yet
    return made


def not_done(error: PybkError) -> PybkError:
    """Return the error of a call that was refused because of an earlier error, and so did nothing."""
    refused = without_frames(error)
    if refused.outcome_unknown:
        refused.outcome_unknown = False
    return refused

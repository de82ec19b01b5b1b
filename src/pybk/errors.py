"""All errors of pybk, as one tree of classes.

Each error answers three questions: whether the operation may have taken effect (``outcome_unknown``), whether a retry
may succeed (``retryable``), and what the cause is (the class). ``code`` is BookKeeper's code for the error; an error
that BookKeeper does not have inherits the code of its base class.
"""

from __future__ import annotations


class PybkError(Exception):
    """Base class of all errors that pybk raises on purpose.

    Args:
        message: The cause, with the values, the limit and the remedy.
        outcome_unknown: Overrides the class attribute for this one error; None keeps it.

    Attributes:
        code: BookKeeper's error code.
        outcome_unknown: The operation may have taken effect although it raised.
        retryable: The same call may succeed later without any other action.
    """

    code: int = -999
    outcome_unknown: bool = False
    retryable: bool = False

    def __init__(self, message: str = "", *, outcome_unknown: bool | None = None) -> None:
        super().__init__(message)
        if outcome_unknown is not None:
            self.outcome_unknown = outcome_unknown


class UsageError(PybkError, ValueError):
    """An argument or a call is invalid and can never succeed; raised before any effect."""

    code = -14


class NoSuchBookieError(UsageError):
    """No bookie of the cluster has this name."""


class ClosedError(PybkError):
    """The manager or reader was closed; a closed writer raises LedgerClosedError."""

    code = -19


class IllegalOperationError(PybkError):
    """This kind of ledger, handle or manager does not support the operation, or not in its present state."""

    code = -100


class SafetyCheckError(IllegalOperationError):
    """A change of the cluster was refused, because it could endanger entries; nothing was changed.

    Args:
        message: What was refused, with all failures and the remedy.
        failures: The checks that failed, a sentence each.
        outcome_unknown: As in PybkError.
    """

    def __init__(
        self, message: str = "", *, failures: tuple[str, ...] = (), outcome_unknown: bool | None = None
    ) -> None:
        super().__init__(message, outcome_unknown=outcome_unknown)
        self.failures = failures


class ForkedProcessError(IllegalOperationError):
    """This process was forked from the one that opened the manager; open another manager here."""


class LedgerError(PybkError):
    """Base class of errors about a ledger as a whole."""


class NoSuchLedgerError(LedgerError):
    """The ledger was never created, or it was deleted."""

    code = -7


class LedgerDeletedError(NoSuchLedgerError):
    """The metadata store records that the ledger was deleted; its id is never assigned again."""


class LedgerExistsError(LedgerError):
    """A ledger with this id already exists, or existed."""

    code = -20


class LedgerClosedError(LedgerError):
    """The ledger is closed and accepts no more entries."""

    code = -11


class LedgerFencedError(LedgerError):
    """Another client opened the ledger with recovery, which fenced the ledger, so this writer cannot append any more.

    The recovery may or may not have kept the entries that were being appended; handle the error like a timeout.
    """

    code = -101
    outcome_unknown = True


class LedgerRecoveryError(LedgerError):
    """Recovery could not find the end of a ledger that was not closed."""

    code = -10


class OwnerNeededError(LedgerRecoveryError):
    """A recovery without the password found what only the password can decide: open the ledger with it."""


class LedgerUnsealedError(LedgerError):
    """The caller requires a sealed ledger, but this one is open or was closed without a seal."""


class EntryError(PybkError):
    """Base class of errors about entries of a ledger."""


class NoSuchEntryError(EntryError):
    """The ledger certainly does not have this entry."""

    code = -13


class ReadRangeError(EntryError):
    """The range to read does not lie between 0 and the last add confirmed."""

    code = -1


class EntryUnknownError(EntryError):
    """Whether the entry exists is not known now: too few bookies answered, or one of them may have lost the entry."""

    code = -108


class DuplicateEntryError(EntryError):
    """An entry with this id was appended before."""

    code = -22


class DigestMismatchError(EntryError):
    """The digest of an entry does not match: the key is wrong, or the entry was changed or belongs to another place."""

    code = -5


class NotEnoughBookiesError(PybkError):
    """Too few bookies are available for the operation; acknowledged entries are not lost."""

    code = -6
    retryable = True


class UnauthorizedError(PybkError):
    """The password is not that of the ledger."""

    code = -102


class TooManyRequestsError(PybkError):
    """A limit is reached, such as the one on outstanding bytes; wait until some of the outstanding work is done."""

    code = -105
    retryable = True


class AppendTimeoutError(PybkError, TimeoutError):
    """An append was not durable in time; it continues and may still succeed."""

    code = -23
    outcome_unknown = True


class OutOfMemoryError(PybkError, MemoryError):
    """There is not enough memory for the call, which changed nothing and can be repeated."""


class VersionConflictError(PybkError):
    """Another client changed the record meanwhile; ``version`` is its present version, None if it does not exist."""

    def __init__(self, message: str, *, version: int | None = None, outcome_unknown: bool | None = None) -> None:
        super().__init__(message, outcome_unknown=outcome_unknown)
        self.version = version


class StorageError(PybkError):
    """Base class of errors about the disks of this store."""


class CorruptError(StorageError):
    """Bytes on disk are missing, or differ from those that were written.

    Args:
        message: The found and the expected values, and the remedy.
        path: The file; None if the error is not about one file.
        offset: The offset in the file, in bytes; None if it is not known.
        outcome_unknown: As in PybkError.
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
    """A ledger's recorded kind or end differs from the one that its seal proves, so it was changed after sealing."""


class UnsupportedFormatError(StorageError):
    """The bytes are intact, but have a format that this version does not read."""


class StorageRefusedError(StorageError):
    """The storage refused a call, which changed nothing: descriptors, memory, threads or space ran out.

    The store continues to serve, and the call can be repeated.
    """

    retryable = True


class StorageFullError(StorageRefusedError):
    """A tier is short of space. Ledgers can still be deleted; appends succeed again once there is space."""

    code = -104


class StorageFailedError(StorageError):
    """A write or a sync failed, now or earlier; the store refuses appends until it is closed and opened again."""

    outcome_unknown = True


class StoreLockedError(StorageError):
    """Another manager holds the lock of the directory.

    Args:
        message: The directory, and the process that holds its lock.
        pid: The id of that process; None if it is not known.
        outcome_unknown: As in PybkError.
    """

    def __init__(self, message: str = "", *, pid: int | None = None, outcome_unknown: bool | None = None) -> None:
        super().__init__(message, outcome_unknown=outcome_unknown)
        self.pid = pid


class CookieError(StorageError):
    """The directory is not the expected one: it is empty, was moved or copied, or belongs to another store."""


class MetadataError(PybkError):
    """Base class of errors about the metadata store, or about its contents."""

    code = -18


class MetadataUnreachableError(MetadataError):
    """The metadata store did not answer in time, or the connection to it was lost.

    ``outcome_unknown`` is set if the request may have taken effect, or may still do so.
    """

    retryable = True


class MetadataVersionError(MetadataError):
    """A compare-and-set found another version than the expected one, or no value; read again.

    ``outcome_unknown`` is set if an earlier answer was lost: the change may have been made, and overwritten since.
    """

    code = -17


class MetadataExistsError(MetadataError):
    """The key already exists in the metadata store."""


class MetadataForgedError(MetadataError):
    """A value in the metadata store was not written with the cluster secret that this process uses."""


class MetadataOutdatedError(MetadataError):
    """The metadata store was put back to an older state, or emptied; the message says what to do about it."""


class LogError(PybkError):
    """Something about a log as a whole: its ledgers, its writer or its readers."""


class NoSuchLogError(LogError):
    """The log was never created, or it was deleted."""

    code = -7


class LogFencedError(LogError):
    """Another writer took the log over; what this one appended and was not acknowledged may be in it or not."""

    code = -101
    outcome_unknown = True


class LogLockedError(LogError):
    """A live writer has the log."""

    retryable = True


class LogExistsError(LogError):
    """A log with this name exists; nothing was changed."""

    code = -20


class OutOfOrderError(LogError, UsageError):
    """A transaction id is below that of a record before it; nothing was appended.

    Attributes:
        txid: The id that was refused.
        last: The highest one so far.
    """

    code = UsageError.code

    def __init__(
        self, message: str = "", *, txid: int = -1, last: int = -1, outcome_unknown: bool | None = None
    ) -> None:
        super().__init__(message, outcome_unknown=outcome_unknown)
        self.txid = txid
        self.last = last


class LogSealedError(LogError):
    """The log has ended for good, so it takes no more records."""

    code = -11


class TruncatedError(LogError):
    """The record was dropped.

    Attributes:
        first_seq: The first record that was kept; -1 if it is not known.
    """

    code = -13

    def __init__(self, message: str = "", *, first_seq: int = -1, outcome_unknown: bool | None = None) -> None:
        super().__init__(message, outcome_unknown=outcome_unknown)
        self.first_seq = first_seq


class TruncateGuardError(LogError, UsageError):
    """Records would be dropped that a checkpoint needs; nothing was dropped."""

    code = UsageError.code


class RewoundError(TruncatedError):
    """The log was cut before this reader's position, so what it has read is partly void; read again from ``seq`` + 1.

    Attributes:
        seq: The last record that was kept.
    """

    def __init__(self, message: str = "", *, seq: int = -1, outcome_unknown: bool | None = None) -> None:
        super().__init__(message, outcome_unknown=outcome_unknown)
        self.seq = seq


class BlobError(PybkError):
    """Something about a blob as a whole: its name, its versions or its upload."""


class NoSuchBlobError(BlobError, FileNotFoundError):
    """The blob, or this version of it, was never published, or it was replaced or deleted."""

    code = -7


class BlobExistsError(BlobError, FileExistsError):
    """A blob of this name exists, and was not to be replaced."""

    code = -20


class BlobLockedError(BlobError):
    """Another caller saves or prunes the snapshots of this name."""

    retryable = True


class BlobGivenUpError(BlobError):
    """The upload cannot be published any more; nothing was changed, and the blob can be put again."""

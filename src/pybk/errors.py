"""The one tree of errors.

Each error answers three questions by attribute and class: did it happen all the same (``outcome_unknown``), is trying
again worth it (``retryable``), and whose fault is it (the class). ``code`` is BookKeeper's where BookKeeper has one;
where it has none, it is the code of the class above.
"""

from __future__ import annotations


class PybkError(Exception):
    """Base of all errors that pybk raises on purpose.

    Args:
        message: What went wrong, with the values, the limit and the remedy.
        outcome_unknown: Overrides the class's answer for this one error; None keeps it.

    Attributes:
        code: BookKeeper's error code.
        outcome_unknown: The operation may have taken effect although it raised.
        retryable: The same call may succeed later, with nothing else done about it.
    """

    code: int = -999
    outcome_unknown: bool = False
    retryable: bool = False

    def __init__(self, message: str = "", *, outcome_unknown: bool | None = None) -> None:
        super().__init__(message)
        if outcome_unknown is not None:
            self.outcome_unknown = outcome_unknown


class UsageError(PybkError, ValueError):
    """The caller gave something that can never work; raised before any effect."""

    code = -14


class ClosedError(PybkError):
    """You closed this manager or reader; a closed writer raises LedgerClosedError."""

    code = -19


class IllegalOperationError(PybkError):
    """The operation does not exist for this ledger, handle or manager."""

    code = -100


class ForkedProcessError(IllegalOperationError):
    """The manager was opened in a process of which this one is a fork; open another manager here."""


class LedgerError(PybkError):
    """Something about a ledger as a whole."""


class NoSuchLedgerError(LedgerError):
    """The ledger was never created, or it was deleted."""

    code = -7


class LedgerDeletedError(NoSuchLedgerError):
    """The ledger was deleted, which the metadata store proves; its id is never given again."""


class LedgerExistsError(LedgerError):
    """A ledger of this id was created before."""

    code = -20


class LedgerClosedError(LedgerError):
    """The ledger takes no more entries."""

    code = -11


class LedgerFencedError(LedgerError):
    """Another client opened the ledger with recovery, which fenced it and so ended this writer.

    The recovery may or may not have found what was being appended: treat it like a timeout.
    """

    code = -101
    outcome_unknown = True


class LedgerRecoveryError(LedgerError):
    """The end of a ledger that nobody closed could not be established."""

    code = -10


class LedgerUnsealedError(LedgerError):
    """A sealed ledger was asked for, and this one has no seal: it is open, or was closed without one."""


class EntryError(PybkError):
    """Something about entries of a ledger."""


class NoSuchEntryError(EntryError):
    """The ledger is known to have no such entry."""

    code = -13


class ReadRangeError(EntryError):
    """The range to read does not lie within 0 and last add confirmed."""

    code = -1


class EntryUnknownError(EntryError):
    """It is not known now whether the entry exists: too few bookies answered, or one of them may have lost it."""

    code = -108


class DuplicateEntryError(EntryError):
    """An entry of this id was appended before."""

    code = -22


class DigestMismatchError(EntryError):
    """The bytes of an entry are not what its writer made: wrong key, wrong place, or changed since."""

    code = -5


class NotEnoughBookiesError(PybkError):
    """Too few bookies are available for the operation; acknowledged entries are not lost."""

    code = -6
    retryable = True


class UnauthorizedError(PybkError):
    """The password is not the ledger's."""

    code = -102


class TooManyRequestsError(PybkError):
    """The bound on what may be outstanding is reached; wait for some of it."""

    code = -105
    retryable = True


class AppendTimeoutError(PybkError, TimeoutError):
    """An append was not durable in time; it continues and may still succeed."""

    code = -23
    outcome_unknown = True


class OutOfMemoryError(PybkError, MemoryError):
    """There is no memory for what was asked; nothing was changed, and it may be tried again."""


class VersionConflictError(PybkError):
    """Another client changed the record meanwhile; ``version`` is its version now, None if it does not exist."""

    def __init__(self, message: str, *, version: int | None = None, outcome_unknown: bool | None = None) -> None:
        super().__init__(message, outcome_unknown=outcome_unknown)
        self.version = version


class StorageError(PybkError):
    """Something about the disks of this store."""


class CorruptError(StorageError):
    """Bytes on disk are not what was written, or are missing.

    Args:
        message: What was found, what was expected, and the remedy.
        path: The file, where one can be named.
        offset: Where in the file, in bytes, where it can be said.
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
    """A ledger's recorded kind or end is not what was sealed with its password: somebody or something changed it."""


class UnsupportedFormatError(StorageError):
    """Sound bytes of a format that this version does not read."""


class StorageRefusedError(StorageError):
    """The storage refused something for now and changed nothing: descriptors, memory, threads or space ran out.

    The store serves on, and what was refused may be tried again.
    """

    retryable = True


class StorageFullError(StorageRefusedError):
    """A tier is short of space; deleting ledgers works meanwhile, and appends work again when there is space."""

    code = -104


class StorageFailedError(StorageError):
    """A write or a sync failed, now or earlier; the store takes no more appends until it is closed and opened again."""

    outcome_unknown = True


class StoreLockedError(StorageError):
    """Another manager holds the directory.

    Args:
        message: Which directory, and who holds it.
        pid: The process that holds it, where it is known.
        outcome_unknown: As in PybkError.
    """

    def __init__(self, message: str = "", *, pid: int | None = None, outcome_unknown: bool | None = None) -> None:
        super().__init__(message, outcome_unknown=outcome_unknown)
        self.pid = pid


class CookieError(StorageError):
    """A directory is not the one that the store left here: another store's, another place's, or an empty one."""


class MetadataError(PybkError):
    """Something about the metadata store, or about what it holds."""

    code = -18


class MetadataUnreachableError(MetadataError):
    """The metadata store did not answer in time, or the connection to it was lost.

    ``outcome_unknown`` is set if what was asked for may have taken effect, or may still.
    """

    retryable = True


class MetadataVersionError(MetadataError):
    """A compare-and-set met another version than the one it was to replace, or nothing; read again.

    ``outcome_unknown`` is set if an answer was lost before: the change may have been made, and changed since.
    """

    code = -17


class MetadataExistsError(MetadataError):
    """The key exists already."""


class MetadataForgedError(MetadataError):
    """A value in the metadata store was not written with the cluster secret that is given here."""

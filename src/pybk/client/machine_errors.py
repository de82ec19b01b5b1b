"""The exception that is raised for each reason for which a machine of ``pybk.replication`` fails."""

from __future__ import annotations

from typing import Final

from pybk.errors import (
    LedgerClosedError,
    LedgerFencedError,
    LedgerRecoveryError,
    MetadataUnreachableError,
    NoSuchLedgerError,
    NotEnoughBookiesError,
    OwnerNeededError,
    PybkError,
    UnauthorizedError,
)
from pybk.replication.messages import Failed, Reason

_ERRORS: Final[dict[Reason, type[PybkError]]] = {
    Reason.FENCED: LedgerFencedError,
    Reason.CLOSED: LedgerClosedError,
    Reason.DELETED: NoSuchLedgerError,
    Reason.UNAUTHORIZED: UnauthorizedError,
    Reason.NOT_ENOUGH_BOOKIES: NotEnoughBookiesError,
    Reason.METADATA_UNREACHABLE: MetadataUnreachableError,
    Reason.UNDECIDED: LedgerRecoveryError,
    Reason.CONFLICT: LedgerFencedError,
    Reason.OWNER_NEEDED: OwnerNeededError,
}


def error_of(failed: Failed, *, outcome_unknown: bool | None = None) -> PybkError:
    """Return the error to raise for a machine that failed.

    Args:
        failed: The machine's last effect.
        outcome_unknown: The error's ``outcome_unknown``; None keeps the default of its class.
    """
    return _ERRORS[failed.reason](failed.detail, outcome_unknown=outcome_unknown)

"""Which committed ledgers retention deletes; pure, without input or output.

The rules, where a *consumer* is a query that has recorded what it has read (``pybk.spark.consumers``):

- RT1: Only ledgers that a sink has committed are deleted. Neither its orphans are, which ``collect`` deletes, nor
  ledgers that no sink wrote.
- RT2: A ledger is *beyond the limits* if it is older than ``max_age_s``, or if it and the newer ones have more bytes
  than ``max_bytes``.
- RT3: A ledger beyond the limits is deleted once all consumers that select it have read it to its end; without any,
  at once. Without ``keep_unread`` it is deleted in either case.
- RT4: A ledger within the limits is deleted only if ``keep_read`` is false, at least one consumer selects it, and all
  that do have read it to its end.
- RT5: What consumers have recorded is read before the ledgers, and a ledger's own metadata say which consumers select
  it. So a record that is late keeps more, and never less.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, NamedTuple

from pybk.errors import UsageError

if TYPE_CHECKING:
    from pybk.ledger.ledger_metadata import LedgerMetadata
    from pybk.spark.consumers import Consumer

SECONDS_MAX: Final = 1e9
PERIOD_SECONDS: Final = 300.0
"""The time between two commits that apply the retention of their sink."""

_LEAST_PERIOD_SECONDS: Final = 1.0


@dataclass(frozen=True, slots=True)
class SinkRetention:
    """The limits beyond which committed ledgers are deleted; the rules are at the head of this module.

    Attributes:
        max_age_s: Seconds since the creation of a ledger; None for no limit.
        max_bytes: Payload bytes of the newest ledgers; None for no limit.
        keep_read: Whether ledgers within the limits are kept even if all consumers have read them.
        keep_unread: Whether ledgers beyond the limits are kept until all consumers have read them.
    """

    max_age_s: float | None = None
    max_bytes: int | None = None
    keep_read: bool = True
    keep_unread: bool = True

    def __post_init__(self) -> None:
        """Check the values; raises UsageError."""
        if self.max_age_s is not None and not 0 <= self.max_age_s <= SECONDS_MAX:
            raise UsageError(f"the age is {self.max_age_s!r:.50}; it takes 0 to {SECONDS_MAX:.0f} seconds")
        if self.max_bytes is not None and self.max_bytes < 0:
            raise UsageError(f"the size is {self.max_bytes!r:.50}; it takes a number of bytes from 0 up")
        if not self.keep_unread and not self.has_limits:
            raise UsageError("what is unread expires beyond an age or a size: give one of them")

    @property
    def has_limits(self) -> bool:
        """Whether an age or a size limits what is kept."""
        return self.max_age_s is not None or self.max_bytes is not None

    @property
    def deletes(self) -> bool:
        """Whether anything can be deleted at all."""
        return self.has_limits or not self.keep_read

    @property
    def period_s(self) -> float:
        """The time between two commits that apply it: five minutes, or a quarter of a short age."""
        age_s = PERIOD_SECONDS * 4 if self.max_age_s is None else self.max_age_s
        return max(_LEAST_PERIOD_SECONDS, min(PERIOD_SECONDS, age_s / 4))


class HeldLedger(NamedTuple):
    """A committed ledger.

    Attributes:
        created_ns: The creation time in its metadata.
        ledger_id: The ledger.
        payload_bytes: Bytes of the payloads of its entries.
    """

    created_ns: int
    ledger_id: int
    payload_bytes: int


def beyond_limits(held: Iterable[HeldLedger], retention: SinkRetention, now_ns: int) -> set[int]:
    """Return the ledgers beyond the limits (RT2).

    Args:
        held: All ledgers that exist, in any order.
        retention: The limits.
        now_ns: The present time, nanoseconds since 1970.
    """
    found, newer = set[int](), 0
    before_ns = None if retention.max_age_s is None else now_ns - int(retention.max_age_s * 1e9)
    for each in sorted(held, reverse=True):
        newer += each.payload_bytes
        is_old = before_ns is not None and each.created_ns < before_ns
        if is_old or (retention.max_bytes is not None and newer > retention.max_bytes):
            found.add(each.ledger_id)
    return found


def may_be_deleted(
    metadata: LedgerMetadata, retention: SinkRetention, consumers: Sequence[Consumer], *, is_beyond: bool
) -> bool:
    """Return whether a committed ledger is deleted (RT3, RT4).

    Args:
        metadata: The ledger.
        retention: What is kept.
        consumers: All consumers of the cluster.
        is_beyond: Whether the ledger is beyond the limits.
    """
    mine = [each for each in consumers if each.selects(metadata)]
    is_read = not any(each.needs(metadata) for each in mine)
    if is_beyond:
        return is_read or not retention.keep_unread
    return is_read and bool(mine) and not retention.keep_read

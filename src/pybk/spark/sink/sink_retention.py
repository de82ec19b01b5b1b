"""Which committed ledgers retention deletes; pure, without input or output.

The rules, where a *consumer* is a query that has recorded what it has read (``pybk.spark.consumers``):

- RT1: Only ledgers that a sink has committed, and whose own metadata name this sink, are deleted. Neither its orphans
  are, which ``collect`` deletes, nor ledgers that no sink wrote.
- RT2: A ledger is *beyond the limits* if it is older than ``max_age_s``, or if it and the newer ones have more bytes
  than ``max_bytes``. It is as old as its creation time says, but not older than a ledger that its sink has committed
  before, because a clock may be slow; times in the future count for the ledgers alone that have them.
- RT3: A ledger beyond the limits is deleted once all consumers that select it have read it to its end; without any,
  at once. Without ``keep_unread`` it is deleted in either case.
- RT4: A ledger within the limits is deleted only if ``keep_read`` is false, at least one consumer selects it, and all
  that do have read it to its end.
- RT5: What consumers have recorded is read before the ledgers, and a ledger's own metadata say which consumers select
  it. So a record that is late keeps more, and never less. It is read again before each page of ledgers is deleted, so
  a query that has begun meanwhile keeps what it needs of the further ones.
- RT6: Members of a merged ledger are judged each for itself, as the ledgers that they were. The merged ledger is
  deleted once all of them may be.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, NamedTuple

from pybk.errors import UsageError
from pybk.manager.arguments import whole_from
from pybk.spark.finished_ledgers import DescribedLedger, FinishedByAll, is_selected
from pybk.spark.options import AGE_SECONDS_MAX
from pybk.spark.places import ITSELF
from pybk.values import flag_of

if TYPE_CHECKING:
    from pybk.flags import LedgerType
    from pybk.spark.consumers import Consumer, Selection
    from pybk.spark.sink.sink_record import ManifestRow

PERIOD_SECONDS: Final = 300.0
"""The time between two commits that apply the retention of their sink."""

_LEAST_PERIOD_SECONDS: Final = 1.0

_ASKED_BY_AGE: Final = 8
"""The most selections of consumers that are asked about a ledger, in order to save the reading of its metadata."""


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
        age_s = self.max_age_s
        if age_s is not None and not (_is_number(age_s) and 0 <= age_s <= AGE_SECONDS_MAX):
            raise UsageError(f"the age is {age_s!r:.50}; it takes 0 to {AGE_SECONDS_MAX:.0f} seconds, or None")
        if self.max_bytes is not None:
            whole_from(self.max_bytes, 0, "the size", "a number of bytes or None")
        for name in ("keep_read", "keep_unread"):
            flag_of(getattr(self, name), name)
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


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


class HeldLedger(NamedTuple):
    """A committed ledger; older ones sort first.

    Attributes:
        since_ns: The time since which its age counts (RT2).
        ledger_id: The ledger.
        payload_bytes: Bytes of the payloads of its entries.
        ledger_type: Its type.
        creation_time_ns: The creation time in its metadata.
        holder: The merged ledger that has its entries; ``ITSELF`` for none.
    """

    since_ns: int
    ledger_id: int
    payload_bytes: int
    ledger_type: LedgerType
    creation_time_ns: int
    holder: int = ITSELF

    @property
    def stored_in(self) -> int:
        """The ledger that has the entries: the merged one, or the ledger itself."""
        return self.ledger_id if self.holder == ITSELF else self.holder


def with_ages(rows: Iterable[ManifestRow], now_ns: int) -> Iterator[tuple[ManifestRow, int]]:
    """Yield the committed ledgers of a sink, each with the time since which its age counts (RT2).

    Args:
        rows: The ledgers, in the order of commits.
        now_ns: The present time, nanoseconds since 1970.
    """
    newest_ns = 0
    for row in rows:
        yield row, max(newest_ns, row.created_ns)
        if row.created_ns <= now_ns:
            newest_ns = max(newest_ns, row.created_ns)


class Readership:
    """What the consumers of a cluster have read, all together.

    Args:
        consumers: The consumers.

    Cost: A question about a ledger mostly costs as much with many consumers of its type as with one; it grows with the
        number of different ranges of ids that consumers select.
    """

    def __init__(self, consumers: Iterable[Consumer]) -> None:
        self.consumers = list(consumers)
        """The consumers."""
        by_selection: dict[Selection, list[Consumer]] = {}
        for each in self.consumers:
            by_selection.setdefault(each.selection, []).append(each)
        self._groups = [(kind, FinishedByAll([each.finished for each in of])) for kind, of in by_selection.items()]
        self._of_type: dict[str | None, list[tuple[Selection, FinishedByAll]]] = {}
        for group in self._groups:
            self._of_type.setdefault(group[0].ledger_type, []).append(group)

    def may_have_read(self, ledger_id: int, created_ns: int) -> bool:
        """Return whether those that select a ledger may have finished it; its type is not known yet."""
        return len(self._groups) > _ASKED_BY_AGE or any(
            finished.has(ledger_id, created_ns) for _, finished in self._groups
        )

    def have_read(self, ledger: DescribedLedger) -> bool | None:
        """Return whether all that select a ledger have finished it; None if no consumer selects it."""
        mine = list(self._finished(ledger))
        return all(each.has(ledger.ledger_id, ledger.creation_time_ns) for each in mine) if mine else None

    def _finished(self, ledger: DescribedLedger) -> Iterator[FinishedByAll]:
        """Yield what those have finished that select a ledger."""
        for kind in (str(ledger.ledger_type), None):
            for selection, finished in self._of_type.get(kind, ()):
                if is_selected(ledger, *selection):
                    yield finished


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
        is_old = before_ns is not None and each.since_ns < before_ns
        if is_old or (retention.max_bytes is not None and newer > retention.max_bytes):
            found.add(each.ledger_id)
    return found


def by_ledger(held: Iterable[HeldLedger]) -> list[list[HeldLedger]]:
    """Return the members of each merged ledger together, and each other ledger alone; those come first that are older.

    A merged ledger is as old as its newest member.
    """
    found: dict[int, list[HeldLedger]] = {}
    for each in held:
        found.setdefault(each.stored_in, []).append(each)
    return sorted(found.values(), key=max)


def may_be_deleted(
    ledger: DescribedLedger, retention: SinkRetention, readership: Readership, *, is_beyond: bool
) -> bool:
    """Return whether a committed ledger is deleted (RT3, RT4).

    Args:
        ledger: The ledger.
        retention: What is kept.
        readership: What the consumers of the cluster have read.
        is_beyond: Whether the ledger is beyond the limits.
    """
    is_read = readership.have_read(ledger)
    if is_beyond:
        return is_read is not False or not retention.keep_unread
    return is_read is True and not retention.keep_read

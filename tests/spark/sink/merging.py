"""Merges of ledgers of a sink, without Spark."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from pybk.credentials import NO_CREDENTIALS, Credentials
from pybk.spark.connection import Connection
from pybk.spark.sink.ledger_merge import MergedLedgers, MergePlan, copied, merge_ledgers
from pybk.spark.sink.manifest import Sink
from pybk.spark.sink.sink_record import LedgerMerge
from pybk.streams.log_settings import RollPolicy


def merge(
    place: Connection,
    sink: Sink,
    *,
    keep_s: float = 3600.0,
    kind: str | None = None,
    given: Credentials = NO_CREDENTIALS,
    policy: RollPolicy = RollPolicy(),  # noqa: B008  # it is a value
) -> MergedLedgers:
    """Merge ledgers of a sink; copies are made in this process."""

    def copies(plans: Sequence[MergePlan]) -> Iterator[LedgerMerge | None]:
        return (copied(place.manager, given, plan) for plan in plans)

    return merge_ledgers(sink, place.manager, policy, keep_s, copies, kind)

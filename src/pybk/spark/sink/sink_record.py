"""A sink's record and manifests as values, and the effect of a commit on them; pure, without input or output.

``pybk.spark.sink.manifest`` reads and writes them, and explains how a commit works.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Collection, Iterable, Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any, Final, NamedTuple

from pybk.spark.places import ITSELF
from pybk.values import decode_json, encode_json

FORMAT: Final = 1
FORMAT_NAMED: Final = 2
"""The format of a record that names ledgers itself; older versions, which would overlook them, refuse it."""

FORMAT_MERGED: Final = 3
"""The format of a record and of manifests with merged ledgers; older versions, which would look for their members,
refuse it."""

NAMED_MAX: Final = 500
"""The most ledgers that the record of a batch write without an app id names itself, without a manifest."""

RUNS_KEPT: Final = 32
"""The number of runs of a query that the record remembers; by them a driver that has a successor is refused."""

FOLD: Final = 8
"""The number of manifests of one tier that become one manifest of the next tier."""

ORPHAN_AGE_S: Final = 86_400.0
"""The age at which a commit collects an orphan."""

_ONE_OFF: Final = re.compile(r"write-[0-9a-f]{32}")

ROWS_PER_ENTRY: Final = 10_000
"""The rows of an entry of a manifest."""

MANIFEST_ROWS: Final = 100_000
"""The most rows of a manifest that a merge or retention writes; one of a commit, which folds others, may have more."""

WHOLE: Final = -1
"""The tier of a manifest that commits do not fold, because it was cut off one that had too many rows."""

TOO_LATE: Final = (
    "its ledgers took so long to be committed that they counted as orphans and may be deleted: write them again"
)
"""The reason why ledgers that may be deleted are not committed."""

Chain = tuple[tuple[int, int], ...]
"""Manifest ledgers and their tiers, oldest first."""


class ManifestRow(NamedTuple):
    """A committed ledger, which may be a member of a merged one.

    Attributes:
        ledger_id: The ledger.
        entries: The number of its entries.
        payload_bytes: Bytes of their payloads.
        created_ns: The creation time in its metadata; 0 in manifests of older versions, which do not have it.
        holder: The merged ledger that has its entries; ``ITSELF`` for none.
        first: The id of its first entry there.
    """

    ledger_id: int
    entries: int
    payload_bytes: int
    created_ns: int = 0
    holder: int = ITSELF
    first: int = 0

    @property
    def stored_in(self) -> int:
        """The ledger that has the entries: the merged one, or the ledger itself."""
        return self.ledger_id if self.holder == ITSELF else self.holder


ManifestRows = list[ManifestRow]
"""Committed ledgers, in the order of their commits."""


class Replaced(NamedTuple):
    """A merged ledger whose members' own ledgers are still kept, for readers that have planned to read them.

    Attributes:
        holder: The merged ledger. Its rows name the members.
        until_ns: The time until which they are kept, nanoseconds since 1970.
        holders: Merged ledgers that it replaces.
    """

    holder: int
    until_ns: int
    holders: tuple[int, ...] = ()


def one_off_app_id() -> str:
    """Return the app id of the sink of a batch write without one; nothing is committed to it a second time."""
    return f"write-{secrets.token_hex(16)}"


def is_one_off(app_id: str) -> bool:
    """Return whether ``one_off_app_id`` made an app id."""
    return _ONE_OFF.fullmatch(app_id) is not None


@dataclass(frozen=True, slots=True)
class SinkRecord:
    """The value that the metadata store keeps for a sink; ``docs/howto/spark.md`` has its format.

    Attributes:
        chain: The sink's manifests. A ledger of the sink is committed if one of them names it.
        epoch: The number of runs of the streaming query that have committed.
        runs: The last ``RUNS_KEPT`` of these runs, newest last; empty for batch writes.
        last: The last batch id or ``txnVersion`` that was committed, -1 before the first.
        query: The streaming query; empty for batch writes.
        floor_ns: Ledgers created at this time or before are refused, because they may have been deleted as orphans.
        given_up: Ledgers of attempts that failed, while they are deleted; no commit names them.
        named: Ledgers that the record names itself, as a manifest would.
        retained_ns: When a commit last had its sink's retention applied; 0 for never.
        has_merged: Whether a manifest has members of merged ledgers.
        replaced: The merges whose members' own ledgers are still kept.
    """

    chain: Chain = ()
    epoch: int = 0
    runs: tuple[str, ...] = ()
    last: int = -1
    query: str = ""
    floor_ns: int = 0
    given_up: tuple[int, ...] = ()
    named: tuple[ManifestRow, ...] = ()
    retained_ns: int = 0
    has_merged: bool = False
    replaced: tuple[Replaced, ...] = ()

    def encode(self) -> bytes:
        """Return the record as JSON."""
        values = asdict(self)
        values["named"] = [row[:4] for row in self.named]  # those are never merged
        for name in ("given_up", "named", "retained_ns", "replaced"):
            if not values[name]:
                del values[name]
        del values["has_merged"]
        number = FORMAT_MERGED if self.has_merged else FORMAT_NAMED if self.named else FORMAT
        return encode_json({"format": number, **values})

    @classmethod
    def decode(cls, data: bytes, *, where: str) -> SinkRecord:
        """Decode the result of ``encode``; ``where`` names the record in errors. Raises CorruptError."""
        return decode_json(data, _record_of, where=where)


def _record_of(values: dict[str, Any]) -> SinkRecord:
    if values["format"] not in (FORMAT, FORMAT_NAMED, FORMAT_MERGED):
        raise ValueError("another format: use a newer pybk")
    chain = tuple((int(ledger_id), int(tier)) for ledger_id, tier in values["chain"])
    return SinkRecord(
        chain=chain,
        epoch=int(values["epoch"]),
        runs=tuple(map(str, values["runs"])),
        last=int(values["last"]),
        query=str(values["query"]),
        floor_ns=int(values["floor_ns"]),
        given_up=tuple(map(int, values.get("given_up", ()))),
        named=tuple(ManifestRow(*map(int, row)) for row in values.get("named", ())),
        retained_ns=int(values.get("retained_ns", 0)),
        has_merged=values["format"] == FORMAT_MERGED,
        replaced=tuple(
            Replaced(int(holder), int(until_ns), tuple(map(int, holders)))
            for holder, until_ns, holders in values.get("replaced", ())
        ),
    )


@dataclass(frozen=True, slots=True)
class Attempt:
    """A commit that a driver requests.

    Attributes:
        number: Batch id of a streaming query, or ``txnVersion``; from 0.
        oldest_ns: The creation time of the oldest of its ledgers.
        query: The streaming query; empty for a batch write.
        run: The run of the query; empty for a batch write.
    """

    number: int
    oldest_ns: int
    query: str = ""
    run: str = ""


@dataclass(frozen=True, slots=True)
class Publish:
    """Write a manifest of the attempt's ledgers, append it to this record's chain, and write the record."""

    record: SinkRecord


@dataclass(frozen=True, slots=True)
class Skip:
    """The attempt's number was committed before: delete its ledgers, and write this record if it has changed."""

    record: SinkRecord


@dataclass(frozen=True, slots=True)
class Refuse:
    """Commit nothing; ``reason`` completes the error message."""

    reason: str


def decide(record: SinkRecord, attempt: Attempt) -> Publish | Skip | Refuse:
    """Return the effect of a commit on a sink's record; change nothing.

    Args:
        record: The sink's present record; an empty one if it has none.
        attempt: The requested commit.
    """
    new = record.last < 0
    if not new and record.query != attempt.query:
        return Refuse(
            f"it belongs to {_owner(record.query)}, and this is {_owner(attempt.query)}: choose another app id"
        )
    if attempt.run in record.runs[:-1]:
        return Refuse(
            f"run {attempt.run} of the query was succeeded by run {record.runs[-1]}, which has the checkpoint now: "
            "stop this one"
        )
    if attempt.run and record.runs[-1:] != (attempt.run,):
        record = replace(record, epoch=record.epoch + 1, runs=(*record.runs, attempt.run)[-RUNS_KEPT:])
    if attempt.number <= record.last:
        return Skip(record)
    if attempt.query and not new and attempt.number > record.last + 1:
        return Refuse(
            f"batch {record.last} was published last, and this is batch {attempt.number}: the batches between are "
            "missing; restore the metadata store and the checkpoint of one time, or take another app id"
        )
    if attempt.oldest_ns <= record.floor_ns:
        return Refuse(TOO_LATE)
    floor_ns = max(0, attempt.oldest_ns - int(ORPHAN_AGE_S * 1e9)) if new else 0
    return Publish(replace(record, last=attempt.number, query=attempt.query, floor_ns=max(record.floor_ns, floor_ns)))


def _owner(query: str) -> str:
    return f"streaming query {query}" if query else "batch writes"


def fold(chain: Chain) -> tuple[Chain, tuple[int, ...], int]:
    """Return the manifests of a chain that the next manifest replaces, and the new chain.

    The chain counts like a number to the base ``FOLD``: that many manifests of one tier become one of the next. So the
    chain has at most ``FOLD - 1`` manifests per tier, and each ledger is named again once per tier.

    Returns:
        The chain that stays, the manifests at its end that the new one replaces, oldest first, and the new one's tier.
    """
    end, tier = len(chain), 0
    while end >= FOLD - 1 and all(found == tier for _, found in chain[end - FOLD + 1 : end]):
        end -= FOLD - 1
        tier += 1
    return chain[:end], tuple(ledger_id for ledger_id, _ in chain[end:]), tier


# ---- manifests ---------------------------------------------------------------------------------------------------


def encode_rows(number: int, rows: ManifestRows) -> list[bytes]:
    """Return the entries of a manifest ledger, at least one, with the ``number`` of the newest commit in it."""
    parts = [rows[at : at + ROWS_PER_ENTRY] for at in range(0, len(rows), ROWS_PER_ENTRY)] or [[]]
    return [_encode_part(number, part) for part in parts]


def _encode_part(number: int, rows: ManifestRows) -> bytes:
    values: dict[str, Any] = {"format": FORMAT, "last": number, "ledgers": [row[:3] for row in rows]}
    if any(row.created_ns for row in rows):
        values["created"] = [row.created_ns for row in rows]  # apart, because older versions read three numbers a row
    merged = list(_merged_runs(rows))
    if merged:
        values |= {"format": FORMAT_MERGED, "merged": merged}
    return encode_json(values)


def _merged_runs(rows: ManifestRows) -> Iterator[tuple[int, int, int, int]]:
    """Yield the runs of rows that follow each other in one merged ledger.

    Yields:
        The index of the first row, the number of rows, the merged ledger, and the first entry of the first row there.
    """
    low = 0
    for high in range(1, len(rows) + 1):
        last = rows[high - 1]
        if high == len(rows) or (rows[high].holder, rows[high].first) != (last.holder, last.first + last.entries):
            if last.holder != ITSELF:
                yield low, high - low, rows[low].holder, rows[low].first
            low = high


def decode_rows(entries: Iterable[bytes], *, where: str) -> ManifestRows:
    """Decode the result of ``encode_rows``; ``where`` names the manifest in errors. Raises CorruptError."""
    return [row for entry in entries for row in decode_json(entry, _rows_of, where=where)]


def _rows_of(values: dict[str, Any]) -> ManifestRows:
    if values["format"] not in (FORMAT, FORMAT_MERGED):
        raise ValueError("another format: use a newer pybk")
    ledgers = values["ledgers"]
    created = values.get("created") or [0] * len(ledgers)
    rows = [
        ManifestRow(int(ledger_id), int(entries), int(size), int(created_ns))
        for (ledger_id, entries, size), created_ns in zip(ledgers, created, strict=True)
    ]
    for low, count, holder, first in values.get("merged", ()):
        for at in range(low, low + count):
            rows[at] = rows[at]._replace(holder=int(holder), first=int(first))
            first += rows[at].entries
    return rows


# ---- merges ------------------------------------------------------------------------------------------------------


class LedgerMerge(NamedTuple):
    """A closed ledger that has the entries of committed ledgers, to be named as their holder; it can be pickled.

    Attributes:
        holder: The ledger.
        created_ns: The creation time in its metadata.
        members: The committed ledgers, in the order of their entries there, as manifests named them when they were
            copied.
    """

    holder: int
    created_ns: int
    members: tuple[ManifestRow, ...]

    def rows(self) -> Iterator[ManifestRow]:
        """Yield the rows of the members as members of this merge."""
        first = 0
        for row in self.members:
            yield row._replace(holder=self.holder, first=first)
            first += row.entries


def with_merges(record: SinkRecord, merges: Iterable[LedgerMerge], until_ns: int) -> SinkRecord:
    """Return a record that keeps what merges replace, without the new manifests; change nothing.

    Args:
        record: The record.
        merges: The merges, at least one.
        until_ns: The time until which the members' own ledgers are kept, nanoseconds since 1970.
    """
    kept = {each.holder: each for each in record.replaced}
    for each in merges:
        holders = {row.holder for row in each.members if row.holder != ITSELF}
        earlier = [kept.pop(holder) for holder in sorted(holders) if holder in kept]
        holders.update(holder for one in earlier for holder in one.holders)
        kept[each.holder] = Replaced(each.holder, until_ns, tuple(sorted(holders)))
    return replace(record, has_merged=True, replaced=tuple(kept.values()))


def without_names(record: SinkRecord, holders: Collection[int]) -> SinkRecord:
    """Return a record of whose rows only some are named any more, by the holders of these."""
    replaced = tuple(each for each in record.replaced if each.holder in holders)
    return replace(record, has_merged=any(each != ITSELF for each in holders), replaced=replaced)

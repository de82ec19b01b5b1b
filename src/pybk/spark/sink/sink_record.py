"""A sink's record and manifests as values, and the effect of a commit on them; pure, without input or output.

``pybk.spark.sink.manifest`` reads and writes them, and explains how a commit works.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from typing import Any, Final, NamedTuple

from pybk.values import decode_json, encode_json

FORMAT: Final = 1
FORMAT_NAMED: Final = 2
"""The format of a record that names ledgers itself; older versions, which would overlook them, refuse it."""

NAMED_MAX: Final = 500
"""The most ledgers that the record of a batch write without an app id names itself, without a manifest."""

RUNS_KEPT: Final = 32
"""The number of runs of a query that the record remembers; by them a driver that has a successor is refused."""

FOLD: Final = 8
"""The number of manifests of one tier that become one manifest of the next tier."""

ORPHAN_AGE_S: Final = 86_400.0
"""The age at which a commit collects an orphan."""

_ONE_OFF: Final = re.compile(r"write-[0-9a-f]{32}")

_ROWS_PER_ENTRY: Final = 10_000

TOO_LATE: Final = (
    "its ledgers took so long to be committed that they counted as orphans and may be deleted: write them again"
)
"""The reason why ledgers that may be deleted are not committed."""

Chain = tuple[tuple[int, int], ...]
"""Manifest ledgers and their tiers, oldest first."""


class ManifestRow(NamedTuple):
    """A committed ledger.

    Attributes:
        ledger_id: The ledger.
        entries: The number of its entries.
        payload_bytes: Bytes of their payloads.
        created_ns: The creation time in its metadata; 0 in manifests of older versions, which do not have it.
    """

    ledger_id: int
    entries: int
    payload_bytes: int
    created_ns: int = 0


ManifestRows = list[ManifestRow]
"""Committed ledgers, in the order of their commits."""


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

    def encode(self) -> bytes:
        """Return the record as JSON."""
        values = asdict(self)
        for name in ("given_up", "named", "retained_ns"):
            if not values[name]:
                del values[name]
        return encode_json({"format": FORMAT_NAMED if self.named else FORMAT, **values})

    @classmethod
    def decode(cls, data: bytes, *, where: str) -> SinkRecord:
        """Decode the result of ``encode``; ``where`` names the record in errors. Raises CorruptError."""
        return decode_json(data, _record_of, where=where)


def _record_of(values: dict[str, Any]) -> SinkRecord:
    if values["format"] not in (FORMAT, FORMAT_NAMED):
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
    parts = [rows[at : at + _ROWS_PER_ENTRY] for at in range(0, len(rows), _ROWS_PER_ENTRY)] or [[]]
    return [_encode_part(number, part) for part in parts]


def _encode_part(number: int, rows: ManifestRows) -> bytes:
    values: dict[str, Any] = {"format": FORMAT, "last": number, "ledgers": [row[:3] for row in rows]}
    if any(row.created_ns for row in rows):
        values["created"] = [row.created_ns for row in rows]  # apart, because older versions read three numbers a row
    return encode_json(values)


def decode_rows(entries: Iterable[bytes], *, where: str) -> ManifestRows:
    """Decode the result of ``encode_rows``; ``where`` names the manifest in errors. Raises CorruptError."""
    return [row for entry in entries for row in decode_json(entry, _rows_of, where=where)]


def _rows_of(values: dict[str, Any]) -> ManifestRows:
    if values["format"] != FORMAT:
        raise ValueError("another format: use a newer pybk")
    ledgers = values["ledgers"]
    created = values.get("created") or [0] * len(ledgers)
    return [
        ManifestRow(int(ledger_id), int(entries), int(size), int(created_ns))
        for (ledger_id, entries, size), created_ns in zip(ledgers, created, strict=True)
    ]

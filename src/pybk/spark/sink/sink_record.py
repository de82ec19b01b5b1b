"""A sink's record and manifests as values: what a commit does to them is decided here, and nothing is changed."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from typing import Any, Final

from pybk.metadata.authenticated_values import decode_json, encode_json

FORMAT: Final = 1
RUNS_KEPT: Final = 32
FOLD: Final = 8
"""So many manifests of one tier become one of the next."""

ORPHAN_AGE_S: Final = 86_400.0
"""How old an orphan is before a commit collects it."""

_ROWS: Final = 20_000

Chain = tuple[tuple[int, int], ...]
"""Manifest ledgers and their tiers, oldest first."""


@dataclass(frozen=True, slots=True)
class SinkRecord:
    """What the metadata store keeps of a sink.

    Attributes:
        chain: Its manifests; together they name every ledger that counts.
        epoch: How many runs of the query there were.
        runs: The last of them, newest last; none for batch writes.
        last: The last batch id or ``txnVersion``, -1 before the first.
        query: The streaming query; empty for batch writes.
        floor_ns: Ledgers created then or before are published no more.
    """

    chain: Chain = ()
    epoch: int = 0
    runs: tuple[str, ...] = ()
    last: int = -1
    query: str = ""
    floor_ns: int = 0

    def encode(self) -> bytes:
        """Return the record as JSON."""
        return encode_json({"format": FORMAT, **asdict(self)})

    @classmethod
    def decode(cls, data: bytes, *, where: str) -> SinkRecord:
        """Decode what ``encode`` made; ``where`` names the place in errors."""
        return decode_json(data, _record_of, where=where)


def _record_of(values: dict[str, Any]) -> SinkRecord:
    if values["format"] != FORMAT:
        raise ValueError("another format: use a newer pybk")
    chain = tuple((int(ledger_id), int(tier)) for ledger_id, tier in values["chain"])
    return SinkRecord(
        chain=chain,
        epoch=int(values["epoch"]),
        runs=tuple(map(str, values["runs"])),
        last=int(values["last"]),
        query=str(values["query"]),
        floor_ns=int(values["floor_ns"]),
    )


@dataclass(frozen=True, slots=True)
class Attempt:
    """A commit that is asked for.

    Attributes:
        number: Batch id of a streaming query, or ``txnVersion``; from 0.
        oldest_ns: When the oldest of its ledgers was created.
        query: The streaming query; empty for a batch write.
        run: The run of the query; empty for a batch write.
    """

    number: int
    oldest_ns: int
    query: str = ""
    run: str = ""


@dataclass(frozen=True, slots=True)
class Publish:
    """Name the attempt's ledgers in a manifest, and put this record, with that manifest in its chain."""

    record: SinkRecord


@dataclass(frozen=True, slots=True)
class Skip:
    """It was published before: put this record if it is another, and delete the attempt's ledgers."""

    record: SinkRecord


@dataclass(frozen=True, slots=True)
class Refuse:
    """Publish nothing, and say why."""

    reason: str


def decide(record: SinkRecord, attempt: Attempt) -> Publish | Skip | Refuse:
    """Decide on a commit; this reads and changes nothing.

    Args:
        record: The sink's record as it is; a new one if it has none.
        attempt: What is to be committed.
    """
    new = record.last < 0
    if not new and record.query != attempt.query:
        return Refuse(
            f"it belongs to {_whose(record.query)}, and this is {_whose(attempt.query)}: choose another app id"
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
        return Refuse(
            "its ledgers took so long to be committed that they counted as orphans and may be deleted: write them again"
        )
    floor_ns = max(0, attempt.oldest_ns - int(ORPHAN_AGE_S * 1e9)) if new else 0
    return Publish(replace(record, last=attempt.number, query=attempt.query, floor_ns=max(record.floor_ns, floor_ns)))


def _whose(query: str) -> str:
    return f"streaming query {query}" if query else "batch writes"


def fold(chain: Chain) -> tuple[Chain, tuple[int, ...], int]:
    """Say how a chain takes one more manifest.

    It counts like a number to the base ``FOLD``: as many equal tiers become one of the next, so that the chain stays
    short, and what is written again is a ledger's name per tier.

    Returns:
        What stays of the chain, the manifests at its end that the new one replaces, oldest first, and its tier.
    """
    end, tier = len(chain), 0
    while end >= FOLD - 1 and all(found == tier for _, found in chain[end - FOLD + 1 : end]):
        end -= FOLD - 1
        tier += 1
    return chain[:end], tuple(ledger_id for ledger_id, _ in chain[end:]), tier


# ---- what a manifest says ----------------------------------------------------------------------------------------

Rows = list[tuple[int, int, int]]
"""Ledger id, entries, payload bytes of ledgers that count, in their order."""


def encode_rows(number: int, rows: Rows) -> list[bytes]:
    """Return the entries of a manifest ledger; there is at least one, which names the last commit in it."""
    parts = [rows[at : at + _ROWS] for at in range(0, len(rows), _ROWS)] or [[]]
    return [encode_json({"format": FORMAT, "last": number, "ledgers": part}) for part in parts]


def decode_rows(entries: Iterable[bytes], *, where: str) -> Rows:
    """Decode what ``encode_rows`` made; ``where`` names the place in errors."""
    return [row for entry in entries for row in decode_json(entry, _rows_of, where=where)]


def _rows_of(values: dict[str, Any]) -> Rows:
    if values["format"] != FORMAT:
        raise ValueError("another format: use a newer pybk")
    return [(int(ledger_id), int(entries), int(size)) for ledger_id, entries, size in values["ledgers"]]

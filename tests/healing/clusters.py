"""Small clusters for the tests of repairs: bookies, ledgers, and what is known of them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

from pybk.flags import StorageHint
from pybk.healing.cluster_map import ClusterMap
from pybk.healing.situation import SECOND_NS, BookieFacts, MarkTable, Situation, Space
from pybk.ledger.digest import DigestType
from pybk.ledger.ledger_metadata import Bookie, Fragment, LedgerMetadata, LedgerState
from pybk.metadata.settings import ClusterSettings, PlacementSettings, RepairSettings
from pybk.metadata.underreplication import UnderReplicatedLedger

NOW = 10**18
GRACE_NS = 600 * SECOND_NS
GIB = 1 << 30


def bookie(number: int, instance: int = 0) -> Bookie:
    return Bookie(f"b{number}", bytes([number, instance]) * 8)


def ledger(
    ledger_id: int,
    *fragments: tuple[int, Iterable[Bookie | int]],
    quorum: tuple[int, int] = (0, 0),
    last: int | None = 99,
    length: int = 3000,
    version: int = 0,
) -> LedgerMetadata:
    """Make metadata; a ledger without a last entry is open, and its write quorum is all of its ensemble."""
    made = [
        Fragment(first, tuple(bookie(each) if isinstance(each, int) else each for each in ensemble))
        for first, ensemble in fragments
    ]
    size = len(made[0].ensemble)
    return LedgerMetadata(
        ledger_id=ledger_id,
        state=LedgerState.OPEN if last is None else LedgerState.CLOSED,
        digest_type=DigestType.CRC32C,
        ensemble_size=size,
        write_quorum=quorum[0] or size,
        ack_quorum=quorum[1] or 1,
        last_entry_id=-1 if last is None else last,
        length=0 if last is None else length,
        creation_time_ns=1,
        creation_sequence=ledger_id,
        tier=StorageHint.SSD,
        key_salt=b"",
        verifier=b"",
        version=version,
        fragments=tuple(made),
    )


def mapped(*ledgers: LedgerMetadata) -> ClusterMap:
    """Make a map of ledgers."""
    made = ClusterMap()
    for each in ledgers:
        made.apply(each.ledger_id, each, each.version)
    return made


def facts(number: int, **values: object) -> BookieFacts:
    """Make what is known of a bookie, which is live."""
    made = BookieFacts(
        bookie=bookie(number), location=f"zone{number % 3}/rack", tiers={StorageHint.SSD: Space(GIB, 2 * GIB)}
    )
    return replace(made, **values)  # type: ignore[arg-type]


def situation(
    count: int,
    *,
    absent: Mapping[int, int] | None = None,
    changed: Iterable[BookieFacts] = (),
    marks: Iterable[UnderReplicatedLedger] = (),
    repair: RepairSettings | None = None,
    placement: PlacementSettings | None = None,
) -> Situation:
    """Make what is known of a cluster.

    Args:
        count: The number of bookies.
        absent: For how many nanoseconds bookies have been absent, by number.
        changed: What is known of bookies that are not as the others.
        marks: The marks.
        repair: How the cluster repairs itself.
        placement: Where copies may lie.
    """
    found = {each.bookie.bookie_id: each for each in map(facts, range(count))}
    found.update({each.bookie.bookie_id: each for each in changed})
    since = {}
    for number, absent_ns in (absent or {}).items():
        name = bookie(number).bookie_id
        found[name] = replace(found[name], registered=False)
        since[found[name].bookie] = NOW - absent_ns
    settings = ClusterSettings(repair=repair or RepairSettings(), placement=placement or PlacementSettings())
    return Situation(
        bookies=found,
        absent_since_ns=since,
        store_since_ns=NOW - 10**15,
        settings=settings,
        marks=MarkTable(marks),
    )

"""What must hold of a soak's cluster after the faults, once it is whole."""

from __future__ import annotations

import time
from collections import Counter
from typing import Any

from pybk.errors import NoSuchLedgerError, PybkError
from pybk.ledger.ledger_metadata import LedgerMetadata
from pybk.manager.ledger_manager import LedgerManager
from tests.cluster.checker import check_by
from tests.cluster.child import PASSWORD
from tests.cluster.nemesis import LARGEST
from tests.cluster.soak.members import SoakCluster, Written
from tests.cluster.soak.watch import Watch
from tests.internals import cluster_backend_of

HELD_S = 300.0
"""How long surplus copies and copies of deleted ledgers may stay."""


def check_ledgers(cluster: SoakCluster, watch: Watch, seen: Counter[int]) -> tuple[Counter[str], list[str]]:
    """Check every ledger that a writer named: its end, what is read of it, and each copy by itself.

    Args:
        cluster: The cluster, which is whole.
        watch: Prints the progress.
        seen: How many entries a tailing reader saw of each ledger.

    Returns:
        Counts, and what is wrong.
    """
    counts: Counter[str] = Counter()
    wrong: list[str] = []
    ledgers = sorted(cluster.book.ledgers.values(), key=lambda each: each.ledger_id)
    said = time.monotonic()
    with cluster.connect() as first, cluster.connect() as second:
        for written in ledgers:
            try:
                _check(cluster, (first, second), written, seen[written.ledger_id], counts)
            except (AssertionError, PybkError) as error:
                wrong.append(f"ledger {written.ledger_id} ({written.kind}): {type(error).__name__}: {error}")
            if time.monotonic() > said + 10:
                said = time.monotonic()
                watch.say(f"{counts['ledgers']} of {len(ledgers)} ledgers are checked, {len(wrong)} are wrong")
    return counts, wrong


def _check(
    cluster: SoakCluster,
    clients: tuple[LedgerManager, LedgerManager],
    written: Written,
    seen: int,
    counts: Counter[str],
) -> None:
    if written.deleted:
        try:
            clients[0].open_ledger(written.ledger_id, password=PASSWORD).close()
        except NoSuchLedgerError:
            counts["ledgers deleted"] += 1
            return
        raise AssertionError("it was deleted, and opens")
    metadata = check_by(cluster, clients, written.ledger_id, written.acked, written.pushed, largest=LARGEST)
    assert seen <= metadata.last_entry_id + 1, f"{seen} entries were read of {metadata.last_entry_id + 1} (I16)"
    if written.closed is not None:
        assert metadata.last_entry_id == written.closed, f"closed at {written.closed}, ends at {metadata.last_entry_id}"
    counts["ledgers"] += 1
    counts["entries"] += metadata.last_entry_id + 1
    counts["acknowledged entries"] += written.acked + 1
    counts["bytes"] += metadata.length
    counts["fragments"] += len(metadata.fragments)
    counts["ledgers left by their writers"] += written.closed is None
    counts["ledgers without a seal"] += not metadata.sealed and metadata.last_entry_id >= 0


def wait_until_tidy(cluster: SoakCluster, watch: Watch) -> list[str]:
    """Wait until no bookie has copies that no ledger names, and nothing is in limbo; return what stays."""
    end = time.monotonic() + HELD_S
    with cluster.connect() as client:
        while True:
            ledgers = {each.ledger_id: each for each in cluster_backend_of(client).ledgers(-1)}
            left = [
                text for name in cluster.bookies for text in _untidy(name, cluster.soak_bookie(name).look(), ledgers)
            ]
            if not left or time.monotonic() > end:
                return left
            watch.say(f"{len(left)} copies are to go, such as: {left[0]}")
            time.sleep(5.0)


def _untidy(name: str, look: dict[str, Any], ledgers: dict[int, LedgerMetadata]) -> list[str]:
    found = [f"{name} has ledger {each} in limbo" for each in look["limbo"]]
    found += [f"{name} has the orphan {each}" for each in look["orphans"]]
    for key, entries in look["entries"].items():
        metadata = ledgers.get(int(key))
        if metadata is None:
            found.append(f"{name} has {entries} entries of ledger {key}, which was deleted")
        elif entries and not any(name == bookie.bookie_id for each in metadata.fragments for bookie in each.ensemble):
            found.append(f"{name} has {entries} entries of ledger {key}, which does not name it")
    return found

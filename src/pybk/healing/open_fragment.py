"""The check that a bookie misses no entry of a fragment without an end, after which its mark can be removed (H13).

A writer that continues without a bookie marks it from the first entry that it misses, but not to the last one: when the
bookie is back, the writer begins another fragment, often with the same ensemble. The earlier fragments are filled up.
For the last one, the bookie's worker itself checks, after it has read the mark, whether the bookie misses entries:

1. It asks the other bookies of the fragment for the last entry that each holds. An entry that was acknowledged before,
   and that this bookie misses, is on Qa other bookies of its write set. So in each write set no such entry is beyond
   the Qa-highest answer, where a missing answer counts as the highest.
2. It reads the entries up to there that this bookie should have, from this bookie alone, with their checksums.

If all entries came sound, the bookie misses none that was confirmed before the mark was read. The writer reports
entries that the bookie misses later again: before the fragment ends, and after each pause with which it tries to fill
the place of a bookie that it has given up. So if the report comes before the mark is removed, the mark is not removed;
if it comes later, it makes a new mark.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Final

from pybk.client.broadcast import Broadcast
from pybk.client.replica_check import check_replica
from pybk.replication.broadcast import LastEntryMachine
from pybk.replication.quorum import Quorum, places
from pybk.replication.replica_check import Span, spans_of

if TYPE_CHECKING:
    from pybk.client.driver import Driver
    from pybk.client.remote_ledger import RemoteLedger
    from pybk.ledger.ledger_metadata import Bookie, LedgerMetadata

_ENTRY_BYTES: Final = 1024
"""The assumed size of an entry, for the number that is asked for at a time."""

_UNKNOWN: Final = 1 << 63
"""Stands for the last entry of a bookie that did not say it."""


def misses_nothing(driver: Driver, ledger: RemoteLedger, bookie: Bookie) -> bool:
    """Return whether a bookie holds all entries of its ledger's last fragment that were acknowledged before the call.

    Args:
        driver: Sends the requests.
        ledger: An open ledger; its password is not needed.
        bookie: A bookie of its last fragment.

    Returns:
        True if so; False if it misses entries or cannot read some, or if this is not known, because others do not
        answer.

    Cost: One short request to each other bookie; then all entries that the bookie holds of the fragment are read, if it
        holds the last one.
    """
    fragment = ledger.metadata.fragments[-1]
    machine = LastEntryMachine(ledger.ledger_id, (each for each in fragment.ensemble if each != bookie))
    driver.run(Broadcast(driver, ledger, machine), machine.start)
    needed = needed_of(ledger.metadata, bookie, machine.held)
    if needed is None:
        return False
    if not needed:
        return True
    ends = {span.first % span.step: span.last for span in needed}
    step = needed[0].step
    place, last = fragment.ensemble.index(bookie), max(ends.values())
    for entries in ([span.last for span in needed], None):  # a bookie that is behind shows that by its last entries
        check = check_replica(
            driver,
            ledger,
            place,
            fragment.first_entry_id,
            last,
            digest=None,
            entry_bytes=_ENTRY_BYTES,
            entries=entries,
        ).machine
        bad = (*check.missing, *check.damaged, *check.unknown)
        if check.silent or any(span.first <= ends.get(span.first % step, -1) for span in bad):
            return False
    return True


def needed_of(metadata: LedgerMetadata, bookie: Bookie, held: Mapping[Bookie, int]) -> list[Span] | None:
    """Return the entries that a bookie of the last fragment has to hold to miss none that was acknowledged.

    Args:
        metadata: The ledger.
        bookie: The bookie.
        held: The last entry that each other bookie holds; bookies that did not answer are left out.

    Returns:
        A span for each residue with entries that may have been acknowledged; None if this is not known for a residue.
    """
    fragment = metadata.fragments[-1]
    quorum = Quorum(metadata.ensemble_size, metadata.write_quorum, metadata.ack_quorum)
    place = fragment.ensemble.index(bookie)
    masks = quorum.masks()
    needed = []
    for residue, mask in enumerate(masks):
        others = [fragment.ensemble[each] for each in places(mask) if each != place]
        if not mask >> place & 1 or len(others) < quorum.ack_quorum:
            continue  # no entry of it is acknowledged without this bookie
        lasts = sorted((held.get(each, _UNKNOWN) for each in others), reverse=True)
        end = lasts[quorum.ack_quorum - 1]
        if end == _UNKNOWN:
            return None
        needed += [
            span
            for span in spans_of(metadata, place, fragment.first_entry_id, end)
            if span.first % len(masks) == residue
        ]
    return needed

"""Whether a bookie misses nothing of a fragment without an end, so that a mark of it can be removed (H13).

A writer that continues without a bookie marks it from the first entry that it misses, and does not say where the
missing ones end: when the bookie is back, the writer begins a fragment, often with the same ensemble.
The fragments before are filled up. For the last one, the bookie's worker finds out itself, after it has read the mark:

1. It asks the other bookies of the fragment for the last entry that each holds. An entry that was acknowledged before,
   and that this bookie misses, is on Qa others of its write set. So if fewer than Qa others of each write set have not
   answered, no such entry is beyond the highest that was answered.
2. It reads all entries up to there that this bookie should have, from this bookie alone, with their checksums.

If all came sound, the bookie misses nothing that was acknowledged before the mark was read. An entry that the writer
counts as missing later changes the mark, and the removal of what was read before is refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Final

from pybk.client.broadcast import Broadcast
from pybk.client.replica_check import check_replica
from pybk.replication.broadcast import LastEntryMachine
from pybk.replication.quorum import Quorum, places
from pybk.replication.replica_check import spans_of

if TYPE_CHECKING:
    from pybk.client.driver import Driver
    from pybk.client.remote_ledger import RemoteLedger
    from pybk.ledger import Bookie, LedgerMetadata

_ENTRY_BYTES: Final = 1024
"""How long an entry is taken to be, for the number that is asked for at a time."""


def misses_nothing(driver: Driver, ledger: RemoteLedger, bookie: Bookie) -> bool:
    """Return whether a bookie holds all that was acknowledged of its ledger's last fragment before the call.

    Args:
        driver: Sends the requests.
        ledger: An open ledger; its password is not needed.
        bookie: A bookie of its last fragment.

    Returns:
        True if so; False if it misses entries, cannot read some, or if that is not known, because others do not answer.

    Cost: One short request to each other bookie; then all that the bookie holds of the fragment is read, if it holds
        the last of its entries.
    """
    fragment = ledger.metadata.fragments[-1]
    machine = LastEntryMachine(ledger.ledger_id, (each for each in fragment.ensemble if each != bookie))
    driver.run(Broadcast(driver, ledger, machine), machine.start)
    last = last_acknowledged(ledger.metadata, bookie, machine.held)
    if last is None:
        return False
    place, first = fragment.ensemble.index(bookie), fragment.first_entry_id
    newest = [span.last for span in spans_of(ledger.metadata, place, first, last)]
    for entries in (newest, None):  # a bookie that is behind shows that by its last entries
        check = check_replica(
            driver, ledger, place, first, last, digest=None, entry_bytes=_ENTRY_BYTES, entries=entries
        ).machine
        if check.missing or check.damaged or check.unknown or check.silent:
            return False
    return True


def last_acknowledged(metadata: LedgerMetadata, bookie: Bookie, held: Mapping[Bookie, int]) -> int | None:
    """Return an entry beyond which none was acknowledged that a bookie of the last fragment misses; None if unknown.

    Args:
        metadata: The ledger.
        bookie: The bookie.
        held: The last entry that each other bookie holds; those are left out that did not say.
    """
    ensemble = metadata.fragments[-1].ensemble
    quorum = Quorum(metadata.ensemble_size, metadata.write_quorum, metadata.ack_quorum)
    silent = {place for place, each in enumerate(ensemble) if each != bookie and each not in held}
    own = 1 << ensemble.index(bookie)
    for mask in quorum.masks():
        if mask & own and len(silent.intersection(places(mask))) >= quorum.ack_quorum:
            return None
    return max(held.values(), default=-1)

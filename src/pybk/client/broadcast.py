"""One request to several bookies: repairs after a read, and moves."""

from __future__ import annotations

import logging
from array import array
from typing import TYPE_CHECKING

from pybk.client.driver import Conversation
from pybk.errors import StorageFullError
from pybk.replication.broadcast import BroadcastMachine, LacBroadcastMachine, WriterSearchMachine
from pybk.replication.messages import Add, BroadcastEnded, Effect, EntryRun, Force, Move, Status

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from pybk.client.driver import Driver
    from pybk.client.remote_ledger import RemoteLedger
    from pybk.flags import StorageHint
    from pybk.ledger.entry import EntryBatch
    from pybk.ledger.ledger_metadata import Bookie

logger = logging.getLogger(__name__)


class Broadcast(Conversation[BroadcastMachine]):
    """Sends one request to several bookies and collects the replies.

    Attributes:
        refused: The bookies that did not do it, each with its status; None if it did not answer.
    """

    refused: tuple[tuple[Bookie, Status | None], ...] = ()

    def take(self, effect: Effect) -> None:
        """Log and keep the refusals, and end, because each bookie has answered or its request has failed."""
        assert type(effect) is BroadcastEnded
        self.refused = effect.refused
        for bookie, status in effect.refused:
            said = "nothing" if status is None else status.name
            logger.warning("ledger %d: %s answered %s", self.ledger.ledger_id, bookie, said)
        self.end()


def repair(driver: Driver, ledger: RemoteLedger, batch: EntryBatch, bad: Iterable[tuple[Bookie, int]]) -> int:
    """Send sound entries of a batch to bookies that have no sound copies; returns at once, any thread.

    Args:
        driver: Sends the requests.
        ledger: The ledger, unlocked: bookies accept these adds only with a proof of its password.
        batch: The entries that were read; those it does not have are not repaired.
        bad: Pairs of a bookie and the id of an entry of which the bookie has no sound copy.

    Returns:
        The number of copies that are sent.
    """
    places = {entry_id: number for number, entry_id in enumerate(batch.entry_ids.tolist())}
    adds = []
    for bookie, entry_id in bad:
        number = places.get(entry_id)
        if number is not None:
            start, size = int(batch.offsets[number]), int(batch.sizes[number])
            run = EntryRun(entry_id, 1, array("q", (size,)), (bytes(batch.buffer[start : start + size]),))
            adds.append((bookie, Add(ledger.ledger_id, (run,), ledger.last_add_confirmed, recovery=True)))
    if adds:
        logger.warning("ledger %d: %d copies were not sound and are sent again", ledger.ledger_id, len(adds))
        broadcast = Broadcast(driver, ledger, BroadcastMachine(adds))
        driver.start(broadcast, broadcast.machine.start)
        driver.group.announce()
    return len(adds)


def move(driver: Driver, ledger: RemoteLedger, tier: StorageHint) -> None:
    """Have each bookie of a ledger move its replica to a tier; returns when all have answered.

    Raises:
        StorageFullError: Some bookies did not move it; their replicas stay readable in their present tier.
    """
    bookies = dict.fromkeys(bookie for fragment in ledger.metadata.fragments for bookie in fragment.ensemble)
    broadcast = Broadcast(
        driver, ledger, BroadcastMachine((bookie, Move(ledger.ledger_id, tier)) for bookie in bookies)
    )
    driver.run(broadcast, broadcast.machine.start)
    if broadcast.refused:
        said = ", ".join(f"{bookie}: {status.name if status else 'no answer'}" for bookie, status in broadcast.refused)
        raise StorageFullError(
            f"ledger {ledger.ledger_id} is not wholly on {tier.value}: {said}; move it again when these bookies can"
        )


def proven_lac(driver: Driver, ledger: RemoteLedger) -> int:
    """Return the highest last add confirmed that a bookie of a ledger's last fragment proves; -1 for none.

    Args:
        driver: Sends the requests.
        ledger: The ledger, unlocked; it may be closed.
    """
    machine = LacBroadcastMachine(ledger.ledger_id, ledger.metadata.fragments[-1].ensemble)
    broadcast = Broadcast(driver, ledger, machine)
    driver.run(broadcast, machine.start)
    return machine.last_add_confirmed


def find_writer(driver: Driver, ledger: RemoteLedger, find: Callable[[Bookie], object | None]) -> bool | None:
    """Ask the registered bookies of a ledger's last fragment whether its writer lives, that is, has a session there.

    A writer that has nothing to append begins its sessions soon after it has created the ledger, and keeps them. It
    begins them again when a bookie of the ensemble is gone, or a bookie has returned (``WriterMachine.announce``).

    Args:
        driver: Sends the requests.
        ledger: The ledger; its password is not needed.
        find: Returns None for a bookie that is not registered, such as ``Membership.find``.

    Returns:
        True if one of them has such a session, False if all say that they have none, None if it is unknown.

    Cost: One short request to each bookie.
    """
    there = [bookie for bookie in ledger.metadata.fragments[-1].ensemble if find(bookie) is not None]
    machine = WriterSearchMachine(ledger.ledger_id, there)
    driver.run(Broadcast(driver, ledger, machine), machine.start)
    return machine.found


def leave(driver: Driver, ledger: RemoteLedger, ensemble: Iterable[Bookie]) -> None:
    """Report to the bookies that a writer used that it has failed; returns at once, the driver's thread.

    Otherwise they would count the writer as alive as long as this client has sessions with them, and the ledger would
    wait for it (H12). A bookie that is not reached forgets the writer when the session ends.

    Args:
        driver: Sends the requests.
        ledger: The ledger.
        ensemble: Its last ensemble; ``ledger`` may have an earlier one, because a writer renews it at the end.
    """
    machine = WriterSearchMachine(ledger.ledger_id, ensemble, leaves=True)
    driver.start(Broadcast(driver, ledger, machine), machine.start)


def flush(driver: Driver, ledger: RemoteLedger) -> None:
    """Have the last fragment's bookies sync the entries they acknowledged; returns when each has answered or failed."""
    ensemble = ledger.metadata.fragments[-1].ensemble
    broadcast = Broadcast(driver, ledger, BroadcastMachine((bookie, Force(ledger.ledger_id)) for bookie in ensemble))
    driver.run(broadcast, broadcast.machine.start)

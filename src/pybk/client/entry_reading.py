"""A read of one entry from one bookie, the commonest request of a client, without a machine.

There is nothing to decide: a sound entry is what was asked for, because every sound copy has the same bytes (I4). Every
other outcome, also a denial, proves nothing here, and the caller has a ``ReadMachine`` find out.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from pybk.errors import DigestMismatchError
from pybk.replication.entry_runs import whole
from pybk.replication.messages import Status
from pybk.threads.group_commit import Completion, GroupCommit
from pybk.transport.codec import Answer, OneEntry, WireReply

if TYPE_CHECKING:
    from pybk.client.remote_ledger import RemoteLedger
    from pybk.ledger.entry import Entry

logger = logging.getLogger(__name__)


class EntryReading(Completion):
    """One read; done when the bookie has answered, or will not.

    Args:
        group: Completes it.
        ledger: The ledger, with its digest.
        entry_id: The entry.
        stride: As ``Read.stride``.

    Attributes:
        entry: The entry, verified; None if the bookie returned no sound copy in time.
    """

    __slots__ = ("_group", "entry", "entry_id", "ledger", "stride")

    def __init__(self, group: GroupCommit, ledger: RemoteLedger, entry_id: int, stride: int) -> None:
        super().__init__()
        self.unseen = True
        self._group = group
        self.ledger = ledger
        self.entry_id = entry_id
        self.stride = stride
        self.entry: Entry | None = None

    def take(self, reply: WireReply | OneEntry | None) -> None:
        """Take the bookie's reply, None for none, and be done; called by the leader."""
        if isinstance(reply, Answer) and reply.status is Status.OK:
            run = reply.run
            if run is not None and len(run.sizes) == 1:
                reply = OneEntry(whole(run), 0, run.sizes[0])
        if isinstance(reply, OneEntry):
            try:
                self.entry = self.ledger.digest.open(*reply, self.entry_id)
            except DigestMismatchError:
                ledger_id = self.ledger.ledger_id
                logger.warning("ledger %d: a bookie's copy of entry %d is damaged", ledger_id, self.entry_id)
        group = self._group
        with group.mutex:
            group.complete(self)

"""What the protocol's machines are told and what they ask for: events, effects, requests and replies.

Machines do no I/O and read no clock: ``step(event, now_ns)`` returns effects. Whoever drives them sends requests,
checks the digests of what comes back, writes metadata, and tells the outcome by an event. A request is known by its
``token``, which the machine chose; tokens of one machine are never used twice.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Final, NamedTuple

from pybk.flags import StorageHint
from pybk.ledger import Bookie, LedgerMetadata

Parts = Sequence[bytes | memoryview]


class EntryRun(NamedTuple):
    """Encoded entries ``first``, ``first + stride``, … of one ledger, all with their original bytes.

    Attributes:
        first: Id of the first entry.
        stride: Distance of the ids: 1 where every bookie takes every entry, else the ensemble's size.
        sizes: Encoded bytes of each entry, ``array("q")`` of ``(n,)``.
        body: The encoded entries, one after the other, in pieces.
    """

    first: int
    stride: int
    sizes: array[int]
    body: Parts

    @property
    def last(self) -> int:
        """Id of the last entry, ``first - stride`` for none."""
        return self.first + (len(self.sizes) - 1) * self.stride


class Status(IntEnum):
    """How a bookie answers. Everything but ``OK`` and the two that say no is no answer: the outcome is unknown.

    ``NO_SUCH_ENTRY`` and ``NO_SUCH_LEDGER`` are promises that the bookie never acknowledged what was asked for; to a
    read that fences, that it never made it durable, and never will for the writer.
    """

    OK = 0
    NO_SUCH_ENTRY = 1
    NO_SUCH_LEDGER = 2
    FENCED = 3
    UNKNOWN = 4
    LIMBO = 5
    WRONG_INSTANCE = 6
    UNAUTHORIZED = 7
    READ_ONLY = 8
    CONFLICT = 9
    DELETED = 10
    REFUSED = 11


NEGATIVE: Final = frozenset({Status.NO_SUCH_ENTRY, Status.NO_SUCH_LEDGER})


# ---- requests: client to bookie ------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Add:
    """Store entries; acknowledged by ``OK`` once they are durable, or at once if ``deferred``.

    Attributes:
        ledger_id: Whose entries.
        runs: The entries, each run ascending; several where the ensemble is larger than the write quorum.
        lac: The writer's last add confirmed.
        recovery: Written by a recovery or a repair: taken by fenced ledgers, too.
        deferred: Acknowledge before the sync; ``Force`` makes it durable.
    """

    ledger_id: int
    runs: tuple[EntryRun, ...]
    lac: int
    recovery: bool = False
    deferred: bool = False


@dataclass(frozen=True, slots=True)
class ReadLac:
    """Ask for the last add confirmed that the bookie knows.

    Attributes:
        ledger_id: The ledger.
        fence: Take no more adds but those of recoveries; durable before the reply, also for a ledger never seen.
        beyond: Reply only once the LAC is above this, or ``wait_ns`` passed; None replies at once.
        wait_ns: Nanoseconds to wait at most.
    """

    ledger_id: int
    fence: bool = False
    beyond: int | None = None
    wait_ns: int = 0


@dataclass(frozen=True, slots=True)
class Read:
    """Read entries ``first``, ``first + stride``, … up to ``last``.

    Attributes:
        ledger_id: The ledger.
        first: First entry wanted.
        last: Last entry wanted, inclusive.
        stride: Distance of the ids.
        bytes_max: Encoded bytes wanted at most; one entry is returned even if longer.
        fence: Fence first, as ``ReadLac`` does.
        checked: Read nothing whose checksum at the bookie is wrong: who asks cannot check digests.
    """

    ledger_id: int
    first: int
    last: int
    stride: int
    bytes_max: int
    fence: bool = False
    checked: bool = False


@dataclass(frozen=True, slots=True)
class Force:
    """Make everything of a ledger durable that was acknowledged before it was."""

    ledger_id: int


@dataclass(frozen=True, slots=True)
class WriteLac:
    """Tell the last add confirmed, as no add carries it; nothing is made durable.

    Attributes:
        ledger_id: The ledger.
        lac: Last add confirmed.
        packet: What proves it to readers; made by the driver, kept by the bookie, opaque to both machines.
    """

    ledger_id: int
    lac: int
    packet: bytes = b""


@dataclass(frozen=True, slots=True)
class Move:
    """Bring what the bookie has of a ledger to another of its tiers; answered when that is done.

    Attributes:
        ledger_id: The ledger.
        tier: Which tier.
    """

    ledger_id: int
    tier: StorageHint


Request = Add | ReadLac | Read | Force | WriteLac | Move


# ---- replies: bookie to client -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Reply:
    """What a bookie answered to an ``Add``, ``Force`` or ``WriteLac``, and to anything that it refused.

    Attributes:
        status: The answer.
        watched: Somebody waits at the bookie for the LAC to move.
    """

    status: Status
    watched: bool = False


@dataclass(frozen=True, slots=True)
class LacReply:
    """The answer to ``ReadLac``.

    Attributes:
        status: ``OK`` or ``NO_SUCH_LEDGER``, both after fencing if that was asked; anything else is no answer.
        lac: The last add confirmed, proven by what the driver checked; -1 for none.
        packet: The bookie's proof of it, if a ``WriteLac`` brought one; for the driver that checks.
        entry_id: The last entry that the bookie holds, whose header is the other proof; -1 for none.
        entry: That entry, encoded.
    """

    status: Status
    lac: int = -1
    packet: bytes = b""
    entry_id: int = -1
    entry: bytes | memoryview = b""


@dataclass(frozen=True, slots=True)
class ReadReply:
    """The answer to ``Read``: as many of the entries as there are without a gap and fit.

    Attributes:
        status: ``OK``: all that were asked for, or as many as fit, at least one. Else why the next entry after
            ``run`` is missing: a negative answer is a promise, everything else means unknown.
        run: The entries, each checked by the driver against its digest; what failed is not in it and makes the
            status ``UNKNOWN``.
        lac: The last add confirmed that the bookie knows.
        damaged: The next entry came, and failed.
    """

    status: Status
    run: EntryRun | None = None
    lac: int = -1
    damaged: bool = False


# ---- events: driver to machine -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Answered:
    """A reply came.

    Attributes:
        token: The request's.
        reply: The reply.
    """

    token: int
    reply: Reply | LacReply | ReadReply


@dataclass(frozen=True, slots=True)
class Unanswered:
    """No reply came in time, or the link broke: the request may have taken effect, and a reply may still come."""

    token: int


@dataclass(frozen=True, slots=True)
class MetadataRead:
    """What the metadata store holds of the ledger.

    Attributes:
        metadata: The metadata, None if the ledger is deleted or was never created.
        version: For the next compare-and-swap.
    """

    metadata: LedgerMetadata | None
    version: int


@dataclass(frozen=True, slots=True)
class MetadataWritten:
    """The compare-and-swap that was asked for took effect, as seen by its writer token.

    Attributes:
        version: For the next one.
    """

    version: int


@dataclass(frozen=True, slots=True)
class MetadataRefused:
    """The compare-and-swap met another version, and did not take effect; the ledger is now as told.

    Attributes:
        metadata: The metadata, None if the ledger is deleted.
        version: For the next compare-and-swap.
    """

    metadata: LedgerMetadata | None
    version: int


@dataclass(frozen=True, slots=True)
class MetadataUnreachable:
    """The metadata store could not be asked; ambiguous outcomes were settled by reading back, or would be this."""


@dataclass(frozen=True, slots=True)
class BookiesChosen:
    """Bookies that may take the places asked for; fewer than asked if there are no more.

    Attributes:
        bookies: By place in the ensemble.
    """

    bookies: dict[int, Bookie]


@dataclass(frozen=True, slots=True)
class Woken:
    """The time that ``WakeAt`` asked for has come."""


Event = (
    Answered
    | Unanswered
    | MetadataRead
    | MetadataWritten
    | MetadataRefused
    | MetadataUnreachable
    | BookiesChosen
    | Woken
)


# ---- effects: machine to driver ------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Send:
    """Send a request to a bookie; its outcome is told by ``Answered`` or ``Unanswered`` with the same token.

    Attributes:
        token: Names the request.
        bookie: To whom; the request counts only for this instance.
        request: What.
    """

    token: int
    bookie: Bookie
    request: Request


@dataclass(frozen=True, slots=True)
class WriteMetadata:
    """Compare-and-swap the ledger's metadata.

    Attributes:
        metadata: What to write.
        version: The version that it replaces.
    """

    metadata: LedgerMetadata
    version: int


@dataclass(frozen=True, slots=True)
class ReadMetadata:
    """Read the ledger's metadata as they are now: no older than the effect."""


@dataclass(frozen=True, slots=True)
class ChooseBookies:
    """Find bookies for places in an ensemble.

    Attributes:
        places: Which places.
        ensemble: The ensemble as it is; those at other places stay.
        excluded: Bookies that will not do.
    """

    places: tuple[int, ...]
    ensemble: tuple[Bookie, ...]
    excluded: frozenset[Bookie]


@dataclass(frozen=True, slots=True)
class WakeAt:
    """Tell ``Woken`` at this time; a later one replaces it.

    Attributes:
        time_ns: On the clock of ``now_ns``.
    """

    time_ns: int


@dataclass(frozen=True, slots=True)
class Confirmed:
    """All entries up to this are durable at their quorums."""

    last_add_confirmed: int


@dataclass(frozen=True, slots=True)
class Acknowledged:
    """Deferred adds up to this were taken by their quorums; ``force`` makes them durable and confirms them.

    Attributes:
        last_entry_id: The last.
    """

    last_entry_id: int


@dataclass(frozen=True, slots=True)
class EntriesRead:
    """Entries that were asked for were read.

    Attributes:
        run: The entries, none of which was told before; entries of different residues come in any order.
    """

    run: EntryRun


@dataclass(frozen=True, slots=True)
class LacRead:
    """The last add confirmed was read: the highest that was proven, -1 for none."""

    last_add_confirmed: int


@dataclass(frozen=True, slots=True)
class ReadEnded:
    """A read has ended; everything before ``missing`` was told by ``Got``.

    Attributes:
        missing: The first entry that was not read; None if all were.
        status: ``OK`` if it needed not be; ``NO_SUCH_ENTRY`` if every bookie of the entry's write set promised that it
            has none; else ``UNKNOWN``.
        bad: Bookies that answered that they cannot read, or gave, a sound copy of an entry, and which: to be repaired.
    """

    missing: int | None
    status: Status
    bad: tuple[tuple[Bookie, int], ...]


@dataclass(frozen=True, slots=True)
class BroadcastEnded:
    """Every bookie that was to be told something has answered, or will not.

    Attributes:
        refused: Who did not do it, and what was answered; None for no answer.
    """

    refused: tuple[tuple[Bookie, Status | None], ...]


@dataclass(frozen=True, slots=True)
class UnderReplicated:
    """Record that a bookie of the ensemble misses entries and nobody could take its place.

    Attributes:
        bookie: The bookie.
        first_entry_id: The first entry it may miss.
    """

    bookie: Bookie
    first_entry_id: int


@dataclass(frozen=True, slots=True)
class Failed:
    """The machine has ended without success.

    Attributes:
        reason: Why, one of the values of ``Reason``.
        detail: For people: which bookies, what was needed, what was found.
    """

    reason: Reason
    detail: str


class Reason(IntEnum):
    """Why a machine gave up."""

    FENCED = 1
    CLOSED = 2
    DELETED = 3
    UNAUTHORIZED = 4
    NOT_ENOUGH_BOOKIES = 5
    METADATA_UNREACHABLE = 6
    UNDECIDED = 7
    CONFLICT = 8


@dataclass(frozen=True, slots=True)
class Done:
    """The machine has ended: closing or recovery succeeded.

    Attributes:
        metadata: The ledger's, closed.
        version: The metadata store's.
    """

    metadata: LedgerMetadata
    version: int


Effect = (
    Send
    | WriteMetadata
    | ReadMetadata
    | ChooseBookies
    | WakeAt
    | Confirmed
    | Acknowledged
    | EntriesRead
    | LacRead
    | ReadEnded
    | UnderReplicated
    | BroadcastEnded
    | Failed
    | Done
)

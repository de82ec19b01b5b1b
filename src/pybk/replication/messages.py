"""Inputs and outputs of the protocol's state machines: events and effects, requests to bookies and their replies.

Theory of operation. Machines do no I/O and read no clock: ``step(event, now_ns)`` takes an event and returns effects.
A driver (``client/driver.py``, or the simulator) performs the effects: it sends requests, checks the digests of the
entries that come back, reads and writes metadata. It reports each outcome to the machine as an event. An event names
its request by the ``token`` that the machine chose; a machine never uses a token twice. A bookie's machine takes the
requests and returns the replies.

All classes are immutable, so they may pass between threads. A new request or reply also needs its bytes in
``transport/codec.py``, whose head says where.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum, IntEnum
from typing import Final, NamedTuple

from pybk.flags import StorageHint
from pybk.ledger.ledger_metadata import Bookie, LedgerMetadata

Parts = Sequence[bytes | memoryview]
"""Bytes in several pieces, in order; passed along without joining them."""


class EntryRun(NamedTuple):
    """Encoded entries ``first``, ``first + stride``, … of one ledger, with the bytes that their writer gave them (I4).

    Attributes:
        first: Id of the first entry.
        stride: Distance between ids: 1 if every bookie takes every entry, else the ensemble's size.
        sizes: Encoded bytes of each entry, ``array("q")`` of ``(n,)``.
        body: The encoded entries in order, in one or more pieces; the pieces have ``sum(sizes)`` bytes together.
    """

    first: int
    stride: int
    sizes: array[int]
    body: Parts

    @property
    def last(self) -> int:
        """Id of the last entry; ``first - stride`` if the run is empty."""
        return self.first + (len(self.sizes) - 1) * self.stride


class Status(IntEnum):
    """The outcome of a request at a bookie.

    ``NO_SUCH_ENTRY`` and ``NO_SUCH_LEDGER`` are denials: the bookie promises that it never acknowledged the entries
    (I17). In reply to a read that fences, the bookie promises that it never made the entries durable, and will not take
    them from the writer any more. Every other status except ``OK`` leaves open which entries the bookie holds.
    """

    OK = 0
    NO_SUCH_ENTRY = 1
    """The ledger is known, the entry was never acknowledged."""
    NO_SUCH_LEDGER = 2
    """No entry of the ledger was ever acknowledged."""
    FENCED = 3
    """A recovery has fenced the ledger: the writer's adds and forces are refused (AB2, AB5)."""
    UNKNOWN = 4
    """The bookie does not know: its storage failed, the entry cannot be read, or the metadata store did not answer."""
    LIMBO = 5
    """Entries of the ledger may have been lost; the writer's adds and forces are refused until they are back (D6)."""
    WRONG_INSTANCE = 6
    """The request names another instance of this bookie, such as one whose directory was wiped (C12)."""
    UNAUTHORIZED = 7
    """The sender has not proven that it may send this request."""
    READ_ONLY = 8
    """The bookie takes adds of recoveries alone, because its disk is full or an operator made it read-only."""
    CONFLICT = 9
    """The bookie holds the entry with other bytes (I14)."""
    DELETED = 10
    """The ledger was deleted (C11)."""
    REFUSED = 11
    """The request came damaged, or the bookie has no memory for it now; it took no effect and may be sent again."""
    NO_WRITER = 12
    """No session that writes the ledger is open at the bookie; a reply to ``AskWriter`` only."""


NEGATIVE: Final = frozenset({Status.NO_SUCH_ENTRY, Status.NO_SUCH_LEDGER})
"""The denials."""


# ---- requests: client to bookie ------------------------------------------------------------------------------------


class Add(NamedTuple):
    """Store entries. The reply is ``OK`` once they are durable (K11), or at once if ``deferred``.

    Attributes:
        ledger_id: The ledger.
        runs: The entries, each run ascending; several runs if the ensemble is larger than the write quorum.
        lac: The writer's last add confirmed (AW2).
        recovery: Whether a recovery, a re-replication or a repair sends it; fenced ledgers take it, too (C7).
        deferred: Acknowledge before the sync; a later ``Force`` makes the entries durable.
    """

    ledger_id: int
    runs: tuple[EntryRun, ...]
    lac: int
    recovery: bool = False
    deferred: bool = False


@dataclass(frozen=True, slots=True)
class ReadLac:
    """Return the last add confirmed (LAC) that the bookie knows.

    Attributes:
        ledger_id: The ledger.
        fence: Fence the ledger first: from then on the bookie takes only adds of recoveries. The fence is durable
            before the reply, also for a ledger that the bookie has never seen (AB3).
        beyond: Reply only once the LAC is above this, or ``wait_ns`` have passed; None replies at once.
        wait_ns: Longest wait in nanoseconds; only with ``beyond``.
    """

    ledger_id: int
    fence: bool = False
    beyond: int | None = None
    wait_ns: int = 0


class Read(NamedTuple):
    """Read entries ``first``, ``first + stride``, … up to ``last``.

    Attributes:
        ledger_id: The ledger.
        first: First entry wanted.
        last: Last entry wanted, inclusive.
        stride: Distance between ids.
        bytes_max: Encoded bytes that the reply may have; it has at least one entry, however long that is.
        fence: Fence first, as ``ReadLac`` does (AB4).
        checked: The bookie verifies its record checksums and returns no entry that fails, because the reader has no
            ledger password and cannot check digests.
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
    """Make durable all entries of a ledger that were acknowledged as ``deferred``.

    Attributes:
        ledger_id: The ledger.
    """

    ledger_id: int


@dataclass(frozen=True, slots=True)
class WriteLac:
    """Send the last add confirmed when no add follows that would carry it. The bookie keeps it in memory only.

    Attributes:
        ledger_id: The ledger.
        lac: Last add confirmed.
        packet: An entry without payload whose digest proves the LAC to readers. The driver makes it and the bookie
            keeps it; both machines pass it along unread.
    """

    ledger_id: int
    lac: int
    packet: bytes = b""


@dataclass(frozen=True, slots=True)
class Move:
    """Move the entries that the bookie holds of a ledger to another of its tiers. The reply follows the move.

    Attributes:
        ledger_id: The ledger.
        tier: The tier to move to.
    """

    ledger_id: int
    tier: StorageHint


@dataclass(frozen=True, slots=True)
class AskWriter:
    """Ask whether a session is open that has written to a ledger. The reply is ``OK`` if so, else ``NO_WRITER``.

    Attributes:
        ledger_id: The ledger.
        leaves: The asking session will not write to the ledger any more, because its writer has failed.
    """

    ledger_id: int
    leaves: bool = False


Request = Add | ReadLac | Read | Force | WriteLac | Move | AskWriter


@dataclass(frozen=True, slots=True)
class CompareLacs:
    """Return which of many ledgers may have a last add confirmed (LAC) above the one that the client knows.

    Older bookies answer ``REFUSED``.

    Attributes:
        ledger_ids: The ledgers, at most ``COMPARED_MAX``.
        lacs: The LAC of each that the client knows; -1 for none.
    """

    ledger_ids: array[int]
    lacs: array[int]


COMPARED_MAX: Final = 4096
"""The most ledgers of one ``CompareLacs``."""


# ---- replies: bookie to client -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Reply:
    """The reply to ``Add``, ``Force``, ``WriteLac``, ``Move`` and ``AskWriter``, and to any request that is refused.

    Attributes:
        status: The outcome.
        watched: A reader waits at the bookie for the LAC to move, so the writer should send it soon.
    """

    status: Status
    watched: bool = False


@dataclass(frozen=True, slots=True)
class LacReply:
    """The reply to ``ReadLac``.

    A LAC is proven by the digest of an entry whose header carries it, or by a packet. The driver checks both, and gives
    the machine the higher LAC that is proven.

    Attributes:
        status: ``OK`` or ``NO_SUCH_LEDGER``, after fencing if that was asked; any other status does not count.
        lac: The last add confirmed; -1 for none. Unproven as the bookie sends it, proven as the machine gets it.
        packet: The packet of the last ``WriteLac``; empty if there was none.
        entry_id: The last entry that the bookie holds; -1 for none.
        entry: That entry, encoded.
    """

    status: Status
    lac: int = -1
    packet: bytes = b""
    entry_id: int = -1
    entry: bytes | memoryview = b""


@dataclass(frozen=True, slots=True)
class LacsAbove:
    """The reply to ``CompareLacs``.

    It proves nothing: a client reads the LAC of the ledgers that it names, and believes of the others what it believes
    of a bookie that answers ``ReadLac`` with an old proof, that is, only with the answers of others.

    Attributes:
        ledger_ids: The ledgers whose LAC is above the one in the request, or is not known because of a limbo.
        status: ``OK``.
    """

    ledger_ids: array[int]
    status: Status = Status.OK


class ReadReply(NamedTuple):
    """The reply to ``Read``: entries from the first one on, up to the first one that is missing or does not fit.

    Attributes:
        status: ``OK`` if ``run`` has all entries that were asked for, or as many as fit, at least one. Otherwise the
            reason why the next entry after ``run`` did not come: a denial is a promise, any other status leaves it
            open.
        run: The entries. The driver checks each digest, cuts the run before the first entry that fails, and then sets
            the status to ``UNKNOWN``.
        lac: The last add confirmed that the bookie knows.
        damaged: Whether the next entry came with a wrong digest.
    """

    status: Status
    run: EntryRun | None = None
    lac: int = -1
    damaged: bool = False


AnyReply = Reply | LacReply | LacsAbove | ReadReply


# ---- events: driver to machine -------------------------------------------------------------------------------------


class Answered(NamedTuple):
    """A bookie replied to a request.

    Attributes:
        token: The token of the request.
        reply: The reply.
    """

    token: int
    reply: AnyReply


class Unanswered(NamedTuple):
    """No reply came in time, or the link broke. The request may have taken effect, or may still do so.

    Attributes:
        token: The token of the request.
    """

    token: int


@dataclass(frozen=True, slots=True)
class MetadataRead:
    """The ledger's metadata were read, as ``ReadMetadata`` asked.

    Attributes:
        metadata: The metadata; None if the ledger was deleted or never created.
        version: The version that the next compare-and-set names.
    """

    metadata: LedgerMetadata | None
    version: int


@dataclass(frozen=True, slots=True)
class MetadataWritten:
    """The compare-and-set of ``WriteMetadata`` took effect.

    Attributes:
        version: The version that the next compare-and-set names.
    """

    version: int


@dataclass(frozen=True, slots=True)
class MetadataRefused:
    """The compare-and-set met another version and did not take effect.

    Attributes:
        metadata: The metadata as they are now; None if the ledger was deleted.
        version: The version that the next compare-and-set names.
    """

    metadata: LedgerMetadata | None
    version: int


@dataclass(frozen=True, slots=True)
class MetadataUnreachable:
    """The metadata store could not be reached, or the outcome of a compare-and-set is not known (C9, C10)."""


@dataclass(frozen=True, slots=True)
class BookiesChosen:
    """Bookies that may take the places that ``ChooseBookies`` named.

    Attributes:
        bookies: The bookies by place in the ensemble; places without a candidate are left out.
        why: The reason, for people, why places are left out although there are bookies; empty if there are too few
            bookies.
    """

    bookies: dict[int, Bookie]
    why: str = ""


@dataclass(frozen=True, slots=True)
class BookiesLeave:
    """Nothing was written, because bookies of ``WriteMetadata.joining`` are now leaving the cluster.

    Attributes:
        bookies: These bookies.
    """

    bookies: tuple[Bookie, ...]


@dataclass(frozen=True, slots=True)
class Woken:
    """The time that ``WakeAt`` named has come."""


@dataclass(frozen=True, slots=True)
class DropAnnounced:
    """The drop was announced to the bookie, as ``AnnounceDrop`` asked.

    Attributes:
        ready: Whether the bookie notes from now on whether entries are added; False if the ledger is in limbo there.
    """

    ready: bool


@dataclass(frozen=True, slots=True)
class DropEnded:
    """The bookie was asked to drop its copy, as ``DropEntries`` asked.

    Attributes:
        dropped: Whether it dropped the copy; False if entries were added since the drop was announced, or something
            failed.
    """

    dropped: bool


Event = (
    Answered
    | Unanswered
    | MetadataRead
    | MetadataWritten
    | MetadataRefused
    | MetadataUnreachable
    | BookiesChosen
    | BookiesLeave
    | Woken
    | DropAnnounced
    | DropEnded
)


# ---- effects: machine to driver ------------------------------------------------------------------------------------


class Send(NamedTuple):
    """Send a request to a bookie; followed by ``Answered`` or ``Unanswered`` with the same token.

    Attributes:
        token: Names the request; never used twice by one machine.
        bookie: The bookie; another instance under the same name refuses the request (C12).
        request: The request.
    """

    token: int
    bookie: Bookie
    request: Request | CompareLacs


@dataclass(frozen=True, slots=True)
class WriteMetadata:
    """Write the ledger's metadata by compare-and-set.

    Followed by ``MetadataWritten``, ``MetadataRefused``, ``MetadataUnreachable`` or ``BookiesLeave``.

    Attributes:
        metadata: The metadata to write.
        version: The version that they replace.
        joining: Bookies that were chosen long ago. If one of them is drained or removed by now, nothing is written,
            because the search that proves that no ledger needs this bookie may have ended.
    """

    metadata: LedgerMetadata
    version: int
    joining: frozenset[Bookie] = frozenset()


@dataclass(frozen=True, slots=True)
class ReadMetadata:
    """Read the ledger's metadata, no older than this effect.

    Followed by ``MetadataRead`` or ``MetadataUnreachable``.
    """


@dataclass(frozen=True, slots=True)
class ChooseBookies:
    """Choose bookies for places of an ensemble; followed by ``BookiesChosen`` or ``MetadataUnreachable``.

    Attributes:
        places: The places to fill.
        ensemble: The ensemble as it is; bookies at other places stay.
        excluded: Bookies that must not be chosen.
        copies: Whether the bookies are to take copies of entries, and so must not be filled beyond the target line.
    """

    places: tuple[int, ...]
    ensemble: tuple[Bookie, ...]
    excluded: frozenset[Bookie]
    copies: bool = False


@dataclass(frozen=True, slots=True)
class WakeAt:
    """Deliver ``Woken`` at this time. A machine has one such time, which a later ``WakeAt`` replaces.

    Attributes:
        time_ns: The time in nanoseconds, on the clock of ``now_ns``.
    """

    time_ns: int


@dataclass(frozen=True, slots=True)
class Confirmed:
    """The last add confirmed moved.

    Attributes:
        last_add_confirmed: All entries up to this one are durable at their ack quorums.
    """

    last_add_confirmed: int


@dataclass(frozen=True, slots=True)
class Acknowledged:
    """Deferred adds were acknowledged by their ack quorums; ``force`` makes them durable and confirms them.

    Attributes:
        last_entry_id: All entries up to this one are acknowledged.
    """

    last_entry_id: int


@dataclass(frozen=True, slots=True)
class EntriesRead:
    """Some entries of a read have come.

    Attributes:
        run: The entries. Each entry is reported once; entries of different residues come in any order.
    """

    run: EntryRun


@dataclass(frozen=True, slots=True)
class LacRead:
    """The last add confirmed was read.

    Attributes:
        last_add_confirmed: The highest one that was proven; -1 for none.
    """

    last_add_confirmed: int


@dataclass(frozen=True, slots=True)
class LacsCompared:
    """The last adds confirmed of many ledgers were compared with those that the client knows.

    Attributes:
        same: The ledgers whose LAC has not moved. Of all others it may have.
    """

    same: frozenset[int]


@dataclass(frozen=True, slots=True)
class ReadEnded:
    """A read has ended; ``EntriesRead`` reported all entries before ``missing``.

    Attributes:
        missing: The first entry that was not read; None if all were.
        status: The reason: ``OK`` if no entry is missing or the byte limit was reached; ``NO_SUCH_ENTRY`` if every
            bookie of the entry's write set denied it; else ``UNKNOWN``.
        bad: Bookies whose copy of an entry cannot be read or is damaged, each with the entry; these copies need repair.
    """

    missing: int | None
    status: Status
    bad: tuple[tuple[Bookie, int], ...]


@dataclass(frozen=True, slots=True)
class BroadcastEnded:
    """Every bookie of a broadcast has replied or failed to.

    Attributes:
        refused: The bookies that did not reply ``OK``, each with its status; None for no reply.
    """

    refused: tuple[tuple[Bookie, Status | None], ...]


@dataclass(frozen=True, slots=True)
class UnderReplicated:
    """Record in the metadata store that a bookie misses entries, before any later ``WriteMetadata`` (C13).

    Attributes:
        bookie: The bookie, of the ensemble or about to leave it.
        first_entry_id: The first entry that it may miss.
    """

    bookie: Bookie
    first_entry_id: int


class ChangeReason(Enum):
    """The reason why a bookie of an ensemble was replaced."""

    NO_ANSWER = "no_answer"
    SLOW = "slow"
    """It left too many confirmed bytes unacknowledged."""
    READ_ONLY = "read_only"
    LIMBO = "limbo"
    REFUSED = "refused"
    """It answered with a status that has no reason of its own."""
    AWAY = "away"
    """It was not registered when the ledger was created."""


CHANGE_REASONS: Final = {Status.READ_ONLY: ChangeReason.READ_ONLY, Status.LIMBO: ChangeReason.LIMBO}
"""The reasons for statuses that have one of their own."""


@dataclass(frozen=True, slots=True)
class EnsembleChanged:
    """A writer's ensemble has other bookies now, and the metadata name them.

    Attributes:
        reasons: The reason for each place.
    """

    reasons: tuple[ChangeReason, ...]


@dataclass(frozen=True, slots=True)
class AnnounceDrop:
    """Announce to the bookie of this process that its copy of the ledger is to be dropped.

    From then on the bookie notes whether entries are added to the copy (SD3). Followed by ``DropAnnounced``.
    """


@dataclass(frozen=True, slots=True)
class DropEntries:
    """Let the bookie of this process delete its entries of the ledger, unless some were added since ``AnnounceDrop``.

    A fence of the ledger stays (SD5). Followed by ``DropEnded``.
    """


@dataclass(frozen=True, slots=True)
class Failed:
    """The machine has ended without success.

    Attributes:
        reason: The kind of failure; decides the error class.
        detail: The text of the error: which bookies, what was needed, what was found.
    """

    reason: Reason
    detail: str


class Reason(IntEnum):
    """The reason why a machine ended without success."""

    FENCED = 1
    """A recovery, or another client's close, took the ledger from its writer (AW4, AW8)."""
    CLOSED = 2
    DELETED = 3
    UNAUTHORIZED = 4
    NOT_ENOUGH_BOOKIES = 5
    """Some write set has no ack quorum of bookies, and no other bookie can take a place."""
    METADATA_UNREACHABLE = 6
    UNDECIDED = 7
    """Too few bookies answered to decide; the same may be tried again later."""
    CONFLICT = 8
    """A bookie holds an entry with other bytes (I14)."""
    OWNER_NEEDED = 9
    """A member's recovery met a question that only the ledger's password can decide (AM3 to AM5)."""


@dataclass(frozen=True, slots=True)
class Done:
    """The machine has ended with success.

    Attributes:
        metadata: The ledger's metadata: closed, if the machine closes or recovers; else as re-replication left them.
        version: Their version in the metadata store.
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
    | LacsCompared
    | ReadEnded
    | UnderReplicated
    | EnsembleChanged
    | BroadcastEnded
    | AnnounceDrop
    | DropEntries
    | Failed
    | Done
)

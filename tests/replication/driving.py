"""A ledger's metadata, and a machine driven by hand."""

from __future__ import annotations

from array import array
from struct import Struct
from typing import Any, TypeVar

from pybk.flags import StorageHint
from pybk.ledger.digest import DigestType
from pybk.ledger.ledger_metadata import Bookie, Fragment, LedgerMetadata
from pybk.replication.entry_runs import cut
from pybk.replication.inflight import Batch
from pybk.replication.messages import (
    Answered,
    BookiesChosen,
    ChooseBookies,
    Effect,
    EntryRun,
    Event,
    Reply,
    Send,
    Status,
    Unanswered,
    UnderReplicated,
    WakeAt,
    Woken,
    WriteMetadata,
)
from pybk.replication.quorum import Quorum
from pybk.replication.writer import WriterMachine

LEDGER = 5
_pack_header = Struct(">qqqq").pack
E_ = TypeVar("E_")


def bookie(number: int) -> Bookie:
    return Bookie(f"b{number}", bytes([number]) * 16)


def metadata(shape: tuple[int, int, int] = (3, 3, 2), *fragments: tuple[int, tuple[int, ...]]) -> LedgerMetadata:
    """Return open metadata; fragments are first entries and numbers of bookies."""
    return LedgerMetadata(
        ledger_id=LEDGER,
        digest_type=DigestType.NONE,
        ensemble_size=shape[0],
        write_quorum=shape[1],
        ack_quorum=shape[2],
        creation_time_ns=0,
        creation_sequence=0,
        tier=StorageHint.NVME,
        key_salt=b"",
        verifier=b"",
        fragments=tuple(
            Fragment(first, tuple(map(bookie, numbers)))
            for first, numbers in fragments or ((0, tuple(range(shape[0]))),)
        ),
    )


def entry(entry_id: int, lac: int = -1) -> bytes:
    """Return an entry of ten payload bytes."""
    return _pack_header(LEDGER, entry_id, lac, 10 * (entry_id + 1)) + b"%010d" % entry_id


def run(first: int, last: int, stride: int = 1) -> EntryRun:
    entries = [entry(entry_id) for entry_id in range(first, last + 1, stride)]
    return EntryRun(first, stride, array("q", map(len, entries)), (b"".join(entries),))


def batch(first: int, last: int, shape: tuple[int, int, int] = (3, 3, 2)) -> Batch:
    entries = [entry(entry_id) for entry_id in range(first, last + 1)]
    runs = cut(first, array("q", map(len, entries)), entries, Quorum(*shape))
    return Batch(first, last, 10 * (last + 1), runs)


class Driven:
    """Keeps what a machine asked for until the test answers."""

    def __init__(self, machine: Any) -> None:
        self.machine = machine
        self.sends: list[Send] = []
        self.effects: list[Effect] = []
        self.recorded: list[UnderReplicated] = []
        self.now = 0

    def take(self, effects: list[Effect]) -> list[Effect]:
        self.sends += [effect for effect in effects if isinstance(effect, Send)]
        self.effects = [effect for effect in effects if not isinstance(effect, Send)]
        self.recorded += [effect for effect in effects if isinstance(effect, UnderReplicated)]
        return effects

    def feed(self, event: Event) -> list[Effect]:
        return self.take(self.machine.step(event, self.now))

    def wake_up(self) -> list[Effect]:
        """Let time pass until the moment that the machine has asked for."""
        self.now = self.only(WakeAt).time_ns
        return self.feed(Woken())

    def pending(self, number: int | None = None) -> list[Send]:
        """Return the requests that wait for an answer, of one bookie or all."""
        return [send for send in self.sends if number is None or send.bookie == bookie(number)]

    def answer(self, number: int, reply: Any = None) -> list[Effect]:
        """Answer the oldest request to a bookie, OK if nothing else is said."""
        send = self.pending(number)[0]
        self.sends.remove(send)
        return self.feed(Answered(send.token, Reply(Status.OK) if reply is None else reply))

    def lose(self, number: int) -> list[Effect]:
        """Let the oldest request to a bookie go unanswered."""
        send = self.pending(number)[0]
        self.sends.remove(send)
        return self.feed(Unanswered(send.token))

    def only(self, kind: type[E_]) -> E_:
        """Return the one effect of a kind that the last event brought."""
        (found,) = [effect for effect in self.effects if isinstance(effect, kind)]
        return found


class Writer(Driven):
    def __init__(
        self,
        opened: LedgerMetadata | None = None,
        *,
        straggler_bytes: int = 1 << 20,
        deferred: bool = False,
        patience_ns: int = 0,
        away: frozenset[Bookie] = frozenset(),
    ) -> None:
        self.writer = WriterMachine(
            opened or metadata(),
            7,
            straggler_bytes=straggler_bytes,
            deferred=deferred,
            patience_ns=patience_ns,
            away=away,
        )
        super().__init__(self.writer)
        self.shape = (
            self.writer.metadata.ensemble_size,
            self.writer.metadata.write_quorum,
            self.writer.metadata.ack_quorum,
        )

    def submit(self, first: int, last: int) -> None:
        self.take(self.writer.submit(batch(first, last, self.shape), self.now))

    def replace(self, number: int, by: int, *, place: int) -> WriteMetadata:
        """Let a bookie fail, and give its place to another; the change is left to be written."""
        self.lose(number)
        assert self.only(ChooseBookies).places == (place,)
        self.feed(BookiesChosen({place: bookie(by)}))
        return self.only(WriteMetadata)


def confirmed(writer: Writer) -> int:
    return writer.writer.last_add_confirmed

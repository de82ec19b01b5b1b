"""Bookies that deceive those who cannot check digests: disks whose bytes changed, and one bookie that lies.

A client with the ledger's password sees through both: its driver verifies digests and the proofs of LACs. A member's
recovery cannot (``docs/design/replication.md``, AM1 to AM6), nor can re-replication, which has bookies check their
records.
"""

from __future__ import annotations

from array import array
from dataclasses import replace
from random import Random
from struct import Struct
from typing import TYPE_CHECKING

from pybk.ledger.ledger_metadata import Bookie
from pybk.replication.entry_runs import entries_of, length_at
from pybk.replication.messages import NEGATIVE, EntryRun, LacReply, Read, ReadLac, ReadReply, Reply, Request, Status
from tests.simulator.disk import ModelReplicas

if TYPE_CHECKING:
    from tests.simulator.ledgers import SimLedger

FORGED_MAX = 2
"""Entries that a liar adds to those that it has."""

_pack_header = Struct(">qqqq").pack

AnyReply = Reply | LacReply | ReadReply


class AlteringReplicas(ModelReplicas):
    """A disk on which the bytes of an entry change; the record's checksum shows it to those who have it checked."""

    def __init__(self, random: Random, *, deferred: bool, short: float, errors: float = 0.0) -> None:
        super().__init__(random, deferred=deferred, short=short, errors=errors)
        self.altered: dict[int, bytes] = {}
        self.mended: dict[int, None] = {}
        """Altered entries that a recovery added again, and that are not synced yet."""

    def damage(self, random: Random) -> None:
        if self.durable:
            entry_id = random.choice(sorted(self.durable))
            entry = bytearray(self.durable[entry_id])
            entry[-1] ^= 1
            if random.random() < 0.3:
                entry[16:24] = max(entry_id - 1, -1).to_bytes(8, "big", signed=True)
            self.altered[entry_id] = bytes(entry)

    def stage(self, ledger_id: int, run: EntryRun, durable: bool, *, recovery: bool = False) -> Status:
        wrong = [entry_id for entry_id in range(run.first, run.last + 1, run.stride) if entry_id in self.altered]
        if wrong and not recovery:
            return Status.UNKNOWN
        status = super().stage(ledger_id, run, durable, recovery=recovery)
        if status is Status.OK:
            self.mended.update(dict.fromkeys(wrong))
        return status

    def commit(self) -> None:
        super().commit()
        for entry_id in self.mended:
            self.altered.pop(entry_id, None)
        self.mended.clear()

    def crash(self) -> None:
        super().crash()
        self.mended.clear()

    def read(
        self,
        ledger_id: int,
        first: int,
        last: int,
        stride: int,
        bytes_max: int,
        *,
        checked: bool = False,
        recovery: bool = False,
    ) -> tuple[Status, EntryRun | None]:
        status, run = super().read(ledger_id, first, last, stride, bytes_max, checked=checked, recovery=recovery)
        if run is None:
            return status, None
        entries: list[bytes] = []
        for entry_id, entry in zip(range(run.first, run.last + 1, run.stride), entries_of(run), strict=True):
            if entry_id in self.altered and checked:
                status = Status.UNKNOWN
                break
            entries.append(self.altered.get(entry_id, bytes(entry)))
        return status, run_of(run.first, run.stride, entries)

    def lac_proof(self, ledger_id: int) -> tuple[int, bytes] | None:
        proof = super().lac_proof(ledger_id)
        return None if proof is None else (proof[0], self.altered.get(*proof))

    def delete(self, ledger_id: int) -> None:
        super().delete(ledger_id)
        self.altered.clear()
        self.mended.clear()

    def repair(self, entries: dict[int, bytes], *, closed: bool) -> None:
        super().repair(entries, closed=closed)
        self.altered.clear()

    def has(self, entry_id: int) -> bool:
        return super().has(entry_id) and entry_id not in self.altered


def run_of(first: int, stride: int, entries: list[bytes]) -> EntryRun | None:
    """Return entries as a run; None for none."""
    return EntryRun(first, stride, array("q", map(len, entries)), (b"".join(entries),)) if entries else None


class Liar:
    """One bookie of the ledger's first ensemble that lies to those who ask it, in one way, until it is stopped.

    - ``forges``: it returns other bytes for entries that it has.
    - ``tail``: it returns entries after its last one that nobody gave it.
    - ``lac``: it reports a LAC that is too high.
    - ``denies``: it denies entries that it acknowledged, to recoveries.
    - ``hides``: as ``forges``, and another bookie, which is honest, does not answer reads of members.
    """

    def __init__(self, ledger: SimLedger, how: str) -> None:
        self.ledger = ledger
        self.how = how
        self.random = Random(f"{ledger.source}/liar")
        assert ledger.metadata.current is not None
        ensemble = ledger.metadata.current.fragments[0].ensemble
        self.bookie: Bookie = self.random.choice(ensemble)
        self.silent: Bookie | None = None
        if how == "hides":
            self.silent = self.random.choice([each for each in ensemble if each != self.bookie])
        self.made: dict[int, bytes] = {}
        """The entries that it made, by id."""
        self.stopped = False

    def says(self, bookie: Bookie, request: Request, reply: AnyReply) -> AnyReply | None:
        """Return what it says in the place of an honest reply, None for nothing."""
        if bookie == self.silent and isinstance(request, Read) and request.checked and not self.stopped:
            return None
        if self.stopped or bookie != self.bookie:
            return reply
        if isinstance(reply, Reply):
            return Reply(Status.OK) if reply.status is Status.CONFLICT else reply  # what it holds it keeps to itself
        if isinstance(reply, LacReply):
            if self.how == "lac" and reply.status is Status.OK:
                return replace(reply, lac=max(reply.lac, reply.entry_id) + self.random.randint(1, 3))
            return reply
        assert isinstance(request, Read)
        return self._read(request, reply)

    def _read(self, request: Read, reply: ReadReply) -> ReadReply:
        run = reply.run
        entries = [] if run is None else [bytes(entry) for entry in entries_of(run)]
        if self.how in ("forges", "hides"):
            for number in range(len(entries)):
                entry_id = request.first + number * request.stride
                if entry_id % 3 == 1 or self.how == "hides":
                    entries[number] = self.made[entry_id] = entries[number][:-1] + b"!"
            return reply._replace(run=run_of(request.first, request.stride, entries))
        if self.how == "denies" and request.fence:
            kept = [entry for entry in entries if int.from_bytes(entry[8:16], "big") % 3 != 1]
            if len(kept) < len(entries):
                short = next(n for n, entry in enumerate(entries) if int.from_bytes(entry[8:16], "big") % 3 == 1)
                return ReadReply(
                    Status.NO_SUCH_ENTRY, run_of(request.first, request.stride, entries[:short]), reply.lac
                )
        if self.how == "tail" and request.fence and reply.status in NEGATIVE:
            after = request.first + len(entries) * request.stride
            if after in self.made or len(self.made) < FORGED_MAX:
                length = length_at(entries[-1]) + 1 if entries else after + 1
                header = _pack_header(self.ledger.ledger_id, after, after - 1 if after % 2 else -1, length)
                self.made.setdefault(after, header + b"forged")
                entries.append(self.made[after])
                return ReadReply(Status.NO_SUCH_ENTRY, run_of(request.first, request.stride, entries), reply.lac)
        return reply


def verified(ledger: SimLedger, request: Request, honest: AnyReply, reply: AnyReply) -> AnyReply:
    """Return what the driver of a client with the password makes of a reply: entries and LACs that are proven.

    Args:
        ledger: The ledger.
        request: What was asked.
        honest: What the bookie would have said, had it not lied; its LAC is the one that it can prove.
        reply: What it said.
    """
    truth = ledger.checker.entries
    if isinstance(reply, LacReply) and isinstance(request, ReadLac):
        sound = reply.entry_id < 0 or bytes(reply.entry) == truth.get(reply.entry_id)
        return honest if sound else LacReply(Status.UNKNOWN)
    if not isinstance(reply, ReadReply) or reply.run is None:
        return reply
    run = reply.run
    ids = range(run.first, run.last + 1, run.stride)
    entries = [bytes(entry) for entry in entries_of(run)]
    good = next((n for n, (i, entry) in enumerate(zip(ids, entries, strict=True)) if entry != truth.get(i)), None)
    if good is None:
        return reply
    return ReadReply(Status.UNKNOWN, run_of(run.first, run.stride, entries[:good]), reply.lac, damaged=True)

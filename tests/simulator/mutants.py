"""Each rule of the protocol broken on purpose: what the simulator does not notice, it does not check.

A mutant is the real source of one function with one piece replaced. ``python -m tests.simulator.mutants`` looks for the
first seed that kills each, which the table then names, so that the tests run that seed alone.
"""

from __future__ import annotations
import __future__

import importlib
import inspect
import os
import sys
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

from tests.simulator.world import World

SEEDS_MAX = 20_000


class Piece(NamedTuple):
    """What is replaced in a function: ``module:Class.function``, the module of ``pybk.replication`` or a whole name."""

    function: str
    old: str
    new: str


class Mutant(NamedTuple):
    """A rule, how it is broken, and a seed that shows it."""

    name: str
    rule: str
    seed: int
    pieces: tuple[Piece, ...]


@contextmanager
def mutated(mutant: Mutant) -> Iterator[None]:
    """Put changed copies of functions in the place of the real ones."""
    undo: list[tuple[Any, str, Any]] = []
    try:
        for piece in mutant.pieces:
            owner, name, real, changed = _changed(piece)
            undo.append((owner, name, real))
            setattr(owner, name, changed)
        yield
    finally:
        for owner, name, real in reversed(undo):
            setattr(owner, name, real)


def _changed(piece: Piece) -> tuple[Any, str, Any, Any]:
    module_name, path = piece.function.split(":")
    owner: Any = importlib.import_module(module_name if "." in module_name else f"pybk.replication.{module_name}")
    *classes, name = path.split(".")
    for each in classes:
        owner = getattr(owner, each)
    real = inspect.getattr_static(owner, name)
    function = real.fget if isinstance(real, property) else real
    source = textwrap.dedent(inspect.getsource(function))
    assert source.count(piece.old) == 1, f"{piece.function} has changed: choose another piece than {piece.old!r}"
    flags = __future__.annotations.compiler_flag
    code = compile(source.replace(piece.old, piece.new), f"<mutant of {piece.function}>", "exec", flags)
    namespace: dict[str, Any] = {}
    exec(code, function.__globals__, namespace)
    return owner, name, real, namespace[name]


def kills(mutant: Mutant, seed: int) -> str:
    """Run a seed with a mutant, and return how it was noticed, or nothing."""
    with mutated(mutant):
        try:
            World(seed).run()
        except Exception as error:  # noqa: BLE001  # a machine that breaks down is noticed as well as a judge that speaks
            return f"{type(error).__name__}: {error}"
    return ""


RECOVERY = "recovery:RecoveryMachine."
WRITER = "writing:WriterMachine."
BOOKIE = "bookie:BookieMachine."
READS_UNFENCED = Piece(
    RECOVERY + "_ask",
    "Read(self._metadata.ledger_id, entry, last, stride, READ_BYTES_MAX, fence=True)",
    "Read(self._metadata.ledger_id, entry, last, stride, READ_BYTES_MAX, fence=False)",
)
NOT_FROZEN = Piece(RECOVERY + "_begin_reading", "lac_sent=self._lac,", "lac_sent=None,")
COUNTED_BEFORE_CAS = Piece(
    WRITER + "_go_on", "(_Phase.STEADY, _Phase.CHOOSING)", "(_Phase.STEADY, _Phase.CHOOSING, _Phase.CHANGING)"
)
SAME_REPLY = "if found == self._wanted:"

MUTANTS = (
    Mutant("M1", "recovery reads fence (D1)", 0, (READS_UNFENCED,)),
    Mutant(
        "M2",
        "recovery's LAC is at least the first entry of the last fragment, less one (D2)",
        0,
        (Piece(RECOVERY + "_metadata_written", "self._lac = fragment.first_entry_id - 1", "self._lac = -1"),),
    ),
    Mutant(
        "M3",
        "recovery's ensembles are written when it closes, not before (D3)",
        0,
        (
            Piece(
                RECOVERY + "_bookies_chosen",
                "return effects + self._go_on(now_ns)",
                "return effects + self._go_on(now_ns) + ([WriteMetadata(replace(self._metadata, "
                "fragments=self._fragments), self._version)] if replacements and self._phase is _Phase.READING else [])",
            ),
        ),
    ),
    Mutant(
        "M4",
        "recovery reads from the ensemble that it fenced (AR3, D3)",
        0,
        (
            Piece(
                RECOVERY + "_bookies_chosen",
                "effects += adds.exchange(replacements)",
                "effects += adds.exchange(replacements); self._ensemble = tuple(adds.ensemble)",
            ),
        ),
    ),
    Mutant(
        "M5",
        "a fence reaches ledgers never seen (AB3)",
        0,
        (
            Piece(
                BOOKIE + "_fence",
                "if state is not None and state.fenced and ledger_id not in self._doubtful:",
                "if state is None or (state.fenced and ledger_id not in self._doubtful):",
            ),
            READS_UNFENCED,
        ),
    ),
    Mutant(
        "M6",
        "silence and UNKNOWN are no denial (rule 4)",
        0,
        (Piece(RECOVERY + "_heard", "if status in NEGATIVE:", "if status is not Status.OK:"),),
    ),
    Mutant(
        "M7",
        "fencing covers every write set (section 2)",
        0,
        (
            Piece(
                "quorum:Quorum.covered",
                "return all((mask & ~known).bit_count() < self.ack_quorum for mask in self.masks())",
                "return known.bit_count() >= self.ack_quorum",
            ),
            READS_UNFENCED,
        ),
    ),
    Mutant(
        "M8",
        "acknowledgements of replaced bookies are undone (AW5)",
        0,
        (Piece("adding:Adds.exchange", "batch.acked &= ~bits\n        batch.durable &= ~bits", "batch.seen &= ~bits"),),
    ),
    Mutant(
        "M9",
        "nothing is sent to new bookies before the metadata names them (AW5, C1)",
        0,
        (
            Piece(
                WRITER + "_bookies_chosen",
                "effects += self._write(self._changed(self.metadata))",
                "effects += self._write(self._changed(self.metadata)) + adds.exchange(self._replacements)",
            ),
            Piece(WRITER + "_metadata_written", "return self._adds.exchange(self._replacements)", "return []"),
            COUNTED_BEFORE_CAS,
        ),
    ),
    Mutant(
        "M10",
        "entries are confirmed in order (AW3, I15)",
        0,
        (
            Piece(
                "adding:Adds.confirm",
                "while pending and acked(pending[0].durable, pending[0].masks):\n"
                "        self._confirmed(pending.popleft())",
                "for batch in [each for each in pending if acked(each.durable, each.masks)]:\n"
                "        pending.remove(batch)\n"
                "        self._confirmed(batch)",
            ),
        ),
    ),
    Mutant(
        "M11",
        "a bookie that may have lost entries is in limbo (D6)",
        0,
        (Piece("tests.simulator.disk:ModelReplicas.forget", "self.limbo = True", "self.limbo = False"),),
    ),
    Mutant("M12", "recovery's adds carry a frozen LAC (D4)", 0, (NOT_FROZEN,)),
    Mutant(
        "M14",
        "a fence outlives a restart (I12)",
        0,
        (
            Piece(
                "tests.simulator.disk:ModelReplicas.crash",
                "self.packet = None",
                "self.packet = None; self.fenced = False",
            ),
        ),
    ),
    Mutant(
        "M15",
        "recovery closes by compare-and-swap (AR9)",
        0,
        (
            Piece(
                "tests.simulator.metadata:SimMetadata._write",
                "effect.version == self.version",
                "(effect.version == self.version or effect.metadata.state == 'closed')",
            ),
        ),
    ),
    Mutant(
        "M16",
        "an ambiguous change is settled, not taken for failed (C9)",
        0,
        (
            Piece(
                WRITER + "_metadata_unreachable",
                "self._tries += 1\n",
                "if self._phase is _Phase.CHANGING:\n"
                "        self._phase = _Phase.STEADY\n"
                "        return []\n"
                "    self._tries += 1\n",
            ),
        ),
    ),
    Mutant(
        "M17",
        "what cannot be read is unknown (K5)",
        0,
        (
            Piece(
                "tests.simulator.disk:ModelReplicas.read",
                "unknown = entry_id in self.corrupt or entry_id in self.staged",
                "unknown = entry_id in self.staged",
            ),
        ),
    ),
    Mutant(
        "M19",
        "acknowledgements of replaced bookies do not count (AW3)",
        0,
        (Piece("adding:Adds.answered", "if self.ensemble[place] != bookie:", "if False:"),),
    ),
    Mutant(
        "M20",
        "what recovery finds is written back (AR5)",
        0,
        (
            Piece(
                RECOVERY + "_write_back",
                "return self._adds.submit(",
                "self._adds.lac, self._adds.length = self._next - 1, length_at(entries[-1])\n    return [] and (",
            ),
        ),
    ),
    Mutant(
        "M21",
        "a writer does not close over a recovery whose LAC moves (D4)",
        0,
        (
            Piece(
                WRITER + "_settle",
                "if found.state is LedgerState.OPEN:",
                "if found.state is LedgerState.OPEN or self._phase is _Phase.CLOSING and found.state != 'closed':",
            ),
            NOT_FROZEN,
        ),
    ),
    Mutant(
        "C1",
        "bookies that no metadata name are not written to (BK #1591)",
        0,
        (
            Piece(
                WRITER + "_bookies_chosen",
                "self._phase = _Phase.CHANGING\n        effects += self._write(self._changed(self.metadata))",
                "effects += adds.exchange(self._replacements)",
            ),
        ),
    ),
    Mutant(
        "C2",
        "all acknowledgements are undone before any batch is looked at (BK #3005)",
        0,
        (
            Piece(
                "adding:Adds.exchange",
                "for batch in self.pending:\n        batch.acked &= ~bits",
                "for batch in list(self.pending):\n        self.confirm()\n        batch.acked &= ~bits",
            ),
        ),
    ),
    Mutant(
        "C3",
        "nothing is confirmed while the change is being written (BK #4097)",
        0,
        (COUNTED_BEFORE_CAS,),
    ),
    Mutant(
        "C4",
        "what is pending is sent to whoever takes a place, even if he had it before (BK #4459)",
        0,
        (
            Piece(
                "adding:Adds.exchange",
                "bits |= 1 << place\n",
                "if self.ensemble[place] == replacements[place]:\n"
                "            self.dead &= ~(1 << place)\n"
                "            self.failed &= ~(1 << place)\n"
                "            continue\n"
                "        bits |= 1 << place\n",
            ),
        ),
    ),
    Mutant(
        "C7",
        "copies are added as recovery does (BK #4163)",
        0,
        (Piece("copying:CopyMachine._write", "recovery=True", "recovery=False"),),
    ),
    Mutant(
        "C9",
        "a refusal that shows one's own change is a success (Pravega #4721)",
        0,
        (Piece(WRITER + "_settle", "if found.state is LedgerState.OPEN:", "if False:"),),
    ),
    Mutant(
        "C10",
        "a close whose reply was lost is a close (BK #2179)",
        0,
        (
            Piece(
                WRITER + "_settle",
                SAME_REPLY,
                "if found is not None and found.state == 'closed':\n"
                "        return self._end(Reason.FENCED, '')\n"
                "    if found == self._wanted:",
            ),
        ),
    ),
    Mutant(
        "C11",
        "an add never makes a ledger that was deleted (BK #4462)",
        0,
        (
            Piece(
                BOOKIE + "_add",
                "if state is None:\n",
                "if state is None:\n"
                "        self._replicas.create(ledger_id, description)\n"
                "        state = self._replicas.state(ledger_id)\n"
                "    if state is None:\n",
            ),
        ),
    ),
    Mutant(
        "C12",
        "requests name the instance (BK #4812, K12)",
        0,
        (Piece("tests.simulator.bookies:SimBookie.deliver", "if to != self.bookie:", "if False:"),),
    ),
    Mutant(
        "C13",
        "failures after the quorum count, too (BK #1390)",
        0,
        (
            Piece(
                "adding:Adds.fail",
                "self._missing[place] =",
                "if first <= self.lac:\n        return\n    self._missing[place] =",
            ),
        ),
    ),
    Mutant(
        "C14",
        "after a change all pending batches are looked at again",
        0,
        (
            Piece(
                WRITER + "step",
                "return self._go_on(",
                "if isinstance(event, MetadataWritten):\n"
                "        return self._metadata_written(event, now_ns)\n"
                "    return self._go_on(",
            ),
        ),
    ),
    Mutant(
        "C15",
        "fragments are copied to their ends (BK #3917)",
        0,
        (
            Piece(
                "copying:fragment_end",
                "metadata.fragments[index + 1].first_entry_id - 1",
                "metadata.fragments[index + 1].first_entry_id - 2",
            ),
        ),
    ),
    Mutant(
        "C16",
        "recovery with too few bookies fails, and does not close short (BOOKKEEPER-150)",
        0,
        (
            Piece(
                RECOVERY + "_bookies_chosen",
                "return effects + self._end(Reason.NOT_ENOUGH_BOOKIES, lacking)",
                "return effects + self._close(self._metadata, self._version)",
            ),
        ),
    ),
    Mutant(
        "K8",
        "read-only bookies are fenced (BK #208)",
        0,
        (Piece(BOOKIE + "_fence", "state = ", "if self.read_only:\n        return False, []\n    state = "),),
    ),
    Mutant(
        "K9",
        "a fenced ledger takes no adds of its writer (AB2, BK #4701)",
        0,
        (Piece(BOOKIE + "_refused", "if state is not None and state.fenced:", "if False:"),),
    ),
    Mutant(
        "K11",
        "an acknowledgement follows the sync",
        0,
        (Piece(BOOKIE + "_add", "if request.deferred:", "if True:"),),
    ),
    Mutant(
        "K12",
        "in limbo nothing is denied (D6)",
        0,
        (Piece(BOOKIE + "_read", "if before.limbo and status in NEGATIVE:", "if False:"),),
    ),
    Mutant(
        "L1",
        "in limbo nothing can be forced (D6)",
        0,
        (Piece(BOOKIE + "_force", "if state is not None and state.limbo:", "if False:"),),
    ),
    Mutant(
        "L2",
        "what is acknowledged, and what is forced, is synced",
        0,
        (Piece(BOOKIE + "_sync", "self._replicas.commit()", "None"),),
    ),
    Mutant(
        "L3",
        "a force covers what was acknowledged when it was sent",
        0,
        (Piece(WRITER + "_forced", "if batch.seen & bit:", "if True:"),),
    ),
    Mutant(
        "L4",
        "deferred entries are confirmed by force alone",
        0,
        (Piece("adding:Adds.answered", "if not deferred:", "if True:"),),
    ),
    Mutant(
        "B1",
        "a bookie's LAC never goes down (I13)",
        0,
        (Piece(BOOKIE + "_note_lac", "if lac <= before:", "if lac == before:"),),
    ),
    Mutant(
        "B2",
        "what was taken and is not synced is synced before it is denied (I17)",
        0,
        (
            Piece(BOOKIE + "_read", "if status is not Status.OK and ledger_id in self._dirty:", "if False:"),
            Piece(
                "tests.simulator.disk:ModelReplicas.read",
                "unknown = entry_id in self.corrupt or entry_id in self.staged",
                "unknown = entry_id in self.corrupt",
            ),
            Piece(BOOKIE + "_fence", "self._sync() if ledger_id in self._dirty else []", "[]"),
        ),
    ),
    Mutant(
        "W1",
        "a refused change ends a writer whose ledger is in recovery (AW8)",
        0,
        (
            Piece(
                WRITER + "_settle",
                "if found.state is LedgerState.OPEN:",
                "if found.state is LedgerState.IN_RECOVERY and self._phase is _Phase.CHANGING:\n"
                "        self._phase = _Phase.STEADY\n"
                "        return self._adds.exchange(self._replacements)\n"
                "    if found.state is LedgerState.OPEN:",
            ),
        ),
    ),
    Mutant(
        "W2",
        "a refused change keeps what a replication changed (I11)",
        0,
        (
            Piece(
                WRITER + "_settle",
                "self.metadata, self._version = found, version",
                "found, self._version = self.metadata, version",
            ),
        ),
    ),
    Mutant(
        "W3",
        "a new fragment begins behind the last confirmed entry (AW5)",
        0,
        (
            Piece(
                WRITER + "_changed", "self._adds.lac + 1, tuple(ensemble)", "self.last_submitted + 1, tuple(ensemble)"
            ),
        ),
    ),
    Mutant(
        "W4",
        "a writer closes at the last confirmed entry (AW7)",
        0,
        (Piece(WRITER + "_changed", "last_entry_id=self._adds.lac", "last_entry_id=self.last_submitted"),),
    ),
    Mutant(
        "R1",
        "recovery's close keeps what a replication changed (I11)",
        0,
        (Piece(RECOVERY + "_close", "found.fragments[:-1] + own", "self._metadata.fragments[:-1] + own"),),
    ),
    Mutant(
        "R2",
        "one denial is no end of the ledger (section 2)",
        0,
        (Piece("quorum:Quorum.negatives_needed", "self.write_quorum - self.ack_quorum + 1", "1"),),
    ),
    Mutant(
        "R3",
        "recovery marks the ledger before it fences (AR1)",
        0,
        (
            Piece(
                RECOVERY + "_mark",
                "return [WriteMetadata(self._wanted, version)]",
                "self._wanted = found; return self._metadata_written(version, 0)",
            ),
        ),
    ),
    Mutant(
        "R4",
        "the length is that of the last entry",
        0,
        (Piece(RECOVERY + "_begin_reading", "self._length_known = self._lac < 0", "self._length_known = True"),),
    ),
    Mutant(
        "R5",
        "all bookies of the last fragment are asked, and all windows are covered before anything is read",
        0,
        (
            Piece(RECOVERY + "_fenced", "if self._quorum.covered(self._known):", "if True:"),
            READS_UNFENCED,
        ),
    ),
    Mutant(
        "P1",
        "copies are swapped in when they are durable (I3)",
        0,
        (
            Piece(
                "copying:CopyMachine._go_on",
                "if self._reader is not None or self._adding or self._writing or self._ended:",
                "if self._reader is not None or self._writing or self._ended:",
            ),
        ),
    ),
    Mutant(
        "P2",
        "an open last fragment is not copied",
        0,
        (Piece("copying:fragment_end", "LedgerState.CLOSED else None", "LedgerState.CLOSED else 0"),),
    ),
    Mutant(
        "P3",
        "a swap is a compare-and-swap of the fragment as it is now",
        0,
        (
            Piece(
                "copying:CopyMachine._metadata_is",
                "self._metadata, self._version, self._last = found, version, last",
                "self._metadata, self._version, self._last = (self._metadata if self._writing else found), version, last",
            ),
        ),
    ),
    Mutant(
        "S1",
        "a LAC is read from enough bookies to cover it",
        0,
        (
            Piece(
                "reading:LacMachine.step",
                "if self._beyond is None and self._quorum.covered(self._known):",
                "if self._beyond is None:",
            ),
        ),
    ),
    Mutant(
        "S2",
        "a reader gets each entry once",
        0,
        (Piece("reading:ReadMachine._heard", "rest = since(run, strand.next)", "rest = run"),),
    ),
    Mutant(
        "S3",
        "a replica without an entry is not the end of a read",
        0,
        (
            Piece(
                "reading:ReadMachine._heard",
                "self._ask(strand, now_ns) or self._exhausted(strand)",
                "self._exhausted(strand)",
            ),
        ),
    ),
)


def main() -> int:
    names = sys.argv[1:]
    for mutant in MUTANTS:
        if names and mutant.name not in names:
            continue
        for seed in range(int(os.environ.get("SEEDS", SEEDS_MAX))):
            how = kills(mutant, seed)
            if how:
                break
        else:
            seed, how = -1, "survives"
        print(f"{mutant.name:4} {seed:6}  {how[:110]}", flush=True)  # noqa: T201
    return 0


if __name__ == "__main__":
    sys.exit(main())

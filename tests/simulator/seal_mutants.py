"""Broken rules of the seal (I18): how it is made by writers and recoveries, what it binds, and how it is checked."""

from __future__ import annotations

from tests.simulator.mutating import Mutant, Piece

RECOVERY = "recovery:RecoveryMachine."
SEAL = "pybk.ledger.keys:LedgerSeal."
BLIND = Piece(
    "pybk.ledger.keys:names",
    "(ledger_id, entry_id, length) == (closed.ledger_id, closed.last_entry_id, closed.length)",
    "True",
)
"""Nothing looks whether the entry that is sealed over is the last one."""


def _unbound(name: str, what: str, part: str, constant: str = "0") -> Mutant:
    """Return a mutant whose seal has a constant in the place of a part."""
    return Mutant(name, f"the seal binds {what}", (Piece(SEAL + "_seal_of", part, constant),))


SEAL_MUTANTS = (
    Mutant(
        "Z1",
        "a recovery seals over the last entry that it wrote back, not over the first of a batch",
        (Piece(RECOVERY + "_write_back", "self._last_entry = entries[-1]", "self._last_entry = entries[0]"), BLIND),
    ),
    Mutant(
        "Z2",
        "a recovery that wrote entries back seals over one of them, not over the last confirmed before",
        (Piece(RECOVERY + "_write_back", "self._last_entry = entries[-1]", "pass"), BLIND),
    ),
    Mutant(
        "Z3",
        "a recovery that wrote nothing back seals over the last confirmed entry",
        (
            Piece(
                RECOVERY + "_note_length",
                "self._last_entry = entry\nself._inflight.length = length_at(entry)",
                "self._inflight.length = length_at(entry)",
            ),
        ),
    ),
    Mutant("Z4", "a recovery seals the end", (Piece(RECOVERY + "_close", "self._seal is not None", "False"),)),
    Mutant("Z5", "a writer seals the end", (Piece("writer:WriterMachine._changed", "self._seal is None", "True"),)),
    Mutant(
        "Z6",
        "a recovery seals the end that it writes, not the one in the metadata that it found",
        (
            Piece(
                RECOVERY + "_close",
                "self._wanted = self._seal(self._wanted, self._last_entry)",
                (
                    "made = self._seal(replace(self._wanted, length=found.length), self._last_entry)\n"
                    "self._wanted = replace(self._wanted, seal=made.seal, last_digest=made.last_digest)"
                ),
            ),
            BLIND,
        ),
    ),
    Mutant(
        "Z7",
        "two clients that find the same end make the same seal",
        (Piece(SEAL + "_seal_of", "content + last_digest", "content + last_digest + bytes(metadata.version)"),),
    ),
    Mutant(
        "Z8",
        "the seal outlives what may change of a closed ledger: where its entries lie",
        (
            Piece(
                "rereplication:RereplicationMachine._compare_and_set",
                "replace(self._metadata, fragments=fragments, version=_1)",
                "replace(self._metadata, fragments=fragments, seal=b'', last_digest=b'', version=_1)",
            ),
        ),
    ),
    _unbound("Z9", "the last entry's digest", "content + last_digest", "content"),
    _unbound("Z10", "the last entry id", "metadata.last_entry_id"),
    _unbound("Z11", "the length", "metadata.length"),
    _unbound("Z12", "the ledger id", "metadata.ledger_id"),
    _unbound("Z13", "the ledger type", "str(metadata.ledger_type).encode()", "b''"),
    _unbound("Z14", "the digest type", "metadata.digest_type"),
    _unbound("Z15", "the write flags", "metadata.write_flags"),
    _unbound("Z16", "the custom metadata", "_custom_hash(metadata.custom_metadata)", "_NO_CUSTOM_HASH"),
    _unbound("Z17", "the key salt", "metadata.key_salt", "b''"),
    Mutant(
        "Z18",
        "a reader compares the seal",
        (Piece(SEAL + "check", "hmac.compare_digest(_1, metadata.seal)", "True"),),
    ),
    Mutant(
        "Z19",
        "a reader takes a seal of a closed ledger alone",
        (Piece(SEAL + "check", "metadata.state is LedgerState.CLOSED", "True"),),
    ),
)

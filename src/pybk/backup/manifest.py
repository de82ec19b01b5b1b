"""Manifests: the content of each run of a backup, as changes since the run before.

A backup is a chain: a base, and the runs after it. The manifest of a run names the ledgers that changed since the run
before, with the places of their entries, the ledgers that were deleted, the named records that changed, and the packs
that the run has written. It begins with the SHA-256 of the manifest before it and ends with its own, by which a missing
manifest, a cut one and one of another backup are found. The base of a new backup is number 0 and empty; when old runs
are removed, a base with the whole state of the oldest kept run replaces it. See ``docs/reference/format.md``.
"""

from __future__ import annotations

import hashlib
import json
from binascii import a2b_base64, b2a_base64
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Final, NamedTuple

from pybk.backup.pack import PACK_BYTES_MAX, Piece
from pybk.errors import CorruptError, UnsupportedFormatError
from pybk.ledger.ledger_metadata import LedgerMetadata, LedgerState
from pybk.storage.format.index_rows import NamedRow
from pybk.storage.named_records import NAME_BYTES_MAX
from pybk.values import INT64_MAX

BACKUP_FORMAT: Final = 1
MANIFEST_BYTES_MAX: Final = 4 << 30
"""The most bytes of a manifest, some ten million ledgers."""
STORE: Final = "store"
CLUSTER: Final = "cluster"

_ID_BYTES: Final = 16
_REMEDY: Final = "restore this file from another copy of the backup, or begin a new backup in an empty directory"


class SourceIdentity(NamedTuple):
    """The identity of the store or cluster that is backed up. Its keys depend on its id, salt and scrypt cost.

    Attributes:
        kind: ``STORE`` or ``CLUSTER``.
        store_id: The 16 bytes of the store or cluster.
        salt: Its scrypt salt.
        scrypt_cost: scrypt's N.
        incarnation: The incarnation of a store; 0 for one that was never restored, and for a cluster.
    """

    kind: str
    store_id: bytes
    salt: bytes
    scrypt_cost: int
    incarnation: int

    def __str__(self) -> str:
        """Name the store or cluster."""
        suffix = f", incarnation {self.incarnation:016x}" if self.incarnation else ""
        return f"{self.kind} {self.store_id.hex()}{suffix}"


class KeptLedger(NamedTuple):
    """A ledger as of a run.

    Attributes:
        metadata: Its encoded metadata.
        last: The last durable entry, -1 for none; for a ledger of a cluster, the last confirmed one.
        lac: The last add confirmed.
        length: The payload bytes up to ``last``.
        pieces: The places of the entries, ascending, without a gap.
    """

    metadata: bytes
    last: int
    lac: int
    length: int
    pieces: tuple[Piece, ...]

    def decoded(self) -> LedgerMetadata:
        """Return the metadata."""
        return LedgerMetadata.decode(self.metadata, where="a ledger of the backup")


def opened(metadata: LedgerMetadata) -> LedgerMetadata:
    """Return the metadata that a ledger had before it was closed."""
    return replace(metadata, state=LedgerState.OPEN, last_entry_id=-1, length=0, seal=b"", last_digest=b"")


class PackInfo(NamedTuple):
    """A pack that a manifest names: its number, bytes and SHA-256."""

    number: int
    nbytes: int
    sha256: bytes


@dataclass(frozen=True, slots=True)
class Manifest:
    """One run, or a base, whose changes are the whole state.

    Attributes:
        base: Whether it is a base.
        backup_id: The 16 bytes of the backup.
        run: The number of the run, from 1 up; 0 for the empty base that names the source.
        previous: The SHA-256 of the manifest before it; for a base, of the manifest of the same run that it replaces,
            empty for number 0.
        source: The store or cluster that is backed up.
        created_ns: The time when the run ended, nanoseconds since 1970.
        durable_lsn: The LSN of the last commit that is in it; 0 for a cluster.
        next_ledger_id: The lowest id that no ledger of the store ever had; 0 for a cluster.
        next_creation_sequence: The next creation sequence; 0 for a cluster.
        packs: The packs that the run has written.
        ledgers: The ledgers that changed, by id; None for one that was deleted.
        named: The named records that changed; one without a value was removed.
        left_out: A sentence for each ledger that this run could not copy, or only in part; each run has all of them.
    """

    base: bool
    backup_id: bytes
    run: int
    previous: bytes
    source: SourceIdentity
    created_ns: int
    durable_lsn: int
    next_ledger_id: int
    next_creation_sequence: int
    packs: tuple[PackInfo, ...]
    ledgers: Mapping[int, KeptLedger | None] = field(default_factory=dict)
    named: tuple[NamedRow, ...] = ()
    left_out: Mapping[int, str] = field(default_factory=dict)

    def encode(self) -> bytes:
        """Return the bytes of the manifest: lines of JSON, of which the last has the SHA-256 of the lines before."""
        source = self.source
        head = {
            "format": BACKUP_FORMAT,
            "base": self.base,
            "backup": self.backup_id.hex(),
            "run": self.run,
            "previous": self.previous.hex(),
            "kind": source.kind,
            "store": source.store_id.hex(),
            "salt": source.salt.hex(),
            "scrypt": source.scrypt_cost,
            "incarnation": source.incarnation,
            "created_ns": self.created_ns,
            "durable_lsn": self.durable_lsn,
            "next_ledger_id": self.next_ledger_id,
            "next_creation_sequence": self.next_creation_sequence,
            "packs": [[each.number, each.nbytes, each.sha256.hex()] for each in self.packs],
        }
        lines = [_line(head)]
        for ledger_id, kept in self.ledgers.items():
            lines.append(_line({"gone": ledger_id} if kept is None else _ledger_fields(ledger_id, kept)))
        for row in self.named:
            value = None if row.value is None else _base64(row.value)
            lines.append(_line({"name": row.name, "version": row.version, "value": value}))
        lines += [_line({"left_out": ledger_id, "why": why}) for ledger_id, why in self.left_out.items()]
        body = b"".join(lines)
        return body + _line({"lines": len(lines), "sha256": hashlib.sha256(body).hexdigest()})

    @classmethod
    def decode(cls, data: bytes, *, where: str) -> Manifest:
        """Decode a manifest.

        Raises:
            CorruptError: It is damaged or was cut.
            UnsupportedFormatError: It has a newer format.
        """
        try:
            return cls._decoded(_checked_lines(data), where)
        except (ValueError, TypeError, LookupError, AttributeError, RecursionError) as error:
            raise CorruptError(
                f"{where}: the manifest is damaged or was cut: {error}; {_REMEDY}", path=where
            ) from error

    @classmethod
    def _decoded(cls, lines: Iterator[Any], where: str) -> Manifest:
        head: Any = next(lines, None)
        if head["format"] != BACKUP_FORMAT:
            raise UnsupportedFormatError(
                f"{where}: a backup of format {head['format']!r}; this pybk reads {BACKUP_FORMAT}: use a newer pybk"
            )
        unhex = bytes.fromhex
        ledgers: dict[int, KeptLedger | None] = {}
        named = []
        left_out: dict[int, str] = {}
        for line in lines:
            if "ledger" in line:
                ledgers[_whole(line["ledger"])] = _kept(line)
            elif "gone" in line:
                ledgers[_whole(line["gone"])] = None
            elif "left_out" in line:
                left_out[_whole(line["left_out"])] = _text(line["why"])
            else:
                value = None if line["value"] is None else a2b_base64(line["value"], strict_mode=True)
                named.append(NamedRow(_name(line["name"]), _whole(line["version"]), value))
        return cls(
            base=head["base"] is True,
            backup_id=_id(head["backup"]),
            run=_whole(head["run"]),
            previous=unhex(head["previous"]),
            source=SourceIdentity(
                _text(head["kind"]),
                _id(head["store"]),
                unhex(head["salt"]),
                _whole(head["scrypt"]),
                _whole(head["incarnation"], (1 << 64) - 1),
            ),
            created_ns=_whole(head["created_ns"]),
            durable_lsn=_whole(head["durable_lsn"]),
            next_ledger_id=_whole(head["next_ledger_id"]),
            next_creation_sequence=_whole(head["next_creation_sequence"]),
            packs=tuple(
                PackInfo(_whole(number), _whole(nbytes, PACK_BYTES_MAX), unhex(sha256))
                for number, nbytes, sha256 in head["packs"]
            ),
            ledgers=ledgers,
            named=tuple(named),
            left_out=left_out,
        )


def _ledger_fields(ledger_id: int, kept: KeptLedger) -> dict[str, Any]:
    return {
        "ledger": ledger_id,
        "metadata": _base64(kept.metadata),
        "last": kept.last,
        "lac": kept.lac,
        "length": kept.length,
        "pieces": [list(piece) for piece in kept.pieces],
    }


def _kept(line: dict[str, Any]) -> KeptLedger:
    """Return the ledger of a line; raise ValueError if its pieces do not hold its entries exactly once."""
    pieces = tuple(Piece(*map(_whole, piece)) for piece in line["pieces"])
    last = -1
    for piece in pieces:
        if piece.first != last + 1 or piece.last < piece.first:
            raise ValueError(f"ledger {line['ledger']}: entries {piece.first} to {piece.last} after entry {last}")
        last = piece.last
    if last != line["last"] or not -1 <= line["lac"] <= last:
        raise ValueError(f"ledger {line['ledger']}: it ends with {line['last']}, LAC {line['lac']}, has up to {last}")
    metadata = a2b_base64(line["metadata"], strict_mode=True)
    return KeptLedger(metadata, last, line["lac"], _whole(line["length"]), pieces)


def _whole(value: Any, most: int = INT64_MAX) -> int:
    """Return a number of a manifest; raise ValueError for a value that cannot be in one."""
    if type(value) is not int or not 0 <= value <= most:
        raise ValueError(f"{value!r:.50} is not a whole number from 0 to {most}")
    return value


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise ValueError(f"{value!r:.50} is not a text")
    return value


def _name(value: Any) -> str:
    """Return the name of a named record; raise ValueError if no store takes it."""
    name = _text(value)
    if not 1 <= len(name.encode()) <= NAME_BYTES_MAX:
        raise ValueError(f"{name!r:.50} is not a name of 1 to {NAME_BYTES_MAX} bytes in UTF-8")
    return name


def _id(value: Any) -> bytes:
    found = bytes.fromhex(value)
    if len(found) != _ID_BYTES:
        raise ValueError(f"{value!r:.50} does not have {_ID_BYTES} bytes")
    return found


def _checked_lines(data: bytes) -> Iterator[Any]:
    """Yield the decoded lines except the last, which has their number and hash; raise ValueError if these differ."""
    if not data.endswith(b"\n"):
        raise ValueError("its last line has no end")
    body, _, end = data[:-1].rpartition(b"\n")
    body += b"\n"
    last = json.loads(end)
    lines = body.splitlines()
    if last["lines"] != len(lines) or last["sha256"] != hashlib.sha256(body).hexdigest():
        raise ValueError("its last line does not fit the lines before")
    return map(json.loads, lines)


def manifest_hash(data: bytes) -> bytes:
    """Return the SHA-256 by which the next manifest names this one."""
    return hashlib.sha256(data).digest()


def _line(content: dict[str, Any]) -> bytes:
    return json.dumps(content, separators=(",", ":"), sort_keys=True).encode() + b"\n"


def _base64(data: bytes) -> str:
    return b2a_base64(data, newline=False).decode()

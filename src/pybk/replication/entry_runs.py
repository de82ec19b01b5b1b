"""Cuts consecutive entries into runs by residue, and splits runs into entries, with at most one copy."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from itertools import chain
from struct import Struct
from typing import Final

from pybk.replication.messages import EntryRun, Parts
from pybk.replication.quorum import Quorum

_LAC_OFFSET: Final = 16
_LENGTH_OFFSET: Final = 24
_new_tuple = tuple.__new__
_unpack_number = Struct(">q").unpack_from


def cut(first: int, sizes: Sequence[int], pieces: Parts, quorum: Quorum) -> tuple[EntryRun, ...]:
    """Cut consecutive entries into one run per residue, or one run if every bookie takes every entry.

    Args:
        first: Id of the first entry.
        sizes: Encoded bytes of each entry, ``(n,)``.
        pieces: The encoded entries in order, all in the same number of pieces. If every bookie takes every entry, the
            pieces may also be cut anywhere.
        quorum: The ledger's sizes.

    Returns:
        The runs, each with its body in one piece.

    Cost: One copy of the bytes; none if there are one piece, of type ``bytes``, and one run.
    """
    stride = quorum.ensemble_size
    if stride == quorum.write_quorum or len(sizes) == 1:
        body = bytes(pieces[0]) if len(pieces) == 1 else b"".join(pieces)
        step = 1 if stride == quorum.write_quorum else stride
        return (_new_tuple(EntryRun, (first, step, array("q", sizes), (body,))),)
    per_entry = len(pieces) // len(sizes)
    entries = [pieces[at : at + per_entry] for at in range(0, len(pieces), per_entry)]
    return tuple(
        EntryRun(first + i, stride, array("q", sizes[i::stride]), (b"".join(chain.from_iterable(entries[i::stride])),))
        for i in range(min(stride, len(sizes)))
    )


def entries_of(run: EntryRun) -> list[memoryview]:
    """Return the encoded entries of a run, as views of its body.

    Args:
        run: The run.

    Cost: A copy of the body if it is in several pieces.
    """
    body = whole(run)
    entries = []
    start = 0
    for size in run.sizes:
        entries.append(body[start : start + size])
        start += size
    return entries


def since(run: EntryRun, entry_id: int) -> EntryRun | None:
    """Return the part of a run from an entry on; None if it is empty.

    Args:
        run: The run.
        entry_id: First entry wanted.
    """
    skipped = -((run.first - entry_id) // run.stride) if entry_id > run.first else 0
    if skipped == 0:
        return run if len(run.sizes) else None
    if skipped >= len(run.sizes):
        return None
    body = whole(run)
    return EntryRun(
        run.first + skipped * run.stride, run.stride, run.sizes[skipped:], (body[sum(run.sizes[:skipped]) :],)
    )


def lac_at(entry: bytes | memoryview) -> int:
    """Return the last add confirmed in the header of an encoded entry."""
    lac: int = _unpack_number(entry, _LAC_OFFSET)[0]
    return lac


def length_at(entry: bytes | memoryview) -> int:
    """Return the payload bytes of the ledger up to and including an encoded entry, from its header."""
    length: int = _unpack_number(entry, _LENGTH_OFFSET)[0]
    return length


def whole(run: EntryRun) -> memoryview:
    """Return the entries of a run in one piece, copied only if they are in several."""
    return memoryview(run.body[0] if len(run.body) == 1 else b"".join(run.body))

"""The bytes of a message: a head with its MAC, what fits beside it, and frames for large runs. See ``docs/wire.md``.

Every length is checked against what was received before anything is made of it, and whatever cannot be a message raises
``FrameError`` and nothing else.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from hmac import compare_digest
from struct import Struct, unpack
from typing import Final, NamedTuple

import numpy as np
import zmq
from xxhash import xxh3_128, xxh3_128_digest

from pybk.entry import ENTRY_HEADER_BYTES
from pybk.errors import PybkError, UsageError
from pybk.replication.messages import EntryRun
from pybk.storage.format.extent import STRIDE_MAX
from pybk.transport.cluster_keys import MAC_BYTES, Mac

MAGIC: Final = b"PB"
VERSION: Final = 1
VERSION_MIN: Final = max(1, VERSION - 1)
"""A bookie and a client one version apart still talk."""

RUNS_MAX: Final = 64
"""Runs of one message: as many as a write quorum has bookies."""

MESSAGE_BYTES_MAX: Final = 24 << 20
"""Default bound on one message: a batch of 16 MiB, or one entry of 5 MiB, and a margin."""

_INLINE_BYTES_MAX: Final = 8 << 10
"""Up to here a run travels beside the head: copying is cheaper than another frame."""

_INT_MAX: Final = (1 << 63) - 1
_SIZE_MAX: Final = (1 << 32) - 1
_VECTOR_MIN: Final = 32

_PREFIX: Final = Struct("<2sBBHHQQQ16s")
_SHARED: Final = Struct("<qqqqqHHI16s")
_HEADER: Final = Struct("<2sBBHHQQQ16sqqqqqHHI16s")
_RUN: Final = Struct("<qQII")
_pack_prefix = _PREFIX.pack
_pack_shared = _SHARED.pack
_unpack_header = _HEADER.unpack_from
_pack_run = _RUN.pack
_pack_size = Struct("<I").pack
_new_tuple = tuple.__new__


class FrameError(PybkError):
    """What was received is no message; nothing was done about it."""


class Header(NamedTuple):
    """The fixed part of a head, as received; what it says is to be believed only once the MAC is checked.

    Attributes:
        magic: ``MAGIC``.
        version: Format version.
        kind: Which message.
        flags: Depend on the kind.
        head_bytes: Bytes that the MAC covers and follows.
        request_id: Names the request among those of its session.
        counter: Of a request: larger than that of each before it.
        taken_bytes: Of a request: bytes of replies that the client has received in this session.
        instance: The bookie's.
        ledger_id: The ledger.
        a: A number; what it means depends on the kind.
        b: A number.
        c: A number.
        d: A number.
        runs: Runs in the table that follows.
        frames: Frames that follow the head's: none, or one per run.
        inline_bytes: Bytes that follow the MAC.
        checksum: XXH3-128 over these and the frames.
    """

    magic: bytes
    version: int
    kind: int
    flags: int
    head_bytes: int
    request_id: int
    counter: int
    taken_bytes: int
    instance: bytes
    ledger_id: int
    a: int
    b: int
    c: int
    d: int
    runs: int
    frames: int
    inline_bytes: int
    checksum: bytes


class Outgoing:
    """An encoded message, but for what depends on the session: made once, sent to any number of bookies.

    Args:
        kind: Which message.
        flags: Depend on the kind.
        ledger_id: The ledger.
        numbers: Four, what they mean depends on the kind.
        runs: Entries.
        blob: Bytes that are not entries; a message has runs or a blob.

    Attributes:
        size: Bytes of all frames together.
        frames: What follows the head's frame.

    Raises:
        UsageError: There are more than ``RUNS_MAX`` runs, or sizes that no message can have.

    Cost: Two microseconds, the checksum of the entries, and their copy up to 64 KiB; ZeroMQ refers to larger ones.
    """

    __slots__ = ("_flags", "_head_bytes", "_inline", "_kind", "_shared", "frames", "size")

    def __init__(
        self,
        kind: int,
        flags: int = 0,
        ledger_id: int = 0,
        numbers: tuple[int, int, int, int] = (0, 0, 0, 0),
        runs: Sequence[EntryRun] = (),
        blob: bytes = b"",
    ) -> None:
        frames: list[zmq.Frame] = []
        table = b""
        inline = blob
        checksum = None
        if runs:
            table, bodies = _pack_runs(runs)
            inline = b"".join([_pack_sizes(run.sizes) for run in runs])
            if sum(map(len, bodies)) <= _INLINE_BYTES_MAX:
                inline = b"".join((inline, *bodies))
            else:
                checksum = _checksum(inline, bodies)
                frames = [zmq.Frame(body, copy=False) for body in bodies]
        if checksum is None:
            checksum = xxh3_128_digest(inline)
        self._kind = kind
        self._flags = flags
        self._inline = inline
        self._shared = _pack_shared(ledger_id, *numbers, len(runs), len(frames), len(inline), checksum) + table
        self._head_bytes = _PREFIX.size + len(self._shared)
        self.frames = frames
        self.size = self._head_bytes + MAC_BYTES + len(inline) + sum(map(len, frames))

    def head(self, request_id: int, counter: int, taken_bytes: int, instance: bytes, mac: Mac, version: int) -> bytes:
        """Make the first frame of the message for one session; for the arguments see ``Header``.

        Cost: A microsecond.
        """
        head = (
            _pack_prefix(
                MAGIC, version, self._kind, self._flags, self._head_bytes, request_id, counter, taken_bytes, instance
            )
            + self._shared
        )
        return head + mac(head) + self._inline


def _pack_runs(runs: Sequence[EntryRun]) -> tuple[bytes, list[bytes | memoryview]]:
    """Return the table of runs, and the bytes of each."""
    if len(runs) > RUNS_MAX:
        raise UsageError(f"a message of {len(runs)} runs; it takes at most {RUNS_MAX}: send several")
    table = []
    bodies: list[bytes | memoryview] = []
    for first, stride, sizes, parts in runs:
        body = parts[0] if len(parts) == 1 else b"".join(parts)
        size = body.nbytes if isinstance(body, memoryview) else len(body)
        if size > _SIZE_MAX:
            raise UsageError(f"a run of {size} bytes; it takes at most {_SIZE_MAX}: send smaller batches")
        table.append(_pack_run(first, stride, len(sizes), size))
        bodies.append(body)
    return b"".join(table), bodies


def _pack_sizes(sizes: array[int]) -> bytes:
    if len(sizes) == 1:
        return _pack_size(sizes[0])
    return np.frombuffer(sizes, np.int64).astype("<u4").tobytes()


def _checksum(inline: bytes | memoryview, bodies: Sequence[bytes | memoryview]) -> bytes:
    state = xxh3_128(inline)
    for body in bodies:
        state.update(body)
    return state.digest()


# ---- received --------------------------------------------------------------------------------------------------------


def decode_head(head: bytes) -> Header:
    """Take a head apart.

    Args:
        head: The first frame of a message.

    Raises:
        FrameError: It is none of a version that this pybk reads, or its lengths are not what was received.
    """
    size = len(head)
    if size < _HEADER.size + MAC_BYTES:
        raise FrameError(f"{size} bytes are no message: the head alone has {_HEADER.size + MAC_BYTES}")
    header = _new_tuple(Header, _unpack_header(head))
    if header.magic != MAGIC:
        raise FrameError(f"a message begins with {MAGIC!r}, not {header.magic!r}")
    if not VERSION_MIN <= header.version <= VERSION:
        raise FrameError(
            f"a message of version {header.version}; this pybk reads {VERSION_MIN} to {VERSION}: upgrade the older end"
        )
    # What a newer pybk adds to the head stands after the runs: covered by the MAC, and skipped.
    if header.head_bytes < _HEADER.size + header.runs * _RUN.size or header.runs > RUNS_MAX:
        raise FrameError(f"{header.runs} runs in a head of {header.head_bytes} bytes")
    if header.head_bytes + MAC_BYTES + header.inline_bytes != size:
        raise FrameError(f"{size} bytes instead of {header.head_bytes} + {MAC_BYTES} + {header.inline_bytes}")
    if header.frames and header.frames != header.runs:
        raise FrameError(f"{header.frames} frames for {header.runs} runs")
    return header


def is_authentic(header: Header, head: bytes, mac: Mac) -> bool:
    """Tell whether the head, and with it the checksum of what follows, has the MAC that it should have."""
    end = header.head_bytes
    return compare_digest(mac(memoryview(head)[:end]), head[end : end + MAC_BYTES])


def is_whole(header: Header, head: bytes, frames: Sequence[memoryview]) -> bool:
    """Tell whether what follows the head is what was sent.

    Args:
        header: Of ``open_head``.
        head: The first frame.
        frames: The others.
    """
    inline = memoryview(head)[header.head_bytes + MAC_BYTES :]
    if not frames:
        return header.frames == 0 and xxh3_128_digest(inline) == header.checksum
    return len(frames) == header.frames and _checksum(inline, frames) == header.checksum


def blob(header: Header, head: bytes, size_max: int) -> bytes:
    """Return what ``Outgoing`` got as its blob.

    Raises:
        FrameError: There are runs instead, or more than ``size_max`` bytes.
    """
    if header.runs or header.inline_bytes > size_max:
        raise FrameError(f"{header.runs} runs and {header.inline_bytes} bytes; expected none and at most {size_max}")
    return head[header.head_bytes + MAC_BYTES :]


def runs(header: Header, head: bytes, frames: Sequence[memoryview]) -> tuple[EntryRun, ...]:
    """Return the runs of a message; they refer to its frames.

    Args:
        header: Of ``open_head``.
        head: The first frame.
        frames: The others; ``is_whole`` said yes.

    Raises:
        FrameError: The table of runs is not that of what follows.
    """
    table = list(_RUN.iter_unpack(memoryview(head)[_HEADER.size : _HEADER.size + header.runs * _RUN.size]))
    view = memoryview(head)
    place = header.head_bytes + MAC_BYTES
    body_place = place + 4 * sum([count for _, _, count, _ in table])
    if body_place > len(head):
        raise FrameError(f"sizes up to byte {body_place} in a frame of {len(head)}")
    found = []
    for number, (first, stride, count, body_bytes) in enumerate(table):
        if not count or first < 0 or not 0 < stride <= STRIDE_MAX or first + (count - 1) * stride > _INT_MAX:
            raise FrameError(f"{count} entries from {first} with stride {stride} are no run")
        sizes = _unpack_sizes(view[place : place + 4 * count], count, body_bytes)
        place += 4 * count
        if frames:
            body = frames[number].toreadonly()
        else:
            body = view[body_place : body_place + body_bytes]
            body_place += body_bytes
        if len(body) != body_bytes:
            raise FrameError(f"{len(body)} bytes instead of a run of {body_bytes}")
        found.append(_new_tuple(EntryRun, (first, stride, sizes, (body,))))
    if body_place != len(head):
        raise FrameError(f"{len(head) - body_place} bytes after the last run")
    return tuple(found)


def _unpack_sizes(packed: memoryview, count: int, body_bytes: int) -> array[int]:
    """Return the sizes of a run's entries, which add up to what its body has."""
    if count < _VECTOR_MIN:
        values = unpack(f"<{count}I", packed)
        sizes = array("q", values)
        smallest, total = min(values), sum(values)
    else:
        wide = np.frombuffer(packed, "<u4").astype(np.int64)
        sizes = array("q", wide.tobytes())
        smallest, total = int(wide.min()), int(wide.sum())
    if smallest < ENTRY_HEADER_BYTES or total != body_bytes:
        raise FrameError(f"entries of {total} bytes, the smallest {smallest}, in a run of {body_bytes}")
    return sizes

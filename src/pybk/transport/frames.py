"""The bytes of a message: a head with its MAC and small contents in one frame, large runs of entries in others.

``docs/reference/wire.md`` has the layout. Decoding checks every length against the received bytes before it uses it,
and raises ``FrameError``, and nothing else, for bytes that are not a message.
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
from zmq.backend import Socket as ZmqSocket

from pybk.errors import PybkError, UsageError
from pybk.ledger import CORE
from pybk.ledger.entry import ENTRY_HEADER_BYTES
from pybk.replication.messages import EntryRun
from pybk.storage.format.extent import STRIDE_MAX
from pybk.transport.cluster_keys import MAC_BYTES, Mac
from pybk.values import INT64_MAX

MAGIC: Final = b"PB"
VERSION: Final = 1
VERSION_MIN: Final = max(1, VERSION - 1)
"""The oldest version that is read; a bookie and a client that are one version apart understand each other."""

RUNS_MAX: Final = 64
"""The most runs of one message: as many as a write quorum can have bookies."""

MESSAGE_BYTES_MAX: Final = 24 << 20
"""The default bound on one message: a batch of 16 MiB, or one entry of 5 MiB, and a margin."""

INLINE_BYTES_MAX: Final = 8 << 10
"""The largest entries that are copied into the head's frame, because a copy is cheaper than another frame."""

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

WIRE_CORE: Final = CORE if hasattr(CORE, "take_add") else None
"""The native core, which makes and takes the messages of an add and a read of one entry; None without it, or if it was
built from older sources, as in a working tree."""

send_frame: Final = ZmqSocket.send
"""Sends one frame of a message: socket, frame, flags, and whether to copy it, which is the default.

It is the method below that of ``zmq.Socket``, which would be one more call for each frame.
"""


class FrameError(PybkError):
    """The received bytes are not a valid message; they had no effect."""


class Header(NamedTuple):
    """The fixed part of a head, as received; it must not be trusted before ``is_authentic`` has verified the MAC.

    Attributes:
        magic: ``MAGIC``.
        version: The version of the format.
        kind: A ``MessageKind``.
        flags: Depend on the kind.
        head_bytes: Bytes before the MAC, which covers them.
        request_id: Identifies the request in its session.
        counter: Of a request: larger than that of every earlier request of the session; of a reply 0.
        taken_bytes: Of a request: bytes of replies that the client has received in the session; of a reply 0.
        instance: Of a request: the bookie instance it is meant for; of a reply: the one that answers.
        ledger_id: The ledger.
        a: A number; its meaning depends on the kind.
        b: A number.
        c: A number.
        d: A number.
        runs: Runs in the table that follows the fixed part.
        frames: Frames after the head's frame: none, or one per run.
        inline_bytes: Bytes after the MAC in the head's frame.
        checksum: XXH3-128 over the inline bytes and the frames.
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
    """An encoded message without the fields that depend on the session; it is made once for any number of bookies.

    Args:
        kind: A ``MessageKind``.
        flags: Depend on the kind.
        ledger_id: The ledger.
        numbers: Four numbers, whose meaning depends on the kind.
        runs: Runs of entries; a message has runs or a blob.
        blob: Bytes that are not entries.

    Attributes:
        size: Bytes of all frames together.
        frames: The frames after the head's frame.

    Raises:
        UsageError: The message has more than ``RUNS_MAX`` runs, or a run is larger than a message can be.

    Cost: Two microseconds, the checksum of the entries, and their copy if they have up to 64 KiB. ZeroMQ refers to the
    buffers of larger ones, which must not change until the message was sent.
    """

    __slots__ = ("_flags", "_head_bytes", "_inline", "_kind", "frames", "shared", "size")

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
        body_bytes = 0
        table = b""
        inline = blob
        checksum = None
        if runs:
            table, inline, bodies, body_bytes = _pack_runs(runs)
            if body_bytes <= INLINE_BYTES_MAX:
                inline = b"".join((inline, *bodies))
            else:
                checksum = _checksum(inline, bodies)
                frames = [zmq.Frame(body, copy=False) for body in bodies]
        if checksum is None:
            checksum = xxh3_128_digest(inline)
        self._kind = kind
        self._flags = flags
        self._inline = inline
        self.shared = _pack_shared(ledger_id, *numbers, len(runs), len(frames), len(inline), checksum) + table
        """The part that all encodings of the message share: the head without the request's id and the MAC."""
        self._head_bytes = _PREFIX.size + len(self.shared)
        self.frames = frames
        self.size = self._head_bytes + MAC_BYTES + len(inline)
        if frames:
            self.size += body_bytes

    def head(self, request_id: int, counter: int, taken_bytes: int, instance: bytes, mac: Mac, version: int) -> bytes:
        """Return the first frame of the message for one session; ``Header`` explains the arguments.

        Cost: A microsecond.
        """
        head = (
            _pack_prefix(
                MAGIC, version, self._kind, self._flags, self._head_bytes, request_id, counter, taken_bytes, instance
            )
            + self.shared
        )
        return head + mac(head) + self._inline


def _pack_runs(runs: Sequence[EntryRun]) -> tuple[bytes, bytes, list[bytes | memoryview], int]:
    """Return the table of runs, the sizes of their entries, the entries of each run, and the bytes of all entries."""
    if len(runs) > RUNS_MAX:
        raise UsageError(f"a message of {len(runs)} runs; it takes at most {RUNS_MAX}: send several")
    table = []
    sizes = []
    bodies: list[bytes | memoryview] = []
    total = 0
    for first, stride, entry_sizes, parts in runs:
        body = parts[0] if len(parts) == 1 else b"".join(parts)
        size = body.nbytes if isinstance(body, memoryview) else len(body)
        if size > _SIZE_MAX:
            raise UsageError(f"a run of {size} bytes; it takes at most {_SIZE_MAX}: send smaller batches")
        table.append(_pack_run(first, stride, len(entry_sizes), size))
        sizes.append(_pack_size(entry_sizes[0]) if len(entry_sizes) == 1 else _pack_sizes(entry_sizes))
        bodies.append(body)
        total += size
    return b"".join(table), b"".join(sizes), bodies, total


def _pack_sizes(sizes: array[int]) -> bytes:
    return np.frombuffer(sizes, np.int64).astype("<u4").tobytes()


def _checksum(inline: bytes | memoryview, bodies: Sequence[bytes | memoryview]) -> bytes:
    state = xxh3_128(inline)
    for body in bodies:
        state.update(body)
    return state.digest()


# ---- receiving -------------------------------------------------------------------------------------------------------


def decode_head(head: bytes) -> Header:
    """Decode the fixed part of a head, and check its lengths; the MAC is not verified.

    Args:
        head: The first frame of a message.

    Raises:
        FrameError: It is not a message of a version that this pybk reads, or its lengths do not match the frame.
    """
    size = len(head)
    if size < _HEADER.size + MAC_BYTES:
        raise FrameError(f"{size} bytes are not a message: the head alone has {_HEADER.size + MAC_BYTES}")
    fields = _unpack_header(head)
    header = _new_tuple(Header, fields)
    magic, version, _, _, head_bytes, _, _, _, _, _, _, _, _, _, runs, frames, inline_bytes, _ = fields
    if (
        magic == MAGIC
        and VERSION_MIN <= version <= VERSION
        # A newer pybk adds fields after the runs: the MAC covers them, and they are skipped here.
        and head_bytes >= _HEADER.size + runs * _RUN.size
        and runs <= RUNS_MAX
        and head_bytes + MAC_BYTES + inline_bytes == size
        and (not frames or frames == runs)
    ):
        return header
    raise _not_a_head(header, size)


def _not_a_head(header: Header, size: int) -> FrameError:
    """Return the error for a frame of ``size`` bytes that does not begin with the head of a message."""
    if header.magic != MAGIC:
        return FrameError(f"a message begins with {MAGIC!r}, not {header.magic!r}")
    if not VERSION_MIN <= header.version <= VERSION:
        return FrameError(
            f"a message of version {header.version}; this pybk reads {VERSION_MIN} to {VERSION}: upgrade the older end"
        )
    if header.head_bytes < _HEADER.size + header.runs * _RUN.size or header.runs > RUNS_MAX:
        return FrameError(f"{header.runs} runs in a head of {header.head_bytes} bytes")
    if header.head_bytes + MAC_BYTES + header.inline_bytes != size:
        return FrameError(f"{size} bytes instead of {header.head_bytes} + {MAC_BYTES} + {header.inline_bytes}")
    return FrameError(f"{header.frames} frames for {header.runs} runs")


def is_authentic(header: Header, head: bytes, mac: Mac) -> bool:
    """Return whether the MAC of a head is right; the head includes the checksum of all that follows."""
    end = header.head_bytes
    return compare_digest(mac(memoryview(head)[:end]), head[end : end + MAC_BYTES])


def is_whole(header: Header, head: bytes, frames: Sequence[memoryview]) -> bool:
    """Return whether the inline bytes and the frames match the checksum in the head.

    Args:
        header: The result of ``decode_head``.
        head: The first frame.
        frames: The other frames.
    """
    inline = memoryview(head)[header.head_bytes + MAC_BYTES :]
    if not frames:
        return header.frames == 0 and xxh3_128_digest(inline) == header.checksum
    return len(frames) == header.frames and _checksum(inline, frames) == header.checksum


def blob(header: Header, head: bytes, size_max: int) -> bytes:
    """Return the blob of a message, as it was given to ``Outgoing``.

    Raises:
        FrameError: The message has runs instead, or more than ``size_max`` bytes.
    """
    if header.runs or header.inline_bytes > size_max:
        raise FrameError(f"{header.runs} runs and {header.inline_bytes} bytes; expected none and at most {size_max}")
    return head[header.head_bytes + MAC_BYTES :]


def runs(header: Header, head: bytes, frames: Sequence[memoryview]) -> tuple[EntryRun, ...]:
    """Return the runs of a message; they refer to its frames.

    Args:
        header: The result of ``decode_head``.
        head: The first frame.
        frames: The other frames; ``is_whole`` returned True.

    Raises:
        FrameError: The table of runs does not match the bytes that follow.
    """
    table = list(_RUN.iter_unpack(memoryview(head)[_HEADER.size : _HEADER.size + header.runs * _RUN.size]))
    view = memoryview(head)
    at = header.head_bytes + MAC_BYTES
    body_at = at
    for _, _, count, _ in table:
        body_at += 4 * count
    if body_at > len(head):
        raise FrameError(f"sizes up to byte {body_at} in a frame of {len(head)}")
    found = []
    for number, (first, stride, count, body_bytes) in enumerate(table):
        if not count or first < 0 or not 0 < stride <= STRIDE_MAX or first + (count - 1) * stride > INT64_MAX:
            raise FrameError(f"{count} entries from {first} with stride {stride} are not a run")
        sizes = _unpack_sizes(view[at : at + 4 * count], count, body_bytes)
        at += 4 * count
        if frames:
            body = frames[number].toreadonly()
        else:
            body = view[body_at : body_at + body_bytes]
            body_at += body_bytes
        if len(body) != body_bytes:
            raise FrameError(f"{len(body)} bytes instead of a run of {body_bytes}")
        found.append(_new_tuple(EntryRun, (first, stride, sizes, (body,))))
    if body_at != len(head):
        raise FrameError(f"{len(head) - body_at} bytes after the last run")
    return tuple(found)


def _unpack_sizes(packed: memoryview, count: int, body_bytes: int) -> array[int]:
    """Return the sizes of a run's entries, after checking that they add up to the size of its body."""
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

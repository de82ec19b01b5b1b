"""Compare the messages of the native core with those of pure Python, sound ones and hostile ones."""

from __future__ import annotations

import random
from array import array
from struct import pack_into, unpack_from
from typing import TYPE_CHECKING

from pybk.ledger.entry import ENTRY_HEADER_BYTES
from pybk.replication.messages import Add, EntryRun, Read, Reply, Status
from pybk.transport.cluster_keys import MAC_BYTES, mac_of
from pybk.transport.codec import (
    DAMAGED,
    Answer,
    EntryRead,
    MessageKind,
    WireReply,
    WireRequest,
    decode_reply,
    decode_request,
    encode,
)
from pybk.transport.frames import VERSION, FrameError, Header, Outgoing, decode_head, is_authentic, is_whole

if TYPE_CHECKING:
    from pybk.ledger.native import NativeCore

HEAD_BYTES = 112
EDGES = (0, 1, -1, 2, 31, 32, 64, 65, 4095, (1 << 31) - 1, 1 << 31, (1 << 32) - 1, 1 << 32, (1 << 63) - 1, -(1 << 63))
FIELDS = (
    *((3, "B"), (4, "H"), (6, "H"), (8, "Q"), (16, "Q"), (24, "Q")),
    *((at, "q") for at in range(48, 88, 8)),
    *((88, "H"), (90, "H"), (92, "I"), (112, "q"), (120, "Q"), (128, "I"), (132, "I"), (136 + MAC_BYTES, "I")),
)
"""Where the numbers of a message are, and their formats; the last five are those of a run."""


def compare(core: NativeCore, source: random.Random) -> int:
    """Compare some messages; return how many."""
    key, instance = source.choice((b"", source.randbytes(32))), source.randbytes(16)
    ids = source.choice((source.getrandbits(63), 1 << 63)), source.getrandbits(64), source.getrandbits(64)
    numbers = [source.choice((source.getrandbits(40), 0, (1 << 63) - 1)) for _ in range(2)]
    one = EntryRead(numbers[0], numbers[1], source.randint(1, 64))
    read = core.make_read(key, instance, VERSION, *ids, *one)
    assert read == one.head(*ids, instance, mac_of(key), VERSION)
    entry = source.randbytes(source.choice((ENTRY_HEADER_BYTES, source.randint(ENTRY_HEADER_BYTES, 8192), 8192)))
    run = EntryRun(one.entry_id, one.stride, array("q", (len(entry),)), (entry,))
    answer = core.make_answer(key, instance, VERSION, ids[0], one.entry_id, one.stride, memoryview(entry))
    assert answer == encode(Answer(Status.OK, run)).head(ids[0], 0, 0, instance, mac_of(key), VERSION)
    found = core.take_reply(answer, key, instance)
    assert found == (ids[0], 0, one.entry_id, one.stride, len(answer) - len(entry), len(answer))
    taken = core.take_read(read, key, instance, Read)
    assert taken == (*ids, one.request())
    assert type(taken[3]) is Read
    others = [
        encode(Read(7, 1, 9, 2, 1 << source.randrange(40), fence=True, checked=bool(source.randrange(2)))),
        encode(Answer(Status.NO_SUCH_ENTRY)),
        encode(Answer(Status.OK, EntryRun(1, 1, array("q", (40, 50)), (bytes(90),)))),
        encode(Answer(Status.OK, run, source.randbytes(32))),
        encode(Reply(source.choice(list(Status)), watched=bool(source.randrange(2)))),
        DAMAGED,
        encode(
            Add(one.ledger_id, (run,), source.choice((-1, 5)), bool(source.randrange(2)), bool(source.randrange(2)))
        ),
        encode(Add(7, (run, run._replace(first=0)), 5)),
    ]
    sound = [read, answer, *(_one_frame(each, *ids, instance, key) for each in others)]
    hostile = [_damaged(source, source.choice(sound), key) for _ in range(8)]
    for message in (*sound, *hostile, *(each + b"x" for each in sound), b"", source.randbytes(200)):
        _check(core, message, key, source.choice((instance, instance, source.randbytes(16))))
    return len(sound) + len(hostile)


def _one_frame(message: Outgoing, request_id: int, counter: int, taken: int, instance: bytes, key: bytes) -> bytes:
    return message.head(request_id, counter, taken, instance, mac_of(key), VERSION)


def _check(core: NativeCore, message: bytes, key: bytes, instance: bytes) -> None:
    """Check that the core takes what Python takes, as far as it is for it, and nothing else."""
    header, content = _by_python(message, key, instance)
    read = None
    if header is not None and type(content) is Read:
        read = header.request_id, header.counter, header.taken_bytes, content
    assert core.take_read(message, key, instance, Read) == read, message.hex()
    added = None
    if header is not None and isinstance(content, Add) and len(content.runs) == 1 and len(content.runs[0].sizes) == 1:
        first, stride, _, (body,) = content.runs[0]
        added = (
            *(header.request_id, header.counter, header.taken_bytes, header.flags, content.ledger_id, content.lac),
            *(first, stride, len(message) - len(body), len(message)),
        )
    assert core.take_add(message, key, instance) == added, message.hex()
    reply = None
    if header is not None and header.kind == MessageKind.REPLY and not header.runs and not header.inline_bytes:
        reply = header.request_id, header.flags, 0, 0, len(message), len(message)
    if header is not None and isinstance(content, Answer) and content.run is not None and not header.flags:
        first, stride, sizes, (body,) = content.run
        if len(sizes) == 1:
            reply = header.request_id, 0, first, stride, len(message) - len(body), len(message)
    assert core.take_reply(message, key, instance) == reply, message.hex()


def _by_python(message: bytes, key: bytes, instance: bytes) -> tuple[Header | None, WireRequest | WireReply | None]:
    """Return the head of a message of this session that came whole, in one frame, and what it says if that is valid."""
    header = None
    try:
        decoded = decode_head(message)
        authentic = is_authentic(decoded, message, mac_of(key)) and decoded.instance == instance
        if authentic and is_whole(decoded, message, ()):
            header = decoded
            return header, (decode_reply if header.kind % 2 else decode_request)(header, message, ())
    except FrameError:
        pass
    return header, None


def _damaged(source: random.Random, message: bytes, key: bytes) -> bytes:
    """Return a message with some numbers changed, bits flipped or an end cut off, often with the right MAC again."""
    changed = bytearray(message)
    for _ in range(source.randint(1, 3)):
        at, kind = source.choice(FIELDS)
        which = source.randrange(4)
        if which == 0:
            changed[source.randrange(len(changed))] ^= 1 << source.randrange(8)
        elif which == 1 and len(changed) > HEAD_BYTES + MAC_BYTES:
            del changed[source.randrange(HEAD_BYTES + MAC_BYTES, len(changed)) :]
        elif at + 8 <= len(changed):
            bits = {"B": 8, "H": 16, "I": 32}.get(kind, 64)
            value = source.choice(EDGES) % (1 << bits)
            if source.randrange(2):
                value = (unpack_from(f"<{kind}", changed, at)[0] + source.choice((-1, 1))) % (1 << bits)
            pack_into(f"<{kind.upper()}", changed, at, value)
    if source.randrange(4):
        _authenticate(changed, key)
    return bytes(changed)


def _authenticate(message: bytearray, key: bytes) -> None:
    """Write the right checksum and MAC into a message, as far as they have room."""
    (head_bytes,) = unpack_from("<H", message, 6)
    if head_bytes < HEAD_BYTES or head_bytes + MAC_BYTES > len(message):
        return
    message[96:112] = mac_of(b"")(bytes(message[head_bytes + MAC_BYTES :]))
    message[head_bytes : head_bytes + MAC_BYTES] = mac_of(key)(bytes(message[:head_bytes]))

"""Encodes messages as frames and decodes them: the protocol's requests and replies, and those of sessions themselves.

A new message is added in three places: its dataclass in ``pybk.replication.messages``, or here if only the transport
uses it; its number in ``MessageKind`` (even for requests, odd for replies) with one encoder in ``ENCODERS`` and, for
a request, one decoder in ``DECODERS``; and one row of the table in ``docs/reference/wire.md``. Encoders and decoders
are pure functions. A decoder must raise FrameError, and nothing else, for numbers that no such message may have.
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from struct import Struct
from typing import Any, Final, NamedTuple

import zmq
from xxhash import xxh3_128_digest

from pybk.errors import UsageError
from pybk.flags import StorageHint
from pybk.ledger.ledger_metadata import DESCRIPTION_BYTES_MAX
from pybk.replication.messages import (
    COMPARED_MAX,
    Add,
    AskWriter,
    CompareLacs,
    EntryRun,
    Force,
    LacsAbove,
    Move,
    Read,
    ReadLac,
    Reply,
    Status,
)
from pybk.storage.format.extent import STRIDE_MAX
from pybk.transport.cluster_keys import LAC_PACKET_BYTES, MEMBER_MAC_BYTES, SIGNATURE_BYTES, Mac
from pybk.transport.frames import MESSAGE_BYTES_MAX, FrameError, Header, Outgoing, blob, runs

NONCE_BYTES: Final = 16
SESSION_BYTES: Final = 16
HELLO_ID: Final = (1 << 64) - 1
"""The request id of HELLO: a ``NO_SESSION`` with this id says that the bookie has too many sessions."""

PROBE_ID: Final = (1 << 64) - 1
"""The id of an unsolicited reply, which clients ignore; it shows a bookie whether a client is still connected."""

_TIERS: Final = tuple(StorageHint)
_new_tuple = tuple.__new__
_FIRST_FLAG: Final = 1
_SECOND_FLAG: Final = 2
_STATUS_BITS: Final = 0xFF
_WATCHED: Final = 1 << 8
_DAMAGED: Final = 1 << 9
_PACKET: Final = 1 << 10
_PACKET_NUMBERS: Final = Struct("<4q")
_STATUSES: Final = {int(status): status for status in Status}


class MessageKind(IntEnum):
    """The number of each message; requests are even and replies odd, so neither is taken for the other."""

    HELLO = 2
    WELCOME = 3
    PING = 4
    NO_SESSION = 7
    AUTHORIZE = 8
    AUTHORIZE_MEMBER = 10
    ADD = 16
    REPLY = 17
    READ_LAC = 18
    ANSWER = 19
    READ = 20
    FORCE = 22
    MOVE = 26
    LAC_PACKET = 24
    ASK_WRITER = 28
    COMPARE_LACS = 30
    LACS_ABOVE = 31


_REPLY: Final = int(MessageKind.REPLY)


@dataclass(frozen=True, slots=True)
class Authorize:
    """Prove to a bookie the right to add to, fence and delete a ledger, once per session. The answer is ``Reply``.

    Attributes:
        ledger_id: The ledger.
        description: The ledger's encoded description, which includes its verifier and has the cluster's MAC; at most
            ``DESCRIPTION_BYTES_MAX`` bytes.
        signature: The result of ``RightsKey.sign`` for the session, the bookie's instance and the ledger.
    """

    ledger_id: int
    description: bytes
    signature: bytes = field(repr=False)


@dataclass(frozen=True, slots=True)
class AuthorizeMember:
    """Prove to a bookie that the client is a member, to recover a ledger without its password. The answer is ``Reply``.

    Attributes:
        ledger_id: The ledger.
        description: As in ``Authorize``.
        mac: The result of ``MemberKey.sign`` for the session, the bookie's instance and the ledger.
    """

    ledger_id: int
    description: bytes
    mac: bytes = field(repr=False)


@dataclass(frozen=True, slots=True)
class LacPacket:
    """``WriteLac`` with its proof. The answer is ``Reply``.

    Attributes:
        ledger_id: The ledger.
        packet: The result of ``cluster_keys.prove_lac``, ``LAC_PACKET_BYTES`` bytes.
    """

    ledger_id: int
    packet: bytes


@dataclass(frozen=True, slots=True)
class Answer:
    """The answer to ``Read`` and ``ReadLac`` on the wire: entries and proofs, which the client verifies.

    Attributes:
        status: As in ``ReadReply`` and ``LacReply``.
        run: The entries read; for ``ReadLac`` the bookie's last entry, whose header proves a LAC. None without entries.
        packet: The newest LAC packet that the bookie has, ``LAC_PACKET_BYTES`` bytes; empty if it has none.
    """

    status: Status
    run: EntryRun | None = None
    packet: bytes = b""


@dataclass(frozen=True, slots=True)
class Ping:
    """Ask the bookie for a sign of life. The answer is ``Reply``."""


WireRequest = (
    Add | ReadLac | Read | Force | Move | AskWriter | CompareLacs | LacPacket | Authorize | AuthorizeMember | Ping
)
WireReply = Reply | Answer | LacsAbove


class EntryRead(NamedTuple):
    """A ``Read`` of one entry, which is encoded for each session in one step; see ``Outgoing``.

    Attributes:
        ledger_id: The ledger.
        entry_id: The entry.
        stride: As ``Read.stride``.
    """

    ledger_id: int
    entry_id: int
    stride: int

    @property
    def frames(self) -> list[zmq.Frame]:
        """The frames after the head's frame: none."""
        return []

    def request(self) -> Read:
        """Return the request."""
        return Read(self.ledger_id, self.entry_id, self.entry_id, self.stride, 1)

    def head(self, request_id: int, counter: int, taken_bytes: int, instance: bytes, mac: Mac, version: int) -> bytes:
        """Return the message for one session; see ``Outgoing.head``."""
        return _encode_read(self.request()).head(request_id, counter, taken_bytes, instance, mac, version)


class OneEntry(NamedTuple):
    """The answer to ``EntryRead`` if it is one entry, not verified.

    Attributes:
        buffer: Holds the entry.
        start: Where it starts.
        end: Where it ends.
    """

    buffer: memoryview
    start: int
    end: int


# ---- to frames -------------------------------------------------------------------------------------------------------


def encode(message: WireRequest | WireReply) -> Outgoing:
    """Encode a message.

    Raises:
        UsageError: It is larger than a message can be.
    """
    if type(message) is Reply:
        return _REPLIES[message.status, message.watched]
    encoder: Callable[[Any], Outgoing] = ENCODERS[type(message)]
    return encoder(message)


def _encode_add(add: Add) -> Outgoing:
    flags = _FIRST_FLAG * add.recovery + _SECOND_FLAG * add.deferred
    return Outgoing(MessageKind.ADD, flags, add.ledger_id, (add.lac, 0, 0, 0), add.runs)


def _encode_read_lac(read: ReadLac) -> Outgoing:
    flags = _FIRST_FLAG * read.fence + _SECOND_FLAG * (read.beyond is not None)
    return Outgoing(MessageKind.READ_LAC, flags, read.ledger_id, (read.beyond or 0, read.wait_ns, 0, 0))


def _encode_read(read: Read) -> Outgoing:
    numbers = (read.first, read.last, read.stride, read.bytes_max)
    flags = _FIRST_FLAG * read.fence + _SECOND_FLAG * read.checked
    return Outgoing(MessageKind.READ, flags, read.ledger_id, numbers)


def _encode_force(force: Force) -> Outgoing:
    return Outgoing(MessageKind.FORCE, 0, force.ledger_id)


def _encode_move(move: Move) -> Outgoing:
    return Outgoing(MessageKind.MOVE, 0, move.ledger_id, (_TIERS.index(move.tier), 0, 0, 0))


def _encode_ask_writer(ask: AskWriter) -> Outgoing:
    return Outgoing(MessageKind.ASK_WRITER, _FIRST_FLAG * ask.leaves, ask.ledger_id)


def _encode_compare_lacs(compare: CompareLacs) -> Outgoing:
    return Outgoing(MessageKind.COMPARE_LACS, blob=_packed(compare.ledger_ids) + _packed(compare.lacs))


def _encode_lacs_above(above: LacsAbove) -> Outgoing:
    return Outgoing(MessageKind.LACS_ABOVE, int(above.status), blob=_packed(above.ledger_ids))


def _packed(numbers: array[int]) -> bytes:
    """Return numbers as i64, little-endian."""
    if sys.byteorder == "big":
        numbers = numbers[:]
        numbers.byteswap()
    return numbers.tobytes()


def _unpacked(packed: bytes) -> array[int]:
    """Return the numbers that ``_packed`` has packed."""
    numbers = array("q", packed)
    if sys.byteorder == "big":
        numbers.byteswap()
    return numbers


def _encode_lac_packet(lac: LacPacket) -> Outgoing:
    return Outgoing(MessageKind.LAC_PACKET, 0, lac.ledger_id, blob=lac.packet)


def _encode_authorize(right: Authorize) -> Outgoing:
    _check_description(right)
    return Outgoing(MessageKind.AUTHORIZE, 0, right.ledger_id, blob=right.signature + right.description)


def _encode_authorize_member(right: AuthorizeMember) -> Outgoing:
    _check_description(right)
    return Outgoing(MessageKind.AUTHORIZE_MEMBER, 0, right.ledger_id, blob=right.mac + right.description)


def _check_description(right: Authorize | AuthorizeMember) -> None:
    if len(right.description) > DESCRIPTION_BYTES_MAX:
        raise UsageError(
            f"the description of ledger {right.ledger_id} has {len(right.description)} bytes; "
            f"the limit is {DESCRIPTION_BYTES_MAX}"
        )


def _encode_ping(_ping: Ping) -> Outgoing:
    return Outgoing(MessageKind.PING)


def _encode_answer(answer: Answer) -> Outgoing:
    flags = int(answer.status)
    numbers = (0, 0, 0, 0)
    if answer.packet:
        flags |= _PACKET
        numbers = _PACKET_NUMBERS.unpack(answer.packet)
    return Outgoing(MessageKind.ANSWER, flags, 0, numbers, () if answer.run is None else (answer.run,))


ENCODERS: Final[dict[type, Callable[[Any], Outgoing]]] = {
    Add: _encode_add,
    ReadLac: _encode_read_lac,
    Read: _encode_read,
    Force: _encode_force,
    Move: _encode_move,
    AskWriter: _encode_ask_writer,
    CompareLacs: _encode_compare_lacs,
    LacsAbove: _encode_lacs_above,
    LacPacket: _encode_lac_packet,
    Authorize: _encode_authorize,
    AuthorizeMember: _encode_authorize_member,
    Ping: _encode_ping,
    Answer: _encode_answer,
}
"""The encoder of each kind of message except ``Reply``."""

_REPLIES: Final = {
    (status, watched): Outgoing(MessageKind.REPLY, status | _WATCHED * watched)
    for status in Status
    for watched in (False, True)
}
"""All replies without entries, encoded once."""

PLAIN_REPLIES: Final = {
    status | _WATCHED * watched: Reply(status, watched) for status in Status for watched in (False, True)
}
"""All replies without entries, decoded once, by their flags."""

_NOTHING_CHECKSUM: Final = xxh3_128_digest(b"")

DAMAGED: Final = Outgoing(MessageKind.REPLY, Status.REFUSED | _DAMAGED)
"""The reply to a request that arrived damaged: it had no effect, and the client sends it again."""

NO_SESSION: Final = Outgoing(MessageKind.NO_SESSION)
"""The reply to a request of a session that the bookie does not know or has forgotten."""


# ---- from frames -----------------------------------------------------------------------------------------------------


def decode_request(header: Header, head: bytes, frames: Sequence[memoryview]) -> WireRequest:
    """Decode a request that a bookie received, for which ``is_authentic`` and ``is_whole`` have returned True.

    Raises:
        FrameError: It is not a request, or its content is not that of a valid request.
    """
    decoder = DECODERS.get(header.kind)
    if decoder is None:
        raise FrameError(f"a message of kind {header.kind} is not a request")
    if header.ledger_id < 0:
        raise FrameError(f"ledger {header.ledger_id} in a request of kind {header.kind}")
    return decoder(header, head, frames)


def _decode_add(header: Header, head: bytes, frames: Sequence[memoryview]) -> Add:
    found = runs(header, head, frames)
    if not found or header.a < -1:
        raise FrameError(f"an add of {len(found)} runs with LAC {header.a}")
    flags = header.flags
    return Add(header.ledger_id, found, header.a, bool(flags & _FIRST_FLAG), bool(flags & _SECOND_FLAG))


def one_entry_add(ledger_id: int, flags: int, lac: int, first: int, stride: int, entry: memoryview) -> Add:
    """Return an add of one entry, whose numbers are valid."""
    run = _new_tuple(EntryRun, (first, stride, array("q", (len(entry),)), (entry,)))
    return _new_tuple(Add, (ledger_id, (run,), lac, bool(flags & _FIRST_FLAG), bool(flags & _SECOND_FLAG)))


def _decode_read_lac(header: Header, head: bytes, _frames: Sequence[memoryview]) -> ReadLac:
    blob(header, head, 0)
    if header.a < -1 or header.b < 0:
        raise FrameError(f"a wait of {header.b} ns for a LAC beyond {header.a}")
    beyond = header.a if header.flags & _SECOND_FLAG else None
    return ReadLac(header.ledger_id, bool(header.flags & _FIRST_FLAG), beyond, header.b)


def _decode_read(header: Header, head: bytes, _frames: Sequence[memoryview]) -> Read:
    blob(header, head, 0)
    first, last, stride, bytes_max = header.a, header.b, header.c, header.d
    if not 0 <= first <= last or not 1 <= stride <= STRIDE_MAX or bytes_max < 0:
        raise FrameError(f"a read of at most {bytes_max} bytes from {first} to {last} with stride {stride}")
    bytes_max = min(bytes_max, MESSAGE_BYTES_MAX)  # no reply is larger
    fence, checked = bool(header.flags & _FIRST_FLAG), bool(header.flags & _SECOND_FLAG)
    return Read(header.ledger_id, first, last, stride, bytes_max, fence, checked)


def _decode_force(header: Header, head: bytes, _frames: Sequence[memoryview]) -> Force:
    blob(header, head, 0)
    return Force(header.ledger_id)


def _decode_move(header: Header, head: bytes, _frames: Sequence[memoryview]) -> Move:
    blob(header, head, 0)
    if not 0 <= header.a < len(_TIERS):
        raise FrameError(f"a move to tier {header.a}; tiers are 0 to {len(_TIERS) - 1}")
    return Move(header.ledger_id, _TIERS[header.a])


def _decode_ask_writer(header: Header, head: bytes, _frames: Sequence[memoryview]) -> AskWriter:
    blob(header, head, 0)
    return AskWriter(header.ledger_id, bool(header.flags & _FIRST_FLAG))


def _decode_compare_lacs(header: Header, head: bytes, _frames: Sequence[memoryview]) -> CompareLacs:
    packed = blob(header, head, 2 * 8 * COMPARED_MAX)
    if len(packed) % 16:
        raise FrameError(f"a comparison of {len(packed)} bytes; each ledger has 16")
    half = len(packed) // 2
    found = CompareLacs(_unpacked(packed[:half]), _unpacked(packed[half:]))
    if half and (min(found.ledger_ids) < 0 or min(found.lacs) < -1):
        raise FrameError(f"a comparison of ledger {min(found.ledger_ids)} with LAC {min(found.lacs)}")
    return found


def _decode_lac_packet(header: Header, head: bytes, _frames: Sequence[memoryview]) -> LacPacket:
    packet = blob(header, head, LAC_PACKET_BYTES)
    if len(packet) != LAC_PACKET_BYTES:
        raise FrameError(f"a LAC packet of {len(packet)} bytes; it has {LAC_PACKET_BYTES}")
    return LacPacket(header.ledger_id, packet)


def _decode_authorize(header: Header, head: bytes, _frames: Sequence[memoryview]) -> Authorize:
    both = blob(header, head, SIGNATURE_BYTES + DESCRIPTION_BYTES_MAX)
    if len(both) < SIGNATURE_BYTES:
        raise FrameError(f"a signature of {len(both)} bytes; it has {SIGNATURE_BYTES}")
    return Authorize(header.ledger_id, both[SIGNATURE_BYTES:], both[:SIGNATURE_BYTES])


def _decode_authorize_member(header: Header, head: bytes, _frames: Sequence[memoryview]) -> AuthorizeMember:
    both = blob(header, head, MEMBER_MAC_BYTES + DESCRIPTION_BYTES_MAX)
    if len(both) < MEMBER_MAC_BYTES:
        raise FrameError(f"a MAC of {len(both)} bytes; it has {MEMBER_MAC_BYTES}")
    return AuthorizeMember(header.ledger_id, both[MEMBER_MAC_BYTES:], both[:MEMBER_MAC_BYTES])


def _decode_ping(header: Header, head: bytes, _frames: Sequence[memoryview]) -> Ping:
    blob(header, head, 0)
    return Ping()


DECODERS: Final[dict[int, Callable[[Header, bytes, Sequence[memoryview]], WireRequest]]] = {
    MessageKind.ADD: _decode_add,
    MessageKind.READ_LAC: _decode_read_lac,
    MessageKind.READ: _decode_read,
    MessageKind.FORCE: _decode_force,
    MessageKind.MOVE: _decode_move,
    MessageKind.ASK_WRITER: _decode_ask_writer,
    MessageKind.COMPARE_LACS: _decode_compare_lacs,
    MessageKind.LAC_PACKET: _decode_lac_packet,
    MessageKind.AUTHORIZE: _decode_authorize,
    MessageKind.AUTHORIZE_MEMBER: _decode_authorize_member,
    MessageKind.PING: _decode_ping,
}
"""The decoder of each kind of request."""


def decode_reply(header: Header, head: bytes, frames: Sequence[memoryview]) -> WireReply:
    """Decode a reply that a client received, for which ``is_authentic`` and ``is_whole`` have returned True.

    Raises:
        FrameError: It is not a reply, or its content is not that of a valid reply.
    """
    status = _STATUSES.get(header.flags & _STATUS_BITS)
    if status is None:
        raise FrameError(f"a reply of status {header.flags & _STATUS_BITS}")
    if header.kind == MessageKind.REPLY:
        return Reply(status, bool(header.flags & _WATCHED))
    if header.kind == MessageKind.LACS_ABOVE:
        packed = blob(header, head, 8 * COMPARED_MAX)
        if len(packed) % 8:
            raise FrameError(f"{len(packed)} bytes of ledger ids; each has 8")
        return LacsAbove(_unpacked(packed), status)
    if header.kind != MessageKind.ANSWER:
        raise FrameError(f"a message of kind {header.kind} is not a reply")
    found = runs(header, head, frames)
    if len(found) > 1:
        raise FrameError(f"an answer of {len(found)} runs")
    packet = b""
    if header.flags & _PACKET:
        packet = _PACKET_NUMBERS.pack(header.a, header.b, header.c, header.d)
    return Answer(status, found[0] if found else None, packet)


def plain_reply(header: Header) -> Reply | None:
    """Return the reply in a head without content; None if it has content, or is another message."""
    if header.checksum != _NOTHING_CHECKSUM or header.kind != _REPLY or header.runs or header.inline_bytes:
        return None
    return PLAIN_REPLIES.get(header.flags)


def says_damaged(header: Header) -> bool:
    """Return whether a reply is ``DAMAGED``: the bookie received the request with a wrong checksum."""
    return header.kind == MessageKind.REPLY and bool(header.flags & _DAMAGED)

from __future__ import annotations

import random
from array import array
from collections.abc import Sequence
from struct import pack_into
from typing import Any

import pytest
import zmq
from hypothesis import given
from hypothesis import strategies as st
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
from pybk.transport import codec, frames
from pybk.transport.cluster_keys import Mac, keyed_mac
from pybk.transport.codec import Answer, Authorize, AuthorizeMember, LacPacket, Ping, WireReply, WireRequest, encode
from pybk.transport.frames import MESSAGE_BYTES_MAX, FrameError, Outgoing, decode_head, is_authentic, is_whole
from tests.transport.wire_harness import INSTANCE, add, entries, flat

MAC = keyed_mac(b"k" * 32)
INT_MAX = (1 << 63) - 1
BODY = frames.INLINE_BYTES_MAX + 1

ids = st.integers(0, INT_MAX)
lacs = st.integers(-1, INT_MAX)
blobs16 = st.binary(min_size=16, max_size=16)


@st.composite
def runs(draw: st.DrawFn) -> EntryRun:
    sizes = draw(st.lists(st.integers(32, 300), min_size=1, max_size=40))
    stride = draw(st.integers(1, STRIDE_MAX))
    first = draw(st.integers(0, INT_MAX - (len(sizes) - 1) * stride))
    body = draw(st.randoms(use_true_random=False)).randbytes(sum(sizes))
    cut = draw(st.integers(0, len(body)))
    return EntryRun(first, stride, array("q", sizes), (body[:cut], memoryview(body)[cut:]))


packets = st.binary(min_size=32, max_size=32)
statuses = st.sampled_from(Status)
requests: st.SearchStrategy[WireRequest] = st.one_of(
    st.builds(Add, ids, st.lists(runs(), min_size=1, max_size=4).map(tuple), lacs, st.booleans(), st.booleans()),
    st.builds(ReadLac, ids, st.booleans(), st.none() | lacs, ids),
    st.builds(
        lambda ledger, ends, stride, size, flags: Read(ledger, min(ends), max(ends), stride, size, *flags),
        ids,
        st.tuples(ids, ids),
        st.integers(1, STRIDE_MAX),
        st.integers(0, MESSAGE_BYTES_MAX),
        st.tuples(st.booleans(), st.booleans()),
    ),
    st.builds(Force, ids),
    st.builds(Move, ids, st.sampled_from(StorageHint)),
    st.builds(LacPacket, ids, packets),
    st.builds(Authorize, ids, st.binary(max_size=4096), st.binary(min_size=64, max_size=64)),
    st.builds(AuthorizeMember, ids, st.binary(max_size=4096), st.binary(min_size=32, max_size=32)),
    st.just(Ping()),
)
replies: st.SearchStrategy[WireReply] = st.one_of(
    st.builds(Reply, statuses, st.booleans()),
    st.builds(Answer, statuses, st.none() | runs(), st.just(b"") | packets),
)


def sent(outgoing: Outgoing, mac: Mac = MAC) -> tuple[bytes, list[memoryview]]:
    """Return the frames of a message as they are received."""
    head = outgoing.head(5, 6, 7, INSTANCE, mac, frames.VERSION)
    return head, [memoryview(frame.bytes) for frame in outgoing.frames]


def received(head: bytes, bodies: Sequence[memoryview], *, request: bool) -> WireRequest | WireReply:
    """Decode frames as a server or a client does."""
    header = decode_head(head)
    if not is_authentic(header, head, MAC) or not is_whole(header, head, bodies):
        raise FrameError("not what was sent")
    return (codec.decode_request if request else codec.decode_reply)(header, head, bodies)


def signed(head: bytearray, bodies: Sequence[memoryview] = ()) -> bytes:
    """Return a head that was changed with the MAC and checksum that fit, as only somebody with the key can."""
    end = int.from_bytes(head[6:8], "little")
    inline = bytes(head[end + 16 :])
    pack_into("<I16s", head, 92, len(inline), xxh3_128_digest(b"".join((inline, *bodies))))
    return bytes(head[:end]) + MAC(bytes(head[:end])) + inline


@given(requests)
def test_requests_come_as_they_were_sent(message: WireRequest) -> None:
    assert flat(received(*sent(encode(message)), request=True)) == flat(message)


@given(replies)
def test_replies_come_as_they_were_sent(message: WireReply) -> None:
    assert flat(received(*sent(encode(message)), request=False)) == flat(message)


@given(replies)
def test_a_plain_reply_is_what_decoding_gives(message: WireReply) -> None:
    head, bodies = sent(encode(message))
    header = decode_head(head)
    plain = codec.plain_reply(header)
    assert plain == (message if isinstance(message, Reply) else None)
    assert plain is None or plain == codec.decode_reply(header, head, bodies)


def test_a_reply_that_says_more_or_is_damaged_is_not_plain() -> None:
    header = decode_head(sent(encode(Reply(Status.OK)))[0])
    assert codec.plain_reply(header) == Reply(Status.OK)
    for changed in (
        header._replace(checksum=bytes(16)),
        header._replace(kind=header.kind + 1),
        header._replace(inline_bytes=1),
        header._replace(runs=1),
        header._replace(flags=250),
        decode_head(sent(codec.DAMAGED)[0]),
    ):
        assert codec.plain_reply(changed) is None


def test_a_head_says_what_the_session_put_there() -> None:
    header = decode_head(sent(encode(Ping()))[0])
    assert (header.request_id, header.counter, header.taken_bytes, header.instance) == (5, 6, 7, INSTANCE)


@pytest.mark.parametrize("size", [frames.INLINE_BYTES_MAX, BODY, 200_000])
def test_large_entries_have_frames_of_their_own_and_are_not_copied_on_arrival(size: int) -> None:
    outgoing = encode(add(7, entries(0, (size,)), entries(9, (40, 50), 3)))
    assert len(outgoing.frames) == (0 if size + 90 <= frames.INLINE_BYTES_MAX else 2)
    head, bodies = sent(outgoing)
    assert outgoing.size == len(head) + sum(map(len, bodies))
    message: Any = received(head, bodies, request=True)
    for number, run in enumerate(message.runs):
        (body,) = run.body
        assert body.readonly
        assert body.obj is (bodies[number].obj if bodies else head)


def test_one_encoding_serves_all_bookies() -> None:
    outgoing = encode(add(7, entries(0, (BODY,))))
    heads = [outgoing.head(number, number, 0, INSTANCE, MAC, 1) for number in range(3)]
    assert len(set(heads)) == 3
    assert all(isinstance(frame, zmq.Frame) for frame in outgoing.frames)
    assert [decode_head(head).request_id for head in heads] == [0, 1, 2]


MESSAGES: list[tuple[WireRequest | WireReply, bool]] = [
    (add(7, entries(0, (100, 200))), True),
    (add(7, entries(0, (BODY, 40)), entries(1, (32,) * 20, 3)), True),
    (ReadLac(7, True, 5, 100), True),
    (Read(7, 0, 10, 1, 1000), True),
    (Read(7, 0, 10, 3, 1000, True, True), True),
    (Move(7, StorageHint.HDD), True),
    (AskWriter(7), True),
    (AskWriter(7, leaves=True), True),
    (CompareLacs(array("q", (7, 1 << 40)), array("q", (-1, 5))), True),
    (LacsAbove(array("q", (7, 1 << 40))), False),
    (Authorize(7, b"description", b"s" * 64), True),
    (AuthorizeMember(7, b"description", b"m" * 32), True),
    (LacPacket(7, b"p" * 32), True),
    (Reply(Status.FENCED, True), False),
    (Answer(Status.OK, entries(4, (64, 64)), b"p" * 32), False),
]


@pytest.mark.parametrize(("message", "request_kind"), MESSAGES, ids=lambda value: type(value).__name__)
def test_every_changed_byte_is_seen(message: WireRequest | WireReply, request_kind: bool) -> None:
    head, bodies = sent(encode(message))
    draw = random.Random(1)
    for place in range(len(head)):
        changed = bytearray(head)
        changed[place] ^= 1 << draw.randrange(8)
        with pytest.raises(FrameError):
            received(bytes(changed), bodies, request=request_kind)
    for number, body in enumerate(bodies):
        for place in {0, len(body) - 1, draw.randrange(len(body))}:
            damaged = bytearray(body)
            damaged[place] ^= 1 << draw.randrange(8)
            other = [*bodies[:number], memoryview(damaged), *bodies[number + 1 :]]
            with pytest.raises(FrameError):
                received(head, other, request=request_kind)


@pytest.mark.parametrize(("message", "request_kind"), MESSAGES, ids=lambda value: type(value).__name__)
def test_missing_and_surplus_bytes_and_frames_are_seen(message: WireRequest | WireReply, request_kind: bool) -> None:
    head, bodies = sent(encode(message))
    for shorter in {0, 1, 50, 111, 127, len(head) - 1}:
        with pytest.raises(FrameError):
            received(head[:shorter], bodies, request=request_kind)
    with pytest.raises(FrameError):
        received(head + b"\0", bodies, request=request_kind)
    with pytest.raises(FrameError):
        received(head, [*bodies, memoryview(b"")], request=request_kind)
    if bodies:
        with pytest.raises(FrameError):
            received(head, bodies[1:], request=request_kind)
        with pytest.raises(FrameError):
            received(head, bodies[::-1], request=request_kind)


@given(st.binary(max_size=400), st.lists(st.binary(max_size=40), max_size=3))
def test_garbage_is_not_decoded_as_a_message(head: bytes, bodies: list[bytes]) -> None:
    with pytest.raises(FrameError):
        received(head, [memoryview(body) for body in bodies], request=True)


@given(
    st.sampled_from(MESSAGES),
    st.lists(st.tuples(st.integers(0, 300), st.integers(0, 255)), min_size=1, max_size=8),
    st.integers(-70, 70),
)
def test_authentic_nonsense_raises_one_error_only(
    chosen: tuple[WireRequest | WireReply, bool], changes: list[tuple[int, int]], longer: int
) -> None:
    """A peer with the key and a bug, or bad intentions: whatever it says is a message or a ``FrameError``."""
    message, request_kind = chosen
    head, bodies = sent(encode(message))
    changed = bytearray(head)
    for place, value in changes:
        changed[place % len(changed)] = value
    if longer > 0:
        changed += bytes(longer)
    elif len(changed) + longer > 140:
        del changed[longer:]
    if int.from_bytes(changed[6:8], "little") + 16 > len(changed):
        return
    try:
        found = received(signed(changed), bodies, request=request_kind)
    except FrameError:
        return
    for run in getattr(found, "runs", ()):
        assert sum(run.sizes) == len(run.body[0])
        assert 0 <= run.first <= run.last <= INT_MAX
        assert run.stride > 0


def put(message: WireRequest | WireReply, place: int, layout: str, *values: int) -> bytes:
    """Return the head of a message with other values somewhere, authentic all the same."""
    head = bytearray(sent(encode(message))[0])
    pack_into(layout, head, place, *values)
    return signed(head)


TABLE = 112


@pytest.mark.parametrize(
    ("message", "place", "layout", "value"),
    [
        (add(), 48, "<q", -1),  # the ledger
        (add(), 56, "<q", -2),  # the LAC
        (add(), TABLE, "<q", -1),  # the first entry
        (add(7, entries(0, (40, 40))), TABLE, "<q", INT_MAX),
        (add(), TABLE + 8, "<Q", 0),  # the stride
        (add(), TABLE + 16, "<I", 0),  # the count
        (add(), TABLE + 16, "<I", 2),
        (add(), TABLE + 16, "<I", (1 << 32) - 1),
        (add(), TABLE + 20, "<I", 99),  # the bytes
        (add(), TABLE + 20, "<I", (1 << 32) - 1),
        (add(), TABLE + 40, "<I", 31),  # the size of an entry
        (add(7, entries(0, (40,) * 20)), TABLE + 40, "<I", 31),
        (add(7, entries(0, (40,) * 20)), TABLE + 44, "<I", (1 << 32) - 1),
        (add(), 88, "<H", 65),  # the runs
        (add(), 88, "<H", 0),
        (add(), 90, "<H", 2),  # the frames
        (Read(7, 5, 9, 1, 10), 56, "<q", 10),
        (Read(7, 5, 9, 1, 10), 56, "<q", -1),
        (Read(7, 5, 9, 1, 10), 72, "<q", 0),
        (Read(7, 5, 9, 1, 10), 80, "<q", -1),
        (ReadLac(7, False, 3, 10), 56, "<q", -2),
        (ReadLac(7, False, 3, 10), 64, "<q", -1),
        (Move(7, StorageHint.NVME), 56, "<q", 3),
        (Move(7, StorageHint.NVME), 56, "<q", -1),
        (Force(7), 3, "<B", 99),  # the kind
        (Force(7), 3, "<B", codec.MessageKind.REPLY),
        (Force(7), 3, "<B", codec.MessageKind.LAC_PACKET),
        (Force(7), 3, "<B", codec.MessageKind.AUTHORIZE),
        (Force(7), 3, "<B", codec.MessageKind.AUTHORIZE_MEMBER),
        (Force(7), 3, "<B", codec.MessageKind.ADD),
        (LacPacket(7, b"p" * 32), 3, "<B", codec.MessageKind.FORCE),
        (Authorize(7, b"", b"s" * 64), 3, "<B", codec.MessageKind.LAC_PACKET),
    ],
)
def test_values_that_no_request_can_have_are_refused(message: WireRequest, place: int, layout: str, value: int) -> None:
    with pytest.raises(FrameError):
        received(put(message, place, layout, value), [], request=True)


@pytest.mark.parametrize(
    ("message", "place", "layout", "value"),
    [
        (Reply(Status.OK), 4, "<H", 99),
        (Reply(Status.OK), 3, "<B", codec.MessageKind.ADD),
        (Answer(Status.OK, entries()), 88, "<H", 0),
    ],
)
def test_values_that_no_reply_can_have_are_refused(message: WireReply, place: int, layout: str, value: int) -> None:
    with pytest.raises(FrameError):
        received(put(message, place, layout, value), [], request=False)


@pytest.mark.parametrize(
    "message",
    [
        CompareLacs(array("q", (7, -1)), array("q", (0, 0))),
        CompareLacs(array("q", (7, 8)), array("q", (0, -2))),
        CompareLacs(array("q", (7, 8)), array("q", (0,))),
        CompareLacs(array("q", range(COMPARED_MAX + 1)), array("q", range(COMPARED_MAX + 1))),
    ],
    ids=["ledger", "lac", "one", "many"],
)
def test_comparisons_that_no_client_makes_are_refused(message: CompareLacs) -> None:
    with pytest.raises(FrameError):
        received(*sent(encode(message)), request=True)


def test_a_comparison_and_its_reply_are_decoded_as_they_were() -> None:
    most = array("q", range(COMPARED_MAX))
    for message, request in ((CompareLacs(most, most), True), (LacsAbove(most), False), (LacsAbove(array("q")), False)):
        assert received(*sent(encode(message)), request=request) == message
    with pytest.raises(FrameError, match="15 bytes of ledger ids"):
        received(*sent(Outgoing(codec.MessageKind.LACS_ABOVE, blob=bytes(15))), request=False)


def test_an_entry_has_a_header() -> None:
    for sizes in ((31,), (40,) * 50 + (31,)):
        with pytest.raises(FrameError, match="the smallest 31"):
            received(*sent(encode(add(7, entries(0, sizes)))), request=True)


def test_a_frame_that_is_shorter_than_its_run_is_refused() -> None:
    head, bodies = sent(encode(add(7, entries(0, (BODY,)))))
    changed = bytearray(head)
    pack_into("<I", changed, TABLE + 20, BODY + 1)
    pack_into("<I", changed, TABLE + 40, BODY + 1)
    with pytest.raises(FrameError, match=f"{BODY} bytes instead of a run of {BODY + 1}"):
        received(signed(changed, bodies), bodies, request=True)


def test_more_runs_than_a_message_has_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patched:
        patched.setattr(frames, "RUNS_MAX", 65)
        head, bodies = sent(encode(add(7, *[entries()] * 65)))
    with pytest.raises(FrameError, match="65 runs"):
        received(head, bodies, request=True)


def test_an_answer_has_one_run_at_most() -> None:
    outgoing = Outgoing(codec.MessageKind.ANSWER, runs=(entries(), entries(1)))
    with pytest.raises(FrameError, match="2 runs"):
        received(*sent(outgoing), request=False)


def test_a_request_never_passes_for_a_reply() -> None:
    for message, request_kind in MESSAGES:
        with pytest.raises(FrameError):
            received(*sent(encode(message)), request=not request_kind)


def test_fields_that_a_newer_version_adds_to_the_head_are_skipped() -> None:
    head = bytearray(sent(encode(add(7, entries(3, (100, 40)))))[0])
    end = int.from_bytes(head[6:8], "little")
    head[end:end] = b"something newer"
    pack_into("<H", head, 6, end + len(b"something newer"))
    assert flat(received(signed(head), [], request=True)) == flat(add(7, entries(3, (100, 40))))


def test_versions_one_apart_are_read_and_others_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def of_version(version: int) -> bytes:
        return encode(Ping()).head(5, 6, 7, INSTANCE, MAC, version)

    assert decode_head(of_version(1)).version == 1
    for version in (0, 2, 255):
        with pytest.raises(FrameError, match=f"version {version}; this pybk reads 1 to 1: upgrade the older end"):
            decode_head(of_version(version))
    monkeypatch.setattr(frames, "VERSION", 2)
    assert decode_head(of_version(1)).version == 1
    assert decode_head(of_version(2)).version == 2


def test_bytes_stay_what_they_are() -> None:
    """The layout of docs/reference/wire.md; another one is another version."""
    head, bodies = sent(encode(Add(7, (EntryRun(3, 2, array("q", [33, 32]), (b"a" * 33, b"b" * 32)),), 2, True, False)))
    assert not bodies
    expected = (
        "5042011001008800050000000000000006000000000000000700000000000000696e7374616e63652d6f662d31362d62"
        "070000000000000002000000000000000000000000000000000000000000000000000000000000000100000049000000"
        "e2360b9d71c30710e197dd245629264503000000000000000200000000000000020000004100000016d11ddc1ed5d177"
        "5e8238dd6318188721000000200000006161616161616161616161616161616161616161616161616161616161616161"
        "616262626262626262626262626262626262626262626262626262626262626262"
    )
    assert head.hex() == expected


def test_values_that_do_not_fit_a_message_are_refused_at_once() -> None:
    with pytest.raises(UsageError, match="65 runs; it takes at most 64"):
        encode(add(7, *[entries()] * 65))
    with pytest.raises(UsageError, match=f"the limit is {DESCRIPTION_BYTES_MAX}"):
        encode(Authorize(7, b"d" * (DESCRIPTION_BYTES_MAX + 1), b"s" * 64))
    with pytest.raises(UsageError, match=f"has {DESCRIPTION_BYTES_MAX + 1} bytes"):
        encode(AuthorizeMember(7, b"d" * (DESCRIPTION_BYTES_MAX + 1), b"m" * 32))

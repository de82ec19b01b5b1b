"""The end-of-log rules: every row of the table, every torn sector, every flipped bit."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import pytest
from xxhash import xxh3_64_intdigest

from pybk.errors import CorruptError, UnsupportedFormatError, UsageError
from pybk.storage.format.log_file import (
    BLOCK_BYTES,
    RECORD_HEADER_BYTES,
    RecordKind,
    encode_commit_header,
    encode_control,
    encode_entries,
    encode_file_header,
    padding,
)
from pybk.storage.log.recovery import LogEnd, OpenLogFile, Replay, ReplayedCommit, proven_durable, scan_commits
from pybk.storage.log.salvage import SalvagedLog
from tests.paths import GOLDEN
from tests.sampling import bits_of, some

STORE = b"0123456789abcdef"
ZEROS = bytes(BLOCK_BYTES)
GARBAGE = bytes(range(1, 252)) * 20


class Outcome(NamedTuple):
    """What replay gave: (LSN, sound) of each commit, the bodies of the sound ones, the end."""

    lsns: list[tuple[int, bool]]
    bodies: list[bytes]
    end: LogEnd


def payload(lsn: int, size: int = 40) -> bytes:
    """Return bytes without a zero among them, different for each LSN."""
    return bytes(1 + (lsn + i) % 255 for i in range(size))


def commit(lsn: int, file_id: int, *, size: int = 40, records: int = 1, durable: int | None = None) -> bytes:
    """Return a padded commit of some records of one entry."""
    body = b"".join(b"".join(encode_entries(5, i, [size], [payload(lsn, size)], lsn=lsn)) for i in range(records))
    header = encode_commit_header(lsn, lsn - 1 if durable is None else durable, file_id, records, len(body))
    return header + body + bytes(padding(len(header + body)))


def newer(lsn: int, file_id: int) -> bytes:
    """Return a block with a commit header of a newer format."""
    header = bytearray(encode_commit_header(lsn, lsn - 1, file_id, 0, 0)[:56])
    header[4] = 2
    return (bytes(header) + xxh3_64_intdigest(bytes(header)).to_bytes(8, "little")).ljust(BLOCK_BYTES, b"\0")


def begin(file_id: int, first_lsn: int, *blocks: bytes, store_id: bytes = STORE) -> tuple[int, bytes]:
    """Return the id and the bytes of a begun log file."""
    return file_id, b"".join((encode_file_header(store_id, file_id, first_lsn, first_lsn - 1), *blocks))


def load(files: Sequence[tuple[int, bytes]]) -> Iterator[OpenLogFile]:
    for file_id, data in files:
        yield OpenLogFile(file_id, f"log-{file_id}", memoryview(data))


def run(files: Sequence[tuple[int, bytes]], *, first_lsn: int = 1, durable: int = 0) -> Outcome:
    replay = Replay(load(files), first_lsn=first_lsn, durable_lsn=durable, store_id=STORE)
    lsns, bodies = [], []
    for found in replay:
        lsns.append((found.lsn, found.sound))
        bodies += [bytes(found.data[record.body_start : record.body_end]) for record in found.records if record.sound]
        assert found.sound == all(record.sound for record in found.records)
    return Outcome(lsns, bodies, replay.end)


def flip(data: bytes, offset: int, bit: int = 0) -> bytes:
    damaged = bytearray(data)
    damaged[offset] ^= 1 << bit
    return bytes(damaged)


# ---- the table ---------------------------------------------------------------------------------------------

N = 3
"""The LSN at whose place something is wrong; 1 and 2 are sound."""


def place(kind: str) -> bytes:
    sound = commit(N, 1)
    return {
        "zeros": ZEROS,
        "garbage": GARBAGE[:BLOCK_BYTES],
        "zeros, then garbage": ZEROS[:512] + GARBAGE[: BLOCK_BYTES - 512],
        "another LSN": commit(N - 1, 1),
        "commit header": flip(sound, 20),
        "record header": flip(sound, 64 + 9),
        "body": flip(sound, 64 + RECORD_HEADER_BYTES + 5),
    }[kind]


KINDS = ("zeros", "garbage", "zeros, then garbage", "another LSN", "commit header", "record header", "body")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("later", [False, True], ids=["", "later commit"])
@pytest.mark.parametrize("durable", [N - 1, N])
@pytest.mark.parametrize("following", [None, N, N + 1])
@pytest.mark.parametrize("ahead", [False, True], ids=["", "files ahead"])
def test_table(kind: str, later: bool, durable: int, following: int | None, ahead: bool) -> None:
    blocks = [commit(1, 1), commit(2, 1), place(kind)]
    blocks += [commit(N + 1, 1)] if later else []
    files = [begin(1, 1, *blocks, ZEROS)]
    if following is not None:
        files.append(begin(2, following, commit(following, 2), ZEROS))
    if ahead:
        files += [(8, ZEROS * 3), (9, ZEROS * 2)]
    before = [(1, True), (2, True)]

    if following == N:
        outcome = run(files, durable=durable)
        assert outcome.lsns == [*before, (N, True)]
        assert (outcome.end.next_lsn, outcome.end.last_file_id) == (N + 1, 2)
        assert (outcome.end.torn, outcome.end.corrupt) == (False, ())
    elif later or following == N + 1 or durable == N:
        if kind != "body":
            with pytest.raises(CorruptError, match=f"log-1 holds no whole commit of LSN {N} at") as caught:
                run(files, durable=durable)
            assert (caught.value.path, caught.value.offset) == ("log-1", 3 * BLOCK_BYTES)
            return
        outcome = run(files, durable=durable)
        after = [(N + 1, True)] if later or following else []
        assert outcome.lsns == [*before, (N, False), *after]
        (corrupt,) = outcome.end.corrupt
        assert (corrupt.path, corrupt.offset, corrupt.lsn) == ("log-1", 3 * BLOCK_BYTES + 64, N)
        assert (corrupt.header.ledger_id, corrupt.header.first_entry_id, corrupt.header.entry_count) == (5, 0, 1)
        assert not outcome.end.torn
    else:
        outcome = run(files, durable=durable)
        assert outcome.lsns == before
        assert (outcome.end.next_lsn, outcome.end.last_file_id, outcome.end.offset) == (N, 1, 3 * BLOCK_BYTES)
        assert outcome.end.torn == (kind != "zeros")
        assert 0 <= outcome.end.torn_bytes <= BLOCK_BYTES
        assert outcome.end.corrupt == ()
    assert outcome.end.unbegun_file_ids == ((8, 9) if ahead else ())
    assert outcome.end.durable_lsn < outcome.end.next_lsn


@pytest.mark.parametrize("header", ["zeros", "torn", "overwritten", "sound"])
@pytest.mark.parametrize("behind", ["zeros", "garbage", "n", "n torn", "n and more"])
@pytest.mark.parametrize("durable", [N - 1, N])
@pytest.mark.parametrize("following", [None, N, N + 1])
def test_table_at_the_start_of_a_file(header: str, behind: str, durable: int, following: int | None) -> None:
    sound = begin(2, N)[1]
    block = {"zeros": ZEROS, "torn": sound[:30] + ZEROS[30:], "overwritten": GARBAGE[:BLOCK_BYTES], "sound": sound}[
        header
    ]
    block += {
        "zeros": ZEROS * 2,
        "garbage": GARBAGE[:BLOCK_BYTES] + ZEROS,
        "n": commit(N, 2),
        "n torn": flip(commit(N, 2), 150),
        "n and more": commit(N, 2) + commit(N + 1, 2),
    }[behind]
    files = [begin(1, 1, commit(1, 1), commit(2, 1)), (2, block)]
    if following is not None:
        files.append(begin(3, following, commit(following, 3)))
    before = [(1, True), (2, True)]
    whole = header == "sound" and behind in ("n", "n and more")

    if following == N:
        assert run(files, durable=durable).lsns == [*before, (N, True)]
    elif whole:
        more = [(N + 1, True)] if following or behind == "n and more" else []
        assert run(files, durable=durable).lsns == [*before, (N, True), *more]
    elif (
        durable == N or following == N + 1 or behind == "n and more" or (header == "overwritten" and behind != "zeros")
    ):
        if header == "sound" and behind == "n torn":
            assert run(files, durable=durable).lsns[:3] == [*before, (N, False)]
        else:
            with pytest.raises(CorruptError, match=f"no whole commit of LSN {N}"):
                run(files, durable=durable)
    else:
        outcome = run(files, durable=durable)
        assert outcome.lsns == before
        assert outcome.end.torn == (header in ("torn", "overwritten") or behind != "zeros")
        assert outcome.end.last_file_id == (2 if header == "sound" else 1)
        assert outcome.end.unbegun_file_ids == (() if header == "sound" else (2,))


# ---- torn writes -------------------------------------------------------------------------------------------


def torn_images(old: bytes, new: bytes) -> Iterator[bytes]:
    """Yield what a torn write may leave, cut at sectors: a prefix, a suffix, all but one, one alone."""
    sectors = [(old[i : i + 512], new[i : i + 512]) for i in range(0, len(new), 512)]
    for cut in range(len(sectors) + 1):
        for first in (0, 1):
            yield b"".join(pair[first ^ (number < cut)] for number, pair in enumerate(sectors))
    for lone in range(len(sectors)):
        for first in (0, 1):
            yield b"".join(pair[first ^ (number == lone)] for number, pair in enumerate(sectors))


@pytest.mark.parametrize("records", [1, 3])
@pytest.mark.parametrize("new_file", [False, True])
def test_torn_at_every_sector(records: int, new_file: bool) -> None:
    sound = commit(2, 2 if new_file else 1, size=9000 // records, records=records)
    assert len(sound) == 3 * BLOCK_BYTES
    written = begin(2, 2, sound)[1] if new_file else sound
    states = set()
    refused = known = 0
    for image in torn_images(bytes(len(written)), written):
        if new_file:
            files = [begin(1, 1, commit(1, 1)), (2, image + ZEROS)]
        else:
            files = [begin(1, 1, commit(1, 1), image, ZEROS)]
        outcome = run(files, durable=1)
        whole = image == written
        assert outcome.lsns == ([(1, True), (2, True)] if whole else [(1, True)])
        assert outcome.bodies[1:] == ([payload(2, 9000 // records)] * records if whole else [])
        only_begun = new_file and image[:512] == written[:512] and not any(image[BLOCK_BYTES:])
        assert outcome.end.torn == (not whole and any(image) and not only_begun)
        assert outcome.end.corrupt == ()
        states.add((whole, any(image)))
        if not whole:
            # The same bytes are never the end when the commit was acknowledged.
            try:
                outcome = run(files, durable=2)
            except CorruptError:
                refused += 1
            else:
                known += 1
                assert outcome.lsns == [(1, True), (2, False)]
                assert outcome.end.corrupt
    assert refused > known > 0
    assert states == {(True, True), (False, True), (False, False)}


# ---- flipped bits ------------------------------------------------------------------------------------------


@pytest.mark.sampled(one_in=2)
@pytest.mark.parametrize("durable", [2, 3])
def test_every_flipped_bit(durable: int) -> None:
    blocks = (commit(1, 1), commit(2, 1, records=2), commit(3, 1))
    _, log = begin(1, 1, *blocks, ZEROS)
    original = run([(1, log)], durable=durable)
    bodies = {1: [payload(1)], 2: [payload(2)] * 2, 3: [payload(3)]}
    assert original.bodies == [body for lsn in (1, 2, 3) for body in bodies[lsn]]
    view = bytearray(log)
    refused = known = 0
    for offset in range(len(log)):
        # Of the padding, which nobody reads, one bit of each byte is enough.
        for bit in bits_of(offset) if log[offset] else (offset % 8,):
            view[offset] ^= 1 << bit
            replay = Replay(
                iter([OpenLogFile(1, "x", memoryview(view))]), first_lsn=1, durable_lsn=durable, store_id=STORE
            )
            try:
                for found in replay:
                    sound = [bytes(view[r.body_start : r.body_end]) for r in found.records if r.sound]
                    assert sound == bodies[found.lsn][: len(sound)]
                    assert (len(sound) == len(bodies[found.lsn])) == found.sound
                    known += not found.sound
                assert replay.end.next_lsn == 4 or (replay.end.next_lsn == 3 and durable == 2 and replay.end.torn)
            except CorruptError:
                refused += 1
            view[offset] ^= 1 << bit
    assert refused > some(250, 1000)
    assert known > some(125, 500)


# ---- order and identity ------------------------------------------------------------------------------------


def test_many_files_and_sizes() -> None:
    expected, files, lsn = [], [], 1
    for file_id in range(4, 12, 2):
        sizes = [1, 3000, 4096 - 128, 4097 - 128, 9000]
        files.append(begin(file_id, lsn, *(commit(lsn + i, file_id, size=size) for i, size in enumerate(sizes))))
        expected += [payload(lsn + i, size) for i, size in enumerate(sizes)]
        lsn += len(sizes)
    outcome = run(files, durable=lsn - 1)
    assert outcome.bodies == expected
    assert [found for found, _ in outcome.lsns] == list(range(1, lsn))
    assert outcome.end == (lsn, 10, len(files[-1][1]), 0, lsn - 1, (), ())


def test_nothing_at_all() -> None:
    assert run([], first_lsn=9, durable=8).end == (9, None, 0, 0, 8, (), ())
    assert run([(1, ZEROS), (2, b"")], first_lsn=9, durable=8).end == (9, None, 0, 0, 8, (1, 2), ())
    for files in ([], [(1, ZEROS)]):
        with pytest.raises(CorruptError, match=r"the log holds no whole commit of LSN 9 .* up to LSN 9 were durable"):
            run(files, first_lsn=9, durable=9)


@pytest.mark.parametrize(
    "files",
    [
        [begin(1, 2, commit(2, 1))],
        [begin(1, 1, commit(1, 1)), begin(2, 3, commit(3, 2))],
        [begin(1, 1, commit(1, 1)), (2, ZEROS * 2), begin(3, 3, commit(3, 3))],
        [begin(1, 1, commit(1, 1)), begin(2, 2, commit(2, 2)), begin(3, 1, commit(1, 3), commit(2, 3))],
        [begin(1, 1, commit(1, 1)), (2, flip(begin(2, 2, commit(2, 2))[1], 40)), begin(3, 3, commit(3, 3))],
    ],
    ids=["first file", "next file", "a file that was never begun", "going back", "a header damaged"],
)
def test_missing_commits_are_refused(files: list[tuple[int, bytes]]) -> None:
    with pytest.raises(
        CorruptError, match=r"but log-\d begins with LSN \d.*restore .* or run `pybk store rebuild-index`"
    ):
        run(files)


def test_unused_files_in_between_are_not_a_gap_where_lsns_continue() -> None:
    files = [begin(1, 1, commit(1, 1)), (2, ZEROS * 2), (3, GARBAGE), begin(4, 2, commit(2, 4))]
    outcome = run(files, durable=2)
    assert outcome.lsns == [(1, True), (2, True)]
    assert outcome.end.unbegun_file_ids == (2, 3)
    assert not outcome.end.torn


def test_a_last_file_that_was_overwritten_is_refused_though_nothing_proves_that_it_was_begun() -> None:
    first = begin(1, 1, commit(1, 1))
    for size in (BLOCK_BYTES + 1, 3 * BLOCK_BYTES):
        for files in ([(1, b"?" * size)], [first, (2, b"?" * size)], [(1, b"?" * size), (2, ZEROS * 2)]):
            with pytest.raises(CorruptError, match=r"and log-\d begins neither with .* `pybk store rebuild-index`"):
                run(files)


def test_damage_of_a_file_that_was_never_begun_is_no_loss() -> None:
    for offset in range(BLOCK_BYTES):
        assert run([(1, flip(ZEROS * 3, offset))]).end.next_lsn == 1


@pytest.mark.parametrize(
    "stranger",
    [begin(2, 2, commit(2, 2), store_id=bytes(16)), (2, begin(3, 2, commit(2, 3))[1])],
    ids=["store", "file id"],
)
def test_strange_files_are_refused(stranger: tuple[int, bytes]) -> None:
    with pytest.raises(CorruptError, match=r"log-2: a log file of store .* put the right file"):
        run([begin(1, 1, commit(1, 1)), stranger])


def test_durable_lsns_count_wherever_they_are_seen() -> None:
    said_by_commit = begin(1, 1, commit(1, 1), commit(2, 1, durable=2))
    assert run([said_by_commit]).end.durable_lsn == 2
    said_by_commit = begin(1, 1, commit(1, 1, durable=2))
    with pytest.raises(CorruptError, match="up to LSN 2 were durable"):
        run([said_by_commit])
    said_by_file = (1, encode_file_header(STORE, 1, 1, 1) + ZEROS)
    with pytest.raises(CorruptError, match="up to LSN 1 were durable"):
        run([said_by_file])


@pytest.mark.parametrize("wrong", ["lsn", "count", "size", "beyond"])
def test_records_must_fill_their_commit(wrong: str) -> None:
    body = b"".join(encode_entries(5, 0, [40], [payload(1)], lsn=2 if wrong == "lsn" else 1))
    count = 2 if wrong == "count" else 1
    size = {"size": len(body) + 8, "beyond": 1 << 30}.get(wrong, len(body))
    block = encode_commit_header(1, 0, 1, count, size) + body
    file = begin(1, 1, block + bytes(padding(len(block))))
    assert run([file]).lsns == []
    with pytest.raises(CorruptError):
        run([file], durable=1)


def test_entries_that_look_like_commits_prove_nothing() -> None:
    inner = encode_commit_header(9, 8, 1, 0, 0)
    filler = bytes(BLOCK_BYTES - 64 - RECORD_HEADER_BYTES)
    body = b"".join(encode_entries(5, 0, [len(filler + inner)], [filler, inner], lsn=1))
    block = encode_commit_header(1, 0, 1, 1, len(body)) + body
    assert block[BLOCK_BYTES:] == inner
    for damage in (64 + 9, 200):
        outcome = run([begin(1, 1, flip(block, damage) + bytes(padding(len(block))))])
        assert (outcome.lsns, outcome.end.torn, outcome.end.next_lsn) == ([], True, 1)


def test_newer_formats_are_named() -> None:
    with pytest.raises(UnsupportedFormatError, match="commit format 2"):
        run([begin(1, 1, newer(1, 1))])


def test_control_records_come_back() -> None:
    body = encode_control(RecordKind.LEDGER, 5, 3, b"metadata", lsn=1) + encode_control(RecordKind.DELETE, 6, 0, lsn=1)
    block = encode_commit_header(1, 0, 1, 2, len(body)) + body
    file = OpenLogFile(1, "x", memoryview(begin(1, 1, block)[1]))
    (found,) = scan_commits(file, BLOCK_BYTES, 1)
    facts = [(r.header.kind, r.header.ledger_id, bytes(file.data[r.body_start : r.body_end])) for r in found.records]
    assert facts == [(RecordKind.LEDGER, 5, b"metadata"), (RecordKind.DELETE, 6, b"")]
    assert isinstance(found, ReplayedCommit)


# ---- parts -------------------------------------------------------------------------------------------------


def test_end_is_known_only_at_the_end() -> None:
    replay = Replay(load([begin(1, 1, commit(1, 1))]), first_lsn=1, durable_lsn=0, store_id=STORE)
    next(iter(replay))
    with pytest.raises(UsageError, match="iterate to the end"):
        _ = replay.end
    assert list(replay) == []
    assert replay.end.next_lsn == 2
    assert list(replay) == []
    assert replay.end.last_file_id == 1


def test_scan_stops_at_the_limit_and_continues_from_there() -> None:
    data = memoryview(begin(1, 1, *(commit(lsn, 1) for lsn in range(1, 6)), ZEROS)[1])
    file = OpenLogFile(1, "x", data)
    first = list(scan_commits(file, BLOCK_BYTES, 1, 2))
    assert [found.lsn for found in first] == [1, 2]
    rest = list(scan_commits(file, first[-1].offset + first[-1].size, 3))
    assert [found.lsn for found in rest] == [3, 4, 5]
    assert list(scan_commits(file, rest[-1].offset + rest[-1].size, 6)) == []
    assert list(scan_commits(file, BLOCK_BYTES, 2)) == []


def test_commit_headers_prove_what_was_durable() -> None:
    data = memoryview(ZEROS + commit(7, 3) + GARBAGE[:BLOCK_BYTES] + commit(9, 3) + ZEROS)
    for offset, proven in zip(range(0, len(data) + 2 * BLOCK_BYTES, BLOCK_BYTES), [8, 8, 8, 8, 0, 0, 0], strict=True):
        assert proven_durable(OpenLogFile(3, "x", data), offset, 9) == proven
    assert proven_durable(OpenLogFile(4, "x", data), 0, 9) == 0
    assert proven_durable(OpenLogFile(3, "x", memoryview(commit(9, 3, durable=2))), 0, 9) == 8
    assert proven_durable(OpenLogFile(3, "x", memoryview(commit(9, 3, durable=20))), 0, 9) == 20


def test_commits_without_space_and_of_other_formats_prove_nothing() -> None:
    file = OpenLogFile(3, "x", memoryview(ZEROS + commit(7, 3) + commit(1 << 63, 3) + newer(8, 3) + commit(9, 3)))
    for lsn, proven in ((7, 8), (6, 8), (5, 6)):  # the last one is three blocks after the first
        assert proven_durable(file, BLOCK_BYTES, lsn) == proven
    claims = commit(2, 3, durable=1 << 62)
    assert proven_durable(OpenLogFile(3, "x", memoryview(GARBAGE[:BLOCK_BYTES] + claims)), 0, 1) == 0


FORGED = encode_commit_header((1 << 64) - 2, (1 << 64) - 3, 1, 1, 0)


@pytest.mark.parametrize("forged", [FORGED, newer(3, 1)])
def test_bytes_that_a_client_chose_are_no_commits_where_their_own_is_torn(forged: bytes) -> None:
    """Neither is the log refused for them, nor, if it is salvaged, do they say which LSN comes next."""
    chosen = commit(2, 1, size=3 * BLOCK_BYTES)
    begun = begin(1, 1, commit(1, 1), GARBAGE[:BLOCK_BYTES], forged.ljust(BLOCK_BYTES, b"x"), chosen[2 * BLOCK_BYTES :])
    assert run([begun]).end.next_lsn == 2
    behind = (1, begun[1] + commit(3, 1))
    with pytest.raises(CorruptError):
        run([behind])
    headless = (1, GARBAGE[:BLOCK_BYTES] + behind[1][BLOCK_BYTES:])
    for file in (begun, behind, headless):
        log = SalvagedLog(load([file]), first_lsn=1, durable_lsn=2, store_id=STORE)
        assert [found.lsn for _, found in log] == ([] if file is headless else [1])
        assert log.next_lsn == 3


def test_a_commit_without_records_has_its_place_too() -> None:
    def empty(lsn: int) -> bytes:
        return encode_commit_header(lsn, lsn - 1, 1, 0, 0).ljust(BLOCK_BYTES, b"\0")

    assert run([begin(1, 1, empty(1), empty(2))]).lsns == [(1, True), (2, True)]
    assert run([begin(1, 1, empty(1), empty(1))]).lsns == [(1, True)]
    with pytest.raises(CorruptError, match="no whole commit of LSN 2"):
        run([begin(1, 1, empty(1), empty(3))])


def test_at_most_two_files_are_held() -> None:
    alive: set[int] = set()
    most = 0

    def lazily() -> Iterator[OpenLogFile]:
        nonlocal most
        for file_id in range(1, 20):
            begun = file_id % 3 == 1
            lsn = file_id // 3 + 1
            array = np.frombuffer(begin(file_id, lsn, commit(lsn, file_id))[1] if begun else ZEROS, np.uint8)
            alive.add(file_id)
            weakref.finalize(array, alive.discard, file_id)
            most = max(most, len(alive))
            yield OpenLogFile(file_id, "x", array.data)
            del array

    replay = Replay(lazily(), first_lsn=1, durable_lsn=0, store_id=STORE)
    count = 0
    for found in replay:
        count += 1
        del found
    assert count == 7
    assert most == 2


def test_golden_log_file() -> None:
    data = (GOLDEN / "0000000000000007.log").read_bytes()
    replay = Replay(load([(7, data)]), first_lsn=41, durable_lsn=42, store_id=bytes(range(16)))
    assert [(found.lsn, found.offset, found.size, len(found.records), found.sound) for found in replay] == [
        (41, 4096, 4096, 7, True),
        (42, 8192, 4096, 1, True),
    ]
    assert replay.end == (43, 7, 12288, 0, 42, (), ())

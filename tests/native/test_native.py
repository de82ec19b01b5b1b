"""The native core: what it computes for random batches, what it refuses, and the lock that it lets go."""

from __future__ import annotations

import contextlib
import gc
import hashlib
import os
import random
import shutil
import struct
import subprocess
import sys
import sysconfig
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, cast

import numpy as np
import pytest
from xxhash import xxh3_64_intdigest

from pybk.errors import CorruptError
from pybk.ledger import CORE
from pybk.ledger.digest import KEY_BYTES, DigestType
from pybk.ledger.entry import Entry
from pybk.storage import store_reader
from pybk.storage.format.log_file import RECORD_HEADER_BYTES
from tests.native import messages
from tests.native.fuzz import IDS, compare
from tests.paths import ROOT
from tests.waiting import PROCESS_S

if TYPE_CHECKING:
    from pybk.ledger.native import NativeCore

KEY = bytes(KEY_BYTES)
PLACES = np.zeros(1, np.int64)


@pytest.fixture
def core() -> NativeCore:
    if CORE is None:
        pytest.skip("the native core is not there: no compiler built it, or PYBK_PURE is set")
    return CORE


def test_random_batches_have_the_same_digests_and_the_same_verdict(core: NativeCore) -> None:
    source = random.Random(7)
    assert sum(compare(core, source) for _ in range(300)) == 300 * 10


def test_messages_are_those_of_python_and_hostile_ones_are_left_to_it(core: NativeCore) -> None:
    source = random.Random(11)
    assert sum(messages.compare(core, source) for _ in range(300)) == 300 * 18


def test_batches_of_many_threads_are_right_without_the_lock(core: NativeCore) -> None:
    payloads = [random.Random(1).randbytes(100_000) for _ in range(8)]
    kinds = sorted(core.TYPES) * 8

    def make(kind: int) -> list[object]:
        whole, in_pieces = (core.encode(kind, KEY, 7, 0, -1, 0, payloads, b"head", copies) for copies in (True, False))
        alone = core.prefix(kind, KEY, 7, 0, -1, 1, payloads[0])
        return [*core.prefixes(kind, KEY, 7, 0, -1, 0, payloads), alone, *whole, *in_pieces]

    wanted = {kind: make(kind) for kind in core.TYPES}
    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(make, kinds)) == [wanted[kind] for kind in kinds]


@pytest.mark.parametrize("sizes", [[3000] * 2000, [5 << 20, 0, 1], [0, 0, 5 << 20], [700_000] * 9], ids=len)
def test_a_large_batch_is_checked_whole_by_its_threads(core: NativeCore, sizes: list[int]) -> None:
    source = random.Random(5)
    payloads = [source.randbytes(size) for size in sizes]
    for kind in sorted(core.TYPES):
        prefixes = core.prefixes(kind, KEY, 7, 0, -1, 0, payloads)
        changing = bytearray().join(part for both in zip(prefixes, payloads, strict=True) for part in both)
        buffer = memoryview(changing)
        whole = np.array([len(prefixes[0]) + size for size in sizes], np.int64)
        offsets, ids = np.cumsum(whole) - whole, np.arange(len(sizes))
        assert core.matches(kind, KEY, 7, buffer, offsets, whole, ids)
        for number in {0, len(sizes) - 1, *(source.randrange(len(sizes)) for _ in range(20))}:
            last = int(offsets[number] + whole[number]) - 1
            changing[last] ^= 1
            assert core.matches(kind, KEY, 7, buffer, offsets, whole, ids) is (kind == DigestType.NONE), number
            changing[last] ^= 1


@pytest.mark.skipif(sys.platform != "linux", reason="reads the memory of a thread's stack as Linux shows it")
def test_the_lanes_leave_no_key_on_the_stack(core: NativeCore) -> None:
    kind = DigestType.HMAC_SHA256
    if kind not in core.TYPES - core.ALONE:
        pytest.skip("this processor does not compute HMAC-SHA256 in lanes")
    key = random.Random(2).randbytes(KEY_BYTES)
    made, seen = threading.Event(), threading.Event()

    def make() -> None:
        core.prefixes(kind, key, 7, 0, -1, 0, [b"x" * 100] * 3)
        made.set()
        seen.wait(PROCESS_S)

    thread = threading.Thread(target=make)
    thread.start()
    try:
        assert made.wait(PROCESS_S)
        stack = memory_around(cast("int", thread.ident))
    finally:
        seen.set()
        thread.join()
    words = [bytes(byte ^ pad for byte in key[at : at + 4]) for pad in (0x36, 0x5C) for at in range(0, KEY_BYTES, 4)]
    assert not [word for word in words if word in stack or word[::-1] in stack]


def memory_around(address: int) -> bytes:
    """Return what the mapping of this process that has an address holds."""
    with open("/proc/self/maps", encoding="ascii") as maps:
        ranges = [[int(number, 16) for number in line.split()[0].split("-")] for line in maps]
    (low, high) = next(each for each in ranges if each[0] <= address < each[1])
    with open("/proc/self/mem", "rb") as memory:
        memory.seek(low)
        return memory.read(high - low)


def test_no_entries_match_and_have_no_prefixes(core: NativeCore) -> None:
    for kind in core.TYPES:
        assert core.matches(kind, KEY, 7, b"", PLACES[:0], PLACES[:0], PLACES[:0]) is True
        assert core.prefixes(kind, KEY, 7, 0, -1, 0, []) == []
        for copies in (True, False):
            assert core.encode(kind, KEY, 7, 0, -1, 0, [], b"head", copies) == ([b"head"], xxh3_64_intdigest(b"head"))
    assert core.lengths([]) == b""


def test_a_small_batch_does_not_ask_what_the_processor_has(core: NativeCore) -> None:
    """In a virtual machine, asking takes ten microseconds and more each time."""
    empty = PLACES[:0]

    def least_ns(kind: int) -> int:
        def once() -> int:
            began_ns = time.perf_counter_ns()
            assert core.matches(kind, KEY, 7, b"", empty, empty, empty)
            return time.perf_counter_ns() - began_ns

        return min(once() for _ in range(2000))

    assert max(map(least_ns, core.TYPES)) < least_ns(DigestType.NONE) + 5000


def test_wrong_arguments_are_refused(core: NativeCore) -> None:
    with pytest.raises(ValueError, match="digest type 5 is not computed here"):
        core.prefixes(5, KEY, 7, 0, -1, 0, [b""])
    with pytest.raises(ValueError, match="equally long"):
        core.matches(DigestType.NONE, KEY, 7, b"", PLACES, PLACES, PLACES[:0])
    with pytest.raises(TypeError, match="not a type of named tuples"):
        core.open(list, KEY, b"", DigestType.NONE, 7, 0, 0, 0)  # type: ignore[type-var]
    with pytest.raises(TypeError, match="takes 8 arguments, not 7"):
        core.open(Entry, KEY, b"", DigestType.NONE, 7, 0, 0)  # type: ignore[call-arg]
    with pytest.raises(TypeError):
        core.decode(Entry, "text", 32, 0, 0)  # type: ignore[arg-type]
    with pytest.raises(TypeError):
        core.prefixes(DigestType.NONE, KEY, 7, 0, -1, 0, [b"", "text"])  # type: ignore[list-item]
    with pytest.raises(ValueError, match="digest type 5 is not computed here"):
        core.prefix(5, KEY, 7, 0, -1, 0, b"")
    with pytest.raises(TypeError):
        core.entry_commit(7, 0, 1, 1, b"", "text")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="digest type 5 is not computed here"):
        core.encode(5, KEY, 7, 0, -1, 0, [b""], b"", True)
    for copies in (True, False):
        with pytest.raises(TypeError):
            core.encode(DigestType.NONE, KEY, 7, 0, -1, 0, [b"", "text"], b"", copies)  # type: ignore[list-item]
    with pytest.raises(TypeError):
        core.encode(DigestType.NONE, KEY, 7, 0, -1, 0, [b""], bytearray(), True)  # type: ignore[arg-type]
    with pytest.raises(TypeError):
        core.lengths(5)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="contiguous"):
        core.matches(DigestType.NONE, KEY, 7, b"", np.zeros(4, np.int64)[::2], PLACES, PLACES)


def test_a_key_of_the_wrong_size_is_refused(core: NativeCore) -> None:
    if DigestType.HMAC_SHA256 not in core.TYPES:
        pytest.skip("this processor has no instructions for SHA-256")
    for call in (
        lambda: core.matches(DigestType.HMAC_SHA256, KEY[1:], 7, b"", PLACES, PLACES, PLACES),
        lambda: core.open(Entry, KEY[1:], b"", DigestType.HMAC_SHA256, 7, 0, 0, 0),
        lambda: core.prefix(DigestType.HMAC_SHA256, KEY[1:], 7, 0, -1, 0, b""),
        lambda: core.encode(DigestType.HMAC_SHA256, KEY[1:], 7, 0, -1, 0, [b""], b"", True),
    ):
        with pytest.raises(ValueError, match="the key has 31 bytes; it takes 32"):
            call()


@pytest.mark.parametrize(
    ("prefix_bytes", "start", "end"),
    [(31, 0, 40), (32, -1, 40), (32, 0, 41), (32, 9, 40), (-(2**63), 0, 40), (32, -(2**63), 2**63 - 1), (2**62, 0, 40)],
)
def test_nothing_outside_the_buffer_is_decoded(core: NativeCore, prefix_bytes: int, start: int, end: int) -> None:
    with pytest.raises(ValueError, match="does not lie in 40 bytes"):
        core.decode(Entry, bytes(40), prefix_bytes, start, end)


def test_entries_hold_no_more_than_their_own_objects(core: NativeCore) -> None:
    (prefix,) = core.prefixes(DigestType.XXH3, b"", 7, 0, -1, 0, [b"payload"])
    encoded = prefix + b"payload"
    before = sys.getrefcount(encoded)
    opened = core.open(Entry, b"", encoded, DigestType.XXH3, 7, 0, 0, len(encoded))
    decoded = core.decode(Entry, encoded, len(prefix), 0, len(encoded))
    made = Entry(7, 0, -1, 7, encoded[len(prefix) :])
    assert opened == decoded == made
    assert hash(opened) == hash(decoded) == hash(made)  # CPython 3.14 keeps hashes in tuples
    facts = {(gc.is_tracked(each), sys.getrefcount(each), sys.getrefcount(each[4])) for each in (made, opened, decoded)}
    assert len(facts) == 1
    assert core.open(Entry, b"", encoded, DigestType.XXH3, 8, 0, 0, len(encoded)) is None
    assert sys.getrefcount(encoded) == before


class Payload(bytes):
    """Bytes of a type of its own, which is copied."""


def test_lengths_are_those_of_bytes_and_of_nothing_else(core: NativeCore) -> None:
    assert core.lengths([b"", b"abc", bytes(300)]) == struct.pack("=3q", 0, 3, 300)
    for other in (bytearray(b"a"), memoryview(b"a"), Payload(b"a"), "a", None):
        assert core.lengths([b"abc", other]) is None


def test_encoded_entries_hold_no_more_than_what_is_in_them(core: NativeCore) -> None:
    payloads, head = [bytes([n]) * 40 for n in range(5)], bytes(21)

    def held() -> list[int]:
        return [sys.getrefcount(each) for each in (*payloads, head, None)]

    before, made = held(), (list[bytes](), 0)
    for _ in range(1000):
        core.encode(DigestType.XXH3, b"", 7, 0, -1, 0, payloads, head, True)
        core.lengths([*payloads, None])
        made = core.encode(DigestType.XXH3, b"", 7, 0, -1, 0, payloads, head, False)
        with contextlib.suppress(TypeError):
            core.encode(DigestType.XXH3, b"", 7, 0, -1, 0, [*payloads, None], head, False)  # type: ignore[list-item]
    assert [count - was for count, was in zip(held(), before, strict=True)][:-1] == [1] * 6
    assert abs(held()[-1] - before[-1]) < 500, "None"
    assert all(one is other for one, other in zip(made[0][2::2], payloads, strict=True)), "payloads are not copied"
    del made
    assert held()[:-1] == before[:-1]


@pytest.mark.parametrize(("value", "pure"), [("1", True), ("0", False), ("", False)])
def test_the_environment_leaves_the_core_out(core: NativeCore, value: str, *, pure: bool) -> None:
    program = "from pybk.ledger import CORE; print(CORE is None)"
    environment = {**os.environ, "PYBK_PURE": value, "PYTHONPATH": str(ROOT / "src")}
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout == f"{pure}\n"


def test_the_core_is_there_where_it_can_be_built() -> None:
    """Or every other test of it would be left out, and nobody would notice."""
    header = Path(sysconfig.get_paths()["include"]) / "Python.h"
    if os.environ.get("PYBK_PURE", "0") not in ("", "0") or shutil.which("cc") is None or not header.exists():
        pytest.skip("it is not wanted, or cannot be built here")
    assert CORE is not None, "building it failed: pip install --verbose --editable . says why"


@pytest.mark.skipif(shutil.which("cc") is None, reason="there is no compiler")
def test_it_is_not_built_for_a_processor_whose_numbers_it_would_turn_round() -> None:
    order = ("-U__BYTE_ORDER__", "-D__BYTE_ORDER__=__ORDER_BIG_ENDIAN__")
    includes = f"-I{sysconfig.get_paths()['include']}"
    source = ROOT / "src" / "native" / "module.c"
    done = subprocess.run(
        ["cc", "-E", *order, includes, source], capture_output=True, text=True, timeout=PROCESS_S, check=False
    )
    assert "little-endian processors" in done.stderr
    assert done.returncode != 0


def test_the_vendored_source_is_unchanged() -> None:
    source = ROOT / "src" / "native"
    named = hashlib.sha256((source / "xxhash.h").read_bytes()).hexdigest()
    assert f"`{named}`" in (source / "README.md").read_text(encoding="utf-8")


def test_spans_and_what_is_wrong_with_them_are_those_of_python(
    core: NativeCore, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = random.Random(5)
    results = []
    for _ in range(3000):
        words, view, table = _random_run(source)
        entry_id = words[0] + source.randrange(-1, 8)
        both: list[tuple[int, int] | str] = []
        for chosen in (core, None):
            monkeypatch.setattr(store_reader, "CORE", chosen)
            try:
                both.append(store_reader.entry_span(view, words, entry_id, table))
            except (CorruptError, struct.error) as error:
                both.append(str(error))
        assert both[0] == both[1], (words, bytes(view), table, entry_id)
        results.append(type(both[0]))
    assert min(results.count(tuple), results.count(str)) > 500


def _random_run(source: random.Random) -> tuple[tuple[int, int, int, int], memoryview, bytes | None]:
    """Return a run of up to six entries, a file, and its table, or None; often the file or the run is damaged."""
    count, stride, offset = source.randrange(1, 7), source.randrange(1, 4), source.randrange(100)
    sizes = [source.randrange(9) for _ in range(count)]
    table = b"".join(sum(sizes[: number + 1]).to_bytes(4, "little") for number in range(count)) if count > 1 else b""
    body = bytearray(table + bytes(sum(sizes)))
    if source.randrange(4) == 0 and body:
        body[source.randrange(len(body))] ^= 1 << source.randrange(8)
    file = bytes(offset + RECORD_HEADER_BYTES) + body
    if source.randrange(8) == 0:
        file = file[: source.randrange(len(file))]
    body_bytes = len(body) if source.randrange(8) else source.choice((0, len(body) + 1, 1 << 32, (1 << 63) - 1))
    words = source.choice(IDS[:3]), count | stride << 32, 9 << 32 | offset, body_bytes
    return words, memoryview(file), bytes(body[: len(table)]) if source.randrange(2) and count > 1 else None


def test_no_span_is_looked_for_outside_the_table_and_the_file(core: NativeCore) -> None:
    file = memoryview(bytes(RECORD_HEADER_BYTES) + b"\2\0\0\0\4\0\0\0abcd")
    words = 5, 2 | 1 << 32, 9 << 32, 12
    assert [core.span(file, None, words, number) for number in (5, 6)] == [(72, 74), (74, 76)]
    assert core.span(file, b"\1\0\0\0\2\0\0\0", words, 6) == (73, 74)
    for wrong in [(5, words[1], words[2], 13), (5, 4 | 1 << 32, words[2], 12), (5, words[1], words[2], 1 << 32 | 12)]:
        with pytest.raises(ValueError, match="does not lie in the run"):
            core.span(file, None, wrong, 6)
    for entry_id in (4, 7, -(2**63), 2**63 - 1):
        with pytest.raises(ValueError, match="does not lie in the run"):
            core.span(file, None, words, entry_id)
    with pytest.raises(ValueError, match="does not lie in the run"):
        core.span(file, b"\1\0\0\0", words, 6)
    with pytest.raises(IndexError):
        core.span(file, None, words[:3], 6)  # type: ignore[arg-type]

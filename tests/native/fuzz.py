"""Compare the native core with pure Python on random entries: ``python -m tests.native.fuzz SECONDS [SEED]``.

Batches are sound, damaged, or described by wrong places and ids. Each buffer is an object of its own that ends where
its last byte is, so that AddressSanitizer sees what is read beyond it. Between them signals come in guards.
"""

from __future__ import annotations

import random
import sys
import time
from contextlib import suppress
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from pybk.errors import DigestMismatchError
from pybk.ledger import CORE
from pybk.ledger.digest import KEY_BYTES, DigestType, EntryDigest, entry_digest
from pybk.ledger.entry import ENTRY_HEADER_BYTES, Entry, EntryBatch
from pybk.storage.format.log_file import BLOCK_BYTES, COMMIT_HEADER_BYTES, encode_commit_header, encode_entries, padding
from tests.native import guards, messages

if TYPE_CHECKING:
    from pybk.ledger.native import NativeCore

SIZES = (
    0,
    1,
    7,
    8,
    9,
    22,
    23,
    24,
    31,
    32,
    33,
    54,
    55,
    56,
    63,
    64,
    65,
    86,
    87,
    88,
    95,
    96,
    97,
    239,
    240,
    241,
    1000,
    5000,
)
COUNTS = (1, 2, 3, 4, 5, 7, 40)
LARGE = 50
"""One of so many batches is large enough for several threads."""

Places = npt.NDArray[np.int64]

IDS = (0, 1, (1 << 31) - 1, (1 << 62))
WILD = (-(1 << 63), -1, 0, 1, 31, 32, 63, 64, 65, (1 << 31), (1 << 63) - 1)


class Pure:
    """The digest of a ledger without the core."""

    def __init__(self, kind: DigestType, ledger_id: int, key: bytes) -> None:
        self.digest: EntryDigest = entry_digest(kind, ledger_id, key)
        self.digest.core = self.digest.core_alone = None

    def matches(self, batch: EntryBatch) -> bool:
        """Return whether pure Python finds all entries right."""
        with suppress(DigestMismatchError):
            self.digest.check_many(batch)
            return True
        return False


def compare(core: NativeCore, source: random.Random) -> int:
    """Make one batch, in both ways, and check it as it is, and damaged; return how many comparisons that were."""
    kind = DigestType(source.choice(sorted(core.TYPES)))
    key, ledger_id, first = source.randbytes(KEY_BYTES), source.choice(IDS), source.choice(IDS)
    pure = Pure(kind, ledger_id, key)
    payloads = _payloads(source)
    place = (ledger_id, first, first - 1, source.choice(IDS))
    prefixes = pure.digest.prefixes(*place[1:], payloads)
    made = core.prefixes(kind, key, *place, payloads)
    assert made == prefixes, (kind, key, place, [len(each) for each in payloads])
    compare_first(core, source, kind, key, place, payloads[0], prefixes[0])
    compare_encoded(core, source, pure, key, place, payloads)
    encoded = [prefix + payload for prefix, payload in zip(prefixes, payloads, strict=True)]
    sizes = np.array([len(each) for each in encoded], np.int64)
    batch = (b"".join(encoded), np.cumsum(sizes) - sizes, sizes, np.arange(len(encoded)) + first)
    compared = 1
    for buffer, offsets, some_sizes, ids in (batch, *(_damaged(source, *batch) for _ in range(8))):
        wanted = pure.matches(EntryBatch(ledger_id, ids, memoryview(buffer), offsets, some_sizes, pure.digest.size))
        found = core.matches(kind, key, ledger_id, buffer, offsets, some_sizes, ids)
        assert found is wanted, (kind, key, ledger_id, buffer.hex(), offsets, some_sizes, ids)
        places = zip(offsets.tolist(), some_sizes.tolist(), ids.tolist(), strict=True)
        opened = [_opened(core, pure, key, memoryview(buffer), *each) for each in places]
        assert all(opened) == wanted
        compared += 1
    return compared


def _payloads(source: random.Random) -> list[bytes]:
    """Return the payloads of a batch, sometimes of one that several threads check, of many entries or of few."""
    sizes = [source.choice(SIZES) for _ in range(source.choice(COUNTS))]
    if source.randrange(LARGE) == 0:
        left = source.randrange(2 << 20, 6 << 20)
        large = source.choice((source.randrange(3000, 9000), left // source.randrange(1, 9), left))
        sizes += [large + source.choice(SIZES) for _ in range(left // large)]
        source.shuffle(sizes)
    return [source.randbytes(size) for size in sizes]


def _opened(core: NativeCore, pure: Pure, key: bytes, buffer: memoryview, start: int, size: int, entry_id: int) -> bool:
    """Open one entry in both ways; return whether it was found right."""
    digest = pure.digest
    end = min(start + size, WILD[-1])
    place = digest.digest_type, digest.ledger_id, entry_id, start, end
    found = core.open(Entry, key, buffer, *place)
    try:
        wanted = digest.open(buffer, start, end, entry_id)
    except DigestMismatchError:
        assert found is None, place
        return False
    assert found == wanted, place
    assert core.decode(Entry, buffer, ENTRY_HEADER_BYTES + digest.size, start, end) == wanted, place
    return True


def compare_first(
    core: NativeCore,
    source: random.Random,
    kind: DigestType,
    key: bytes,
    place: tuple[int, int, int, int],
    payload: bytes,
    prefix: bytes,
) -> None:
    """Make the prefix of an entry alone, and the commit of it alone, and check both."""
    ledger_id, entry_id, lac, length = place
    made = core.prefix(kind, key, ledger_id, entry_id, lac, length + len(payload), payload)
    assert made == prefix, (kind, key, place, len(payload))
    lsn, file_id = 1 + source.choice(IDS), source.choice(IDS)
    header, body = encode_entries(ledger_id, entry_id, [len(prefix + payload)], [prefix, payload], lsn=lsn)
    bare = encode_commit_header(lsn, lsn - 1, file_id, 1, len(header) + len(body)) + header + body
    commit = core.entry_commit(ledger_id, entry_id, lsn, file_id, memoryview(prefix), payload)
    assert commit == bare + bytes(padding(len(bare))), (place, lsn, file_id, len(payload))
    edge = source.randbytes(BLOCK_BYTES - 2 * COMMIT_HEADER_BYTES - source.randrange(2))
    assert len(core.entry_commit(ledger_id, entry_id, lsn, file_id, edge, b"")) == BLOCK_BYTES


def compare_encoded(
    core: NativeCore,
    source: random.Random,
    pure: Pure,
    key: bytes,
    place: tuple[int, int, int, int],
    payloads: list[bytes],
) -> None:
    """Encode a batch after some bytes, in both ways, in one piece and in many."""
    head = source.randbytes(source.choice((0, 4 * len(payloads), source.choice(SIZES))))
    lengths = np.array([len(each) for each in payloads], np.int64)
    assert core.lengths(payloads) == lengths.tobytes()
    wanted = pure.digest.encode(*place[1:], payloads, lengths, head)
    kind = pure.digest.digest_type
    whole, checksum = core.encode(kind, key, *place, payloads, head, True)
    assert (whole, checksum) == ([b"".join(wanted.pieces)], wanted.checksum), (kind, key, place, lengths, head)
    pieces, checksum = core.encode(kind, key, *place, payloads, head, False)
    assert (b"".join(pieces), checksum) == (whole[0], wanted.checksum), (kind, key, place, lengths, head)
    assert (pieces[0], pieces[2::2], pieces[-2]) == (head, payloads, wanted.last_prefix)


def _damaged(
    source: random.Random, buffer: bytes, offsets: Places, sizes: Places, ids: Places
) -> tuple[bytes, Places, Places, Places]:
    """Return a batch with a bit flipped, an end cut off, or one wrong place, size or id; or with unaligned arrays."""
    which = source.randrange(6)
    at = source.randrange(len(ids))
    if which == 0:
        flipped = bytearray(buffer)
        flipped[source.randrange(len(buffer))] ^= 1 << source.randrange(8)
        return bytes(flipped), offsets, sizes, ids
    if which == 1:
        return buffer[: source.randrange(len(buffer))], offsets, sizes, ids
    if which == 5:
        return buffer, unaligned(offsets), unaligned(sizes), unaligned(ids)
    changed = [offsets.copy(), sizes.copy(), ids.copy()]
    changed[which - 2][at] = source.choice(WILD)
    return buffer, changed[0], changed[1], changed[2]


def unaligned(numbers: Places) -> Places:
    """Return the same numbers at an odd address."""
    return np.frombuffer(b"\0" + numbers.tobytes(), np.int64, offset=1)


def main() -> int:
    """Compare until the time is over."""
    assert CORE is not None, "the native core is not there"
    seed = int(sys.argv[2]) if len(sys.argv) > 2 else random.randrange(1 << 32)
    sys.stdout.write(f"seed {seed}, digest types {sorted(CORE.TYPES)}, {CORE}\n")
    source = random.Random(seed)
    compared = 0
    end = time.monotonic() + float(sys.argv[1])
    while time.monotonic() < end:
        compared += compare(CORE, source) + messages.compare(CORE, source)
        guards.check(source)
    sys.stdout.write(f"{compared} batches and messages are equal\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())

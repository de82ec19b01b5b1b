"""The floors do the work that they stand for."""

from __future__ import annotations

import hmac
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

pytest.importorskip("rocksdict")

from bench import floors
from bench.floors import BLOCK_BYTES, PREFIX_BYTES, BareGroupCommit, BareRead, BareWrite
from bench.payloads import PAYLOAD

PAYLOADS = [bytes([number]) * 1024 for number in range(1, 33)]


def entries_in(file: Path) -> list[bytes]:
    """Return the entries in the blocks of a floor's file, whatever commits they are in."""
    found = []
    left = file.read_bytes()
    while left.strip(b"\0"):
        left = left[2 * 64 :]
        size = 0
        while left[size + PREFIX_BYTES : size + PREFIX_BYTES + 1].strip(b"\0"):
            found.append(left[size : size + PREFIX_BYTES + 1024])
            size += PREFIX_BYTES + 1024
        left = left[size + -(size + 2 * 64) % BLOCK_BYTES :]
    return found


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(floors, "RAW_BYTES", 1 << 20)


def test_threads_share_commits_that_have_each_entry_once_with_its_digest(tmp_path: Path) -> None:
    with BareGroupCommit(tmp_path) as floor, ThreadPoolExecutor(4) as pool:
        list(pool.map(floor.append, ([payload] for payload in PAYLOADS)))
    entries = entries_in(tmp_path / "blocks")
    assert sorted(entry[PREFIX_BYTES:] for entry in entries) == PAYLOADS
    for entry in entries:
        header, digest, payload = entry[:32], entry[32:PREFIX_BYTES], entry[PREFIX_BYTES:]
        assert digest == hmac.digest(b"", header + payload, "sha256")


def test_a_bare_write_is_a_block_with_the_entry(tmp_path: Path) -> None:
    with BareWrite(tmp_path) as floor:
        for payload in PAYLOADS[:2]:
            floor.append([payload])
    written = (tmp_path / "blocks").read_bytes()
    for number, payload in enumerate(PAYLOADS[:2]):
        start = number * BLOCK_BYTES + 2 * 64 + PREFIX_BYTES
        assert written[start : start + 1024] == payload


def test_a_bare_read_finds_each_entry(tmp_path: Path) -> None:
    with BareRead(tmp_path, 5) as floor:
        assert [floor.get(number) for number in (4, 0)] == [PAYLOAD] * 2
        assert floor.scan() == 5

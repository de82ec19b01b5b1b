"""Blobs are read as they were written, and only if they were written to their end."""

from __future__ import annotations

import io
from pathlib import Path
from random import Random

import pytest

from pybk import LedgerManager
from pybk.errors import CorruptError
from pybk.streams.blob import BlobReader, BlobWriter

CHUNK = 100


class Written(BlobWriter[int]):
    """A blob that nothing names."""

    def __init__(self, manager: LedgerManager, chunk_bytes: int = CHUNK) -> None:
        self.ledger = manager.create_ledger(password=b"p")
        super().__init__("the blob", self.ledger, chunk_bytes)
        self._ended = False

    def _publish(self) -> int:
        return self.ledger.ledger_id

    def _abandon(self) -> None:
        pass

    def _give_up(self) -> None:
        pass


@pytest.mark.parametrize("size", [0, 1, 99, 100, 101, 200, 5_000])
def test_a_blob_reads_like_a_file(tmp_path: Path, size: int) -> None:
    random = Random(size)
    data = random.randbytes(size)
    with LedgerManager.open(tmp_path) as manager:
        writer = Written(manager)
        at = 0
        while at < size:
            step = random.randint(1, 350)
            assert writer.write(data[at : at + step]) == len(data[at : at + step])
            at += step
        assert writer.tell() == size
        ledger_id = writer.commit()
        blob = BlobReader(manager.open_ledger(ledger_id, password=b"p"))
        with io.BufferedReader(blob, 64) as file:
            assert file.read() == data
            for _ in range(50):
                position, length = random.randint(0, size + 10), random.randint(0, 400)
                assert file.seek(position) == position
                assert file.read(length) == data[position : position + length]
            assert file.seek(0, io.SEEK_END) == size
            assert blob.seek(0) == 0
            assert blob.readall() == data
            with pytest.raises(ValueError, match="before the beginning"):
                blob.seek(-1)


def test_a_blob_that_was_not_closed_does_not_count(tmp_path: Path) -> None:
    with LedgerManager.open(tmp_path) as manager:
        writer = Written(manager)
        writer.write(bytes(250))
        writer.close()
        with pytest.raises(CorruptError, match="written to its end"):
            BlobReader(manager.open_ledger(writer.ledger.ledger_id, password=b"p", recover=False))


def test_another_ledger_is_not_a_blob(tmp_path: Path) -> None:
    with LedgerManager.open(tmp_path) as manager:
        with manager.create_ledger(password=b"p") as other:
            other.append(b"x" * 16)
        with pytest.raises(CorruptError, match="not a blob"):
            BlobReader(manager.open_ledger(other.ledger_id, password=b"p"))


@pytest.mark.parametrize("step", [1000, 70_000, 3 << 20])
def test_what_is_read_ahead_is_what_is_read(tmp_path: Path, step: int) -> None:
    random = Random(step)
    chunk = 64 << 10
    data = random.randbytes(20 << 20)
    with LedgerManager.open(tmp_path) as manager:
        writer = Written(manager, chunk)
        writer.write(data)
        ledger_id = writer.commit()
        with BlobReader(manager.open_ledger(ledger_id, password=b"p")) as blob:
            buffer = bytearray(step)
            for _ in range(4):
                position = blob.seek(random.randrange(len(data)))
                for _ in range(200):
                    count = blob.readinto(buffer)
                    assert buffer[:count] == data[position : position + count]
                    position += count
            blob.seek(0)
            assert blob.readall() == data
        with BlobReader(manager.open_ledger(ledger_id, password=b"p")) as blob:
            assert blob.readall()[:10] == data[:10]


def test_a_reader_that_reads_ahead_may_be_closed_at_any_time(tmp_path: Path) -> None:
    with LedgerManager.open(tmp_path) as manager:
        writer = Written(manager, 64 << 10)
        writer.write(bytes(20 << 20))
        ledger_id = writer.commit()
        for count in range(5):
            blob = BlobReader(manager.open_ledger(ledger_id, password=b"p"))
            for _ in range(count):
                blob.readinto(bytearray(64 << 10))
            blob.close()
            blob.close()

"""A read of compressed records unpacks what it returns, and not all that was small when stored."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from pybk.flags import StorageHint
from pybk.storage import format as layouts
from tests.storage.real_store import open_quick

pytest.importorskip("zstandard")

MIB = 1 << 20


def test_a_read_of_compressed_zeros_unpacks_about_what_it_asks_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with open_quick(tmp_path, cold_compression="zstd", cold_block_bytes=64 << 10) as manager:
        with manager.create_ledger(storage_hints={StorageHint.HDD}, insecure=True) as writer:
            for _ in range(32):
                writer.append_many([bytes(16 << 10)] * 32)
        manager.checkpoint()
        unpacked: list[int] = []
        decompress: Callable[..., bytes | memoryview] = layouts.decompress

        def count(*arguments: object) -> bytes | memoryview:
            body = decompress(*arguments)
            unpacked.append(len(body))
            return body

        monkeypatch.setattr(layouts, "decompress", count)
        with manager.open_ledger(writer.ledger_id) as reader:
            batch = reader.read_batch(0, max_bytes=MIB)
            assert MIB // 2 < batch.payload_bytes <= MIB
            assert unpacked
            assert sum(unpacked) <= 2 * MIB
            read = 0
            while read < 1024:
                read += len(reader.read_batch(read, max_bytes=MIB))
            assert read == 1024

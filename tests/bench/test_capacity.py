"""What entries, ledgers and clients take is measured, and printed."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench.capacity import cluster_figures, entry_bytes, ledger_bytes
from pybk import StorageHint


def test_an_entry_takes_a_block_of_the_log_and_less_once_it_is_packed(tmp_path: Path) -> None:
    logged, kept = entry_bytes(tmp_path, 1024, 64, 1, StorageHint.NVME)
    assert logged >= 4096
    assert 1024 < kept < 2048


def test_ledgers_take_space_in_index_and_catalog(tmp_path: Path) -> None:
    found = ledger_bytes(tmp_path, 100)
    assert all(value > 0 for value in found.values())


@pytest.mark.long
def test_a_cluster_is_measured(tmp_path: Path) -> None:
    found = cluster_figures(tmp_path, 10, 2, 1)
    assert found["its descriptors"] > 10
    assert found["metadata per ledger"] > 0
    assert found["bookie per client, descriptors"] >= 1

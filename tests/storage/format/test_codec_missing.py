"""A store that is asked to compress without the package for it is refused at open, before anything is touched."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from pybk.config import StoreConfig
from pybk.errors import UsageError
from pybk.manager.ledger_manager import LedgerManager


def test_zstd_without_zstandard_is_refused_at_open_with_the_command_to_install_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "zstandard", None)
    with pytest.raises(UsageError, match=r'cold_compression="zstd".*pip install "pybk\[zstd\]"'):
        LedgerManager.open(str(tmp_path / "s"), config=StoreConfig(cold_compression="zstd"))
    assert not (tmp_path / "s").exists()
    LedgerManager.open(str(tmp_path / "s"), config=StoreConfig()).close()

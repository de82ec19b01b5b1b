"""Log files and cold segments that were cut while the store was closed: an open refuses them and changes nothing."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from pybk.errors import CorruptError
from pybk.flags import StorageHint
from pybk.manager.ledger_manager import LedgerManager
from pybk.storage.format.log_file import BLOCK_BYTES
from pybk.storage.repair.rebuild import rebuild_index
from tests.internals import store_of, store_view_of
from tests.storage.real_store import contents, open_quick
from tests.storage.test_consistency import tree

PAYLOADS = [b"%d " % number * 1500 for number in range(50)]
LARGE = [bytes([number]) * 30_000 for number in range(30)]


def filled(manager: LedgerManager, hint: StorageHint, payloads: list[bytes]) -> int:
    with manager.create_ledger(insecure=True, storage_hints={hint}) as writer:
        for payload in payloads:
            writer.append(payload)
    return writer.ledger_id


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Return a closed store: ledger 0 in a cold segment, 1 in a log file that the index names, 2 in the SSD tier."""
    root = tmp_path / "store"
    with open_quick(root, background=False, fill_ratio=0.1) as manager:
        filled(manager, StorageHint.HDD, PAYLOADS)
        manager.checkpoint()
        filled(manager, StorageHint.NVME, LARGE)
        manager.checkpoint()
        filled(manager, StorageHint.SSD, PAYLOADS)
        kinds = {row.kind for row in store_of(manager).index.files().values()}
        assert kinds == {"log", "cold", "entries"}
    return root


def data_file(root: Path, kind: str) -> Path:
    """Return the file of a kind that the index names."""
    with open_quick(root, background=False, read_only=True) as manager:
        store = store_view_of(manager)
        (found,) = [Path(store.volumes.path_of(row)) for row in store.index.files().values() if row.kind == kind]
    return found


@pytest.mark.sampled(one_in=2)
@pytest.mark.parametrize("part", [0.0, 0.5, 0.99])
@pytest.mark.parametrize("kind", ["cold", "log"])
def test_a_file_that_was_cut_is_refused_untouched(root: Path, kind: str, part: float) -> None:
    path = data_file(root, kind)
    whole = path.read_bytes()
    size = int(len(whole) * part) if kind == "cold" else int(len(LARGE) * 30_000 * part)
    os.truncate(path, size)
    before = tree(root)
    with pytest.raises(CorruptError, match=rf"{path} has {size} bytes.* \d{{6}}.*backup.*rebuild-index") as raised:
        open_quick(root)
    assert raised.value.path == str(path)
    assert tree(root) == before

    # A reader changes nothing, and what is whole may be wanted from it.
    with open_quick(root, read_only=True) as reader:
        assert contents(reader, 2) == PAYLOADS
        with pytest.raises(CorruptError):
            contents(reader, 0 if kind == "cold" else 1)
    assert not rebuild_index(str(root)).made
    assert tree(root) == before

    path.write_bytes(whole)
    with open_quick(root, background=False) as manager:
        assert [contents(manager, ledger_id) for ledger_id in range(3)] == [PAYLOADS, LARGE, PAYLOADS]
    os.truncate(path, size)
    assert rebuild_index(str(root), accept_loss=True).made
    with open_quick(root, background=False) as manager:
        assert contents(manager, 2) == PAYLOADS


def test_a_block_of_zeros_in_the_place_of_a_missing_file_was_put_there_by_a_salvage(root: Path) -> None:
    path = data_file(root, "cold")
    path.write_bytes(bytes(BLOCK_BYTES))
    with open_quick(root, background=False) as manager:
        with pytest.raises(CorruptError):
            contents(manager, 0)
        assert contents(manager, 1) == LARGE
    path.write_bytes(bytes(BLOCK_BYTES - 1) + b"x")
    with pytest.raises(CorruptError, match=re.escape(str(path))):
        open_quick(root)

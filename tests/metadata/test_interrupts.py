"""Signals at each line of a change: others can still change the store."""

from __future__ import annotations

import itertools
import threading
from functools import partial
from pathlib import Path

import pytest

from pybk.metadata.lmdb_store import LmdbMetadataStore
from tests.interrupting import interrupted_at

_FILES = ("pybk/metadata/lmdb_store.py", "pybk/metadata/host_file.py")


def change(store: LmdbMetadataStore) -> int:
    found = store.get("key")
    assert found is not None
    return store.put("key", b"v", found.version)


@pytest.mark.timeout(0)
def test_an_interrupt_anywhere_in_a_change_leaves_the_write_lock_to_others(tmp_path: Path) -> None:
    store = LmdbMetadataStore(str(tmp_path / "m"), timeout_s=1)
    other = LmdbMetadataStore(str(tmp_path / "m"), timeout_s=1)
    store.create("key", b"v")
    for line in itertools.count():
        fired = interrupted_at(line, _FILES, partial(change, store))
        change(other)  # which is as if in another process: its locks are its own
        thread = threading.Thread(target=change, args=(store,))
        thread.start()
        thread.join()
        version = change(other)
        assert change(store) == version + 1, line
        if not fired:
            break
    assert line > 30
    store.close()
    other.close()

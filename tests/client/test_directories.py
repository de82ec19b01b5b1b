"""Whose directory is whose: copies of a bookie's directory never answer in its place."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from pybk.client.backend import ClusterBackend
from pybk.config import StoreConfig
from pybk.errors import CookieError
from pybk.manager.ledger_manager import LedgerManager
from tests.cluster.inside import Inside, inside
from tests.internals import cluster_backend_of, service_of
from tests.storage.live_files import copy_below
from tests.storage.real_store import QUICK
from tests.waiting import wait_until


@pytest.fixture
def one(tmp_path: Path) -> Iterator[Inside]:
    with inside(tmp_path, count=1) as cluster:
        yield cluster


def start_on(cluster: Inside, directory: Path, *, moved: bool = False) -> LedgerManager:
    return LedgerManager.open(
        directory,
        listen="tcp://127.0.0.1:*",
        metadata=cluster.url,
        cluster_secret=cluster.secret,
        config=StoreConfig(**QUICK),
        moved=moved,
    )


@pytest.mark.parametrize("moved", [False, True])
def test_a_copy_is_refused_while_the_original_exists(one: Inside, moved: bool) -> None:
    client = one.connect()
    writer = client.create_ledger(ensemble_size=1, insecure=True)
    writer.append(b"first")
    copy = one.directory / "copy"
    copy_below(one.directory / "bookie-0", copy)
    writer.append(b"second")
    with pytest.raises(CookieError, match="serves at tcp://"):
        start_on(one, copy, moved=moved)
    writer.append(b"third")
    with client.open_ledger(writer.ledger_id) as reader:
        assert [entry.payload for entry in reader.read(0, 2)] == [b"first", b"second", b"third"]


def test_a_copy_is_started_only_if_it_is_said_to_be_the_original(one: Inside) -> None:
    client = one.connect()
    with client.create_ledger(ensemble_size=1, insecure=True) as writer:
        writer.append(b"first")
    one.bookies[0].close()
    copy = one.directory / "copy"
    shutil.copytree(one.directory / "bookie-0", copy)
    with pytest.raises(CookieError, match="is a copy"):
        start_on(one, copy)
    with start_on(one, copy, moved=True) as manager, manager.open_ledger(writer.ledger_id) as reader:
        assert [entry.payload for entry in reader.read(0, 0)] == [b"first"]
    with pytest.raises(CookieError, match=r"older copy|older backup|later starts"):
        one.open_bookie(0)


def test_a_bookie_that_was_registered_over_answers_nothing_more(one: Inside, monkeypatch: pytest.MonkeyPatch) -> None:
    original = service_of(one.bookies[0])
    registered = original.keeper.registered
    assert registered is not None
    # As another process would that found no answer, because this one was stopped.
    registration = original.keeper.registration()
    another = cluster_backend_of(one.connect())
    assert isinstance(another, ClusterBackend)
    over = another.membership.metadata.register(registration)

    def failed() -> bool:
        original.wake()
        return original.health().state == "failed"

    wait_until(failed, "the bookie that was registered over to stop serving")
    assert "another process serves as bookie" in original.health().reason
    over.close()


def test_the_name_of_a_lost_bookie_is_taken_only_if_that_is_said(one: Inside) -> None:
    one.bookies[0].close()
    shutil.rmtree(one.directory / "bookie-0")
    with pytest.raises(CookieError, match="--replace"):
        one.open_bookie(0)
    arguments: dict[str, Any] = {"listen": "tcp://127.0.0.1:*", "metadata": one.url, "cluster_secret": one.secret}
    with LedgerManager.open(one.directory / "new", bookie_id="bookie-0", replace=True, **arguments) as manager:
        with manager.create_ledger(ensemble_size=1, insecure=True) as writer:
            assert writer.append(b"first") == 0
        assert writer.metadata.fragments[0].ensemble[0].bookie_id == "bookie-0"

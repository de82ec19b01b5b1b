"""A running bookie follows the state in its cookie, before and after a restart."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from pybk.bookie import keeper
from pybk.errors import CookieError, NotEnoughBookiesError, UsageError
from pybk.feature_level import NEWEST_LEVEL, FeatureLevel
from pybk.manager.ledger_manager import LedgerManager
from pybk.metadata.registration import BookieCookie, BookieState
from pybk.transport.in_process import InProcessLink
from pybk.version import __version__
from tests.client.test_limbo_repair import PASSWORD
from tests.cluster.inside import SECRET, inside
from tests.internals import cluster_backend_of, metadata_of, service_of
from tests.waiting import wait_until


def become(manager: LedgerManager, name: str, *states: BookieState) -> None:
    """Give a bookie one state after the other."""
    for state in states:
        metadata_of(manager).change_cookie(name, lambda found, state=state: replace(found, state=state))  # type: ignore[misc]


def cookie_of(manager: LedgerManager, name: str) -> BookieCookie:
    found = metadata_of(manager).read_cookie(name)
    assert found is not None
    return found


def read_only(manager: LedgerManager, name: str) -> bool:
    """Return whether a bookie is registered as one that takes no new ledgers."""
    found = metadata_of(manager).find_bookie(name)
    return found is not None and found.read_only


def test_a_draining_bookie_is_read_only_at_once_and_after_a_restart_until_it_is_active(tmp_path: Path) -> None:
    with inside(tmp_path, count=2) as cluster:
        client = cluster.connect()
        become(client, "bookie-0", BookieState.DRAINING)
        wait_until(lambda: read_only(client, "bookie-0"))
        assert service_of(cluster.bookies[0]).machine.read_only
        assert not read_only(client, "bookie-1")
        cluster.bookies[0].close()
        cluster.bookies[0] = cluster.open_bookie(0)
        assert read_only(client, "bookie-0")
        assert service_of(cluster.bookies[0]).machine.read_only
        become(client, "bookie-0", BookieState.DRAINED)
        cluster_backend_of(client).membership.refresh()
        with pytest.raises(NotEnoughBookiesError, match="bookie-0 read-only"):
            client.create_ledger(password=PASSWORD, ensemble_size=2)
        become(client, "bookie-0", BookieState.ACTIVE)
        wait_until(lambda: not read_only(client, "bookie-0"))
        assert not service_of(cluster.bookies[0]).machine.read_only
        cluster_backend_of(client).membership.refresh()
        with client.create_ledger(password=PASSWORD, ensemble_size=2) as writer:
            writer.append(b"entry")


def test_a_removed_bookie_ends_and_does_not_start_again(tmp_path: Path) -> None:
    with inside(tmp_path, count=2) as cluster:
        client = cluster.connect()
        become(client, "bookie-0", BookieState.DRAINING, BookieState.DRAINED, BookieState.REMOVED)
        wait_until(lambda: not service_of(cluster.bookies[0]).serving)
        wait_until(lambda: metadata_of(client).find_bookie("bookie-0") is None)
        cluster.bookies[0].close()
        with pytest.raises(CookieError, match="was removed from the cluster"):
            cluster.open_bookie(0)
        started = subprocess.run(
            [
                *(sys.executable, "-m", "pybk", "bookie", str(tmp_path / "bookie-0")),
                *("--metadata", cluster.url, "--listen", "tcp://127.0.0.1:*"),
            ],
            env={**os.environ, "PYBK_CLUSTER_SECRET": SECRET.decode()},
            capture_output=True,
            text=True,
            check=False,
        )
        assert started.returncode == 2
        assert "was removed from the cluster" in started.stderr
        again = LedgerManager.open(
            tmp_path / "new",
            listen="tcp://127.0.0.1:*",
            metadata=cluster.url,
            cluster_secret=cluster.secret,
            bookie_id="bookie-0",
        )
        assert cookie_of(client, "bookie-0").state is BookieState.ACTIVE
        again.close()


def test_the_client_in_the_process_of_a_bookie_that_ended_gets_no_reply_at_once(tmp_path: Path) -> None:
    with inside(tmp_path, count=2) as cluster:
        manager, client = cluster.bookies[0], cluster.connect()
        wire = cluster_backend_of(manager).wire
        with manager.create_ledger(password=PASSWORD, ensemble_size=2, write_quorum=2, ack_quorum=2) as writer:
            writer.append(b"entry")
        link = wire.by_bookie[service_of(manager).bookie][0]
        become(client, "bookie-0", BookieState.DRAINING, BookieState.DRAINED, BookieState.REMOVED)
        wait_until(lambda: not service_of(manager).serving)
        with manager.open_ledger(writer.ledger_id, password=PASSWORD) as reader:
            assert [entry.payload for entry in reader] == [b"entry"], "the other bookie has it, too"
        assert isinstance(link, InProcessLink)
        assert service_of(manager).server.closed, "or requests of the own process would wait in it for ever"


def test_a_bookie_retired_by_its_process_stays_read_only_whatever_its_cookie_says(tmp_path: Path) -> None:
    with inside(tmp_path, count=1) as cluster:
        client = cluster.connect()
        service_of(cluster.bookies[0]).keeper.retire()
        become(client, "bookie-0", BookieState.DRAINING, BookieState.ACTIVE)
        assert read_only(client, "bookie-0")


def test_where_a_bookie_stands_is_known_after_its_end(tmp_path: Path) -> None:
    with inside(tmp_path, count=0) as cluster:
        client = cluster.connect()
        cluster.open_bookie(0, rack="/zone-1/rack-2").close()
        found = cookie_of(client, "bookie-0")
        assert (found.location, found.level_max, found.version) == ("zone-1/rack-2", NEWEST_LEVEL, __version__)
        with pytest.raises(UsageError, match="one to 3 parts"):
            cluster.open_bookie(1, rack="a/b/c/d")


def test_a_running_bookie_records_where_it_stands_once_the_level_is_raised(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(keeper, "STATE_SECONDS", 0.01)
    monkeypatch.setattr(keeper, "POSITION_SECONDS", 0.01)
    with inside(tmp_path, count=0, level=FeatureLevel.SEALS) as cluster:
        client = cluster.connect()
        cluster.bookies.append(cluster.open_bookie(0, rack="zone"))
        assert cookie_of(client, "bookie-0").location == ""
        metadata_of(client).upgrade(finalize=True)
        wait_until(lambda: cookie_of(client, "bookie-0").location == "zone")

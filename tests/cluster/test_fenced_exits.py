"""Leaving the ``with`` of a log that another owner has taken: what the block did counts, and no failure is silent."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from pybk.errors import LogFencedError
from pybk.manager.ledger_manager import LedgerManager
from pybk.streams.log import Log
from pybk.streams.wal import WriteAheadLog
from tests.cluster.inside import Inside, inside
from tests.waiting import wait_until

PASSWORD = b"p"
ONE = (1, 1, 1)


def opened_wal(client: LedgerManager, **options: Any) -> WriteAheadLog:
    return WriteAheadLog.open(client, "log", password=PASSWORD, quorums=ONE, **options)


def opened_log(client: LedgerManager, **options: Any) -> Any:
    return Log.open(client, "log", password=PASSWORD, quorums=ONE).writer(**options)


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Inside]:
    with inside(tmp_path, count=1) as cluster:
        yield cluster


@pytest.mark.parametrize("opened", [opened_wal, opened_log])
def test_a_failure_that_nothing_has_reported_is_raised(cluster: Inside, opened: Callable[..., Any]) -> None:
    client, other = cluster.connect(), cluster.connect()
    with pytest.raises(LogFencedError) as failed, opened(client) as writer:  # noqa: PT012  # the exit raises
        writer.append(b"before")
        opened(other, steal=True).close()
        future = writer.append_async(b"cut off")
        wait_until(future.done)
    assert failed.value.outcome_unknown


@pytest.mark.sampled(one_in=2, among="opened")
@pytest.mark.parametrize("opened", [opened_wal, opened_log])
@pytest.mark.parametrize("how", ["call", "result", "exception", "nothing"])
def test_the_outcome_of_a_block_that_knows_is_not_replaced(
    cluster: Inside, opened: Callable[..., Any], how: str, caplog: pytest.LogCaptureFixture
) -> None:
    client, other = cluster.connect(), cluster.connect()
    with opened(client) as writer:
        writer.append(b"before")
        opened(other, steal=True).close()
        if how == "call":
            with pytest.raises(LogFencedError):
                writer.append(b"cut off")
        elif how == "result":
            with pytest.raises(LogFencedError):
                writer.append_async(b"cut off").result()
        elif how == "exception":
            assert isinstance(writer.append_async(b"cut off").exception(), LogFencedError)
    assert "was closed after another owner had taken it" in caplog.text


@pytest.mark.parametrize("opened", [opened_wal, opened_log])
def test_an_exception_of_the_block_is_not_replaced(cluster: Inside, opened: Callable[..., Any]) -> None:
    client, other = cluster.connect(), cluster.connect()
    with pytest.raises(ZeroDivisionError), opened(client) as writer:  # noqa: PT012  # what the block raises
        writer.append(b"before")
        opened(other, steal=True).close()
        wait_until(writer.append_async(b"cut off").done)
        raise ZeroDivisionError

"""Starting bookies from a driver: one executor in the driver's own process, with and without Spark's context."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("pyspark", reason="no pyspark; install the extra spark-test to test Spark")

from pyspark.sql import SparkSession

from pybk.errors import IllegalOperationError, NotEnoughBookiesError, PybkError, UsageError
from pybk.manager.ledger_manager import LedgerManager
from pybk.spark import configure, start_bookies
from pybk.spark.executors import daemon, task_placement
from pybk.spark.executors.bookie_settings import BookieSettings
from pybk.spark.executors.executor import Executor, is_locked, read_state
from tests.cluster.inside import SECRET, make_cluster
from tests.waiting import wait_until


@pytest.fixture
def settings(tmp_path: Path) -> Iterator[dict[str, Any]]:
    secret = tmp_path / "secret"
    secret.write_bytes(SECRET)
    yield {
        "metadata": make_cluster(tmp_path / "cluster"),
        "directory": str(tmp_path / "bookies"),
        "cluster_secret_file": str(secret),
    }
    for file in (tmp_path / "bookies").glob("*.json"):
        end(file)


def end(file: Path) -> None:
    """End the bookie of a slot."""
    if is_locked(str(file.with_suffix(".lock"))):
        found = read_state(str(file))
        assert found is not None
        os.kill(found["bookie"][0], signal.SIGTERM)
        wait_until(lambda: not is_locked(str(file.with_suffix(".lock"))))


@pytest.fixture(params=["context", pytest.param("connect", marks=pytest.mark.long)])
def either(spark: SparkSession, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> SparkSession:
    """A session, and one in which all goes by what Spark Connect has, too."""
    if request.param == "connect":
        monkeypatch.setattr(task_placement, "spark_context", lambda _: None)
    return spark


def test_there_is_one_bookie_however_often_it_is_asked_for(either: SparkSession, settings: dict[str, Any]) -> None:
    (found,) = start_bookies(either, **settings)
    assert start_bookies(either, **settings) == [found]
    assert found.executor == "driver"
    assert found.directory == f"{settings['directory']}/slot-0"
    with LedgerManager.connect(settings["metadata"], cluster_secret=SECRET) as client:
        with client.create_ledger(ensemble_size=1, insecure=True) as writer:
            writer.append(b"x")
        assert client.ledger_metadata(writer.ledger_id).fragments[0].ensemble == (found.bookie,)


def test_why_there_is_none_is_said(either: SparkSession, settings: dict[str, Any]) -> None:
    Path(settings["cluster_secret_file"]).write_bytes(b"Tr0ub4dor, of some other cluster!")
    with pytest.raises(PybkError, match="MetadataForgedError") as caught:
        start_bookies(either, **settings)
    assert "Tr0ub4dor" not in str(caught.value)


def test_too_few_executors_are_an_error(either: SparkSession, settings: dict[str, Any]) -> None:
    with pytest.raises(NotEnoughBookiesError, match=r"1 executors have a bookie after 0\.1 seconds, not 2"):
        start_bookies(either, executors=2, timeout_s=0.1, **settings)


def test_missing_and_wrong_settings_are_reported(either: SparkSession, settings: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match="configure"):
        start_bookies(either)
    with pytest.raises(UsageError, match="absolute"):
        start_bookies(either, **{**settings, "directory": "bookies"})


def test_bookies_are_started_by_what_the_configuration_names(
    either: SparkSession, settings: dict[str, Any], tmp_path: Path
) -> None:
    (tmp_path / "ssd").mkdir()
    configured = {
        "spark.pybk.bookie.cluster.metadata": settings["metadata"],
        "spark.pybk.bookie.cluster.secret_file": settings["cluster_secret_file"],
        "spark.pybk.bookie.directory": settings["directory"],
        "spark.pybk.bookie.tier.ssd": str(tmp_path / "ssd"),
    }
    try:
        for name, value in configured.items():
            either.conf.set(name, value)
        [found] = start_bookies(either)
        assert start_bookies(either, **settings) == [found]
        assert os.listdir(tmp_path / "ssd") == ["slot-0"]
        either.conf.set("spark.pybk.bookie.tier.sdd", "/mnt")
        with pytest.raises(UsageError, match=r"no option spark\.pybk\.bookie\.tier\.sdd: did you mean"):
            start_bookies(either)
    finally:
        for name in (*configured, "spark.pybk.bookie.tier.sdd"):
            either.conf.unset(name)


def test_connect_holds_no_executors(
    spark: SparkSession, settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(task_placement, "spark_context", lambda _: None)
    with pytest.raises(IllegalOperationError, match="Spark Connect"):
        start_bookies(spark, hold_slot=True, **settings)


def test_a_session_is_configured_without_its_secret(settings: dict[str, Any]) -> None:
    builder = configure(SparkSession.Builder(), rack="/room", **settings)
    options = builder._options
    assert options["spark.python.daemon.module"] == "pybk.spark.executors.daemon"
    assert options["spark.sql.python.filterPushdown.enabled"] == "true"
    assert options["spark.executorEnv.PYBK_CLUSTER_SECRET_FILE"] == settings["cluster_secret_file"]
    assert BookieSettings.of(options["spark.executorEnv.PYBK_BOOKIES"]).rack == "/room"
    assert options["spark.pybk.bookie.rack"] == "/room"
    assert SECRET.decode() not in str(options)


class TestDaemon:
    """What Spark starts instead of its own daemon of workers."""

    @pytest.fixture(autouse=True)
    def started(self, monkeypatch: pytest.MonkeyPatch) -> list[BookieSettings]:
        found: list[BookieSettings] = []
        over = Executor(1, 2)
        monkeypatch.setattr(Executor, "of_daemon", lambda: over)

        def ensure(settings: BookieSettings, executor: Executor) -> None:
            assert executor is over
            found.append(settings)
            if settings.rack == "bad":
                raise PybkError("there is no space")

        monkeypatch.setattr(daemon, "ensure_bookie", ensure)
        monkeypatch.setattr(sys, "argv", ["daemon.py", "pyspark.worker"])
        return found

    def ask(self, monkeypatch: pytest.MonkeyPatch, rack: str = "") -> None:
        settings = BookieSettings(metadata="lmdb:///m", directory="/d", rack=rack)
        monkeypatch.setenv("PYBK_BOOKIES", str(settings))
        daemon.start_bookie()

    def test_workers_have_a_bookie(self, monkeypatch: pytest.MonkeyPatch, started: list[BookieSettings]) -> None:
        self.ask(monkeypatch)
        assert [found.directory for found in started] == ["/d"]

    def test_planners_have_none(self, monkeypatch: pytest.MonkeyPatch, started: list[BookieSettings]) -> None:
        monkeypatch.setattr(sys, "argv", ["daemon.py", "pyspark.sql.worker.plan_data_source_read"])
        self.ask(monkeypatch)
        assert started == []

    def test_executors_without_settings_have_no_bookie(
        self, monkeypatch: pytest.MonkeyPatch, started: list[BookieSettings]
    ) -> None:
        monkeypatch.delenv("PYBK_BOOKIES", raising=False)
        daemon.start_bookie()
        assert started == []

    def test_workers_need_no_bookie(self, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
        self.ask(monkeypatch, rack="bad")
        assert "there is no space" in caplog.text

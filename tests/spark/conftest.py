"""One Spark for all tests in here, made at the first one that asks for it."""

from __future__ import annotations

import os
import shutil
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from pybk.spark.connection import close_connections
from tests.paths import ROOT
from tests.spark.clusters import home_in
from tests.zookeeper_server import zookeeper_server

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

__all__ = ["zookeeper_server"]

CORES = 2


@pytest.fixture
def process_of_a_driver() -> Iterator[None]:
    """Let this process be that in which Spark's driver runs a source; afterwards it is as it was before."""
    handler = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, handler)
    close_connections()


@pytest.fixture(scope="session")
def spark(directory_of_the_run: Path) -> Iterator[SparkSession]:
    if shutil.which("java") is None:
        pytest.skip("no java; install Java 17 or newer to test Spark")
    sql = pytest.importorskip("pyspark.sql", reason="no pyspark; install the extra spark-test to test Spark")
    path = os.pathsep.join([str(ROOT / "src"), str(ROOT)])
    os.environ["PYTHONPATH"] = path
    os.environ["PYSPARK_PYTHON"] = sys.executable
    directory = directory_of_the_run / "spark"
    directory.mkdir()
    os.environ["SPARK_HOME"] = str(home_in(directory))
    session = (
        sql.SparkSession.builder.master(f"local[{CORES}]")
        .config("spark.ui.enabled", "false")
        .config("spark.driver.host", "127.0.0.1")
        .config("spark.driver.bindAddress", "127.0.0.1")
        .config("spark.sql.shuffle.partitions", "2")
        .config("spark.sql.warehouse.dir", str(directory / "warehouse"))
        .config("spark.local.dir", str(directory / "local"))
        .config("spark.executorEnv.PYTHONPATH", path)
        .getOrCreate()
    )
    session.sparkContext.setLogLevel("ERROR")
    yield session
    session.stop()

"""Streams that are killed in a real Spark and started again: ``python -m tests.spark.kills --rounds N``.

Each round a driver of its own copies files into ledgers and is stopped at a step by SIGKILL: of the worker of a task or
of a commit, of an executor, or of the driver. It is started again, is perhaps stopped again, and at last is left alone.
Then every row must be there once, and no ledger but those that count once orphans were collected.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pybk.credentials import Secret
from pybk.flags import LedgerType
from pybk.spark.connection import Connection, StoreOrCluster, connection
from pybk.spark.sink.manifest import SINK_KEY, Sink, sink_ledgers
from tests.cluster.inside import SECRET
from tests.cluster.processes import running
from tests.paths import ROOT
from tests.spark import clusters
from tests.spark.secret_files import cluster_options, secret_file
from tests.storage.real_store import contents

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

FILES, ROWS = 3, 200
START_S = 300.0
PASSWORD = "a password that nobody is told"
LOCAL, CLUSTER = "local[2]", "local-cluster[2,1,1024]"


def new_session(master: str, directory: Path) -> SparkSession:
    """Return a small Spark whose workers find these tests."""
    from pyspark.sql import SparkSession

    path = os.pathsep.join([str(ROOT / "src"), str(ROOT)])
    os.environ.update(PYTHONPATH=path, PYSPARK_PYTHON=sys.executable, SPARK_LOCAL_HOSTNAME="localhost")
    session = (
        SparkSession.builder.master(master)
        .config("spark.ui.enabled", "false")
        .config("spark.ui.showConsoleProgress", "false")
        .config("spark.driver.bindAddress", "127.0.0.1")
        .config("spark.executor.memory", "512m")
        .config("spark.sql.shuffle.partitions", "2")
        .config("spark.sql.warehouse.dir", str(directory / "warehouse"))
        .config("spark.local.dir", str(directory / "local"))
        .config("spark.executorEnv.PYTHONPATH", path)
        .config("spark.eventLog.enabled", "true")
        .config("spark.eventLog.compress", "false")
        .config("spark.eventLog.dir", str(directory / "events"))
        .getOrCreate()
    )
    session.sparkContext.setLogLevel("INFO")
    return session


def options_of(url: str, **more: Any) -> dict[str, Any]:
    """Return the options that say where to write, and others."""
    return {**cluster_options(url), "ensembleSize": "1", "insecure": "true", **more}


def numbers(spark: SparkSession, count: int, partitions: int = 2) -> DataFrame:
    """Return rows that each contain another number."""
    return spark.range(0, count, 1, partitions).selectExpr("CAST(id AS STRING) AS value")


def copy(spark: SparkSession, url: str, directory: Path, ledger_type: str, kill: str = "") -> None:
    """Copy what is in a directory's files into ledgers, a file per micro-batch of two tasks, and wait for the end.

    Raises:
        StreamingQueryException: The query failed.
    """
    from tests.spark.killing import KillingSource

    spark.dataSource.register(KillingSource)
    stream = spark.readStream.schema("value STRING").option("maxFilesPerTrigger", 1).text(str(directory / "in"))
    query = (
        stream.repartition(2)
        .writeStream.format("pybk-killing" if kill else "pybk")
        .options(**options_of(url, ledgerType=ledger_type, **({"kill": kill} if kill else {})))
        .option("checkpointLocation", str(directory / "checkpoint"))
        .trigger(availableNow=True)
        .start()
    )
    query.awaitTermination()


def make_input(directory: Path) -> list[bytes]:
    """Write files of numbers, and return the payloads that they make."""
    (directory / "in").mkdir(parents=True)
    (directory / "events").mkdir()
    for number in range(FILES):
        first = number * ROWS
        text = "\n".join(str(each) for each in range(first, first + ROWS))
        (directory / "in" / f"{number}.txt").write_text(text)
    return sorted(b"%d" % each for each in range(FILES * ROWS))


def begin_driver(master: str, url: str, directory: Path, *copies: tuple[Path, str, str]) -> subprocess.Popen[bytes]:
    """Start a driver in a process of its own that makes copies one after the other: from where, of which type, kill."""
    order = json.dumps([master, url, str(directory), [(str(each), name, kill) for each, name, kill in copies]])
    with open(directory / "driver.log", "ab") as log:
        return subprocess.Popen(
            [sys.executable, "-m", "tests.spark.kills", "--driver", order],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            cwd=ROOT,
            env=clusters.environment(directory),
        )


def end_of(driver: subprocess.Popen[bytes]) -> int:
    """Wait for a driver and return its exit status; it does not outlive this."""
    try:
        return driver.wait(START_S)
    finally:
        driver.kill()


def drive(order: str) -> None:
    """Be such a driver; it fails if a copy does, after the others."""
    from pyspark.errors import StreamingQueryException

    master, url, directory, copies = json.loads(order)
    failed = 0
    spark = new_session(master, Path(directory))
    password = secret_file(Path(directory), PASSWORD.encode())
    options = options_of(url, ledgerType=f"{copies[0][1]}-batch", passwordFile=password)
    numbers(spark, 10).write.format("pybk").mode("append").options(**options).save()
    for source, ledger_type, kill in copies:
        try:
            copy(spark, url, Path(source), ledger_type, kill)
        except StreamingQueryException:
            traceback.print_exc()
            failed += 1
    spark.stop()
    if failed:
        raise SystemExit(f"{failed} of {len(copies)} copies failed")


# ---- what was written ------------------------------------------------------------------------------------------------


def place_of(url: str) -> Connection:
    """Return this process's connection."""
    return connection(StoreOrCluster(metadata_uri=url, secret=Secret(SECRET)))


def sinks(place: Connection, ledger_type: str) -> dict[str, Sink]:
    """Return the sinks that wrote ledgers of a type."""
    assert place.metadata is not None
    found = [place.manager.ledger_metadata(each) for each in place.manager.list_ledgers(ledger_type)]
    apps = {each.custom_metadata[SINK_KEY].decode() for each in found}
    return {app: Sink(place.manager, place.metadata, app) for app in apps}


def counting(place: Connection, ledger_type: str) -> list[int]:
    """Return the ledgers of a type that count."""
    named = [each for sink in sinks(place, ledger_type).values() for each in sink.committed()]
    return sorted(set(named) & set(place.manager.list_ledgers(ledger_type)))


def rows(place: Connection, ledger_type: str) -> list[bytes]:
    """Return all that counts, sorted."""
    return sorted(row for each in counting(place, ledger_type) for row in contents(place.manager, each))


def collect(place: Connection, ledger_type: str) -> int:
    """Collect orphans of a type's sinks, check that what counts is left, and return how many orphans there were."""
    assert place.metadata is not None
    orphans = 0
    for app, sink in sinks(place, ledger_type).items():
        orphans += len(sink.collect(sink_ledgers(place.metadata, app), time.time_ns()))
        left = list(sink_ledgers(place.metadata, app))
        data = {each.ledger_id for each in left if each.ledger_type != LedgerType.METADATA}
        manifests = {each.ledger_id for each in left if each.ledger_type == LedgerType.METADATA}
        if data != set(sink.committed()) or manifests != {each for each, _ in sink.record().chain}:
            raise AssertionError(f"sink {app}: ledgers {data}, manifests {manifests}, and it says {sink.record()}")
    return orphans


# ---- the campaign ----------------------------------------------------------------------------------------------------


def play_round(rng: random.Random, url: str, directory: Path, ledger_type: str) -> Counter[str]:
    """Play a round and return what happened."""
    from tests.spark.killing import Kill

    told: Counter[str] = Counter()
    expected = make_input(directory)
    for attempt in range(rng.choice([1, 1, 2])):
        part = rng.choice(["write", "commit"])
        step = rng.randrange(4 if part == "write" else 7)
        master, who = rng.choice([(LOCAL, 0), (LOCAL, -1), (CLUSTER, 0), (CLUSTER, -1)])
        mark = directory / f"mark-{attempt}"
        kill = Kill(part, step, signal.SIGKILL, who, str(mark))
        driver = begin_driver(master, url, directory, (directory, ledger_type, str(kill)))
        end_of(driver)
        if mark.exists():
            victim = "worker" if who == 0 else "driver" if part == "commit" or master == LOCAL else "executor"
            told[f"{victim} killed in {part} before {mark.read_text().split(' ')[0]}"] += 1
        else:
            told["no kill: the step was not reached"] += 1
        check_order(place_of(url), ledger_type, expected, complete=False)
    driver = begin_driver(LOCAL, url, directory, (directory, ledger_type, ""))
    if end_of(driver):
        raise AssertionError(f"the last start failed: {(directory / 'driver.log').read_text()[-3000:]}")
    told["orphans collected"] += collect(place_of(url), ledger_type)
    check_order(place_of(url), ledger_type, expected, complete=True)
    return told


def check_order(place: Connection, ledger_type: str, expected: list[bytes], *, complete: bool) -> None:
    """Check that every row is there at most once, and that none is missing in the end."""
    found = rows(place, ledger_type)
    if len(set(found)) != len(found) or not set(found) <= set(expected) or (complete and found != expected):
        raise AssertionError(f"{len(found)} rows, {len(set(found))} of them different, where {len(expected)} belong")


def say(text: str) -> None:
    """Print a line of progress."""
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the campaign, or a driver of it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--seed", type=int, default=int(time.time()))
    parser.add_argument("--driver", help=argparse.SUPPRESS)
    given = parser.parse_args(arguments)
    if given.driver:
        drive(given.driver)
        return
    say(f"seed {given.seed}")
    total: Counter[str] = Counter()
    with tempfile.TemporaryDirectory() as directory, running(Path(directory) / "cluster", 1) as cluster:
        for number in range(given.rounds):
            rng = random.Random(f"{given.seed}/{number}")
            told = play_round(rng, cluster.url, Path(directory) / str(number), f"round-{number}")
            say(f"round {number}: {dict(told)}")
            total += told
    say(f"{given.rounds} rounds, every row once:")
    for what, count in sorted(total.items()):
        say(f"  {count:4} {what}")


if __name__ == "__main__":
    main()

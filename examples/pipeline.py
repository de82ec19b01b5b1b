"""Log files through logs and Spark, nothing lost and nothing counted twice: ``python pipeline.py [INPUT]``.

The lines of log files become records of the log ``lines``. While they do, another query follows that log, counts the
words that lines of each minute begin with, and writes the counts to the log ``counts``. A subscription of that log, in
this process and without Spark, keeps the last count of each word in each minute. Lines and counts end as Parquet, and
are compared with what plain Python counts. Each executor of Spark has a bookie on its host.

``--master "local-cluster[3,1,1024]"`` has three executors in processes of their own; there, one of them and its bookie
are killed in the middle.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import secrets
import signal
import sys
import sysconfig
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.functions import max_by
from pyspark.sql.streaming.query import StreamingQuery
from tqdm import tqdm

from pybk import LedgerManager, Log, LogEnd, PybkError, Secret
from pybk.spark import configure, local_bookie, start_bookies

FILES = 4
LINES_A_SECOND = 100
"""The lines of the log files have times, so many of each second."""

TIME_CHARACTERS = len("2026-01-01T00:00:00Z")


# ---- the pipeline ----------------------------------------------------------------------------------------------------


class Consumer:
    """Keeps the last count of each word in each minute, by a subscription; each record is acknowledged once it counts.

    Attributes:
        counts: The counts, by minute and word as JSON.
    """

    def __init__(self, pipeline: Pipeline) -> None:
        self.counts: dict[str, int] = {}
        self._log = Log.open(pipeline.manager, "counts", password=pipeline.password, create=False)
        self._subscription = self._log.subscribe("report", start=LogEnd.EARLIEST)
        self._thread = threading.Thread(target=self._consume)
        self._ends = threading.Event()
        self._thread.start()

    def _consume(self) -> None:
        while True:
            ends = self._ends.is_set()  # before the look, so that no record comes after the last look
            records = self._subscription.read_many(1000, timeout=0.5)
            for record in records:
                self.counts[(record.key or b"").decode()] = int(record.data)
            if records:
                self._subscription.ack_through(records[-1].position)
            elif ends:
                return

    def end(self) -> None:
        """Consume what there is, and end."""
        self._ends.set()
        self._thread.join()
        self._log.close()


class Pipeline:
    """Queries from log files to Parquet, in a directory.

    Attributes:
        spark: The session.
        metadata: The URL of the cluster's metadata.
        bookies: How many bookies there are, one on the host of each executor.
        manager: A client of the cluster in this process.
        password: The source of the logs' password.
    """

    def __init__(self, directory: Path, master: str) -> None:
        secret, password = directory / "cluster-secret", directory / "password"
        for file in (secret, password):
            file.touch(0o600)
            file.write_text(secrets.token_hex(32))
        self.metadata = f"lmdb://{directory}/metadata"
        builder = SparkSession.builder.master(master)
        for name, value in {
            "spark.driver.bindAddress": "127.0.0.1",
            "spark.log.level": "OFF",
            "spark.sql.session.timeZone": "UTC",
            "spark.sql.shuffle.partitions": "3",
            "spark.ui.enabled": "false",
            "spark.ui.showConsoleProgress": "false",
        }.items():
            builder = builder.config(name, value)
        self.spark = configure(
            builder, metadata=self.metadata, directory=f"{directory}/bookies", cluster_secret_file=str(secret)
        ).getOrCreate()
        wanted = re.match(r"local-cluster\[(\d+)", master)
        self.bookies = len(start_bookies(self.spark, executors=int(wanted[1]) if wanted else 1))
        copies = min(2, self.bookies)
        self.manager = LedgerManager.connect(self.metadata, cluster_secret=Secret(file=str(secret)))
        self.password = Secret(file=str(password))
        for name in ("lines", "counts"):
            Log.open(self.manager, name, password=self.password, quorums=(copies, copies, copies)).close()
        self._where = {"metadataUri": self.metadata, "clusterSecretFile": str(secret), "passwordFile": str(password)}
        self._checkpoints = directory / "checkpoints"

    def collect(self, logs: Path) -> StreamingQuery:
        """Write the lines of log files to a log, a file at a time."""
        lines = self.spark.readStream.format("text").option("lineSep", "\n").option("maxFilesPerTrigger", 1)
        rows = lines.load(str(logs)).selectExpr(
            f"CAST(left(value, {TIME_CHARACTERS}) AS TIMESTAMP) AS event_time",
            f"substring(value, {TIME_CHARACTERS + 2}) AS value",
        )
        to_log = rows.writeStream.format("pybk").options(**self._where, topic="lines")
        return to_log.option("checkpointLocation", f"{self._checkpoints}/lines").trigger(availableNow=True).start()

    def count(self, records_at_once: int) -> StreamingQuery:
        """Follow this log, and write how often each word was seen in a minute so far, as often as that changes."""

        def write(counts: DataFrame, batch: int) -> None:
            rows = counts.selectExpr(
                "to_json(struct(minute.start AS minute, word)) AS key",
                "CAST(count AS string) AS value",
                "minute.end AS event_time",
            )
            to_log = rows.write.format("pybk").options(**self._where, topic="counts")
            to_log.options(txnAppId="counts", txnVersion=str(batch)).mode("append").save()  # a repeat is skipped

        lines = self.spark.readStream.format("pybk").options(**self._where, subscribe="lines")
        lines = lines.options(startingOffsets="earliest", maxOffsetsPerTrigger=str(records_at_once))
        words = lines.load().selectExpr(
            "window(timestamp, '1 minute') AS minute",
            "substring_index(ltrim(CAST(value AS string)), ' ', 1) AS word",
        )
        counts = words.groupBy("minute", "word").count().writeStream.outputMode("update").foreachBatch(write)
        return counts.option("checkpointLocation", f"{self._checkpoints}/counts").start()

    def to_parquet(self, directory: Path) -> None:
        """Write what the logs hold as Parquet: all lines, and the last count of each word in each minute."""
        logs = self.spark.read.format("pybk").options(**self._where)
        lines = logs.option("subscribe", "lines").load()
        lines.selectExpr("CAST(value AS string) AS line", "timestamp").write.parquet(f"{directory}/lines")
        counts = logs.option("subscribe", "counts").load()
        counts = counts.groupBy("key").agg(max_by("value", "offset").alias("count"))
        counts.selectExpr(
            "from_json(CAST(key AS string), 'minute timestamp, word string') AS counted",
            "CAST(CAST(count AS string) AS bigint) AS count",
        ).selectExpr("counted.minute", "counted.word", "count").write.parquet(f"{directory}/counts")

    def kill_an_executor(self) -> str:
        """Kill an executor and the bookie on its host with SIGKILL; return which."""
        metadata = self.metadata

        def who(_: Iterable[int]) -> Iterator[tuple[int, int, str, str]]:
            bookie = local_bookie(metadata)
            daemon = Path(f"/proc/{os.getppid()}/stat").read_text()
            if bookie is not None:
                yield int(daemon.rpartition(")")[2].split()[1]), bookie.pid, bookie.executor, bookie.bookie_id

        jvm, bookie, executor, name = self.spark.sparkContext.parallelize([0], 1).mapPartitions(who).collect()[0]
        for pid in (jvm, bookie):
            os.kill(pid, signal.SIGKILL)
        return f"executor {executor} and its bookie {name}"


def run(directory: Path, source: Path | None, master: str) -> None:
    """Run the pipeline, and check what it made."""
    print(f"Spark starts, {master}, with a bookie beside each executor", flush=True)
    pipeline = Pipeline(directory, master)
    lines, words = write_logs(directory / "logs", source)
    print(
        f"{pipeline.bookies} bookies; {lines:,} lines in {FILES} log files become records, which are counted meanwhile"
    )
    begin = time.monotonic()
    collecting, counting = pipeline.collect(directory / "logs"), pipeline.count(-(-lines // FILES))
    consumer = Consumer(pipeline)
    to_kill = pipeline.bookies > 1
    with tqdm(total=lines, unit=" lines") as bar:
        while bar.n < lines:
            time.sleep(0.2)
            seen = sum(batch["numInputRows"] for batch in counting.recentProgress)
            if seen > bar.n:
                bar.update(seen - bar.n)
            if to_kill and bar.n > lines // 4:
                to_kill = False
                bar.write(f"killed {pipeline.kill_an_executor()} with SIGKILL", file=sys.stdout)
            for query in (collecting, counting):
                if query.exception() is not None:
                    raise RuntimeError(str(query.exception()))
    collecting.awaitTermination()
    counting.processAllAvailable()
    counting.stop()
    consumer.end()
    pipeline.to_parquet(directory / "parquet")
    print(f"Parquet is written after {time.monotonic() - begin:.1f} s")
    check(pipeline.spark, directory / "parquet", consumer.counts, lines, words)
    pipeline.spark.stop()


# ---- input, and what it should come to -------------------------------------------------------------------------------


def write_logs(directory: Path, source: Path | None) -> tuple[int, Counter[tuple[str, str]]]:
    """Write the lines of a file, or of all files in a folder, to log files, each with a time before it.

    Args:
        directory: Where to make the log files.
        source: The file or folder; None for the source files of Python's standard library.

    Returns:
        The number of lines, and how often each minute has each first word.
    """
    folder = Path(sysconfig.get_path("stdlib")) if source is None else source
    found = [folder] if folder.is_file() else sorted(folder.rglob("*.py" if source is None else "*"))
    texts = [path.read_text("utf-8", "replace") for path in found if path.is_file() and "-packages" not in str(path)]
    lines = [line for text in texts for line in text.splitlines()]
    if not lines:
        raise ValueError(f"{folder} has no lines; name a file or a folder with some")
    begin = datetime(2026, 1, 1, tzinfo=UTC)
    times = [f"{begin + timedelta(seconds=number // LINES_A_SECOND):%FT%TZ}" for number in range(len(lines))]
    directory.mkdir()
    for number in range(FILES):
        part = range(len(lines) * number // FILES, len(lines) * (number + 1) // FILES)
        text = "".join(f"{times[each]} {lines[each]}\n" for each in part)
        (directory / f"{number}.log").write_text(text, "utf-8", newline="\n")
    minutes = (time[:16] for time in times)
    return len(lines), Counter(zip(minutes, (line.lstrip(" ").split(" ", 1)[0] for line in lines), strict=True))


def check(
    spark: SparkSession, parquet: Path, consumed: dict[str, int], lines: int, words: Counter[tuple[str, str]]
) -> None:
    """Compare what Parquet and the subscription have with what plain Python counted; print the most frequent words."""
    found = spark.read.parquet(f"{parquet}/lines").count()
    rows = spark.read.parquet(f"{parquet}/counts").selectExpr(
        "date_format(minute, \"yyyy-MM-dd'T'HH:mm\") AS minute", "word", "count"
    )
    counts = {(row["minute"], row["word"]): row["count"] for row in rows.collect()}
    by_subscription = {(key["minute"][:16], key["word"]): count for key, count in of_keys(consumed)}
    if found != lines or counts != words or by_subscription != words:
        raise AssertionError(f"{found:,} lines of {lines:,}; {len(counts):,} counts of {len(words):,} in {parquet}")
    every: Counter[str] = Counter()
    for (_, word), count in words.items():
        every[word] += count
    for word, count in every.most_common(5):
        print(f"{count:10,}  {word or '(empty)'}")
    print(f"All {lines:,} lines are there, and each of {len(every):,} words was counted exactly.")


def of_keys(consumed: dict[str, int]) -> Iterator[tuple[dict[str, str], int]]:
    """Yield counts, with their keys as values."""
    for key, count in consumed.items():
        yield json.loads(key), count


def main() -> int:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "input", type=Path, nargs="?", help="a file or folder of lines; Python's own sources by default"
    )
    parser.add_argument("--master", default="local[2]", help="of Spark; local[2] by default")
    parser.add_argument("--directory", type=Path, help="empty, for all that is made, which stays; else it is removed")
    arguments = parser.parse_args()
    os.environ.setdefault("SPARK_LOCAL_HOSTNAME", "localhost")
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    try:
        if arguments.directory is not None:
            arguments.directory.mkdir(parents=True, exist_ok=True)
            run(arguments.directory.resolve(), arguments.input, arguments.master)
        else:
            with tempfile.TemporaryDirectory(prefix="pipeline-") as directory:
                run(Path(directory), arguments.input, arguments.master)
    except (PybkError, OSError, ValueError) as error:
        print(f"pipeline: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())

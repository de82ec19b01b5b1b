"""Log files through Spark, nothing lost and nothing counted twice: ``python pipeline.py [INPUT]``.

The lines of log files become a log, ``lines``. While they do, another query follows this log, counts for each hour the
words that lines begin with, and writes the counts to the log ``counts`` as soon as an hour has ended; a third one
archives the lines as Parquet. A plain subscription of the library, as any other program has it, consumes the counts.
All of it is compared with what plain Python counts. Each executor of Spark has a bookie on its host.

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
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.functions import window
from pyspark.sql.streaming.query import StreamingQuery
from tqdm import tqdm

from pybk import LedgerManager, Log, PybkError, Secret
from pybk.spark import configure, local_bookie, start_bookies

FILES = 8
DAY = datetime(2026, 1, 1, tzinfo=UTC)
"""The lines are spread over this day: three hours to a file."""

Counts = Counter[tuple[int, str]]
"""How often lines of an hour begin with a word, by the hour of the day and the word."""


# ---- the pipeline ----------------------------------------------------------------------------------------------------


class Pipeline:
    """Queries from log files to logs and Parquet, in a directory.

    Attributes:
        spark: The session.
        metadata: The URL of the cluster's metadata.
        cluster_secret: The file that has the secret of the cluster.
        secret: The file that has the secret of the logs.
        bookies: How many bookies there are, one on the host of each executor.
    """

    def __init__(self, directory: Path, master: str) -> None:
        self.cluster_secret, self.secret = directory / "cluster-secret", directory / "secret"
        for file in (self.cluster_secret, self.secret):
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
            builder,
            metadata=self.metadata,
            directory=f"{directory}/bookies",
            cluster_secret_file=str(self.cluster_secret),
        ).getOrCreate()
        wanted = re.match(r"local-cluster\[(\d+)", master)
        self.bookies = len(start_bookies(self.spark, executors=int(wanted[1]) if wanted else 1))
        self._logs = {
            "metadataUri": self.metadata,
            "clusterSecretFile": str(self.cluster_secret),
            "secretFile": str(self.secret),
        }
        self._directory = directory

    def make_logs(self, manager: LedgerManager) -> None:
        """Make the logs; two bookies have each entry, if there are two."""
        copies = min(2, self.bookies)
        for name in ("lines", "counts"):
            Log.open(manager, name, secret=Secret(file=str(self.secret)), quorums=(copies, copies, copies)).close()

    def _to_log(self, rows: DataFrame, topic: str) -> StreamingQuery:
        to_log = rows.writeStream.format("pybk").options(**self._logs, topic=topic)
        return to_log.option("checkpointLocation", f"{self._directory}/checkpoints/{topic}").start()

    def collect(self) -> StreamingQuery:
        """Write the lines of log files to the log ``lines``, a file at a time."""
        files = self.spark.readStream.format("text").option("lineSep", "\n").option("maxFilesPerTrigger", 1)
        lines = files.load(f"{self._directory}/logs")
        return self._to_log(
            lines.selectExpr(
                "to_timestamp(substring(value, 1, 23)) AS event_time", "CAST(substring(value, 25) AS BINARY) AS value"
            ),
            "lines",
        )

    def _lines(self, rows_at_once: int) -> DataFrame:
        lines = self.spark.readStream.format("pybk").options(**self._logs, subscribe="lines")
        rows = lines.options(startingOffsets="earliest", maxOffsetsPerTrigger=rows_at_once).load()
        return rows.selectExpr("timestamp", "CAST(value AS STRING) AS line")

    def count(self, rows_at_once: int) -> StreamingQuery:
        """Follow this log, and write how often each word begins a line of each hour to the log ``counts``."""
        words = self._lines(rows_at_once).selectExpr("timestamp", "substring_index(ltrim(line), ' ', 1) AS word")
        hours = words.withWatermark("timestamp", "3 hours").groupBy(window("timestamp", "1 hour"), "word").count()
        counts = hours.selectExpr("word AS key", "to_json(struct(hour(window.start) AS hour, word, count)) AS value")
        return self._to_log(counts, "counts")

    def archive(self, rows_at_once: int) -> StreamingQuery:
        """Follow the log ``lines``, and write it as Parquet."""
        to_parquet = self._lines(rows_at_once).writeStream.format("parquet").option("path", self.parquet)
        return to_parquet.option("checkpointLocation", f"{self._directory}/checkpoints/parquet").start()

    @property
    def parquet(self) -> str:
        """The directory of the archive."""
        return f"{self._directory}/parquet"

    def archived(self) -> int:
        """Return how many lines the archive has."""
        return self.spark.read.parquet(self.parquet).count()

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


class Consumer(threading.Thread):
    """A program without Spark that consumes the counts by a subscription.

    Attributes:
        counts: The sum of the counts that it has got.
        records: How many records these were.
    """

    def __init__(self, manager: LedgerManager, secret: Path) -> None:
        super().__init__(daemon=True)
        self.counts: Counts = Counter()
        self.records = 0
        self._manager = manager
        self._secret = Secret(file=str(secret))
        self._ending = threading.Event()
        self.start()

    def run(self) -> None:
        """Consume until told to end."""
        with (
            Log.open(self._manager, "counts", secret=self._secret) as log,
            log.subscribe("report", start=0) as report,
        ):
            while not self._ending.is_set():
                records = report.read_many(1000, timeout=0.5)
                for record in records:
                    found = json.loads(record.data)
                    self.counts[found["hour"], found["word"]] += found["count"]
                report.ack(records)
                self.records += len(records)

    def has(self, records: int) -> bool:
        """Return whether it has got so many records."""
        if not self.is_alive():
            raise RuntimeError("the consumer has ended")
        return self.records >= records

    def end(self) -> None:
        """Let it end."""
        self._ending.set()
        self.join()


def run(directory: Path, source: Path | None, master: str) -> None:
    """Run the pipeline, and check what it made."""
    print(f"Spark starts, {master}, with a bookie beside each executor", flush=True)
    pipeline = Pipeline(directory, master)
    lines, counts = write_logs(directory / "logs", source)
    with LedgerManager.connect(pipeline.metadata, cluster_secret=Secret(file=str(pipeline.cluster_secret))) as manager:
        pipeline.make_logs(manager)
        consumer = Consumer(manager, pipeline.secret)
        print(
            f"{pipeline.bookies} bookies; {lines:,} lines in {FILES} log files become a log, which is counted and "
            "archived meanwhile"
        )
        begin = time.monotonic()
        at_once = -(-lines // FILES)
        queries = [pipeline.collect(), pipeline.count(at_once), pipeline.archive(at_once)]
        watch(pipeline, queries, lines)
        write_end(directory / "logs")
        wait_for(lambda: consumer.has(len(counts)), queries)
        wait_for(lambda: pipeline.archived() > lines, queries)
        for query in queries:
            query.stop()
        consumer.end()
        print(f"Logs and Parquet are complete after {time.monotonic() - begin:.1f} s")
        check(pipeline, consumer, lines, counts)
    pipeline.spark.stop()


def watch(pipeline: Pipeline, queries: Sequence[StreamingQuery], lines: int) -> None:
    """Show how many lines are counted until all are, and kill an executor in the middle if there are several."""
    counting = queries[1]
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
            check_queries(queries)


def wait_for(condition: Callable[[], bool], queries: Sequence[StreamingQuery]) -> None:
    """Wait until a condition holds, while queries run."""
    while not condition():
        time.sleep(0.2)
        check_queries(queries)


def check_queries(queries: Sequence[StreamingQuery]) -> None:
    """Raise the error of a query that has failed."""
    for query in queries:
        if query.exception() is not None:
            raise RuntimeError(str(query.exception()))


# ---- input, and what it should come to -------------------------------------------------------------------------------


def write_logs(directory: Path, source: Path | None) -> tuple[int, Counts]:
    """Write the lines of a file, or of all files in a folder, to log files, each line with a time of the day.

    The default are the source files of Python's standard library.

    Returns:
        The number of lines, and how often lines of each hour begin with each word.
    """
    folder = Path(sysconfig.get_path("stdlib")) if source is None else source
    found = [folder] if folder.is_file() else sorted(folder.rglob("*.py" if source is None else "*"))
    texts = [path.read_text("utf-8", "replace") for path in found if path.is_file() and "-packages" not in str(path)]
    lines = [line for text in texts for line in text.splitlines()]
    if not lines:
        raise ValueError(f"{folder} has no lines; name a file or a folder with some")
    directory.mkdir()
    counts: Counts = Counter()
    for number in range(FILES):
        parts = []
        for at in range(len(lines) * number // FILES, len(lines) * (number + 1) // FILES):
            time_ms = 86_400_000 * at // len(lines)
            parts.append(stamped(time_ms, lines[at]))
            counts[time_ms // 3_600_000, lines[at].lstrip(" ").split(" ", 1)[0]] += 1
        write_file(directory / f"{number}.log", "".join(parts), 86_400 * (number + 1) // FILES)
    return len(lines), counts


def write_file(path: Path, text: str, second: int) -> None:
    """Write a log file that was changed last at a second of the day; Spark takes files in the order of these times."""
    new = path.with_name(f".{path.name}")
    new.write_text(text, "utf-8", newline="\n")
    time_s = DAY.timestamp() + second
    os.utime(new, (time_s, time_s))
    new.rename(path)


def stamped(time_ms: int, line: str) -> str:
    """Return a line of a log file."""
    return f"{(DAY + timedelta(milliseconds=time_ms)).isoformat(' ', 'milliseconds')[:23]} {line}\n"


def write_end(directory: Path) -> None:
    """Write a line of two days later, with which the last hours of the day end."""
    write_file(directory / "end.log", stamped(3 * 86_400_000, "end"), 3 * 86_400)


def check(pipeline: Pipeline, consumer: Consumer, lines: int, counts: Counts) -> None:
    """Compare what there is with what plain Python counted, and print the most frequent words."""
    archived = pipeline.archived() - 1  # the line that ends the day
    if archived != lines:
        raise AssertionError(f"{archived:,} lines of {lines:,} in {pipeline.parquet}")
    if consumer.counts != counts or consumer.records != len(counts):
        raise AssertionError(
            f"the subscription got {consumer.records:,} counts, {len(consumer.counts):,} of them different, of "
            f"{len(counts):,}"
        )
    for word, count in sum_by_word(counts).most_common(5):
        print(f"{count:10,}  {word or '(empty)'}")
    print(f"All {lines:,} lines are there, and each of {len(counts):,} words of an hour was counted exactly.")


def sum_by_word(counts: Mapping[tuple[int, str], int]) -> Counter[str]:
    """Return how often lines begin with each word."""
    found: Counter[str] = Counter()
    for (_, word), count in counts.items():
        found[word] += count
    return found


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

"""Log files through ledgers and Spark, nothing lost and nothing counted twice: ``python pipeline.py [INPUT]``.

The lines of log files become ledgers. While they do, another query follows these ledgers, counts the words that lines
begin with, and writes the counts to ledgers of their own. Lines and counts end as Parquet, and are compared with what
plain Python counts. Each executor of Spark has a bookie on its host.

``--master "local-cluster[3,1,1024]"`` has three executors in processes of their own; there, one of them and its bookie
are killed in the middle.
"""

from __future__ import annotations

import argparse
import os
import re
import secrets
import signal
import sys
import sysconfig
import tempfile
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.streaming.query import StreamingQuery
from tqdm import tqdm

from pybk import PybkError
from pybk.spark import configure, local_bookie, start_bookies

FILES = 4


# ---- the pipeline ----------------------------------------------------------------------------------------------------


class Pipeline:
    """Queries from log files to Parquet, in a directory.

    Attributes:
        spark: The session.
        metadata: The URL of the cluster's metadata.
        bookies: How many bookies there are, one on the host of each executor.
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
        copies = str(min(2, self.bookies))
        self._read = {"metadataUri": self.metadata, "clusterSecretFile": str(secret), "passwordFile": str(password)}
        self._written = {**self._read, "ensembleSize": copies, "writeQuorum": copies, "ackQuorum": copies}
        self._checkpoints = directory / "checkpoints"

    def collect(self, logs: Path) -> StreamingQuery:
        """Write the lines of log files to ledgers, a file at a time."""
        lines = self.spark.readStream.format("text").option("lineSep", "\n").option("maxFilesPerTrigger", 1)
        to_ledgers = lines.load(str(logs)).writeStream.format("pybk").options(**self._written, ledgerType="log")
        return to_ledgers.option("checkpointLocation", f"{self._checkpoints}/log").trigger(availableNow=True).start()

    def count(self, entries_at_once: int) -> StreamingQuery:
        """Follow these ledgers, and write how often each word was seen so far, as often as that changes."""

        def write(counts: DataFrame, batch: int) -> None:
            rows = counts.selectExpr("to_json(struct(word, count)) AS payload")
            to_ledgers = rows.write.format("pybk").options(**self._written, ledgerType="counts")
            to_ledgers.options(txnAppId="counts", txnVersion=str(batch)).mode("append").save()  # a repeat is skipped

        lines = self.spark.readStream.format("pybk").options(**self._read, ledgerType="log", allowMissing="true")
        words = (
            lines.option("maxEntriesPerTrigger", str(entries_at_once))
            .load()
            .selectExpr("substring_index(ltrim(CAST(payload AS string)), ' ', 1) AS word")
        )
        counts = words.groupBy("word").count().writeStream.outputMode("update").foreachBatch(write)
        return counts.option("checkpointLocation", f"{self._checkpoints}/counts").start()

    def to_parquet(self, directory: Path) -> None:
        """Write what the ledgers hold as Parquet: all lines, and the last count of each word."""
        ledgers = self.spark.read.format("pybk").options(**self._read)
        lines = ledgers.option("ledgerType", "log").load().selectExpr("CAST(payload AS string) AS line")
        lines.write.parquet(f"{directory}/lines")
        counts = ledgers.option("ledgerType", "counts").load()
        counts = counts.selectExpr("from_json(CAST(payload AS string), 'word string, count long') AS seen")
        counts.groupBy("seen.word").agg({"seen.count": "max"}).toDF("word", "count").write.parquet(
            f"{directory}/counts"
        )

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
        f"{pipeline.bookies} bookies; {lines:,} lines in {FILES} log files become ledgers, which are counted meanwhile"
    )
    begin = time.monotonic()
    collecting, counting = pipeline.collect(directory / "logs"), pipeline.count(-(-lines // FILES))
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
    pipeline.to_parquet(directory / "parquet")
    print(f"Parquet is written after {time.monotonic() - begin:.1f} s")
    check(pipeline.spark, directory / "parquet", lines, words)
    pipeline.spark.stop()


# ---- input, and what it should come to -------------------------------------------------------------------------------


def write_logs(directory: Path, source: Path | None) -> tuple[int, Counter[str]]:
    """Write the lines of a file, or of all files in a folder, to log files; return how many, and their first words.

    The default are the source files of Python's standard library.
    """
    folder = Path(sysconfig.get_path("stdlib")) if source is None else source
    found = [folder] if folder.is_file() else sorted(folder.rglob("*.py" if source is None else "*"))
    texts = [path.read_text("utf-8", "replace") for path in found if path.is_file() and "-packages" not in str(path)]
    lines = [line for text in texts for line in text.splitlines()]
    if not lines:
        raise ValueError(f"{folder} has no lines; name a file or a folder with some")
    directory.mkdir()
    for number in range(FILES):
        part = lines[len(lines) * number // FILES : len(lines) * (number + 1) // FILES]
        (directory / f"{number}.log").write_text("".join(f"{line}\n" for line in part), "utf-8", newline="\n")
    return len(lines), Counter(line.lstrip(" ").split(" ", 1)[0] for line in lines)


def check(spark: SparkSession, parquet: Path, lines: int, words: Counter[str]) -> None:
    """Compare what Parquet has with what plain Python counted, and print the most frequent words."""
    found = spark.read.parquet(f"{parquet}/lines").count()
    counts = {row["word"]: row["count"] for row in spark.read.parquet(f"{parquet}/counts").collect()}
    if found != lines or counts != words:
        raise AssertionError(f"{found:,} lines of {lines:,}; {len(counts):,} words of {len(words):,} in {parquet}")
    for word, count in words.most_common(5):
        print(f"{count:10,}  {word or '(empty)'}")
    print(f"All {lines:,} lines are there, and each of {len(words):,} words was counted exactly.")


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

"""A pipeline of logs that is killed while it is busy: ``python -m tests.spark.pipeline_kills --rounds 30 --seed N``.

Files of lines become a log. Two queries follow it: one counts lines by window and class, which it looks up in Parquet,
and writes the counts to another log; one joins the lines with their classes and writes Parquet. A subscription of the
library consumes the log of windows meanwhile. Spark has two workers with an address each, one of whose tasks dawdle, so
that others are made in their place; there are three bookies.

In each round all queries have made progress before the driver, an executor or a bookie is killed with SIGKILL. In the
end each line and each window must be there exactly once, in the logs, for the subscription, and in Parquet.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pybk.errors import PybkError
from pybk.manager.ledger_manager import LedgerManager
from pybk.streams.log import Log
from tests.cluster.processes import BookieProcess, Cluster, running
from tests.paths import ROOT
from tests.spark.clusters import CONF, environment, standalone
from tests.spark.secret_files import cluster_options, secret_file
from tests.waiting import PROCESS_S, wait_until

if TYPE_CHECKING:
    from collections.abc import Mapping

    import pyarrow as pa
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.streaming.query import StreamingQuery

HOSTS = ("127.0.0.1", "127.0.0.2")
PASSWORD = b"the password of the logs"
WORDS, CLASSES = 12, 4
LINES_PER_FILE = 40
LINE_MS = 25
WINDOW_MS = 2_000
BEGIN_MS = 1_800_000_000_000
LATER_MS = 3_600_000
QUERIES = ("lines", "windows", "archive")
DAWDLE_S = 4.0
DRAIN_S = 1200.0
"""Seconds in which a driver reads what is left, some minutes of work; more than it takes on a busy machine."""

DRAINS_MAX = 5
"""The most drivers that try it."""

VICTIMS = ("driver", "executor", "bookie")

SPECULATION = {
    "spark.speculation": "true",
    "spark.speculation.interval": "100ms",
    "spark.speculation.multiplier": "1.2",
    "spark.speculation.quantile": "0.5",
    "spark.speculation.minTaskRuntime": "500ms",
}


# ---- the driver ------------------------------------------------------------------------------------------------------


def new_session(master: str, directory: Path) -> SparkSession:
    """Return a session on the workers, which repeats slow tasks elsewhere and keeps a log of events."""
    from pyspark.sql import SparkSession

    builder = SparkSession.builder.master(master)
    for name, value in {
        **CONF,
        **SPECULATION,
        "spark.ui.enabled": "false",
        "spark.executor.cores": "2",
        "spark.sql.shuffle.partitions": "2",
        "spark.eventLog.enabled": "true",
        "spark.eventLog.compress": "false",
        "spark.eventLog.dir": str(directory / "events"),
        "spark.task.maxFailures": "8",
    }.items():
        builder = builder.config(name, value)
    return builder.getOrCreate()


def dawdle(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Pass rows on; the first attempt of a task in four takes its time, so that Spark makes another."""
    from pyspark import TaskContext

    context = TaskContext.get()
    assert context is not None
    if context.attemptNumber() == 0 and context.partitionId() == 0 and random.random() < 0.25:
        time.sleep(DAWDLE_S)
    yield from batches


class Pipeline:
    """The queries, in a driver's process."""

    def __init__(self, spark: SparkSession, url: str, directory: Path) -> None:
        self._spark = spark
        self._directory = directory
        self._where = {**cluster_options(url), "passwordFile": secret_file(directory, PASSWORD)}

    def start(self) -> dict[str, StreamingQuery]:
        """Start all queries."""
        return {name: getattr(self, name)() for name in QUERIES}

    def _to_log(self, frame: DataFrame, topic: str) -> StreamingQuery:
        writer = frame.writeStream.format("pybk").queryName(topic).options(**self._where, topic=topic)
        return writer.option("checkpointLocation", str(self._directory / "state" / topic)).start()

    def lines(self) -> StreamingQuery:
        """Write the lines of files to a log."""
        text = self._spark.readStream.option("maxFilesPerTrigger", 20).text(str(self._directory / "in"))
        parts = text.selectExpr("split(value, ',') AS part").selectExpr(
            "part[0] AS id", "timestamp_millis(CAST(part[1] AS BIGINT)) AS event_time", "part[2] AS word"
        )
        slow = parts.repartition(2, "word").mapInArrow(dawdle, parts.schema)
        rows = slow.selectExpr("CAST(word AS BINARY) AS key", "CAST(id AS BINARY) AS value", "event_time")
        return self._to_log(rows, "lines")

    def _followed(self) -> DataFrame:
        read = self._spark.readStream.format("pybk").options(**self._where, subscribe="lines")
        rows = read.option("startingOffsets", "earliest").option("maxOffsetsPerTrigger", 1000).load()
        rows = rows.selectExpr("CAST(key AS STRING) AS word", "CAST(value AS STRING) AS id", "timestamp AS event_time")
        return rows.join(self._spark.read.parquet(str(self._directory / "classes")), "word")

    def windows(self) -> StreamingQuery:
        """Count the lines of a log by window and class, and write the counts to another log."""
        from pyspark.sql.functions import window

        rows = self._followed().withWatermark("event_time", "30 seconds")
        counts = rows.groupBy(window("event_time", f"{WINDOW_MS} milliseconds"), "class").count()
        texts = counts.selectExpr(
            "class AS key", "to_json(struct(unix_millis(window.start) AS start, class, count)) AS value"
        )
        return self._to_log(texts, "windows")

    def archive(self) -> StreamingQuery:
        """Write the lines of a log with their classes to Parquet."""
        rows = self._followed().select("id", "word", "class")
        writer = rows.writeStream.format("parquet").queryName("archive").option("path", str(self._directory / "out"))
        return writer.option("checkpointLocation", str(self._directory / "state" / "archive")).start()


def drive(master: str, url: str, directory: Path) -> None:
    """Be a driver: run the queries, report their progress, and end once all is done that there will be."""
    spark = new_session(master, directory)
    queries = Pipeline(spark, url, directory).start()
    run = str(os.getpid())
    while not (directory / "complete").exists():
        report(directory, run, queries)
        time.sleep(0.2)
    for query in queries.values():
        query.processAllAvailable()
    for query in queries.values():
        query.stop()
    rows = spark.read.parquet(str(directory / "out")).collect()
    (directory / "archive.json").write_text(json.dumps([[row["id"], row["word"], row["class"]] for row in rows]))
    spark.stop()


def report(directory: Path, run: str, queries: Mapping[str, StreamingQuery]) -> None:
    """Write the progress of the queries to a file; raises what ended one of them."""
    progress: dict[str, int] = {}
    for name, query in queries.items():
        error = query.exception()
        if error is not None:
            raise error
        last = query.lastProgress
        progress[name] = -1 if last is None else int(last["batchId"])
    new = directory / "progress.new"
    new.write_text(json.dumps({"run": run, "batches": progress}))
    new.rename(directory / "progress")


# ---- the input, and the consumer -------------------------------------------------------------------------------------


def class_of(word: int) -> str:
    """Return the class of a word."""
    return f"class-{word % CLASSES}"


class Input:
    """Writes files of lines, and knows what they should come to."""

    def __init__(self, directory: Path, rng: random.Random) -> None:
        self._directory = directory
        self._rng = rng
        self._next_line = 0
        self._next_file = 0
        self.words: list[int] = []
        """The word of each line."""
        (directory / "in").mkdir()
        self._write_classes()

    def _write_classes(self) -> None:
        import pyarrow as pa
        import pyarrow.parquet

        (self._directory / "classes").mkdir()
        words = {"word": [word_of(each) for each in range(WORDS)], "class": [class_of(each) for each in range(WORDS)]}
        pyarrow.parquet.write_table(pa.table(words), self._directory / "classes" / "0.parquet")

    def write_file(self) -> None:
        """Write one more file."""
        new = [self._rng.randrange(WORDS) for _ in range(LINES_PER_FILE)]
        begin = len(self.words)
        lines = [f"{begin + at},{BEGIN_MS + (begin + at) * LINE_MS},{word_of(word)}" for at, word in enumerate(new)]
        self.words += new
        self._put(lines)

    def write_end(self) -> None:
        """Write a line whose time is far later, so that all windows before it close."""
        begin = len(self.words)
        self.words.append(0)
        self._put([f"{begin},{BEGIN_MS + begin * LINE_MS + LATER_MS},{word_of(0)}"])

    def _put(self, lines: list[str]) -> None:
        path = self._directory / f"{self._next_file:06}.new"
        path.write_text("\n".join(lines) + "\n")
        path.rename(self._directory / "in" / f"{self._next_file:06}.txt")
        self._next_file += 1

    def windows(self) -> Counter[tuple[int, str]]:
        """Return how many lines each window and class has, without the last line, whose window stays open."""
        return Counter(
            ((BEGIN_MS + at * LINE_MS) // WINDOW_MS * WINDOW_MS, class_of(word))
            for at, word in enumerate(self.words[:-1])
        )


def word_of(number: int) -> str:
    """Return a word."""
    return f"word-{number}"


class Consumer(threading.Thread):
    """Consumes the log of windows by a subscription, as another program does, whatever is killed meanwhile."""

    def __init__(self, manager: LedgerManager) -> None:
        super().__init__(daemon=True)
        self.got: list[bytes] = []
        self.interruptions = 0
        self._manager = manager
        self._ending = threading.Event()
        self.start()

    def run(self) -> None:
        """Consume until told to end."""
        while not self._ending.is_set():
            try:
                self._consume()
            except PybkError as error:  # a bookie is away, for instance
                say(f"  the consumer begins again: {error}")
                self.interruptions += 1
                time.sleep(1)

    def _consume(self) -> None:
        with (
            Log.open(self._manager, "windows", password=PASSWORD) as log,
            log.subscribe("consumer", start=0, wait=60) as subscription,
        ):
            while not self._ending.is_set():
                records = subscription.read_many(100, timeout=1.0)
                self.got += [record.data for record in records]
                subscription.ack(records)

    def end(self) -> None:
        """Let it end."""
        self._ending.set()
        self.join(PROCESS_S)


# ---- the campaign ----------------------------------------------------------------------------------------------------


class Campaign:
    """The processes of a pipeline, and what is done to them."""

    def __init__(self, directory: Path, cluster: Cluster, master: str, rng: random.Random) -> None:
        self._directory = directory
        self._cluster = cluster
        self._master = master
        self._rng = rng
        self._driver: subprocess.Popen[bytes] | None = None
        self.told: Counter[str] = Counter()
        self.input = Input(directory, rng)
        (directory / "events").mkdir()

    def begin_driver(self) -> None:
        """Start a driver."""
        with suppress(FileNotFoundError):
            (self._directory / "progress").unlink()
        order = json.dumps([self._master, self._cluster.url, str(self._directory)])
        with open(self._directory / "driver.log", "ab") as log:
            self._driver = subprocess.Popen(
                [sys.executable, "-m", "tests.spark.pipeline_kills", "--driver", order],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                cwd=ROOT,
                env=environment(self._directory),
            )
        self.told["drivers started"] += 1

    @property
    def driver(self) -> subprocess.Popen[bytes]:
        """The driver."""
        assert self._driver is not None
        return self._driver

    def end_driver(self) -> None:
        """Kill the driver, and wait until the JVM is gone, which ends with it."""
        self.driver.kill()
        self.driver.wait()
        for pid in self._jvms(b"org.apache.spark.deploy.SparkSubmit"):
            with suppress(ProcessLookupError):
                os.kill(pid, 9)
        wait_until(lambda: not self._jvms(b"org.apache.spark.deploy.SparkSubmit"), "the driver to end")

    def _jvms(self, main: bytes) -> list[int]:
        """Return the processes of this campaign that run a class of Spark."""
        mark = str(self._directory).encode()
        found = []
        for entry in Path("/proc").iterdir():
            if entry.name.isdecimal():
                with suppress(OSError):
                    if main in (entry / "cmdline").read_bytes() and mark in (entry / "environ").read_bytes():
                        found.append(int(entry.name))
        return found

    def batches(self) -> dict[str, int]:
        """Return the last batch of each query; nothing before the present driver has reported."""
        try:
            told = json.loads((self._directory / "progress").read_text())
        except (FileNotFoundError, json.JSONDecodeError):
            return {}
        return dict(told["batches"])

    def let_all_progress(self) -> None:
        """Give input until each query has made another batch in this driver; starts the driver again if it failed."""
        began = self.batches()
        begin = time.monotonic()
        while True:
            if self.driver.poll() is not None:
                self.told["drivers ended by an error"] += 1
                say(f"  the driver ended: {self.last_error()}")
                self.begin_driver()
                began = {}
            now = self.batches()
            began = began or now
            if now and all(now[name] > began[name] >= 0 or now[name] > began[name] + 1 for name in QUERIES):
                return
            if time.monotonic() > begin + PROCESS_S:
                raise AssertionError(f"no progress in {PROCESS_S:g} s: {began} {now}; {self.last_error()}")
            if now:  # queries that do not run yet would only have more left to read
                self.input.write_file()
            time.sleep(1.0)

    def last_error(self) -> str:
        """Return the end of what the driver said."""
        return (self._directory / "driver.log").read_text(errors="replace")[-1500:]

    def kill(self, victim: str) -> None:
        """Kill one of the pipeline's processes, and start again what nobody else does."""
        time.sleep(self._rng.random() * 2)
        getattr(self, f"_kill_{victim}")()
        self.told[f"{victim} killed"] += 1

    def _kill_driver(self) -> None:
        self.end_driver()
        self.begin_driver()

    def _kill_executor(self) -> None:
        executors = wait_until(lambda: self._jvms(b"CoarseGrainedExecutorBackend"), "an executor", PROCESS_S)
        os.kill(self._rng.choice(sorted(executors)), 9)

    def _kill_bookie(self) -> None:
        bookie: BookieProcess = self._rng.choice(list(self._cluster.bookies.values()))
        bookie.kill()
        time.sleep(self._rng.random() * 3)
        bookie.start()

    def complete(self) -> None:
        """Give the last input, and let the driver read all of it."""
        for _ in range(2):
            self.input.write_file()
        self.input.write_end()
        (self._directory / "complete").touch()
        for _ in range(DRAINS_MAX):
            if not self.driver.wait(DRAIN_S):
                return
            self.told["drivers ended by an error"] += 1
            say(f"  the driver ended: {self.last_error()}")
            self.begin_driver()
        raise AssertionError(f"{DRAINS_MAX} drivers did not read what is left; {self.last_error()}")

    def speculative_tasks(self) -> int:
        """Return how many tasks Spark made in the place of slow ones."""
        files = [path for path in (self._directory / "events").rglob("*") if path.is_file()]
        return sum(
            1
            for path in files
            for line in path.read_text(errors="replace").splitlines()
            if "SparkListenerTaskStart" in line and '"Speculative":true' in line
        )


def check(campaign: Campaign, manager: LedgerManager, consumer: Consumer, directory: Path) -> None:
    """Compare logs, subscription and Parquet with the input; raises AssertionError with what differs."""
    words = campaign.input.words
    lines = [(record.data, record.key) for record in read(manager, "lines")]
    compare("the log of lines", lines, [(b"%d" % at, word_of(word).encode()) for at, word in enumerate(words)])
    expected = [(start, name, count) for (start, name), count in campaign.input.windows().items()]
    compare("the log of windows", [window_of(record.data) for record in read(manager, "windows")], expected)
    wait_until(lambda: len(consumer.got) >= len(expected), "the consumer to get all windows", PROCESS_S)
    consumer.end()
    compare("the subscription", [window_of(payload) for payload in consumer.got], expected)
    archived = [tuple(row) for row in json.loads((directory / "archive.json").read_text())]
    compare("Parquet", archived, [(str(at), word_of(word), class_of(word)) for at, word in enumerate(words)])
    campaign.told["lines"] = len(words)
    campaign.told["windows"] = len(expected)


def read(manager: LedgerManager, name: str) -> list[Any]:
    """Return the records of a log."""
    with Log.open(manager, name, password=PASSWORD) as log:
        return list(log.reader())


def window_of(payload: bytes) -> tuple[int, str, int]:
    """Return a window that was written as JSON."""
    found = json.loads(payload)
    return found["start"], found["class"], found["count"]


def compare(what: str, found: Sequence[Any], expected: Sequence[Any]) -> None:
    """Raise AssertionError unless both have the same members, as often."""
    more, less = Counter(found) - Counter(expected), Counter(expected) - Counter(found)
    if more or less:
        raise AssertionError(
            f"{what}: {more.total()} too many, such as {list(more)[:5]}; {less.total()} missing, such as "
            f"{list(less)[:5]}; {len(expected)} belong there"
        )


def make_logs(manager: LedgerManager) -> None:
    """Make the two logs, whose ledgers have three copies."""
    for name in ("lines", "windows"):
        Log.open(manager, name, password=PASSWORD, quorums=(3, 3, 2)).close()


def play(rounds: int, seed: int, directory: Path, stack: ExitStack) -> Counter[str]:
    """Run the campaign, and return what happened."""
    cluster = stack.enter_context(running(directory / "cluster", 3))
    manager = cluster.connect()
    make_logs(manager)
    master = stack.enter_context(standalone(directory, cores=2, hosts=HOSTS))
    campaign = Campaign(directory, cluster, master, random.Random(seed))
    consumer = Consumer(manager)
    campaign.begin_driver()
    stack.callback(campaign.end_driver)
    victims = Deck(VICTIMS, random.Random(f"{seed} victims"))
    for number in range(rounds):
        campaign.let_all_progress()
        victim = victims.draw()
        say(f"round {number}: kills a {victim} after {campaign.batches()}, {len(campaign.input.words)} lines")
        campaign.kill(victim)
    campaign.let_all_progress()
    campaign.complete()
    check(campaign, manager, consumer, directory)
    campaign.told["speculative tasks"] = campaign.speculative_tasks()
    campaign.told["interruptions of the consumer"] = consumer.interruptions
    return campaign.told


class Deck:
    """Draws members at random, each once before one of them again."""

    def __init__(self, members: Sequence[str], rng: random.Random) -> None:
        self._members = members
        self._rng = rng
        self._left: list[str] = []

    def draw(self) -> str:
        """Return the next member."""
        if not self._left:
            self._left = self._rng.sample(self._members, len(self._members))
        return self._left.pop()


def say(text: str) -> None:
    """Print a line of progress."""
    sys.stdout.write(f"{time.strftime('%H:%M:%S')} {text}\n")
    sys.stdout.flush()


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the campaign, or a driver of it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--seed", type=int, default=int(time.time()))
    parser.add_argument("--directory", type=Path, help="where all of it is kept; else it is removed at the end")
    parser.add_argument("--driver", help=argparse.SUPPRESS)
    given = parser.parse_args(arguments)
    if given.driver:
        master, url, directory = json.loads(given.driver)
        drive(master, url, Path(directory))
        return
    say(f"seed {given.seed}")
    with ExitStack() as stack:
        directory = given.directory or Path(stack.enter_context(tempfile.TemporaryDirectory()))
        directory.mkdir(parents=True, exist_ok=True)
        told = play(given.rounds, given.seed, directory.resolve(), stack)
    say(f"{given.rounds} rounds, each line and each window once:")
    for what, count in sorted(told.items()):
        say(f"  {count:6} {what}")
    if not told["speculative tasks"]:
        raise SystemExit("Spark made no task in the place of a slow one, so that was not tried; take more rounds")


if __name__ == "__main__":
    main()

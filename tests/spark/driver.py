"""A driver of Spark in a process of its own, which executes the tests' requests: their ``Driver`` is its other end.

Each line on the standard input is the JSON of a name of a function here and its arguments, each on the standard output
that of what it returned, or of the error.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import sys
import time
import traceback
import urllib.request
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

import pyarrow as pa
from pyspark.sql import SparkSession

from pybk.spark import configure, local_bookie, read_local, start_bookies
from pybk.spark.executors.executor import Executor
from tests.spark.queries import run_to_end
from tests.waiting import PROCESS_S


def begin(master: str, conf: dict[str, str], bookies: dict[str, Any] | None) -> str:
    """Begin the session, with a bookie on each executor's host if settings of bookies are given; return its id."""
    builder = SparkSession.builder.master(master)
    for name, value in conf.items():
        builder = builder.config(name, value)
    if bookies is not None:
        builder = configure(builder, **bookies)
    return str(builder.getOrCreate().sparkContext.applicationId)


def session() -> SparkSession:
    """Return the session."""
    return SparkSession.builder.getOrCreate()


def bookies(**arguments: Any) -> list[dict[str, Any]]:
    """Start bookies; return them."""
    return [asdict(bookie) for bookie in start_bookies(session(), **arguments)]


def run_tasks(count: int, metadata: str) -> list[list[Any]]:
    """Run tasks at once; return of each the executor's name, process and bookie."""

    def look(_: int) -> list[Any]:
        time.sleep(0.2)
        executor = Executor.of_task()
        bookie = local_bookie(metadata)
        return [executor.name(), executor.pid, None if bookie is None else asdict(bookie)]

    return session().sparkContext.parallelize(range(count), count).map(look).collect()


def cancel(group: str) -> None:
    """Cancel a group of jobs."""
    session().sparkContext.cancelJobGroup(group)


def active_tasks(group: str) -> int:
    """Return how many tasks of a group of jobs run now."""
    tracker = session().sparkContext.statusTracker()
    stages = [tracker.getStageInfo(stage) for job in _active_jobs(group) for stage in job.stageIds]
    return sum(stage.numActiveTasks for stage in stages if stage is not None)


def _active_jobs(group: str) -> list[Any]:
    tracker = session().sparkContext.statusTracker()
    jobs = [tracker.getJobInfo(job) for job in tracker.getJobIdsForGroup(group)]
    return [job for job in jobs if job is not None and job.status == "RUNNING"]


def pages() -> dict[str, str]:
    """Return what Spark's web interface shows of the session."""
    root = f"api/v1/applications/{session().sparkContext.applicationId}"
    found = {name: _page(f"{root}/{name}") for name in ("environment", "allexecutors", "jobs", "stages")}
    return {**found, "page": _page("environment/")}


def _page(path: str) -> str:
    """Return a page of Spark's web interface."""
    with urllib.request.urlopen(f"{session().sparkContext.uiWebUrl}/{path}", timeout=PROCESS_S) as answer:
        text: str = answer.read().decode()
        return text


def read_and_show(options: dict[str, str]) -> str:
    """Read ledgers in a batch and as a stream; return the plans, progress, pages and error that Spark shows."""
    shown = io.StringIO()
    with contextlib.redirect_stdout(shown):
        frame = session().read.format("pybk").options(**options).load()
        frame.explain(mode="extended")
        frame.explain(mode="formatted")
        shown.write(f"{frame.where('entry_id >= 0').count()}\n")
        stream = session().readStream.format("pybk").options(**options).load().writeStream.format("noop")
        query = run_to_end(stream.trigger(availableNow=True).start)
        shown.write(f"{query.lastProgress}\n")
        query.explain(True)
        try:
            session().read.format("pybk").options(**options, passwort="again").load()
        except Exception as error:  # noqa: BLE001  # any error is reported
            shown.write(f"{error}\n")
    for page in ("api/v1/applications", "SQL/", "jobs/", "environment/", "StreamingQuery/"):
        shown.write(_page(page))
    shown.write(_page(f"api/v1/applications/{session().sparkContext.applicationId}/sql?details=true"))
    return shown.getvalue()


def read(options: dict[str, str]) -> list[Any]:
    """Read ledgers by tasks on their hosts; return of each batch the executor, the ledgers and how many rows it has."""
    answers = read_local(session(), **options).mapInArrow(_who, "answer string").toArrow()["answer"]
    return [json.loads(answer) for answer in answers.to_pylist()]


def _who(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Say who reads what."""
    for batch in batches:
        answer = [Executor.of_task().name(), sorted(set(batch.column("ledger_id").to_pylist())), batch.num_rows]
        yield pa.RecordBatch.from_pydict({"answer": [json.dumps(answer)]})


def sql(statement: str) -> str:
    """Run a statement of SQL; return its rows, or the error that Spark shows."""
    try:
        return repr(session().sql(statement).collect())
    except Exception as error:  # noqa: BLE001  # any error is reported
        return str(error)


def set_conf(setting: str, value: str) -> None:
    """Change a setting of the session."""
    session().conf.set(setting, value)


def stream_error(options: dict[str, str]) -> str:
    """Run a stream, which fails; return the error that Spark shows."""
    frame = session().readStream.format("pybk").options(**options).load()
    query = frame.writeStream.format("noop").trigger(availableNow=True).start()
    try:
        query.awaitTermination()
    except Exception as error:  # noqa: BLE001  # any error is reported
        return str(error)
    return ""


def first_rows(options: dict[str, str], count: int) -> int:
    """Read the first rows; return how many there are."""
    return len(session().read.format("pybk").options(**options).load().limit(count).collect())


def explain(options: dict[str, str]) -> str:
    """Return Spark's text of the plan of a read."""
    shown = io.StringIO()
    with contextlib.redirect_stdout(shown):
        read_local(session(), **options).explain(mode="extended")
    return shown.getvalue()


def write(options: dict[str, str], count: int) -> None:
    """Write rows, each task its own."""
    frame = session().range(0, count, 1, 4).selectExpr("cast(cast(id as string) as binary) as payload")
    frame.write.format("pybk").options(**options).mode("append").save()


def end() -> None:
    """End the session."""
    session().stop()


def main() -> None:
    """Do what is asked until the standard input ends."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # Spark speaks there, too
    for line in sys.stdin:
        name, arguments = json.loads(line)
        try:
            answer = {"result": globals()[name](**arguments)}
        except Exception:  # noqa: BLE001  # any error is handed to the test
            answer = {"error": traceback.format_exc()}
        answers.write(json.dumps(answer) + "\n")


if __name__ == "__main__":
    main()

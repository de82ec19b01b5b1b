"""Placement of tasks on given executors, which PySpark does not offer."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from pybk.errors import IllegalOperationError
from pybk.spark.executors.executor import Executor
from pybk.spark.executors.executor_python import one_line_for_other_pythons

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark import RDD, SparkContext
    from pyspark.sql import SparkSession

logger = logging.getLogger(__name__)

HOLD_GROUP: Final = "pybk-bookies"
"""The job group of the tasks that hold executors."""

_SPREAD_SECONDS: Final = 0.3

_held: dict[str, set[str]] = {}


def spark_context(spark: SparkSession) -> SparkContext | None:
    """Return a session's SparkContext; None with Spark Connect, whose sessions have none."""
    from pyspark.errors import PySparkException

    try:
        return spark.sparkContext
    except PySparkException:
        return None


def executor_locations(spark: SparkSession) -> list[str] | None:
    """Return the locations of the running executors; None with Spark Connect, which does not list them."""
    sc = spark_context(spark)
    if sc is None:
        return None
    listed: Any = sc._jsc.sc().statusStore().executorList(True)
    found = [listed.apply(place) for place in range(listed.size())]
    locations = {entry.id(): f"executor_{entry.hostPort().rpartition(':')[0]}_{entry.id()}" for entry in found}
    if len(locations) > 1:
        locations.pop("driver", None)  # the driver runs tasks only in local mode, where it is the only executor
    return sorted(locations.values())


def located_rdd(sc: SparkContext, items: Sequence[tuple[bytes, Sequence[str]]]) -> RDD[bytes]:
    """Return an RDD with one item per partition, each with preferred locations: hosts, or ``executor_<host>_<id>``."""
    from pyspark import RDD
    from pyspark.serializers import NoOpSerializer

    assert sc._jvm is not None
    jvm: Any = sc._jvm

    def sequence(values: Sequence[Any]) -> Any:
        listed = jvm.java.util.ArrayList()
        for value in values:
            listed.add(value)
        return jvm.scala.jdk.javaapi.CollectionConverters.asScala(listed).toSeq()

    pairs = sequence([jvm.scala.Tuple2(item, sequence(locations)) for item, locations in items])
    tag = jvm.scala.reflect.ClassTag.apply(jvm.java.lang.Class.forName("[B"))
    made: Any = sc._jsc.sc().makeRDD(pairs, tag)
    return RDD(made.toJavaRDD(), sc, NoOpSerializer())


def ask_executors(spark: SparkSession, locations: Sequence[str] | None, ask: Callable[[], str]) -> list[str]:
    """Call a function on executors and return its results.

    Args:
        spark: The session.
        locations: The locations of the executors; a task that waits too long for one runs on another. With None, as
            many tasks run as there are task slots, and each takes a moment, so they spread over all executors.
        ask: The function; it must be picklable.

    Raises:
        IllegalOperationError: The Python of an executor does not fit.
    """
    sc = spark_context(spark)
    with one_line_for_other_pythons():
        if sc is not None:
            items = [(b"", [location]) for location in locations or ()]
            return located_rdd(sc, items).mapPartitions(partial(_answer, ask)).collect() if items else []
        answers = spark.range(1 << 10).mapInArrow(partial(_slow_answer, ask), "answer string").collect()
        return [row.answer for row in answers]


def hold_executors(spark: SparkSession, locations: Sequence[str] | None, watch: Callable[[], None]) -> None:
    """Run a task on each executor that does not have one yet; each ends when the function returns.

    Args:
        spark: The session.
        locations: The locations of the executors.
        watch: The function; it must be picklable.

    Raises:
        IllegalOperationError: The session is one of Spark Connect.
    """
    from pyspark import InheritableThread

    sc = spark_context(spark)
    if sc is None:
        raise IllegalOperationError("hold_slot=True is not possible in a session of Spark Connect; leave it out")
    held = _held.setdefault(str(sc.applicationId), set())
    wanted = sorted(set(locations or ()) - held)
    if not wanted:
        return
    held.update(wanted)

    def hold() -> None:
        sc.setJobGroup(HOLD_GROUP, "bookies hold their executors", interruptOnCancel=False)
        try:
            items = [(location.encode(), [location]) for location in wanted]
            located_rdd(sc, items).foreachPartition(partial(_hold, watch))
        except Exception as error:  # noqa: BLE001  # cancelled, or the session ended
            logger.info("the tasks that hold executors have ended: %s", type(error).__name__)
        finally:
            held.difference_update(wanted)

    InheritableThread(target=hold, name="pybk-hold", daemon=True).start()


def _hold(watch: Callable[[], None], locations: Iterator[bytes]) -> None:
    """Run ``watch`` if this task is on the executor of a location; Spark moves tasks of a lost executor to others."""
    location = Executor.of_task().location() or ""
    if location.encode() in locations:
        watch()


def _answer(ask: Callable[[], str], _: Iterator[bytes]) -> list[str]:
    return [ask()]


def _slow_answer(ask: Callable[[], str], _: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    import pyarrow as pa

    answer = ask()
    time.sleep(_SPREAD_SECONDS)
    yield pa.RecordBatch.from_pydict({"answer": [answer]})

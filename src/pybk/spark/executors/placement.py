"""Tasks on executors of one's choice: what Spark's own interface for Python does not offer."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from pybk.errors import IllegalOperationError
from pybk.spark.executors.executor import Executor

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark import RDD, SparkContext
    from pyspark.sql import SparkSession

logger = logging.getLogger(__name__)

HOLD_GROUP: Final = "pybk-bookies"
"""Job group of the tasks that hold executors."""

_SPREAD_SECONDS: Final = 0.3

_held: dict[str, set[str]] = {}


def spark_context(spark: SparkSession) -> SparkContext | None:
    """Return a session's context, None with Spark Connect, which has none."""
    from pyspark.errors import PySparkException

    try:
        return spark.sparkContext
    except PySparkException:
        return None


def executor_locations(spark: SparkSession) -> list[str] | None:
    """Return the locations of the executors that are there; None with Spark Connect, where that cannot be known."""
    sc = spark_context(spark)
    if sc is None:
        return None
    listed: Any = sc._jsc.sc().statusStore().executorList(True)
    found = [listed.apply(place) for place in range(listed.size())]
    locations = {entry.id(): f"executor_{entry.hostPort().rpartition(':')[0]}_{entry.id()}" for entry in found}
    if len(locations) > 1:
        locations.pop("driver", None)  # it runs tasks only where it is alone
    return sorted(locations.values())


def located_rdd(sc: SparkContext, items: Sequence[tuple[bytes, Sequence[str]]]) -> RDD[bytes]:
    """Return an RDD with an item per partition, and preferred locations of each: hosts, or ``executor_<host>_<id>``."""
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
    """Call a function on executors and return what it returned.

    Args:
        spark: The session.
        locations: Theirs; a task that has to wait for one too long goes to another. None: as many tasks as there are
            slots, each of which takes a moment, so that they spread.
        ask: The function; it can be pickled.
    """
    sc = spark_context(spark)
    if sc is not None:
        items = [(b"", [location]) for location in locations or ()]
        return located_rdd(sc, items).mapPartitions(partial(_answer, ask)).collect() if items else []
    answers = spark.range(1 << 10).mapInArrow(partial(_slow_answer, ask), "answer string").collect()
    return [row.answer for row in answers]


def hold_executors(spark: SparkSession, locations: Sequence[str] | None, watch: Callable[[], None]) -> None:
    """Have a task run on each executor until it returns from a function; on those that have one, no other.

    Args:
        spark: The session.
        locations: The executors'.
        watch: The function; it can be pickled.

    Raises:
        IllegalOperationError: The session is one of Spark Connect.
    """
    from pyspark import InheritableThread

    sc = spark_context(spark)
    if sc is None:
        raise IllegalOperationError("hold_slot=True needs a session that is none of Spark Connect; leave it out")
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
            logger.info("executors are held no more: %s", type(error).__name__)
        finally:
            held.difference_update(wanted)

    InheritableThread(target=hold, name="pybk-hold", daemon=True).start()


def _hold(watch: Callable[[], None], locations: Iterator[bytes]) -> None:
    """Hold the executor of a location; a task that Spark has moved to another, as that one is lost, holds none."""
    location = Executor.of_task().location or ""
    if location.encode() in locations:
        watch()


def _answer(ask: Callable[[], str], _: Iterator[bytes]) -> list[str]:
    return [ask()]


def _slow_answer(ask: Callable[[], str], _: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    import pyarrow as pa

    answer = ask()
    time.sleep(_SPREAD_SECONDS)
    yield pa.RecordBatch.from_pydict({"answer": [answer]})

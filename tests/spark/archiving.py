"""Makes the archive of classes, see ``archive``, unless it is there: ``python -m tests.spark.archiving``."""

from __future__ import annotations

import importlib.util
import os
import shutil
import tempfile
from pathlib import Path
from typing import Final

from tests.spark import archive, clusters

_OF_OTHER_PROCESSES: Final = (
    "org.apache.spark.deploy.master.Master",
    "org.apache.spark.deploy.worker.Worker",
    "org.apache.spark.executor.CoarseGrainedExecutorBackend",
    "org.apache.zookeeper.server.ZooKeeperServerMain",
)


def load_classes(directory: Path) -> None:
    """Run a driver that loads most classes, by a write and a stream that groups; return once its JVM has ended."""
    from pyspark.sql import SparkSession

    builder = SparkSession.builder.master("local[2]").config("spark.ui.enabled", "false")
    for name in ("host", "bindAddress"):
        builder = builder.config(f"spark.driver.{name}", "127.0.0.1")
    session = builder.config("spark.sql.shuffle.partitions", "2").config("spark.log.level", "OFF").getOrCreate()
    session.range(0, 100, 1, 2).selectExpr("id % 7 as k", "cast(id as string) v").write.parquet(f"{directory}/rows")
    rows = session.readStream.schema("k long, v string").parquet(f"{directory}/rows")
    counts = rows.groupBy("k").count().writeStream.outputMode("update").format("memory").queryName("counts")
    counts.option("checkpointLocation", f"{directory}/checkpoint").trigger(availableNow=True).start().awaitTermination()
    assert session.table("counts").orderBy("k").count() == 7
    gateway = session.sparkContext._gateway
    assert gateway is not None
    for name in _OF_OTHER_PROCESSES:
        gateway.jvm.java.lang.Class.forName(name)
    session.stop()
    gateway.shutdown()
    gateway.proc.stdin.close()
    gateway.proc.wait()  # the JVM writes the archive at its end


def main() -> None:
    """Make the archive."""
    if shutil.which("java") is None or importlib.util.find_spec("pyspark") is None:
        return
    path = archive.place(clusters.need_spark() / "jars")
    if path.exists():
        return
    path.parent.mkdir(exist_ok=True)
    for old in path.parent.glob("classes-*.jsa"):
        old.unlink()
    with tempfile.TemporaryDirectory(dir=path.parent) as directory:
        made = Path(directory) / "made"
        home = clusters.make_home(Path(directory), [f"-XX:ArchiveClassesAtExit={made}", "-Xlog:disable"])
        os.environ.update({**clusters.environment(Path(directory)), "SPARK_HOME": str(home)})
        load_classes(Path(directory))
        made.rename(path)


if __name__ == "__main__":
    main()

"""Ledgers in Apache Spark: needs ``pip install "pybk[spark]"`` and Java 17 or newer. See ``docs/howto/spark.md``."""

# The process of a bookie imports this package, too, and has no use for pyspark.

from __future__ import annotations

from pybk.deferral import deferred

TYPE_CHECKING = False
if TYPE_CHECKING:
    from pybk.spark.consumers import Consumer as Consumer
    from pybk.spark.executors.bookie_start import configure as configure
    from pybk.spark.executors.bookie_start import start_bookies as start_bookies
    from pybk.spark.executors.executor import ExecutorBookie as ExecutorBookie
    from pybk.spark.executors.executor import local_bookie as local_bookie
    from pybk.spark.jobs.compact import CompactedLog as CompactedLog
    from pybk.spark.jobs.compact import CompactedSink as CompactedSink
    from pybk.spark.jobs.compact import compact as compact
    from pybk.spark.jobs.compact import compact_ledgers as compact_ledgers
    from pybk.spark.jobs.copy import Copied as Copied
    from pybk.spark.jobs.copy import copy as copy
    from pybk.spark.jobs.export import Exported as Exported
    from pybk.spark.jobs.export import export as export
    from pybk.spark.jobs.import_ import Imported as Imported
    from pybk.spark.jobs.import_ import import_ as import_
    from pybk.spark.jobs.inventory import Inventory as Inventory
    from pybk.spark.jobs.inventory import inventory as inventory
    from pybk.spark.jobs.retain import forget_consumer as forget_consumer
    from pybk.spark.jobs.retain import list_consumers as list_consumers
    from pybk.spark.jobs.retain import retain as retain
    from pybk.spark.jobs.tier import Tiered as Tiered
    from pybk.spark.jobs.tier import tier as tier
    from pybk.spark.jobs.verify import CheckedReplica as CheckedReplica
    from pybk.spark.jobs.verify import VerifiedLedgers as VerifiedLedgers
    from pybk.spark.jobs.verify import verify as verify
    from pybk.spark.query_backlog import backlog as backlog
    from pybk.spark.query_backlog import backlog_bytes as backlog_bytes
    from pybk.spark.sink.upkeep import collect as collect
    from pybk.spark.source.local_read import read_local as read_local
else:
    __getattr__ = deferred(
        __name__,
        {
            "consumers": "Consumer",
            "executors.bookie_start": "configure start_bookies",
            "executors.executor": "ExecutorBookie local_bookie",
            "jobs.compact": "CompactedLog CompactedSink compact compact_ledgers",
            "jobs.copy": "Copied copy",
            "jobs.export": "Exported export",
            "jobs.import_": "Imported import_",
            "jobs.inventory": "Inventory inventory",
            "jobs.retain": "forget_consumer list_consumers retain",
            "jobs.tier": "Tiered tier",
            "jobs.verify": "CheckedReplica VerifiedLedgers verify",
            "query_backlog": "backlog backlog_bytes",
            "sink.upkeep": "collect",
            "source.local_read": "read_local",
        },
    )

__all__ = [
    "CheckedReplica",
    "CompactedLog",
    "CompactedSink",
    "Consumer",
    "Copied",
    "ExecutorBookie",
    "Exported",
    "Imported",
    "Inventory",
    "Tiered",
    "VerifiedLedgers",
    "backlog",
    "backlog_bytes",
    "collect",
    "compact",
    "compact_ledgers",
    "configure",
    "copy",
    "export",
    "forget_consumer",
    "import_",
    "inventory",
    "list_consumers",
    "local_bookie",
    "read_local",
    "retain",
    "start_bookies",
    "tier",
    "verify",
]

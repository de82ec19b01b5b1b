"""Ledgers in Apache Spark: needs ``pip install "pybk[spark]"`` and Java 17 or newer. See ``docs/howto/spark.md``."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any, Final

from pybk.spark.executors.bookies import configure, start_bookies
from pybk.spark.executors.executor import ExecutorBookie, local_bookie

if TYPE_CHECKING:
    from pybk.spark.jobs.compact import CompactedLog, compact
    from pybk.spark.jobs.copy import Copied, copy
    from pybk.spark.jobs.export import Exported, export
    from pybk.spark.jobs.import_ import Imported, import_
    from pybk.spark.jobs.inventory import Inventory, inventory
    from pybk.spark.jobs.tier import Tiered, tier
    from pybk.spark.jobs.verify import CheckedReplica, VerifiedLedgers, verify
    from pybk.spark.query_backlog import backlog
    from pybk.spark.sink.manifest import collect
    from pybk.spark.source.local_read import read_local

__all__ = [
    "CheckedReplica",
    "CompactedLog",
    "Copied",
    "ExecutorBookie",
    "Exported",
    "Imported",
    "Inventory",
    "Tiered",
    "VerifiedLedgers",
    "backlog",
    "collect",
    "compact",
    "configure",
    "copy",
    "export",
    "import_",
    "inventory",
    "local_bookie",
    "read_local",
    "start_bookies",
    "tier",
    "verify",
]

_JOBS: Final = {
    "compact": ("compact", "CompactedLog"),
    "copy": ("copy", "Copied"),
    "export": ("export", "Exported"),
    "import_": ("import_", "Imported"),
    "inventory": ("inventory", "Inventory"),
    "tier": ("tier", "Tiered"),
    "verify": ("verify", "VerifiedLedgers", "CheckedReplica"),
}
_WHEN_ASKED: Final = {
    "backlog": "pybk.spark.query_backlog",
    "collect": "pybk.spark.sink.manifest",
    "read_local": "pybk.spark.source.local_read",
    **{name: f"pybk.spark.jobs.{job}" for job, names in _JOBS.items() for name in names},
}
"""Imported when they are asked for: the process of a bookie comes by here, too, and has no use for pyspark."""


def __getattr__(name: str) -> Any:
    """Import the module of a public name when the name is first used."""
    if name not in _WHEN_ASKED:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_WHEN_ASKED[name]), name)

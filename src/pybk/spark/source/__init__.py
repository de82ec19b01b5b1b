"""The Spark source: planning on the driver, reading in tasks, offsets of streams."""

from pybk.deferral import deferred

TYPE_CHECKING = False
if TYPE_CHECKING:
    from pybk.spark.source.ledger_catalog import LedgerCatalog as LedgerCatalog
else:
    __getattr__ = deferred(__name__, {"ledger_catalog": "LedgerCatalog"})

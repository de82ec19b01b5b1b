"""The index over the ledgers of a store, kept together with the catalog from which it can be rebuilt."""

from pybk.deferral import deferred

TYPE_CHECKING = False
if TYPE_CHECKING:
    from pybk.storage.index.index_check import problems as problems
else:
    __getattr__ = deferred(__name__, {"index_check": "problems"})

"""Self-healing: what a cluster does by itself when bookies are lost, leave or hold damaged entries."""

from pybk.deferral import deferred

TYPE_CHECKING = False
if TYPE_CHECKING:
    from pybk.healing.cluster_map import ClusterMap as ClusterMap
else:
    __getattr__ = deferred(__name__, {"cluster_map": "ClusterMap"})

"""Operating a store or a cluster: status, drains, repair and metadata."""

from pybk.deferral import deferred

TYPE_CHECKING = False
if TYPE_CHECKING:
    from pybk.operations.cluster_admin import ClusterAdmin as ClusterAdmin
    from pybk.operations.cluster_checks import Copies as Copies
    from pybk.operations.cluster_checks import space_by_tiers as space_by_tiers
    from pybk.operations.metadata_repair import destroy_metadata as destroy_metadata
    from pybk.operations.store_repair import rebuild_index as rebuild_index
    from pybk.operations.store_repair import verify as verify
else:
    __getattr__ = deferred(
        __name__,
        {
            "cluster_admin": "ClusterAdmin",
            "cluster_checks": "Copies space_by_tiers",
            "metadata_repair": "destroy_metadata",
            "store_repair": "rebuild_index verify",
        },
    )

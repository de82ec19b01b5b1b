"""Self-healing: what a cluster does by itself when bookies are lost, leave or hold damaged entries."""

from pybk.deferral import deferred

TYPE_CHECKING = False
if TYPE_CHECKING:
    from pybk.healing.scrub import EmbeddedScrub as EmbeddedScrub
    from pybk.healing.scrub import StoreScrub as StoreScrub
    from pybk.healing.scrub import check_store as check_store
    from pybk.healing.scrub import status_of_notes as status_of_notes
else:
    __getattr__ = deferred(
        __name__,
        {
            "scrub": "EmbeddedScrub StoreScrub check_store status_of_notes",
        },
    )

"""Self-healing: what a cluster does by itself when bookies are lost, leave or hold damaged entries."""

from pybk.deferral import deferred

TYPE_CHECKING = False
if TYPE_CHECKING:
    from pybk.healing.embedded_scrub import EmbeddedScrub as EmbeddedScrub
    from pybk.healing.scrub_status import status_of_notes as status_of_notes
    from pybk.healing.scrubbing import StoreScrub as StoreScrub
    from pybk.healing.scrubbing import check_store as check_store
else:
    __getattr__ = deferred(
        __name__,
        {
            "embedded_scrub": "EmbeddedScrub",
            "scrub_status": "status_of_notes",
            "scrubbing": "StoreScrub check_store",
        },
    )

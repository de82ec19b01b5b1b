"""Verifying a store record by record, and rebuilding its index."""

from pybk.deferral import deferred

TYPE_CHECKING = False
if TYPE_CHECKING:
    from pybk.storage.repair.rebuild import rebuild_locked as rebuild_locked
    from pybk.storage.repair.scrub_notes import load_notes as load_notes
else:
    __getattr__ = deferred(
        __name__,
        {
            "rebuild": "rebuild_locked",
            "scrub_notes": "load_notes",
        },
    )

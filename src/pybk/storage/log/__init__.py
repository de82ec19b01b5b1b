"""The log: group commit, log files that are preallocated, replay and recovery after a stop."""

from pybk.deferral import deferred

TYPE_CHECKING = False
if TYPE_CHECKING:
    from pybk.storage.log.salvage import SalvageReport as SalvageReport
    from pybk.storage.log.salvage import keep_watermark as keep_watermark
    from pybk.storage.log.salvage import open_watermark as open_watermark
    from pybk.storage.log.salvage import replace_missing as replace_missing
    from pybk.storage.log.salvage import salvage_log as salvage_log
else:
    __getattr__ = deferred(
        __name__,
        {
            "salvage": "SalvageReport keep_watermark open_watermark replace_missing salvage_log",
        },
    )

"""Moving entries: checkpoints, tier moves, compaction, and when each of them runs."""

from pybk.deferral import deferred

TYPE_CHECKING = False
if TYPE_CHECKING:
    from pybk.storage.compaction.checkpoint import Checkpoint as Checkpoint
    from pybk.storage.compaction.compaction import Compaction as Compaction
    from pybk.storage.compaction.mover import MOVED_BYTES_MAX as MOVED_BYTES_MAX
    from pybk.storage.compaction.mover import MOVED_LEDGERS_MAX as MOVED_LEDGERS_MAX
    from pybk.storage.compaction.mover import UnmovedError as UnmovedError
    from pybk.storage.compaction.tier_policy import TierQueue as TierQueue
else:
    __getattr__ = deferred(
        __name__,
        {
            "checkpoint": "Checkpoint",
            "compaction": "Compaction",
            "mover": "MOVED_BYTES_MAX MOVED_LEDGERS_MAX UnmovedError",
            "tier_policy": "TierQueue",
        },
    )

"""One bookie's disks: the log, the index over it, and the tiers that entries live in."""

from pybk.deferral import deferred

TYPE_CHECKING = False
if TYPE_CHECKING:
    from pybk.storage.compaction.checkpoint import Checkpoint as Checkpoint
    from pybk.storage.compaction.compaction import Compaction as Compaction
    from pybk.storage.compaction.mover import MOVED_BYTES_MAX as MOVED_BYTES_MAX
    from pybk.storage.compaction.mover import MOVED_LEDGERS_MAX as MOVED_LEDGERS_MAX
    from pybk.storage.compaction.mover import UnmovedError as UnmovedError
    from pybk.storage.compaction.tier_policy import TierQueue as TierQueue
    from pybk.storage.readonly import ReadOnlyStore as ReadOnlyStore
    from pybk.storage.repair.rebuild import rebuild_locked as rebuild_locked
    from pybk.storage.repair.scrub_notes import load_notes as load_notes
    from pybk.storage.store_cut import CutTail as CutTail
    from pybk.storage.store_cut import merged as merged
    from pybk.storage.store_cut import rows_of as rows_of
    from pybk.storage.transaction_group import GroupAppend as GroupAppend
    from pybk.storage.transaction_group import LedgerEntries as LedgerEntries
else:
    __getattr__ = deferred(
        __name__,
        {
            "compaction.checkpoint": "Checkpoint",
            "compaction.compaction": "Compaction",
            "compaction.mover": "MOVED_BYTES_MAX MOVED_LEDGERS_MAX UnmovedError",
            "compaction.tier_policy": "TierQueue",
            "readonly": "ReadOnlyStore",
            "repair.rebuild": "rebuild_locked",
            "repair.scrub_notes": "load_notes",
            "store_cut": "CutTail merged rows_of",
            "transaction_group": "GroupAppend LedgerEntries",
        },
    )

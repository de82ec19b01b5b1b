"""One bookie's disks: the log, the index over it, and the tiers that entries live in."""

from pybk.deferral import deferred

TYPE_CHECKING = False
if TYPE_CHECKING:
    from pybk.storage.format.cold_segment import ColdSegment as ColdSegment
    from pybk.storage.format.cold_segment import ColdSegmentWriter as ColdSegmentWriter
    from pybk.storage.format.cold_segment import check_codec as check_codec
    from pybk.storage.format.cold_segment import decompress as decompress
    from pybk.storage.format.cold_segment import footer_dtype as footer_dtype
    from pybk.storage.format.cold_segment import salvage_rows as salvage_rows
    from pybk.storage.log.salvage import SalvageReport as SalvageReport
    from pybk.storage.log.salvage import keep_watermark as keep_watermark
    from pybk.storage.log.salvage import open_watermark as open_watermark
    from pybk.storage.log.salvage import replace_missing as replace_missing
    from pybk.storage.log.salvage import salvage_log as salvage_log
    from pybk.storage.readonly import ReadOnlyStore as ReadOnlyStore
    from pybk.storage.repair.rebuild import rebuild_locked as rebuild_locked
    from pybk.storage.repair.scrub_notes import load_notes as load_notes
    from pybk.storage.store_cut import CutTail as CutTail
    from pybk.storage.store_cut import merged as merged
    from pybk.storage.store_cut import rows_of as rows_of
    from pybk.storage.transaction_group import DisplacedError as DisplacedError
    from pybk.storage.transaction_group import GroupAppend as GroupAppend
    from pybk.storage.transaction_group import LedgerEntries as LedgerEntries
else:
    __getattr__ = deferred(
        __name__,
        {
            "format.cold_segment": ("ColdSegment ColdSegmentWriter check_codec decompress footer_dtype salvage_rows"),
            "log.salvage": "SalvageReport keep_watermark open_watermark replace_missing salvage_log",
            "readonly": "ReadOnlyStore",
            "repair.rebuild": "rebuild_locked",
            "repair.scrub_notes": "load_notes",
            "store_cut": "CutTail merged rows_of",
            "transaction_group": "DisplacedError GroupAppend LedgerEntries",
        },
    )

"""The bytes of every file, in the order of ``docs/reference/format.md``."""

from pybk.deferral import deferred

TYPE_CHECKING = False
if TYPE_CHECKING:
    from pybk.storage.format.cold_segment import ColdSegment as ColdSegment
    from pybk.storage.format.cold_segment import ColdSegmentWriter as ColdSegmentWriter
    from pybk.storage.format.cold_segment import check_codec as check_codec
    from pybk.storage.format.cold_segment import decompress as decompress
    from pybk.storage.format.cold_segment import footer_dtype as footer_dtype
    from pybk.storage.format.cold_segment import salvage_rows as salvage_rows
else:
    __getattr__ = deferred(
        __name__,
        {
            "cold_segment": "ColdSegment ColdSegmentWriter check_codec decompress footer_dtype salvage_rows",
        },
    )

"""Filter pushdown: filters on ids restrict the ledgers and entries that are read."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Final, NamedTuple

from pyspark.sql.datasource import (
    EqualNullSafe,
    EqualTo,
    Filter,
    GreaterThan,
    GreaterThanOrEqual,
    In,
    IsNotNull,
    LessThan,
    LessThanOrEqual,
)

from pybk.spark.source.columns import COLUMNS
from pybk.spark.source.planning import intersect, ranges_of

if TYPE_CHECKING:
    from pybk.spark.options import Ranges

_MOST: Final = (1 << 63) - 1
EVERY: Final[Ranges] = ((0, _MOST),)
_NONE: Final[Ranges] = ()


class PushedFilters(NamedTuple):
    """The result of a filter pushdown.

    Attributes:
        ledgers: The ranges of ledger ids that the filters select.
        entries: The ranges of entry ids that the filters select.
        rest: The filters that Spark has to apply.
    """

    ledgers: Ranges
    entries: Ranges
    rest: tuple[Filter, ...]


def push(filters: Iterable[Filter]) -> PushedFilters:
    """Return the ids that filters select; Spark need not apply the filters that are not in ``rest``."""
    left = {"ledger_id": EVERY, "entry_id": EVERY}
    rest = []
    for each in filters:
        name = ".".join(getattr(each, "attribute", ()))
        if isinstance(each, IsNotNull) and name in COLUMNS:
            continue  # ids are never null
        ranges = _ranges(each) if name in left else None
        if ranges is None:
            rest.append(each)
        else:
            left[name] = intersect(left[name], ranges)
    return PushedFilters(left["ledger_id"], left["entry_id"], tuple(rest))


def _ranges(found: Filter) -> Ranges | None:
    """Return the ids, from 0 up, that a filter selects; None if the filter is not supported."""
    if isinstance(found, In):
        if not all(type(value) is int for value in found.value):
            return None
        return ranges_of(value for value in found.value if 0 <= value <= _MOST)
    value = getattr(found, "value", None)
    if type(value) is not int:
        return None
    match found:
        case EqualTo() | EqualNullSafe():
            return _range(value, value)
        case GreaterThan():
            return _range(value + 1, _MOST)
        case GreaterThanOrEqual():
            return _range(value, _MOST)
        case LessThan():
            return _range(0, value - 1)
        case LessThanOrEqual():
            return _range(0, value)
    return None


def _range(low: int, high: int) -> Ranges:
    low, high = max(low, 0), min(high, _MOST)
    return ((low, high),) if low <= high else _NONE

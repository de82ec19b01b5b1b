"""Filters that Spark hands to a source: those on ids say which ledgers and entries are read."""

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
    """What filters leave.

    Attributes:
        ledgers: Ledger ids.
        entries: Entry ids.
        rest: Filters that Spark is to apply by itself.
    """

    ledgers: Ranges
    entries: Ranges
    rest: tuple[Filter, ...]


def push(filters: Iterable[Filter]) -> PushedFilters:
    """Say what filters leave; those that are not in ``rest`` are applied by that exactly."""
    left = {"ledger_id": EVERY, "entry_id": EVERY}
    rest = []
    for each in filters:
        name = ".".join(getattr(each, "attribute", ()))
        if isinstance(each, IsNotNull) and name in COLUMNS:
            continue  # none is ever null
        ranges = _ranges(each) if name in left else None
        if ranges is None:
            rest.append(each)
        else:
            left[name] = intersect(left[name], ranges)
    return PushedFilters(left["ledger_id"], left["entry_id"], tuple(rest))


def _ranges(found: Filter) -> Ranges | None:
    """Return the whole numbers from 0 up that a filter on them leaves; None if that is not known."""
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

"""Encoded entries as Arrow arrays. PyArrow is imported when the first array is made, because it is an extra."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, TypeAlias

from pybk.deferral import np
from pybk.errors import UsageError

if TYPE_CHECKING:
    import numpy.typing as npt
    import pyarrow as pa

Int64s: TypeAlias = "npt.NDArray[np.int64]"

_BINARY_BYTES_MAX: Final = (1 << 31) - 1
"""Bytes that an array of Arrow's ``binary`` holds; its offsets are 32-bit."""


def pyarrow() -> Any:
    """Return the module ``pyarrow``.

    Raises:
        UsageError: PyArrow is not installed.
    """
    try:
        import pyarrow as pa
    except ImportError as error:
        raise UsageError(f"Arrow arrays need PyArrow ({error}); install it: pip install 'pybk[arrow]'") from error
    return pa


def plain_array(values: npt.NDArray[Any], missing: npt.NDArray[np.bool_] | None = None) -> pa.Array:
    """Return numbers or booleans as an array of Arrow.

    ``pyarrow.array`` imports pandas, if that is installed: a third of a second of processor time in each new process.

    Args:
        values: The values, ``(n,)``; numbers are not copied if they are contiguous.
        missing: Whether each of some numbers is null, ``(n,)``; None if none is.

    Raises:
        UsageError: PyArrow is not installed.
    """
    pa = pyarrow()
    if values.dtype == np.bool_:
        return pa.Array.from_buffers(pa.bool_(), len(values), [None, _bits(pa, values)])
    kept = None if missing is None else _bits(pa, np.logical_not(missing))
    numbers = pa.py_buffer(np.ascontiguousarray(values))
    return pa.Array.from_buffers(pa.from_numpy_dtype(values.dtype), len(values), [kept, numbers])


def _bits(pa: Any, values: npt.NDArray[np.bool_]) -> Any:
    return pa.py_buffer(np.packbits(values, bitorder="little"))


def binary_array(buffer: memoryview, starts: Int64s, sizes: Int64s) -> pa.Array:
    """Return pieces of a buffer as an array of Arrow's ``binary``, or of ``large_binary`` from 2 GiB on.

    Arrow copies all pieces in one call, because they are taken out of an array that covers the whole buffer: in it the
    pieces alternate with the bytes between them.

    Args:
        buffer: Bytes, contiguous.
        starts: Where each piece starts in ``buffer``, ``(n,)`` int64, bytes. Pieces must not overlap.
        sizes: Size of each piece, ``(n,)`` int64, bytes.

    Raises:
        UsageError: PyArrow is not installed.

    Cost: One copy of the pieces.
    """
    pa = pyarrow()
    count = len(starts)
    order = np.argsort(starts, kind="stable")
    ends = np.zeros(2 * count + 1, np.int64)
    ends[1::2] = starts[order]
    ends[2::2] = (starts + sizes)[order]
    indices = np.empty(count, np.int64)
    indices[order] = np.arange(1, 2 * count, 2)
    covering = pa.Array.from_buffers(pa.large_binary(), 2 * count, [None, pa.py_buffer(ends), pa.py_buffer(buffer)])
    pieces = covering.take(plain_array(indices))
    return pieces.cast(pa.binary()) if int(sizes.sum()) <= _BINARY_BYTES_MAX else pieces

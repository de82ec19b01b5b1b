"""A ledger and its entries: their bytes, and the keys, digests and seals that prove them."""

from pybk.deferral import deferred

TYPE_CHECKING = False
if TYPE_CHECKING:
    from pybk.ledger.arrow import binary_array as binary_array
    from pybk.ledger.arrow import pyarrow as pyarrow
else:
    __getattr__ = deferred(__name__, {"arrow": "binary_array pyarrow"})

"""Flags that an application sets for a ledger: its type, its tier, and how it is written and read."""

from pybk.flags.behaviour import ReadFlag, WriteFlag
from pybk.flags.hints import StorageHint
from pybk.flags.ledger_type import LEDGER_TYPE_BYTES_MAX, LedgerType

__all__ = ["LedgerType", "LEDGER_TYPE_BYTES_MAX", "StorageHint", "WriteFlag", "ReadFlag"]

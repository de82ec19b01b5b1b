"""The feature level: which formats a store or a cluster writes.

A store and a cluster each have one. New ones begin at the newest level. One that was made by an older pybk keeps its
level, and so stays readable by that pybk, until its owner raises the level with ``pybk upgrade --finalize``. A level is
never lowered. Every pybk reads all released formats, whatever the level.
"""

from __future__ import annotations

from enum import IntEnum
from typing import Final


class FeatureLevel(IntEnum):
    """What may be written.

    ``BASE``: the first formats. ``SEALS``: ledgers whose kind and end are sealed, cookies and catalogs that repeat the
    store's identity, named records and groups in the log, metadata values and descriptions with key epochs.
    """

    BASE = 0
    SEALS = 1


NEWEST_LEVEL: Final = FeatureLevel.SEALS
"""The level of new stores and clusters, and the highest that this version of pybk may work with."""

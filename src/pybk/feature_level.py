"""The feature level: which formats a store or a cluster writes.

A store and a cluster each have one. New ones begin at the newest level. One that was made by an older pybk keeps its
level, and so stays readable by that pybk, until its owner raises the level with ``pybk store upgrade --finalize`` or
``pybk cluster upgrade --finalize``. A level is never lowered. Every pybk reads all released formats, whatever the
level.

A store has no level that changes nothing in a store: raising it would only keep older versions from opening the store.
New directories of bookies have the newest level that changes what a bookie writes to them. So the directory of a bookie
can be given back to the version of the day before, even in a cluster whose level is above that of the directory, as
far as the cluster allows it.
"""

from __future__ import annotations

from enum import IntEnum
from typing import Final


class FeatureLevel(IntEnum):
    """What may be written."""

    BASE = 0
    """The first formats."""

    SEALS = 1
    """Ledgers whose kind and end are sealed, cookies and catalogs that repeat the store's identity, named records and
    groups in the log, metadata values and descriptions with key epochs.
    """

    HEALING = 2
    """Cookies with the state and location of a bookie, which older versions would lose; in clusters only."""

    STREAMS = 3
    """Records of ledger lists in pages, and what cursors record of deliveries."""

    SECRETS = 4
    """Ledgers whose keys are derived from a secret, or from nothing, instead of a password."""


NEWEST_LEVEL: Final = FeatureLevel.SECRETS
"""The level of new clusters, and the highest that this version of pybk may work with."""

NEWEST_STORE_LEVEL: Final = FeatureLevel.SECRETS
"""The level of new stores, and the highest that this version of pybk may open."""

BOOKIE_STORE_LEVEL: Final = FeatureLevel.SEALS
"""The level of the store in the directory of a new bookie: logs and their cursors are entries to it."""

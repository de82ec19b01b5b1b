"""The feature level, which says which formats a store or a cluster writes.

A store and a cluster each have one. New ones begin at the newest level. One that was made by an older pybk keeps its
level, and so stays readable by that pybk, until its owner raises the level with ``pybk store upgrade --finalize`` or
``pybk cluster upgrade --finalize``. A level is never lowered. Every pybk reads all released formats, whatever the
level.

A store never gets a level that changes no format of a store, because raising it would only keep older versions from
opening the store. A new directory of a bookie has the newest level that changes a format in it. So the former version
of pybk can open the directory again, even if the cluster has a higher level, as far as the cluster allows that version.
"""

from __future__ import annotations

from enum import IntEnum
from typing import Final


class FeatureLevel(IntEnum):
    """The levels; each adds formats that may be written."""

    BASE = 0
    """The first formats."""

    SEALS = 1
    """Ledgers whose kind and end are sealed, cookies and catalogs that repeat the store's identity, named records and
    groups in the log, metadata values and descriptions with key epochs.
    """

    HEALING = 2
    """Cookies with the state and location of a bookie, which older versions would lose; in clusters only."""

    STREAMS = 3
    """Records of ledger lists in pages, and the deliveries in the records of cursors."""

    SECRETS = 4
    """Ledgers whose keys are derived from a secret, or from no secret value, instead of a password."""


NEWEST_LEVEL: Final = FeatureLevel.SECRETS
"""The level of new clusters, and the highest that this version of pybk may work with."""

NEWEST_STORE_LEVEL: Final = FeatureLevel.SECRETS
"""The level of new stores, and the highest that this version of pybk may open."""

BOOKIE_STORE_LEVEL: Final = FeatureLevel.SEALS
"""The level of the store of a new bookie; in a bookie's store, logs and their cursors are only entries."""

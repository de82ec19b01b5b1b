"""All workloads by name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from tests.loss.workloads.backups import Backups
from tests.loss.workloads.clusters import Bookies, Files
from tests.loss.workloads.copies import Copied
from tests.loss.workloads.ledgers import Creation, Ledgers, Rebuilt
from tests.loss.workloads.rebuilds import Harmed
from tests.loss.workloads.salvage import Salvaged
from tests.loss.workloads.stores import Full, Moved, Raised, Renewed, Uncookied
from tests.loss.workloads.streams import Blobs, NamedLog, Snapshots, Subscribed, Wal
from tests.loss.workloads.workload import Workload

WORKLOADS: Final[Mapping[str, Workload]] = {
    "creation": Creation(),
    "ledgers": Ledgers(),
    "rebuilt": Rebuilt(),
    "harmed": Harmed(),
    "levels": Raised(),
    "moves": Moved(),
    "catalogs": Renewed(),
    "cookies": Uncookied(),
    "full": Full(),
    "log": NamedLog(),
    "wal": Wal(),
    "subscription": Subscribed(),
    "blobs": Blobs(),
    "snapshots": Snapshots(),
    "backups": Backups(),
    "bookie": Bookies(1),
    "bookies": Bookies(3),
    "salvage": Salvaged(),
    "copies": Copied(),
    "files": Files(),
}

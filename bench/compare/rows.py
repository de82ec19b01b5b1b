"""The measurements that compare two commits: pybk's part of the contests of ``bench`` and ``bench.cluster``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from bench import appending, lifecycle, reading
from bench.cluster import appending as cluster_appending
from bench.cluster import lifecycle as cluster_lifecycle
from bench.cluster import reading as cluster_reading
from bench.contest import Contest, Contestant

_EMBEDDED: Final = (*appending.CONTESTS, *reading.CONTESTS, *lifecycle.CONTESTS)
_CLUSTER: Final = (*cluster_appending.CONTESTS, *cluster_reading.CONTESTS, *cluster_lifecycle.CONTESTS)


def rows() -> Mapping[str, tuple[Contest, Contestant]]:
    """Return the rows by name, such as ``scan: pybk HMAC_SHA256 NVME`` or ``cluster append: pybk CURVE``.

    Left out are contests that are held once, as they have a size of their own and no turns, and those whose figure is
    neither a rate nor a time.
    """
    found = {}
    for prefix, contests in (("", _EMBEDDED), ("cluster ", _CLUSTER)):
        for contest in contests:
            for contestant in contest.contestants:
                if contestant.name.startswith("pybk") and not contest.once and contest.unit in ("/s", "MB/s", "ms"):
                    found[f"{prefix}{contest.name}: {contestant.name}"] = contest, contestant
    return found

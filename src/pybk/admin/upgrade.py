"""``pybk upgrade``: the feature level of a store or a cluster, and what prevents raising it."""

from __future__ import annotations

import argparse
import json
from typing import Final

from pybk.admin.credentials import secret_of
from pybk.cluster import open_cluster
from pybk.errors import UsageError
from pybk.metadata.cluster import Upgrade

_NOT_RAISED: Final = 1


def run_upgrade(parsed: argparse.Namespace) -> int:
    """Run the command; the exit status is 0 if the level is the newest, or could be raised to it, and 1 otherwise."""
    if "://" not in parsed.path:
        raise UsageError(f"{parsed.path} is no metadata URL; name the cluster's, such as zk://host:port/path")
    metadata, _ = open_cluster(parsed.path, secret_of(parsed), create=False)
    with metadata:
        upgrade = metadata.upgrade(finalize=parsed.finalize)
    if parsed.json:
        print(json.dumps(upgrade._asdict()))
    else:
        _print(upgrade, parsed.path)
    return _NOT_RAISED if upgrade.hindrances else 0


def _print(upgrade: Upgrade, target: str) -> None:
    level, newest = (f"{level} ({level.name})" for level in (upgrade.level, upgrade.newest))
    print(f"feature level of {target}: {level}")
    if upgrade.level == upgrade.newest:
        print("this is the newest level that this pybk knows")
    for hindrance in upgrade.hindrances:
        print(f"not ready: {hindrance}")
    for name in upgrade.absent:
        print(f"bookie {name} is not there: it needs a pybk that knows level {newest} when it comes back")
    if upgrade.level < upgrade.newest and not upgrade.hindrances:
        print(
            f"ready for level {newest}; run again with --finalize to raise it, after which older versions are refused"
        )

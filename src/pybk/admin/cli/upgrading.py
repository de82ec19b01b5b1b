"""The verb ``upgrade`` of stores and clusters: show the feature level of a store or a cluster, and raise it."""

from __future__ import annotations

import argparse
import os
from typing import TYPE_CHECKING, Final

from pybk.admin.cli.clusters import metadata_of
from pybk.admin.cli.command_parser import is_url
from pybk.admin.cli.output import SOUND, print_json
from pybk.config import StoreConfig
from pybk.deferral import LateModule
from pybk.errors import CookieError
from pybk.feature_level import NEWEST_STORE_LEVEL
from pybk.storage.directories import find_cookie
from pybk.storage.io.filesystem import OsFileSystem

if TYPE_CHECKING:
    from pybk.metadata.cluster import Upgrade
    from pybk.storage import store as stores
else:
    stores = LateModule("pybk.storage.store")

_NOT_RAISED: Final = 1


def upgrade(parsed: argparse.Namespace) -> int:
    """Run the command; the exit status is 0 if the level is the newest or can be raised to it, and 1 otherwise."""
    if not is_url(parsed.path):
        return _upgrade_store(parsed)
    with metadata_of(parsed) as metadata:
        upgrade = metadata.upgrade(finalize=parsed.finalize)
    if parsed.json:
        print_json(upgrade._asdict())
    else:
        _print(upgrade, parsed.path)
    return _NOT_RAISED if upgrade.hindrances else SOUND


def _upgrade_store(parsed: argparse.Namespace) -> int:
    """Raise the level of the store in a directory that no process has open; nothing can prevent that."""
    root = os.path.abspath(parsed.path)
    cookie = find_cookie(OsFileSystem(), root, None)
    if cookie is None:
        raise CookieError(f"there is no store at {root}; name the directory that LedgerManager.open was given")
    level = cookie.level
    if parsed.finalize and level < NEWEST_STORE_LEVEL:
        store = stores.Store.open(root, config=StoreConfig(background=False))
        try:
            store.raise_level()
            level = store.feature_level
        finally:
            store.close()
    if parsed.json:
        print_json({"level": level, "newest": NEWEST_STORE_LEVEL})
        return SOUND
    print(f"feature level of {root}: {int(level)} ({level.name})")
    if level == NEWEST_STORE_LEVEL:
        print("this is the newest level that this pybk knows")
    else:
        print(
            f"ready for level {int(NEWEST_STORE_LEVEL)} ({NEWEST_STORE_LEVEL.name}); run again with --finalize to "
            "raise it, after which older versions are refused"
        )
    return SOUND


def _print(upgrade: Upgrade, target: str) -> None:
    level, newest = (f"{level} ({level.name})" for level in (upgrade.level, upgrade.newest))
    print(f"feature level of {target}: {level}")
    if upgrade.level == upgrade.newest:
        print("this is the newest level that this pybk knows")
    for hindrance in upgrade.hindrances:
        print(f"not ready: {hindrance}")
    for name in upgrade.absent:
        print(f"bookie {name} is not running: it needs a pybk that knows level {newest} when it starts again")
    if upgrade.level < upgrade.newest and not upgrade.hindrances:
        print(
            f"ready for level {newest}; run again with --finalize to raise it, after which older versions are refused"
        )

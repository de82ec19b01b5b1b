"""A soak of self-healing: ``python -m tests.cluster.soak --minutes 10 --seed 1``.

Five bookies in processes of their own, with three tiers each, repair their cluster with times scaled down. Writers
write, read and delete ledgers of several shapes, digests, flags and tiers; a reader follows. Meanwhile bookies are
killed, stopped, wiped, drained and removed, devices are lost, bits flip, writers are killed, and the metadata store is
interrupted (``faults.py``). Then the faults end. The cluster must become whole by itself, and hold all that was
acknowledged, in each copy (``check.py``). The seed decides which faults come in which order; what they meet is chance.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from pybk.metadata.settings import ClusterSettings
from tests.cluster.inside import SECRET, make_cluster
from tests.cluster.nemesis import TailingReader
from tests.cluster.soak.check import check_ledgers, wait_until_tidy
from tests.cluster.soak.faults import WHOLE_S, Faults, recover_all
from tests.cluster.soak.members import SoakCluster, wait_for_members
from tests.cluster.soak.retention import Retention
from tests.cluster.soak.watch import Watch
from tests.zookeeper_server import ZooKeeperServer, missing

BOOKIES = 5
WRITERS = 2


def scaled(settings: ClusterSettings) -> ClusterSettings:
    """Return settings with seconds instead of minutes and hours."""
    repair = replace(settings.repair, grace_s=5.0, open_grace_s=15.0, recover_abandoned=True, surplus_delay_s=15.0)
    scrub = replace(settings.scrub, light_s=60.0, deep_s=10.0)
    return replace(settings, repair=repair, scrub=scrub)


@contextmanager
def metadata_store(kind: str, directory: Path) -> Iterator[tuple[str, ZooKeeperServer | None]]:
    """Run the metadata store of a cluster; yield its URL, and the server if there is one."""
    if kind == "lmdb":
        yield make_cluster(directory, SECRET), None
        return
    reason = missing()
    assert reason is None, reason
    server = ZooKeeperServer()
    try:
        server.start()
        yield make_cluster(directory, SECRET, url=server.url()), server
    finally:
        server.close()


def soak(directory: Path, seconds: float, seed: int, metadata: str = "lmdb") -> dict[str, Any]:
    """Run the soak, and return its summary; ``wrong`` is empty if all is well."""
    with metadata_store(metadata, directory) as (url, server):
        cluster = SoakCluster(directory, url=url)
        try:
            return _soak(cluster, seconds, seed, server)
        finally:
            cluster.close()


def _soak(cluster: SoakCluster, seconds: float, seed: int, server: ZooKeeperServer | None) -> dict[str, Any]:
    began = time.monotonic()
    cluster.add(BOOKIES)
    watch = Watch(cluster)
    watch.admin.change_settings(scaled, by="the soak")
    wait_for_members(cluster, BOOKIES)
    reader = TailingReader(cluster, cluster.book.open_ledgers, random.Random(f"reader {seed}"))
    faults = Faults(cluster, watch, seed, writers=WRITERS, zookeeper=server)
    retention = Retention(cluster)
    wrong: list[str] = []
    counts: Counter[str] = Counter()
    whole_s = 0.0
    try:
        try:
            watch.wait_whole("at the beginning", WHOLE_S)
            faults.run(seconds)
        finally:
            reader.end()
            retention.end()
        end_writers(cluster)
        watch.say("the faults have ended")
        whole_s = watch.wait_whole("after the faults", WHOLE_S)
        counts["ledgers left at the end"] = recover_all(cluster, watch)
        whole_s += watch.wait_whole("after the recoveries", WHOLE_S)
        checked, wrong = check_ledgers(cluster, watch, reader.seen)
        counts.update(checked + retention.counts)
        wrong += wait_until_tidy(cluster, watch)
    except AssertionError as error:
        wrong.append(str(error))
    watch.end()
    wrong += [*reader.wrong, *retention.wrong, *cluster.book.wrong, *faults.failures]
    return summary(cluster, faults, watch, reader, counts, wrong) | {
        "seed": seed,
        "seconds": round(time.monotonic() - began),
        "seconds until whole at the end": round(whole_s, 1),
    }


def end_writers(cluster: SoakCluster) -> None:
    """Have the writers end once each has finished its ledger."""
    for writer in cluster.writers:
        if writer.alive:
            writer.finish()
    for writer in cluster.writers:
        writer.join()
    cluster.book.take(cluster.writers)


def summary(
    cluster: SoakCluster,
    faults: Faults,
    watch: Watch,
    reader: TailingReader,
    counts: Counter[str],
    wrong: list[str],
) -> dict[str, Any]:
    """Return what was done and found."""
    book = cluster.book
    took = sorted(book.took)
    return {
        "wrong": wrong,
        "faults": dict(sorted(faults.counts.items())),
        "checked": dict(sorted(counts.items())),
        "bookies did": dict(sorted(cluster.totals().items())),
        "longest seconds with a marked ledger": round(watch.short_s, 1),
        "longest seconds from a loss to whole": round(faults.longest_s, 1),
        "looks": dict(sorted(watch.seen.items())),
        "holds": dict(watch.holds.most_common(10)),
        "appends": len(took),
        "append ms": {
            name: round(took[min(len(took) - 1, int(share * len(took)))] / 1e3, 1) if took else 0.0
            for name, share in (("p50", 0.5), ("p99", 0.99), ("max", 1.0))
        },
        "writers' errors": dict(sorted(book.errors.items())),
        "examples": book.texts,
        "reader's errors": dict(sorted(reader.errors.items())),
        "entries followed": reader.seen.total(),
        "first and last": cluster.footprints(),
    }


def main() -> int:
    """Run as the command line says; a failure says where its logs are and which seed it was."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--minutes", type=float, default=10.0, help="how long faults go on; default: 10")
    parser.add_argument("--seed", type=int, default=None, help="default: one by chance")
    parser.add_argument("--metadata", choices=("lmdb", "zk"), default="lmdb", help="the metadata store")
    parser.add_argument("--json", action="store_true", help="print the summary as JSON")
    parser.add_argument("--keep", action="store_true", help="keep the files also if all is well")
    parsed = parser.parse_args()
    seed = random.randrange(1 << 32) if parsed.seed is None else parsed.seed
    directory = Path(tempfile.mkdtemp(prefix="pybk-soak-"))
    sys.stderr.write(f"seed {seed}, in {directory}\n")
    found = soak(directory, 60 * parsed.minutes, seed, parsed.metadata)
    if parsed.json:
        sys.stdout.write(json.dumps(found, indent=1) + "\n")
    else:
        for name, value in found.items():
            sys.stdout.write(f"{name}: {value}\n")
    if found["wrong"]:
        sys.stderr.write(f"seed {seed} failed; the logs are in {directory}\n")
        return 1
    if not parsed.keep:
        shutil.rmtree(directory)
    return 0


if __name__ == "__main__":
    sys.exit(main())

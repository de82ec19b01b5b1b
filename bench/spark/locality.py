"""A contest about where the replica is: on the executor's host, where tasks read its files, or elsewhere."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Final

from bench.cluster.bookies import SECRET_VARIABLE
from bench.contest import Contest, Contestant, Run, Scale, Target
from bench.spark.bookies import Colocated, colocated
from bench.spark.reading import fill, turns
from bench.spark.session import session
from pybk import DigestType, LedgerManager, StoreConfig
from pybk.manager.connect import connect
from pybk.spark import read_local

REMOTE: Final = "remote replica"
LOCAL: Final = "local replica"
FACTOR: Final = 1.3


@contextmanager
def elsewhere(cluster: Colocated, directory: Path) -> Iterator[str]:
    """Have one more bookie, on the host of no executor; yields its name."""
    environment = dict(os.environ)
    if cluster.secret is not None:
        environment[SECRET_VARIABLE] = cluster.secret.decode()
    command = [sys.executable, "-m", "pybk.admin", "bookie", str(directory / "elsewhere"), "--json"]
    with subprocess.Popen(
        [*command, "--listen", "tcp://127.0.0.1:*", "--metadata", cluster.url],
        stdout=subprocess.PIPE,
        env=environment,
    ) as process:
        try:
            assert process.stdout is not None
            yield str(json.loads(process.stdout.readline())["bookie"])
        finally:
            process.kill()


@contextmanager
def replica(local: bool, directory: Path, scale: Scale) -> Iterator[Run]:
    """A ledger of one replica, on one of two bookies."""
    with (
        session(directory) as spark,
        colocated(spark, directory, curve=True) as cluster,
        elsewhere(cluster, directory) as away,
    ):
        near = cluster.bookies[0].bookie_id if local else away
        with LedgerManager(connect(cluster.url, cluster.secret, StoreConfig(), near=near)) as client:
            ledger_id = fill(client, DigestType.HMAC_SHA256, scale.entries, ensemble_size=1)
            [fragment] = client.ledger_metadata(ledger_id).fragments
            assert [bookie.bookie_id for bookie in fragment.ensemble] == [near]
        options = {**cluster.options, "ledger": str(ledger_id)}
        yield turns(read_local(spark, **options), scale)


CONTESTS: Final[Sequence[Contest]] = (
    Contest(
        "local",
        "read_local, HMAC, CURVE",
        "MB/s",
        [
            Contestant(REMOTE, partial(replica, False)),
            Contestant(
                LOCAL,
                partial(replica, True),
                [Target(f">= {FACTOR} x remote", lambda rates: FACTOR * rates[REMOTE])],
            ),
        ],
    ),
)

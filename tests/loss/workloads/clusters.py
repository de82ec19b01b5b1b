"""Clusters of bookies with their metadata in LMDB, and what the commands keep of clusters in files."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from random import Random
from unittest import mock

from pybk.admin.cli import main
from pybk.admin.dev.dev_cluster import DevCluster, DevOptions
from pybk.admin.http.tokens import read_tokens
from pybk.admin.profiles import Profile
from pybk.credentials import read_secret_file
from pybk.manager.connect import open_cluster
from pybk.metadata.export import check_export
from pybk.operations.metadata_repair import export_metadata
from pybk.storage.io.filesystem import OsFileSystem
from pybk.testing import TestCluster, cheap_keys
from tests.loss.workloads.ledgers import append, check_ledgers
from tests.loss.workloads.workload import RECOVERED, Report, ignore


class Bookies:
    """Ledgers on the bookies of one host, which all lose power at the same time.

    Args:
        bookies: How many there are, each of which has all entries.
    """

    def __init__(self, bookies: int) -> None:
        self._bookies = bookies

    def run(self, directory: Path, choice: Random, report: Report) -> None:
        """See :class:`Workload`."""
        OsFileSystem().make_directory(str(directory / "of" / "cluster"))
        with TestCluster(directory / "of" / "cluster", self._bookies) as cluster:
            report("began")
            client = cluster.connect()
            for _ in range(6):
                with client.create_ledger(ensemble_size=self._bookies, insecure=True) as writer:
                    report(f"made {writer.ledger_id}")
                    append(writer, 3, report)
                    append(writer, choice.choice((1, 40)), report)
                report(f"closed {writer.ledger_id}")
                if choice.random() < 0.3:
                    report(f"deleting {writer.ledger_id}")
                    client.delete_ledger(writer.ledger_id)
                    report(f"deleted {writer.ledger_id}")

    def check(self, directory: Path, reports: Sequence[str], report: Report = ignore) -> None:
        """See :class:`Workload`."""
        OsFileSystem().make_directory(str(directory / "of" / "cluster"))  # a first cut may have left nothing
        with TestCluster(directory / "of" / "cluster", self._bookies) as cluster:
            client = cluster.connect()
            check_ledgers(client, [each for each in reports if each != "began"], report)
            with client.create_ledger(ensemble_size=self._bookies, insecure=True) as writer:
                report(f"made {writer.ledger_id}")
                append(writer, 3, report)


class Files:
    """The files of ``pybk dev up`` before it starts processes, a profile, secrets, tokens, and exports of metadata."""

    def run(self, directory: Path, choice: Random, report: Report) -> None:
        """See :class:`Workload`."""
        place = str(directory / "clusters" / "dev")
        with _home(directory), cheap_keys():
            cluster = DevCluster.made(place, "dev", DevOptions(bookies=3))
            report("made")
            cluster.write_profile()
            report("profile")
            for number in range(3):
                main(["secret", "new", str(directory / f"secret{number}"), "--json"])
                report(f"secret{number}")
            for number in range(3):
                main(["token", f"t{number}", "--file", str(directory / "tokens"), "--json"])
                report(f"token t{number}")
            for number in range(3):
                export_metadata(cluster.url, directory / f"export{number}", cluster_secret=cluster.secret)
                report(f"export{number}")

    def check(self, directory: Path, reports: Sequence[str], report: Report = ignore) -> None:
        """See :class:`Workload`."""
        if "made" not in reports:
            report(RECOVERED)
            return
        with _home(directory):
            cluster = DevCluster.found(str(directory / "clusters" / "dev"))
            metadata, _ = open_cluster(cluster.url, cluster.secret, create=False)
            metadata.close()
            assert len(read_tokens(cluster.path("tokens"))) == 1
            assert os.path.getsize(cluster.path("token")) > 0
            if "profile" in reports:
                assert Profile.read("dev").metadata == cluster.url
            tokens = [each.split()[1] for each in reports if each.startswith("token")]
            if tokens:
                found = [token.name for token in read_tokens(directory / "tokens")]
                assert found[: len(tokens)] == tokens
            for each in reports:
                if each.startswith("secret"):
                    assert len(read_secret_file(str(directory / each), private=True)) == 64
                if each.startswith("export"):
                    check_export(str(directory / each))
        report(RECOVERED)


@contextmanager
def _home(directory: Path) -> Iterator[None]:
    with mock.patch.dict(os.environ, XDG_CONFIG_HOME=str(directory / "home" / ".config")):
        yield

"""The second act: a cluster of four processes and two writers; one bookie and one writer are killed, one is paused."""

from __future__ import annotations

import os
import secrets
import signal
import time
from collections.abc import Iterable
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from itertools import chain, islice
from typing import Final
from urllib.parse import quote

from tabulate import tabulate

from demo.child import Child
from demo.progress import meter
from demo.reading import LostEntryError, read_back
from demo.replicas import BookieDirectory, ReplicaContents, fragments_of, unlocked
from demo.source import Source
from demo.writing import Progress
from pybk.errors import PybkError
from pybk.ledger.ledger_metadata import LedgerMetadata
from pybk.manager.connect import open_cluster
from pybk.manager.ledger_manager import LedgerManager

TITLE: Final = "Four bookies in four processes, one killed; a writer killed, another one paused"
NODES: Final = 4
INPUT_BYTES: Final = 4 << 20
PAUSED_AFTER: Final = 3
CHANGE_SECONDS_MAX: Final = 30.0
NODE: Final = "demo.node"
WRITER: Final = "demo.remote_writer"
HEADERS: Final = ["ledger", "entries", "bookie", "held", "bytes", "replica"]


@dataclass(slots=True)
class WriterReport:
    """The sum of a writer process's reports about its ledger.

    Attributes:
        ledger_id: The ledger.
        confirmed: The last acknowledged entry.
        entries: The number of written entries.
        payload_bytes: Their payload bytes.
        seconds: The time that writing them took.
        latencies: The seconds of each single append.
        pause: The seconds of the longest call since the bookie was killed.
    """

    ledger_id: int
    confirmed: int = -1
    entries: int = 0
    payload_bytes: int = 0
    seconds: float = 0.0
    latencies: list[float] = field(default_factory=list)
    pause: float = 0.0

    def add(self, progress: Progress) -> None:
        """Add a report."""
        self.confirmed = progress.confirmed
        self.entries += progress.entries
        self.payload_bytes += progress.payload_bytes
        self.seconds += progress.seconds
        self.latencies += progress.latencies


class Cluster:
    """Four processes with a bookie each, and a client in this process.

    Args:
        directory: The directory of the metadata store and of the bookies.
        source: The lines to write.
        stack: The exit stack that ends the processes.
    """

    def __init__(self, directory: str, source: Source, stack: ExitStack) -> None:
        self.source = source
        self.url = f"lmdb://{quote(os.path.abspath(directory))}/metadata"
        self.secret = secrets.token_bytes(32)
        self.ledger_secret = secrets.token_bytes(32)
        self.paths = {f"node-{number}": os.path.join(directory, f"node-{number}") for number in range(1, NODES + 1)}
        common = {"metadata": self.url, "secret": self.secret.hex()}
        self.nodes = {
            name: stack.enter_context(Child(NODE, {**common, "path": path, "name": name}))
            for name, path in self.paths.items()
        }
        for node in self.nodes.values():
            node.answer()
        self.client = stack.enter_context(LedgerManager.connect(self.url, cluster_secret=self.secret))

    def writer(self) -> Child:
        """Start and return a writer process."""
        source, secret = self.source, self.ledger_secret.hex()
        task = {"files": source.files, "bytes": source.file_bytes, "ledger_secret": secret}
        return Child(WRITER, {**task, "metadata": self.url, "secret": self.secret.hex()})

    def fragments(self, ledger_id: int) -> list[list[str]]:
        """Return the bookies of each fragment of a ledger, as the metadata store names them now."""
        found = self.client.ledger_metadata(ledger_id).fragments
        return [[bookie.bookie_id for bookie in fragment.ensemble] for fragment in found]

    def kill(self, name: str) -> None:
        """Kill a node with SIGKILL."""
        node = self.nodes.pop(name)
        node.signal(signal.SIGKILL)
        node.end()

    def recover(self, ledger_id: int) -> tuple[str, int]:
        """Have the first living node open a ledger with recovery; return the node's name and the last entry."""
        name, node = next(iter(self.nodes.items()))
        node.send({"ledger": ledger_id, "ledger_secret": self.ledger_secret.hex()})
        found = node.answer()
        print(
            f"{name} opened ledger {ledger_id}: fenced, recovered and closed it after entry {found['last']:,} in "
            f"{found['seconds'] * 1e3:,.0f} ms."
        )
        return name, found["last"]

    def end(self) -> None:
        """Have all nodes close their managers, and wait until they have ended."""
        for name, node in self.nodes.items():
            if node.end():
                raise PybkError(f"{name} ended with an error; it is above")


def write_and_kill(cluster: Cluster) -> WriterReport:
    """Kill a bookie while a writer writes, and the writer once writing has resumed; return the writer's reports."""
    total = min(cluster.source.file_bytes, INPUT_BYTES)
    victim = ""
    killed_at = 0.0
    with cluster.writer() as writer, meter("writing to three bookies", total, "B") as bar:
        written = WriterReport(writer.answer()["ledger"])
        for report in writer.reports():
            progress = Progress(*report["progress"])
            written.add(progress)
            bar.update(progress.payload_bytes)
            if victim:
                written.pause = max(written.pause, progress.longest)
                changed = len(cluster.fragments(written.ledger_id)) > 1
                if changed and written.payload_bytes >= total:
                    break
                if not changed and time.monotonic() > killed_at + CHANGE_SECONDS_MAX:
                    raise PybkError(f"{victim} was killed {CHANGE_SECONDS_MAX:.0f} s ago and is still in the ensemble")
            elif written.payload_bytes * 2 >= total:
                victim = cluster.fragments(written.ledger_id)[0][1]
                cluster.kill(victim)
                killed_at = time.monotonic()
        writer.signal(signal.SIGKILL)
        for report in writer.reports():  # reports from before the kill
            written.add(Progress(*report["progress"]))
        if writer.end() != -signal.SIGKILL:
            raise PybkError("the writer process ended by itself; its error is above")
    before, after, *_ = cluster.fragments(written.ledger_id)
    print(
        f"Killed {victim} with SIGKILL: the ensemble changed from {', '.join(before)} to {', '.join(after)}, and "
        f"writing continued; its longest pause was {written.pause * 1e3:,.0f} ms.\n"
        f"Killed writer process {writer.pid} with SIGKILL after it had acknowledged {written.confirmed + 1:,} entries."
    )
    return written


def check_kept(written: WriterReport, last: int) -> None:
    """Raise LostEntryError unless a recovered ledger has all acknowledged entries."""
    if written.confirmed > last:
        raise LostEntryError(
            f"ledger {written.ledger_id} ends with entry {last} after its recovery, but {written.confirmed} was "
            "acknowledged"
        )


def pause_and_refuse(cluster: Cluster) -> WriterReport:
    """Stop a writer, recover its ledger, resume the writer, and check that its next append is refused."""
    with cluster.writer() as writer:
        written = WriterReport(writer.answer()["ledger"])
        for report in islice(writer.reports(), PAUSED_AFTER):
            written.add(Progress(*report["progress"]))
        writer.signal(signal.SIGSTOP)
        print(f"Stopped writer process {writer.pid} with SIGSTOP.")
        _, last = cluster.recover(written.ledger_id)
        writer.signal(signal.SIGCONT)
        refused = ""
        for report in writer.reports():
            if "fenced" in report:
                refused = report["fenced"]
            else:
                written.add(Progress(*report["progress"]))
        status = writer.end()
    check_kept(written, last)
    if not refused:
        raise PybkError(f"the paused writer was not refused; it ended with exit code {status}")
    print(
        f"It continued after SIGCONT; its next append raised LedgerFencedError: {refused}.\n"
        f"None of its {written.confirmed + 1:,} acknowledged entries is lost, and none was acknowledged since."
    )
    return written


def read_all(cluster: Cluster, written: Iterable[WriterReport]) -> None:
    """Read ledgers through the client and compare them with the input."""
    for one in written:
        with cluster.client.open_ledger(one.ledger_id, secret=cluster.ledger_secret) as reader:
            read = read_back(reader, chain.from_iterable(cluster.source.repeated()))
        print(
            f"Read ledger {one.ledger_id} over the network: {read.entries:,} entries, byte for byte, "
            f"{read.entries / max(read.seconds, 1e-9):,.0f} entries/s verified."
        )


def check_replicas(
    cluster: Cluster, metadata: LedgerMetadata, directories: dict[str, BookieDirectory]
) -> tuple[list[list[str]], int]:
    """Check every surviving replica of every fragment of a ledger.

    Returns:
        The rows of the table, and the number of missing entries, counted once per replica.

    Raises:
        LostEntryError: An entry differs, or fewer surviving bookies than the ack quorum hold it.
    """
    opened, _ = open_cluster(cluster.url, cluster.secret, create=False)
    with opened:
        ledger = unlocked(metadata, opened.identity, cluster.ledger_secret)
    rows = []
    lacking = 0
    for fragment, first, last in fragments_of(metadata):
        names = [bookie.bookie_id for bookie in fragment.ensemble]
        found = [directories[name].check(ledger, first, last, cluster.source) for name in names if name in directories]
        for entry_id in set(chain.from_iterable(replica.missing for replica in found)):
            holders = sum(entry_id not in replica.missing for replica in found)
            if holders < metadata.ack_quorum:
                raise LostEntryError(f"{holders} bookies hold ledger {metadata.ledger_id} entry {entry_id}")
        lacking += sum(len(replica.missing) for replica in found)
        held = {replica.bookie_id: replica for replica in found}
        rows += [_row(metadata.ledger_id, first, last, name, held.get(name)) for name in names]
    return rows, lacking


def _row(ledger_id: int, first: int, last: int, name: str, replica: ReplicaContents | None) -> list[str]:
    head = [str(ledger_id), f"{first:,} to {last:,}", name]
    if replica is None:
        return [*head, "", "", "killed"]
    state = "each entry verified"
    if replica.missing:
        state += f"; {len(replica.missing):,} are on the others only"
    return [*head, f"{replica.entries:,}", f"{replica.payload_bytes:,}", state]


def run(directory: str, source: Source) -> None:
    """Play the act in an empty directory.

    Raises:
        LostEntryError: An acknowledged entry is missing or different.
        PybkError: An expected event, such as an ensemble change, did not happen.
    """
    with ExitStack() as stack:
        begin = time.perf_counter()
        cluster = Cluster(directory, source, stack)
        print(
            f"{NODES} processes embed a bookie each and listen on tcp sockets of this host, with CURVE; up in "
            f"{time.perf_counter() - begin:.1f} s. A writer process writes each entry to 3 of them, acknowledged by 2."
        )
        killed = write_and_kill(cluster)
        name, last = cluster.recover(killed.ledger_id)
        check_kept(killed, last)
        print(
            f"All {killed.confirmed + 1:,} acknowledged entries are in it, and {last - killed.confirmed:,} that were "
            "on their way."
        )
        paused = pause_and_refuse(cluster)
        read_all(cluster, (killed, paused))
        ledgers = [cluster.client.ledger_metadata(one.ledger_id) for one in (killed, paused)]
        cluster.end()
        rows: list[list[str]] = []
        lacking = 0
        directories = {}
        for name in cluster.nodes:
            directories[name] = BookieDirectory(name, cluster.paths[name])
            stack.enter_context(closing(directories[name]))
        with meter("reading each replica by itself", len(ledgers), " ledgers") as bar:
            for metadata in ledgers:
                found, missing = check_replicas(cluster, metadata, directories)
                rows += found
                lacking += missing
                bar.update(1)
    print("The bookies have ended; their directories hold:\n")
    print(
        tabulate(
            rows, headers=HEADERS, disable_numparse=True, colalign=["right", "right", "left", *["right"] * 2, "left"]
        )
    )
    print(
        "\nEvery entry is, byte for byte, on "
        + (
            f"two surviving bookies at least; {lacking:,} are missing on a third."
            if lacking
            else "every surviving replica."
        )
    )
    latencies = sorted(killed.latencies)
    print(
        f"Writing: {killed.entries / killed.seconds:,.0f} entries/s; single appends p50 "
        f"{latencies[len(latencies) // 2] * 1e6:,.0f} µs, p99 {latencies[len(latencies) * 99 // 100] * 1e6:,.0f} µs."
    )

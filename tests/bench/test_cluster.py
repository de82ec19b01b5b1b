"""The benchmark of a cluster runs, and measures what it says."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest

from bench.cluster import appending, idle, slowness
from bench.cluster.__main__ import CONTESTS
from bench.cluster.bare import bare_loop
from bench.cluster.bookies import Cluster, process_cpu_seconds
from bench.contest import at_least, at_most, tail_of
from bench.payloads import PAYLOADS
from pybk import LedgerManager, LedgerWriter
from tests.cluster.inside import inside
from tests.waiting import PROCESS_S, WAIT_S, wait_until

pytestmark = pytest.mark.sampled(one_in=3, using="tmp_path")


@pytest.mark.long
def test_contests_run_and_leave_nothing(tmp_path: Path) -> None:
    done = subprocess.run(
        [
            *(sys.executable, "-m", "bench.cluster", "append", "pause"),
            *("--quick", "--seconds", "0.05", "--json", "--directory", str(tmp_path)),
        ],
        capture_output=True,
        text=True,
        timeout=PROCESS_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert list(tmp_path.iterdir()) == []
    figures = {(one["contest"], one["contestant"]): one for one in json.loads(done.stdout)["figures"]}
    assert [name for contest, name in figures if contest == "append"] == [
        "pybk",
        "pybk, CURVE",
        "pybk, a bookie",
        "pybk, a bookie, CURVE",
        "bare loop",
        "bare loop, CURVE",
        "embedded",
    ]
    assert [name for contest, name in figures if contest == "pause"] == ["pybk", "pybk, CURVE"]
    assert all(0 < one["median"] < 10_000 for one in figures.values())
    pybk = figures["append", "pybk"]
    ratio = 1.5 * figures["append", "bare loop"]["median"] / pybk["median"]
    assert pybk["targets"] == [["<= 1.5 x bare loop", ratio]]


def test_every_figure_is_made_with_and_without_curve() -> None:
    for contest in CONTESTS.values():
        ours = [one for one in contest.contestants if one.name.startswith("pybk")]
        assert len([one for one in ours if one.name.endswith("CURVE")]) * 2 == len(ours)


def test_targets_are_those_of_the_bare_loop_with_the_same_encryption() -> None:
    times = {"pybk": 3.0, "bare loop": 1.0, "pybk, CURVE": 3.0, "bare loop, CURVE": 2.0}
    ours = {one.name: one.targets for one in CONTESTS["append"].contestants}
    assert [ours[name][0].ratio(name, times) for name in ("pybk", "pybk, CURVE")] == [0.5, 1.0]
    rates = {name: 1 / time for name, time in times.items()}
    ours = {one.name: one.targets for one in CONTESTS["threads"].contestants}
    assert [ours[name][0].ratio(name, rates) for name in ("pybk", "pybk, CURVE")] == pytest.approx([1 / 1.8, 1 / 0.9])


def test_a_tail_is_given_in_medians() -> None:
    assert tail_of([1.0] * 990 + [7.0] * 10, 100) == pytest.approx(7.0, abs=0.5)
    assert tail_of([2.0] * 1000, 1000) == 1.0


def test_targets_in_words() -> None:
    assert (at_most(0.5).text, at_most(200).text, at_least(60_000).text) == ("<= 0.5", "<= 200", ">= 60,000")


def test_cpu_time_of_a_process_is_measured() -> None:
    before, own = process_cpu_seconds(os.getpid()), time.process_time()
    while time.process_time() < own + 0.05:
        pass
    assert process_cpu_seconds(os.getpid()) - before == pytest.approx(time.process_time() - own, abs=0.02)


def with_all_outstanding(writer: LedgerWriter) -> tuple[float, list[float]]:
    """Append until as many were outstanding as the bench has; return how long that took, and each append."""
    wanted_s = 0.1
    while True:
        first = writer.last_add_confirmed + 1
        entries, seconds, latencies = appending.with_outstanding(writer, wanted_s)
        assert entries == len(latencies) == writer.last_add_confirmed + 1 - first
        if entries >= appending.OUTSTANDING:
            return seconds, latencies
        wanted_s *= 2
        assert wanted_s < WAIT_S


def test_a_cluster_is_measured_as_a_whole(tmp_path: Path) -> None:
    with Cluster(tmp_path, curve=True, bookies=1) as cluster:
        with cluster.client.create_ledger(ensemble_size=1, insecure=True) as writer:
            seconds, latencies = with_all_outstanding(writer)
            assert 0 < min(latencies) <= max(latencies) <= seconds
            before, own = cluster.cpu_seconds(), time.process_time()

            def more_than_own() -> bool:  # the clock of other processes has ticks of 10 ms
                assert appending.outstanding_cpu(cluster, writer, 0.1) > 0
                return cluster.cpu_seconds() - before > time.process_time() - own

            wait_until(more_than_own, "the bookie's time to be in the cluster's")
            assert appending.in_batches(cluster, writer, 0.05) > 0
        with pytest.raises(Exception, match="secret"):
            LedgerManager.connect(cluster.url)


def test_a_slow_bookie_is_stopped_for_half_of_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[object] = []

    def sleep(seconds: float) -> None:
        done.append(seconds)
        if len(done) == 8:
            raise KeyboardInterrupt

    monkeypatch.setattr(os, "kill", lambda pid, which: done.append((pid, which)))
    monkeypatch.setattr(time, "sleep", sleep)
    with pytest.raises(KeyboardInterrupt):
        slowness.slow_down(77)
    turn = [(77, signal.SIGSTOP), slowness.STOPPED_SECONDS, (77, signal.SIGCONT), slowness.STOPPED_SECONDS]
    assert done == turn * 2


def test_a_slow_bookie_stops_again_and_again_and_then_continues(tmp_path: Path) -> None:
    def is_stopped(pid: int) -> bool:
        return Path(f"/proc/{pid}/stat").read_text(encoding="ascii").rsplit(") ", 1)[1][0] == "T"

    with Cluster(tmp_path, curve=False, bookies=1) as cluster:
        with cluster.client.create_ledger(ensemble_size=1, insecure=True) as writer:
            (bookie,) = cluster.client.ledger_metadata(writer.ledger_id).fragments[0].ensemble
        pid = cluster.pid(bookie.bookie_id)
        with slowness.slowed(pid):
            for _ in range(3):
                wait_until(lambda: is_stopped(pid))
                wait_until(lambda: not is_stopped(pid))
        assert not is_stopped(pid)


def test_memory_growth_includes_memory_that_was_freed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with (
        Cluster(tmp_path, curve=False, bookies=1) as cluster,
        cluster.client.create_ledger(ensemble_size=1, insecure=True) as writer,
    ):
        assert slowness.PAGE_MIB <= slowness.growth(cluster, writer, 0.05) < slowness.GROWTH_MIB
        monkeypatch.setattr(slowness, "in_batches", lambda *_: 0.0)
        assert slowness.growth(cluster, writer, 0.05) < 1
        monkeypatch.setattr(slowness, "in_batches", lambda *_: len(b"x" * (80 << 20)))
        assert slowness.growth(cluster, writer, 0.05) > 70


@pytest.mark.parametrize("curve", [False, True])
def test_the_bare_loop_counts_each_batch_once(curve: bool, tmp_path: Path) -> None:
    with bare_loop(tmp_path, curve=curve) as loop:
        sent, begin = loop.number, time.perf_counter()
        reached, latencies = loop.run(4, 2, 0.1)
        took = time.perf_counter() - begin
        assert len(latencies) == loop.number - sent
    assert 0.1 <= 4 * len(latencies) / reached <= took
    files = sorted(tmp_path.iterdir())
    assert len(files) == 3
    assert sum(PAYLOADS[3] in file.read_bytes() for file in files) >= 2


def test_the_cost_of_rest_is_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked: list[tuple[str, int]] = []

    @contextmanager
    def cluster(directory: Path, *, curve: bool, bookies: int = 3) -> Iterator[SimpleNamespace]:
        asked.append((directory.name, bookies))
        with inside(directory, count=min(bookies, 3), secret=b"secret" * 6 if curve else None) as found:
            yield SimpleNamespace(url=found.url, secret=found.secret, client=found.connect(), pids=[os.getpid()])

    monkeypatch.setattr(idle, "Cluster", cluster)
    assert idle.main(["--seconds", "0.01", "--followers", "2", "--directory", str(tmp_path)]) == 0
    assert asked == [("three", 3), ("many", 20)]
    assert list(tmp_path.iterdir()) == []
    lines = capsys.readouterr().out.splitlines()
    assert [line.partition("  ")[0] for line in lines] == [
        "client, 2 readers of 1 ledgers, followed by nobody",
        "client, 2 readers of 1 ledgers, followed by threads",
        "client, 2 readers of 1 ledgers, followed by tasks",
        "client, 2 readers of 2 ledgers, followed by threads",
        "client, 2 readers of 2 ledgers, followed by tasks",
        "20 bookies together",
    ]
    assert all("% of a core (target " in line for line in lines)

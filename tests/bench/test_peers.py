"""The benchmark of peers compares pybk with the peers that are installed, and reports the missing ones."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from bench.cluster import bookkeeper, etcd, jetstream
from bench.cluster.peers import OTHERS, contests
from bench.contest import Contestant
from tests.waiting import PROCESS_S


def test_each_contest_has_bookkeeper_beside_pybk_and_as_a_target() -> None:
    for contest in contests(True, ()):
        names = [one.name for one in contest.contestants]
        assert {"pybk", "pybk, CURVE"} < set(names)
        if contest.name == "batches":  # BookKeeper's client has none
            continue
        assert names[-1] == bookkeeper.NAME
    compared = {contest.name for contest in contests(True, ()) if targets(contest.contestants[0], bookkeeper.NAME)}
    assert compared == {"append", "random", "cpu"}


def targets(contestant: Contestant, whom: str) -> list[str]:
    return [target.text for target in contestant.targets if target.text.endswith(whom)]


def test_without_bookkeeper_nothing_is_compared_with_it() -> None:
    for contest in contests(False, ()):
        assert all(one.name != bookkeeper.NAME for one in contest.contestants)
        assert not any(targets(one, bookkeeper.NAME) for one in contest.contestants)


def test_a_target_of_bookkeeper_is_what_it_reached_in_the_same_round() -> None:
    held = {contest.name: contest.contestants[0].targets for contest in contests(True, ())}
    figures = {"pybk": 0.5, "bare loop": 1.0, "bare round trip": 1.0, bookkeeper.NAME: 0.25}
    assert [target.ratio("pybk", figures) for target in held["append"]] == [2.4, 0.5]
    assert [target.ratio("pybk", figures) for target in held["random"]] == [3.0, 0.5]
    assert [target.ratio("pybk", figures) for target in held["cpu"]] == pytest.approx([0.15])


@pytest.mark.parametrize(
    ("peer", "missing", "remedy"),
    [
        (bookkeeper, "there is no java here", "apt install default-jdk-headless maven"),
        (jetstream, "there is no nats-server here", "https://nats.io"),
        (etcd, "there is no etcd here", "apt install etcd-server"),
    ],
)
def test_what_is_missing_is_named_with_its_remedy(
    peer: ModuleType, missing: str, remedy: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(bookkeeper, "CLASSPATH", tmp_path / "classpath")
    assert peer in (bookkeeper, *OTHERS)
    told = peer.why_not()
    assert missing in told
    assert remedy in told


def test_a_server_that_cannot_sync_each_message_is_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "nats-server").write_text("#!/bin/sh\necho 'nats-server: v2.9.10'\n", encoding="utf-8")
    (tmp_path / "nats-server").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    assert "older than 2.10, and cannot sync each message (nats-server: v2.9.10)" in jetstream.why_not()


def test_a_failure_of_maven_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("java", "javac", "mvn"):
        (tmp_path / name).write_text("#!/bin/sh\necho '[ERROR] no such registry'\nexit 1\n", encoding="utf-8")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.setattr(bookkeeper, "BUILT", tmp_path / "built")
    monkeypatch.setattr(bookkeeper, "CLASSPATH", tmp_path / "built" / "classpath")
    assert bookkeeper.why_not() == "Maven failed: no such registry"
    assert not bookkeeper.CLASSPATH.exists()


def run(tmp_path: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "bench.cluster.peers", *arguments, "--quick", "--seconds", "0.05"]
    command += ["--directory", str(tmp_path)]
    return subprocess.run(command, capture_output=True, text=True, timeout=PROCESS_S, check=True)


@pytest.mark.sampled(one_in=3, using="tmp_path")
def test_what_is_left_out_is_said_below_the_table(tmp_path: Path) -> None:
    told = run(tmp_path, "random", "--without-bookkeeper").stdout
    assert "BookKeeper is left out: not wanted.\n" in told
    assert "bare round trip, CURVE" in told
    assert list(tmp_path.iterdir()) == []


@pytest.mark.long
def test_bookkeeper_does_the_same_work(tmp_path: Path) -> None:
    if why := bookkeeper.why_not():
        pytest.skip(why)
    told = run(tmp_path, "append", "random", "outstanding", "scan", "tail", "cpu", "--json").stdout
    figures = {(one["contest"], one["contestant"]): one["median"] for one in json.loads(told)["figures"]}
    for contest in ("append", "random", "outstanding", "scan", "tail", "cpu"):
        assert figures[contest, bookkeeper.NAME] > 0
        assert figures[contest, "pybk"] > 0
    assert list(tmp_path.iterdir()) == []

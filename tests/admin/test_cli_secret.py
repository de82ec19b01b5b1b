"""The command ``pybk secret``: each step, their order, and what a client experiences that lacks the new secret."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from pybk import LedgerManager, MetadataForgedError, Secret
from pybk.admin.cli import main
from tests.cluster.inside import SECRET, Inside, inside
from tests.private_files import write_private
from tests.waiting import wait_until

NEXT = b"the secret that a cluster gets --"
PASSWORD = b"a password of some length"


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return write_private(tmp_path / "secret", SECRET)


@pytest.fixture
def cluster(tmp_path: Path, file: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Inside]:
    monkeypatch.setattr("pybk.bookie.keeper.STATE_SECONDS", 0.1)
    monkeypatch.setattr("pybk.bookie.keeper.POSITION_SECONDS", 0.05)
    monkeypatch.setattr("pybk.transport.server.OLD_SILENCE_NS", 10**9 // 2)
    monkeypatch.setattr("pybk.metadata.authenticated_values.SECRETS_AGE_SECONDS", 0.1)
    with inside(tmp_path / "cluster", count=0) as cluster:
        cluster.given = Secret(file=str(file))
        cluster.bookies = [cluster.open_bookie(0)]
        yield cluster


class Steps:
    """Runs ``pybk secret VERB``, and checks that neither secret is printed."""

    def __init__(self, cluster: Inside, file: Path, capsys: pytest.CaptureFixture[str]) -> None:
        self._arguments = [cluster.url, "--cluster-secret-file", str(file)]
        self._capsys = capsys

    def run(self, verb: str, *options: str) -> tuple[int, str]:
        """Return the exit status and what is printed."""
        status = main(["secret", verb, *self._arguments, *options])
        said = "".join(self._capsys.readouterr())
        assert not [each for each in (SECRET, NEXT) if each.decode() in said]
        return status, said

    def expect(self, verb: str, status: int, *says: str) -> None:
        """Run a verb, and check its exit status and what it says."""
        found, said = self.run(verb)
        assert found == status, said
        assert all(each in said for each in says), said

    def status(self) -> dict[str, Any]:
        """Return what ``pybk secret status --json`` shows."""
        return dict(json.loads(self.run("status", "--json")[1]))


def ledger_of(client: LedgerManager, payload: bytes) -> int:
    with client.create_ledger(password=PASSWORD, ensemble_size=1) as writer:
        writer.append(payload)
    return writer.ledger_id


def test_each_step_says_what_comes_next_and_is_refused_out_of_turn(
    cluster: Inside, file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    steps, late_file = Steps(cluster, file, capsys), file.with_name("late")
    late_file.write_bytes(SECRET)
    late = LedgerManager.connect(cluster.url, cluster_secret=Secret(file=str(late_file)))
    with late, cluster.connect() as client:
        before = ledger_of(late, b"before")
        steps.expect("status", 0, "secret in use               0\n", "next: to replace the secret, make FILE.next")
        steps.expect("add", 2, "give the cluster's secret and the new one")
        write_private(file.with_name("secret.next"), NEXT)
        steps.expect("switch", 2, "add another one first")
        steps.expect("retire", 2, "there is none before it to retire")
        steps.expect("add", 0, "valid                       0, 1\n", "to all clients, then `pybk secret switch`")
        steps.expect("retire", 2, "switch to it first")
        wait_until(lambda: not steps.status()["lacking"])
        steps.expect("switch", 0, "secret in use               1\n", "next: `pybk secret reseal`")
        made = ledger_of(client, b"after")
        with pytest.raises(MetadataForgedError, match="give the new one"):
            late.open_ledger(made, password=PASSWORD)
        late.open_ledger(before, password=PASSWORD).read(0, 0)  # a value and a session of the old secret still count
        steps.expect("retire", 3, "values were written with the old secret", "reseal")
        steps.expect("reseal", 0, "values of another secret")
        late_file.with_name("late.next").write_bytes(NEXT)
        steps.expect("switch", 0, "secret in use               1\n")
        wait_until(lambda: late.open_ledger(made, password=PASSWORD).read(0, 0))
        wait_until(lambda: steps.run("retire")[0] == 0)
        found = steps.status()
        assert (found["valid"], found["retired"], found["hindrances"]) == ([1], [0], [])
        assert found["next"].startswith("`mv FILE.next FILE` at every member")
        steps.expect("retire", 0)
        steps.expect("reseal", 0)
    old = file.with_name("old")
    write_private(old, SECRET)
    Steps(cluster, old, capsys).expect("status", 2, "which was retired: give secret 1")


def test_a_session_of_the_old_secret_holds_up_its_retirement(
    cluster: Inside, file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    steps, late_file = Steps(cluster, file, capsys), file.with_name("late")
    late_file.write_bytes(SECRET)
    with LedgerManager.connect(cluster.url, cluster_secret=Secret(file=str(late_file))) as late:
        writer = late.create_ledger(password=PASSWORD, ensemble_size=1)
        write_private(file.with_name("secret.next"), NEXT)
        steps.expect("add", 0)
        wait_until(lambda: not steps.status()["lacking"])
        steps.expect("switch", 0)
        steps.expect("reseal", 0)

        def counted() -> int:
            writer.append(b"an entry")
            return int(steps.status()["old_sessions"].get("bookie-0", 0))

        def advised() -> bool:  # by one look, because a session that is silent for a while does not count
            writer.append(b"an entry")
            found = steps.status()
            told = "give FILE.next to the clients that have the sessions" in found["next"]
            return bool(told and found["old_sessions"].get("bookie-0") == 1)

        wait_until(advised)
        late_file.with_name("late.next").write_bytes(NEXT)
        steps.expect("switch", 0)
        wait_until(lambda: counted() == 0)
        wait_until(lambda: steps.status()["next"] == "`pybk secret retire`")
        wait_until(lambda: steps.run("retire")[0] == 0)
        writer.append(b"an entry")
        writer.close()


def test_a_bookie_without_the_new_secret_holds_up_the_switch(
    cluster: Inside, file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cluster.given = SECRET
    cluster.open_bookie(1)
    write_private(file.with_name("secret.next"), NEXT)
    steps = Steps(cluster, file, capsys)
    steps.expect("add", 0, "bookies without the newest  bookie-")
    wait_until(lambda: steps.status()["lacking"] == ["bookie-1"])
    steps.expect("switch", 3, "bookie-1 does not have secret 1", "restart it")
    assert steps.status()["current"] == 0

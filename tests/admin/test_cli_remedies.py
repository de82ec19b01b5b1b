"""Each command that what commands and stores print names is run as it is printed, and does what it is named for."""

from __future__ import annotations

from pathlib import Path

import pytest

from pybk import (
    ClusterAdmin,
    IllegalOperationError,
    LedgerManager,
    LedgerUnsealedError,
    Log,
    LogEnd,
    StorageHint,
    WriteAheadLog,
)
from pybk.admin.profiles import Profile
from pybk.admin.standalone_console import bookie_ports
from pybk.errors import UsageError
from pybk.feature_level import FeatureLevel
from pybk.metadata.registration import BookieState
from tests.cluster.inside import SECRET, Inside, inside
from tests.healing import test_embedded_scrub as embedded
from tests.healing.test_embedded_scrub import flip
from tests.private_files import write_private
from tests.remedies import COMMAND, Cases, Shell, filled, remedies
from tests.sealing import PASSWORD, open_at
from tests.storage.real_store import open_quick
from tests.waiting import wait_until

CASES = Cases()


def with_profile(cluster: Inside) -> str:
    """Have the profile ``here`` stand for the cluster where a command names none; returns the URL."""
    Profile(name="here", metadata=cluster.url).write()
    return cluster.url


# ---- stores ------------------------------------------------------------------------------------------------------


@CASES.names(
    "manager/ledger_manager.py:LedgerManager._reseal",
    "manager/ledger_manager.py:HOW_TO_SEAL",
    "admin/cli/store.py:_summary",
)
def a_ledger_without_a_seal(shell: Shell) -> None:
    path = shell.path / "store"
    with open_at(FeatureLevel.BASE, path) as manager:
        with manager.create_ledger(password=PASSWORD) as writer:
            writer.append(b"entry")
        with pytest.raises(IllegalOperationError) as raised:
            manager.reseal(writer.ledger_id, password=PASSWORD)
    upgrade, _ = shell.commands("manager/ledger_manager.py:LedgerManager._reseal", str(raised.value))
    shell.run(upgrade, path, "--finalize")
    with LedgerManager.open(path) as manager, pytest.raises(LedgerUnsealedError) as refused:
        manager.check_seal(writer.ledger_id, password=PASSWORD, require=True)
    reseal = shell.command("manager/ledger_manager.py:HOW_TO_SEAL", str(refused.value))
    text = shell.said("store", "verify", path, status=0)
    assert shell.command("admin/cli/store.py:_summary", text) == reseal
    shell.run(reseal, path, writer.ledger_id)
    with LedgerManager.open(path) as manager:
        assert manager.check_seal(writer.ledger_id, password=PASSWORD, require=True)
        with manager.open_ledger(writer.ledger_id, password=PASSWORD) as reader:
            assert [entry.payload for entry in reader.read(0, 0)] == [b"entry"]
    assert reseal not in shell.said("store", "verify", path, status=0)


@CASES.names("healing/scrub.py:EmbeddedScrub.remedy")
def a_record_that_a_scrub_found_damaged(shell: Shell) -> None:
    path = shell.path / "store"
    with open_quick(path, scrub_seconds=0) as manager:
        ledger_id = embedded.fill(manager, StorageHint.NVME)
        manager.checkpoint()
    copies = {each: each.read_bytes() for each in path.rglob("*") if each.is_file()}
    flip(path, b"7 " + embedded.SECRET)
    with open_quick(path, scrub_seconds=0) as manager:
        manager.scrub()
        wait_until(lambda: manager.health().state == "degraded")
        text = manager.health().reason
    shown = shell.run(shell.command("healing/scrub.py:EmbeddedScrub.remedy", text), status=1)
    named = [each for each in copies if str(each.relative_to(path)) in shown]
    assert named, shown
    for each in named:
        each.write_bytes(copies[each])
    with open_quick(path, scrub_seconds=0) as manager:
        assert not manager.scrub().damaged
        with manager.open_ledger(ledger_id) as reader:
            assert len(list(reader)) == 200


@CASES.names("streams/record_damage.py:_gives_up")
def a_record_of_a_log_that_was_changed(shell: Shell) -> None:
    path = shell.path / "store"
    where = "streams/record_damage.py:_gives_up"
    with open_quick(path) as manager:
        with WriteAheadLog.open(manager, "my log") as wal, Log.open(manager, "my log") as log, log.writer() as writer:
            for number in range(5):
                wal.append(b"record %d of the WAL" % number)
                writer.append(b"record %d of the log" % number)
            log.subscribe("first", start=LogEnd.EARLIEST).close()
        manager.checkpoint()
    for kind, what in (("wal", "WAL"), ("log", "log")):
        flip(path, b"record 2 of the %s" % what.encode())
        text = shell.said(kind, "cat", path, "my log", status=1)
        give_up, read_on = shell.commands(where, text)
        left = f"record 3 of the {what}\nrecord 4 of the {what}\n"
        assert shell.run(read_on, PATH=path) == left
        force = ("--force",) if kind == "log" else ()
        if force:
            assert "subscription 'first' may need" in shell.run(give_up, "--yes", PATH=path, status=2)
        shell.run(give_up, "--yes", *force, PATH=path)
        assert shell.said(kind, "cat", path, "my log", status=0) == left


@CASES.names("admin/cli/permissions.py:_print")
def files_that_others_may_read(shell: Shell) -> None:
    path = shell.path / "store"
    LedgerManager.open(path).close()
    path.chmod(0o755)
    text = shell.said("permissions", path, status=1)
    shell.run(shell.command("admin/cli/permissions.py:_print", text))
    shell.said("permissions", path, status=0)


# ---- clusters ----------------------------------------------------------------------------------------------------


@CASES.names("admin/cli/scrub.py:_scrub_store", "admin/cli/scrub.py:_scrub", "admin/cli/store.py:_verify")
def a_damaged_record_of_a_bookie(shell: Shell) -> None:
    with inside(shell.path) as cluster:
        with cluster.connect().create_ledger(password=PASSWORD) as writer:
            writer.append_many([b"%d %s" % (number, embedded.SECRET) for number in range(30)])
        root = shell.path / "bookie-1"
        cluster.bookies[1].checkpoint()
        flip(root, b"7 " + embedded.SECRET)
        status = shell.command("admin/cli/scrub.py:_scrub_store", shell.said("scrub", root, status=1))
        assert shell.command("admin/cli/store.py:_verify", shell.said("store", "verify", root, status=1)) == status
        shell.run(status, URL=cluster.url)
        asked = shell.said("scrub", cluster.url, status=0)
        shell.run(shell.command("admin/cli/scrub.py:_scrub", asked))


@CASES.names("admin/cli/bookie.py:_drain")
def a_drain_that_nobody_waits_for_any_more(shell: Shell) -> None:
    with inside(shell.path) as cluster:
        client = cluster.connect()
        admin = ClusterAdmin(client)

        def state_of(name: str) -> BookieState:
            (state,) = (each.state for each in admin.bookies() if each.name == name)
            return state

        with client.create_ledger(ensemble_size=1, write_quorum=1, ack_quorum=1, password=PASSWORD) as writer:
            writer.append(b"entry")
            name = writer.metadata.fragments[-1].ensemble[0].bookie_id
            with shell.running("pybk bookie drain --wait", cluster.url, name) as process:
                wait_until(lambda: process.poll() is not None or state_of(name) is BookieState.DRAINING, pause_s=0.1)
            shell.run(shell.command("admin/cli/bookie.py:_drain", shell.ended))
        assert state_of(name) is BookieState.ACTIVE


@CASES.names("admin/cli/ledger.py:_check_bookie")
def a_bookie_that_a_cluster_never_had(shell: Shell) -> None:
    with inside(shell.path, count=1) as cluster:
        text = shell.said("ledger", "list", cluster.url, "--bookie", "nobody")
        assert "bookie-0" in shell.run(shell.command("admin/cli/ledger.py:_check_bookie", text))


@CASES.names("admin/cli/probing.py:_takes_none")
def a_bookie_that_does_not_run(shell: Shell) -> None:
    with inside(shell.path, count=2) as cluster:
        url = with_profile(cluster)
        for running in (1, 0):
            cluster.bookies[running].close()
            text = shell.said("bookie", "probe", url, "bookie-1", status=3)
            assert "bookie-1" in shell.run(shell.command("admin/cli/probing.py:_takes_none", text))
        cluster.open_bookie(1)
        shell.said("bookie", "probe", url, "bookie-1", status=0)


@CASES.names("admin/cli/cluster_settings.py:_current")
def a_setting_that_there_is_not(shell: Shell) -> None:
    with inside(shell.path, count=1) as cluster:
        url = with_profile(cluster)
        text = shell.said("cluster", "settings", "set", url, "repair.nothing=1")
        assert "repair.grace_s" in shell.run(shell.command("admin/cli/cluster_settings.py:_current", text))


# ---- options -----------------------------------------------------------------------------------------------------


@CASES.names("admin/cli/bookie.py:_serve")
def options_of_a_bookie_that_are_missing(shell: Shell) -> None:
    text = shell.said("bookie", shell.path / "bookie")
    assert "cluster.metadata" in shell.run(shell.command("admin/cli/bookie.py:_serve", text))


@CASES.names("admin/standalone_console.py:_token_in")
def a_file_that_has_no_token(shell: Shell) -> None:
    file = write_private(shell.path / "token", b"no token\n")
    ports = shell.path / "ports"
    ports.write_text('b1 = "http://127.0.0.1:9464"\n')
    with pytest.raises(UsageError) as raised:
        bookie_ports(str(ports), str(file))
    command = shell.command("admin/standalone_console.py:_token_in", str(raised.value))
    token = shell.run(command, "console", "--file", shell.path / "tokens")
    write_private(file, token.encode())
    assert bookie_ports(str(ports), str(file)).token == token.strip()


@pytest.mark.parametrize("name", CASES)
def test_a_remedy_that_a_command_names_works(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYBK_CLUSTER_SECRET", SECRET.decode())
    monkeypatch.setenv("PYBK_PASSWORD", PASSWORD.decode())
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    if name in ("a_bookie_that_does_not_run", "a_setting_that_there_is_not"):
        monkeypatch.setenv("PYBK_PROFILE", "here")
    CASES.check(name, Shell(tmp_path, capsys))


SAME = {"admin/cli/spark.py:_summary": "admin/cli/store.py:_summary"}
"""Texts that name the remedy of another one for the same state."""


def test_what_names_the_same_remedy_names_it_alike() -> None:
    for other, one in SAME.items():
        first, second = (
            {command for text in remedies("")[where] for command in COMMAND.findall(filled(text, "x"))}
            for where in (other, one)
        )
        assert first <= second, other
